"""The format 'slices': whole slices along one axis, such as channels and heads.

The gradient of the slices is a product of these alone. S2FT (Yang et al. 2024, section 3.2) trains
such a dense part of each matrix: the backward pass multiplies the part of the activations, or of
their gradient, that meets the slices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.compacting.formats.base import FormatLayout, KeptProduct, MaskedParameter
from sparsity.compacting.formats.find_groups import list_kept
from sparsity.core.sharding import explicit_sharding
from sparsity.masks.slice_layout import SliceLayout, number_padding
from sparsity.programs.products import read_product


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeSlices(FormatLayout):
    """Whole slices of each slice of the stack, along one axis, at positions [*stack, k].

    Values have the axes of the dense array, and size k along this axis. Positions beyond the axis
    are padding. Entries outside are frozen, so that masks do not move.

    Attributes:
      axis: the axis, after those of the stack.
    """

    format = "slices"
    refusal = (
        "its mask keeps no whole slices along one axis, layers keep too different numbers, or "
        "outside = 'zero'. Use 'values', or masks of channels: scope=Coupled(graph)."
    )

    axis: int

    @classmethod
    def make(cls, parameter: MaskedParameter) -> tuple[Self, np.ndarray] | None:
        """Returns the layout and the positions of the slices along their axis.

        Returns:
          `None` if entries outside are no frozen ones, some slice is kept in part, all or none are
          kept, or too much padding would be stored: of layers that keep different numbers.
        """
        mask, stack = parameter.mask, parameter.stack
        slices = mask.transpose(SliceLayout(mask.shape, stack).order) != 0
        depth, is_partial = len(stack), slices.any() and not slices.all()
        if parameter.frozen_dtype is None or not is_partial or slices.ndim < depth + 2:
            return None
        for axis in range(depth, slices.ndim):
            full_axes = tuple(i for i in range(depth, slices.ndim) if i != axis)
            rows = slices.any(axis=full_axes, keepdims=True)
            if (slices == rows).all():
                positions = list_kept(rows.squeeze(full_axes))
                shape, kept = [*slices.shape], int(np.count_nonzero(mask))
                shape[axis] = positions.shape[-1]
                size, padding, along = tuple(shape[depth:]), math.prod(shape) - kept, axis - depth
                layout = cls(mask.shape, stack, slice_kept_shape=size, padding=padding, axis=along)
                return None if padding > kept else (layout, positions)
        return None

    @property
    def positions_shape(self) -> tuple[int, ...]:
        return (*self.batch_shape, self.slice_kept_shape[self.axis])

    def gather(self, array: np.ndarray, positions: np.ndarray) -> np.ndarray:
        slices, depth = array.transpose(self.order), len(self.stack)
        axis = depth + self.axis
        at = np.expand_dims(
            positions.astype(np.int64), [i for i in range(depth, slices.ndim) if i != axis]
        )
        values = np.take_along_axis(slices, np.minimum(at, slices.shape[axis] - 1), axis)
        return np.where(at < slices.shape[axis], values, np.zeros((), slices.dtype))

    def scatter_slice(self, values: jax.Array, positions: jax.Array, flat: jax.Array) -> jax.Array:
        at = number_padding(positions, self.slice_shape[self.axis])
        slices = flat.reshape(self.slice_shape).at[(*[slice(None)] * self.axis, at)]
        dense = slices.set(values, mode="drop", indices_are_sorted=True, unique_indices=True)
        return dense.reshape(-1)

    def differentiate(self, product: KeptProduct, cotangent: jax.Array) -> jax.Array | None:
        """Returns the gradient of the kept slices; see `FormatLayout`.

        Returns:
          `None` for a product of ragged rows, of groups of features, along an axis of space, or of
          arrays on Explicit axes.
        """
        equation, at, kept, other = product
        if any(explicit_sharding(jax.typeof(x)) for x in (other, cotangent)):
            return None
        roles = read_product(equation)
        if roles.groups > 1 or roles.refusal or equation.params.get("out_sharding") is not None:
            return None
        partners, batch = roles.map_paired_axes(at), roles.operands[at].batch
        results = {axis: place for place, axis in roles.map_result_axes(at).items()}
        axis, *stack = (kept.axes.index(i) for i in (kept.depth + self.axis, *range(kept.depth)))
        if not {*stack} <= {*batch} or not (axis in partners or axis in results):
            return None
        for_other, for_result = (
            _take_slices(array, kept.positions, axes[axis], [axes[i] for i in stack])
            if axis in axes
            else array
            for array, axes in ((other, partners), (cotangent, results))
        )

        def multiply(slices: jax.Array) -> jax.Array:
            operands = [slices.transpose(kept.axes), for_other]
            return equation.bind(operands if at == 0 else operands[::-1])[0]

        return jax.vjp(multiply, kept.values)[1](for_result)[0]


def _take_slices(
    array: jax.Array, positions: jax.Array, axis: int, stack: Sequence[int]
) -> jax.Array:
    """Returns slices of an array along an axis; those at padding are 0.

    Args:
      array: any floats.
      positions: integers [*stack, k].
      axis: axis of the array; its size becomes k.
      stack: axes of the array that index separate products.
    """
    depth = range(len(stack))
    axis_in_slice = axis - sum(each < axis for each in stack)

    def take(array: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.take(array, positions, axis_in_slice, mode="fill", fill_value=0)

    for _ in depth:
        take = jax.vmap(take)
    selected = take(jnp.moveaxis(array, stack, depth), positions)
    return jnp.moveaxis(selected, depth, stack)
