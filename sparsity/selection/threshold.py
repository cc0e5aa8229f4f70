"""Masks of the k best entries of one or more leaves: the k-th key, then ties, then comparisons.

A mask keeps exactly k entries. `key_search` finds the k-th key of all leaves together. Of the keys
equal to it, those of the lowest flat index are kept, across leaves in their order, so that at most
one leaf is partial: it keeps some and not all of its ties. A second search finds where it stops: by
rows if the leaf may be reshaped ("flat"), which is a single pass, else by the flat index.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact
from sparsity.core.exact import Words, zero_like
from sparsity.core.hashing import flat_index
from sparsity.selection import counting, key_search
from sparsity.selection.counting import Leaf
from sparsity.selection.key_search import Bracket
from sparsity.selection.keys import key_range, to_keys


def select(leaves: Sequence[Leaf], k: Words) -> tuple[list[jax.Array], jax.Array]:
    """Masks (uint8) of the k best eligible entries of all leaves, or of all if there are fewer.

    Args:
        leaves: One or more leaves that are not empty, of one dtype, fewer than 2**31 entries each.
        k: How many to keep of all leaves together; clamped from above.

    Returns:
        A mask of each leaf's shape and sharding; passes over the data, those for ties included.
    """
    flat = all(counting.use_flat(leaf.scores) for leaf in leaves)
    # A zero that is sharded and varying as all of the data are, as loops want it.
    zero = zero_like(k[1].astype(jnp.int32))
    for x in jax.tree.leaves(list(leaves)):
        if not jax.typeof(x).sharding.mesh.empty:
            zero += jnp.sum(zero_like(to_keys(x)), dtype=jnp.int32)
    eligible = jnp.stack([zero + counting.count_eligible(leaf) for leaf in leaves])
    n = exact.total(eligible)
    k = exact.choose(exact.at_least(k, n), n, k)
    b = _kth_key(leaves, k, eligible, flat)

    ties = b.at_least - b.above
    own = _own_ties(ties, exact.minus(k, exact.total(b.above)))
    partial = (own > 0) & (own < ties)  # of one leaf at most
    need = _at(partial, own)

    def cut() -> tuple[jax.Array, jax.Array]:
        if flat:
            return _cut_by_rows(leaves, b.high, partial, need), zero + 1
        return _cut_by_search(leaves, b.high, partial, ties, need)

    if flat and not key_search.loops_wait_on_host():
        found, passes = lax.cond(jnp.any(partial), cut, lambda: (zero, zero))
    else:  # no cond, which when batched wants its operands sharded alike
        found, passes = cut()
    sizes = np.array([leaf.scores.size for leaf in leaves], np.int32)
    ends = jnp.where(partial, found, jnp.where(own > 0, sizes, 0))
    masks = [_best(leaf, b.high, end, flat) for leaf, end in zip(leaves, ends, strict=True)]
    return masks, b.passes + jnp.where(jnp.any(partial), passes, 0)


def _kth_key(leaves: Sequence[Leaf], k: Words, eligible: jax.Array, flat: bool) -> Bracket:
    """The k-th key of all leaves, at most the number of eligible ones; its counts."""
    dtype = leaves[0].scores.dtype
    _, lowest, top = key_range(dtype)
    zero = zero_like(eligible[0]).astype(np.int64 if dtype.itemsize == 8 else np.int32)
    low, high = zero + lowest, zero + top
    nothing = (k[0] | k[1]) == 0
    everything = exact.equal(k, exact.total(eligible)) & ~nothing
    b = Bracket.of(
        jnp.where(nothing, high, low), jnp.where(everything, low, high), eligible, sharp=flat
    )
    return key_search.search(
        functools.partial(counting.count_above, leaves),
        k,
        b,
        bits=(top - lowest).bit_length(),
        max_misses=8 if flat else 2,
        first=key_search.sampled_pivots(leaves, k).astype(low.dtype) if flat else None,
        is_float=jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4,
    )


def _best(leaf: Leaf, key: jax.Array, end: jax.Array, flat: bool) -> jax.Array:
    """Mask of keys above the key, and of those equal to it whose flat index is below the end."""
    whole = leaf.map(lambda x: x.reshape(-1)) if flat else leaf
    keys = whole.keys()
    wanted = key.astype(keys.dtype)
    best = (keys > wanted) | ((keys == wanted) & (flat_index(keys.shape) < end))
    return whole.only(best).astype(jnp.uint8).reshape(leaf.scores.shape)


# ------------------------------------------------------------------ ties
def _own_ties(ties: jax.Array, need: Words) -> jax.Array:
    """How many of its ties each leaf keeps, need of them in all, in the order of leaves."""
    before = exact.totals_before(ties)
    left = exact.minus(need, before)
    some = exact.at_least(need, before)
    fit = jnp.minimum(left[1], ties.astype(jnp.uint32)).astype(jnp.int32)
    return jnp.where(some, jnp.where(left[0] > 0, ties, fit), 0)


class _Rows(NamedTuple):
    """A flat leaf as rows of one width.

    A width is at least the number of rows, so that what they leave is shorter than a row.
    """

    leaf: Leaf
    size: int
    rows: int
    width: int

    @classmethod
    def of(cls, leaf: Leaf) -> "_Rows":
        size = leaf.scores.size
        rows = 1 << (size.bit_length() - 1) // 2
        return cls(leaf.map(lambda x: x.reshape(-1)), size, rows, size // rows)

    def ties_by_row(self, key: jax.Array, most: int) -> jax.Array:
        """int32[most]: how many ties of the key are in each row, zero after the last one."""
        rows, width = self.rows, self.width
        body = self.leaf.map(lambda x: x[: rows * width].reshape(rows, width))
        keys = body.keys()
        key = key.astype(keys.dtype)
        sums = counting.sums([body.only(keys == key), keys > key], [1])
        # The barrier keeps the second operand, and with it the fused loop.
        return jnp.pad(lax.optimization_barrier(sums)[0], (0, most - rows))

    def ties_of_row(self, key: jax.Array, most: int, start: jax.Array) -> jax.Array:
        """int32[most]: which entries of the row that starts there are ties of the key."""
        row = self.leaf.map(lambda x: lax.dynamic_slice(x, (start,), (self.width,)))
        keys = row.keys()
        ties = row.only(keys == key.astype(keys.dtype))
        return jnp.pad(ties.astype(jnp.int32), (0, most - self.width))


def _cut_by_rows(
    leaves: Sequence[Leaf], key: jax.Array, partial: jax.Array, need: jax.Array
) -> jax.Array:
    """Flat index after the need-th tie of the partial leaf.

    One pass counts ties by row, then one row is read.
    """
    tables = [_Rows.of(leaf) for leaf in leaves]
    most_rows, longest = max(t.rows for t in tables), max(t.width for t in tables)
    size, rows, width = (
        _at(partial, np.array([getattr(t, name) for t in tables], np.int32))
        for name in ("size", "rows", "width")
    )
    counts = _of_partial(
        partial, [functools.partial(t.ties_by_row, key, most_rows) for t in tables]
    )
    row, before = _place(counts, zero_like(need), need)
    passed = jnp.minimum(row, rows) * width  # there may be padded rows
    start = jnp.minimum(passed, size - width)  # the row after the last one ends with the leaf
    fresh = start + lax.iota(jnp.int32, longest) >= passed
    ties = _of_partial(
        partial, [functools.partial(t.ties_of_row, key, longest) for t in tables], start
    )
    return start + _place(jnp.where(fresh, ties, 0), before, need)[0] + 1


def _of_partial(
    partial: jax.Array, functions: Sequence[Callable[..., jax.Array]], *args: jax.Array
) -> jax.Array:
    """The function of the partial leaf, of one for each, applied to the arguments."""
    if key_search.loops_wait_on_host():  # and so do branches
        return jnp.stack([f(*args) for f in functions])[jnp.argmax(partial)]
    chosen: jax.Array = lax.switch(jnp.argmax(partial), functions, *args)
    return chosen


def _place(counts: jax.Array, before: jax.Array, need: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which count passes on to the need-th, with that many before them; how many are before it."""
    ends = before + jnp.cumsum(counts)
    passed = ends < need
    return jnp.sum(passed, dtype=jnp.int32), jnp.max(jnp.where(passed, ends, before))


def _cut_by_search(
    leaves: Sequence[Leaf], key: jax.Array, partial: jax.Array, ties: jax.Array, need: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Flat index after the need-th tie of the partial leaf, and passes.

    That is the search for it, over indices counted from the end.
    """
    sizes = np.array([leaf.scores.size for leaf in leaves], np.int32)
    last = _at(partial, sizes - 1)

    def count_in(leaf: Leaf, pivots: jax.Array) -> list[jax.Array]:
        shape = leaf.scores.shape
        strides = [jnp.int32(math.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        leaf, pivots, strides = lax.optimization_barrier((leaf, pivots, strides))

        keys, index = leaf.keys(), flat_index(shape, strides)
        ties = leaf.only(keys == key.astype(keys.dtype))
        return counting.sums([ties & (index < last - p) for p in pivots], range(len(shape)))

    def count(pivots: jax.Array) -> jax.Array:
        counts = [x for leaf in leaves for x in count_in(leaf, pivots)]
        return _at(partial[:, None], jnp.stack(counts).reshape(len(leaves), -1))[None]

    bits = int(sizes.max() - 1).bit_length()
    b = key_search.search(
        count,
        (zero_like(need).astype(jnp.uint32), need.astype(jnp.uint32)),
        Bracket.of(zero_like(need), last, _at(partial, ties)[None]),
        bits=bits,
        max_misses=1 if bits <= 30 else 0,
    )
    return last - b.high + (b.above[0] < need).astype(jnp.int32), b.passes


def _at(partial: jax.Array, x: jax.Array | np.ndarray) -> jax.Array:
    """The x of the partial leaf; 0 without one."""
    return jnp.sum(jnp.where(partial, x, 0), axis=0, dtype=jnp.int32)
