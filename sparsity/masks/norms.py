"""Norms of scores: the bits depend neither on the order of the sum nor on the mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact, exact_sums, host
from sparsity.core.dtypes import promote
from sparsity.core.exact_sums import sums
from sparsity.core.kernels import unstack, use_flat
from sparsity.core.trees import PyTree
from sparsity.selection import EntryScores, Ranked

_BITS = 30  # of a square as a fraction of about the largest; smaller parts count as 0
_LEAST_EXPONENT = -60  # below, XLA may take numbers for 0 that numpy does not
_ROWS = 64  # of a parameter that may be reshaped, for threads to share


def divide_by_norms(scores: Sequence[EntryScores], eps: float) -> list[EntryScores]:
    """Divides the scores of each parameter by their L2 norm; integers and empty ones stay.

    Args:
      scores: scores of each parameter.
      eps: number added to the norm.
    """
    divided = list(scores)
    places = [i for i, x in enumerate(scores) if jnp.issubdtype(x.dtype, jnp.floating) and x.size]
    if places:
        factors = _compute_factors(*norms([Ranked.wrap(scores[i]) for i in places]), eps)
        for i, factor in zip(places, zip(*factors, strict=True), strict=True):
            fn, scalars = _Scaled(scores[i].fn), (*scores[i].scalars, *factor)
            divided[i] = dataclasses.replace(scores[i], fn=fn, scalars=scalars)
    return divided


def _compute_factors_on_host(
    fractions: np.ndarray, exponents: np.ndarray, eps: float
) -> list[list[np.ndarray]]:
    real = fractions.dtype.type
    powers = [np.ldexp(real(1), (i - exponents) // 2) for i in (0, 1)]
    sums = fractions + real(eps) * powers[0] * powers[1]
    factors = [*powers, 1 / np.maximum(sums, np.finfo(real).tiny)]
    return [[x[i, ...] for i in range(len(x))] for x in factors]  # arrays of no axes


@host.instead(_compute_factors_on_host)
def _compute_factors(
    fractions: jax.Array, exponents: jax.Array, eps: float
) -> list[Sequence[jax.Array]]:
    """Returns three factors of the scores of each parameter, numbers, from `norms`.

    The first two are powers of two, which take the scores to at most 1: a norm may be out of range.
    """
    real = fractions.dtype
    powers = [jnp.ldexp(jnp.ones((), real), (i - exponents) // 2) for i in (0, 1)]
    sums = fractions + jnp.asarray(eps, real) * powers[0] * powers[1]
    # A product: XLA turns a division into a product in some kernels and not in others.
    return list(map(unstack, [*powers, 1 / jnp.maximum(sums, jnp.finfo(real).tiny)]))


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """Product of `fn` of all values but the last three, and these; equal for equal `fn`."""

    fn: Callable[..., jax.Array]

    def __call__(self, *values: jax.Array) -> jax.Array:
        score = self.fn(*values[:-3])
        wide = score.astype(promote(score.dtype, jnp.float32))
        for factor in values[-3:]:
            wide = wide * factor.astype(wide.dtype)
        return wide

    @property
    def on_host(self) -> Callable[..., np.ndarray] | None:
        """Function of arrays of numpy with the same bits; `None` if numpy does not know `fn`."""
        return self._on_host if host.find_body(self.fn) else None

    def _on_host(self, *values: np.ndarray) -> np.ndarray:
        score = host.call(self.fn, *values[:-3])
        wide = score.astype(np.dtype(promote(score.dtype, jnp.float32)), copy=False)
        for factor in values[-3:]:
            wide = host.multiply_flushed(wide, factor.astype(wide.dtype))
        return wide


def _norms_on_host(all_ranked: Sequence[Ranked]) -> PyTree:
    """Computes `norms` from sums of the same integers."""
    if not all(ranked.is_on_host for ranked in all_ranked):
        return NotImplemented
    real = np.dtype(jnp.result_type(promote(jnp.float32, *(x.dtype for x in all_ranked))))
    squares, exponents = zip(*(_square_on_host(x, real) for x in all_ranked), strict=True)
    if min(exponents) < _LEAST_EXPONENT:
        return NotImplemented
    words = [exact.split(x) for x in squares]
    high, low = (np.array(x).astype(np.float32) for x in zip(*words, strict=True))
    square = (high * np.float32(2.0**32) + low).astype(real)
    return np.sqrt(np.ldexp(square, -_BITS)), np.array(exponents, np.int32)


def _square_on_host(ranked: Ranked, real: np.dtype) -> tuple[int, int]:
    """Returns a parameter's sum of squares in units of 2**-30, and the exponent of the unit."""
    arrays: list[PyTree] = [x.reshape(-1) for x in ranked.arrays]

    def read(at: slice) -> np.ndarray:
        values = np.abs(ranked.compute_on_host([x[at] for x in arrays])).astype(real)
        # A finite sum has finite terms; only otherwise each is tested.
        return values if np.isfinite(values.sum()) else np.where(np.isfinite(values), values, 0)

    chunks = list(host.chunks(ranked.size))
    exponent = int(np.frexp(max(read(at).max() for at in chunks))[1])
    scale, total = np.ldexp(real.type(1), [(i - exponent) // 2 for i in (0, 1)]), 0
    for at in chunks:
        values = read(at) * scale[0] * scale[1]
        units = np.rint(values * values * real.type(2.0**_BITS))
        total += int(np.minimum(units, 2**_BITS - 1).sum(dtype=np.float64))
    return total, exponent


@host.instead(_norms_on_host)
def norms(all_ranked: Sequence[Ranked]) -> tuple[jax.Array, jax.Array]:
    """Returns the L2 norm of the finite scores of each parameter: fractions and exponents of 2.

    Squares are counted in units of 2**-30 of about the largest, so that their sum is an integer.

    Args:
      all_ranked: floating-point scores of parameters that are not empty.

    Returns:
      float32[parameters], float64 if any scores are; and int32[parameters].
    """
    real = jnp.result_type(promote(jnp.float32, *(x.dtype for x in all_ranked)))
    all_ranked, axes = zip(*(_in_rows(x) for x in all_ranked), strict=True)
    rows = [_largest(*x, real) for x in zip(all_ranked, axes, strict=True)]
    largest = jnp.max(_stack(rows), axis=1)
    _, exponents = jnp.frexp(largest)
    # In two steps: a single factor may be out of range.
    scales = [jnp.ldexp(jnp.ones((), real), (i - exponents) // 2) for i in (0, 1)]
    factors = zip(*map(unstack, scales), strict=True)
    summands = max(
        math.prod(x.shape[i] for i in summed) for x, summed in zip(all_ranked, axes, strict=True)
    )
    # Bits of a digit, so that the digits of all summands add up in an int32
    bits = 31 - max(summands - 1, 1).bit_length()
    digit_sums = [
        _digits(ranked, summed, real, bits, factor)
        for ranked, summed, factor in zip(all_ranked, axes, factors, strict=True)
    ]
    digits = [_stack(rows).T for rows in zip(*digit_sums, strict=True)]  # each [sums, parameters]
    total = exact.total(digits[0])
    for i, digit in enumerate(digits[1:], 1):
        total = exact.plus(total, exact.shift_left(exact.total(digit), bits * i))
    square = exact.to_float(total).astype(real)
    return jnp.sqrt(jnp.ldexp(square, -_BITS)), exponents


def _in_rows(ranked: Ranked) -> tuple[Ranked, range]:
    """Returns scores, as [rows, width] if they may be reshaped, and the axes to sum over."""
    if ranked.recipe.reads_index or not all(map(use_flat, ranked.arrays)):
        return ranked, range(len(ranked.shape))
    rows = next(rows for rows in range(_ROWS, 0, -1) if ranked.size % rows == 0)
    arrays = tuple(x.reshape(rows, -1) for x in ranked.arrays)
    return dataclasses.replace(ranked, arrays=arrays), range(1, 2)


# Both are traced once for each shape.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _largest(ranked: Ranked, axes: range, real: np.dtype) -> jax.Array:
    """Returns the largest finite absolute value of each row."""
    return exact_sums.max_abs(ranked.compute().astype(real), tuple(axes))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _digits(
    ranked: Ranked, axes: range, real: np.dtype, bits: int, factors: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns the sum of each digit of the scaled squares in each row, the lowest digit first."""
    # A separate fused loop: without the barrier, values that `_largest` reads too are stored.
    ranked = lax.optimization_barrier(ranked)
    values = exact_sums.finite(ranked.compute().astype(real)) * factors[0] * factors[1]
    squares = jnp.round(values * values * 2.0**_BITS).astype(jnp.int32)
    # Rounding may reach 2**30, which takes one bit more.
    squares = jnp.minimum(squares, 2**_BITS - 1)
    parts = [(squares >> shift) & ((1 << bits) - 1) for shift in range(0, _BITS, bits)]
    return sums(parts, axes)


def _stack(rows: Sequence[jax.Array]) -> jax.Array:
    """Stacks numbers of each parameter or its rows: [parameters, most rows], padded with 0."""
    flat = [x.reshape(-1) for x in rows]
    most = max(x.size for x in flat)
    return jnp.stack([x if x.size == most else jnp.pad(x, (0, most - x.size)) for x in flat])
