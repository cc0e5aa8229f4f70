"""Formats of kept values: shapes and positions, without values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sparsity.compacting.groups import find_groups, list_kept
from sparsity.compacting.kept import Flat, Grouped, Kept, Masked, Sliced, is_quantized
from sparsity.core import sharding, trees
from sparsity.core.checks import check_kind
from sparsity.core.trees import Path, PyTree
from sparsity.graph import Graph
from sparsity.masks.positions import (
    check_entries,
    kept_positions,
    list_positions,
    slots_of_positions,
)

Format: TypeAlias = Literal["values", "grouped", "slices", "dense"]
FORMATS: tuple[Format, ...] = get_args(Format)
VALUES: Format = "values"


@dataclasses.dataclass(frozen=True)
class Storage:
    """The place of the kept values of one parameter; hashable, without arrays.

    Attributes:
      format: 'values', 'grouped', 'slices' or 'dense'.
      shape: shape of the parameter.
      stack: axes that index slices: layers of scans, experts.
      size: shape of the kept values of a slice.
      padding: number of values that are no entries of the parameter, of all slices.
      inputs: axes that products sum over, under 'grouped'.
      axis: axis of the parameter whose slices are kept whole, under 'slices'.
      base_dtype: dtype of the parameter if entries outside the mask are frozen, else `None`.
    """

    format: Format
    shape: tuple[int, ...]
    stack: tuple[int, ...]
    size: tuple[int, ...]
    padding: int = 0
    inputs: tuple[int, ...] = ()
    axis: int = 0
    base_dtype: np.dtype | None = None

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the kept values."""
        return (*(self.shape[axis] for axis in self.stack), *self.size)

    @property
    def indices_shape(self) -> tuple[int, ...]:
        """Shape of the positions."""
        if self.format == "slices":
            return (*self.kept_shape[: len(self.stack)], self.kept_shape[self._axis])
        return self.kept_shape[:-1] if self.format == "grouped" else self.kept_shape

    @property
    def is_full(self) -> bool:
        """Tells whether the values of all entries are stored; never true of the format 'dense'."""
        stored = math.prod(self.kept_shape) - self.padding
        return self.format != "dense" and stored == math.prod(self.shape)

    @property
    def is_quantized(self) -> bool:
        """True if the values are float32 numbers in place of quantized ones."""
        return self.base_dtype is not None and is_quantized(self.base_dtype)

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the parameter, those that index slices first, then `inputs`."""
        return _order(self.stack, len(self.shape), self.inputs)

    @property
    def _axis(self) -> int:
        """The axis of kept values, and of a parameter in the order of the storage, of 'slices'."""
        return self.order.index(self.axis)

    def wrap(
        self,
        values: jax.Array,
        indices: jax.Array,
        base: jax.Array | None = None,
        name: str = "params",
    ) -> Kept:
        """Returns kept values with their positions."""
        sizes = tuple(self.shape[axis] for axis in self.order)
        axes = tuple(self.order.index(axis) for axis in range(len(sizes)))
        arguments = values, indices, base, sizes, len(self.stack), axes, name
        if self.format == "grouped":
            return Grouped(*arguments, len(self.inputs))
        if self.format == "slices":
            axis = self._axis - len(self.stack)
            return Sliced(*arguments, axis, base_dtype=self.base_dtype)
        kind = Masked if self.format == "dense" else Flat
        return kind(*arguments, base_dtype=self.base_dtype)

    def take(self, array: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Returns the entries of a dense array at the positions; padding is 0."""
        slices = array.transpose(self.order)
        if self.format == "dense":
            return np.where(indices > 0, slices, np.zeros((), array.dtype))
        if self.format == "grouped":
            return self._take_groups(slices, indices)
        if self.format == "slices":
            return self._take_slices(slices, indices)
        rows = slices.reshape(math.prod(self.kept_shape[: len(self.stack)]), -1)
        at = indices.reshape(len(rows), -1)
        values = np.take_along_axis(rows, np.minimum(at, rows.shape[1] - 1), axis=1)
        if self.padding:
            values[at >= rows.shape[1]] = 0
        return values.reshape(self.kept_shape)

    def locate(self, mask: jax.Array) -> jax.Array:
        """Returns the positions of the entries that a mask keeps, for compiled programs.

        Args:
          mask: uint8 mask of the shape of the parameter; keeps as many entries of each slice as
            are stored, and has the groups of the format.
        """
        slices = mask.transpose(self.order)
        if self.format == "dense":
            return slices
        if self.format == "grouped":
            inputs = math.prod(self.shape[axis] for axis in self.inputs)
            slices = slices.reshape(*slices.shape[: len(self.stack)], inputs, -1)
            slices = slices[..., :: self.size[-1]].swapaxes(-1, -2)
        return self.locate_rows(slices.reshape(math.prod(self.indices_shape[:-1]), -1))

    def locate_rows(self, rows: jax.Array) -> jax.Array:
        """Returns the positions of units that masks of slices, or of groups of inputs, keep.

        Args:
          rows: uint8[rows, units].
        """
        positions = jax.vmap(lambda row: kept_positions(row, self.indices_shape[-1]))(rows)
        if self.format == "grouped":  # whose padding is the number of inputs, in 16 bits perhaps
            positions = jnp.minimum(positions, rows.shape[1])
        return positions.reshape(self.indices_shape)

    def find_slots(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns where the values of new positions are stored, and whether they are.

        Args:
          old: positions of stored values, not of the format 'dense'.
          new: positions of equal shape.

        Returns:
          int32 and bool arrays of the shape of the positions; ignore the slot where the flag is
          false.
        """
        axes = self.inputs if self.format == "grouped" else self.order[len(self.stack) :]
        size = math.prod(self.shape[axis] for axis in axes)

        def find(old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
            kept = jnp.zeros(size, jnp.uint8).at[old].set(1, mode="drop")
            return slots_of_positions(kept, new.astype(jnp.int32))

        rows = (x.reshape(-1, x.shape[-1]) for x in (old, new))
        slots, stays = jax.vmap(find)(*rows)
        return slots.reshape(new.shape), stays.reshape(new.shape)

    def place(self, array: np.ndarray, like: jax.Array, name: str) -> jax.Array:
        """Returns values or positions on the devices of a parameter.

        The stack is sharded as that of the parameter, groups as the first axis of the outputs.

        Raises:
          ValueError: a mesh divides another axis, so that its devices keep other entries.
        """
        placed = getattr(like, "sharding", None)
        if not isinstance(placed, NamedSharding):
            return jnp.asarray(array)
        spec = [*placed.spec, *[None] * (len(self.shape) - len(placed.spec))]
        axes = list(self.order if self.format == "dense" else self.stack)
        counts = sharding.num_devices(placed, len(self.shape))
        if self.format == "grouped":
            outputs = self.order[len(self.stack) + len(self.inputs)]
            if self.size[0] % counts[outputs] == 0:
                axes.append(outputs)
        divided = [axis for axis in range(len(spec)) if counts[axis] > 1 and axis not in axes]
        if divided:
            raise ValueError(
                f"{name!r} of shape {self.shape} is sharded along axis {divided[0]} ("
                f"{placed.spec}), and the devices do not keep equal parts of the stored values. "
                "Shard it along axes that index slices, or along outputs whose groups of FanIn "
                "the mesh divides, or replicate it: jax.device_put(leaf, NamedSharding(mesh, P()))."
            )
        entries = PartitionSpec(*(spec[axis] for axis in axes))
        result: jax.Array = jax.device_put(array, placed.update(spec=entries))
        return result

    def _take_slices(self, slices: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Returns values [*stack, ..., k, ...] of slices [*stack, ..., size, ...]."""
        size, depth = slices.shape[self._axis], len(self.stack)
        full_axes = [i for i in range(depth, slices.ndim) if i != self._axis]
        at = np.expand_dims(indices.astype(np.int64), full_axes)
        values = np.take_along_axis(slices, np.minimum(at, size - 1), self._axis)
        return np.where(at < size, values, np.zeros((), slices.dtype))

    def _take_groups(self, slices: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Returns values [*stack, groups, k, group] of slices [*stack, *inputs, *outputs]."""
        *_, groups, k, group = self.kept_shape
        inputs = math.prod(self.shape[axis] for axis in self.inputs)
        slices = slices.reshape(math.prod(self.kept_shape[: len(self.stack)]), inputs, -1)
        missing = groups * group - slices.shape[2]
        slices = np.pad(slices, ((0, 0), (0, 1), (0, missing)))  # padding reads a row of zeros
        rows = slices.reshape(len(slices), inputs + 1, groups, group).swapaxes(1, 2)
        at = indices.reshape(len(slices), groups, k, 1).astype(np.int64)
        return np.take_along_axis(rows, at, axis=2).reshape(self.kept_shape)


def _order(stack: Sequence[int], ndim: int, inputs: Sequence[int] = ()) -> tuple[int, ...]:
    """Returns the axes of an array, those of the stack first, then the inputs."""
    first = *stack, *inputs
    return (*first, *(axis for axis in range(ndim) if axis not in first))


def store_values(mask: np.ndarray, stack: tuple[int, ...]) -> tuple[Storage, np.ndarray]:
    """Returns the storage of format 'values', and the positions of the kept entries.

    Args:
      mask: the mask, not packed.
      stack: axes that index slices.
    """
    indices = list_positions(_rows(mask, stack))
    padding = indices.size - int(np.count_nonzero(mask))
    storage = Storage("values", mask.shape, stack, indices.shape[1:], padding)
    return storage, indices.reshape(storage.kept_shape)


def store_dense(mask: np.ndarray, stack: tuple[int, ...]) -> tuple[Storage, np.ndarray]:
    """Returns the storage of format 'dense', and the mask."""
    slices = np.ascontiguousarray(mask.transpose(_order(stack, mask.ndim)) != 0, np.uint8)
    return Storage("dense", mask.shape, stack, slices.shape[len(stack) :]), slices


def _rows(mask: np.ndarray, stack: tuple[int, ...]) -> np.ndarray:
    """Returns the mask as [slices, entries]."""
    slices = mask.transpose(_order(stack, mask.ndim))
    rows: np.ndarray = slices.reshape(math.prod(slices.shape[: len(stack)]), -1)
    return rows


def store_slices(mask: np.ndarray, stack: tuple[int, ...]) -> tuple[Storage, np.ndarray] | None:
    """Returns the storage of format 'slices', and the positions of the slices along their axis.

    Args:
      mask: the mask, not packed.
      stack: axes that index slices.

    Returns:
      `None` if some slice is kept in part, all or none are kept, or too much padding would be
      stored: of layers that keep different numbers.
    """
    slices, depth = mask.transpose(_order(stack, mask.ndim)) != 0, len(stack)
    if slices.all() or not slices.any() or slices.ndim < depth + 2:
        return None
    for axis in range(depth, mask.ndim):
        full_axes = tuple(i for i in range(depth, mask.ndim) if i != axis)
        rows = slices.any(axis=full_axes, keepdims=True)
        if (slices == rows).all():
            indices = list_kept(rows.squeeze(full_axes))
            size = [*slices.shape[depth:]]
            size[axis - depth] = indices.shape[-1]
            kept = int(np.count_nonzero(mask))
            padding = math.prod([*slices.shape[:depth], *size]) - kept
            along = _order(stack, mask.ndim)[axis]
            storage = Storage("slices", mask.shape, stack, tuple(size), padding, axis=along)
            return None if padding > kept else (storage, indices)
    return None


def store_groups(
    mask: np.ndarray, stack: tuple[int, ...], inputs: tuple[int, ...], group: int | None = None
) -> tuple[Storage, np.ndarray] | None:
    """Returns the storage of format 'grouped', and the inputs that each group reads.

    Args:
      mask: the mask, not packed.
      stack: axes that index slices.
      inputs: axes that products sum over.
      group: number of outputs that share inputs; by default the largest one, of at least 4.

    Returns:
      `None` if no neighbouring outputs share their inputs, or too much padding would be stored.
    """
    slices = mask.transpose(_order(stack, mask.ndim, inputs))
    count = math.prod(mask.shape[axis] for axis in inputs)
    slices = slices.reshape(*slices.shape[: len(stack)], count, -1).swapaxes(-1, -2)
    groups = find_groups(slices, group)
    if groups is None:
        return None
    group, indices = groups
    size = (*indices.shape[len(stack) :], group)
    padding = indices.size * group - int(np.count_nonzero(mask))
    return Storage("grouped", mask.shape, stack, size, padding, inputs), indices


def make_storages(
    graph: Graph,
    masks: Mapping[Path, np.ndarray],
    formats: Mapping[Path, Format],
    is_frozen: bool,
) -> tuple[dict[Path, Storage], dict[Path, np.ndarray]]:
    """Returns the storages of masked parameters, and the positions of their kept values.

    Args:
      graph: the graph of the model.
      masks: masks by path.
      formats: formats of some parameters; others are 'grouped' where masks have groups of at least
        4 outputs, 'slices' where frozen entries surround whole slices, else 'values'.
      is_frozen: whether entries outside the masks are stored: needed for slices, and refused for
        groups.

    Raises:
      ValueError: a parameter cannot be 'grouped', or 'slices'.
    """
    storages, indices = {}, {}
    for path, stack in _find_stacks(graph, masks).items():
        mask, chosen, made = masks[path], formats.get(path), None
        if chosen in (None, "grouped") and not is_frozen:
            made = _make_groups(graph, path, mask, stack, is_forced=chosen is not None)
        elif chosen in (None, "slices") and is_frozen:
            made = store_slices(mask, stack)
        name = trees.join_names(path)
        if chosen == "grouped" and made is None:
            raise ValueError(
                f"formats has 'grouped' for {name!r} of shape {mask.shape}, but its "
                "outputs keep different numbers of inputs, its products sum over different axes, "
                "or outside = 'frozen'. Use 'values', or masks of FanIn."
            )
        if chosen == "slices" and made is None:
            raise ValueError(
                f"formats has 'slices' for {name!r} of shape {mask.shape}, but its mask keeps no "
                "whole slices along one axis, layers keep too different numbers, or outside = "
                "'zero'. Use 'values', or masks of channels: scope=Coupled(graph)."
            )
        if made is None:
            made = store_dense(mask, stack) if chosen == "dense" else store_values(mask, stack)
        storages[path], indices[path] = made
    return storages, indices


def list_formats(
    graph: Graph, masks: Mapping[Path, np.ndarray], is_frozen: bool
) -> dict[Path, list[Format]]:
    """Returns the formats that each masked parameter can have."""
    stacks, formats = _find_stacks(graph, masks), {}
    for path, mask in masks.items():
        if is_frozen:
            possible = {"slices": store_slices(mask, stacks[path]) is not None}
        else:
            made = _make_groups(graph, path, mask, stacks[path], is_forced=True)
            possible = {"grouped": made is not None}
        possible |= {"values": True, "dense": True}
        formats[path] = [name for name in FORMATS if possible.get(name)]
    return formats


def _make_groups(
    graph: Graph, path: Path, mask: np.ndarray, stack: tuple[int, ...], is_forced: bool
) -> tuple[Storage, np.ndarray] | None:
    """Returns the storage of format 'grouped', of groups of one output only if that is forced."""
    inputs = _find_inputs(graph, path, stack)
    if not inputs:
        return None
    made = store_groups(mask, stack, inputs)
    return store_groups(mask, stack, inputs, 1) if made is None and is_forced else made


def _find_inputs(graph: Graph, path: Path, stack: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes of a parameter over which all its products sum, () if they differ."""
    uses = graph.tracker.find_products(path)
    axes = {use.contracting for use in uses}
    groups = {use.groups for use in uses}
    if len(axes) != 1 or groups != {1}:
        return ()
    (inputs,) = axes
    is_separate = not {*inputs} & {*stack} and len(inputs) + len(stack) < len(
        graph.parameters.find_shape(path)
    )
    return inputs if is_separate else ()


def read_masks(graph: Graph, masks: PyTree, is_frozen: bool = False) -> dict[Path, np.ndarray]:
    """Returns the masks by path, without those that are `None`.

    Args:
      graph: the graph of the model.
      masks: tree of masks.
      is_frozen: whether entries outside the masks stay, so that parameters may be quantized.

    Raises:
      ValueError: a mask belongs to no parameter, has another shape or other entries than 0 and 1,
        or its parameter is not floating.
    """
    arrays = {}
    for leaf, mask in graph.parameters.match_masks(masks):
        array = np.asarray(mask)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact) and not (
            is_frozen and is_quantized(leaf.dtype)
        ):
            raise ValueError(
                f"The masks have a leaf at {leaf.name!r}, whose dtype {leaf.dtype} is not "
                "floating. Give it no mask: None. Integers of 8 and 16 bits are trained with "
                "outside = 'frozen'."
            )
        check_entries(array, leaf.name)
        arrays[leaf.path] = array
    return arrays


def read_formats(
    formats: Mapping[Path, Format] | Mapping[str, Format], masks: Mapping[Path, np.ndarray]
) -> dict[Path, Format]:
    """Returns formats by path; raises a ValueError for unknown paths and formats."""
    check_kind("formats", formats, Mapping, "a dict {path: format}")
    chosen = {}
    for key, name in formats.items():
        check_kind("a path of formats", key, str | tuple, "text or a tuple of strings")
        path = tuple(filter(None, key.split("/"))) if isinstance(key, str) else tuple(key)
        if path not in masks:
            raise ValueError(
                f"formats has the path {trees.join_names(path)!r}, which has no mask. Masked are "
                f"{trees.listed([trees.join_names(path) for path in masks])}."
            )
        if name not in FORMATS:
            raise ValueError(f"formats[{key!r}] must be one of {FORMATS}, got {name!r}.")
        chosen[path] = name
    return chosen


def _find_stacks(graph: Graph, masks: Mapping[Path, np.ndarray]) -> dict[Path, tuple[int, ...]]:
    """Returns the axes of each masked parameter that index slices.

    These are the axes over which scans run. Axes that index separate products, as experts do,
    follow if all slices keep equally many entries.
    """
    stacks = {}
    scanned = graph.tracker.find_scanned_axes()
    for path, mask in masks.items():
        batches = [{*use.batch} for use in graph.tracker.find_products(path)]
        batch = set.intersection(*batches) if batches else set()
        stack = scanned.get(path, ())
        slices = (*stack, *sorted(batch - {*stack}))
        counts = np.count_nonzero(_rows(mask, slices), axis=1)
        stacks[path] = slices if len({*counts.tolist()}) == 1 else stack
    return stacks
