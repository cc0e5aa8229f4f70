"""A run on a mesh that is saved, and goes on there, on another mesh and on one device."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsity
from tests import helpers
from tests.scripts.devices import scores

SPECS = {"kernel": P("a", "b"), "bias": P("b")}


def a_run_goes_on_on_another_mesh_and_on_one_device(devices):
    small = jax.sharding.Mesh(
        np.array(jax.devices()[:4]).reshape(4, 1), ("a", "b"), axis_types=devices.mesh.axis_types
    )
    params = {"kernel": jnp.asarray(scores(16, 64)), "bias": jnp.asarray(scores(64, seed=1))}
    updater = helpers.make_updater(
        "rigl", update_freq=1, update_start_step=0, update_end_step=1, use_packed_masks=True
    )
    tx = updater.wrap_optax(optax.sgd(0.5, momentum=0.5))

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.tree.map(lambda w: w * 0.5, params), state, params)
        return optax.apply_updates(params, updates), state

    def place(mesh):
        if mesh is None:
            return jax.device_put(params, jax.devices()[0])
        put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
        return jax.tree.map(put, params, SPECS)

    def describe_state(params):
        shapes = jax.eval_shape(tx.init, params)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            *(shapes, sparsity.sharding_like(params, shapes)),
        )

    def start(mesh):
        params = place(mesh)
        shardings = jax.tree.map(lambda x: x.sharding, describe_state(params))
        return params, jax.jit(tx.init, out_shardings=shardings)(params)

    def restored(mesh):
        params = place(mesh)
        like = params, describe_state(params)
        with ocp.StandardCheckpointer() as checkpointer:
            params, state = checkpointer.restore(f"{folder}/run", like)
        bits = state.masks["kernel"]
        assert mesh is None or bits.sharding.is_equivalent_to(NamedSharding(mesh, P("a", "b")), 2)
        return params, state

    with tempfile.TemporaryDirectory() as folder:
        with jax.set_mesh(devices.mesh):
            saved = step(*start(devices.mesh))
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(f"{folder}/run", saved)
            unbroken = jax.tree.map(np.asarray, step(*saved))
            actual = [step(*restored(devices.mesh))]
        with jax.set_mesh(small):
            actual.append(step(*restored(small)))
        actual.append(step(*restored(None)))
    assert int(unbroken[1].count) == 2
    for run in actual:
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, run), unbroken)


_BOTH = [a_run_goes_on_on_another_mesh_and_on_one_device]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
