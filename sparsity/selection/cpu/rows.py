"""Parameters that may be reshaped, as segments of rows: each slice is a segment.

Counts by row say in which row the ties of a key end, without another pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.exact_sums import count, sums
from sparsity.core.kernels import read_part
from sparsity.selection.scores import Ranked, Recipe

LARGE = 16_384  # entries of a segment from which on 1024 samples are at most a sixteenth of it
# Keys to sample of a small segment, of a large one: with 256 a search took 3.7 passes, not 3.5.
_SAMPLED = (256, 1024)
_DRIFT = 0.99  # of a stride: 1024 samples of a (1024, 1024) matrix would all be of its first column

_static = functools.partial(dataclasses.field, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Segments of equal rows.

    Attributes:
      arrays: stored arrays, each [segments, rows, width].
      scalars: scalars of the scores, each [segments].
      starts: int32[segments], flat index in its parameter of each segment's first entry.
      recipe: computes the keys.
      sizes: number of entries of each segment, followed by padding in its rows; None: there is no
        padding.
    """

    arrays: tuple[jax.Array, ...]
    scalars: tuple[jax.Array, ...]
    starts: jax.Array | np.ndarray
    recipe: Recipe = _static()
    sizes: tuple[int, ...] | None = _static()

    @property
    def all_rows(self) -> Sequence[Rows]:
        """These rows, as `Visits.all_rows`."""
        return [self]

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return self.arrays[0].shape[0]

    @property
    def num_rows(self) -> int:
        """Number of rows of a segment."""
        return self.arrays[0].shape[1]

    @property
    def width(self) -> int:
        """Number of entries of a row, padding included."""
        return self.arrays[0].shape[2]

    @property
    def num_entries(self) -> np.ndarray:
        """Numbers of entries, int32[segments]."""
        return np.array(self.sizes or [self.num_rows * self.width] * self.num_segments, np.int32)

    @property
    def row_ends(self) -> np.ndarray:
        """Ends of rows within their segments, int32[segments, rows]."""
        ends = np.arange(1, self.num_rows + 1, dtype=np.int32) * self.width
        return np.broadcast_to(ends, (self.num_segments, self.num_rows))

    @jax.jit
    def count_eligible(self) -> jax.Array:
        """Counts the eligible entries, int32[segments, rows]."""
        room = self.num_entries[:, None] - (self.row_ends - self.width)
        entries = jnp.asarray(np.clip(room, 0, self.width), jnp.int32)
        allowed = self.recipe.eligible(self.arrays)
        if allowed is None:
            return entries
        counted = count(allowed, [2])
        if not self.recipe.eligible_is_zero:
            return counted
        return counted - (self.width - entries)  # zeros of the padding

    def count_above(self, pivots: jax.Array, *_: jax.Array) -> jax.Array:
        """Counts eligible keys above pivots[segments, pivots]: int32[segments, rows, pivots]."""
        return self._count_above(pivots)

    @jax.jit
    def _count_above(self, pivots: jax.Array) -> jax.Array:
        # Without the barrier XLA moves the keys out of the loop of passes, and stores them.
        stored, pivots = lax.optimization_barrier((self, pivots))
        offset = lax.iota(jnp.int32, self.num_rows * self.width).reshape(
            1, self.num_rows, self.width
        )
        keys = stored._keys(offset)
        pivots = pivots.astype(keys.dtype)
        counts = sums(
            [keys > _broadcast(pivots[:, i], keys.shape) for i in range(pivots.shape[1])], [2]
        )
        return jnp.stack(counts, axis=-1)

    def segment(self, index: jax.Array, scalars: tuple[jax.Array, ...], start: jax.Array) -> Rows:
        """Returns one segment, arrays [1, rows, width]; all segments have one size.

        Args:
          index: int32 scalar.
          scalars: the scalars of the segment, each [1].
          start: int32[1], the start of the segment.
        """
        arrays, sizes = self.arrays, self.sizes and self.sizes[:1]
        if self.num_segments > 1:
            arrays = tuple(
                lax.dynamic_slice_in_dim(x, index, 1, allow_negative_indices=False) for x in arrays
            )
        return Rows(arrays, scalars, start, self.recipe, sizes)

    def copy_rows(self, index: jax.Array) -> Rows:
        """Copies rows of one segment without padding; each becomes a segment, [count, 1, width].

        Args:
          index: int32[count], the rows.
        """
        arrays = tuple(jnp.swapaxes(jnp.take(x, index, axis=1), 0, 1) for x in self.arrays)
        scalars = tuple(jnp.broadcast_to(x, index.shape) for x in self.scalars)
        return Rows(arrays, scalars, self.starts + index * self.width, self.recipe, None)

    def _keys(self, offset: jax.Array) -> jax.Array:
        """Computes the keys of the entries, of the shape of the arrays.

        Args:
          offset: int32[segments, ...] or int32[1, ...], places of the entries in their segments.
        """
        shape = len(self.starts), *offset.shape[1:]
        scalars = tuple(_broadcast(x, shape) for x in self.scalars)
        index = _broadcast(self.starts, shape) + offset if self.recipe.reads_index else offset
        return self.recipe.keys(self.arrays, scalars, index, self._is_entry(offset))

    def _is_entry(self, offset: jax.Array) -> jax.Array | None:
        """Returns whether places hold entries, bool[segments, ...]; None: there is no padding."""
        if self.sizes is None:
            return None
        return offset < _broadcast(self.num_entries, (len(self.sizes), *offset.shape[1:]))

    @jax.jit
    def _read_sample(self) -> tuple[jax.Array, ...]:
        """Reads the arrays at some entries of every segment, each [segments, count]."""
        offset = self._sample_offsets()
        flat = [x.reshape(self.num_segments, -1) for x in self.arrays]
        if self.sizes is None:
            # Without padding all segments share their places: a strided slice reads them.
            stride = self._stride(offset.shape[1])
            return tuple(x[:, : offset[0, -1] + 1 : stride] for x in flat)
        return tuple(jnp.take_along_axis(x, offset, axis=1) for x in flat)

    @functools.partial(jax.jit, static_argnums=1)
    def _read_every(self, stride: int) -> tuple[jax.Array, ...]:
        """Reads the arrays at every stride-th entry of each segment, each [count]."""
        flat = [x.reshape(self.num_segments, -1) for x in self.arrays]
        if self.sizes is None:
            return tuple(x[:, ::stride].reshape(-1) for x in flat)
        segment, offset = _list_places([self], stride)
        return tuple(x[segment, offset] for x in flat)

    def _sample_offsets(self) -> np.ndarray:
        """Returns the places of the sampled entries in their segments, int32[segments, count]."""
        room = self.num_rows * self.width
        num_samples = min(_SAMPLED[room >= LARGE], room)
        if self.sizes is None:
            offset = np.arange(num_samples, dtype=np.int32) * self._stride(num_samples)
            return np.tile(offset, (self.num_segments, 1))
        places: np.ndarray = np.arange(num_samples) * self.num_entries[:, None] // num_samples
        return places.astype(np.int32)

    def _stride(self, num_samples: int) -> int:
        return max(int(self.num_rows * self.width / num_samples * _DRIFT), 1)

    @functools.partial(jax.jit, static_argnums=2)
    def _read_row(self, row: jax.Array, width: int) -> tuple[jax.Array, ...]:
        """Reads one row of each segment, each array [segments, width]."""
        picked = [
            lax.dynamic_slice_in_dim(x, row[0], 1, 1, allow_negative_indices=False)[:, 0]
            if self.num_segments == 1
            else jnp.take_along_axis(x, row[:, None, None], 1)[:, 0]
            for x in self.arrays
        ]
        return tuple(pad(x, width) for x in picked)


# ------------------------------------------------------------------ entries of many
# Each parameter adds reads of its entries to a program, not computations of keys.
def sample(all_rows: Sequence[Rows]) -> jax.Array:
    """Returns evenly spaced keys, [segments of all rows, count]; all have one count."""
    offset = np.concatenate([rows._sample_offsets() for rows in all_rows])
    arrays = [rows._read_sample() for rows in all_rows]
    return _join_segments(all_rows, np.arange(len(offset)), arrays)._keys(jnp.asarray(offset))


def sample_every(all_rows: Sequence[Rows], stride: int) -> jax.Array:
    """Returns the key of every stride-th entry of each segment, [count] of all segments."""
    segment, offset = _list_places(all_rows, stride)
    arrays = [rows._read_every(stride) for rows in all_rows]
    return _join_segments(all_rows, segment, arrays)._keys(jnp.asarray(offset))


def _list_places(all_rows: Sequence[Rows], stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns every stride-th place: indices of segments, and places in them, both [count]."""
    each = [
        np.arange(0, size, stride, dtype=np.int32) for rows in all_rows for size in rows.num_entries
    ]
    return np.repeat(range(len(each)), [len(x) for x in each]), np.concatenate(each)


def find_tie_ends(
    all_rows: Sequence[Rows], row: jax.Array, key: jax.Array, need: jax.Array
) -> jax.Array:
    """Returns the place in each segment after the need-th tie of a row, int32[segments].

    Args:
      all_rows: their segments follow each other.
      row: int32[segments], the row to read.
      key: [segments], entries with this key are ties.
      need: int32[segments], the number of ties to pass.
    """
    widths = np.concatenate([np.full(rows.num_segments, rows.width, np.int32) for rows in all_rows])
    most = int(widths.max())
    starts = np.cumsum([0, *(rows.num_segments for rows in all_rows)]).tolist()
    arrays = [
        rows._read_row(read_part(row, start, rows.num_segments), most)
        for rows, start in zip(all_rows, starts, strict=False)
    ]
    place = lax.iota(jnp.int32, most)[None]
    offset = (row * widths)[:, None] + place
    segments = _join_segments(all_rows, np.arange(len(widths)), arrays)
    keys = segments._keys(offset)
    ties = (keys == key[:, None].astype(keys.dtype)) & (place < widths[:, None])
    for allowed in (segments.recipe.eligible(segments.arrays), segments._is_entry(offset)):
        ties = ties if allowed is None else ties & allowed
    return row * widths + find_tie(ties, need)


def _join_segments(
    all_rows: Sequence[Rows], segment: np.ndarray, arrays: Sequence[tuple[jax.Array, ...]]
) -> Rows:
    """Returns entries of the segments of many parameters, each as a segment of its own.

    Args:
      all_rows: the segments.
      segment: index of the segment of each entry, [count].
      arrays: arrays of all rows at these entries, [segments of the rows, ...] or [count] together.
    """
    sizes = np.concatenate([rows.num_entries for rows in all_rows])
    is_unpadded = all(rows.sizes is None for rows in all_rows)
    is_all = np.array_equal(segment, np.arange(len(sizes)))
    scalars = map(_join, zip(*[rows.scalars for rows in all_rows], strict=True))
    return Rows(
        arrays=tuple(map(_join, zip(*arrays, strict=True))),
        scalars=tuple(x if is_all else x[segment] for x in scalars),
        starts=np.concatenate([rows.starts for rows in all_rows])[segment],
        recipe=all_rows[0].recipe,
        sizes=None if is_unpadded else tuple(sizes[segment].tolist()),
    )


def _join(x: Sequence[jax.Array]) -> jax.Array:
    return x[0] if len(x) == 1 else jnp.concatenate(x)


def cut_rows(all_ranked: Sequence[Ranked], rows: int, width: int) -> Rows:
    """Cuts parameters into segments of rows, [segments, rows, width].

    Copies several parameters, and those that need padding; one without padding is reshaped.
    """
    counts = [ranked.num_slices for ranked in all_ranked]
    sizes = np.repeat([ranked.slice_size for ranked in all_ranked], counts)

    def cut(values: Sequence[jax.Array]) -> jax.Array:
        if len(values) == 1 and values[0].size == counts[0] * rows * width:
            return values[0].reshape(-1, rows, width)
        flat = [
            pad(x.reshape(ranked.num_slices, ranked.slice_size), rows * width)
            for x, ranked in zip(values, all_ranked, strict=True)
        ]
        return jnp.concatenate(flat).reshape(-1, rows, width)

    def repeat_by_slices(values: Sequence[jax.Array]) -> jax.Array:
        stacked = jnp.stack(values)
        return stacked if max(counts) == 1 else stacked[np.repeat(range(len(counts)), counts)]

    return Rows(
        arrays=tuple(map(cut, zip(*[ranked.arrays for ranked in all_ranked], strict=True))),
        scalars=tuple(
            map(repeat_by_slices, zip(*[ranked.scalars for ranked in all_ranked], strict=True))
        ),
        starts=np.concatenate(
            [np.arange(x.num_slices, dtype=np.int32) * x.slice_size for x in all_ranked]
        ),
        recipe=all_ranked[0].recipe,
        sizes=None if np.all(sizes == rows * width) else tuple(sizes.tolist()),
    )


def pad(x: jax.Array, size: int) -> jax.Array:
    """Pads x[segments, count, ...] with zeros up to a count."""
    if x.shape[1] == size:
        return x
    return jnp.pad(x, [(0, 0), (0, size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


@jax.vmap
def find_tie(ties: jax.Array, need: jax.Array) -> jax.Array:
    """Returns the int32 index after the need-th of ties, bool[width]: by blocks, then in one."""
    width = ties.shape[0]
    block = 1 << (width.bit_length() // 2)
    blocks = jnp.pad(ties, (0, -width % block)).reshape(-1, block)

    def place(counts: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        ends = before + jnp.cumsum(counts)
        passed = ends < need
        return jnp.sum(passed, dtype=jnp.int32), jnp.max(jnp.where(passed, ends, before))

    at, before = place(jnp.sum(blocks, 1, dtype=jnp.int32), need & 0)
    at = jnp.minimum(at, len(blocks) - 1)
    block_ties = lax.dynamic_index_in_dim(blocks, at, keepdims=False)
    return at * block + place(block_ties.astype(jnp.int32), before)[0] + 1


def _broadcast(x: jax.Array | np.ndarray, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts x[segments] to the shape of the entries."""
    return lax.broadcast_in_dim(x, shape, (0,))
