"""Exact integers below 2**64 without 64-bit types.

An integer is two uint32 words, (high, low): jax holds no wider ones unless x64 is enabled, and a
tree may have more than 2**32 weights. The functions work elementwise and trust that results are
in range, that uint32 wraps around, and that no count is negative.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Words: TypeAlias = tuple[jax.Array, jax.Array]  # uint32 (high, low): an integer below 2**64


def as_words(k: jax.Array) -> Words:
    """Converts integers of 32 bits to words."""
    low = k.astype(jnp.uint32)
    return low & 0, low


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
