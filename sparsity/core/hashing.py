"""Pseudo-random scores that depend on an entry's flat index, whatever the sharding."""

import math
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
from jax import lax

_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio


def hash_scores(shape: Sequence[int], *words: chex.Numeric) -> jax.Array:
    """Pseudo-random uint32 scores: a hash of the words and of each entry's flat index.

    The same words give the same scores, whatever the sharding.

    >>> bool((hash_scores((4,), 0, 1) == hash_scores((4,), 0, 1)).all())
    True

    Args:
        shape: Shape of the scores, fewer than 2**31 entries.
        *words: Integers (of which 32 bits count) or integer scalars, traced or not: a seed, a
            step, the number of a leaf.

    Returns:
        uint32 scores of that shape.
    """
    state = jnp.uint32(_GOLDEN)
    for word in words:
        word = jnp.uint32(word & 0xFFFFFFFF) if isinstance(word, int) else jnp.asarray(word)
        state = _mix(state ^ word.astype(jnp.uint32)) + jnp.uint32(_GOLDEN)
    index = flat_index(tuple(shape)).astype(jnp.uint32)
    return _mix(_mix(index ^ state) + _mix(~state))


def _mix(x: jax.Array) -> jax.Array:
    """Bijection of uint32 whose every output bit depends on every input bit (murmur3's fmix32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def flat_index(shape: tuple[int, ...], strides: Sequence[int | jax.Array] = ()) -> jax.Array:
    """int32 flat index of each entry of an array of that shape."""
    strides = strides or [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    index = jnp.zeros(shape, jnp.int32)
    for axis, stride in enumerate(strides):
        index += lax.broadcasted_iota(jnp.int32, shape, axis) * stride
    return index
