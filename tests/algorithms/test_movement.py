"""Movement pruning: sums, masks and returns by numpy and by hand."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers
from tests.algorithms import oracles

_RAMP = sparsity.PolynomialSchedule(2, 1, 5, power=1)
_STEPS = 7


def _expected(seed, rate=0.1, sparsity_=0.8):
    """Weights, sums and masks after each step, in float64."""
    weights = oracles.wide(oracles.tree(seed))
    masks = {name: np.ones(w.shape, np.uint8) for name, w in weights.items()}
    sums = {name: np.zeros(w.shape) for name, w in weights.items()}
    for step, grads in enumerate(map(oracles.wide, oracles.draws(seed, _STEPS))):
        sums = {name: sums[name] - weights[name] * masks[name] * grads[name] for name in sums}
        if step in (1, 3, 5):
            masks = oracles.layerwise(sums, sparsity_ * (step - 1) / 4)
        weights = {name: (w - rate * grads[name]) * masks[name] for name, w in weights.items()}
        yield weights, sums, masks


@pytest.mark.slow
def test_sums_weights_and_masks_are_those_of_numpy():
    updater = sparsity.MovementPruning(
        sparsity_distribution_fn=helpers.uniform(0.8), scheduler=_RAMP
    )
    run = oracles.runner(updater)
    for seed in oracles.TREES:
        actual = run(oracles.tree(seed), oracles.draws(seed, _STEPS))
        for (params, state), (weights, sums, masks) in zip(actual, _expected(seed), strict=True):
            oracles.same_masks(state.masks, masks)
            oracles.close(state.algorithm_state, sums)
            oracles.close(params, weights)
            assert state.algorithm_state["bias"] is None


def _train(grads, **options):
    options = {"scheduler": sparsity.PeriodicSchedule(1)} | options
    updater = sparsity.MovementPruning(sparsity_distribution_fn=helpers.half, **options)
    inner = optax.sgd(1.0, momentum=0.5)
    params = {"w": jnp.array([[1.0, 2.0]])}
    grads = [{"w": jnp.array([row])} for row in grads]
    return list(oracles.runner(updater, inner)(params, grads))


@pytest.mark.slow
def test_the_weight_that_training_moves_away_from_zero_stays_whatever_its_size():
    # -w g: -1 * -3 = 3 and -2 * 1 = -2: the smaller weight stays.
    ((params, state),) = _train([[-3.0, 1.0]])
    np.testing.assert_array_equal(state.algorithm_state["w"], [[3, -2]])
    np.testing.assert_array_equal(state.masks["w"], [[1, 0]])
    np.testing.assert_array_equal(params["w"], [[4, 0]])


def test_a_weight_returns_at_zero_with_fresh_moments_once_the_sums_of_others_fall():
    # The first weight's sum: 3, then 3 - 4 * 2 = -5 < -2, and the second one returns.
    (_, _), (params, state) = _train([[-3.0, 1.0], [2.0, 5.0]])
    np.testing.assert_array_equal(state.algorithm_state["w"], [[-5, -2]])
    np.testing.assert_array_equal(state.masks["w"], [[0, 1]])
    # -5, and not -(5 + 0.5 * 1) by the momentum from before.
    np.testing.assert_array_equal(params["w"], [[0, -5]])


@pytest.mark.slow
def test_sums_of_bfloat16_weights_are_float32():
    updater = sparsity.MovementPruning(
        sparsity_distribution_fn=helpers.half, scheduler=sparsity.OneShotSchedule(9)
    )
    params = {"w": jnp.full((1, 2), 1.0, jnp.bfloat16)}
    grads = [{"w": jnp.full((1, 2), -(2.0**-10), jnp.bfloat16)}] * 3
    inner = optax.set_to_zero()
    *_, (_, state) = oracles.runner(updater, inner)(params, [{"w": -params["w"]}, *grads])
    assert state.algorithm_state["w"].dtype == jnp.float32
    np.testing.assert_array_equal(state.algorithm_state["w"], np.full((1, 2), 1 + 3 * 2.0**-10))


def test_without_an_optimizer_the_gradients_of_one_step_decide():
    updater = sparsity.MovementPruning(sparsity_distribution_fn=helpers.half)
    params = {"w": jnp.array([[1.0, -2.0, 3.0, 4.0]])}
    grads = {"w": jnp.array([[-1.0, 1.0, 1.0, -0.1]])}  # 1, 2, -3, 0.4
    masks = updater.instant_sparsify(params, grads)[1]
    np.testing.assert_array_equal(masks["w"], [[1, 1, 0, 0]])
    with pytest.raises(ValueError, match=r"MovementPruning scores.*gradients.*grads = None"):
        updater.instant_sparsify(params)


def test_there_is_no_soft_variant():
    with pytest.raises(TypeError, match="has no argument 'soft'"):
        sparsity.MovementPruning(soft=True)
