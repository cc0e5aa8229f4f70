"""Squares relative to the larger squares of their layer: the scores of LAMP.

A square is a float, scaled so that the largest of its layer lies in [1/4, 1]. Sums of
squares are integers: a summand is cut to a multiple of 2**-B, where B = 62 - log2(size) rounded
down to whole digits. So the bits of a score depend neither on the order of the sum nor on the mesh,
and scores never rise from one rank to the next.

Source: Lee et al. 2021, "Layer-adaptive sparsity for the magnitude-based pruning", equation 4.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact
from sparsity.core.dtypes import promote
from sparsity.core.exact import Words
from sparsity.core.exact_sums import max_abs

_WIDTH = 2**16  # scores that are computed at once, and at most so many 16-bit digits to sum


@jax.jit
def lamp_scores(weights: jax.Array) -> jax.Array:
    """Returns the square of each weight over the sum of the squares that rank no lower.

    Args:
      weights: array of any shape, real or complex.

    Returns:
      Scores in [0, 1] of the same shape, at least float32; the same bits on any mesh. A weight of 0
      scores 0, a weight that is not finite scores NaN.

    Example:
      >>> lamp_scores(jnp.array([1.0, -3.0, 2.0, 2.0]))
      Array([0.05555556, 1.        , 0.30769232, 0.23529412], dtype=float32)
    """
    if not weights.size:
        return jnp.zeros(weights.shape, promote(jnp.abs(weights).dtype, jnp.float32))
    squares = ScaledLayer.read(weights).squares()
    index = lax.iota(jnp.int32, len(squares))
    falling, order = lax.sort((-squares, index), num_keys=1, is_stable=True)
    width = min(_WIDTH, len(squares))
    rows = jnp.pad(falling, (0, -len(squares) % width)).reshape(-1, width)

    def score(above: Words, row: jax.Array) -> tuple[Words, jax.Array]:
        ranked, sums = score_ranks(row, count_bits(weights.size), above)
        return (sums[0][-1], sums[1][-1]), ranked

    zero = rows[0, 0].astype(jnp.uint32) & 0  # varies over a mesh as the weights do
    ranked = lax.scan(score, (zero, zero), rows)[1].reshape(-1)[: len(squares)]
    return jnp.zeros_like(squares).at[order].set(ranked).reshape(weights.shape)


class ScaledLayer(NamedTuple):
    """Weights of a layer with a scale for their squares.

    Attributes:
      weights: the weights, flat.
      scales: two powers of two, whose product takes the largest finite weight to [1/2, 1].
    """

    weights: jax.Array
    scales: tuple[jax.Array, jax.Array]

    @classmethod
    def read(cls, weights: jax.Array) -> ScaledLayer:
        """Reads a layer from its weights, of any shape."""
        magnitudes = _compute_magnitudes(weights)
        _, exponent = jnp.frexp(max_abs(magnitudes, tuple(range(magnitudes.ndim))))
        one = jnp.ones((), magnitudes.dtype)
        # In two steps: a single factor may be out of range.
        scales = jnp.ldexp(one, -exponent // 2), jnp.ldexp(one, (1 - exponent) // 2)
        return cls(weights.reshape(-1), scales)

    def squares(self, weights: jax.Array | None = None) -> jax.Array:
        """Returns squares in [0, 1] of some weights, of all by default; NaN if not finite."""
        magnitudes = _compute_magnitudes(self.weights if weights is None else weights)
        magnitudes = jnp.where(jnp.isfinite(magnitudes), magnitudes, np.nan)
        return jnp.square(magnitudes * self.scales[0] * self.scales[1])


def _compute_magnitudes(weights: jax.Array) -> jax.Array:
    return jnp.abs(weights).astype(read_score_dtype(weights))


def read_score_dtype(weights: jax.Array) -> np.dtype:
    """Returns the dtype of scores."""
    real = jnp.finfo(weights.dtype).dtype  # of the absolute values
    return promote(real, jnp.float32)


def count_digit_bits(size: int) -> int:
    """Returns the bits of a digit such that `size` < 2**31 digits add up in an int32."""
    return max(1, min(31 - max(size - 1, 1).bit_length(), 24))


def count_bits(size: int) -> int:
    """Returns B, the number of bits of a summand of a layer."""
    bits = count_digit_bits(size)
    return (62 - max(size - 1, 1).bit_length()) // bits * bits


def score_ranks(
    falling: jax.Array, bits: int | np.ndarray, above: Words
) -> tuple[jax.Array, Words]:
    """Returns scores and sums of negative squares[..., n] by rank, n at most `_WIDTH`."""
    real = falling.dtype
    scaled = jnp.where(jnp.isnan(falling), 0, -falling) * np.exp2(bits).astype(real)
    # Words of 32 bits; cutting each square alone makes the sum independent of the order.
    high = jnp.trunc(scaled * 2.0**-32)
    words = high.astype(jnp.uint32), jnp.trunc(scaled - high * 2.0**32).astype(jnp.uint32)
    sums = exact.plus(exact.running_totals(words), above)
    totals = sums[0].astype(real) * 2.0**32 + sums[1].astype(real)
    totals = totals * np.exp2(-bits).astype(real)
    return jnp.where(falling == 0, 0, -falling / jnp.where(totals == 0, 1, totals)), sums
