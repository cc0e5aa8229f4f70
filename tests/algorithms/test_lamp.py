"""LAMP: scores by hand and by numpy, masks of whole networks."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.algorithms.lamp import scores as scores_module, search as search_module
from sparsity.algorithms.lamp.scores import count_bits, count_digit_bits, lamp_scores
from tests import helpers
from tests.algorithms import oracles
from tests.selection_oracle import best


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
    ("kind", "dtype", "is_searched"),
    [
        ("normal", "float32", True),
        ("zeros", "float32", True),
        ("nan", "bfloat16", True),
        ("ties", "float32", None),
    ],
)
def test_masks_of_large_layers_are_those_of_a_sort_in_numpy(kind, dtype, is_searched):
    layers = _layers(kind, dtype)
    scores = np.concatenate([_exact_scores(x) for x in layers.values()])
    n = scores.size
    for k in (n // 20, n // 5, int(np.sum(scores > 0)) if kind == "zeros" else n // 2):
        words = jnp.zeros(1, jnp.uint32), jnp.full(1, k, jnp.uint32)
        masks, searched = search_module.search([*layers.values()], words)
        expected = best(scores, k)
        assert is_searched is None or bool(searched) == is_searched
        np.testing.assert_array_equal(np.concatenate([x.ravel() for x in masks]), expected)


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


def _small_layers(kind):
    rng = np.random.default_rng(11)
    layers = [rng.normal(size=shape) for shape in ((37,), (24, 25), (600,))]
    layers[1] *= 1e3  # scores do not depend on the scale of a layer
    if kind == "ties":
        layers = [np.round(4 * x / np.abs(x).max()) for x in layers]
    if kind == "zeros":
        layers = [x * (rng.random(x.shape) < 0.4) for x in layers]
    if kind == "nan":
        layers = [np.where(rng.random(x.shape) < 0.1, np.nan, x) for x in layers]
    return [jnp.asarray(x, jnp.float32) for x in layers]


@helpers.ON_CPU
def test_layers_larger_than_their_sample_have_the_masks_of_a_sort_in_numpy(monkeypatch):
    # One layer is smaller than the room for a sample, two are larger, of the same size.
    monkeypatch.setattr(search_module, "_ROOM", (64, 128))
    search = jax.jit(search_module.search.__wrapped__)  # of this room, for all kinds and k
    for kind in ("normal", "zeros", "nan", "ties"):
        layers = _small_layers(kind)
        scores = np.concatenate([_exact_scores(x) for x in layers])
        num_positive = int(np.sum(scores > 0))
        for k in (1, 3, 40, num_positive // 2, num_positive):
            masks, is_proved = search(layers, (np.zeros(1, np.uint32), np.full(1, k, np.uint32)))
            kept = np.concatenate([x.ravel() for x in masks])
            np.testing.assert_array_equal(kept, best(scores, k), err_msg=f"{kind}, {k}")
            assert is_proved or kind == "ties"


@helpers.ON_CPU
def test_layers_of_one_type_with_a_large_one_are_searched_on_hosts_without_a_sort(monkeypatch):
    monkeypatch.setattr(search_module, "search", lambda arrays, k: ([*arrays], True))
    large, small, bits16 = jnp.zeros(16_385), jnp.ones(16_384), jnp.ones(3, jnp.bfloat16)
    with jax.enable_x64(True):
        double = jnp.ones(3, jnp.float64)
    k = jnp.uint32(0), jnp.uint32(5)
    searched = search_module.search_together([large, small, bits16], k)
    assert searched is not None
    assert all(map(operator.is_, searched, [large, small, bits16]))
    for layers in ([small], [large, double], [large, jnp.zeros(0)]):
        assert search_module.search_together(layers, k) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert search_module.search_together([large, small], k) is None


def test_scores_of_several_rows_of_ranks_are_those_of_numpy(monkeypatch):
    monkeypatch.setattr(scores_module, "_WIDTH", 8)
    for size in (7, 8, 21):
        weights = np.random.default_rng(size).integers(-3, 4, size).astype(np.float32)
        scores = jax.jit(lamp_scores.__wrapped__)(weights)
        np.testing.assert_allclose(scores, _exact_scores(weights), rtol=1e-6, err_msg=f"{size}")


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


def test_sums_of_squares_fit_their_words():
    # Digits have as many bits as let `size` of them add up in an int32, 24 at most; squares have as
    # many digits as let `size` of them add up in 62 bits.
    for size in [*range(1, 70), 2**16 - 1, 2**16, 2**16 + 1, 2**30 - 1, 2**30, 2**30 + 1]:
        digit, bits = count_digit_bits(size), count_bits(size)
        assert size * (2**digit - 1) < 2**31
        assert digit == 24 or size * 2 ** (digit + 1) > 2**31
        assert size * 2**bits <= 2**62 < 2 * size * 2 ** (bits + digit)
        assert bits % digit == 0
