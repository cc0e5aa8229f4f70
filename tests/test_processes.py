"""Two processes that train together, save together, lose one of them, and start again."""

import os
import signal
import socket
import subprocess
import sys

import numpy as np

from tests.helpers import ROOT

# Arguments: process, port, folder, whether to start from the checkpoint.
PROGRAM = """
import os, signal, sys
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
process, port, folder, again = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "again"
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
import jax.numpy as jnp, numpy as np, optax, orbax.checkpoint as ocp, sparsity
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

assert jax.device_count() == 4 and jax.local_device_count() == 2
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

def put(x, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
params = {"b": put(draw(16)), "in": put(draw(8, 16) / 3, "data"),
          "out": put(draw(16, 4) / 4, "data")}
batches = [(draw(8, 8), draw(8, 4)) for _ in range(6)]
updater = sparsity.create_updater_from_config(
    {"algorithm": "rigl", "sparsity": 0.5, "update_freq": 2, "update_start_step": 1,
     "update_end_step": 5, "use_packed_masks": True})
tx = updater.wrap_optax(optax.adam(0.01))
shardings = sparsity.sharding_like(params, jax.eval_shape(tx.init, params))
state = jax.jit(tx.init, out_shardings=shardings)(params)

@jax.jit
def train_step(params, state, x, y):
    loss = lambda p: jnp.mean((jnp.tanh(x @ p["in"] + p["b"]) @ p["out"] - y) ** 2)
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), jax.lax.with_sharding_constraint(state, shardings)

with ocp.CheckpointManager(f"{folder}/run") as manager:
    if again:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (params, state))
        params, state = manager.restore(2, args=ocp.args.StandardRestore(like))
        assert int(state.count) == 3
    for step in range(int(state.count), 6):
        x, y = (put(part, "data") for part in batches[step])
        params, state = train_step(params, state, x, y)
        if step == 2 and not again:
            manager.save(step, args=ocp.args.StandardSave((params, state)))
            manager.wait_until_finished()
    found = multihost_utils.process_allgather((params, state.masks), tiled=True)
    if process == 0:
        leaves = jax.tree.leaves(found)
        np.savez(f"{folder}/{'restarted' if again else 'unbroken'}.npz", *leaves)
    multihost_utils.sync_global_devices("saved")
    if not again:
        if process == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:  # the other one hangs or fails in a collective
            params, state = train_step(params, state, x, y)
            jax.block_until_ready(params)
"""


def _start(folder, how):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for process in (0, 1):
        with open(folder / f"{how}{process}.log", "w", encoding="utf-8") as log:
            command = [sys.executable, "-c", PROGRAM, str(process), port, str(folder), how]
            env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    return processes


def test_a_run_that_lost_a_process_ends_with_the_weights_of_an_unbroken_one(tmp_path):
    processes = []
    try:
        survivor, killed = processes = _start(tmp_path, "first")
        assert killed.wait() == -signal.SIGKILL, (tmp_path / "first1.log").read_text()[-3000:]
        survivor.kill()
        restarted = _start(tmp_path, "again")
        processes = [*processes, *restarted]
        for process in restarted:
            assert process.wait() == 0, (tmp_path / "again0.log").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    unbroken, restarted = (np.load(tmp_path / f"{run}.npz") for run in ("unbroken", "restarted"))
    assert len(unbroken.files) == 5  # three parameters, two masks
    for name in unbroken.files:
        np.testing.assert_array_equal(restarted[name], unbroken[name])
    assert np.unpackbits(unbroken["arr_3"]).sum() == 64  # half of 8 x 16
    assert np.count_nonzero(unbroken["arr_1"]) <= 64
