"""Layouts of kept values: a parameter as slices, each with its values in slots.

`sparsity.masks.positions` says which entry of a slice a slot holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import numpy as np

from sparsity.core import sharding
from sparsity.core.trees import AnyArray, PyTree
from sparsity.masks.positions import list_positions


@dataclasses.dataclass(frozen=True)
class SliceLayout:
    """A parameter as slices of one size. Hashable and no pytree, so trees hold it as a leaf.

    Attributes:
      shape: shape of the parameter.
      stack: axes that index slices: layers of scans, experts.
      split_shape: shape as which the parameter is read; `stack` counts its axes; by default the
        shape.

    Example:
      >>> layout = SliceLayout((2, 3), stack=(1,))
      >>> layout.slices(np.array([[0, 1, 2], [3, 4, 5]]))
      array([[0, 3],
             [1, 4],
             [2, 5]])
    """

    shape: tuple[int, ...]
    stack: tuple[int, ...] = ()
    split_shape: tuple[int, ...] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the axes of the parameter as it is read."""
        return self.shape if self.split_shape is None else self.split_shape

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the parameter, those that index slices first."""
        return (*self.stack, *(i for i in range(len(self.sizes)) if i not in self.stack))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Sizes of the axes that index slices."""
        return tuple(self.sizes[axis] for axis in self.stack)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Sizes of a slice, in the order of the layout."""
        return tuple(self.sizes[axis] for axis in self.order[len(self.stack) :])

    @property
    def slice_size(self) -> int:
        """Number of entries of a slice."""
        return math.prod(self.slice_shape)

    def slices(self, array: AnyArray) -> AnyArray:
        """Returns an array of the parameter's shape as [*batch, n]."""
        ordered = array.reshape(self.sizes).transpose(self.order)
        return ordered.reshape(*self.batch_shape, self.slice_size)

    def join(self, slices: AnyArray) -> AnyArray:
        """Returns slices [*batch, n] as an array of the parameter's shape."""
        ordered = slices.reshape(*self.batch_shape, *self.slice_shape)
        return ordered.transpose(np.argsort(self.order)).reshape(self.shape)

    def map_slices(
        self, fn: Callable[..., PyTree], like: jax.Array, *args: PyTree, dense: bool = False
    ) -> PyTree:
        """Maps `fn` over the slices of arrays [*batch, ...], or of the shape of the parameter.

        The parameter `like` gives its sharding to the results: arrays [*batch, k], or arrays of
        the parameter's shape with `dense`.
        """

        def mapped(*args: PyTree) -> PyTree:
            by_slice = fn
            for _ in self.batch_shape:
                by_slice = jax.vmap(by_slice)
            flat = jax.tree.map(lambda x: self.slices(x) if x.shape == self.shape else x, args)
            out = by_slice(*flat)
            return self.join(out) if dense else out

        shape = self.shape if dense else self.batch_shape  # later axes are on every device
        return sharding.shard_like(like, mapped, *args, shape=shape)

    def count_kept(self, mask: np.ndarray) -> np.ndarray:
        """Returns the numbers of entries that a mask keeps of each slice, int64[*batch]."""
        return np.asarray(np.count_nonzero(self.slices(mask), axis=-1))

    def list_positions(self, mask: np.ndarray) -> np.ndarray:
        """Returns the positions of the entries that a mask keeps of each slice, int32[*batch, k].

        Slots that are not in use hold positions beyond the slice.
        """
        rows = self.slices(mask).reshape(math.prod(self.batch_shape), self.slice_size)
        positions = list_positions(rows)
        return positions.reshape(*self.batch_shape, positions.shape[1])

    def gather(self, array: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns the entries of an array at positions; 0 in slots that are not in use."""
        slices, n = self.slices(array), self.slice_size
        values = np.take_along_axis(slices, np.minimum(positions, n - 1), axis=-1)
        # Slots that are not in use have read the last entry.
        values[positions >= n] = 0
        return values

    def scatter(self, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Returns an array of the parameter's shape with values at positions, and 0 elsewhere."""
        n = self.slice_size
        # Slots that are not in use write the last column.
        padded = np.zeros((*self.batch_shape, n + 1), values.dtype)
        np.put_along_axis(padded, np.minimum(positions, n), values, axis=-1)
        return self.join(padded[..., :n])


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptLayout(SliceLayout):
    """Layout of the kept values of a parameter; other attributes as in `SliceLayout`.

    Attributes:
      slice_kept_shape: shape of the kept values of a slice, such as (k,) for k slots.
    """

    slice_kept_shape: tuple[int, ...]

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the kept values."""
        return (*self.batch_shape, *self.slice_kept_shape)
