"""Kept values and their positions, and arrays that are computed from them where they are read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec, auto_axes

from sparsity.compacting import grouped
from sparsity.compacting.observer import Observer
from sparsity.core.sharding import explicit_sharding, fit, with_dtype
from sparsity.core.trees import PyTree
from sparsity.programs.program import Equation

MeshAxes: TypeAlias = str | tuple[str, ...] | None  # of a mesh


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """A masked array as the values that the mask keeps.

    A subclass says how the values of a slice lie in memory.

    Attributes:
      values: [*stack, ...] the kept values of each slice.
      indices: [*stack, ...] their positions.
      base: dense slices, for the entries outside the mask; `None` stands for zeros. Numbers of less
        than 32 bits are unsigned integers of the same bits, see `to_bits`.
      sizes: [*stack, *slice] sizes of the slices, one after the other.
      stack: number of axes that index slices.
      axes: for each axis of the dense array the axis of `sizes`.
      name: path of the parameter.
      observer: gets the gradients of dense slices, in place of the kept values.
      base_dtype: dtype of the numbers of the base.
    """

    values: jax.Array
    indices: jax.Array
    base: jax.Array | None
    sizes: tuple[int, ...]
    stack: int
    axes: tuple[int, ...]
    name: str
    observer: Observer | None = dataclasses.field(default=None, kw_only=True)
    base_dtype: np.dtype | None = dataclasses.field(default=None, kw_only=True)

    def build(self, values: jax.Array, indices: jax.Array, outside: jax.Array) -> jax.Array:
        """Returns a dense slice, flat.

        Args:
          values: the kept values of the slice.
          indices: their positions.
          outside: flat dense array whose entries stay outside the mask.
        """
        raise NotImplementedError

    @property
    def is_quantized(self) -> bool:
        """True if the values are floats among quantized numbers, which the model casts."""
        return self.base_dtype is not None and is_quantized(self.base_dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense array."""
        return tuple(self.sizes[axis] for axis in self.axes)

    @property
    def leads_with_stack(self) -> bool:
        """True if the first axes of the dense array index slices."""
        return self.axes[: self.stack] == tuple(range(self.stack))

    def densify(self, never: jax.Array | int = 0) -> jax.Array:
        """Returns the dense array.

        Args:
          never: an int32 0; no array is allocated before its value exists.
        """
        placed = explicit_sharding(jax.typeof(self.values))
        if placed is None:
            return self._densify(self.values, self.indices, self.base, never)
        entries = [*placed.spec, *[None] * len(self.sizes)]
        spec = [entries[axis] if axis < self.stack else None for axis in range(len(self.sizes))]
        spec = self.split(spec, entries)
        target = placed.update(spec=PartitionSpec(*(spec[axis] for axis in self.axes)))
        dense = auto_axes(self._densify, out_sharding=fit(target, self.shape))
        array: jax.Array = dense(self.values, self.indices, self.base, never)
        return array

    def read(self, never: jax.Array | int = 0) -> jax.Array:
        """Returns the dense array for an equation of the model; see `densify`."""
        dense = self.densify(never)
        if self.observer is None:
            return dense
        slices = dense.transpose(np.argsort(self.axes))
        return self.observer.watch(slices, self.stack).transpose(self.axes)

    def split(self, spec: list[MeshAxes], values: list[MeshAxes]) -> list[MeshAxes]:
        """Returns the axes of a mesh that split slices, from those that split the values."""
        return spec

    def _densify(
        self,
        values: jax.Array,
        indices: jax.Array,
        base: jax.Array | None,
        never: jax.Array | int,
    ) -> jax.Array:
        size, dtype = math.prod(self.sizes[self.stack :]), values.dtype
        zeros = jnp.broadcast_to(jnp.asarray(never).astype(dtype), (size,))

        def build(values: jax.Array, indices: jax.Array, base: jax.Array | None) -> jax.Array:
            outside = zeros
            if base is not None and self.base_dtype is not None:
                if dtype == self.base_dtype and isinstance(self, Flat):
                    unsigned = jnp.dtype(f"uint{8 * dtype.itemsize}")
                    bits = lax.bitcast_convert_type(lax.stop_gradient(base), unsigned)
                    # Frozen entries wait, too: their copy is made when a product needs the slice.
                    waiting = bits.reshape(size) + jnp.asarray(never).astype(unsigned)
                    return _write(values, indices, waiting)
                numbers = lax.bitcast_convert_type(lax.stop_gradient(base), self.base_dtype)
                outside = numbers.astype(dtype).reshape(size)
            # Zeros wait already; frozen entries do not, and groups are built on zeros of their own.
            waits = base is None and not isinstance(self, Grouped)
            return self.build(values, indices if waits else indices + never, outside)

        for _ in range(self.stack):
            build = jax.vmap(build)
        return build(values, indices, base).reshape(self.sizes).transpose(self.axes)

    def layer(self) -> Self:
        """Returns the array of a step of a scan, whose values and positions are of one layer."""
        axes = tuple(axis - 1 for axis in self.axes[1:])
        return dataclasses.replace(self, sizes=self.sizes[1:], stack=self.stack - 1, axes=axes)


class Flat(Kept):
    """Kept values [*stack, k] at ascending positions of the flat slice.

    Positions beyond the slice are padding.
    """

    def build(self, values: jax.Array, indices: jax.Array, outside: jax.Array) -> jax.Array:
        return _scatter(outside, indices, values)


def _scatter(outside: jax.Array, indices: jax.Array, values: jax.Array) -> jax.Array:
    return lax.scatter(
        outside,
        indices[:, None],
        values,
        lax.ScatterDimensionNumbers((), (0,), (0,)),
        indices_are_sorted=True,
        unique_indices=True,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


@jax.custom_jvp
def _write(values: jax.Array, indices: jax.Array, bits: jax.Array) -> jax.Array:
    """Returns a flat slice of frozen entries with values at ascending positions.

    The bits are written: XLA on CPUs would widen both arrays to write floats of 16 bits.
    """
    written = _scatter(bits, indices, lax.bitcast_convert_type(values, bits.dtype))
    return lax.bitcast_convert_type(written, values.dtype)


@_write.defjvp
def _write_tangents(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    values, indices, bits = primals
    zeros = jnp.zeros(bits.shape, values.dtype)
    return _write(values, indices, bits), _scatter(zeros, indices, tangents[0])


class Masked(Kept):
    """Dense slices; `indices` are their masks, outside of which the values are 0."""

    def read(self, never: jax.Array | int = 0) -> jax.Array:
        if self.base is not None or self.observer is not None:
            return super().read(never)
        # To select again would take a pass over the parameter: only gradients are masked.
        values = _mask_gradient(self.values, self.indices)
        return values.reshape(self.sizes).transpose(self.axes)

    def build(self, values: jax.Array, indices: jax.Array, outside: jax.Array) -> jax.Array:
        return jnp.where(indices.reshape(-1) > 0, values.reshape(-1), outside)


@dataclasses.dataclass(frozen=True, eq=False)
class Sliced(Kept):
    """Whole slices of each slice of the stack, along one axis, at `indices` [*stack, k].

    Values have the axes of the dense array, and size k along this axis. Positions beyond the axis
    are padding.

    Attributes:
      axis: the axis, after those of the stack.
    """

    axis: int

    def build(self, values: jax.Array, indices: jax.Array, outside: jax.Array) -> jax.Array:
        places = (*(slice(None) for _ in range(self.axis)), indices.astype(jnp.int32))
        dense = outside.reshape(self.sizes[self.stack :])
        return dense.at[places].set(values, mode="drop").reshape(-1)


@jax.custom_vjp
def _mask_gradient(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the values; their gradient is 0 outside the mask."""
    return values


def _where_kept(mask: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return jnp.where(mask > 0, cotangent, jnp.zeros((), cotangent.dtype)), None


_mask_gradient.defvjp(lambda values, mask: (values, mask), _where_kept)


@dataclasses.dataclass(frozen=True, eq=False)
class Grouped(Kept):
    """Kept values [*stack, groups, k, group] of slices [*inputs, *outputs].

    Each group of neighbouring outputs reads the k inputs at `indices` [*stack, groups, k].

    Attributes:
      inputs: number of axes of a slice that products sum over, the first ones.
    """

    inputs: int

    def split(self, spec: list[MeshAxes], values: list[MeshAxes]) -> list[MeshAxes]:
        spec[self.stack + self.inputs] = values[self.stack]
        return spec

    def build(self, values: jax.Array, indices: jax.Array, outside: jax.Array) -> jax.Array:
        end = self.stack + self.inputs
        inputs, outputs = math.prod(self.sizes[self.stack : end]), math.prod(self.sizes[end:])
        return grouped.densify(values, indices, inputs, outputs).reshape(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """An output of an equation that is computed again by each product that reads the output.

    Attributes:
      equation: an entrywise equation, or one of layout.
      number: number of the output.
      inputs: arrays; some are kept values, or deferred.
    """

    equation: Equation
    number: int
    inputs: tuple[Lazy, ...]


Lazy = jax.Array | Kept | Deferred

_ARRAYS = ["values", "indices", "base", "observer"]
_SIZES = ["sizes", "stack", "axes", "name", "base_dtype"]
jax.tree_util.register_dataclass(Flat, _ARRAYS, _SIZES)
jax.tree_util.register_dataclass(Masked, _ARRAYS, _SIZES)
jax.tree_util.register_dataclass(Grouped, _ARRAYS, [*_SIZES, "inputs"])
jax.tree_util.register_dataclass(Sliced, _ARRAYS, [*_SIZES, "axis"])
jax.tree_util.register_dataclass(Deferred, ["inputs"], ["equation", "number"])


def to_bits(array: PyTree) -> PyTree:
    """Returns floats of less than 32 bits as unsigned integers; other arrays unchanged.

    XLA on CPUs has few operations on such floats. It widens the operand of each other one, and
    would widen all layers of a stack at once where a loop takes a layer. Integers stay narrow.
    """
    bits = 8 * array.dtype.itemsize
    if not jnp.issubdtype(array.dtype, jnp.floating) or bits not in (8, 16):
        return array
    dtype = jnp.dtype(f"uint{bits}")
    if isinstance(array, jax.ShapeDtypeStruct):
        return with_dtype(array, dtype)
    return lax.bitcast_convert_type(array, dtype)


def is_quantized(dtype: np.dtype) -> bool:
    """Returns whether numbers of a dtype are multiplied only after a cast: float8, small integers.

    float32 holds them all.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return dtype.itemsize <= 2
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize == 1


def is_lazy(array: Lazy) -> bool:
    """Returns whether an array is not dense."""
    return isinstance(array, Kept | Deferred)


def densify(array: Lazy, never: jax.Array | int = 0) -> jax.Array:
    """Returns an array as a dense one; see `Kept.read`."""
    if isinstance(array, Kept):
        return array.read(never)
    if isinstance(array, Deferred):
        inputs = [densify(each, never) for each in array.inputs]
        output: jax.Array = array.equation.bind(inputs)[array.number]
        return output
    return array


def kept_in(arrays: Sequence[Lazy]) -> list[Kept]:
    """Returns the kept values from which arrays are computed."""
    leaves = jax.tree.leaves(list(arrays), is_leaf=lambda node: isinstance(node, Kept))
    return [leaf for leaf in leaves if isinstance(leaf, Kept)]


def never_after(arrays: Sequence[jax.Array]) -> jax.Array | int:
    """Returns an int32 0 that depends on the floating `arrays`.

    A buffer of zeros made from this 0 is not allocated before the arrays. The schedule of XLA on
    CPUs begins with all buffers of zeros, of all layers at once. A dependence on the input of a
    layer keeps one dense parameter at a time; a barrier does not, because XLA removes barriers
    before scheduling.
    """
    never: jax.Array | int = 0
    for array in arrays:
        if jnp.issubdtype(jnp.result_type(array), jnp.inexact) and np.size(array):
            never = never + _exceeds_infinity(lax.stop_gradient(array))
    return never


@custom_vmap
def _exceeds_infinity(array: jax.Array) -> jax.Array:
    first = lax.slice(array, [0] * array.ndim, [1] * array.ndim).reshape(())
    return (first.real.astype(jnp.float32) > jnp.inf).astype(jnp.int32)


@_exceeds_infinity.def_vmap
def _exceeds_infinity_once(_: int, __: object, array: jax.Array) -> tuple[jax.Array, bool]:
    """Keeps one dense parameter for all rows of a `vmap`."""
    return _exceeds_infinity(array[0]), False
