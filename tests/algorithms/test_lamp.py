"""LAMP: scores by hand and by numpy, masks of whole networks."""

import jax
import jax.numpy as jnp
import numpy as np
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
        found = updater.calculate_scores(jax.tree.map(jnp.asarray, params))
        oracles.close(found, expected)
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
