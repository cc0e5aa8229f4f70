"""ADMM: its sequences by numpy, the best subset of a quadratic, the end."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers
from tests.algorithms import oracles


def _make(**options):
    config = {"algorithm": "admm", "sparsity": 0.7, "update_freq": 2, "update_start_step": 1}
    return sparsity.create_updater_from_config(
        config | {"update_end_step": 6, "rho": 0.3} | options
    )


def _project(weights, sparsity_):
    masks = oracles.layerwise({name: np.abs(w) for name, w in weights.items()}, sparsity_)
    return {name: w * masks[name] for name, w in weights.items()}, masks


@pytest.mark.slow
def test_weights_and_duals_are_those_of_numpy():
    rho = optax.linear_schedule(0.1, 0.5, 4)
    run = oracles.runner(_make(rho=rho))
    for seed in oracles.TREES:
        weights = oracles.wide(oracles.tree(seed))
        masks = {name: np.ones(w.shape, np.uint8) for name, w in weights.items()}
        z, _ = _project(weights, 0.7)
        u = {name: np.zeros(w.shape) for name, w in weights.items()}
        actual = run(oracles.tree(seed), oracles.draws(seed, 9))
        for step, (params, state) in enumerate(actual):
            if step in (1, 3, 5, 6):
                moved = {name: w + u[name] for name, w in weights.items()}
                z, support = _project(moved, 0.7)
                u = {name: u[name] + weights[name] - z[name] for name in z}
                masks = support if step == 6 else masks
            grads = oracles.wide(oracles.tree(seed, 1 + step))
            for name, w in weights.items():
                force = (0.1 + 0.1 * min(step, 4)) * (w - z[name] + u[name]) if step < 6 else 0
                weights[name] = (w - 0.1 * (grads[name] + force)) * masks[name]
            oracles.same_masks(state.masks, masks)
            oracles.close(state.algorithm_state["z"], z)
            oracles.close(state.algorithm_state["u"], u)
            oracles.close(params, weights)
        assert state.algorithm_state["z"]["bias"] is None


@pytest.mark.parametrize("pattern", [sparsity.NByM(1, 4), sparsity.Block((2, 2))])
def test_projections_follow_the_pattern(pattern):
    updater = _make(sparsity_type=pattern, sparsity=0.75)
    params = {"w": jnp.asarray(oracles.tree(1)["b"][:, :4])}
    state = updater.wrap_optax(optax.sgd(0.1)).init(params)
    expected = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.75), sparsity_type=pattern
    ).instant_sparsify(params)[0]
    np.testing.assert_array_equal(state.algorithm_state["z"]["w"], expected["w"])


def _quadratic(seed, d=12, kept=4):
    """Hessian, linear term and best support of 1/2 w^T H w - b^T w."""
    rng = np.random.default_rng(seed)
    factor = rng.normal(size=(2 * d, d))
    hessian = factor.T @ factor / (2 * d)
    truth = np.zeros(d)
    truth[rng.permutation(d)[:kept]] = rng.normal(size=kept)
    linear = hessian @ truth + 0.05 * rng.normal(size=d)

    def value(support):
        at = list(support)
        return -linear[at] @ np.linalg.solve(hessian[np.ix_(at, at)], linear[at])

    return hessian, linear, min(itertools.combinations(range(d), kept), key=value)


@pytest.mark.slow
def test_it_finds_the_best_subset_of_a_quadratic():
    hessians, linears, best = zip(*map(_quadratic, range(100)), strict=True)
    rho = optax.linear_schedule(0, 2, 1000)
    updater = _make(
        sparsity=2 / 3, update_freq=10, update_start_step=0, update_end_step=1000, rho=rho
    )
    tx = updater.wrap_optax(optax.sgd(0.25))

    @jax.jit
    @jax.vmap
    def find(hessian, linear):
        def step(carry, _):
            w, state = carry
            updates, state = tx.update((hessian @ w[0] - linear)[None], state, w)
            return (optax.apply_updates(w, updates), state), None

        start = jnp.zeros((1, 12))
        (w, _), _ = jax.lax.scan(step, (start, tx.init(start)), None, 1002)
        return w[0]

    actual = np.asarray(find(jnp.float32(hessians), jnp.float32(linears)))
    right = sum({*np.flatnonzero(w)} == {*s} for w, s in zip(actual, best, strict=True))
    dense = np.abs(np.linalg.solve(np.array(hessians), np.array(linears)[..., None]))[..., 0]
    largest = np.argsort(-dense)[:, :4]  # what magnitude pruning finds
    assert sum({*x} == {*s} for x, s in zip(largest, best, strict=True)) < 80
    assert right >= 90


@pytest.mark.slow
def test_without_an_end_step_training_stays_dense():
    updater = sparsity.ADMMPruning(
        sparsity_distribution_fn=helpers.half, scheduler=sparsity.PeriodicSchedule(1), rho=0.1
    )
    _, state = helpers.train(updater, helpers.params(), 3, grads=helpers.grads)
    assert np.all(state.masks["kernel"])
    assert np.count_nonzero(state.algorithm_state["z"]["kernel"]) == 30


@pytest.mark.slow
def test_the_penalty_rises_until_the_end_by_default():
    params = {"w": jnp.array([[4.0, 1.0, 2.0, 3.0]])}
    tx = _make(rho=None).wrap_optax(optax.identity())
    state = tx.init(params)
    # At step 3, an update, z is [4 0 0 0] again and u what it lacks: w - z + u = 2 [0 1 2 3].
    for step, rho in ((0, 0.0), (3, 0.05), (6, 0.0), (7, 0.0)):
        now = state._replace(count=jnp.int32(step))
        actual = tx.update({"w": jnp.zeros((1, 4))}, now, params)[0]["w"]
        expected = np.array([[0.0, -1, -2, -3]]) if step == 6 else rho * np.array([[0.0, 2, 4, 6]])
        np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("rho", [lambda step: 0.1 - step, lambda step: step * float("nan")])
def test_a_schedule_that_leaves_the_range_of_penalties_is_an_error(rho):
    tx = _make(rho=rho).wrap_optax(optax.identity())
    with pytest.raises(ValueError, match=r"rho\(\d\) must be a finite number >= 0, got rho\(\d"):
        tx.init({"w": jnp.ones((2, 4))})


@pytest.mark.parametrize("rho", [0.0, -1.0, float("nan"), "0.1"])
def test_a_penalty_out_of_range_is_an_error(rho):
    with pytest.raises(ValueError, match=r"rho must be .*got rho = "):
        sparsity.ADMMPruning(rho=rho)


@pytest.mark.slow
def test_biases_are_drawn_and_removed_with_their_channels():
    params = {"up": {"kernel": jnp.ones((3, 4)), "bias": jnp.array([3.0, 1.0, 4.0, 2.0])}}
    params["down"] = {"kernel": jnp.ones((4, 2))}

    def model(params, x):
        up = params["up"]
        return jnp.tanh(x @ up["kernel"] + up["bias"]) @ params["down"]["kernel"]

    graph = sparsity.trace(model, params, jnp.ones((1, 3)))
    pruner = _make(scope=sparsity.Coupled(graph), sparsity=0.5)
    tx = pruner.wrap_optax(optax.sgd(0.0))
    state = tx.init(params)
    np.testing.assert_array_equal(state.algorithm_state["z"]["up"]["bias"], [3, 0, 4, 0])
    for _ in range(7):
        _, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    bias_mask = state.masks["up"]["bias"]
    assert bias_mask.sum() == 2
    np.testing.assert_array_equal(state.masks["up"]["kernel"], [bias_mask] * 3)
    np.testing.assert_array_equal(state.masks["down"]["kernel"].T, [bias_mask] * 2)


@pytest.mark.parametrize("hook", ["modify_gradients", "update_state"])
def test_a_hook_refuses_the_state_of_another_algorithm(hook):
    params = {"w": jnp.ones((2, 4))}
    half = {"sparsity_distribution_fn": sparsity.Uniform(0.5)}
    once = {"scheduler": sparsity.OneShotSchedule(0)}
    state = sparsity.MagnitudePruning(**half, **once).wrap_optax(optax.sgd(0.1)).init(params)
    arguments = {"grads": params, "params": params, "sparse_state": state}
    with pytest.raises(ValueError, match=r"must be the dict of ADMMPruning.init_algorithm_state"):
        getattr(sparsity.ADMMPruning(**half, **once), hook)(**arguments)
