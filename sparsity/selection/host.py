"""Search by numpy, with the masks of `sparsity.selection.search`, for which nothing compiles.

A sample of the keys brackets the threshold. One pass over the entries keeps those above the bracket
and collects those within, about a hundredth; among these the threshold is selected exactly. Where
the bracket misses the threshold, a second pass collects all entries. Short slices are sorted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from sparsity.core import host
from sparsity.core.trees import PyTree
from sparsity.selection.keys import mask_by_sorting, readable_dtype, to_keys
from sparsity.selection.scores import Ranked

_SAMPLE = 1 << 13
_SHORT = 1 << 12  # entries of slices that are sorted, many at a time


def select_on_host(
    all_ranked: Sequence[Ranked], k: Sequence[np.ndarray], *, together: bool
) -> PyTree:
    """Returns the masks of `search.select_by_counting`, for parameters in arrays of numpy.

    Returns `NotImplemented` if only jax computes the scores.
    """
    if not all(ranked.is_on_host for ranked in all_ranked):
        return NotImplemented
    rows = [_Rows.read(ranked) for ranked in all_ranked]
    slices = 1 if together else sum(len(x.mask) for x in rows)
    high, low = (np.broadcast_to(np.asarray(word, np.int64), (slices,)) for word in k)
    counts = (high << 32) | low
    if together:
        _select_best([x.entries(0) for x in rows], counts[0])
    else:
        ends = np.cumsum([len(x.mask) for x in rows])[:-1]
        for x, row_counts in zip(rows, np.split(counts, ends), strict=True):
            x.write_mask(row_counts)
    return [x.ranked.from_slices(x.mask) for x in rows]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Parameter whose slices are rows.

    Attributes:
      ranked: the parameter.
      arrays: the arrays of its scores, [slices, size] each.
      eligible: bool[slices, size]; `None` for all entries.
      mask: uint8[slices, size], to be written.
    """

    ranked: Ranked
    arrays: Sequence[np.ndarray]
    eligible: np.ndarray | None
    mask: np.ndarray

    @classmethod
    def read(cls, ranked: Ranked) -> _Rows:
        arrays: PyTree = [ranked.to_slices(x) for x in ranked.arrays]
        eligible: PyTree = ranked.recipe.eligible(arrays)
        mask = host.empty((ranked.num_slices, ranked.slice_size), np.uint8)
        return cls(ranked, arrays[: ranked.recipe.num_arrays], eligible, mask)

    def write_mask(self, counts: np.ndarray) -> None:
        """Writes the mask of the best entries of each row."""
        if not self.mask.size:
            return
        if self.mask.shape[1] > _SHORT or len(self.mask) == 1:
            for i, count in enumerate(counts):
                _select_best([self.entries(i)], count)
            return
        step = max(1, host.CHUNK // self.mask.shape[1])
        for start in range(0, len(self.mask), step):
            at = slice(start, start + step)
            keys, kept = self.compute_keys(self.arrays, at), counts[at, None]
            eligible = None if self.eligible is None else self.eligible[at]
            if eligible is not None:
                kept = np.minimum(kept, eligible.sum(axis=1, keepdims=True))
                keys = np.where(eligible, keys, np.iinfo(keys.dtype).min)
            self.mask[at] = mask_by_sorting(keys, eligible, kept)

    def entries(self, row: int) -> _Entries:
        """Returns the eligible entries of a row."""
        arrays, mask = [x[row] for x in self.arrays], self.mask[row]
        if self.eligible is None:
            return _Entries(functools.partial(self.compute_keys, arrays), mask)
        index = np.flatnonzero(self.eligible[row])
        mask[:] = 0
        keys = functools.partial(self.compute_keys, [x[index] for x in arrays])
        return _Entries(keys, np.empty(len(index), np.uint8), mask, index)

    def compute_keys(self, arrays: Sequence[np.ndarray], at: slice | np.ndarray) -> np.ndarray:
        """Returns the keys of entries at some places of arrays of the scores."""
        scores = self.ranked.compute_on_host([x[at] for x in arrays])
        return to_keys(scores.astype(readable_dtype(scores.dtype), copy=False))


@dataclasses.dataclass(frozen=True)
class _Entries:
    """Entries that compete, of one row.

    Attributes:
      keys: computes the keys of some entries.
      mask: the mask of the entries, to be written.
      row_mask: the mask of the row, to be written; `None` if all entries of the row compete.
      index: places of the entries in the row.
    """

    keys: Callable[[slice | np.ndarray], np.ndarray]
    mask: np.ndarray
    row_mask: np.ndarray | None = None
    index: np.ndarray | None = None

    def finish(self) -> None:
        """Writes the mask to the row."""
        if self.row_mask is not None:
            self.row_mask[self.index] = self.mask


def _select_best(parts: Sequence[_Entries], count: int) -> None:
    """Writes the masks of the `count` best entries of all parts together."""
    total = sum(len(part.mask) for part in parts)
    if 0 < count < total:
        if total <= _SAMPLE or not _select_within(parts, count, *_bracket(parts, count / total)):
            _select_within(parts, count, -math.inf, math.inf)
    else:
        for part in parts:
            part.mask[:] = count > 0
    for part in parts:
        part.finish()


def _bracket(parts: Sequence[_Entries], share: float) -> tuple[int, int]:
    """Returns two keys that probably bracket the highest `share` of all entries, from a sample."""
    draw, total = np.random.default_rng(0), sum(len(part.mask) for part in parts)
    drawn = [-(-len(part.mask) * _SAMPLE // total) for part in parts]
    sizes = [len(part.mask) for part in parts]
    keys = [x.keys(draw.integers(0, n, m)) for x, n, m in zip(parts, sizes, drawn, strict=True)]
    sample = np.sort(np.concatenate(keys))[::-1]
    spread = 4 * math.sqrt(len(sample) * share * (1 - share)) + 8
    first, last = (round(len(sample) * share + sign * spread) for sign in (-1, 1))
    highest, lowest = np.iinfo(sample.dtype).max, np.iinfo(sample.dtype).min
    low = lowest if last >= len(sample) else int(sample[last])
    return low, highest if first < 0 else int(sample[first])


def _select_within(parts: Sequence[_Entries], count: int, low: float, high: float) -> bool:
    """Selects as `_select_best` if the threshold lies in [low, high]; returns whether it does."""
    above, keys, places = 0, [], []
    for part in parts:
        at_part = []
        for at in host.chunks(len(part.mask)):
            chunk = part.keys(at)
            kept = np.greater(chunk, high, out=part.mask[at].view(bool))
            above += int(np.count_nonzero(kept))
            # Keys from `low` on that are not above `high`
            inside = np.flatnonzero((chunk >= low) ^ kept)
            keys.append(chunk[inside])
            at_part.append((inside + at.start).astype(np.int32))
        places.append(np.concatenate([*at_part, np.zeros(0, np.int32)]))
    inside_keys = np.concatenate(keys)
    need = count - above
    # The sample was wrong: the threshold lies outside of the bracket.
    if not 0 <= need <= len(inside_keys):
        return False
    kept = mask_by_sorting(inside_keys[None], None, np.array([[need]]))[0]
    for part, index in zip(parts, places, strict=True):
        part.mask[index] = kept[: len(index)]
        kept = kept[len(index) :]
    return True
