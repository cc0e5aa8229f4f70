"""Parameters cut into segments; large ones are visited one after another.

The visits are a loop that leaves out segments that are done. The loop has a branch for each
parameter. Parameters of one shape share a kernel, as the index of a segment is read at run time.
Small segments are padded to one of three sizes and counted at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.exact import zero_like
from sparsity.core.trees import PyTree
from sparsity.selection.cpu.rows import LARGE, Rows, cut_rows, pad
from sparsity.selection.scores import Ranked

_ROWS = 1024  # of a large segment, for threads to share
MAX_ENTRIES = 2**31 - _ROWS  # entries of a parameter, so that it can be padded to whole rows
_LEAST_WIDTH = 1024  # of these rows: seven counts of a row are then less than 1 % of its entries
_MANY = 2**20  # entries of a segment from which on one more kernel saves up to 0.2 ms a pass
_FEWER = 4  # rows are copied if one in so many is read: a copy reads and writes, and is read again
_AT_ONCE = 32  # rows that are copied at once: 128 KiB of 1024 floats each, which a cache holds
_WIDTH = 1024  # of a row of small segments
_PADDED = (1024, 4096, LARGE)  # sizes to which these are padded: three kernels count any of them
_BRANCHES = 16  # of one switch: its time to compile grows with their square

Parts: TypeAlias = Sequence["Rows | Visits"]
# Busy segments, the indices of their rows, and their slices.
Indices: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def arrange(all_ranked: Sequence[Ranked]) -> tuple[Parts, list[int]]:
    """Returns the segments of parameters of one `program_key`, and the first segment of each."""
    members_by_part: dict[int | str | None, list[int]] = {}
    for i, ranked in enumerate(all_ranked):
        if ranked.slice_size >= LARGE:
            part_key: int | str | None = None
        elif ranked.size >= LARGE:
            part_key = f"parameter {i}"
        else:
            part_key = next(size for size in _PADDED if ranked.slice_size <= size)
        members_by_part.setdefault(part_key, []).append(i)
    parts: list[Rows | Visits] = []
    first, index = [0] * len(all_ranked), 0
    for part_key, members in members_by_part.items():
        for i in members:
            first[i] = index
            index += all_ranked[i].num_slices
        group = [all_ranked[i] for i in members]
        if part_key is None:
            counts = [_row_count(ranked.slice_size) for ranked in group]
            each = zip(group, counts, strict=True)
            parts.append(Visits([cut_rows([x], n, -(-x.slice_size // n)) for x, n in each]))
        elif isinstance(part_key, int):
            parts.append(cut_rows(group, part_key // _WIDTH, _WIDTH))
        else:
            size = group[0].slice_size
            rows = _divisor(size, max(size // _LEAST_WIDTH, 1))
            parts.append(cut_rows(group, rows, size // rows))
    return parts, first


def _row_count(size: int) -> int:
    """Returns the number of rows of a large segment, which is padded if they do not divide it."""
    most = min(_ROWS, size // _LEAST_WIDTH)
    rows = _divisor(size, most)
    # Padding costs less than rows that are too few for threads to share.
    return rows if rows >= most // 16 else most


def _divisor(size: int, most: int) -> int:
    return next(rows for rows in range(min(most, size), 0, -1) if size % rows == 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Visits:
    """Large segments, visited one after another, with the methods of `Rows`.

    Attributes:
      all_rows: the rows of each parameter; every slice is a segment.
    """

    all_rows: Sequence[Rows]

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return sum(self._counts)

    @functools.cached_property
    def num_rows(self) -> int:
        """Number of rows of a segment, at most."""
        return max(rows.num_rows for rows in self.all_rows)

    @property
    def num_entries(self) -> np.ndarray:
        """Numbers of entries, int32[segments]."""
        return np.concatenate([rows.num_entries for rows in self.all_rows])

    @property
    def row_ends(self) -> np.ndarray:
        """Ends of rows within their segments, int32[segments, rows]; 0 for missing rows."""
        missing = [[(0, 0), (0, self.num_rows - rows.num_rows)] for rows in self.all_rows]
        ends = zip(self.all_rows, missing, strict=True)
        return np.concatenate([np.pad(rows.row_ends, padding) for rows, padding in ends])

    def count_eligible(self) -> jax.Array:
        """Counts the eligible entries, int32[segments, rows]."""
        return jnp.concatenate(
            [pad(rows.count_eligible(), self.num_rows) for rows in self.all_rows]
        )

    def count_above(
        self, pivots: jax.Array, busy: jax.Array, at_least: jax.Array, above: jax.Array
    ) -> jax.Array:
        """Counts as `Rows.count_above`; counts of segments that are not busy do not matter."""
        if self.num_segments == 1:
            return _count_above(self.all_rows[0], pivots, at_least, above)
        visits = jax.custom_batching.custom_vmap(self._count_in_turn)

        # Of mapped branches all would be taken, in every visit.
        @visits.def_vmap
        def mapped(size: int, is_mapped: PyTree, *args: PyTree) -> tuple[jax.Array, bool]:
            axes = jax.tree.map(lambda leaf: 0 if leaf else None, tuple(is_mapped))
            return jax.vmap(self._count_at_once, in_axes=axes, axis_size=size)(*args), True

        ends = np.cumsum(self._counts)
        rows_index = np.repeat(np.arange(len(ends)), self._counts)
        slice_index = np.arange(ends[-1]) - np.repeat(ends - self._counts, self._counts)
        indices = busy, jnp.asarray(rows_index, jnp.int32), jnp.asarray(slice_index, jnp.int32)
        # All arrays are arguments: a rule may not close over mapped ones.
        all_rows = [dataclasses.replace(x, starts=jnp.asarray(x.starts)) for x in self.all_rows]
        return visits(all_rows, indices, pivots, at_least, above)

    def _count_at_once(
        self, all_rows: Sequence[Rows], _: PyTree, pivots: jax.Array, *__: jax.Array
    ) -> jax.Array:
        """Counts the keys above pivots[segments, pivots] of all segments."""
        pairs = zip(all_rows, jnp.split(pivots, np.cumsum(self._counts)[:-1]), strict=True)
        return jnp.concatenate([pad(rows.count_above(x), self.num_rows) for rows, x in pairs])

    def _count_in_turn(
        self, all_rows: Sequence[Rows], indices: Indices, pivots: jax.Array, *counts: jax.Array
    ) -> jax.Array:
        """Counts the keys of one busy segment after the other; `counts` are those at both ends."""
        busy, rows_index, slice_index = indices
        scalars = zip(*[rows.scalars for rows in all_rows], strict=True)
        starts = jnp.concatenate([rows.starts for rows in all_rows])
        tables = slice_index, tuple(map(jnp.concatenate, scalars)), starts, pivots, counts
        branches = [functools.partial(self._count_segment, rows) for rows in all_rows]

        def visit(at: jax.Array) -> jax.Array:
            def read(x: jax.Array) -> jax.Array:
                return lax.dynamic_slice_in_dim(x, at, 1, allow_negative_indices=False)

            segment = jax.tree.map(read, tables)
            return _switch(rows_index[at], branches, segment)[0]

        # The zeros vary over a mesh as the counts do.
        like = pivots[:, None].astype(jnp.int32)
        shape = self.num_segments, self.num_rows, pivots.shape[1]
        return _for_each(busy, visit, zero_like(jnp.broadcast_to(like, shape)))

    def _count_segment(self, rows: Rows, segment: PyTree) -> jax.Array:
        """Counts keys of one segment of a parameter, int32[1, rows, pivots]."""
        index, scalars, start, pivots, row_counts = segment
        counts = [x[:, : rows.num_rows] for x in row_counts]
        return pad(
            _count_above(rows.segment(index[0], scalars, start), pivots, *counts), self.num_rows
        )

    @property
    def _counts(self) -> list[int]:
        """Number of segments of each parameter."""
        return [rows.num_segments for rows in self.all_rows]


def _count_above(rows: Rows, pivots: jax.Array, at_least: jax.Array, above: jax.Array) -> jax.Array:
    """Counts as `Rows.count_above` in one segment; reads only rows with keys of the bracket."""
    if rows.sizes is not None or rows.num_rows * rows.width < _MANY:
        return rows.count_above(pivots)
    holds = at_least[0] > above[0]
    count = jnp.sum(holds, dtype=jnp.int32)
    is_few = count <= rows.num_rows // _FEWER

    def count_few() -> jax.Array:
        # Zeros at the end count row 0 again, with the same result.
        indices = _list_chosen(holds)

        def count_rows(i: jax.Array, counts: jax.Array) -> jax.Array:
            chosen = lax.dynamic_slice_in_dim(indices, i * _AT_ONCE, _AT_ONCE)
            # Without a barrier XLA:CPU turns all of a bfloat16 leaf into float32 before the loop.
            arrays, chosen = lax.optimization_barrier((rows.arrays, chosen))
            few = dataclasses.replace(rows, arrays=arrays).copy_rows(chosen)
            row_counts = few.count_above(jnp.broadcast_to(pivots, (_AT_ONCE, pivots.shape[1])))
            return counts.at[0, chosen].set(row_counts[:, 0])

        # Rows without keys of the bracket have `above` keys above each pivot inside.
        wide = jnp.broadcast_to(above[..., None], (*above.shape, pivots.shape[1]))
        return lax.fori_loop(0, -(-count // _AT_ONCE), count_rows, wide)

    return lax.cond(is_few, count_few, lambda: rows.count_above(pivots))


def _list_chosen(chosen: jax.Array) -> jax.Array:
    """Returns the indices of the chosen segments in order, then zeros: int32 like bool[count]."""
    place = jnp.cumsum(chosen.astype(jnp.int32))
    indices = jnp.arange(len(chosen), dtype=jnp.int32)
    todo = jnp.where(chosen, place - 1, len(chosen))
    return (indices & 0).at[todo].set(indices, mode="drop")


def _switch(
    index: jax.Array, branches: Sequence[Callable[..., jax.Array]], *args: PyTree
) -> jax.Array:
    """Switches in groups: the time to compile a switch grows with the square of its branches."""
    if len(branches) <= _BRANCHES:
        return lax.switch(index, branches, *args)

    def group(members: Sequence[Callable[..., jax.Array]]) -> Callable[..., jax.Array]:
        return lambda args: lax.switch(index % _BRANCHES, members, *args)

    starts = range(0, len(branches), _BRANCHES)
    groups = [group(branches[start : start + _BRANCHES]) for start in starts]
    return lax.switch(index // _BRANCHES, groups, args)


def _for_each(
    chosen: jax.Array, visit: Callable[[jax.Array], jax.Array], zeros: jax.Array
) -> jax.Array:
    """Calls visit(index) for each chosen index, one after another; the others get zeros."""
    todo = _list_chosen(chosen)

    def step(i: jax.Array, results: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(results, visit(todo[i]), todo[i], 0)

    return lax.fori_loop(0, jnp.sum(chosen, dtype=jnp.int32), step, zeros)
