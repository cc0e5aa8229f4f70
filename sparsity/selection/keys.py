"""Unsigned integers in the order of scores: keys.

NaN ranks below every number, -0.0 equals 0.0, and subnormals keep their order.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.checks import is_real
from sparsity.core.trees import PyTree


def readable(scores: chex.Array) -> jax.Array:
    """Returns checked scores, of a dtype that has keys."""
    if not isinstance(scores, jax.Array):
        try:
            scores = jnp.asarray(scores)
        except (TypeError, ValueError):
            raise ValueError(f"scores must be an array of real numbers, got {scores!r}.") from None
    dtype = scores.dtype
    if not is_real(dtype):
        hint = "; pass jnp.abs(scores)" if jnp.issubdtype(dtype, jnp.complexfloating) else ""
        raise ValueError(
            f"scores must be an array of real numbers, got scores of dtype {dtype}{hint}."
        )
    if dtype in (jnp.float4_e2m1fn, jnp.float8_e8m0fnu):  # not a byte; no sign bit
        return scores.astype(jnp.float32)
    return scores


@functools.lru_cache
def key_bits(dtype: np.dtype) -> int:
    """Returns the number of bits of the keys of a dtype."""
    if dtype == jnp.bool_:
        return 1
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits


def to_keys(scores: PyTree) -> PyTree:
    """Returns keys in the order of scores; of numpy for its arrays.

    Args:
      scores: array that `readable` returns.

    Returns:
      uint32, or uint64 for scores of 64 bits, below 2**key_bits(dtype). NaN has key 0, and so has
      the lowest of integers and booleans.
    """
    xp = np if isinstance(scores, np.ndarray) else jnp
    dtype, bits = scores.dtype, key_bits(scores.dtype)
    key_dtype = np.dtype(np.uint64 if bits > 32 else np.uint32)
    if xp is jnp and bits > 32 and jax.dtypes.canonicalize_dtype(key_dtype) != key_dtype:
        raise ValueError(
            f"Cannot rank {dtype} scores in a compiled program while x64 is disabled. Cast them to "
            "32 bits, or enable x64."
        )
    zero, sign, all_bits = np.array([0, 1 << (bits - 1), (1 << bits) - 1], key_dtype)
    if jnp.issubdtype(dtype, jnp.signedinteger):  # flipping the sign makes the lowest number 0
        return (scores.astype(key_dtype) ^ sign) & all_bits
    if not jnp.issubdtype(dtype, jnp.floating):
        return scores.astype(key_dtype)
    unsigned = np.dtype(f"uint{bits}")
    raw = scores.view(unsigned) if xp is np else lax.bitcast_convert_type(scores, unsigned)
    raw = raw.astype(key_dtype)
    # All bits but the sign: magnitudes have the order of their bits, negative floats its reverse.
    magnitude = raw & (sign - 1)
    key = xp.where(raw >= sign, sign - magnitude, sign + magnitude)
    return xp.where(scores == scores, key, zero)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["scores", "where"],
    meta_fields=["batch_axes"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Candidates:
    """Scores of one parameter, a pytree of its arrays; entries compete within a slice.

    Attributes:
      scores: real scores or booleans that `readable` returns.
      where: array of the shape of the scores; an entry is eligible where it is not zero. `None`:
        all entries are.
      batch_axes: number of leading axes that index separate slices.
    """

    scores: jax.Array
    where: jax.Array | None = None
    batch_axes: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the scores."""
        return self.scores.shape

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the axes that index slices."""
        return self.shape[: self.batch_axes]

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return math.prod(self.batch)

    @property
    def slice_size(self) -> int:
        """Number of entries of a slice."""
        return math.prod(self.shape[self.batch_axes :])
