"""Counts of the keys above pivots: one pass over the data, nothing stored.

Only counts leave a device, so that sharded scores stay where they are. The speed on XLA:CPU rests
on four facts. A reduction of two or more operands compiles to one fused loop, where a single
integer sum stores an intermediate as large as the data. A reduction to rows uses every thread, one
to a scalar does not. Strict comparisons of integers vectorise best. Pivots and data meet in a
barrier within the loop, or the keys are hoisted out of it and stored.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.selection.keys import key_range, to_keys

_ROWS = 32  # of a flat reduction, for threads to share
_SHARED = 65_536  # entries from which on threads share a reduction


def use_flat(x: jax.Array) -> bool:
    """Whether x may be reshaped freely: all of it lies on one device, as far as its type tells."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh.are_all_axes_manual if not mesh.empty else jax.device_count() == 1


class Leaf(NamedTuple):
    """Scores, and which of them may be kept."""

    scores: jax.Array
    where: jax.Array | None = None  # not zero: eligible; None: all are

    def keys(self) -> jax.Array:
        """Keys of the scores; the lowest one where an entry is not eligible."""
        keys = to_keys(self.scores)
        if self.where is None:
            return keys
        lowest = jnp.array(key_range(self.scores.dtype).low, keys.dtype)
        return jnp.where(self.where != 0, keys, lowest)

    def only(self, mask: jax.Array) -> jax.Array:
        """The mask without entries that are not eligible."""
        return mask if self.where is None else mask & (self.where != 0)

    def map(self, f: Callable[[jax.Array], jax.Array]) -> "Leaf":
        """The leaf of which f was applied to both arrays."""
        return Leaf(f(self.scores), None if self.where is None else f(self.where))


def sums(masks: Sequence[jax.Array], axes: Sequence[int]) -> list[jax.Array]:
    """int32 sums of two or more masks, or of partial sums, in one fused loop."""
    found: list[jax.Array] = lax.reduce(
        [mask.astype(jnp.int32) for mask in masks],
        [np.int32(0)] * len(masks),
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        tuple(axes),
    )
    return found


def _count(leaf: Leaf, masks: Callable[[Leaf], Sequence[jax.Array]]) -> list[jax.Array]:
    """int32 scalars: how many entries are in each of masks(leaf)."""
    if not use_flat(leaf.scores):
        return sums(masks(leaf), range(leaf.scores.ndim))
    leaf = leaf.map(lambda x: x.reshape(-1))
    size = leaf.scores.size
    if size < _SHARED:
        return sums(masks(leaf), [0])
    whole = size // _ROWS * _ROWS
    body = leaf.map(lambda x: x[:whole].reshape(_ROWS, -1))
    counts = sums(sums(masks(body), [1]), [0])
    if whole == size:
        return counts
    rest = sums(masks(leaf.map(lambda x: x[whole:])), [0])
    return [x + y for x, y in zip(counts, rest, strict=True)]


def count_eligible(leaf: Leaf) -> jax.Array | int:
    """How many entries of the leaf are eligible."""
    if leaf.where is None:
        return leaf.scores.size
    counts = _count(Leaf(leaf.where), lambda x: [x.scores != 0, x.scores == 0])
    counted: jax.Array = lax.optimization_barrier(counts)[0]
    return counted


def count_above(leaves: Sequence[Leaf], pivots: jax.Array) -> jax.Array:
    """int32[leaves, pivots]: how many eligible keys lie above each pivot, in one pass."""
    pivots = pivots.astype(key_range(leaves[0].scores.dtype).dtype)
    held, pivots = lax.optimization_barrier((list(leaves), list(pivots)))

    def above(leaf: Leaf) -> list[jax.Array]:
        keys = leaf.keys()
        return [keys > p for p in pivots]

    counts = [x for leaf in held for x in _count(leaf, above)]
    return jnp.stack(counts).reshape(len(leaves), -1)
