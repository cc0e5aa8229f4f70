"""The format 'values': kept values in the order of the parameter, of any mask."""

from __future__ import annotations

import math
from typing import Self

import jax
import numpy as np
from jax import lax

from sparsity.compacting.formats.base import FormatLayout, MaskedParameter
from sparsity.masks.slice_layout import SliceLayout


class Values(FormatLayout):
    """Kept values [*stack, k] at ascending positions of the flat slice.

    Positions beyond the slice are padding.
    """

    format = "values"

    @classmethod
    def make(cls, parameter: MaskedParameter) -> tuple[Self, np.ndarray]:
        mask, shapes = parameter.mask, (parameter.mask.shape, parameter.stack)
        positions = SliceLayout(*shapes).list_positions(mask)
        padding = positions.size - int(np.count_nonzero(mask))
        return cls(*shapes, slice_kept_shape=positions.shape[-1:], padding=padding), positions

    def scatter_slice(self, values: jax.Array, positions: jax.Array, flat: jax.Array) -> jax.Array:
        return lax.scatter(
            flat,
            positions[:, None],
            values,
            lax.ScatterDimensionNumbers((), (0,), (0,)),
            indices_are_sorted=True,
            unique_indices=True,
            mode=lax.GatherScatterMode.FILL_OR_DROP,
        )

    def mark_units(self, mask: jax.Array) -> jax.Array:
        return self.slices(mask).reshape(math.prod(self.batch_shape), self.slice_size)
