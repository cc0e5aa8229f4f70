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

from sparsity.core import exact
from sparsity.core.checks import is_traced
from sparsity.core.exact import Words, zero_like
from sparsity.core.trees import PyTree
from sparsity.selection import counting, threshold
from sparsity.selection.counting import Leaf
from sparsity.selection.keys import readable, to_keys

_MERGE_BELOW = 65_536  # smaller neighbouring leaves are counted as one when flat


def topk_mask(
    scores: chex.Array,
    k: chex.Numeric | Words,
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
            `scores.shape[:batch_axes]`. A traced k is clamped. Or two words of it,
            as in `global_topk_mask`.
        where: Optional bool or integer mask of the scores' shape. Only entries that are not zero
            there may be kept; if there are fewer than k, all of them are.
        batch_axes: How many leading axes index separate slices.

    Returns:
        uint8 mask of the scores' shape and sharding, 1 = keep.

    Raises:
        ValueError: If scores are complex, if a concrete k is out of range, or if shapes differ.
    """
    scores = readable(scores)
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
    mask: jax.Array = _topk_mask(scores, words, where, batch_axes)
    return mask


def global_topk_mask(
    tree: PyTree, k: chex.Numeric | Words, *, where: PyTree | None = None
) -> PyTree:
    """Masks of the k highest scores of all leaves together: one threshold, nothing concatenated.

    >>> global_topk_mask({"a": jnp.array([5, 1]), "b": jnp.array([[5, 5]])}, 2)
    {'a': Array([1, 0], dtype=uint8), 'b': Array([[1, 0]], dtype=uint8)}

    Args:
        tree: Leaves of real scores of one dtype, of any shapes, fewer than 2**31 each; their total
            may be larger. None stands for no leaf.
        k: How many to keep, in [0, total size]: an integer, or two uint32 words (high, low) as
            `num_kept` returns them. A traced k is clamped.
        where: Optional tree of masks like `tree`. Only entries that are not zero there may be
            kept; if there are fewer than k, all of them are.

    Returns:
        Tree of uint8 masks, 1 = keep, each of its leaf's shape and sharding.

    Raises:
        ValueError: If leaves are complex or of several dtypes, or if a concrete k is out of range.
    """
    treedef: Any  # jax has no types for its methods
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [readable(x) for x in leaves]
    dtypes = sorted({str(x.dtype) for x in leaves})
    if len(dtypes) > 1:
        raise ValueError(
            f"Cannot rank scores of dtypes {', '.join(dtypes)} together. Cast the leaves to one."
        )
    words = _k_words(k, sum(x.size for x in leaves))
    allowed = [None] * len(leaves) if where is None else treedef.flatten_up_to(where)
    filled = [i for i, x in enumerate(leaves) if x.size]
    masks = [jnp.zeros(x.shape, jnp.uint8) for x in leaves]
    if filled:
        found = _global_topk_masks([Leaf(leaves[i], allowed[i]) for i in filled], words)
        for i, mask in zip(filled, found, strict=True):
            masks[i] = mask
    return jax.tree.unflatten(treedef, masks)


# ------------------------------------------------------------------ arguments
def _k_words(k: chex.Numeric | Words, n: int) -> Words:
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
            high, low = exact.split(int(k))
            return jax.device_put(high), jax.device_put(low)
        words: Words = jax.device_put((np.zeros(k.shape, np.uint32), k.astype(np.uint32)))
        return words
    k = jnp.maximum(k, 0).astype(jnp.uint32)
    return zero_like(k), k


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
            scores = keys | zero_like(where.astype(keys.dtype))
        zeros = jnp.sum(
            zero_like(to_keys(scores)), range(batch_axes, scores.ndim), dtype=jnp.uint32
        )
        k = (k[0] + zeros, k[1] + zeros)
    for _ in range(batch_axes):
        select = jax.vmap(select)
    return select(scores, k, where)


@jax.jit
def _global_topk_masks(leaves: Sequence[Leaf], k: Words) -> list[jax.Array]:
    if not all(counting.use_flat(leaf.scores) for leaf in leaves):
        return threshold.select(leaves, k)[0]
    groups: list[list[Leaf]] = []
    for leaf in leaves:
        sizes = [x.scores.size for x in (leaf, *groups[-1])] if groups else []
        if groups and max(sizes) < _MERGE_BELOW:
            groups[-1].append(leaf)
        else:
            groups.append([leaf])
    masks = []
    for group, mask in zip(groups, threshold.select([*map(_merged, groups)], k)[0], strict=True):
        ends = np.cumsum([leaf.scores.size for leaf in group])[:-1]
        parts = jnp.split(mask.reshape(-1), ends)
        masks += [part.reshape(x.scores.shape) for x, part in zip(group, parts, strict=True)]
    return masks


def _merged(group: Sequence[Leaf]) -> Leaf:
    """Small leaves as one."""
    if len(group) == 1:
        return group[0]
    flat = [leaf.map(lambda x: x.reshape(-1)) for leaf in group]
    allowed = [leaf.where for leaf in flat if leaf.where is not None]  # all or none have one
    where = jnp.concatenate(allowed) if allowed else None
    return Leaf(jnp.concatenate([leaf.scores for leaf in flat]), where)
