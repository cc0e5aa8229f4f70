"""Signed integers in the order of scores: keys, and masks by sorting them.

NaN ranks below every number, -0.0 equals 0.0, and subnormals keep their order.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import host
from sparsity.core.checks import is_real
from sparsity.core.host import AnyArray
from sparsity.core.trees import PyTree


def readable(scores: chex.Array) -> jax.Array:
    """Returns checked scores, of a dtype that has keys."""
    if not isinstance(scores, jax.Array):
        try:
            scores = jnp.asarray(scores)
        except (TypeError, ValueError):
            raise ValueError(f"scores must be an array of real numbers, got {scores!r}.") from None
    dtype = readable_dtype(scores.dtype)
    return scores if dtype == scores.dtype else scores.astype(dtype)


@functools.lru_cache
def readable_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype to which a search converts scores of a dtype.

    Raises:
      ValueError: the dtype has no order.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError(
            f"Cannot rank {dtype} scores. This is because complex numbers have no order; "
            "pass magnitudes (jnp.abs) instead."
        )
    if not is_real(dtype):
        raise ValueError(f"scores must be an array of real numbers, got scores of dtype {dtype}.")
    if dtype in (jnp.float4_e2m1fn, jnp.float8_e8m0fnu):  # not a byte; no sign bit
        return np.dtype(np.float32)
    return dtype


class KeyRange(NamedTuple):
    """Range of the keys of a dtype of scores.

    Attributes:
      dtype: dtype of the keys; int32 for narrow scores, too, which is faster.
      low: lowest key: that of NaN, if the dtype has NaN.
      top: highest key.
      is_float: whether scores are floats of 32 bits or more.
    """

    dtype: np.dtype
    low: int
    top: int
    is_float: bool = False

    @property
    def bits(self) -> int:
        """Number of bits that tell the keys apart."""
        return (self.top - self.low).bit_length()


@functools.lru_cache
def key_range(dtype: np.dtype) -> KeyRange:
    """Returns the range of the integer keys that order a dtype."""
    bits = _bits(dtype)
    key, low = np.promote_types(bits, np.int32), int(np.iinfo(bits).min)
    if dtype == jnp.bool_:
        return KeyRange(key, 0, 1)
    if not jnp.issubdtype(dtype, jnp.floating):
        return KeyRange(key, low, int(np.iinfo(bits).max))
    top = np.full(1, np.inf).astype(dtype)
    if not np.isinf(top.astype(np.float32))[0]:  # a format without inf
        top = np.full(1, jnp.finfo(dtype).max, dtype)
    return KeyRange(key, low, int(top.view(bits)[0]), is_float=bits.itemsize >= 4)


def _bits(dtype: np.dtype) -> np.dtype:
    """Returns the signed integers as wide as the scores, at least a byte."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(f"int{jnp.finfo(dtype).bits}")
    return np.dtype(f"int{8 if dtype == jnp.bool_ else max(8, jnp.iinfo(dtype).bits)}")


def to_keys(scores: AnyArray) -> AnyArray:
    """Returns signed integers in the order of the scores, by numpy for arrays of numpy."""
    xp, dtype = host.namespace([scores]), scores.dtype
    bits, (key, low, top, _) = _bits(dtype), key_range(dtype)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        unsigned = np.dtype(f"uint{bits.itemsize * 8}")
        # Flipping the highest bit makes 0 the lowest of the signed integers.
        moved = scores.astype(unsigned) ^ xp.array(-low, unsigned)
        return _read_bits(moved, bits).astype(key)
    if not jnp.issubdtype(dtype, jnp.floating):
        return scores.astype(key)
    raw: AnyArray = _read_bits(scores, bits).astype(key, copy=False)
    if xp is np and raw.size and raw.min() >= 0 and raw.max() <= top:  # magnitudes are their keys
        return raw
    # All bits but the sign: magnitudes have the order of their bits, negative floats its reverse.
    magnitude = raw & xp.array(-low - 1, key)
    signed = xp.where(raw < 0, -magnitude, magnitude)
    if int(np.full(1, -0.0).astype(dtype).view(bits)[0]) == low:
        # Bits above those of the largest number mean NaN.
        nan = magnitude > xp.array(top, key)
    else:  # a format without -0, whose bits mean NaN
        nan = raw == xp.array(low, key)
    return xp.where(nan, xp.array(low, key), signed)


def _read_bits(x: PyTree, dtype: np.dtype) -> PyTree:
    """Returns the integers that have the bits of an array."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x).view(dtype)
    return lax.bitcast_convert_type(x, dtype)


def mask_by_sorting(keys: AnyArray, eligible: AnyArray | None, counts: AnyArray) -> AnyArray:
    """Returns the mask of the highest keys of each row, bool[rows, size]; by numpy for its arrays.

    Args:
      keys: [rows, size]; the lowest key where an entry is not eligible.
      eligible: bool[rows, size], or `None`: all entries are.
      counts: int[rows, 1], the number of eligible entries to keep.
    """
    xp, size = host.namespace([keys]), keys.shape[1]
    # To keep none, the threshold is the highest key, which no key exceeds.
    place = xp.clip(size - counts, 0, size - 1)
    threshold = xp.take_along_axis(xp.sort(keys, axis=1), place, axis=1)
    above, ties = keys > threshold, keys == threshold
    ties = ties if eligible is None else ties & eligible
    need = counts - xp.sum(above, axis=1, keepdims=True, dtype=np.int32)
    return above | (ties & (xp.cumsum(ties, axis=1, dtype=np.int32) <= need))
