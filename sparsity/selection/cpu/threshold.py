"""Masks of the k best entries of many parameters in one search: k-th keys, ties, comparisons.

`key_search` finds the k-th keys of all brackets in the same passes. Keys equal to the k-th
one are kept from the lowest flat index on, across parameters in their order. So at most one segment
of a bracket is partial, which means that only some of its ties are kept. The counts of its rows say
in which row these ties end, and only that row is read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact
from sparsity.core.exact import Words, varying_zero, zero_like
from sparsity.core.kernels import read_part
from sparsity.selection.cpu import key_search, rows
from sparsity.selection.cpu.columns import in_rows
from sparsity.selection.cpu.key_search import Bracket, SearchState, sum_rows
from sparsity.selection.cpu.visits import Parts, arrange
from sparsity.selection.kept_counts import RemovedFraction, limit_kept
from sparsity.selection.keys import key_range
from sparsity.selection.scores import Ranked
from sparsity.selection.search import SliceBrackets, mask_entries, tie_shares

_SAMPLE_SHIFT = 8  # together, every 256th key is sampled: to sort them costs less than a pass,
_SAMPLE_SIZES = (256, 4096)  # but at least and at most so many: 4096 are sorted in 0.15 ms
_MANY_SEGMENTS = 256  # from here on they share a sample: that of each would take longer than a pass
_MAX_MISSES = 8  # bounds the passes: by 8 + 11 for 32 bits, 8 + 22 for 64; 0 takes 4.6, not 3.5


class Selected(NamedTuple):
    """Result of a search.

    Attributes:
      masks: uint8, each of its parameter's shape.
      eligible: number of eligible entries, as words like k.
      passes: number of times that the data were read.
    """

    masks: list[jax.Array]
    eligible: Words
    passes: jax.Array


def select_by_thresholds(
    all_ranked: Sequence[Ranked], k: Words | RemovedFraction, *, together: bool
) -> Selected:
    """Returns the masks of `search.select_by_counting`, by one search for all k-th keys.

    Parameters have one `program_key` and lie on one device. No parameter is empty.
    """
    parts, first = arrange([in_rows(ranked) for ranked in all_ranked])
    # Segments are numbered by parts; this is their order by parameters.
    order = np.concatenate(
        [start + np.arange(x.num_slices) for start, x in zip(first, all_ranked, strict=True)]
    )
    brackets = SliceBrackets(tuple(part.num_segments for part in parts), together)
    if not together and not isinstance(k, RemovedFraction):
        k = _permute(k[0], np.argsort(order)), _permute(k[1], np.argsort(order))
    like = jnp.zeros((), jnp.int32) if isinstance(k, RemovedFraction) else k[1][0]
    zero = varying_zero([x for ranked in all_ranked for x in ranked.arrays], like)
    state, k, n = _find_kth_keys(parts, brackets, k, all_ranked[0].dtype, zero)

    ties = [x - y for x, y in zip(state.at_least, state.above, strict=True)]
    need = exact.minus(k, state.bracket.above)
    keys = brackets.by_slice(state.bracket.high)
    ends = _ends(parts, keys, ties, _shares(brackets, ties, need, order))
    key, end = jnp.concatenate(keys), jnp.concatenate(ends)
    masks = []
    for start, ranked in zip(first, all_ranked, strict=True):
        slice_key, slice_end = (read_part(x, start, ranked.num_slices) for x in (key, end))
        # In the shape of the parameter: XLA writes a mask over the old one only without a reshape.
        # ~index >= -end holds for the ties before `end`.
        masks.append(mask_entries(ranked, slice_key, -slice_end))
    if not together:
        n = _permute(n[0], order), _permute(n[1], order)
    return Selected(masks, n, jnp.max(state.bracket.passes))


def _find_kth_keys(
    parts: Parts,
    brackets: SliceBrackets,
    k: Words | RemovedFraction,
    dtype: np.dtype,
    zero: jax.Array,
) -> tuple[SearchState, Words, Words]:
    """Finds the k-th key of every bracket.

    Args:
      parts: the segments.
      brackets: the bracket of each segment.
      k: the rank of the key in each bracket.
      dtype: the dtype of the scores.
      zero: 0, which varies over a mesh as the counts do.

    Returns:
      The brackets of the keys, k but at most n, and the number n of eligible entries.
    """
    eligible = [part.count_eligible() + zero for part in parts]
    n = brackets.totals(sum_rows(eligible))
    k = limit_kept(n, k)
    key_dtype, lowest, top, is_float = key_range(dtype)
    is_empty = (k[0] | k[1]) == 0
    is_full = exact.equal(k, n) & ~is_empty
    ends = zero_like(k[1]).astype(key_dtype)
    # Where no key or every key stays, the bracket is one key, and the search takes no pass.
    low, high = ends + lowest, ends + top
    bracket = Bracket.begin(jnp.where(is_empty, high, low), jnp.where(is_full, low, high), n)

    def count(state: SearchState) -> tuple[Words, list[jax.Array]]:
        each = map(brackets.by_slice, (state.pivots, state.bracket.is_open))
        args = zip(parts, *each, state.at_least, state.above, strict=True)
        counts = [part.count_above(*values) + zero for part, *values in args]
        return brackets.totals(sum_rows(counts)), counts

    first = _first_pivots(parts, brackets, k).astype(key_dtype)
    start = SearchState(bracket, eligible, [zero_like(x) for x in eligible], first)
    end = key_search.search(count, brackets, k, start, max_misses=_MAX_MISSES, is_float=is_float)
    return end, k, n


def _first_pivots(parts: Parts, brackets: SliceBrackets, k: Words) -> jax.Array:
    """Returns the pivots of the first pass, from sampled keys."""
    if brackets.together:
        total = sum(int(part.num_entries.sum(dtype=np.int64)) for part in parts)
        least, most = _SAMPLE_SIZES
        count = min(max(total >> _SAMPLE_SHIFT, least), most)
        stride = total // count | 1  # odd: not in step with rows
        keys = jnp.concatenate([rows.sample_every(part.all_rows, stride) for part in parts])
        return key_search.sampled_pivots(keys[None], np.array([total], np.float32), k)
    words = zip(*(brackets.by_slice(word) for word in k), strict=True)
    pivots = []
    for part, part_k in zip(parts, words, strict=True):
        n = part.num_entries.astype(np.float32)
        if part.num_segments < _MANY_SEGMENTS:
            pivots.append(key_search.sampled_pivots(rows.sample(part.all_rows), n, part_k))
        else:
            stride = max(int(n.sum()) // _SAMPLE_SIZES[1], 1) | 1
            keys = rows.sample_every(part.all_rows, stride)[None]
            pivots.append(key_search.sampled_pivots(keys, n, part_k))
    return jnp.concatenate(pivots)


# ------------------------------------------------------------------ ties
def _shares(
    brackets: SliceBrackets, ties: Sequence[jax.Array], need: Words, order: np.ndarray
) -> list[jax.Array]:
    """Returns the number of ties that each segment keeps, int32[segments] of each part."""
    if not brackets.together:
        return brackets.by_slice(need[1].astype(jnp.int32))
    shares = tie_shares(_permute(jnp.concatenate(sum_rows(ties)), order), need, together=True)
    return brackets._replace(together=False).by_slice(_permute(shares, np.argsort(order)))


def _ends(
    parts: Parts, keys: Sequence[jax.Array], ties: Sequence[jax.Array], shares: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns the flat index before which a segment keeps ties, int32[segments] of each part."""
    ends, cuts, partials = [], [], []
    for part, key, count, share in zip(parts, keys, ties, shares, strict=True):
        # Rows keep all of their ties until the share is used up; only one row is cut, by a search.
        before = jnp.cumsum(count, axis=1) - count
        kept = jnp.clip(share[:, None] - before, 0, count)
        ends.append(jnp.max(jnp.where((kept > 0) & (kept == count), part.row_ends, 0), axis=1))
        partial = (kept > 0) & (kept < count)
        row = jnp.argmax(partial, axis=1).astype(jnp.int32)
        need = jnp.sum(jnp.where(partial, kept, 0), axis=1, dtype=jnp.int32)
        cuts.append((row, key, need))
        partials.append(jnp.any(partial, axis=1))

    def cut() -> list[jax.Array]:
        return [
            jnp.where(is_partial, rows.find_tie_ends(part.all_rows, *args), end)
            for part, args, is_partial, end in zip(parts, cuts, partials, ends, strict=True)
        ]

    is_cut = functools.reduce(jnp.logical_or, [*map(jnp.any, partials)])
    return lax.cond(is_cut, cut, lambda: ends)


def _permute(x: jax.Array, order: np.ndarray) -> jax.Array:
    return x if np.array_equal(order, np.arange(len(order))) else x[order]
