"""Brackets of the squares at which the kept weights of each layer end, for the search of LAMP.

A sample of each layer tells where a bracket may be. Passes count and add the squares above a few
pivots, in float32, and narrow the brackets of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.algorithms.lamp.scores import ScaledLayer

_ROWS = 1024  # of a layer: float32 sums of a row are then exact to about 1e-5
# Pivots, in deviations of a sampled rank.
_PIVOT_DEVIATIONS = np.array([-8, -3, -1, 0, 1, 3, 8], np.float32)
_FRACTIONS = np.arange(1, 8, dtype=np.float32) / 8  # pivots of a later pass in a bracket
_FULL = 0.75  # of the room for weights inside a bracket: counts of a pass are float32
_PASSES = 8  # at most: then layers are sorted
_SLACK = 1e-4  # relative error of a score from float32 sums


class _Brackets(NamedTuple):
    """Brackets of all layers, float32[layers].

    Attributes:
      low: lower ends, which are outside.
      high: upper ends, which are inside.
      counts: about how many weights lie inside.
    """

    low: jax.Array
    high: jax.Array
    counts: jax.Array


def find_brackets(
    layers: Sequence[ScaledLayer], k: jax.Array, room: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the ends of the brackets, each [layers]; a small layer lies inside as a whole.

    Args:
      layers: the layers.
      k: number of weights to keep, of all layers.
      room: most weights of a layer to sample, and most to leave inside its bracket.
    """
    is_large = count_weights(layers) > room
    # Squares are at least 0, so that -1 has all of them above.
    low = jnp.full(len(layers), -1, jnp.float32)
    first_pivots = _sample_pivots(layers, k, room)

    def is_wide(state: tuple[jax.Array, _Brackets]) -> jax.Array:
        passes, brackets = state
        return (passes < _PASSES) & jnp.any((brackets.counts > room * _FULL) & is_large)

    def step(state: tuple[jax.Array, _Brackets]) -> tuple[jax.Array, _Brackets]:
        passes, brackets = state
        ends = jnp.stack([brackets.low, brackets.high], axis=1)
        # Interpolates between bits of floats, nearly between logarithms, as squares span decades.
        start, stop = (lax.bitcast_convert_type(x, jnp.int32) for x in jnp.clip(ends.T, 0, 1))
        width = (stop - start).astype(jnp.float32)
        positions = start[:, None] + (width[:, None] * _FRACTIONS).astype(jnp.int32)
        pivots = lax.bitcast_convert_type(positions, jnp.float32)
        pivots = jnp.concatenate([ends, jnp.where(passes == 0, first_pivots, pivots)], axis=1)
        return passes + 1, _narrow_brackets(layers, pivots, k)

    start = jnp.int32(0), _Brackets(low, low + np.inf, low + np.inf)
    _, (low, high, _) = lax.while_loop(is_wide, step, start)
    return jnp.where(is_large, low, -1), jnp.where(is_large, high, np.inf)


def _sample_pivots(layers: Sequence[ScaledLayer], k: jax.Array, room: int) -> jax.Array:
    """Returns pivots[layers, n] about the squares of the last kept weights, by samples.

    Each entry of a sample stands for `share` weights of its layer. The score of an entry is about
    its square over `share` times the sum of the squares of the sample that are no lower. The scores
    of all samples, each counted `share` times, give the score of the k-th weight, and so the rank
    of the last kept weight in each sample. Pivots are the squares of the sample at this rank, and
    at some deviations of the rank below and above.
    """
    samples, counts = [], []
    for layer in layers:
        stride = -(-layer.weights.size // room) | 1  # odd: not in step with rows
        sample = layer.squares(layer.weights[::stride]).astype(jnp.float32)
        counts.append(len(sample))
        samples.append(jnp.pad(jnp.where(jnp.isnan(sample), 0, sample), (0, room - len(sample))))
    count = np.array(counts, np.int32)[:, None]
    share = count_weights(layers).astype(np.float32)[:, None] / count.astype(np.float32)
    squares = -jnp.sort(-jnp.stack(samples), axis=1)
    sums = jnp.cumsum(squares, axis=1) * share
    scores = squares / jnp.where(sums == 0, 1, sums)
    last = _find_last_score(scores, np.where(np.arange(room) < count, share, 0), k)
    rank = jnp.sum(scores >= last, axis=1, keepdims=True, dtype=jnp.int32)
    rank = jnp.minimum(rank, count).astype(jnp.float32)
    deviation = jnp.sqrt(rank * (1 - rank / count.astype(np.float32)) + 1)
    ranks = jnp.round(rank + deviation * _PIVOT_DEVIATIONS).astype(jnp.int32)
    pivots = jnp.take_along_axis(squares, jnp.clip(ranks, 0, count - 1), axis=1)
    # Ranks beyond the sample: all weights lie below the pivot, or all above.
    return jnp.where(ranks < 0, np.inf, jnp.where(ranks >= count, -1, pivots))


def _find_last_score(scores: jax.Array, weights: np.ndarray, k: jax.Array) -> jax.Array:
    """Returns the score at which the weights of scores that are no lower reach k, a scalar."""
    falling, ordered = lax.sort(
        (-scores.reshape(-1), jnp.asarray(weights.astype(np.float32).reshape(-1))), num_keys=1
    )
    rank = jnp.sum(jnp.cumsum(ordered) < k, dtype=jnp.int32)
    return -falling[jnp.minimum(rank, len(falling) - 1)]


def _narrow_brackets(layers: Sequence[ScaledLayer], pivots: jax.Array, k: jax.Array) -> _Brackets:
    """Returns the brackets between the pivots next to the square of the last kept weight.

    At a pivot the score is about the pivot over the sum of the squares above: the score of the last
    weight above, and of the first below.
    """
    squares = (split_into_rows(layer.squares().astype(jnp.float32)) for layer in layers)
    tables = [_count_above(x, row) for x, row in zip(squares, pivots, strict=True)]
    counts, sums = (jnp.stack(x).astype(jnp.float32) for x in zip(*tables, strict=True))
    # Sums of tiny squares may be 0. Without weights above, a pivot bounds no score from above.
    scores = jnp.where(counts > 0, pivots / jnp.maximum(sums, 1e-37), np.inf)
    scores = jnp.where(pivots < 0, -1, scores)
    sizes = count_weights(layers).astype(np.float32)[:, None]
    floor, ceiling = _bound_last_score(scores, counts, sizes, k)
    is_below, is_above = scores <= floor, scores > ceiling
    low = jnp.max(jnp.where(is_below, pivots, -1), axis=1)
    high = jnp.min(jnp.where(is_above, pivots, np.inf), axis=1)
    reached = jnp.min(jnp.where(is_below, counts, sizes), axis=1)
    return _Brackets(low, high, reached - jnp.max(jnp.where(is_above, counts, 0), axis=1))


def _bound_last_score(
    scores: jax.Array, counts: jax.Array, sizes: np.ndarray, k: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns a lower and an upper bound of the k-th highest score, two scalars.

    Take the score t of some pivot. In each layer, weights above a pivot whose score exceeds t score
    more than t themselves; weights below a pivot whose score does not exceed t do not. So at least
    `fewest` and at most `most` weights score more than t. If `fewest` reaches k, the k-th highest
    score is no lower than t; if `most` stays below k, it is no higher.

    Args:
      scores: scores at the pivots, [layers, n].
      counts: numbers of weights above the pivots, [layers, n].
      sizes: numbers of weights, [layers, 1].
      k: number of weights to keep, of all layers.
    """
    thresholds = scores.reshape(-1)
    exceeds = scores > thresholds[:, None, None]
    fewest = jnp.sum(jnp.max(jnp.where(exceeds, counts, 0), axis=2), axis=1)
    most = jnp.sum(jnp.min(jnp.where(exceeds, sizes, counts), axis=2), axis=1)
    floor = jnp.max(jnp.where(fewest >= k, thresholds, -1)) * (1 - _SLACK)
    ceiling = jnp.min(jnp.where(most < k, thresholds, np.inf)) * (1 + _SLACK)
    return floor, ceiling


def _count_above(squares: jax.Array, pivots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns numbers and sums of squares[rows, width] above pivots[n], int32[n] and float32[n]."""
    masks = [squares > pivot for pivot in pivots]
    n = len(masks)
    rows = lax.reduce(
        [x.astype(jnp.int32) for x in masks] + [jnp.where(x, squares, 0) for x in masks],
        [np.int32(0)] * n + [np.float32(0)] * n,
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        (1,),
    )
    counts = [jnp.sum(x, dtype=jnp.int32) for x in rows[:n]]
    return jnp.stack(counts), jnp.stack([jnp.sum(x) for x in rows[n:]])


def count_weights(layers: Sequence[ScaledLayer]) -> np.ndarray:
    """Returns the numbers of weights, int32[layers]."""
    return np.array([layer.weights.size for layer in layers], np.int32)


def split_into_rows(x: jax.Array) -> jax.Array:
    """Returns x[n] as rows, for threads to share."""
    most = min(_ROWS, len(x))
    return x.reshape(next(rows for rows in range(most, 0, -1) if len(x) % rows == 0), -1)
