"""Exact integers below 2**64 without 64-bit types, exact sums, and the number of kept weights.

An integer is two uint32 words, (high, low): jax holds no wider ones unless x64 is enabled, and a
tree may have more than 2**32 weights. The functions work elementwise and trust that results are
in range, that uint32 wraps around, and that no count is negative.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import host
from sparsity.core.checks import is_real, is_traced
from sparsity.core.trees import PyTree

Words = tuple[jax.Array, jax.Array]  # uint32 (high, low): an integer below 2**64


def num_kept(n: chex.Numeric, sparsity: chex.Numeric) -> int | jax.Array | Words:
    """Returns k = max(1, round_half_even(n * (1 - float32(sparsity)))), exact; 0 for n = 0.

    Args:
      n: number of weights: an int up to 2**40, or an array of integers below 2**31.
      sparsity: fraction to remove, in [0, 1]. Traced: clamped, and NaN removes nothing.

    Returns:
      An int if both arguments are concrete scalars, else int32 of the shape to which they
      broadcast; for an n of 2**31 and more two words of uint32.

    Raises:
      ValueError: if a concrete sparsity is outside [0, 1], or a concrete n outside its range.

    Example:
      >>> num_kept(5, 0.5), num_kept(7, 0.5), num_kept(10, 1.0)
      (2, 4, 1)
    """
    one_n = not is_traced(n) and np.ndim(n) == 0
    if not is_traced(n):
        most = 2**40 if one_n else 2**31 - 1
        counts = np.asarray(n)
        if counts.dtype.kind not in "iu" or np.any(counts < 0) or np.any(counts > most):
            raise ValueError(f"n must be an integer in [0, {most}], got n = {n!r}.")
    if not is_traced(sparsity):
        fraction = np.asarray(sparsity)
        if not is_real(fraction.dtype) or not np.all((fraction >= 0) & (fraction <= 1)):
            raise ValueError(f"sparsity must be in [0, 1], got sparsity = {sparsity!r}.")
        if one_n and fraction.ndim == 0:
            return min(int(n), max(1, round(int(n) * (1 - Fraction(float(np.float32(fraction)))))))
    if one_n and int(n) >= 2**31:
        kept: Words = _num_kept(split(int(n)), sparsity)
        return kept
    low = jnp.asarray(n).astype(jnp.uint32)
    return num_kept_words((zero_like(low), low), sparsity)[1].astype(jnp.int32)


def num_kept_int(n: int, sparsity: float) -> int:
    """Returns `num_kept` of Python numbers."""
    kept = num_kept(n, sparsity)
    assert isinstance(kept, int)
    return kept


def lowest_sparsity(fits: Callable[[float], bool]) -> float:
    """Returns the lowest float32 from 0 to 1 that fits, normal numbers and 0 only.

    Args:
      fits: whether a sparsity removes enough; true for 1, and above each one that fits.
    """
    low, high = (int(np.float32(x).view(np.int32)) for x in (np.finfo(np.float32).tiny, 1))
    low -= 1  # floats are ordered as their bits; 0 comes before the smallest normal number
    lowest = low

    def value(bits: int) -> float:
        return float(np.int32(bits).view(np.float32)) if bits > lowest else 0.0

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(value(middle)) else (middle + 1, high)
    return value(low)


@jax.jit
def _num_kept(n: Words, sparsity: chex.Numeric) -> Words:
    sparsity = jnp.asarray(sparsity, jnp.float32)
    sparsity = jnp.where(sparsity > 0, jnp.minimum(sparsity, 1), 0)
    bits = lax.bitcast_convert_type(sparsity, jnp.uint32)
    # sparsity = mantissa / 2**exponent; from 2**65 on nothing is removed, as at zero.
    mantissa = (bits & 0x7FFFFF) | 0x800000
    shift = jnp.minimum(149 - (bits >> 23), 64)
    removed = times(n, mantissa)
    doubled = _shift_right(removed, shift)
    # Some bit below the half is set just if one less has the same quotient.
    bit = zero_like(n[0]), zero_like(n[1]) | 1
    is_above_half = equal(_shift_right(minus(removed, bit), shift), doubled)
    kept = minus(n, (doubled[0] >> 1, (doubled[1] >> 1) | (doubled[0] << 31)))
    down = ((doubled[1] & 1) == 1) & (is_above_half | ((kept[1] & 1) == 1))
    kept = minus(kept, (zero_like(n[0]), down.astype(jnp.uint32)))
    one = (zero_like(n[0]), jnp.minimum(n[0] | n[1], 1))
    return choose(at_least(kept, one), kept, one)


def num_kept_words(n: Words, sparsity: chex.Numeric) -> Words:
    """Returns `num_kept` of a traced number that may be 2**31 and more."""
    kept: Words = _num_kept(n, sparsity)
    return kept


@dataclasses.dataclass(frozen=True)
class Removed:
    """Fraction of units to remove, in the place of a number of units to keep.

    Attributes:
      fraction: a scalar in [0, 1]; of n units `num_kept(n, fraction)` stay.
    """

    fraction: chex.Numeric


def limit_kept(n: Words, k: Words | Removed) -> Words:
    """Returns the number of units to keep of n: k, but at most n."""
    if isinstance(k, Removed):
        return num_kept_words(n, k.fraction)
    return choose(at_least(k, n), n, k)


def _ordered_sum_on_host(x: np.ndarray, axis: tuple[int, ...]) -> PyTree:
    """Does what `ordered_sum` does: the same integers are summed."""
    axes = {i % x.ndim for i in axis}
    size, kept = math.prod(x.shape[i] for i in axes), [i for i in range(x.ndim) if i not in axes]
    if size > 2**29 or not x.size or not x.ndim or x.dtype not in (np.float32, np.float64):
        return NotImplemented
    rows, summed = _join_axes(x, axes)
    step = max(1, 2 * host.CHUNK * len(rows) // rows.size)
    parts = [slice(i, i + step) for i in range(0, len(rows), step)]
    largest = np.maximum(rows.max(summed, keepdims=True), -rows.min(summed, keepdims=True))
    # XLA may take numbers for 0 that numpy does not; a NaN is the largest number.
    if not np.all((largest == 0) | ((largest > 2.0**-60) & (largest < np.inf))):
        return NotImplemented
    exponents, bits = np.frexp(largest)[1], 30 - max(size - 1, 1).bit_length()
    scales, one = np.ldexp(x.dtype.type(1), bits - exponents), x.dtype.type(2.0**bits)
    num_digits = -(-(60 if x.dtype == np.float64 else 32) // bits)
    counts: list[list[np.ndarray]] = []
    for at in parts:
        remainder, digits = rows[at] * (scales if 0 in summed else scales[at]), []
        for i in range(num_digits):
            digit = remainder.astype(np.int32)  # towards 0
            digits.append(digit.sum(summed, dtype=np.int32, keepdims=True))
            if i + 1 < num_digits:
                remainder -= np.trunc(remainder)
                remainder *= one
        counts.append(digits)
    total = np.zeros(largest.shape, x.dtype)
    for i, parts_of_digit in enumerate(zip(*counts, strict=True), 1):
        count = sum(parts_of_digit) if 0 in summed else np.concatenate(parts_of_digit)
        total += count.astype(x.dtype) * x.dtype.type(2.0 ** (-i * bits))
    for exponent in (exponents >> 1, exponents - (exponents >> 1)):
        total *= np.ldexp(x.dtype.type(1), exponent)
    return total.reshape([x.shape[i] for i in kept])


def _join_axes(x: np.ndarray, summed: Collection[int]) -> tuple[np.ndarray, tuple[int, ...]]:
    """Joins adjacent axes that are summed alike; returns the array, and its axes to sum."""
    shape: list[int] = []
    are_summed: list[bool] = []
    for i, size in enumerate(x.shape):
        if are_summed and are_summed[-1] == (i in summed):
            shape[-1] *= size
        elif size > 1 or i == x.ndim - 1:
            shape.append(size)
            are_summed.append(i in summed)
    return x.reshape(shape), tuple(i for i, is_summed in enumerate(are_summed) if is_summed)


@host.instead(_ordered_sum_on_host)
@functools.partial(jax.jit, static_argnums=1)
def ordered_sum(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
    """Sums floats with the same bits in any order, so that sharding cannot change a mask.

    Args:
      x: array of float32 or float64.
      axis: axes to reduce, to sums of at most 2**29 summands.

    Returns:
      The sums. A summand is rounded to 2**-32 (float64: 2**-60) of the largest one of its sum, on
      devices that do not flush subnormal numbers to 0.
    """
    size = math.prod(x.shape[i] for i in axis)
    if size > 2**29:
        raise ValueError(f"A sum may have at most 2**29 summands, got {size} of shape {x.shape}.")
    bits = 30 - max(size - 1, 1).bit_length()  # of a digit, so that a sum of digits fits an int32
    exponents = _halves(jnp.expand_dims(max_abs(x, axis), axis))
    # Another operation than in `max_abs`: XLA would store a value that both loops read.
    is_finite = jnp.abs(x) < np.inf
    remainder, digits = jnp.where(is_finite, x, 0), []
    for exponent in exponents:
        remainder = remainder * _two_to(-exponent, x.dtype)
    for _ in range(-(-(60 if x.dtype == jnp.float64 else 32) // bits)):
        remainder = remainder * 2.0**bits
        digit = jnp.trunc(remainder)
        remainder = remainder - digit
        digits.append(digit.astype(jnp.int32))
    others = jnp.where(is_finite, 0, x)
    *sums, other = lax.reduce(
        [*digits, others],
        [*[np.int32(0)] * len(digits), np.zeros((), x.dtype)],
        lambda a, b: [one + more for one, more in zip(a, b, strict=True)],
        axis,
    )
    total = jnp.zeros_like(other)
    for i, count in enumerate(sums, 1):
        total = total + count.astype(x.dtype) * 2.0 ** (-i * bits)
    for exponent in exponents:
        total = total * _two_to(jnp.squeeze(exponent, axis), x.dtype)
    # `other` is exactly 0 unless a summand is not finite; then infinite or NaN, in any order.
    return jnp.where(other == 0, total, other)


def sums(masks: Sequence[jax.Array], axes: Sequence[int]) -> list[jax.Array]:
    """int32 sums of two or more masks, or of partial sums, along axes.

    A reduction of two and more operands compiles to one fused loop. XLA:CPU cuts a reduction of one
    integer operand into windows, and stores an int32 operand as large as the data first.
    """
    counts: list[jax.Array] = lax.reduce(
        [mask.astype(jnp.int32) for mask in masks],
        [np.int32(0)] * len(masks),
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        tuple(axes),
    )
    return counts


def scaled(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Scales all floats by one power of two that takes the largest finite one to [1/2, 1]."""
    each = [max_abs(x, tuple(range(x.ndim))) for x in arrays]
    most = functools.reduce(jnp.maximum, each)
    one, other = (_two_to(-exponent, most.dtype) for exponent in _halves(most))
    return [x * one.astype(x.dtype) * other.astype(x.dtype) for x in arrays]


def max_abs(x: jax.Array, axis: tuple[int, ...]) -> jax.Array:
    """Returns the largest finite absolute value along axes."""
    zero = np.zeros((), x.dtype)
    # XLA fuses a reduction of two operands into one loop and stores no array as large as x.
    low, high = lax.reduce(
        [finite(x)] * 2,
        [zero] * 2,
        lambda a, b: [jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1])],
        axis,
    )
    return jnp.maximum(-low, high)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two integers with the sum e, where x < 2**e; 2**e itself may overflow."""
    kind = jnp.finfo(x.dtype)
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{kind.bits}"))
    e = (bits >> kind.nmant) - (kind.maxexp - 2)
    return e >> 1, e - (e >> 1)


def _two_to(exponent: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns 2**exponent."""
    kind = jnp.finfo(dtype)
    return lax.bitcast_convert_type((exponent + (kind.maxexp - 1)) << kind.nmant, dtype)


def finite(x: jax.Array) -> jax.Array:
    """Replaces floats that are not finite by 0."""
    return jnp.where(jnp.isfinite(x), x, 0)


def zero_like(x: jax.Array) -> jax.Array:
    """Returns zeros of the shape and dtype of integers x, sharded and mapped as x is.

    The state of a loop or a branch can start from these zeros; `jnp.zeros_like` knows neither the
    sharding nor an axis that `vmap` maps over.
    """
    return x & 0


def varying_zero(arrays: Sequence[jax.Array], like: jax.Array) -> jax.Array:
    """Returns an int32 zero that varies over a mesh as all arrays do: a loop needs such a state."""
    zero = zero_like(like.astype(jnp.int32))
    for x in arrays:
        if not jax.typeof(x).sharding.mesh.empty:
            zero += jnp.sum(zero_like((x != 0).astype(jnp.int32)), dtype=jnp.int32)
    return zero


def as_words(k: int | jax.Array | Words) -> Words:
    """Converts a result of `num_kept` to words."""
    if isinstance(k, tuple):
        return k
    if not is_traced(k) and isinstance(k, int):
        words = split(k)
        return jnp.asarray(words[0]), jnp.asarray(words[1])
    k = jnp.asarray(k)
    low = k.astype(jnp.uint32)
    is_wide = jnp.issubdtype(k.dtype, jnp.integer) and k.dtype.itemsize == 8
    return (k >> 32).astype(jnp.uint32) if is_wide else low & 0, low


def split(k: int) -> tuple[np.uint32, np.uint32]:
    """Returns the words of a Python integer."""
    return np.uint32(k >> 32), np.uint32(k & 0xFFFFFFFF)


def total(counts: jax.Array) -> Words:
    """Sums fewer than 2**16 counts (int32) along the first axis."""
    counts = counts.astype(jnp.uint32)
    return _carry(*(jnp.sum(x, 0, dtype=jnp.uint32) for x in (counts & 0xFFFF, counts >> 16)))


def total_words(a: Words) -> Words:
    """Sums fewer than 2**16 integers along the first axis, to less than 2**64."""
    words = a[1] & 0xFFFF, a[1] >> 16, a[0] & 0xFFFF, a[0] >> 16
    digits = [jnp.sum(x, 0, dtype=jnp.uint32) for x in words]
    for i in (1, 2, 3):
        digits[i] += digits[i - 1] >> 16
    low, middle, high, top = (x & 0xFFFF for x in digits)
    return (top << 16) | high, (middle << 16) | low


def running_totals(a: Words) -> Words:
    """Sums up to each integer along the last axis, of at most 2**16 integers."""
    words = a[1] & 0xFFFF, a[1] >> 16, a[0] & 0xFFFF, a[0] >> 16
    digits = [lax.cumsum(x, x.ndim - 1) for x in words]
    high = digits[2] + (digits[3] << 16)
    return plus((high, zero_like(high)), _carry(*digits[:2]))


def totals_before(counts: jax.Array) -> Words:
    """Returns for each count (int32[leaves]) the sum of those before it."""
    counts = counts.astype(jnp.uint32)
    return _carry(*(jnp.cumsum(x, dtype=jnp.uint32) - x for x in (counts & 0xFFFF, counts >> 16)))


def minus(a: Words, b: Words) -> Words:
    """Returns a - b."""
    return a[0] - b[0] - (a[1] < b[1]).astype(jnp.uint32), a[1] - b[1]


def plus(a: Words, b: Words) -> Words:
    """Returns a + b."""
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(jnp.uint32), low


def times(a: Words, b: jax.Array) -> Words:
    """Returns a * b, by halves of 16 bits."""
    x, y, u, v = a[1] & 0xFFFF, a[1] >> 16, b & 0xFFFF, b >> 16
    middle = y * u + (x * u >> 16)
    other = x * v + (middle & 0xFFFF)
    return a[0] * b + y * v + (middle >> 16) + (other >> 16), a[1] * b


def shift_left(a: Words, by: int) -> Words:
    """Returns a * 2**by for by in [0, 63]."""
    if by >= 32:
        return a[1] << (by - 32), zero_like(a[1])
    return a if by == 0 else ((a[0] << by) | (a[1] >> (32 - by)), a[1] << by)


def at_least(a: Words, b: Words) -> jax.Array:
    """Returns a >= b."""
    return (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] >= b[1]))


def equal(a: Words, b: Words) -> jax.Array:
    """Returns a == b."""
    return (a[0] == b[0]) & (a[1] == b[1])


def choose(condition: jax.Array, a: Words, b: Words) -> Words:
    """Returns a where the condition holds, else b."""
    return jnp.where(condition, a[0], b[0]), jnp.where(condition, a[1], b[1])


def to_float(a: Words) -> jax.Array:
    """Converts a to float32, rounded."""
    high: jax.Array = a[0].astype(jnp.float32) * jnp.float32(2.0**32)
    return high + a[1].astype(jnp.float32)


def _carry(low: jax.Array, high: jax.Array) -> Words:
    """Returns high * 2**16 + low."""
    return (high + (low >> 16)) >> 16, (high << 16) + low


def _shift_right(a: Words, by: jax.Array) -> Words:
    """Returns a // 2**by for by in [1, 64]."""
    small, large = jnp.clip(by, 1, 31), jnp.clip(by, 32, 63) - 32
    near = (a[0] >> small, (a[1] >> small) | (a[0] << (32 - small)))
    far = (zero_like(a[0]), jnp.where(by > 63, 0, a[0] >> large))
    return choose(by < 32, near, far)
