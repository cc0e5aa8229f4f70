"""The number of kept weights: exact for each number of weights and each sparsity."""

from collections.abc import Callable
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact
from sparsity.core.checks import is_real, is_traced
from sparsity.core.exact import Words, zero_like


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
        counts = np.asarray(jax.device_get(n))
        if counts.dtype.kind not in "iu" or np.any(counts < 0) or np.any(counts > most):
            raise ValueError(f"n must be an integer in [0, {most}], got n = {n!r}.")
    if not is_traced(sparsity):
        fraction = np.asarray(jax.device_get(sparsity))
        if not is_real(fraction.dtype) or not np.all((fraction >= 0) & (fraction <= 1)):
            raise ValueError(f"sparsity must be in [0, 1], got sparsity = {sparsity!r}.")
        if one_n and fraction.ndim == 0:
            n = int(counts)
            return min(n, max(1, round(n * (1 - Fraction(float(np.float32(fraction)))))))
    if one_n and int(counts) >= 2**31:
        return count_kept_words(exact.split(int(counts)), sparsity)
    low = jnp.asarray(n).astype(jnp.uint32)
    return count_kept_words((zero_like(low), low), sparsity)[1].astype(jnp.int32)


def count_kept_int(n: int, sparsity: float) -> int:
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
def count_kept_words(n: Words, sparsity: chex.Numeric) -> Words:
    """Returns `num_kept` of a traced number that may be 2**31 and more."""
    sparsity = jnp.asarray(sparsity, jnp.float32)
    sparsity = jnp.where(sparsity > 0, jnp.minimum(sparsity, 1), 0)
    bits = lax.bitcast_convert_type(sparsity, jnp.uint32)
    # sparsity = mantissa / 2**exponent; from 2**65 on nothing is removed, as at zero.
    mantissa = (bits & 0x7FFFFF) | 0x800000
    shift = jnp.minimum(149 - (bits >> 23), 64)
    removed = exact.times(n, mantissa)
    doubled = exact.shift_right(removed, shift)
    # Some bit below the half is set just if one less has the same quotient.
    bit = zero_like(n[0]), zero_like(n[1]) | 1
    is_above_half = exact.equal(exact.shift_right(exact.minus(removed, bit), shift), doubled)
    kept = exact.minus(n, (doubled[0] >> 1, (doubled[1] >> 1) | (doubled[0] << 31)))
    down = ((doubled[1] & 1) == 1) & (is_above_half | ((kept[1] & 1) == 1))
    kept = exact.minus(kept, (zero_like(n[0]), down.astype(jnp.uint32)))
    one = (zero_like(n[0]), jnp.minimum(n[0] | n[1], 1))
    return exact.choose(exact.at_least(kept, one), kept, one)
