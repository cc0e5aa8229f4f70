"""The format 'values': kept values in the order of the parameter, of any mask."""

from __future__ import annotations

import math
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.compacting.formats.base import FormatLayout, KeptArray, MaskedParameter, Token
from sparsity.compacting.formats.narrow_dtypes import unsigned_like
from sparsity.masks.slice_layout import SliceLayout
from sparsity.patterns import SparsityType


class Values(FormatLayout):
    """Kept values [*stack, k] at ascending positions of the flat slice.

    Positions beyond the slice are padding.
    """

    format = "values"

    @classmethod
    def make(cls, parameter: MaskedParameter) -> tuple[Self, np.ndarray]:
        mask, stack = parameter.mask, parameter.stack
        positions = SliceLayout(mask.shape, stack).list_positions(mask)
        padding = positions.size - int(np.count_nonzero(mask))
        k = positions.shape[-1]
        return cls(mask.shape, stack, slice_kept_shape=(k,), padding=padding), positions

    def densify_slice(self, kept: KeptArray, token: Token, keep_bits: bool) -> jax.Array:
        has_bits = jnp.issubdtype(kept.values.dtype, jnp.floating)  # complex numbers have none
        has_bits = has_bits and kept.values.dtype == self.frozen_dtype
        if not keep_bits or kept.frozen is None or not has_bits:
            return super().densify_slice(kept, token, keep_bits)
        bits = lax.bitcast_convert_type(
            lax.stop_gradient(kept.frozen), unsigned_like(kept.values.dtype)
        )
        return _write(kept.values, kept.positions, bits.reshape(self.slice_size))

    def scatter_slice(self, values: jax.Array, positions: jax.Array, flat: jax.Array) -> jax.Array:
        return _scatter(flat, positions, values)

    def mark_units(self, mask: jax.Array) -> jax.Array:
        return self.slices(mask).reshape(math.prod(self.batch_shape), self.num_units)

    def count_unit_rows(self, pattern: SparsityType) -> int | None:
        return 1 if pattern.is_elementwise and pattern.ranks_units else None


def _scatter(outside: jax.Array, positions: jax.Array, values: jax.Array) -> jax.Array:
    return lax.scatter(
        outside,
        positions[:, None],
        values,
        lax.ScatterDimensionNumbers((), (0,), (0,)),
        indices_are_sorted=True,
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


@jax.custom_jvp
def _write(values: jax.Array, positions: jax.Array, bits: jax.Array) -> jax.Array:
    """Returns a flat slice of frozen entries with values at ascending positions.

    The bits are written: XLA on CPUs would widen both arrays to write floats of 16 bits.
    """
    written = _scatter(bits, positions, lax.bitcast_convert_type(values, bits.dtype))
    return lax.bitcast_convert_type(written, values.dtype)


@_write.defjvp
def _write_tangents(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    values, positions, bits = primals
    zeros = jnp.zeros(bits.shape, values.dtype)
    return _write(values, positions, bits), _scatter(zeros, positions, tangents[0])
