"""Masks of the k highest scores of a tensor, or of a whole tree: exact, not sorted.

A mask keeps exactly k entries. Ties go to the lowest flat index (across leaves: tree order), NaN
ranks below every number, -0.0 equals 0.0, and subnormals keep their order. This module checks
arguments. `search` selects, compiled; `host` selects among concrete arrays of one CPU.
"""

import contextlib
import functools
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import exact, sharding, trees
from sparsity.core.checks import check_int, check_real_array, is_traced
from sparsity.core.exact import Words
from sparsity.core.trees import PyTree
from sparsity.selection.candidates import Candidates
from sparsity.selection.host import is_on_host, select_on_host
from sparsity.selection.keys import readable
from sparsity.selection.search import select


def topk_mask(
    scores: chex.Array,
    k: chex.Numeric | Words,
    *,
    where: chex.Array | None = None,
    batch_axes: int = 0,
    last_axes: int = 0,
) -> jax.Array:
    """Returns the mask of the k highest scores of every slice along the leading axes.

    Args:
      scores: real scores or booleans of any shape and dtype, fewer than 2**31 in a slice.
      k: number of entries to keep of each slice, in [0, slice size]; broadcasts against
        the shape of the slices' axes. A traced k is clamped. Or its two words,
        as in `global_topk_mask`.
      where: optional bool or integer mask of the scores' shape. Only entries that are not zero
        there may be kept; if there are fewer than k, all of them are.
      batch_axes: number of leading axes that index separate slices.
      last_axes: number of last axes that index separate slices, too; `k` broadcasts against the
        shape of both.

    Returns:
      uint8 mask of the scores' shape and sharding, 1 = keep.

    Raises:
      ValueError: if scores are complex, if a concrete k is out of range, or if shapes differ.

    Example:
      >>> topk_mask(jnp.array([1.0, 3.0, 2.0, 3.0]), 2)
      Array([0, 1, 0, 1], dtype=uint8)
      >>> topk_mask(jnp.array([1.0, 3.0, 2.0, 3.0]), 2, where=jnp.array([1, 0, 1, 1]))
      Array([0, 0, 1, 1], dtype=uint8)
    """
    scores = readable(scores)
    ndim = scores.ndim
    check_int("batch_axes", batch_axes, 0, ndim)
    check_int("last_axes", last_axes, 0, ndim - batch_axes)
    read = _read_where("where", where, scores.shape)
    last, first = range(ndim - last_axes, ndim), range(batch_axes, batch_axes + last_axes)

    def to_front(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, last, first) if last_axes else x

    ordered = None if read is None else to_front(read)
    candidates = Candidates(to_front(scores), ordered, batch_axes + last_axes)
    [mask] = topk_masks([candidates], _k_words(k, candidates.slice_size, candidates.batch))
    return jnp.moveaxis(mask, first, last) if last_axes else mask


def topk_masks(
    all_candidates: Sequence[Candidates], k: Words | np.ndarray, *, together: bool = False
) -> list[jax.Array]:
    """Returns masks of the k highest scores of every slice of many parameters, by one search.

    Args:
      all_candidates: parameters of any shapes and dtypes.
      k: number of entries to keep of each slice, [slices], in the order of `all_candidates`; two
        uint32 words (high, low), or these in one array. With `together` of all entries, [1].
      together: whether all entries compete; their scores have one dtype then.

    Returns:
      uint8 masks, each of its parameter's shape and sharding, 1 = keep.
    """
    likes = [x.scores for x in all_candidates]
    if not any(map(is_traced, k)) and is_on_host(all_candidates):
        high, low = (np.asarray(x).astype(np.int64) for x in k)
        slices = 1 if together else sum(x.num_slices for x in all_candidates)
        counts = np.broadcast_to((high << 32) | low, (slices,)).tolist()
        masks = select_on_host(all_candidates, counts, together=together)
        placed = [x.sharding if x.committed else None for x in likes]
        return [jax.device_put(*x) for x in zip(masks, placed, strict=True)]
    topk = functools.partial(_select, together=together)
    with jax.transfer_guard("allow"):  # of a constant k; to send it before takes 0.1 ms
        return sharding.shard_like(likes, topk, all_candidates, k)


def global_topk_mask(
    tree: PyTree, k: chex.Numeric | Words, *, where: PyTree | None = None
) -> PyTree:
    """Returns masks of the k highest scores of all leaves together, by one threshold.

    >>> global_topk_mask({"a": jnp.array([5, 1]), "b": jnp.array([[5, 5]])}, 2)
    {'a': Array([1, 0], dtype=uint8), 'b': Array([[1, 0]], dtype=uint8)}

    Args:
      tree: leaves of real scores of one dtype, of any shapes, fewer than 2**31 each; their total
        may be larger. None stands for no leaf.
      k: number of entries to keep, in [0, total size]: an integer, or two uint32 words (high,
        low) as `num_kept` returns them. A traced k is clamped.
      where: optional tree of masks like `tree`. Only entries that are not zero there may be
        kept; if there are fewer than k, all of them are.

    Returns:
      Tree of uint8 masks, 1 = keep, each of its leaf's shape and sharding.

    Raises:
      ValueError: if leaves are complex or of several dtypes, or if a concrete k is out of range.
    """
    all_candidates = list[Candidates]()

    def rank(key_path: trees.KeyPath, leaf: chex.Array, mask: chex.Array | None = None) -> None:
        scores, name = readable(leaf), f"where at {trees.path_string(key_path)!r}"
        all_candidates.append(Candidates(scores, _read_where(name, mask, scores.shape)))

    trees.map_matched(rank, tree, where, role="scores", others_role="masks of where")
    dtypes = sorted({str(x.scores.dtype) for x in all_candidates})
    if len(dtypes) > 1:
        raise ValueError(
            f"Cannot rank scores of dtypes {', '.join(dtypes)} together. Cast the leaves to one."
        )
    words = _k_words(k, sum(x.scores.size for x in all_candidates), (1,))
    return jax.tree.unflatten(
        jax.tree.structure(tree), topk_masks(all_candidates, words, together=True)
    )


# ------------------------------------------------------------------ arguments
def _read_where(name: str, where: chex.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    if where is None:
        return None
    where = where if hasattr(where, "dtype") else np.asarray(where)
    check_real_array(name, where, shape)
    return jnp.asarray(where)


def _k_words(k: chex.Numeric | Words, n: int, shape: tuple[int, ...]) -> Words | np.ndarray:
    """Returns the words of k, [slices], or [1] if slices of this shape and n entries have one k.

    A concrete k is checked, a traced one is clamped from below; the search clamps from above.
    """
    if isinstance(k, int) and 0 <= k <= n:  # the checks of numpy take as long as a small search
        return np.array(exact.split(k)).reshape(2, 1)
    if isinstance(k, tuple) and len(k) != 2:
        raise ValueError(f"k must be an integer or two words, got k = {k}.")
    high, low = k if isinstance(k, tuple) else (0, k)
    if is_traced(high) or is_traced(low):
        _check_shape(low, shape)
        words = k if isinstance(k, tuple) else exact.as_words(jnp.maximum(k, 0))
        arrays = [jnp.broadcast_to(jnp.asarray(x, jnp.uint32), shape) for x in words]
        return arrays[0].reshape(-1), arrays[1].reshape(-1)
    counts = np.asarray(low)
    if isinstance(k, tuple):
        counts = (np.asarray(high).astype(np.uint64) << 32) | counts.astype(np.uint64)
    if counts.dtype.kind not in "biuf" or not np.all((counts >= 0) & (counts <= n)):
        raise ValueError(f"k must be in [0, {n}], got k = {counts}.")
    if np.any(counts % 1 != 0):
        raise ValueError(f"k must be an integer, got k = {counts}.")
    _check_shape(counts, shape)
    each = counts.astype(np.uint64)
    each = (np.broadcast_to(each, shape) if each.ndim else each).reshape(-1)
    return np.stack([each >> 32, each & 0xFFFFFFFF]).astype(np.uint32)


def _check_shape(k: chex.Numeric, shape: tuple[int, ...]) -> None:
    with contextlib.suppress(ValueError):
        if np.broadcast_shapes(np.shape(k), shape) == shape:
            return
    raise ValueError(f"k must broadcast against {shape}, got k.shape = {np.shape(k)}.")


@functools.partial(jax.jit, static_argnames="together")
def _select(all_candidates: Sequence[Candidates], k: PyTree, *, together: bool) -> list[jax.Array]:
    slices = 1 if together else sum(x.num_slices for x in all_candidates)
    high, low = (jnp.broadcast_to(word, (slices,)) for word in k)
    return select(all_candidates, (high, low), together=together)[0]
