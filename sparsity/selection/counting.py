"""Counts of the keys above pivots: one pass over the data, nothing stored.

Only counts leave a device, so that sharded scores stay where they are. The speed on XLA:CPU rests
on four facts. A reduction of two or more operands compiles to one fused loop, where a single
integer sum stores an intermediate as large as the data. A reduction to rows uses every thread, one
to a scalar does not. Strict comparisons of integers vectorise best. Pivots and data meet in a
barrier within the loop, or the keys are hoisted out of it and stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.exact import zero_like
from sparsity.core.hashing import flat_index
from sparsity.selection.scores import Ranked


def use_flat(x: jax.Array) -> bool:
    """Whether x may be reshaped freely: all of it lies on one device, as far as its type tells."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh.are_all_axes_manual if not mesh.empty else jax.device_count() == 1


def sums(masks: Sequence[jax.Array], axes: Sequence[int]) -> list[jax.Array]:
    """int32 sums of two or more masks, or of partial sums, in one fused loop."""
    found: list[jax.Array] = lax.reduce(
        [mask.astype(jnp.int32) for mask in masks],
        [np.int32(0)] * len(masks),
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        tuple(axes),
    )
    return found


def ties_of(keys: jax.Array, wanted: jax.Array, allowed: jax.Array | None) -> jax.Array:
    """Which entries have the wanted key and are allowed, as all are if it is None."""
    return keys == wanted if allowed is None else (keys == wanted) & allowed


def best(
    keys: jax.Array, wanted: jax.Array, allowed: jax.Array | None, is_early: jax.Array
) -> jax.Array:
    """uint8 mask of keys above the wanted one, and of those of its ties that are early."""
    kept = (keys > wanted) | (ties_of(keys, wanted, allowed) & is_early)
    return kept.astype(jnp.uint8)


class NaturalRows:
    """A leaf in its own shape: every slice is a segment of one row.

    Attributes:
      segments: how many slices there are.
      entries: of each, int32[segments].
    """

    def __init__(self, leaf: Ranked) -> None:
        self.leaf, self.recipe = leaf, leaf.recipe
        self.segments = leaf.slices
        self.entries = np.full(self.segments, leaf.size, np.int32)
        self._batch = leaf.scores.shape[: leaf.batch_axes]
        self._axes = range(leaf.batch_axes, leaf.scores.ndim)

    def eligible(self) -> jax.Array:
        """int32[segments, 1]: how many entries may be kept."""
        allowed = self.recipe.eligible(self.leaf.arrays)
        if allowed is None:
            return jnp.asarray(self.entries)[:, None]
        # The barrier keeps the second operand, and with it the fused loop.
        counted: jax.Array = lax.optimization_barrier(sums([allowed, ~allowed], self._axes))[0]
        return counted.reshape(-1, 1)

    def above(self, pivots: jax.Array, *_: jax.Array) -> jax.Array:
        """int32[segments, 1, pivots]: how many eligible keys lie above pivots[segments, pivots]."""
        arrays, pivots = lax.optimization_barrier((self.leaf.arrays, pivots))
        keys = self.leaf.keys(arrays)
        return self._counts([keys > p for p in self._spread(pivots.astype(keys.dtype))])

    def ties_before(self, key: jax.Array, before: jax.Array) -> jax.Array:
        """int32[segments, 1, pivots]: ties of key[segments] whose index is below before[...]."""
        strides = [jnp.int32(stride) for stride in self._strides]
        arrays, before, strides = lax.optimization_barrier((self.leaf.arrays, before, strides))
        keys = self.leaf.keys(arrays)
        (wanted,) = self._spread(key.astype(keys.dtype)[:, None])
        ties = ties_of(keys, wanted, self.recipe.eligible(arrays))
        index = flat_index(self.leaf.scores.shape, strides)
        return self._counts([ties & (index < p) for p in self._spread(before)])

    def best(self, key: jax.Array, end: jax.Array) -> jax.Array:
        """uint8 mask of keys above key[segments], and of ties whose index is below the end."""
        arrays = self.leaf.arrays
        keys = self.leaf.keys(arrays)
        (wanted,), (last,) = (self._spread(x[:, None]) for x in (key.astype(keys.dtype), end))
        index = flat_index(self.leaf.scores.shape, self._strides)
        return best(keys, wanted, self.recipe.eligible(arrays), index < last)

    @property
    def _strides(self) -> list[int]:
        """Those of a flat index within a slice."""
        shape = self.leaf.scores.shape
        return [math.prod(shape[axis + 1 :]) * (axis in self._axes) for axis in range(len(shape))]

    def _spread(self, x: jax.Array) -> list[jax.Array]:
        """Each column of x[segments, columns], to be broadcast against the entries."""
        shape = self._batch + (1,) * len(self._axes)
        return [x[:, column].reshape(shape) for column in range(x.shape[1])]

    def _counts(self, masks: list[jax.Array]) -> jax.Array:
        return jnp.stack([x.reshape(-1) for x in sums(masks, self._axes)], axis=-1)[:, None]


def varying_zero(leaves: Sequence[Ranked], like: jax.Array) -> jax.Array:
    """An int32 zero that varies over a mesh as all of the data do, as loops want it."""
    zero = zero_like(like.astype(jnp.int32))
    for leaf in leaves:
        for x in leaf.arrays:
            if not jax.typeof(x).sharding.mesh.empty:
                flags = zero_like((x != 0).astype(jnp.int32))
                zero += jnp.sum(flags, dtype=jnp.int32)
    return zero
