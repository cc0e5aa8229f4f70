"""Runs that are saved, restored and go on: bit for bit, packed or not, on this mesh or another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import sparsity
from tests import helpers
from tests.eight_devices import KINDS, run

pytestmark = pytest.mark.slow


_STEPS = 4  # masks are updated at steps 1 and 3; the run is saved after step 1
_PARAMS = {"layer": helpers.params(shape=(4, 12))}


def _make(name, packed=False):
    return helpers.make_updater(name, sparsity=0.5, use_packed_masks=packed)


def _go_on(updater, params, state, steps):
    tx = updater.wrap_optax(optax.adam(0.1))
    for index in steps:
        rng = np.random.default_rng(index)
        seen = updater.pre_forward_update(params, state)
        grads = jax.tree.map(lambda w, rng=rng: w - np.float32(rng.normal(size=w.shape)), seen)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def _init(updater, params):
    return updater.wrap_optax(optax.adam(0.1)).init(params)


def _by_orbax(saved, fresh, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "run", jax.eval_shape(lambda: fresh))


def _by_manager(saved, fresh, folder):
    with ocp.CheckpointManager(folder / "runs") as manager:
        manager.save(2, args=ocp.args.StandardSave(saved))
        manager.wait_until_finished()
        target = ocp.args.StandardRestore(jax.eval_shape(lambda: fresh))
        return manager.restore(manager.latest_step(), args=target)


def _by_flax(saved, fresh, folder):
    (folder / "run").write_bytes(serialization.to_bytes(saved))
    return serialization.from_bytes(fresh, (folder / "run").read_bytes())


_WAYS = {"orbax": _by_orbax, "CheckpointManager": _by_manager, "flax": _by_flax}


def _cases():
    """Yields algorithms with bytes and bits; each pair of two columns is in one of the cases."""
    for row, name in enumerate(sparsity.all_algorithm_names()):
        for packed in (False, True):
            ways = ["CheckpointManager"] if (row + packed) % 2 else ["orbax", "flax"]
            yield pytest.param(name, packed, ways, id=f"{name}-{'bits' if packed else 'bytes'}")


@pytest.mark.parametrize(("name", "packed", "ways"), [*_cases()])
def test_a_restored_run_goes_on_bit_for_bit(name, packed, ways, tmp_path):
    updater = _make(name, packed)
    saved = _go_on(updater, _PARAMS, _init(updater, _PARAMS), range(2))
    unbroken = _go_on(updater, *saved, range(2, _STEPS))
    for way in ways:
        (tmp_path / way).mkdir()
        fresh = jax.tree.map(jnp.zeros_like, (_PARAMS, _init(updater, _PARAMS)))
        restored = _WAYS[way](saved, fresh, tmp_path / way)
        assert jax.tree.structure(restored) == jax.tree.structure(saved)
        assert isinstance(restored[1], sparsity.SparseState)
        actual = _go_on(updater, *jax.tree.map(jnp.asarray, restored), range(2, _STEPS))
        jax.tree.map(np.testing.assert_array_equal, actual, unbroken)


def test_a_state_of_another_packing_is_an_error_with_the_remedy():
    for saved, used in ((False, True), (True, False)):
        state = _init(_make("rigl", saved), _PARAMS)
        with pytest.raises(ValueError, match=f"'layer/kernel'.*use_packed_masks={used}") as error:
            _go_on(_make("rigl", used), _PARAMS, state, [0])
        assert f"sparsity.masks.{'pack' if used else 'unpack'}_masks" in str(error.value)


def test_a_state_of_another_model_is_an_error_that_says_what_differs():
    state = _init(_make("rigl"), {"layer": helpers.params(shape=(6, 12))})
    with pytest.raises(ValueError, match=r"'layer/kernel'.*\(6, 12\).*\(4, 12\)"):
        _go_on(_make("rigl"), _PARAMS, state, [0])
    with pytest.raises(ValueError, match=r"'layer/kernel'.*'other/kernel'"):
        _go_on(_make("rigl"), {"other": _PARAMS["layer"]}, state, [0])


@KINDS
def test_a_run_goes_on_on_another_mesh_and_on_one_device(kind):
    run("checkpoints", kind)
