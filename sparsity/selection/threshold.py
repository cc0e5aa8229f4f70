"""Masks of the k best entries of many leaves in one search: k-th keys, ties, comparisons.

A mask keeps exactly k entries, of each slice of each leaf or of all leaves together. `key_search`
finds all k-th keys in the same passes. Of the keys equal to the k-th, those of the lowest flat
index are kept, across leaves in their order, so that at most one segment of a bracket is partial:
it keeps some and not all of its ties. Where leaves are flat, the counts of its rows say in which
row its ties end, and that row alone is read; else a second search finds the flat index.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact
from sparsity.core.exact import Words, zero_like
from sparsity.selection import counting, key_search, sorting
from sparsity.selection.counting import NaturalRows
from sparsity.selection.key_search import Bracket, Found, Groups
from sparsity.selection.keys import key_range
from sparsity.selection.rows import rows_of
from sparsity.selection.scores import Leaf, part_of
from sparsity.selection.visits import MOST, Parts, arrange

# Of all leaves together every 256th key is sampled, so that sorting costs less than a pass,
_SAMPLE_SHIFT = 8
_SAMPLE_SIZES = (256, 4096)  # but at least and at most so many


class Selected(NamedTuple):
    """What a search finds.

    Attributes:
        masks: uint8, each of its leaf's shape and sharding.
        eligible: How many entries could be kept, as words like k.
        passes: How often the data were read.
    """

    masks: list[jax.Array]
    eligible: Words
    passes: jax.Array


def select(leaves: Sequence[Leaf], k: Words | chex.Numeric, *, together: bool) -> Selected:
    """Masks of the k best eligible entries, or of all if there are fewer.

    Args:
        leaves: One or more leaves of one recipe that are not empty, fewer than 2**31 entries each.
        k: How many to keep: of all leaves together, [1], or of each slice, [slices], in the order
            of leaves; clamped from above. Or the fraction of the eligible ones to remove.
        together: Whether all entries compete, or those of each slice.
    """
    flat = all(x.size <= MOST and counting.use_flat(x) for leaf in leaves for x in leaf.arrays)
    if flat and sorting.is_small(leaves, together=together):
        masks, n = sorting.select(leaves, k, together=together)
        return Selected(masks, n, jnp.ones((), jnp.int32))
    table, first = arrange(leaves) if flat else ([], [])
    natural = [] if flat else [NaturalRows(leaf) for leaf in leaves]
    parts: Sequence[Part] = [*table, *natural]
    if natural:
        first = np.cumsum([0, *(part.segments for part in natural)])[:-1].tolist()
    # Segments are numbered by parts; this is their order by leaves.
    order = np.concatenate(
        [start + np.arange(leaf.slices) for start, leaf in zip(first, leaves, strict=True)]
    )
    groups = Groups(tuple(part.segments for part in parts), together)
    if isinstance(k, tuple) and not together:
        k = _permuted(k[0], np.argsort(order)), _permuted(k[1], np.argsort(order))
    first_k = jnp.zeros((), jnp.int32) if not isinstance(k, tuple) else k[1][0]
    zero = counting.varying_zero(leaves, first_k)
    eligible = [part.eligible() + zero for part in parts]
    n = groups.totals(eligible)
    k = exact.limit_kept(n, k)
    found = _kth_keys(parts, table, groups, leaves[0].scores.dtype, k, n, eligible, zero)

    ties = [x - y for x, y in zip(found.at_least, found.above, strict=True)]
    own = _own_ties(groups, ties, exact.minus(k, found.bracket.above), order)
    keys = groups.spread(found.bracket.high)
    if flat:
        ends, passes = _ends_by_rows(table, keys, ties, own), zero
    else:
        ends, passes = _ends_by_search(natural, keys, ties, own)
    key, end = jnp.concatenate(keys), jnp.concatenate(ends)
    masks = [
        _mask(leaf, part_of(key, start, leaf.slices), part_of(end, start, leaf.slices), flat)
        for start, leaf in zip(first, leaves, strict=True)
    ]
    if not together:
        n = _permuted(n[0], order), _permuted(n[1], order)
    return Selected(masks, n, jnp.max(found.bracket.passes) + passes)


class Part(Protocol):
    """Segments that are counted together."""

    @property
    def segments(self) -> int: ...

    def eligible(self) -> jax.Array:
        """int32[segments, rows]: how many entries may be kept."""

    def above(
        self, pivots: jax.Array, busy: jax.Array, at_least: jax.Array, above: jax.Array
    ) -> jax.Array:
        """int32[segments, rows, pivots]: eligible keys above each of pivots[segments, pivots].

        These lie in a bracket of which each row is known to hold so many keys at and above the
        ends, int32[segments, rows]; the counts of segments that are not busy may be left out.
        """


def _kth_keys(
    parts: Sequence[Part],
    table: Parts,
    groups: Groups,
    dtype: np.dtype,
    k: Words,
    n: Words,
    eligible: list[jax.Array],
    zero: jax.Array,
) -> Found:
    """The k-th key of every bracket, of n eligible entries, which are as many in each row."""
    _, lowest, top = key_range(dtype)
    flat = bool(table)
    nothing = (k[0] | k[1]) == 0
    everything = exact.equal(k, n) & ~nothing
    ends = zero_like(k[1]).astype(np.int64 if dtype.itemsize == 8 else np.int32)
    low, high = ends + lowest, ends + top
    b = Bracket.of(jnp.where(nothing, high, low), jnp.where(everything, low, high), n, sharp=flat)

    def count(pivots: jax.Array, found: Found) -> list[jax.Array]:
        busy = found.bracket.low < found.bracket.high
        wanted = map(groups.spread, (pivots, busy))
        of_parts = zip(parts, *wanted, found.at_least, found.above, strict=True)
        return [part.above(*own) + zero for part, *own in of_parts]

    first = None
    if flat and not key_search.loops_wait_on_host():
        first = _first_pivots(table, groups, k).astype(low.dtype)
    return key_search.search(
        count,
        groups,
        k,
        Found(b, eligible, [zero_like(x) for x in eligible]),
        bits=(top - lowest).bit_length(),
        max_misses=8 if flat else 2,
        first=first,
        is_float=jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4,
    )


def _first_pivots(parts: Parts, groups: Groups, k: Words) -> jax.Array:
    """Pivots of the first pass, from sampled keys."""
    if groups.together:
        total = sum(int(part.entries.sum(dtype=np.int64)) for part in parts)
        least, most = _SAMPLE_SIZES
        count = min(max(total >> _SAMPLE_SHIFT, least), most)
        stride = total // count | 1  # odd: not in step with rows
        keys = jnp.concatenate([part.sample_every(stride) for part in parts])
        return key_search.sampled_pivots(keys[None], np.array([total], np.float32), k)
    ends = np.cumsum(groups.parts)[:-1]
    return jnp.concatenate(
        [
            key_search.sampled_pivots(part.sample(), part.entries.astype(np.float32), own)
            for part, own in zip(
                parts, zip(*(jnp.split(x, ends) for x in k), strict=True), strict=True
            )
        ]
    )


# ------------------------------------------------------------------ ties
def _own_ties(
    groups: Groups, ties: Sequence[jax.Array], need: Words, order: np.ndarray
) -> list[jax.Array]:
    """int32[segments] of each part: how many of its ties a segment keeps, need in all of each
    bracket, in the order of leaves."""
    if not groups.together:
        return [x.astype(jnp.int32) for x in groups.spread(need[1])]
    of_segments = jnp.concatenate([jnp.sum(x, axis=1, dtype=jnp.int32) for x in ties])
    of_segments = _permuted(of_segments, order)
    before = exact.totals_before(of_segments)
    left = exact.minus(need, before)
    some = exact.at_least(need, before)
    fit = jnp.minimum(left[1], of_segments.astype(jnp.uint32)).astype(jnp.int32)
    own = jnp.where(some, jnp.where(left[0] > 0, of_segments, fit), 0)
    return jnp.split(_permuted(own, np.argsort(order)), np.cumsum(groups.parts)[:-1])


def _ends_by_rows(
    parts: Parts,
    keys: Sequence[jax.Array],
    ties: Sequence[jax.Array],
    own: Sequence[jax.Array],
) -> list[jax.Array]:
    """int32[segments] of each part: the flat index in its segment before which ties are kept."""
    whole, cuts, partials = [], [], []
    for part, key, count, kept in zip(parts, keys, ties, own, strict=True):
        before = jnp.cumsum(count, axis=1) - count
        of_row = jnp.clip(kept[:, None] - before, 0, count)
        whole.append(jnp.max(jnp.where((of_row > 0) & (of_row == count), part.row_ends, 0), axis=1))
        partial = (of_row > 0) & (of_row < count)
        row = jnp.argmax(partial, axis=1).astype(jnp.int32)
        need = jnp.sum(jnp.where(partial, of_row, 0), axis=1, dtype=jnp.int32)
        cuts.append((row, key, need))
        partials.append(jnp.any(partial, axis=1))

    def cut() -> list[jax.Array]:
        return [
            jnp.where(is_partial, part.cut(*wanted), end)
            for part, wanted, is_partial, end in zip(parts, cuts, partials, whole, strict=True)
        ]

    if key_search.loops_wait_on_host():
        return cut()
    is_cut = functools.reduce(jnp.logical_or, [*map(jnp.any, partials)])
    ends: list[jax.Array] = lax.cond(is_cut, cut, lambda: whole)
    return ends


def _ends_by_search(
    parts: Sequence[NaturalRows],
    keys: Sequence[jax.Array],
    ties: Sequence[jax.Array],
    own: Sequence[jax.Array],
) -> tuple[list[jax.Array], jax.Array]:
    """The same by a search for the flat indices, counted from the end; and its passes."""
    groups = Groups(tuple(part.segments for part in parts), together=False)
    sizes = np.concatenate([part.entries for part in parts])
    need, all_ties = jnp.concatenate(own), jnp.concatenate([x[:, 0] for x in ties])
    partial = (need > 0) & (need < all_ties)
    zero, last = zero_like(need), sizes - 1
    b = Bracket.of(zero, jnp.where(partial, last, zero), _words(all_ties))

    def count(pivots: jax.Array, _: Found) -> list[jax.Array]:
        before = groups.spread(jnp.asarray(last)[:, None] - pivots)
        return [part.ties_before(*x) for part, *x in zip(parts, keys, before, strict=True)]

    bits = int(last.max()).bit_length()
    found = key_search.search(
        count,
        groups,
        _words(need),
        Found(b, list(ties), [zero_like(x) for x in ties]),
        bits=bits,
        max_misses=1 if bits <= 30 else 0,
    ).bracket
    cut = last - found.high + (found.above[1].astype(jnp.int32) < need).astype(jnp.int32)
    ends = jnp.where(partial, cut, jnp.where(need > 0, sizes, 0))
    return groups.spread(ends), jnp.max(found.passes)


# ------------------------------------------------------------------ masks
def _mask(leaf: Leaf, key: jax.Array, end: jax.Array, flat: bool) -> jax.Array:
    """Mask of keys above the key, and of those equal to it whose flat index is below the end."""
    if flat:
        rows = rows_of([leaf], 1, leaf.size)
        mask: jax.Array = rows.best(key, end).reshape(leaf.scores.shape)
        return mask
    return NaturalRows(leaf).best(key, end)


def _permuted(x: jax.Array, order: np.ndarray) -> jax.Array:
    return x if np.array_equal(order, np.arange(len(order))) else x[order]


def _words(counts: jax.Array) -> Words:
    low = counts.astype(jnp.uint32)
    return zero_like(low), low
