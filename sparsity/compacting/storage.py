"""Formats of kept values: shapes and positions, without values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.compacting.kept import Flat, Kept, Masked
from sparsity.core import trees
from sparsity.core.trees import PyTree
from sparsity.graph import Graph

Path: TypeAlias = tuple[str, ...]
Format: TypeAlias = Literal["values", "dense"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclasses.dataclass(frozen=True)
class Storage:
    """The place of the kept values of one parameter; hashable, without arrays.

    Attributes:
      format: 'values', 'grouped' or 'dense'.
      shape: shape of the parameter.
      stack: axes that index slices: layers of scans, experts.
      size: shape of the kept values of a slice.
      padding: number of values that are no entries of the parameter, of all slices.
    """

    format: Format
    shape: tuple[int, ...]
    stack: tuple[int, ...]
    size: tuple[int, ...]
    padding: int = 0

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the kept values."""
        return (*(self.shape[axis] for axis in self.stack), *self.size)

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the parameter, those that index slices first."""
        return stack_first(self.stack, len(self.shape))

    def wrap(
        self,
        values: jax.Array,
        indices: jax.Array,
        base: jax.Array | None = None,
        name: str = "params",
    ) -> Kept:
        """Returns kept values with their positions."""
        kind = {"values": Flat, "dense": Masked}[self.format]
        sizes = tuple(self.shape[axis] for axis in self.order)
        axes = tuple(self.order.index(axis) for axis in range(len(sizes)))
        return kind(values, indices, base, sizes, len(self.stack), axes, name)

    def take(self, array: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Returns the entries of a dense array at the positions; padding is 0."""
        slices = array.transpose(self.order)
        if self.format == "dense":
            return np.where(indices > 0, slices, np.zeros((), array.dtype))
        rows = slices.reshape(math.prod(self.kept_shape[: len(self.stack)]), -1)
        at = indices.reshape(len(rows), -1)
        values = np.take_along_axis(rows, np.minimum(at, rows.shape[1] - 1), axis=1)
        if self.padding:
            values[at >= rows.shape[1]] = 0
        return values.reshape(self.kept_shape)


def stack_first(stack: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Returns the axes of an array, those of the stack first."""
    return (*stack, *(axis for axis in range(ndim) if axis not in stack))


def store_values(mask: np.ndarray, stack: tuple[int, ...]) -> tuple[Storage, np.ndarray]:
    """Returns the storage of format 'values', and the positions of the kept entries.

    Args:
      mask: the mask, not packed.
      stack: axes that index slices.
    """
    rows = _rows(mask, stack)
    counts = np.count_nonzero(rows, axis=1)
    size, width = int(counts.max(initial=0)), rows.shape[1]
    # Padding counts on, so that all positions of a slice ascend.
    indices = np.arange(width, width + size, dtype=np.int32) + np.zeros((len(rows), 1), np.int32)
    for row, index, count in zip(rows, indices, counts, strict=True):
        index[:count] = np.flatnonzero(row)
        index[count:] -= count
    padding = int(size * len(rows) - counts.sum())
    storage = Storage("values", mask.shape, stack, (size,), padding)
    return storage, indices.reshape(storage.kept_shape)


def store_dense(mask: np.ndarray, stack: tuple[int, ...]) -> tuple[Storage, np.ndarray]:
    """Returns the storage of format 'dense', and the mask."""
    slices = np.ascontiguousarray(mask.transpose(stack_first(stack, mask.ndim)) != 0, np.uint8)
    return Storage("dense", mask.shape, stack, slices.shape[len(stack) :]), slices


def _rows(mask: np.ndarray, stack: tuple[int, ...]) -> np.ndarray:
    """Returns the mask as [slices, entries]."""
    slices = mask.transpose(stack_first(stack, mask.ndim))
    rows: np.ndarray = slices.reshape(math.prod(slices.shape[: len(stack)]), -1)
    return rows


def make_storages(
    graph: Graph, masks: Mapping[Path, np.ndarray], formats: Mapping[Path, Format]
) -> tuple[dict[Path, Storage], dict[Path, np.ndarray]]:
    """Returns the storages of masked parameters, and the positions of their kept values."""
    storages, indices = {}, {}
    for path, stack in _find_stacks(graph, masks).items():
        make = store_dense if formats.get(path) == "dense" else store_values
        storages[path], indices[path] = make(masks[path], stack)
    return storages, indices


def read_masks(graph: Graph, masks: PyTree) -> dict[Path, np.ndarray]:
    """Returns the masks by path, without those that are `None`.

    Raises:
      ValueError: a mask belongs to no parameter, has another shape or other entries than 0 and 1,
        or its parameter is not floating.
    """
    arrays = {}
    for key, mask in trees.leaves_by_path(masks).items():
        leaf = graph.find_parameter(trees.path_names(key), mask, "masks")
        array = np.asarray(mask)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"The masks have a leaf at {leaf.name!r}, whose dtype {leaf.dtype} is not "
                "floating. Give it no mask: None."
            )
        if not np.isin(array, (0, 1)).all():
            raise ValueError(
                f"The mask of {leaf.name!r} has entries other than 0 and 1, such as "
                f"{array[~np.isin(array, (0, 1))][0]}. Unpack packed masks: "
                "sparsity.unpack_masks(masks, params)."
            )
        arrays[leaf.path] = array
    return arrays


def read_formats(
    formats: Mapping[Path | str, Format], masks: Mapping[Path, np.ndarray]
) -> dict[Path, Format]:
    """Returns formats by path; raises a ValueError for unknown paths and formats."""
    chosen = {}
    for key, name in formats.items():
        path = tuple(key.split("/")) if isinstance(key, str) else tuple(key)
        if path not in masks:
            raise ValueError(
                f"formats has the path {'/'.join(path)!r}, which has no mask. Masked are "
                f"{trees.listed(['/'.join(path) for path in masks])}."
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
    scanned = graph.find_scanned_axes()
    for path, mask in masks.items():
        batches = [{*use.batch} for use in graph.find_products(path)]
        batch = set.intersection(*batches) if batches else set()
        stack = scanned.get(path, ())
        slices = (*stack, *sorted(batch - {*stack}))
        counts = np.count_nonzero(_rows(mask, slices), axis=1)
        stacks[path] = slices if len({*counts.tolist()}) == 1 else stack
    return stacks
