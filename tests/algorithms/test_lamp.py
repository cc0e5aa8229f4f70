"""LAMP: scores by hand and by numpy, masks of whole networks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.algorithms.lamp import lamp_scores
from tests import helpers
from tests.algorithms import oracles


def _scores(weights):
    """Lee et al. 2021, equation 4, in float64."""
    flat = np.abs(weights.astype(np.float64)).ravel()
    order = np.argsort(-flat, kind="stable")
    scores = np.zeros(flat.size)
    scores[order] = flat[order] ** 2 / np.cumsum(flat[order] ** 2)
    return scores.reshape(weights.shape)


@pytest.mark.slow
def test_scores_and_masks_are_those_of_numpy():
    updater = sparsity.LampPruning(sparsity_distribution_fn=helpers.uniform(0.8))
    for seed in oracles.TREES:
        params = oracles.tree(seed)
        expected = {name: _scores(w) for name, w in oracles.wide(params).items()}
        actual = updater.calculate_scores(jax.tree.map(jnp.asarray, params))
        oracles.close(actual, expected)
        masks = updater.instant_sparsify(params)[1]
        kept = helpers.num_kept(oracles.total(expected), 0.8)
        oracles.same_masks(masks, oracles.together(expected, kept))
        assert masks["bias"] is None


@pytest.mark.slow
def test_a_score_is_a_square_over_those_that_rank_no_lower():
    # 9 / 9, 4 / 13, 4 / 17 for the second of two equals, 1 / 18.
    expected = [1 / 18, 1, 4 / 13, 4 / 17]
    np.testing.assert_allclose(lamp_scores(jnp.array([1.0, -3, 2, -2])), expected, rtol=1e-6)


@pytest.mark.slow
def test_scores_do_not_depend_on_the_scale_of_a_layer():
    weights = np.array([[1.0, -3.0], [2.0, 0.5]], np.float32)
    expected = np.asarray(lamp_scores(jnp.asarray(weights)))
    for scale in (2.0**-100, 2.0**100):
        np.testing.assert_array_equal(
            lamp_scores(jnp.asarray(weights * np.float32(scale))), expected
        )


@pytest.mark.slow
def test_zeros_score_nothing_and_an_empty_layer_has_no_scores():
    np.testing.assert_array_equal(lamp_scores(jnp.array([0.0, 2.0, 0.0])), [0, 1, 0])
    np.testing.assert_array_equal(lamp_scores(jnp.zeros((2, 2))), np.zeros((2, 2)))
    assert lamp_scores(jnp.zeros((0, 3))).shape == (0, 3)


def test_a_weight_that_is_not_a_number_leaves_the_scores_of_the_others():
    scores = np.asarray(lamp_scores(jnp.array([3.0, np.nan, 4.0])))
    np.testing.assert_allclose(scores[[0, 2]], [9 / 25, 1], rtol=1e-6)
    assert np.isnan(scores[1])


@pytest.mark.slow
def test_no_layer_vanishes_where_one_threshold_for_magnitudes_removes_it():
    params = {"large": jnp.full((4, 4), 10.0), "small": 0.01 * jnp.arange(1.0, 17).reshape(4, 4)}
    half = {"sparsity_distribution_fn": helpers.uniform(0.75)}
    masks = sparsity.LampPruning(**half).instant_sparsify(params)[1]
    plain = sparsity.MagnitudePruning(**half, scope=sparsity.Global(use_normalization=False))
    assert [int(mask.sum()) for mask in jax.tree.leaves(masks)] == [5, 3]
    assert int(plain.instant_sparsify(params)[1]["small"].sum()) == 0


def _exact_scores(weights):
    """Equation 4 with the squares and sums of float64; what is not finite scores lowest."""
    flat = np.abs(np.asarray(weights, np.float64)).ravel()
    flat[~np.isfinite(flat)] = -1
    order = np.argsort(-flat, kind="stable")
    squares = np.maximum(flat[order], 0) ** 2
    scores = np.zeros(flat.size)
    scores[order] = squares / np.cumsum(squares)
    return np.where(flat < 0, -1, scores)


def _layers(kind, dtype):
    rng = np.random.default_rng(7)
    layers = [rng.normal(size=(151, 199)), 5 * rng.normal(size=300), rng.normal(size=(4, 25, 240))]
    if kind == "zeros":
        layers = [x * (rng.random(x.shape) < 0.3) for x in layers]
    if kind == "ties":
        layers = [np.round(16 * x) for x in layers]
    if kind == "nan":
        layers = [np.where(rng.random(x.shape) < 0.05, np.nan, x) for x in layers]
    return {f"{i}": jnp.asarray(x, dtype) for i, x in enumerate(layers)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("normal", "float32"), ("zeros", "float32"), ("nan", "bfloat16"), ("ties", "float32")],
)
def test_masks_of_large_layers_are_those_of_a_sort_in_numpy(kind, dtype):
    layers = _layers(kind, dtype)
    scores = np.concatenate([_exact_scores(x) for x in layers.values()])
    updater = sparsity.LampPruning(
        sparsity_distribution_fn=sparsity.Uniform(0.8, filter_fn=lambda *_: True)
    )
    masks = updater.instant_sparsify(layers)[1].values()
    kept = np.concatenate([x.ravel() for x in masks]).astype(bool)
    assert kept.sum() == helpers.num_kept(scores.size, 0.8)
    # Scores of float32 may order nearly equal ones otherwise.
    assert scores[kept].min() >= scores[~kept].max() * (1 - 1e-5)


@pytest.mark.slow
def test_an_update_has_the_masks_of_the_scores():
    params = _layers("normal", "float32") | {"bias": jnp.ones(7)}
    updater = sparsity.LampPruning(
        sparsity_distribution_fn=helpers.uniform(0.8), scheduler=sparsity.OneShotSchedule(0)
    )
    tx = updater.wrap_optax(optax.sgd(0.1))
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    expected = updater.instant_sparsify(params)[1]
    for name in ("0", "2"):
        np.testing.assert_array_equal(state.masks[name], expected[name], err_msg=name)


def test_a_larger_weight_never_scores_less():
    weights = np.random.default_rng(0).normal(size=20_000).astype(np.float32)
    scores = np.asarray(lamp_scores(jnp.asarray(weights)))[order := np.argsort(np.abs(weights))]
    assert np.all(np.diff(scores)[np.diff(np.abs(weights)[order]) > 0] >= 0)


def test_an_update_of_a_subclass_ranks_by_the_scores_of_the_subclass():
    class Lowest(sparsity.LampPruning):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            scores = super().calculate_scores(params, sparse_state, grads)
            return jax.tree.map(jnp.negative, scores)

    params = {"w": jnp.array([[4.0, 1.0], [3.0, 2.0]])}
    for kind, mask in [(Lowest, [[0, 1], [0, 1]]), (sparsity.LampPruning, [[1, 0], [1, 0]])]:
        pruner = kind(sparsity_distribution_fn=helpers.half)
        state = pruner.init_state(params)
        state = pruner.update_state(state, params, None)
        assert state.masks["w"].tolist() == mask
