"""Sums that sharding cannot change: of floats, with the same bits in any order, and of masks."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@functools.partial(jax.jit, static_argnums=1)
def ordered_sum(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
    """Sums floats with the same bits in any order, so that sharding cannot change a mask.

    Args:
      x: array of float32 or float64.
      axis: axes to reduce, to sums of at most 2**29 summands.

    Returns:
      The sums, without derivatives. A summand is rounded to 2**-32 (float64: 2**-60) of the largest
      one of its sum, on devices that do not flush subnormal numbers to 0.
    """
    x = lax.stop_gradient(x)  # jax has no tangents for a reduction of integers and floats together
    size = math.prod(x.shape[i] for i in axis)
    if size > 2**29:
        raise ValueError(f"A sum may have at most 2**29 summands, got {size} of shape {x.shape}.")
    bits = 30 - max(size - 1, 1).bit_length()  # of a digit, so that a sum of digits fits an int32
    exponents = _halve_exponent(jnp.expand_dims(max_abs(x, axis), axis))
    # Another operation than in `max_abs`: XLA would store a value that both loops read.
    is_finite = jnp.abs(x) < np.inf
    remainder, digits = jnp.where(is_finite, x, 0), []
    for exponent in exponents:
        remainder = remainder * _power_of_two(-exponent, x.dtype)
    for _ in range(-(-(60 if x.dtype == jnp.float64 else 32) // bits)):
        remainder = remainder * 2.0**bits
        digit = jnp.trunc(remainder)
        remainder = remainder - digit
        digits.append(digit.astype(jnp.int32))
    nonfinite = jnp.where(is_finite, 0, x)
    *digit_sums, nonfinite_sum = lax.reduce(
        [*digits, nonfinite],
        [*[np.int32(0)] * len(digits), np.zeros((), x.dtype)],
        lambda a, b: [one + more for one, more in zip(a, b, strict=True)],
        axis,
    )
    total = jnp.zeros_like(nonfinite_sum)
    for i, digit_sum in enumerate(digit_sums, 1):
        total = total + digit_sum.astype(x.dtype) * 2.0 ** (-i * bits)
    for exponent in exponents:
        total = total * _power_of_two(jnp.squeeze(exponent, axis), x.dtype)
    # This sum is exactly 0 unless a summand is not finite; then infinite or NaN, in any order.
    return jnp.where(nonfinite_sum == 0, total, nonfinite_sum)


def sums(masks: Sequence[jax.Array], axes: Sequence[int]) -> list[jax.Array]:
    """Returns int32 sums of two or more masks, or of partial sums, along axes.

    A reduction of two and more operands compiles to one fused loop. XLA:CPU cuts a reduction of one
    integer operand into windows, and stores an int32 operand as large as the data first.
    """
    return lax.reduce(
        [mask.astype(jnp.int32) for mask in masks],
        [np.int32(0)] * len(masks),
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        tuple(axes),
    )


def count(mask: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Counts the entries of a bool mask that are True along axes, int32.

    The barrier keeps a second operand that nobody reads, and with it the fused loop of `sums`.
    """
    return lax.optimization_barrier(sums([mask, ~mask], axes))[0]


@jax.jit
def scale_to_one(arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """Returns floats times one power of two, and this power as two factors.

    The largest finite absolute value of all arrays comes to [1/2, 1].
    """
    largest = _find_largest(arrays)
    first, second = (_power_of_two(-x, largest.dtype) for x in _halve_exponent(largest))
    scaled = [x * first.astype(x.dtype) * second.astype(x.dtype) for x in arrays]
    return scaled, (first, second)


@jax.jit
def multiply_in_range(ones: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the products of pairs, times one power of two if all would vanish or one overflow.

    The largest factors decide: their product is then 2**-60 or 2**120, and is not scaled between.

    Args:
      ones: arrays of at least float32.
      others: arrays of the same shapes, of at least float32.
    """
    exponents = [x for y in (ones, others) for x in _halve_exponent(_find_largest(y))]
    exponent = sum(x.astype(jnp.int32) for x in exponents)
    shift = jnp.clip(jnp.clip(exponent, -60, 120) - exponent, -250, 250)
    # In two steps: a single factor may be out of range.
    first, second = (_power_of_two(x, np.dtype(np.float32)) for x in (shift >> 1, (shift + 1) >> 1))
    pairs = zip(ones, others, strict=True)
    return [x * (y * first.astype(y.dtype) * second.astype(y.dtype)) for x, y in pairs]


def _find_largest(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the largest finite absolute value of all arrays, 1 if all are empty."""
    sizes = [jnp.abs(x) if jnp.iscomplexobj(x) else x for x in arrays if x.size]
    maxima = [max_abs(x, tuple(range(x.ndim))) for x in sizes] or [jnp.ones(())]
    return functools.reduce(jnp.maximum, maxima)


@functools.partial(jax.jit, static_argnums=1)
def scale_for_sums(arrays: Sequence[jax.Array], summands: int) -> list[jax.Array]:
    """Scales floats by one power of two, 1 if possible, so that no sum overflows.

    Args:
      arrays: arrays of at least float32.
      summands: the most summands of a sum.
    """
    largest = _find_largest(arrays)
    most = jnp.finfo(largest.dtype).maxexp - 1 - max(summands - 1, 0).bit_length()
    factor = _power_of_two(jnp.minimum(most - sum(_halve_exponent(largest)), 0), largest.dtype)
    return [x * factor.astype(x.dtype) for x in arrays]


def max_abs(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
    """Returns the largest finite absolute value along axes."""
    return jnp.max(jnp.abs(finite(x)), axis=axis, initial=0)


def _halve_exponent(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two integers with the sum e, where x < 2**e; 2**e itself may overflow."""
    info = jnp.finfo(x.dtype)
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{info.bits}"))
    # The exponent field has a bias of maxexp - 1; one less makes 2**e exceed x.
    exponent = (bits >> info.nmant) - (info.maxexp - 2)
    return exponent >> 1, exponent - (exponent >> 1)


def _power_of_two(exponent: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns 2**exponent."""
    info = jnp.finfo(dtype)
    # The exponent field alone is exact, where `exp2` may round.
    return lax.bitcast_convert_type((exponent + (info.maxexp - 1)) << info.nmant, dtype)


def finite(x: jax.Array) -> jax.Array:
    """Replaces floats that are not finite by 0."""
    return jnp.where(jnp.isfinite(x), x, 0)
