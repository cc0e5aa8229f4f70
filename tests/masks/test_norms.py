"""Norms of leaves, which divide scores that compete across leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.masks.global_scope import divide_by_norm


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e30, 1e-15, 0.0])
@pytest.mark.parametrize("shape", [(50,), (8, 5), (1, 1), (131_071,)])
def test_scores_are_divided_by_the_norm_of_the_finite_ones(shape, scale):
    scores = (np.random.default_rng(0).normal(size=shape) * scale).astype(np.float32)
    if scores.size > 6:
        scores.reshape(-1)[3:6] = np.nan, np.inf, -np.inf
    norm = np.linalg.norm(scores[np.isfinite(scores)].astype(np.float64))
    divided = divide_by_norm(jnp.asarray(scores), 1e-30)
    finite = np.isfinite(scores)
    np.testing.assert_allclose(divided[finite], scores[finite] / (norm or 1), rtol=1e-6)
    np.testing.assert_array_equal(divided[~finite], scores[~finite])
    compiled = jax.jit(divide_by_norm)(jnp.asarray(scores), 1e-30)
    np.testing.assert_array_equal(compiled, divided)


def test_integers_and_empty_leaves_stay():
    for scores in (jnp.arange(4), jnp.zeros((0, 3))):
        assert divide_by_norm(scores, 1e-8) is scores
