"""Oracles and scores for the tests of selection: stable sorts of exact ranks in numpy."""

import jax.numpy as jnp
import numpy as np

from tests import helpers


def ranks(scores):
    """Integers in the order of the scores: exact, NaN lowest, -0.0 equal to 0.0."""
    scores = np.asarray(scores).ravel()
    if jnp.issubdtype(scores.dtype, jnp.floating):
        with np.errstate(invalid="ignore"):
            scores = scores.astype(np.float64)
    elif scores.dtype.kind not in "iu":
        scores = scores.astype(np.int32)
    nan = scores != scores
    _, rank = np.unique(np.where(nan, scores.dtype.type(0), scores), return_inverse=True)
    return np.where(nan, -1, rank)


def best_first(scores, where=None):
    """Flat indices of the eligible scores, by a stable sort."""
    rank = ranks(scores)
    if where is not None:
        rank = np.where(np.ravel(where) != 0, rank, -2)
    return np.argsort(-rank, kind="stable")[: np.sum(rank > -2)]


def best(scores, k, where=None):
    """Mask of the k highest."""
    mask = np.zeros(np.size(scores), np.uint8)
    mask[best_first(scores, where)[:k]] = 1
    return mask.reshape(np.shape(scores))


def any_bits(dtype, n, seed=0):
    """Scores of any bit patterns, with ties, both zeros and the extremes among them."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return rng.random(n) < 0.4
    if jnp.issubdtype(dtype, jnp.integer):
        lowest, highest = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        wide = np.int64 if lowest < 0 else np.uint64
        x = rng.integers(lowest, highest, n, endpoint=True, dtype=wide).astype(dtype)
        x[-1], x[0] = highest, lowest
    else:
        bits = rng.integers(0, 16 if dtype == jnp.float4_e2m1fn else 256, n * dtype.itemsize)
        x = bits.astype(np.uint8).view(dtype)
        x[1::7], x[2::7] = 0.0, -0.0
    x[::5] = x[0]
    return x


def drop_and_grow(mask, drop, grow, fraction):
    """Evci et al. 2020, algorithm 1, for one layer."""
    active = int(np.sum(mask))
    kept = best(drop, helpers.num_kept(active, fraction), mask)
    return kept | best(grow, active - int(kept.sum()), 1 - kept)


def largest(x, density):
    """Entries of the largest magnitude, all others zero."""
    kept = best(np.abs(x), helpers.num_kept(x.size, 1 - density))
    return np.where(kept, x, np.zeros((), x.dtype))


def n_of_m(x, n, m, axis=-1):
    """The n entries of the largest magnitude of every m along an axis, all others zero."""
    moved = np.moveaxis(x, axis, -1).copy(order="C")
    for line in moved.reshape(-1, moved.shape[-1]):  # views
        for start in range(0, line.size, m):
            group = line[start : start + m]
            group[best(np.abs(group), n) == 0] = 0
    return np.moveaxis(moved, -1, axis)
