"""Signed integers in the order of scores: keys.

NaN ranks below every number, -0.0 equals 0.0, and subnormals keep their order.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def readable(scores: chex.Array) -> jax.Array:
    """Checked scores, of a dtype that has keys."""
    scores = scores if isinstance(scores, jax.Array) else jnp.asarray(scores)
    dtype = _readable_dtype(scores.dtype)
    if scores.size >= 2**31:
        raise ValueError(f"An array may hold fewer than 2**31 scores, got shape {scores.shape}.")
    return scores if dtype == scores.dtype else scores.astype(dtype)


@functools.lru_cache
def _readable_dtype(dtype: np.dtype) -> np.dtype:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"Cannot rank {dtype} scores. This is because complex numbers have no order; "
            "pass magnitudes (jnp.abs) instead."
        )
    if dtype in (jnp.float4_e2m1fn, jnp.float8_e8m0fnu):  # not a byte; no sign bit
        return np.dtype(np.float32)
    return dtype


class KeyRange(NamedTuple):
    """Keys of a dtype: their dtype, the lowest (which is that of NaN, if there is one), the top."""

    dtype: np.dtype
    low: int
    top: int


@functools.lru_cache
def key_range(dtype: np.dtype) -> KeyRange:
    """The range of the integer keys that order a dtype."""
    if dtype == jnp.bool_:
        return KeyRange(np.dtype(np.int8), 0, 1)
    floating = jnp.issubdtype(dtype, jnp.floating)
    bits = jnp.finfo(dtype).bits if floating else max(8, jnp.iinfo(dtype).bits)
    key = np.dtype(f"int{bits}")
    if not floating:
        return KeyRange(key, int(np.iinfo(key).min), int(np.iinfo(key).max))
    top = np.full(1, np.inf).astype(dtype)
    if not np.isinf(top.astype(np.float32))[0]:  # a format without inf
        top = np.full(1, jnp.finfo(dtype).max, dtype)
    return KeyRange(key, int(np.iinfo(key).min), int(top.view(key)[0]))


def to_keys(scores: jax.Array) -> jax.Array:
    """Signed integers in the order of the scores, as wide as these."""
    dtype = scores.dtype
    key, low, top = key_range(dtype)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        unsigned = np.dtype(f"uint{key.itemsize * 8}")
        return lax.bitcast_convert_type(scores.astype(unsigned) ^ jnp.array(-low, unsigned), key)
    if not jnp.issubdtype(dtype, jnp.floating):
        return scores.astype(key)
    raw = lax.bitcast_convert_type(scores, key)
    magnitude = raw & jnp.array(-low - 1, key)
    signed = jnp.where(raw < 0, -magnitude, magnitude)
    if int(np.full(1, -0.0).astype(dtype).view(key)[0]) == low:
        nan = magnitude > jnp.array(top, key)
    else:  # a format without -0, whose bits mean NaN
        nan = raw == jnp.array(low, key)
    return jnp.where(nan, jnp.array(low, key), signed)
