"""Formats of kept values: what a format defines, and the formats 'values' and 'dense'.

A `FormatLayout` holds the shapes of a parameter, and a `KeptArray` its arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar, NamedTuple, Self, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, auto_axes

from sparsity.core import sharding
from sparsity.core.trees import AnyArray
from sparsity.masks import Site
from sparsity.masks.slice_layout import KeptLayout, SliceLayout, kept_positions, map_rows
from sparsity.programs.program import Equation

Token: TypeAlias = jax.Array | int  # an int32 0: an array that depends on it is allocated later


class MaskedParameter(NamedTuple):
    """A parameter for which a format is sought.

    Attributes:
      mask: the mask, not packed.
      stack: axes that index slices.
      inputs: axes over which all products of the parameter sum, () if they differ.
      is_frozen: whether entries outside the mask are frozen, not 0.
    """

    mask: np.ndarray
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    is_frozen: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatLayout(KeptLayout):
    """Layout of the kept values of one parameter in a format; hashable, without arrays.

    A format overrides `make` and `scatter_slice`, `mark_units` if masks move, and other methods
    where the format differs from values in the order of the parameter.

    Attributes:
      format: name of the format.
      refusal: why a parameter cannot have the format, and the remedy.
      multiplies: whether products need no dense array.
      stores_all: whether all entries have a slot, whatever the mask keeps.
      padding: number of values that are no entries of the parameter, of all slices.
      is_frozen: whether entries outside the mask are frozen, not 0.
    """

    format: ClassVar[str]
    refusal: ClassVar[str] = ""
    multiplies: ClassVar[bool] = False
    stores_all: ClassVar[bool] = False

    padding: int = 0
    is_frozen: bool = False

    @classmethod
    def make(cls, parameter: MaskedParameter) -> tuple[Self, np.ndarray] | None:
        """Returns the layout and the positions of the kept values, `None` where none fits."""
        raise NotImplementedError

    def scatter_slice(self, values: jax.Array, positions: jax.Array, flat: jax.Array) -> jax.Array:
        """Returns a dense slice, flat.

        Args:
          values: the kept values of the slice.
          positions: where they lie.
          flat: flat dense array whose entries stay outside the mask.
        """
        raise NotImplementedError

    def take(self, array: AnyArray, positions: AnyArray) -> jax.Array:
        """Returns the entries at positions of an array of the parameter's shape."""
        rows = self.slices(array)
        return jnp.take_along_axis(rows, positions, -1, mode="fill", fill_value=0)

    def mark_units(self, mask: jax.Array) -> jax.Array:
        """Returns the mask of the units, such as entries, to which positions count, [rows, n]."""
        return self.slices(mask).reshape(math.prod(self.batch_shape), self.slice_size)

    @property
    def positions_shape(self) -> tuple[int, ...]:
        """Shape of the positions."""
        return self.kept_shape

    @property
    def num_kept(self) -> int:
        """Number of kept values that are entries of the parameter."""
        return math.prod(self.kept_shape) - self.padding

    def wrap(
        self,
        values: jax.Array,
        positions: jax.Array,
        frozen: jax.Array | None = None,
        name: str = "params",
    ) -> KeptArray:
        """Returns kept values with their positions."""
        axes = tuple(self.order.index(axis) for axis in range(len(self.shape)))
        return KeptArray(values, positions, frozen, self, axes, name)

    # Programs

    def densify_slice(self, kept: KeptArray, token: Token) -> jax.Array:
        """Returns a dense slice, flat.

        Args:
          kept: the kept values of the slice.
          token: see `KeptArray.densify`.
        """
        size, dtype, start = self.slice_size, kept.values.dtype, jnp.asarray(token)
        if kept.frozen is None:
            zeros = jnp.broadcast_to(start.astype(dtype), (size,))
            return self.scatter_slice(kept.values, kept.positions, zeros)
        outside = lax.stop_gradient(kept.frozen).reshape(size)
        if jnp.issubdtype(outside.dtype, jnp.floating):
            # Frozen entries wait, too: their copy is made when a product needs the slice.
            bits = np.dtype(f"uint{8 * outside.dtype.itemsize}")
            waiting = lax.bitcast_convert_type(outside, bits) + start.astype(bits)
            outside = lax.bitcast_convert_type(waiting, outside.dtype)
        return self.scatter_slice(kept.values, kept.positions + start, outside.astype(dtype))

    def find_dense(self, kept: KeptArray) -> jax.Array | None:
        """Returns the dense array if the values are dense; `None` to call `densify_slice`."""
        return None

    def multiply(self, product: KeptProduct) -> jax.Array | None:
        """Returns a product of kept values, `None` if the product needs a dense array."""
        return None

    # Moves of masks

    def locate(self, mask: jax.Array) -> jax.Array:
        """Returns the positions of the entries that a mask keeps, for compiled programs.

        Args:
          mask: uint8 mask of the shape of the parameter; keeps as many entries of each slice as
            are stored.
        """
        k = self.positions_shape[-1]
        positions: jax.Array = map_rows(lambda row: kept_positions(row, k), self.mark_units(mask))
        return positions.reshape(self.positions_shape)

    def make_mask(self, positions: jax.Array) -> jax.Array:
        """Returns the uint8 mask that keeps the entries at positions."""
        return self.wrap(jnp.ones(self.kept_shape, jnp.uint8), positions).densify()

    def fits(self, site: Site) -> bool:
        """Returns whether masks of a site, which keep as many entries, have such a layout."""
        return True

    # Devices

    @property
    def divisible_axes(self) -> tuple[int, ...]:
        """Axes of a slice along which a mesh may divide the values, besides those of the stack.

        The mesh divides the first axes of the values of a slice as it divides these.
        """
        return ()

    def place(self, array: np.ndarray, like: jax.Array, name: str) -> jax.Array:
        """Returns values or positions on the devices of a parameter.

        Raises:
          ValueError: a mesh divides another axis, so that its devices keep other entries.
        """
        placed = getattr(like, "sharding", None)
        if not isinstance(placed, NamedSharding):
            return jnp.asarray(array)
        counts = sharding.count_devices(placed, len(self.shape))
        axes = [*self.stack, *(self.order[len(self.stack) + i] for i in self.divisible_axes)]
        sizes = dict(zip(axes, self.kept_shape, strict=False))
        # Size 1 stands for axes that values do not have: a mesh may not divide these.
        divided = [i for i, count in enumerate(counts) if count > 1 and sizes.get(i, 1) % count]
        if divided:
            raise ValueError(
                f"{name!r} of shape {self.shape} is sharded along axis {divided[0]} ("
                f"{placed.spec}), and the devices do not keep equal parts of the stored values. "
                "Shard it along axes that index slices, or along outputs whose groups of FanIn "
                "the mesh divides, or replicate it: jax.device_put(leaf, NamedSharding(mesh, P()))."
            )
        names = sharding.mesh_axes(placed, len(self.shape))
        entries = [names[axis] for axis in axes] + [()] * (array.ndim - len(axes))
        return jax.device_put(array, sharding.with_axes(placed, entries))


@dataclasses.dataclass(frozen=True, eq=False)
class KeptArray:
    """A masked array as the values that the mask keeps: a parameter, or layers of one.

    Attributes:
      values: [*stack, *slice_kept_shape] the kept values of each slice.
      positions: [*stack, ...] where they lie.
      frozen: dense slices, for the entries outside the mask; `None` stands for zeros.
      layout: says how the values of a slice lie in memory.
      axes: for each axis of the dense array the axis of `sizes`.
      name: path of the parameter.
    """

    values: jax.Array
    positions: jax.Array
    frozen: jax.Array | None
    layout: FormatLayout
    axes: tuple[int, ...]
    name: str

    @property
    def depth(self) -> int:
        """Number of axes that index slices."""
        return len(self.values.shape) - len(self.layout.slice_kept_shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes [*stack, *slice] of the slices, one after the other."""
        return (*self.values.shape[: self.depth], *self.layout.slice_shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array."""
        return tuple(self.sizes[axis] for axis in self.axes)

    @property
    def explicit_sharding(self) -> Sharding | None:
        """Sharding in the type of the dense array; `None` without a mesh of Explicit axes."""
        placed = sharding.explicit_sharding(jax.typeof(self.values))
        if placed is None:
            return None
        divided = [*range(self.depth), *(self.depth + i for i in self.layout.divisible_axes)]
        spec = dict(zip(divided, placed.spec, strict=False))
        target = placed.update(spec=PartitionSpec(*(spec.get(axis) for axis in self.axes)))
        return sharding.fit(target, self.shape)

    def densify(self, token: Token = 0) -> jax.Array:
        """Returns the dense array.

        Args:
          token: an int32 0; no array is allocated before its value exists.
        """
        placed = self.explicit_sharding
        if placed is None:
            return self._join_slices(self, token)
        return auto_axes(self._join_slices, out_sharding=placed)(self, token)

    def _join_slices(self, kept: Self, token: Token) -> jax.Array:
        densify_each = functools.partial(self.layout.densify_slice, token=token)
        for _ in range(self.depth):
            densify_each = jax.vmap(densify_each)
        return densify_each(kept).reshape(self.sizes).transpose(self.axes)


jax.tree_util.register_dataclass(
    KeptArray, ["values", "positions", "frozen"], ["layout", "axes", "name"]
)


class KeptProduct(NamedTuple):
    """A product of kept values and a dense array.

    Attributes:
      equation: the product, of two operands.
      kept_index: index of the operand that is kept values.
      kept: this operand.
      other: the other operand.
    """

    equation: Equation
    kept_index: int
    kept: KeptArray
    other: jax.Array


def is_kept(node: object) -> TypeGuard[KeptArray]:
    """Returns whether a node of a tree is kept values: an `is_leaf` of `jax.tree`."""
    return isinstance(node, KeptArray)


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
        return flat.at[positions].set(
            values,
            mode="drop",
            indices_are_sorted=True,
            unique_indices=True,
            wrap_negative_indices=False,
        )


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
