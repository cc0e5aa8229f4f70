"""How kept values lie in memory, for each masked parameter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
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
class Layout:
    """The place of the kept values of one parameter; hashable, without arrays.

    Attributes:
      format: 'values', 'grouped' or 'dense'.
      shape: shape of the parameter.
      stack: number of leading axes that index slices: layers of scans, experts.
      sizes: shape of the kept values of a slice.
      padding: number of values that are no entries of the parameter, of all slices.
    """

    format: Format
    shape: tuple[int, ...]
    stack: int
    sizes: tuple[int, ...]
    padding: int = 0

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the kept values."""
        return (*self.shape[: self.stack], *self.sizes)

    def wrap(
        self,
        values: jax.Array,
        indices: jax.Array,
        base: jax.Array | None = None,
        name: str = "params",
    ) -> Kept:
        """Returns kept values with their positions."""
        kind = {"values": Flat, "dense": Masked}[self.format]
        return kind(values, indices, base, self.shape, self.stack, name)

    def take(self, array: np.ndarray, indices: np.ndarray) -> np.ndarray:
        """Returns the entries of a dense array at the positions; padding is 0."""
        if self.format == "dense":
            return np.where(indices > 0, array, np.zeros((), array.dtype))
        rows = array.reshape(-1, math.prod(self.shape[self.stack :]))
        at = indices.reshape(len(rows), -1)
        values = np.take_along_axis(rows, np.minimum(at, rows.shape[1] - 1), axis=1)
        if self.padding:
            values[at >= rows.shape[1]] = 0
        return values.reshape(self.kept_shape)


def flat_layout(mask: np.ndarray, stack: int) -> tuple[Layout, np.ndarray]:
    """Returns the layout of format 'values', and the positions of the kept entries.

    Args:
      mask: the mask, not packed.
      stack: number of leading axes that index slices.
    """
    rows = mask.reshape(math.prod(mask.shape[:stack]), -1)
    counts = np.count_nonzero(rows, axis=1)
    size, width = int(counts.max(initial=0)), rows.shape[1]
    # Padding counts on, so that all positions of a slice ascend.
    indices = np.arange(width, width + size, dtype=np.int32) + np.zeros((len(rows), 1), np.int32)
    for row, index, count in zip(rows, indices, counts, strict=True):
        index[:count] = np.flatnonzero(row)
        index[count:] -= count
    layout = Layout("values", mask.shape, stack, (size,), int(size * len(rows) - counts.sum()))
    return layout, indices.reshape(layout.kept_shape)


def dense_layout(mask: np.ndarray, stack: int) -> tuple[Layout, np.ndarray]:
    """Returns the layout of format 'dense', and the mask."""
    return Layout("dense", mask.shape, stack, mask.shape[stack:]), (mask != 0).astype(np.uint8)


def make_layouts(
    graph: Graph, masks: Mapping[Path, np.ndarray], formats: Mapping[Path, Format]
) -> tuple[dict[Path, Layout], dict[Path, np.ndarray]]:
    """Returns the layouts of masked parameters, and the positions of their kept values."""
    layouts, indices = {}, {}
    for path, stack in _count_stack_axes(graph, masks).items():
        make = dense_layout if formats.get(path) == "dense" else flat_layout
        layouts[path], indices[path] = make(masks[path], stack)
    return layouts, indices


def read_masks(graph: Graph, params: PyTree, masks: PyTree) -> dict[Path, np.ndarray]:
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


def _count_stack_axes(graph: Graph, masks: Mapping[Path, np.ndarray]) -> dict[Path, int]:
    """Returns the number of leading axes of each masked parameter that index slices.

    These are the axes over which scans run. Axes that index separate products, as experts do,
    follow if all slices keep equally many entries.
    """
    depths = graph.count_scanned_axes()
    stacks = {}
    for path, mask in masks.items():
        stack, batches = depths.get(path, 0), [{*use.batch} for use in graph.find_products(path)]
        while batches and all(stack in batch for batch in batches) and stack < mask.ndim - 1:
            stack += 1
        counts = np.count_nonzero(mask.reshape(math.prod(mask.shape[:stack]), -1), axis=1)
        stacks[path] = stack if len({*counts.tolist()}) == 1 else depths.get(path, 0)
    return stacks
