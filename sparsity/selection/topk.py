"""Masks of the k highest scores of a tensor, or of a whole tree: exact, large ones not sorted.

A mask keeps exactly k entries. Ties go to the lowest flat index (across leaves: tree order), NaN
ranks below every number, -0.0 equals 0.0, and subnormals keep their order. This module checks
arguments, and chooses the search. No search can stand in for another at its speed.

    where and what                           search                       compared in
    ---------------------------------------  ---------------------------  --------------------------
    stored arrays on hosts, outside of jit   host.select_on_host          First calls
    accelerators                             search.select_by_counting    On a GPU
    hosts, arrays on a mesh or too large     + pivots of find_by_guesses  Selection, natural shape
    hosts, else                              cpu.select_by_rows:
      2048 entries or fewer, with padding      cpu.sorting                cpu/sorting.py
      more                                     cpu.threshold              Selection

The last column names a section of benchmarks/RESULTS.md, or the file whose docstring compares. Too
large is an array of more than `cpu.MAX_ENTRIES`, which could not be padded to rows. Padding brings
slices to one size, unless all entries compete.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact, host, sharding, trees
from sparsity.core.checks import check_int, check_real_array, is_traced
from sparsity.core.exact import Words
from sparsity.core.trees import PyTree
from sparsity.selection import cpu, search
from sparsity.selection.host import select_on_host
from sparsity.selection.kept_counts import RemovedFraction
from sparsity.selection.scores import EntryScores, Ranked


def topk_mask(
    scores: chex.Array | EntryScores,
    k: chex.Numeric | Words,
    *,
    where: chex.Array | None = None,
    batch_axes: int = 0,
    last_axes: int = 0,
) -> jax.Array:
    """Returns the mask of the k highest scores of every slice along the leading axes.

    Args:
      scores: real scores or booleans of any shape and dtype, fewer than 2**31 in a slice; stored or
        lazy.
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
    lazy = EntryScores.wrap(scores)
    ndim = len(lazy.shape)
    check_int("batch_axes", batch_axes, 0, ndim)
    check_int("last_axes", last_axes, 0, ndim - batch_axes)
    mask = _read_where("where", where, lazy.shape)
    ranked = Ranked.wrap(lazy, mask, batch_axes, last_axes)
    return topk_masks([ranked], _k_words(k, ranked.slice_size, ranked.batch))[0]


def topk_masks(
    all_ranked: Sequence[Ranked], k: Words | np.ndarray, *, together: bool = False
) -> list[jax.Array]:
    """Returns masks of the k highest scores of every slice of many parameters, by one search.

    Args:
      all_ranked: parameters of any shapes and dtypes.
      k: number of entries to keep of each slice, [slices], in the order of `all_ranked`; two
        uint32 words (high, low), or these in one array. With `together` of all entries, [1].
      together: whether all entries compete; their scores have one dtype then.

    Returns:
      uint8 masks, each of its parameter's shape and sharding, 1 = keep.
    """
    topk = functools.partial(_topk_masks, together=together)
    likes = [ranked.arrays[0] for ranked in all_ranked]
    with jax.transfer_guard("allow"):  # of a constant k; to send it before takes 0.1 ms
        return sharding.shard_like(likes, topk, all_ranked, k)


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
    all_ranked = list[Ranked]()

    def rank(key_path: trees.KeyPath, leaf: chex.Array, mask: chex.Array | None = None) -> None:
        scores, name = EntryScores.wrap(leaf), f"where at {trees.path_string(key_path)!r}"
        all_ranked.append(Ranked.wrap(scores, _read_where(name, mask, scores.shape)))

    trees.map_matched(rank, tree, where, role="scores", others_role="masks of where")
    dtypes = sorted({str(x.dtype) for x in all_ranked})
    if len(dtypes) > 1:
        raise ValueError(
            f"Cannot rank scores of dtypes {', '.join(dtypes)} together. Cast the leaves to one."
        )
    words = _k_words(k, sum(x.size for x in all_ranked), (1,))
    return jax.tree.unflatten(
        jax.tree.structure(tree), topk_masks(all_ranked, words, together=True)
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


# ------------------------------------------------------------------ the search
@host.instead(select_on_host)
@functools.partial(jax.jit, static_argnames="together")
def _topk_masks(
    all_ranked: Sequence[Ranked], k: Words | np.ndarray, *, together: bool
) -> list[jax.Array]:
    slices = 1 if together else sum(ranked.num_slices for ranked in all_ranked)
    high, low = (jnp.broadcast_to(word, (slices,)) for word in k)
    return select_best(all_ranked, (high, low), together=together)[0]


def choose_search(all_ranked: Sequence[Ranked]) -> Callable[..., tuple[list[jax.Array], Words]]:
    """Chooses the search of a program; all searches give the same masks."""
    if jax.default_backend() != "cpu":
        return search.select_by_counting
    arrays = [x for ranked in all_ranked for x in ranked.arrays]
    if all(x.size <= cpu.MAX_ENTRIES and cpu.use_flat(x) for x in arrays):
        return cpu.select_by_rows
    return functools.partial(search.select_by_counting, find_thresholds=cpu.find_by_guesses)


def select_best(
    all_ranked: Sequence[Ranked], k: Words | RemovedFraction, *, together: bool
) -> tuple[list[jax.Array], Words]:
    """Returns masks and numbers as `search.select_by_counting` does; not compiled.

    Parameters may have several dtypes, and any sizes.
    """
    all_ranked = jax.tree.map(lax.stop_gradient, all_ranked)  # a mask has no derivatives
    one_search = choose_search(all_ranked)
    members_by_program: dict[Hashable, list[int]] = {}
    for i, ranked in enumerate(all_ranked):
        if ranked.size:
            program = ranked.program_key if one_search is cpu.select_by_rows else ranked.dtype
            members_by_program.setdefault(None if together else program, []).append(i)
    ends = np.cumsum([ranked.num_slices for ranked in all_ranked])
    masks = [jnp.zeros(ranked.shape, jnp.uint8) for ranked in all_ranked]
    eligible = (jnp.zeros(1 if together else ends[-1], jnp.uint32),) * 2
    for members in members_by_program.values():
        slices = np.concatenate(
            [np.arange(ends[i] - all_ranked[i].num_slices, ends[i]) for i in members]
        )
        is_all = together or len(slices) == ends[-1]
        member_k = k if is_all or isinstance(k, RemovedFraction) else (k[0][slices], k[1][slices])
        member_masks, n = one_search([all_ranked[i] for i in members], member_k, together=together)
        for i, mask in zip(members, member_masks, strict=True):
            masks[i] = mask
        if not is_all:
            n = eligible[0].at[slices].set(n[0]), eligible[1].at[slices].set(n[1])
        eligible = n
    return masks, eligible
