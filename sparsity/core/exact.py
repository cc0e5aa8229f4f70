"""Exact integers below 2**64 without 64-bit types.

An integer is two uint32 words, (high, low): jax holds no wider ones unless x64 is enabled, and a
tree may have more than 2**32 weights. The functions work elementwise and trust that results are
in range, that uint32 wraps around, and that no count is negative.
"""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Words: TypeAlias = tuple[jax.Array, jax.Array]  # uint32 (high, low): an integer below 2**64


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
    if isinstance(k, int):
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
    # Fewer than 2**16 halves of 16 bits add up in 32 bits.
    return _carry(*(jnp.sum(x, 0, dtype=jnp.uint32) for x in (counts & 0xFFFF, counts >> 16)))


def total_words(a: Words) -> Words:
    """Sums fewer than 2**16 integers along the first axis, to less than 2**64."""
    words = a[1] & 0xFFFF, a[1] >> 16, a[0] & 0xFFFF, a[0] >> 16
    digits = [jnp.sum(x, 0, dtype=jnp.uint32) for x in words]
    for i in (1, 2, 3):
        digits[i] += digits[i - 1] >> 16
    low, middle, high, top = (x & 0xFFFF for x in digits)
    return (top << 16) | high, (middle << 16) | low


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


def shift_right(a: Words, by: jax.Array) -> Words:
    """Returns a // 2**by for by in [1, 64]."""
    small, large = jnp.clip(by, 1, 31), jnp.clip(by, 32, 63) - 32
    near = (a[0] >> small, (a[1] >> small) | (a[0] << (32 - small)))
    far = (zero_like(a[0]), jnp.where(by > 63, 0, a[0] >> large))
    return choose(by < 32, near, far)
