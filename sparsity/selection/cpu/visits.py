"""How leaves are cut into segments, and large segments visited one after another.

The visits are a loop that leaves out segments that are done. It has a branch for each leaf; those
of one shape share a kernel, as the number of a segment is read while the program runs. Small
segments are padded to one of three sizes and counted at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.exact import zero_like
from sparsity.selection.cpu import rows
from sparsity.selection.cpu.rows import LARGE, Rows, pad, rows_of
from sparsity.selection.scores import Ranked

_ROWS = 1024  # of a large segment, for threads to share
MAX_ENTRIES = 2**31 - _ROWS  # entries of a leaf, so that it can be padded to whole rows
_LEAST_WIDTH = 1024  # of these rows: seven counts of a row are then less than 1 % of its entries
_MANY = 2**20  # entries of a segment from which on one more kernel saves up to 0.2 ms a pass
_FEWER = 4  # rows are copied if one in so many is read: a copy reads and writes, and is read again
_AT_ONCE = 32  # rows that are copied at once: 128 KiB of 1024 floats each, which a cache holds
_WIDTH = 1024  # of a row of small segments
_PADDED = (1024, 4096, LARGE)  # sizes to which these are padded: three kernels count any of them
_BRANCHES = 16  # of one switch, whose time to compile grows with the square of them

Parts = Sequence["Rows | Visits"]


def arrange(leaves: Sequence[Ranked]) -> tuple[Parts, list[int]]:
    """The segments of leaves of one recipe, and the number of each leaf's first segment."""
    kinds: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.size >= LARGE:
            kind: Any = None
        elif leaf.size * leaf.slices >= LARGE:
            kind = f"leaf {i}"
        else:
            kind = next(size for size in _PADDED if leaf.size <= size)
        kinds.setdefault(kind, []).append(i)
    parts: list[Rows | Visits] = []
    first, number = [0] * len(leaves), 0
    for kind, members in kinds.items():
        for i in members:
            first[i] = number
            number += leaves[i].slices
        group = [leaves[i] for i in members]
        if kind is None:
            counts = [_row_count(leaf.size) for leaf in group]
            each = zip(group, counts, strict=True)
            parts.append(Visits([rows_of([x], n, -(-x.size // n)) for x, n in each]))
        elif isinstance(kind, int):
            parts.append(rows_of(group, kind // _WIDTH, _WIDTH))
        else:
            size = group[0].size
            rows = _divisor(size, 1 << size.bit_length() // 2)
            parts.append(rows_of(group, rows, size // rows))
    return parts, first


def _row_count(size: int) -> int:
    """How many rows a large segment is cut into; if they do not divide it, it is padded."""
    most = min(_ROWS, size // _LEAST_WIDTH)
    rows = _divisor(size, most)
    return rows if rows >= most // 16 else most


def _divisor(size: int, most: int) -> int:
    return next(rows for rows in range(min(most, size), 0, -1) if size % rows == 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Visits:
    """Large segments, visited one after another; it offers what `Rows` does.

    Attributes:
      leaves: the rows of each leaf, of which every slice is a segment.
    """

    leaves: Sequence[Rows]

    @property
    def segments(self) -> int:
        """As of `Rows`."""
        return sum(self._counts)

    @functools.cached_property
    def rows(self) -> int:
        """As of `Rows`."""
        return max(leaf.rows for leaf in self.leaves)

    @property
    def entries(self) -> np.ndarray:
        """As of `Rows`."""
        return np.concatenate([leaf.entries for leaf in self.leaves])

    @property
    def row_ends(self) -> np.ndarray:
        """As of `Rows`."""
        missing = [[(0, 0), (0, self.rows - leaf.rows)] for leaf in self.leaves]
        ends = zip(self.leaves, missing, strict=True)
        return np.concatenate([np.pad(leaf.row_ends, more) for leaf, more in ends])

    def eligible(self) -> jax.Array:
        """As of `Rows`."""
        return jnp.concatenate([pad(leaf.eligible(), self.rows) for leaf in self.leaves])

    def sample(self) -> jax.Array:
        """As of `Rows`."""
        return rows.sample(self.leaves)

    def sample_every(self, stride: int) -> jax.Array:
        """As of `Rows`."""
        return rows.sample_every(self.leaves, stride)

    def cut(self, row: jax.Array, key: jax.Array, need: jax.Array) -> jax.Array:
        """As of `Rows`."""
        return rows.cut(self.leaves, row, key, need)

    def above(
        self, pivots: jax.Array, busy: jax.Array, at_least: jax.Array, above: jax.Array
    ) -> jax.Array:
        """As of `Rows`; of segments that are not busy there are no counts."""
        ends = np.cumsum(self._counts)

        def at_once(leaves: Sequence[Rows], _: Any, pivots: jax.Array, *__: jax.Array) -> jax.Array:
            pairs = zip(leaves, jnp.split(pivots, ends[:-1]), strict=True)
            return jnp.concatenate([pad(leaf.above(x), self.rows) for leaf, x in pairs])

        if self.segments == 1:
            return _above(self.leaves[0], pivots, at_least, above)

        def in_turn(
            leaves: Sequence[Rows], numbers: Any, pivots: jax.Array, *rows: jax.Array
        ) -> jax.Array:
            busy, leaf_of, slice_of = numbers
            scalars = zip(*[leaf.scalars for leaf in leaves], strict=True)
            starts = jnp.concatenate([leaf.starts for leaf in leaves])
            tables = slice_of, tuple(map(jnp.concatenate, scalars)), starts, pivots, rows

            branches = [functools.partial(self._branch, leaf) for leaf in leaves]

            def visit(at: jax.Array) -> jax.Array:
                def here(x: jax.Array) -> jax.Array:
                    return lax.dynamic_slice_in_dim(x, at, 1, allow_negative_indices=False)

                table = lax.optimization_barrier(jax.tree.map(here, tables))
                counts: jax.Array = _switch(leaf_of[at], branches, *table)[0]
                return counts

            # They vary over a mesh as what is counted.
            like = pivots[:, None].astype(jnp.int32)
            shape = self.segments, self.rows, pivots.shape[1]
            return _for_each(busy, visit, zero_like(jnp.broadcast_to(like, shape)))

        # Of mapped branches all would be taken, in every visit.
        visits: Any = jax.custom_batching.custom_vmap(in_turn)

        @visits.def_vmap  # type: ignore[untyped-decorator]
        def mapped(size: int, is_mapped: Any, *args: Any) -> tuple[jax.Array, bool]:
            axes = jax.tree.map(lambda leaf: 0 if leaf else None, tuple(is_mapped))
            return jax.vmap(at_once, in_axes=axes, axis_size=size)(*args), True

        leaf_of = np.repeat(np.arange(len(ends)), self._counts)
        slice_of = np.arange(ends[-1]) - np.repeat(ends - self._counts, self._counts)
        numbers = busy, jnp.asarray(leaf_of, jnp.int32), jnp.asarray(slice_of, jnp.int32)
        # All arrays are arguments: a rule may not close over mapped ones.
        leaves = [dataclasses.replace(x, starts=jnp.asarray(x.starts)) for x in self.leaves]
        counts: jax.Array = visits(leaves, numbers, pivots, at_least, above)
        return counts

    def _branch(
        self, leaf: Rows, number: jax.Array, scalars: Any, start: jax.Array, pivots: Any, rows: Any
    ) -> jax.Array:
        """Counts of one segment of a leaf."""
        rows = [x[:, : leaf.rows] for x in rows]
        return pad(_above(leaf.segment(number[0], scalars, start), pivots, *rows), self.rows)

    @property
    def _counts(self) -> list[int]:
        """How many segments each leaf has."""
        return [leaf.segments for leaf in self.leaves]


def _above(leaf: Rows, pivots: jax.Array, at_least: jax.Array, above: jax.Array) -> jax.Array:
    """`Rows.above` of one segment: few rows hold keys of a narrow bracket, no other is read."""
    if leaf.sizes is not None or leaf.rows * leaf.width < _MANY:
        return leaf.above(pivots)
    holds = at_least[0] > above[0]
    count = jnp.sum(holds, dtype=jnp.int32)

    def of_few() -> jax.Array:
        numbers = _numbers(holds)

        def some(i: jax.Array, counts: jax.Array) -> jax.Array:
            rows = lax.dynamic_slice_in_dim(numbers, i * _AT_ONCE, _AT_ONCE)
            # Without a barrier XLA:CPU turns all of a bfloat16 leaf into float32 before the loop.
            arrays, rows = lax.optimization_barrier((leaf.arrays, rows))
            few = dataclasses.replace(leaf, arrays=arrays).some(rows)
            row_counts = few.above(jnp.broadcast_to(pivots, (_AT_ONCE, pivots.shape[1])))
            return counts.at[0, rows].set(row_counts[:, 0])

        wide = jnp.broadcast_to(above[..., None], (*above.shape, pivots.shape[1]))
        few_counts: jax.Array = lax.fori_loop(0, -(-count // _AT_ONCE), some, wide)
        return few_counts

    counts: jax.Array = lax.cond(count <= leaf.rows // _FEWER, of_few, lambda: leaf.above(pivots))
    return counts


def _numbers(chosen: jax.Array) -> jax.Array:
    """int32 like bool[count]: the numbers of those that are chosen, in order, then zeros."""
    place = jnp.cumsum(chosen.astype(jnp.int32))
    numbers = jnp.arange(len(chosen), dtype=jnp.int32)
    todo = jnp.where(chosen, place - 1, len(chosen))
    return (numbers & 0).at[todo].set(numbers, mode="drop")


def _switch(number: jax.Array, branches: Sequence[Callable[..., Any]], *args: Any) -> Any:
    """`lax.switch` in groups: the time to compile one grows with the square of its branches."""
    if len(branches) <= _BRANCHES:
        return lax.switch(number, branches, *args)

    def group(members: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        return lambda args: lax.switch(number % _BRANCHES, members, *args)

    starts = range(0, len(branches), _BRANCHES)
    groups = [group(branches[start : start + _BRANCHES]) for start in starts]
    return lax.switch(number // _BRANCHES, groups, args)


def _for_each(
    chosen: jax.Array, visit: Callable[[jax.Array], jax.Array], zeros: jax.Array
) -> jax.Array:
    """visit(number) of each number that is chosen, one after another; zeros of the others."""
    todo = _numbers(chosen)

    def step(i: jax.Array, results: jax.Array) -> jax.Array:
        updated: jax.Array = lax.dynamic_update_index_in_dim(results, visit(todo[i]), todo[i], 0)
        return updated

    results: jax.Array = lax.fori_loop(0, jnp.sum(chosen, dtype=jnp.int32), step, zeros)
    return results
