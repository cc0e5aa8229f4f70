"""Pseudo-random scores that depend on an entry's flat index, whatever the sharding."""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.sharding import on_device, place_like, shard_like
from sparsity.core.trees import Params, PyTree

Seed: TypeAlias = int | jax.Array  # a number or a random key
DEFAULT_SEED = 8
_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio
_INDEXED = 2**32  # flat indices of so many entries differ in 32 bits


def hash_scores(shape: Sequence[int], *words: chex.Numeric) -> jax.Array:
    """Returns pseudo-random uint32 scores: a hash of the words and of each entry's flat index.

    The same words give the same scores, whatever the sharding.

    Args:
      shape: shape of the scores.
      *words: integers or integer scalars, traced or not, such as a seed, a step, the index of a
        leaf; the low 32 bits count.

    Returns:
      uint32 scores of the given shape.

    Example:
      >>> bool((hash_scores((4,), 0, 1) == hash_scores((4,), 0, 1)).all())
      True
    """
    state = jnp.uint32(_GOLDEN)
    for word in words:
        word = jnp.uint32(word & 0xFFFFFFFF) if isinstance(word, int) else jnp.asarray(word)
        state = _mix(state ^ word.astype(jnp.uint32)) + jnp.uint32(_GOLDEN)
    return _mix(_mix(_hash_index(tuple(shape)) ^ state) + _mix(~state))


def _mix(x: jax.Array) -> jax.Array:
    """Permutes uint32 so that each output bit depends on all input bits (murmur3's fmix32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def flat_strides(shape: tuple[int, ...]) -> list[int]:
    """Returns the steps of the flat index along each axis of an array of the shape."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def flat_index(
    shape: tuple[int, ...], strides: Sequence[int | jax.Array] | None = None
) -> jax.Array:
    """Returns the int32 flat index of each entry of an array of the shape.

    Raises:
      ValueError: without strides, if the array has 2**31 entries or more.
    """
    if strides is None and math.prod(shape) >= 2**31:
        raise ValueError(f"Entries have an int32 index below 2**31, got shape {shape}.")
    index = jnp.zeros(shape, jnp.int32)
    for axis, stride in enumerate(flat_strides(shape) if strides is None else strides):
        if shape[axis] > 1:
            index += lax.broadcasted_iota(jnp.int32, shape, axis) * stride
    return index


def _hash_index(shape: tuple[int, ...]) -> jax.Array:
    """Returns a uint32 for each entry of an array, to be hashed: the flat index as 32 bits.

    Of an array with 2**32 entries or more, only the last axes have an index of 32 bits. Positions
    along the leading axes permute this index, so that each of them has its own random scores.
    """
    strides = flat_strides(shape)
    inner = next(i for i in range(len(shape) + 1) if math.prod(shape[i:]) < _INDEXED)
    # An int32 wraps around from 2**31 on, and has the bits of a uint32.
    index = flat_index(shape, [0] * inner + strides[inner:]).astype(jnp.uint32)
    if not inner:
        return index
    steps = [x // strides[inner - 1] for x in strides[:inner]]
    leading = flat_index(shape, steps + [0] * (len(shape) - inner))
    return index ^ _mix(leading.astype(jnp.uint32) + jnp.uint32(_GOLDEN))


_hash_scores = jax.jit(hash_scores, static_argnums=0)


def generate_random_scores(params: Params, rng_seed: Seed, step: chex.Numeric = 0) -> PyTree:
    """Returns uint32 scores: a hash of seed, step, path and index, without communication.

    Args:
      params: tree of arrays; only paths and shapes matter.
      rng_seed: an int or a jax random key, old or new style, traced or not.
      step: int scalar in [0, 2**32); another step gives independent scores.

    Returns:
      A tree like `params` of uint32 arrays; they do not depend on how the arrays are sharded.

    Example:
      >>> generate_random_scores({"w": jnp.zeros((2, 3))}, 8)["w"].shape
      (2, 3)
    """
    words = (*_read_seed(rng_seed), on_device(step, np.uint32))

    def draw_leaf(key_path: trees.KeyPath, param: jax.Array) -> jax.Array:
        leaf_word = np.uint32(zlib.crc32(trees.path_string(key_path).encode()))
        draw_scores = functools.partial(_hash_scores, jnp.shape(param))
        scores = shard_like(param, draw_scores, *words, on_device(leaf_word, np.uint32))
        # Inside jit XLA places them where they are used.
        return scores if is_traced(scores) else place_like(param, scores)

    return trees.map_matched(draw_leaf, params)


def _read_seed(rng_seed: Seed) -> tuple[chex.Numeric, ...]:
    """Returns the words of a seed or a random key."""
    if isinstance(rng_seed, jax.Array | np.ndarray):
        if jnp.issubdtype(rng_seed.dtype, jax.dtypes.prng_key):
            rng_seed = jax.random.key_data(rng_seed)
        words = tuple(jnp.ravel(rng_seed).astype(jnp.uint32))
        return words if rng_seed.ndim else (*words, 0)  # a scalar is a number, not a key
    seed = int(rng_seed)
    return tuple(on_device(word & 0xFFFFFFFF, np.uint32) for word in (seed, seed >> 32))
