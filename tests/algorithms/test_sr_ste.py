"""SR-STE: gradients of all weights, with a decay of those that are masked."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers
from tests.algorithms import oracles
from tests.masks.mask_oracles import expected_slice

_NM = sparsity.NByM(1, 2)


def _gradients(updater, params, grads, step=0):
    """What the inner optimizer sees."""
    tx = updater.wrap_optax(optax.identity())
    state = tx.init(params)._replace(count=jnp.int32(step))
    return jax.jit(tx.update)(grads, state, params)[0]


@pytest.mark.slow
def test_gradients_and_forward_masks_are_those_of_numpy():
    updater = sparsity.SRSTE(
        sparsity_distribution_fn=helpers.half, sparsity_type=sparsity.NByM(1, 2, axis=0)
    )
    for seed in oracles.TREES:
        rng = np.random.default_rng(seed)
        w, g = rng.normal(size=(2, 6, 10)).astype(np.float32)
        mask = expected_slice(np.abs(w), 0.5, updater.sparsity_type)
        seen = updater.pre_forward_update({"w": jnp.asarray(w)}, _state(updater, w))["w"]
        np.testing.assert_array_equal(seen, w * mask)
        actual = _gradients(updater, {"w": w}, {"w": g})["w"]
        np.testing.assert_allclose(actual, g + 2e-4 * (1 - mask) * w.astype(np.float64), atol=1e-6)


def _state(updater, w):
    return updater.wrap_optax(optax.sgd(0.1)).init({"w": jnp.asarray(w)})


def test_masked_weights_decay_and_others_do_not():
    updater = sparsity.SRSTE(sparsity_distribution_fn=helpers.half, sparsity_type=_NM, decay=0.5)
    params = {"w": jnp.array([[1.0, -4.0, 3.0, 2.0]]), "b": jnp.array([8.0])}
    grads = jax.tree.map(jnp.ones_like, params)
    actual = _gradients(updater, params, grads)
    np.testing.assert_array_equal(actual["w"], [[1.5, 1, 1, 2]])
    np.testing.assert_array_equal(actual["b"], [1])


@pytest.mark.slow
def test_it_is_sparse_from_step_0_and_a_schedule_may_say_otherwise():
    params = {"w": jnp.array([[1.0, -4.0]])}
    grads = {"w": jnp.zeros((1, 2))}
    options = {"sparsity_distribution_fn": helpers.half, "decay": 1.0}
    actual = _gradients(sparsity.SRSTE(**options), params, grads)
    np.testing.assert_array_equal(actual["w"], [[1, 0]])
    later = sparsity.SRSTE(**options, scheduler=sparsity.PeriodicSchedule(5, 3))
    for step, expected in ((2, [[0, 0]]), (3, [[1, 0]]), (4, [[1, 0]])):
        np.testing.assert_array_equal(_gradients(later, params, grads, step)["w"], expected)


@pytest.mark.parametrize("packed", [False, True])
def test_stored_masks_say_what_decays(packed):
    updater = sparsity.SRSTE(
        sparsity_distribution_fn=helpers.half,
        decay=1.0,
        store_masks=True,
        use_packed_masks=packed,
        scheduler=sparsity.OneShotSchedule(0),
    )
    params = {"w": jnp.array([[1.0, -4.0]])}
    actual = _gradients(updater, params, {"w": jnp.zeros((1, 2))})
    np.testing.assert_array_equal(actual["w"], [[1, 0]])


@pytest.mark.parametrize("decay", [-1.0, float("nan"), "2e-4"])
def test_a_decay_out_of_range_is_an_error(decay):
    with pytest.raises(ValueError, match=r"decay must be a finite number >= 0.*got decay"):
        sparsity.SRSTE(decay=decay)


def test_a_subclass_may_have_an_init_of_its_own():
    class Half(sparsity.SRSTE):
        def __init__(self):
            super().__init__(decay=0.5, sparsity_distribution_fn=sparsity.Uniform(0.5))

    params = jnp.array([[4.0, 1.0], [3.0, 2.0]])
    tx = Half().wrap_optax(optax.sgd(1.0))
    updates, _ = tx.update(jnp.zeros((2, 2)), tx.init(params), params)
    np.testing.assert_array_equal(updates, [[0.0, -0.5], [0.0, -1.0]])
