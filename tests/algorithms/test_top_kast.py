"""Top-KAST: both sets, the exploration penalty, and what never moves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers
from tests.algorithms import oracles

pytestmark = pytest.mark.filterwarnings("ignore:TopKast moves masks")  # without a schedule


def _make(**options):
    options = {"scheduler": sparsity.PeriodicSchedule(3)} | options
    return sparsity.TopKast(sparsity_distribution_fn=helpers.uniform(0.8), **options)


@pytest.mark.slow
def test_sets_and_weights_are_those_of_numpy():
    updater = _make(backward_sparsity=0.5, regularization=0.01)
    run = oracles.runner(updater, optax.sgd(0.1, 0.9))
    for seed in oracles.TREES:
        weights = oracles.wide(oracles.tree(seed))
        traces = {name: np.zeros(w.shape) for name, w in weights.items()}
        actual = run(oracles.tree(seed), oracles.draws(seed, 7))
        for step, (params, state) in enumerate(actual):
            if step % 3 == 0:
                sizes = {name: np.abs(w) for name, w in weights.items()}
                forward, backward = (oracles.layerwise(sizes, s) for s in (0.8, 0.5))
            grads = oracles.wide(oracles.tree(seed, 1 + step))
            for name, b in backward.items():
                decay = 0.01 * np.where(forward[name], 1, 1 / 0.2) * weights[name]
                traces[name] = 0.9 * traces[name] + (grads[name] + decay) * b
                weights[name] = weights[name] - 0.1 * traces[name] * b
            oracles.same_masks(state.masks, forward)
            oracles.same_masks(state.algorithm_state, backward)
            oracles.close(params, weights)
            seen = updater.pre_forward_update(params, state)
            oracles.close(seen, {name: weights[name] * mask for name, mask in forward.items()})


def _moves(updater, inner, steps):
    """How often a weight moved that was outside of B, and how often one outside of A did."""
    grads = oracles.draws(1, steps)
    before = jax.tree.map(jnp.asarray, oracles.tree(1))
    counts = np.zeros(2, int)
    for params, state in oracles.runner(updater, inner)(before, grads):
        for name in ("a", "b"):
            moved = np.asarray(params[name] != before[name])
            for i, chosen in enumerate((state.algorithm_state, state.masks)):
                counts[i] += np.sum(moved & (np.asarray(chosen[name]) == 0))
            assert np.all(np.asarray(state.algorithm_state[name]) >= np.asarray(state.masks[name]))
        before = params
    return counts.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.adam, optax.adamw], ids=["adam", "adamw"])
def test_nothing_outside_of_the_backward_set_moves_in_200_steps(optimizer):
    outside, explored = _moves(_make(backward_sparsity=0.6), optimizer(0.05), 200)
    assert outside == 0
    assert explored > 1000


@pytest.mark.slow
def test_gradients_by_hand():
    # A keeps the 4, B the 3 as well; the penalty is 0.5 w, and 0.5 / (1 - 0.75) w in B alone.
    updater = sparsity.TopKast(
        sparsity_distribution_fn=helpers.uniform(0.75), backward_sparsity=0.5, regularization=0.5
    )
    params = {"w": jnp.array([[1.0, -4.0, 3.0, 2.0]]), "b": jnp.array([8.0])}
    tx = updater.wrap_optax(optax.sgd(1.0))
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    np.testing.assert_array_equal(state.masks["w"], [[0, 1, 0, 0]])
    np.testing.assert_array_equal(state.algorithm_state["w"], [[0, 1, 1, 0]])
    np.testing.assert_array_equal(updates["w"], [[0, 1, -7, 0]])
    np.testing.assert_array_equal(updates["b"], [-1])
    seen = updater.pre_forward_update(params, state)
    np.testing.assert_array_equal(seen["w"], [[0, -4, 0, 0]])


@pytest.mark.slow
def test_the_backward_set_is_twice_the_forward_set_by_default():
    params = {"w": jnp.arange(1.0, 101).reshape(10, 10)}
    for target, expected in ((0.9, 20), (0.3, 100)):
        updater = sparsity.TopKast(sparsity_distribution_fn=helpers.uniform(target))
        state = updater.wrap_optax(optax.sgd(0.1)).init(params)
        assert int(state.algorithm_state["w"].sum()) == expected


def test_a_leaf_that_is_denser_than_the_backward_set_trains_its_forward_set():
    updater = sparsity.TopKast(
        sparsity_distribution_fn=helpers.uniform(0.75, custom_sparsity_map={"v": 0.25}),
        backward_sparsity=0.5,
        scheduler=sparsity.PeriodicSchedule(2),
    )
    params = {"w": jnp.arange(4.0).reshape(1, 4), "v": jnp.arange(4.0).reshape(1, 4)}
    state = updater.wrap_optax(optax.sgd(0.1)).init(params)
    np.testing.assert_array_equal(state.algorithm_state["w"], [[0, 0, 1, 1]])
    np.testing.assert_array_equal(state.algorithm_state["v"], [[0, 1, 1, 1]])


@pytest.mark.slow
def test_both_sets_follow_an_n_by_m_pattern():
    updater = sparsity.TopKast(
        sparsity_distribution_fn=helpers.uniform(0.75),
        backward_sparsity=0.5,
        sparsity_type=sparsity.NByM(1, 4),
    )
    params = {"w": jnp.array([[1.0, 2, 3, 4, 40, 30, 20, 10]])}
    state = updater.wrap_optax(optax.sgd(0.1)).init(params)
    np.testing.assert_array_equal(state.masks["w"], [[0, 0, 0, 1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(state.algorithm_state["w"], [[0, 0, 1, 1, 1, 1, 0, 0]])


def test_masks_of_the_user_lie_in_the_backward_set():
    params = {"w": jnp.array([[1.0, 2.0, 3.0, 4.0]]), "b": jnp.ones(2)}
    updater = _make(backward_sparsity=0.5)
    user_masks = {"w": jnp.array([[1, 0, 0, 0]]), "b": jnp.array([1, 0])}
    state = updater.wrap_optax(optax.sgd(0.1), masks=user_masks).init(params)
    np.testing.assert_array_equal(state.algorithm_state["w"], [[1, 0, 0, 1]])
    np.testing.assert_array_equal(state.algorithm_state["b"], [1, 0])


@pytest.mark.slow
def test_biases_that_go_with_channels_are_explored_at_the_density_of_their_masks():
    params = {"up": jnp.ones((3, 4)), "bias": jnp.array([3.0, 1.0, 4.0, 2.0])}
    params["down"] = jnp.ones((4, 2))

    def model(params, x):
        return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]

    scope = sparsity.Coupled(sparsity.trace(model, params, jnp.ones((1, 3))))
    updater = sparsity.TopKast(
        sparsity_distribution_fn=helpers.uniform(0.75), regularization=0.1, scope=scope
    )
    tx = updater.wrap_optax(optax.sgd(1.0))
    state = tx.init(params)
    np.testing.assert_array_equal(state.masks["bias"], [0, 0, 1, 0])
    np.testing.assert_array_equal(state.algorithm_state["bias"], [1, 0, 1, 0])
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    # 0.1 of the weight within A, four times that beside it: one channel of four is in A.
    np.testing.assert_allclose(updates["bias"], [-1.2, 0, -0.4, 0], rtol=1e-6)
    np.testing.assert_allclose(updates["up"], [[-0.4, 0, -0.1, 0]] * 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backward_sparsity": 1.5}, r"backward_sparsity must be in \[0, 1\].*= 1.5"),
        ({"backward_sparsity": -0.1}, r"backward_sparsity must be in \[0, 1\].*= -0.1"),
        ({"regularization": -1.0}, r"regularization must be a finite number >= 0.*= -1.0"),
    ],
)
def test_settings_out_of_range_are_errors(options, text):
    with pytest.raises(ValueError, match=text):
        sparsity.TopKast(**options)


@pytest.mark.parametrize("wrapper", [lambda init: init, jax.jit], ids=["eager", "jit"])
def test_a_backward_sparsity_above_the_forward_one_is_an_error(wrapper):
    tx = _make(backward_sparsity=0.9).wrap_optax(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"must not exceed.*0\.8, got backward_sparsity = 0\.9\."):
        wrapper(tx.init)(helpers.params())


def test_the_forward_pass_is_sparse_before_the_first_update():
    updater = _make(scheduler=sparsity.PeriodicSchedule(3, update_start_step=9))
    params = np.arange(1.0, 11.0, dtype=np.float32).reshape(2, 5)
    state = updater.wrap_optax(optax.sgd(0.1)).init(params)
    seen = updater.pre_forward_update(params, state)
    np.testing.assert_array_equal(seen, [[0] * 5, [0, 0, 0, 9, 10]])
