"""Straight-through methods: sparse forward pass, dense weights and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers

_PARAMS = {"w": jnp.array([[1.0, -4.0], [3.0, 0.5]]), "b": jnp.array([0.1, 0.2])}


def _state(updater, inner=None):
    return updater.wrap_optax(inner or optax.sgd(0.5)).init(_PARAMS)


_MAKERS = {
    "fresh": lambda: sparsity.SteMagnitudePruning(sparsity_distribution_fn=helpers.half),
    "random": lambda: sparsity.SteRandomPruning(sparsity_distribution_fn=helpers.half),
    "stored": lambda: sparsity.SteMagnitudePruning(
        sparsity_distribution_fn=helpers.half,
        store_masks=True,
        scheduler=sparsity.PeriodicSchedule(1),
    ),
}


def test_the_forward_pass_sees_the_largest_weights_only():
    updater = _MAKERS["fresh"]()
    seen = updater.pre_forward_update(_PARAMS, _state(updater))
    np.testing.assert_array_equal(seen["w"], [[0, -4], [3, 0]])
    np.testing.assert_array_equal(seen["b"], _PARAMS["b"])


@pytest.mark.slow
@pytest.mark.parametrize("name", _MAKERS)
def test_the_gradient_is_that_of_the_sparse_weights_passed_straight_through(name):
    updater = _MAKERS[name]()
    tx = updater.wrap_optax(optax.sgd(0.0))
    params = _PARAMS
    _, state = tx.update(params, tx.init(params), params)

    def loss(params):
        return jnp.sum(params["w"] ** 3) + jnp.sum(params["b"])

    sparse = updater.pre_forward_update(params, state)
    assert np.count_nonzero(sparse["w"]) == 2
    outside = jax.grad(loss)(sparse)
    inside = jax.grad(lambda params: loss(updater.pre_forward_update(params, state)))(params)
    jitted = jax.jit(
        jax.value_and_grad(lambda params, state: loss(updater.pre_forward_update(params, state)))
    )(params, state)
    np.testing.assert_array_equal(inside["w"], 3 * np.asarray(sparse["w"]) ** 2)
    jax.tree.map(np.testing.assert_array_equal, inside, outside)
    jax.tree.map(np.testing.assert_allclose, jitted[1], outside)
    np.testing.assert_allclose(jitted[0], loss(sparse), rtol=1e-6)


@pytest.mark.parametrize("name", _MAKERS)
def test_a_linear_loss_gives_every_weight_its_gradient(name):
    # The identity: d/dw of sum(c * masked(w)) is c, for pruned weights too.
    updater = _MAKERS[name]()
    state = _state(updater)
    slopes = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    grads = jax.grad(
        lambda params: jnp.sum(slopes * updater.pre_forward_update(params, state)["w"])
    )(_PARAMS)
    np.testing.assert_array_equal(grads["w"], slopes)


@pytest.mark.slow
def test_forward_mode_and_second_derivatives_pass_straight_through():
    updater = _MAKERS["fresh"]()
    state = _state(updater)
    forward = functools.partial(updater.pre_forward_update, opt_state=state)
    ones = jax.tree.map(jnp.ones_like, _PARAMS)
    _, tangent = jax.jvp(forward, (_PARAMS,), (ones,))
    np.testing.assert_array_equal(tangent["w"], np.ones((2, 2)))
    curvature = jax.hessian(lambda w: jnp.sum(forward({"w": w, "b": ones["b"]})["w"] ** 2))(
        _PARAMS["w"]
    )
    np.testing.assert_array_equal(curvature.reshape(4, 4), 2 * np.eye(4))


@pytest.mark.parametrize("name", _MAKERS)
def test_training_keeps_the_weights_dense(name):
    updater = _MAKERS[name]()
    tx = updater.wrap_optax(optax.sgd(0.25))
    params = _PARAMS
    state = tx.init(params)
    grads = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    for _ in range(2):
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        params = updater.post_gradient_update(params, state)
    np.testing.assert_array_equal(params["w"], [[0.5, -4.5], [2.5, 0.0]])


def test_a_pruned_weight_comes_back_when_it_has_grown_larger():
    updater = _MAKERS["fresh"]()
    tx = updater.wrap_optax(optax.sgd(1.0))
    params = _PARAMS
    state = tx.init(params)
    grads = {"w": jnp.array([[-4.0, 0.0], [0.0, 0.0]]), "b": jnp.zeros(2)}
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)  # [[5, -4], [3, 0.5]]
    seen = updater.pre_forward_update(params, state)
    np.testing.assert_array_equal(seen["w"], [[5, -4], [0, 0]])


def test_fresh_masks_are_no_part_of_the_state():
    for name in ("fresh", "random"):
        assert jax.tree.leaves(_state(_MAKERS[name]()).masks) == []


def test_random_masks_are_redrawn_at_every_step_and_reproducible():
    updater = sparsity.SteRandomPruning(sparsity_distribution_fn=helpers.half)
    tx = updater.wrap_optax(optax.sgd(0.0))
    params = {"w": jnp.ones((6, 6))}
    state = tx.init(params)
    masks = []
    for _ in range(4):
        seen = np.asarray(updater.pre_forward_update(params, state)["w"])
        np.testing.assert_array_equal(seen, updater.pre_forward_update(params, state)["w"])
        assert np.count_nonzero(seen) == 18
        masks.append(seen.tobytes())
        _, state = tx.update(params, state, params)
    assert len(set(masks)) == 4


def test_a_ramp_applies_to_the_forward_pass():
    updater = sparsity.SteMagnitudePruning(
        sparsity_distribution_fn=helpers.half,
        scheduler=sparsity.PolynomialSchedule(1, 0, 2, power=1),
    )
    tx = updater.wrap_optax(optax.sgd(0.0))
    params = _PARAMS
    state = tx.init(params)
    counts = []
    for _ in range(4):
        counts.append(np.count_nonzero(updater.pre_forward_update(params, state)["w"]))
        _, state = tx.update(params, state, params)
    assert counts == [4, 3, 2, 2]  # sparsities 0, 0.25, 0.5, 0.5


def test_stored_masks_change_at_the_steps_of_the_schedule_only():
    updater = sparsity.SteMagnitudePruning(
        sparsity_distribution_fn=helpers.half,
        store_masks=True,
        scheduler=sparsity.PeriodicSchedule(2),
    )
    tx = updater.wrap_optax(optax.sgd(1.0))
    params = {"w": jnp.array([[1.0, 2.0, 3.0, 4.0]])}
    state = tx.init(params)
    update = jax.jit(tx.update)
    grads = {"w": jnp.array([[-2.0, 0.0, 0.0, 0.0]])}  # the first weight grows by 2 a step
    seen = []
    for _ in range(3):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(np.asarray(state.masks["w"]).tolist())
    # Updated at steps 0 and 2, by the weights before that step: 1 2 3 4, then 5 2 3 4.
    assert seen == [[[0, 0, 1, 1]], [[0, 0, 1, 1]], [[1, 0, 0, 1]]]
    np.testing.assert_array_equal(
        updater.pre_forward_update(params, state)["w"], [[7.0, 0.0, 0.0, 4.0]]
    )


@pytest.mark.parametrize("packed", [False, True])
def test_stored_masks_may_be_packed(packed):
    updater = sparsity.SteMagnitudePruning(
        sparsity_distribution_fn=helpers.half,
        store_masks=True,
        use_packed_masks=packed,
        scheduler=sparsity.PeriodicSchedule(1),
    )
    tx = updater.wrap_optax(optax.sgd(0.0))
    params = _PARAMS
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert state.masks["w"].shape == ((2, 1) if packed else (2, 2))
    seen = updater.pre_forward_update(params, state)
    np.testing.assert_array_equal(seen["w"], [[0, -4], [3, 0]])


@pytest.mark.parametrize("name", _MAKERS)
def test_the_state_may_be_nested_in_that_of_another_optimizer(name):
    updater = _MAKERS[name]()
    tx = optax.chain(optax.clip(1.0), updater.wrap_optax(optax.adam(0.1)))
    params = _PARAMS
    _, state = tx.update(params, tx.init(params), params)
    inner = sparsity.get_sparse_state(state)
    direct = updater.pre_forward_update(params, inner)
    nested = updater.pre_forward_update(params, state)
    jax.tree.map(np.testing.assert_array_equal, direct, nested)
    assert np.count_nonzero(nested["w"]) == 2


def test_masks_select_so_that_nan_in_a_masked_weight_does_not_reach_the_model():
    updater = _MAKERS["fresh"]()
    params = {"w": jnp.array([[np.nan, -4.0], [3.0, 0.5]]), "b": jnp.array([0.1, 0.2])}
    seen = updater.pre_forward_update(params, _state(updater))
    np.testing.assert_array_equal(seen["w"], [[0, -4], [3, 0]])


def test_a_structured_pattern_holds_in_the_forward_pass():
    updater = sparsity.SteMagnitudePruning(
        sparsity_distribution_fn=helpers.half, sparsity_type=sparsity.NByM(1, 2)
    )
    seen = updater.pre_forward_update(_PARAMS, _state(updater))
    np.testing.assert_array_equal(seen["w"], [[0, -4], [3, 0]])


def test_instant_sparsify_prunes_as_the_plain_pruner_does():
    pruned, masks = _MAKERS["fresh"]().instant_sparsify(_PARAMS)
    np.testing.assert_array_equal(masks["w"], [[0, 1], [1, 0]])
    np.testing.assert_array_equal(pruned["w"], [[0, -4], [3, 0]])
    random = _MAKERS["random"]().instant_sparsify(_PARAMS)[1]
    assert int(random["w"].sum()) == 2


def test_a_state_without_masks_is_refused():
    with pytest.raises(ValueError, match="SparseState"):
        _MAKERS["fresh"]().pre_forward_update(_PARAMS, optax.adam(0.1).init(_PARAMS))


def test_updates_of_exact_zeros_are_refused_where_no_step_could_make_them():
    uniform = sparsity.Uniform(0.5)
    with pytest.raises(ValueError, match=r"is_sparse_updates=True needs masks .* store_masks=True"):
        sparsity.SteMagnitudePruning(sparsity_distribution_fn=uniform, is_sparse_updates=True)
    with pytest.raises(ValueError, match="between the two masks of TopKast"):
        sparsity.TopKast(sparsity_distribution_fn=uniform, is_sparse_updates=True)
    pruner = sparsity.SteMagnitudePruning(
        sparsity_distribution_fn=uniform,
        is_sparse_updates=True,
        store_masks=True,
        scheduler=sparsity.OneShotSchedule(0),
    )
    params = jnp.array([[4.0, 1.0], [3.0, 2.0]])
    tx = pruner.wrap_optax(optax.sgd(0.1))
    updates, _ = tx.update(jnp.ones((2, 2)), tx.init(params), params)
    np.testing.assert_array_equal(optax.apply_updates(params, updates) == 0, [[0, 1], [0, 1]])
