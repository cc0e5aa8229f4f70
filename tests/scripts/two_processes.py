"""One of two processes that train together, on two devices each, save, and may lose one of them.

    python -m tests.scripts.two_processes PROCESS PORT FOLDER first|again

A `first` run saves after the third of six steps, writes how it ends, and then process 1 kills
itself while the other goes on. A run that begins `again` starts from what was saved.
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import sparsity
from tests import helpers
from tests.lowering import share_contexts

STEPS, SAVED = 6, 2


def main(process, port, folder, mode):
    again = mode == "again"
    share_contexts()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(process))
    assert (jax.device_count(), jax.local_device_count()) == (4, 2)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def put(x, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    params = {
        "b": put(draw(16)),
        "in": put(draw(8, 16) / 3, "data"),
        "out": put(draw(16, 4) / 4, "data"),
    }
    batches = [(draw(8, 8), draw(8, 4)) for _ in range(STEPS)]
    updater = helpers.make_updater("rigl", sparsity=0.5, update_end_step=5, use_packed_masks=True)
    tx = updater.wrap_optax(optax.adam(0.01))
    shardings = sparsity.sharding_like(params, jax.eval_shape(tx.init, params))
    state = jax.jit(tx.init, out_shardings=shardings)(params)

    @jax.jit
    def train_step(params, state, x, y):
        loss = lambda p: jnp.mean((jnp.tanh(x @ p["in"] + p["b"]) @ p["out"] - y) ** 2)  # noqa: E731
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        state = jax.lax.with_sharding_constraint(state, shardings)
        return optax.apply_updates(params, updates), state

    with ocp.CheckpointManager(f"{folder}/run") as manager:
        if again:
            like = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                (params, state),
            )
            params, state = manager.restore(SAVED, args=ocp.args.StandardRestore(like))
            assert int(state.count) == SAVED + 1
        for step in range(int(state.count), STEPS):
            x, y = (put(part, "data") for part in batches[step])
            params, state = train_step(params, state, x, y)
            if step == SAVED and not again:
                manager.save(step, args=ocp.args.StandardSave((params, state)))
                manager.wait_until_finished()
        actual = multihost_utils.process_allgather((params, state.masks), tiled=True)
        if process == "0":
            leaves = jax.tree.leaves(actual)
            np.savez(f"{folder}/{'restarted' if again else 'unbroken'}.npz", *leaves)
        multihost_utils.sync_global_devices("saved")
        if not again:
            if process == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:  # the other one hangs or fails in a collective
                params, state = train_step(params, state, x, y)
                jax.block_until_ready(params)


if __name__ == "__main__":
    main(*sys.argv[1:])
