"""Kept values and their positions, and arrays that are computed from them where they are read."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec, auto_axes

from sparsity.compacting import grouped
from sparsity.core.sharding import explicit_sharding, fit, shard_like, with_dtype
from sparsity.core.trees import PyTree
from sparsity.programs.program import Equation

MeshAxes: TypeAlias = str | tuple[str, ...] | None  # of a mesh


@dataclasses.dataclass(frozen=True, eq=False)
class Observer:
    """Computes an array from the gradient of each dense slice, where a backward pass has it.

    The array leaves the backward pass as the cotangent of `result`. Kept values get no gradient.
    If a `vmap` maps gradients and no `arrays`, the gradients of all rows are added up first. A
    slice that is read twice has two gradients, whose results are added up.

    Attributes:
      function: maps a slice of `arrays` and the gradient of a dense slice to a slice of `result`.
      arrays: tree of arrays [*stack, ...].
      result: [*stack, ...] zeros.
    """

    function: Callable[[PyTree, jax.Array], jax.Array]
    arrays: PyTree
    result: jax.Array

    def watch(self, slices: jax.Array, stack: int) -> jax.Array:
        """Returns the dense slices [*stack, ...], whose gradients are observed."""
        return _watch(self.function, stack, lax.stop_gradient(slices), self.arrays, self.result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _watch(
    function: Callable[[PyTree, jax.Array], jax.Array],
    stack: int,
    slices: jax.Array,
    arrays: PyTree,
    result: jax.Array,
) -> jax.Array:
    return slices


def _observe(
    function: Callable[[PyTree, jax.Array], jax.Array],
    stack: int,
    residuals: tuple[PyTree, jax.Array],
    gradient: jax.Array,
) -> tuple[None, None, jax.Array]:
    arrays, result = residuals

    def run(arrays: PyTree, gradient: jax.Array) -> jax.Array:
        def mapped(each: tuple[PyTree, jax.Array]) -> jax.Array:
            return function(*each)

        for _ in range(stack):
            mapped = functools.partial(lax.map, mapped)
        return mapped((arrays, gradient))

    def call(arrays: PyTree, gradient: jax.Array) -> jax.Array:
        return shard_like(result, run, arrays, gradient)

    observe = custom_vmap(call)

    @observe.def_vmap
    def observe_rows(
        _: int, batched: PyTree, arrays: PyTree, gradients: jax.Array
    ) -> tuple[jax.Array, bool]:
        if any(jax.tree.leaves(batched[0])):  # models in parallel
            in_axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
            rows: jax.Array = jax.vmap(call, in_axes=in_axes)(arrays, gradients)
            return rows, True
        return observe(arrays, jnp.sum(gradients, axis=0)), False

    return None, None, observe(arrays, gradient)


_watch.defvjp(lambda _, __, slices, arrays, result: (slices, (arrays, result)), _observe)


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
      layers: in a step of a scan the values of all layers, and the number of the layer that is
        `values`, or `None`: see `layer`.
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
    layers: tuple[jax.Array, jax.Array] | None = dataclasses.field(default=None, kw_only=True)

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

    def densify(self, never: jax.Array | int | None = None) -> jax.Array:
        """Returns the dense array.

        Args:
          never: an int32 0; no array is allocated before its value exists. `None` copies the bits
            of frozen entries, those of NaN included; a scan has no second derivatives of the copy.
        """
        values = self.read_values()
        placed = explicit_sharding(jax.typeof(values))
        if placed is None:
            return self._densify(values, self.indices, self.base, never)
        entries = [*placed.spec, *[None] * len(self.sizes)]
        spec = [entries[axis] if axis < self.stack else None for axis in range(len(self.sizes))]
        spec = self.split(spec, entries)
        target = placed.update(spec=PartitionSpec(*(spec[axis] for axis in self.axes)))
        dense = auto_axes(self._densify, out_sharding=fit(target, self.shape))
        array: jax.Array = dense(values, self.indices, self.base, never)
        return array

    def read(self, never: jax.Array | int = 0) -> jax.Array:
        """Returns the dense array for an equation of the model; see `densify`."""
        dense = self.densify(never)
        if self.observer is None:
            return dense
        slices = dense.transpose(np.argsort(self.axes))
        return self.observer.watch(slices, self.stack).transpose(self.axes)

    def read_values(self) -> jax.Array:
        """Returns the values, of `layers` in a step of a scan."""
        return self.values if self.layers is None else _read_layer(self.values, *self.layers)

    def widen(self) -> Self:
        """Returns the array as float32."""
        return self.with_values(self.read_values().astype(jnp.float32))

    def with_values(self, values: jax.Array) -> Self:
        """Returns an array of other values, which are computed from `read_values`."""
        return dataclasses.replace(self, values=values, layers=None)

    def split(self, spec: list[MeshAxes], values: list[MeshAxes]) -> list[MeshAxes]:
        """Returns the axes of a mesh that split slices, from those that split the values."""
        return spec

    def _densify(
        self,
        values: jax.Array,
        indices: jax.Array,
        base: jax.Array | None,
        never: jax.Array | int | None,
    ) -> jax.Array:
        size, dtype = math.prod(self.sizes[self.stack :]), values.dtype
        start = jnp.asarray(0 if never is None else never)
        zeros = jnp.broadcast_to(start.astype(dtype), (size,))

        def build(values: jax.Array, indices: jax.Array, base: jax.Array | None) -> jax.Array:
            outside = zeros
            if base is not None and self.base_dtype is not None:
                bits = lax.stop_gradient(base).reshape(size)
                if jnp.issubdtype(self.base_dtype, jnp.floating):
                    # Frozen entries wait, too: their copy is made when a product needs the slice.
                    unsigned = jnp.dtype(f"uint{8 * self.base_dtype.itemsize}")
                    bits = lax.bitcast_convert_type(bits, unsigned) + start.astype(unsigned)
                    if never is None and dtype == self.base_dtype and isinstance(self, Flat):
                        return _write(values, indices, bits)
                outside = lax.bitcast_convert_type(bits, self.base_dtype).astype(dtype)
            # Zeros wait already; groups are built on zeros of their own.
            waits = base is None and not isinstance(self, Grouped)
            return self.build(values, indices if waits else indices + start, outside)

        for _ in range(self.stack):
            build = jax.vmap(build)
        return build(values, indices, base).reshape(self.sizes).transpose(self.axes)

    def layer(self, stack: Self, number: jax.Array | None) -> Self:
        """Returns the array of a step of a scan, whose values and positions are of one layer.

        Args:
          stack: the array of all layers.
          number: number of the layer, to read narrow values from all layers; their gradient is
            still that of the layer. `None` reads the layer that the scan takes.
        """
        axes = tuple(axis - 1 for axis in self.axes[1:])
        layers = None
        if number is not None and is_narrow(self.values.dtype):
            layers = stack.read_values(), number
        sizes, depth = self.sizes[1:], self.stack - 1
        return dataclasses.replace(self, sizes=sizes, stack=depth, axes=axes, layers=layers)


@jax.custom_jvp
def _read_layer(values: jax.Array, layers: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the values of a layer; the gradient is that of `values`, which are equal.

    XLA on CPUs would widen the values of all layers before the scan. The barrier keeps the
    conversion in the step, where it is a part of reading the layer. jax drops rules for derivatives
    from a scan that was differentiated: second derivatives are those of `layers`.
    """
    layers, number = lax.optimization_barrier((layers, number))
    layer: jax.Array = lax.dynamic_index_in_dim(layers, number, keepdims=False)
    return layer


@_read_layer.defjvp
def _read_layer_tangents(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    return _read_layer(*primals), tangents[0]


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
        values = _mask_gradient(self.read_values(), self.indices)
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

_ARRAYS = ["values", "indices", "base", "observer", "layers"]
_SIZES = ["sizes", "stack", "axes", "name", "base_dtype"]
jax.tree_util.register_dataclass(Observer, ["arrays", "result"], ["function"])
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
    if not is_narrow(array.dtype):
        return array
    dtype = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    if isinstance(array, jax.ShapeDtypeStruct):
        return with_dtype(array, dtype)
    return lax.bitcast_convert_type(array, dtype)


def is_narrow(dtype: np.dtype) -> bool:
    """Returns whether numbers of a dtype are floats of 8 or 16 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize <= 2


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
