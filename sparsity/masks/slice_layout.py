"""Layouts of kept values: a parameter as slices, each with its values in slots.

A slice of n entries that keeps at most k has k slots. Slot j holds the position of the j-th kept
entry; slots beyond the kept entries hold n, n + 1, ..., which lie outside the slice, so that all
positions of a slice ascend.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import sharding
from sparsity.core.trees import AnyArray, PyTree


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


def kept_positions(mask: jax.Array, k: int) -> jax.Array:
    """Returns the positions of the kept entries in increasing order, int32[k].

    Slots that are not in use hold n, n + 1, ...

    Args:
      mask: uint8[n] with at most `k` kept entries.
      k: number of slots, less than 2**31 - n if some are not in use.

    Example:
      >>> kept_positions(jnp.array([0, 1, 0, 1, 1], jnp.uint8), 5)
      Array([1, 3, 4, 5, 6], dtype=int32)
    """
    n, slots = mask.shape[0], jnp.arange(k, dtype=jnp.int32)
    ends = jnp.cumsum(mask > 0, dtype=jnp.int32)
    num_kept = ends[-1] if n else jnp.int32(0)
    at = jnp.searchsorted(ends, slots + 1).astype(jnp.int32)
    return jnp.where(slots < num_kept, at, slots + (n - num_kept))


def scatter(n: int, positions: jax.Array, values: chex.Numeric) -> jax.Array:
    """Returns zeros [n] with values at some positions.

    The zeros wait for the positions: XLA on CPUs begins a program with its buffers of zeros, and
    would hold those of all parameters at once.

    Args:
      n: number of entries.
      positions: integers [k], none below n twice; those of n or more are left out.
      values: [k], or a scalar.
    """
    zero = jnp.min(positions, initial=0).astype(jnp.result_type(values))
    places = jnp.broadcast_to(zero, n).at[number_padding(positions, n)]
    return places.set(values, mode="drop", unique_indices=True, wrap_negative_indices=False)


def number_padding(positions: jax.Array, n: int) -> jax.Array:
    """Returns positions, int32[..., k], in whose rows no padding comes twice.

    So a scatter may promise that its positions are unique. Without this promise XLA on GPUs under
    `--xla_gpu_deterministic_ops` flattens the positions of all slices under `vmap`, and writes
    those of n or more into the next slice.

    Args:
      positions: integers [..., k]; those of n or more are padding.
      n: number of entries.

    Example:
      >>> number_padding(jnp.array([1, 4, 4]), 4)
      Array([1, 5, 6], dtype=int32)
    """
    at = positions.astype(jnp.int32)
    return jnp.where(at < n, at, n + jnp.arange(at.shape[-1], dtype=jnp.int32))


def map_rows(fn: Callable[..., PyTree], *rows: jax.Array) -> PyTree:
    """Returns `vmap(fn)` of arrays [rows, ...]; a single row has no positions of rows to store."""
    if len(rows[0]) != 1:
        return jax.vmap(fn)(*rows)
    return jax.tree.map(lambda x: x[None], fn(*(x[0] for x in rows)))


def check_entries(mask: np.ndarray, name: str) -> None:
    """Raises a ValueError if a mask has other entries than 0 and 1, as packed masks have."""
    is_other = (mask != 0) & (mask != 1)
    if is_other.any():
        raise ValueError(
            f"The mask of {name!r} has entries other than 0 and 1, such as {mask[is_other][0]}. "
            "Unpack packed masks: sparsity.unpack_masks(masks, params)."
        )


def list_positions(rows: np.ndarray) -> np.ndarray:
    """Returns `kept_positions` of each row of a mask on the host.

    Args:
      rows: bool or uint8 [rows, n].

    Returns:
      int32[rows, k] for the largest number k of kept entries of a row.

    Example:
      >>> list_positions(np.array([[0, 1, 1], [1, 0, 0]]))
      array([[1, 2],
             [0, 3]], dtype=int32)
    """
    counts, n = np.count_nonzero(rows, axis=1), rows.shape[1]
    k = int(counts.max(initial=0))
    positions = np.arange(n, n + k, dtype=np.int32) + np.zeros((len(rows), 1), np.int32)
    for at, row, count in zip(positions, rows, counts, strict=True):
        at[:count] = np.flatnonzero(row)
        at[count:] -= count
    return positions


def slots_of_positions(mask: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the slot of each position in a mask, and whether the mask keeps the position.

    Args:
      mask: uint8[n].
      positions: int32[k]; those of n or more are in no mask.

    Returns:
      int32[k] and bool[k]; ignore the slot where the flag is false.

    Example:
      >>> slots_of_positions(jnp.array([0, 1, 0, 1, 1], jnp.uint8), jnp.array([0, 3, 4, 5]))
      (Array([-1,  1,  2,  2], dtype=int32), Array([False,  True,  True, False], dtype=bool))
    """
    if not mask.shape[0]:
        return jnp.zeros_like(positions), jnp.zeros(positions.shape, bool)
    slots = jnp.cumsum(mask > 0, dtype=jnp.int32) - 1
    stays = mask.at[positions].get(mode="fill", fill_value=0) > 0
    return slots.at[positions].get(mode="clip"), stays


def carry_values(
    slots: jax.Array | None, stays: jax.Array, values: jax.Array, fresh: jax.Array | None
) -> jax.Array:
    """Returns the values of a slice in the slots of another mask; see `slots_of_positions`.

    Args:
      slots: [..., k], the old slot of each new slot; `None` if all values stay where they are.
      stays: bool[..., k], whether the old mask kept the entry of a new slot.
      values: [..., k, *members] in old slots.
      fresh: values of entries that are new, of the same shape; `None` for 0.
    """
    shape = (*stays.shape, *[1] * (values.ndim - stays.ndim))
    if slots is not None:
        at = slots.reshape(shape)
        values = jnp.take_along_axis(values, at, stays.ndim - 1, mode="clip")
    zero = jnp.zeros((), values.dtype)
    return jnp.where(stays.reshape(shape), values, zero if fresh is None else fresh)
