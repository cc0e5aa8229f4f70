"""Which k entries of a tensor, or of a whole tree, score highest: exact, without sorting.

A mask keeps exactly k entries. Ties go to the lowest flat index (across leaves: tree order), NaN
ranks below every number, -0.0 equals 0.0, and subnormals keep their order. Scores stay where they
are: only counts leave a device, and nothing is stored that is as large as the scores. This module
checks arguments and maps over slices; `threshold` selects.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact as exact_counts
from sparsity.core.checks import is_traced
from sparsity.core.exact import Words, num_kept
from sparsity.selection import counting, threshold
from sparsity.selection.counting import Leaf
from sparsity.selection.keys import key_range, to_keys

__all__ = ["global_topk_mask", "nm_mask", "num_kept", "topk_mask"]

_MERGE_BELOW = 65_536  # smaller neighbouring leaves are counted as one when flat


def topk_mask(
    scores: chex.Array,
    k: chex.Numeric,
    *,
    where: chex.Array | None = None,
    batch_axes: int = 0,
) -> jax.Array:
    """Mask of the k highest scores, of every slice along the leading batch_axes axes.

    >>> topk_mask(jnp.array([1.0, 3.0, 2.0, 3.0]), 2)
    Array([0, 1, 0, 1], dtype=uint8)
    >>> topk_mask(jnp.array([1.0, 3.0, 2.0, 3.0]), 2, where=jnp.array([1, 0, 1, 1]))
    Array([0, 0, 1, 1], dtype=uint8)

    Args:
        scores: Real scores or booleans of any shape and dtype, fewer than 2**31.
        k: How many to keep of each slice, in [0, slice size]; broadcasts against
            `scores.shape[:batch_axes]`. A traced k is clamped.
        where: Optional bool or integer mask of the scores' shape. Only entries that are not zero
            there may be kept; if there are fewer than k, all of them are.
        batch_axes: How many leading axes index separate slices.

    Returns:
        uint8 mask of the scores' shape and sharding, 1 = keep.

    Raises:
        ValueError: If scores are complex, if a concrete k is out of range, or if shapes differ.
    """
    scores = _readable(scores)
    shape = scores.shape
    if not 0 <= batch_axes <= scores.ndim:
        raise ValueError(
            f"batch_axes must be in [0, {scores.ndim}], got batch_axes = {batch_axes}."
        )
    if where is not None and jnp.shape(where) != shape:
        raise ValueError(f"where must have shape {shape}, got where.shape = {jnp.shape(where)}.")
    words = _k_words(k, math.prod(shape[batch_axes:]))
    if np.broadcast_shapes(np.shape(words[1]), shape[:batch_axes]) != shape[:batch_axes]:
        raise ValueError(
            f"k must broadcast against {shape[:batch_axes]}, got k.shape = {np.shape(words[1])}."
        )
    if not scores.size:
        return jnp.zeros(shape, jnp.uint8)
    return _topk_mask(scores, words, where, batch_axes)


def global_topk_mask(tree: chex.ArrayTree, k: chex.Numeric | Words) -> chex.ArrayTree:
    """Masks of the k highest scores of all leaves together: one threshold, nothing concatenated.

    >>> global_topk_mask({"a": jnp.array([5, 1]), "b": jnp.array([[5, 5]])}, 2)
    {'a': Array([1, 0], dtype=uint8), 'b': Array([[1, 0]], dtype=uint8)}

    Args:
        tree: Leaves of real scores of one dtype, of any shapes, fewer than 2**31 each; their total
            may be larger. None stands for no leaf.
        k: How many to keep, in [0, total size]: an integer, or two uint32 words (high, low) as
            `num_kept` returns them. A traced k is clamped.

    Returns:
        Tree of uint8 masks, 1 = keep, each of its leaf's shape and sharding.

    Raises:
        ValueError: If leaves are complex or of several dtypes, or if a concrete k is out of range.
    """
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [_readable(x) for x in leaves]
    dtypes = sorted({str(x.dtype) for x in leaves})
    if len(dtypes) > 1:
        raise ValueError(
            f"Cannot rank scores of dtypes {', '.join(dtypes)} together. Cast the leaves to one."
        )
    words = _k_words(k, sum(x.size for x in leaves))
    masks = [jnp.zeros(x.shape, jnp.uint8) for x in leaves if not x.size]
    if any(x.size for x in leaves):
        filled = iter(_global_topk_masks([x for x in leaves if x.size], words))
        empty = iter(masks)
        masks = [next(filled) if x.size else next(empty) for x in leaves]
    return jax.tree.unflatten(treedef, masks)


def nm_mask(
    scores: chex.Array,
    n: chex.Numeric,
    m: int,
    *,
    axis: int = -1,
    keep: chex.Array | None = None,
) -> jax.Array:
    """Mask of the n highest of every m consecutive scores along an axis.

    If m does not divide the axis, its last group is shorter and keeps n as well, or all it has.

    >>> nm_mask(jnp.array([4, 3, 2, 1, 0, 7, 0, 0]), 2, 4)
    Array([1, 1, 0, 0, 1, 1, 0, 0], dtype=uint8)

    Args:
        scores: Real scores or booleans of any shape and dtype.
        n: How many to keep of each group, in [0, m]. A traced n is clamped.
        m: Size of a group.
        axis: The axis whose consecutive entries form the groups.
        keep: Optional mask of the scores' shape; entries that are not zero there outrank all
            others of their group.

    Returns:
        uint8 mask of the scores' shape and sharding, 1 = keep.

    Raises:
        ValueError: If n, m or axis are out of range, if shapes differ, or if scores are complex.
    """
    scores = _readable(scores)
    if not -scores.ndim <= axis < scores.ndim:
        raise ValueError(f"axis must name one of {scores.ndim} axes, got axis = {axis}.")
    axis %= scores.ndim
    if m < 1:
        raise ValueError(f"m must be at least 1, got m = {m}.")
    if not is_traced(n) and not 0 <= int(n) <= m:
        raise ValueError(f"n must be in [0, {m}], got n = {n}.")
    if keep is not None and jnp.shape(keep) != scores.shape:
        raise ValueError(f"keep must have shape {scores.shape}, got {jnp.shape(keep)}.")
    if is_traced(n):
        return _nm_mask_of_traced_n(scores, n, keep, m, axis)
    return _nm_mask(scores, int(n), keep, m, axis)


# ------------------------------------------------------------------ arguments
def _readable(scores: chex.Array) -> jax.Array:
    scores = jnp.asarray(scores)
    if jnp.issubdtype(scores.dtype, jnp.complexfloating):
        raise ValueError(
            f"Cannot rank {scores.dtype} scores. This is because complex numbers have no order; "
            "pass magnitudes (jnp.abs) instead."
        )
    if scores.size >= 2**31:
        raise ValueError(f"An array may hold fewer than 2**31 scores, got shape {scores.shape}.")
    if scores.dtype in (jnp.float4_e2m1fn, jnp.float8_e8m0fnu):  # not a byte; no sign bit
        return scores.astype(jnp.float32)
    return scores


def _k_words(k: Any, n: int) -> tuple[Any, Any]:
    """k, checked if concrete, else clamped from below (selection clamps it from above)."""
    if isinstance(k, tuple):
        if not any(is_traced(word) for word in k):
            return _k_words((int(k[0]) << 32) + int(k[1]), n)
        return k[0].astype(jnp.uint32), k[1].astype(jnp.uint32)
    if not is_traced(k):
        k = np.asarray(k)
        if np.any(k < 0) or np.any(k > n):
            raise ValueError(f"k must be in [0, {n}], got k = {k}.")
        if k.ndim == 0:
            return exact_counts.split(int(k))
        return np.zeros(k.shape, np.uint32), k.astype(np.uint32)
    k = jnp.maximum(k, 0).astype(jnp.uint32)
    return k & 0, k


# ------------------------------------------------------------------ the k best
@functools.partial(jax.jit, static_argnums=3)
def _topk_mask(scores: jax.Array, k: Words, where: jax.Array | None, batch_axes: int) -> jax.Array:
    def select(scores: jax.Array, k: Words, where: jax.Array | None) -> jax.Array:
        return threshold.select([Leaf(scores, where)], k)[0][0]

    if batch_axes:
        # Explicit axes want all that is mapped over sharded alike: zeros carry the sharding over.
        keys = to_keys(scores)
        if where is not None and not counting.use_flat(scores):
            where = (where != 0) | (keys != keys)
            scores = keys | (where.astype(keys.dtype) & 0)
        zeros = jnp.sum(to_keys(scores) & 0, range(batch_axes, scores.ndim), dtype=jnp.uint32)
        k = (k[0] + zeros, k[1] + zeros)
    for _ in range(batch_axes):
        select = jax.vmap(select)
    return select(scores, k, where)


@jax.jit
def _global_topk_masks(leaves: Sequence[jax.Array], k: Words) -> list[jax.Array]:
    if not all(counting.use_flat(x) for x in leaves):
        return threshold.select([Leaf(x) for x in leaves], k)[0]
    groups: list[list[jax.Array]] = []
    for x in leaves:
        if groups and max(x.size, *(y.size for y in groups[-1])) < _MERGE_BELOW:
            groups[-1].append(x)
        else:
            groups.append([x])
    merged = [g[0] if len(g) == 1 else jnp.concatenate([x.reshape(-1) for x in g]) for g in groups]
    masks = []
    for group, mask in zip(groups, threshold.select([Leaf(x) for x in merged], k)[0], strict=True):
        parts = jnp.split(mask.reshape(-1), np.cumsum([x.size for x in group])[:-1])
        masks += [part.reshape(x.shape) for x, part in zip(group, parts, strict=True)]
    return masks


# ------------------------------------------------------------------ N:M
def _grouped_mask(
    scores: jax.Array, n: chex.Numeric, keep: jax.Array | None, m: int, axis: int
) -> jax.Array:
    shape = scores.shape
    count = -(-shape[axis] // m)
    groups = (*shape[:axis], count, m, *shape[axis + 1 :])

    def pairs(x: jax.Array, fill: int) -> tuple[jax.Array, jax.Array]:
        x = _with_whole_groups(x, m, axis)
        missing = [(0, 0)] * axis + [(0, count * m - shape[axis])] + [(0, 0)] * (x.ndim - axis - 1)
        x = jnp.pad(x, missing, constant_values=fill).reshape(groups)
        return jnp.expand_dims(x, axis + 2), jnp.expand_dims(x, axis + 1)

    own, other = pairs(to_keys(scores), key_range(scores.dtype).low)
    # Compared iotas vectorise, where a constant table would be read entry by entry.
    row, column = (lax.broadcasted_iota(jnp.int32, (m, m), d) for d in (0, 1))
    earlier = (column < row).reshape(*[1] * (axis + 1), m, m, *[1] * (len(shape) - axis - 1))
    beaten = (other > own) | ((other == own) & earlier)
    if keep is not None:
        own_kept, other_kept = pairs(keep != 0, False)
        beaten = (other_kept & ~own_kept) | ((other_kept == own_kept) & beaten)
    rank = jnp.sum(beaten, axis=axis + 2, dtype=jnp.int8 if m < 128 else jnp.int32)
    if is_traced(n):
        n = jnp.clip(n, 0, m).astype(rank.dtype)
    mask = (rank < n).reshape(*shape[:axis], count * m, *shape[axis + 1 :]).astype(jnp.uint8)
    mask = lax.slice_in_dim(mask, 0, shape[axis], axis=axis)
    explicit = jax.typeof(scores).sharding
    return mask if explicit.mesh.empty else jax.sharding.reshard(mask, explicit)


_nm_mask = jax.jit(_grouped_mask, static_argnums=(1, 3, 4))  # a known n is three times faster
_nm_mask_of_traced_n = jax.jit(_grouped_mask, static_argnums=(3, 4))


def _with_whole_groups(x: jax.Array, m: int, axis: int) -> jax.Array:
    """x, with an explicitly sharded axis gathered if a device holds a part of a group."""
    mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
    names = spec[axis] if axis < len(spec) else None
    shards = math.prod(mesh.shape[name] for name in np.atleast_1d(names or ()))
    if shards == 1 or x.shape[axis] % (m * shards) == 0:
        return x
    whole = jax.sharding.PartitionSpec(*spec[:axis], None, *spec[axis + 1 :])
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, whole))
