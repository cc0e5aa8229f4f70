"""The format 'dense': the parameter itself, whose gradient is masked."""

from __future__ import annotations

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.compacting.formats.base import FormatLayout, KeptArray, MaskedParameter
from sparsity.core.trees import AnyArray
from sparsity.masks.slice_layout import SliceLayout


class Dense(FormatLayout):
    """Dense slices; positions are their masks; outside of these the values are 0."""

    format = "dense"
    stores_all = True

    @classmethod
    def make(cls, parameter: MaskedParameter) -> tuple[Self, np.ndarray]:
        shape, stack = parameter.mask.shape, parameter.stack
        layout = SliceLayout(shape, stack)
        slices = np.ascontiguousarray(parameter.mask.transpose(layout.order) != 0, np.uint8)
        return cls(shape, stack, slice_kept_shape=layout.slice_shape), slices

    def take(self, array: AnyArray, positions: AnyArray) -> jax.Array:
        return jnp.where(positions > 0, array.transpose(self.order), jnp.zeros((), array.dtype))

    def find_dense(self, kept: KeptArray) -> jax.Array | None:
        if kept.frozen is not None:
            return None
        # XLA removes a selection of equal arrays, which takes no pass over the parameter; its
        # derivatives of any order are 0 outside the mask.
        values = jnp.where(kept.positions > 0, kept.values, lax.stop_gradient(kept.values))
        return values.reshape(kept.sizes).transpose(kept.axes)

    def scatter_slice(self, values: jax.Array, positions: jax.Array, flat: jax.Array) -> jax.Array:
        return jnp.where(positions.reshape(-1) > 0, values.reshape(-1), flat)

    def locate(self, mask: jax.Array) -> jax.Array:
        return mask.transpose(self.order)

    @property
    def divisible_axes(self) -> tuple[int, ...]:
        return tuple(range(len(self.slice_shape)))
