"""Norms of scores: the same bits in whatever order, and on whatever mesh, they are summed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact
from sparsity.selection import counting
from sparsity.selection.scores import Scores, scalars, stored

_BITS = 30  # of a square as a fraction of about the largest; what is less counts as nothing
_ROWS = 64  # of a leaf that may be reshaped, for threads to share


def norms(scores: Sequence[Scores]) -> jax.Array:
    """L2 norms of the finite scores of each leaf.

    Squares are counted in units of 2**-30 of about the largest, so that their sum is an integer.

    Args:
        scores: Floating-point scores of leaves that are not empty.

    Returns:
        float32[leaves]; float64 if any scores are.
    """
    real = jnp.result_type(jnp.float32, *(x.dtype for x in scores))
    leaves, axes = zip(*map(_in_rows, scores), strict=True)
    ends = [_ends(_finite(x, real), own) for x, own in zip(leaves, axes, strict=True)]
    lows, highs = zip(*ends, strict=True)
    largest = jnp.max(jnp.maximum(-_stack(lows), _stack(highs)), axis=1)
    _, exponents = jnp.frexp(largest)
    # In two steps: a single factor may be out of range.
    scales = stored([jnp.ldexp(jnp.ones((), real), (i - exponents) // 2) for i in (0, 1)])
    # A fused loop each: what both read is not stored between them.
    held = lax.optimization_barrier([x.arrays for x in leaves])
    factors = [scalars(scale) for scale in scales]
    summands = max(math.prod(x.shape[i] for i in own) for x, own in zip(leaves, axes, strict=True))
    bits = 31 - max(summands - 1, 1).bit_length()
    sums = []
    for i, (leaf, arrays) in enumerate(zip(leaves, held, strict=True)):
        values = _finite(dataclasses.replace(leaf, arrays=arrays), real)
        sums.append(_digits(values * factors[0][i] * factors[1][i], bits, axes[i]))
    digits = [_stack(own).T for own in zip(*sums, strict=True)]  # each [sums, leaves]
    total = exact.total(digits[0])
    for i, digit in enumerate(digits[1:], 1):
        total = exact.plus(total, exact.shift_left(exact.total(digit), bits * i))
    square = exact.to_float(total).astype(real)
    norm: jax.Array = jnp.ldexp(jnp.sqrt(jnp.ldexp(square, -_BITS)), exponents)
    return norm


def _in_rows(scores: Scores) -> tuple[Scores, range]:
    """The scores, those that may be reshaped as [rows, width]; and the axes to sum over."""
    if scores.uses_index or not all(map(counting.use_flat, scores.arrays)):
        return scores, range(scores.ndim)
    rows = next(rows for rows in range(_ROWS, 0, -1) if scores.size % rows == 0)
    arrays = tuple(x.reshape(rows, -1) for x in scores.arrays)
    return dataclasses.replace(scores, arrays=arrays), range(1, 2)


def _finite(scores: Scores, real: np.dtype) -> jax.Array:
    values = scores.compute().astype(real)
    return jnp.where(jnp.isfinite(values), values, 0)


def _ends(values: jax.Array, axes: range) -> Sequence[jax.Array]:
    """The least and the greatest of each row, or 0: two reductions make a fused loop."""
    zero = np.zeros((), values.dtype)
    ends: Sequence[jax.Array] = lax.reduce(
        [values, values],
        [zero, zero],
        lambda a, b: [jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])],
        tuple(axes),
    )
    return ends


def _digits(values: jax.Array, bits: int, axes: range) -> list[jax.Array]:
    """The sums of each row of the digits of squares, of so many bits, the lowest first."""
    whole = jnp.round(values * values * 2.0**_BITS).astype(jnp.int32)
    whole = jnp.minimum(whole, 2**_BITS - 1)
    parts = [(whole >> shift) & ((1 << bits) - 1) for shift in range(0, _BITS, bits)]
    return counting.sums(parts, axes)


def _stack(rows: Sequence[jax.Array]) -> jax.Array:
    """[leaves, most rows] of numbers of each leaf's rows, or of the leaf."""
    flat = [x.reshape(-1) for x in rows]
    most = max(x.size for x in flat)
    return jnp.stack([x if x.size == most else jnp.pad(x, (0, most - x.size)) for x in flat])
