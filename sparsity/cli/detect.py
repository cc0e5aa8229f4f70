"""Detects the patterns of a mask: N:M, blocks, channels, constant fan-in.

Masks are packed to one bit an entry, so that the mask of a large array fits in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

GROUPS = (2, 4, 8, 16, 32)  # the sizes M of the N:M patterns to look for
TILE = 1 << 20  # entries to unpack at once


def find_patterns(bits: np.ndarray, shape: tuple[int, ...]) -> list[str]:
    """Returns the patterns of a mask by the names that `parse_sparsity_type` reads.

    Args:
      bits: [ceil(size / 8)] uint8, the mask as `numpy.packbits` packs it, 1 = kept.
      shape: shape of the mask.

    Returns:
      The channel pattern, if channels are kept or removed as a whole. Otherwise the largest block
      pattern, for each axis the N:M pattern with the smallest N that the number of ones allows, and
      constant fan-in with its largest groups of outputs: along each axis, all axes but the last,
      and all but the first, unless a pattern before implies the groups.
      An empty list for a mask of ones or of zeros.

    Example:
      >>> mask = np.array([[1, 0, 1, 0], [0, 0, 1, 1]])
      >>> find_patterns(np.packbits(mask), (2, 4))
      ['nm_2,4,-1']
    """
    ones = int(np.bitwise_count(bits).sum())
    if ones in (0, math.prod(shape)):
        return []
    patterns = _find_units(bits, shape)
    if patterns and patterns[0].startswith("channel"):
        return patterns
    axes = list(range(-len(shape), 0))
    groups = {axis: _find_groups(bits, shape, axis, ones) for axis in axes}
    patterns += [f"nm_{best[0]},{best[1]},{axis}" for axis, best in groups.items() if best]
    inputs: list[tuple[int, ...]] = [(axis,) for axis in axes]
    inputs += [tuple(axes[:-1]), tuple(axes[1:])] if len(shape) > 2 else []
    # The largest group of outputs that patterns in the list imply, by contracted axis.
    implied = {axis: int(groups[axis] is not None) for axis in axes}
    for contracted in inputs:
        size = _find_fan_in(bits, shape, contracted, ones)
        if size > max(implied[axis] for axis in contracted):
            patterns.append(f"fanin_{size},{','.join(map(str, contracted))}")
            implied[contracted[0]] = max(implied[contracted[0]], size)
    return patterns


def _find_units(bits: np.ndarray, shape: tuple[int, ...]) -> list[str]:
    """Returns the channel pattern of a mask, or its block pattern."""
    steps = [_find_change_step(bits, shape, axis) for axis in range(len(shape))]
    changing_axes = [axis - len(shape) for axis, step in enumerate(steps) if step]
    if len(changing_axes) == 1 and len(shape) > 1:
        return [f"channel_{changing_axes[0]}"]
    rows, columns = [1, *(step or size for step, size in zip(steps, shape, strict=True))][-2:]
    return [f"block_{rows},{columns}"] if rows * columns > 1 else []


def _find_change_step(bits: np.ndarray, shape: tuple[int, ...], axis: int) -> int:
    """Returns the largest step whose multiples are the only places where a mask changes; 0 = none.

    Places are counted along an axis.
    """
    size, width = shape[axis], math.prod(shape[axis + 1 :])
    last_row, step = np.empty(width, np.uint8), 0
    for start, columns, tile in _read_tiles(bits, math.prod(shape[: axis + 1]), width):
        rows = np.concatenate([last_row[None, columns] if start else tile[:1], tile])
        places = (start + np.flatnonzero(np.any(rows[1:] != rows[:-1], axis=1))) % size
        last_row[columns] = tile[-1]
        step = int(np.gcd.reduce(places, initial=step))
        if step == 1:
            break
    return step


def _find_groups(
    bits: np.ndarray, shape: tuple[int, ...], axis: int, ones: int
) -> tuple[int, int] | None:
    """Returns the sparsest N:M pattern of a mask along an axis; on ties the smallest M."""
    size, width = shape[axis], math.prod(shape[len(shape) + axis + 1 :])
    max_counts = {m: 0 for m in GROUPS if size % m == 0}
    # The fullest group has at least the mean number of ones.
    fewest_counts = {m: -(-ones * m // math.prod(shape)) for m in max_counts}
    for _, _, tile in _read_tiles(bits, math.prod(shape) // width, width):
        counts = tile
        for m in max_counts:
            counts = counts[::2] + counts[1::2]
            max_counts[m] = max(max_counts[m], int(counts.max()))
        if all(max_counts[m] > fewest_counts[m] for m in max_counts):
            return None
    candidates = [(n, m) for m, n in max_counts.items() if n == fewest_counts[m] < m]
    return min(candidates, key=lambda nm: (nm[0] / nm[1], nm[1]), default=None)


def _find_fan_in(
    bits: np.ndarray, shape: tuple[int, ...], contracted: tuple[int, ...], ones: int
) -> int:
    """Returns how many neighbouring outputs read the same inputs; 0 without a constant fan-in.

    Where outputs lie on both sides of the inputs, groups divide the axes behind them.
    """
    first_axis = contracted[0] + len(shape)
    outer_size, width = (
        math.prod(shape[:first_axis]),
        math.prod(shape[first_axis + len(contracted) :]),
    )
    outputs = outer_size * width
    if outputs == 1 or ones % outputs:
        return 0
    size = math.prod(shape) // outputs
    counts = np.zeros(width, np.int64)
    for start, columns, tile in _read_tiles(bits, outer_size * size, width):
        end = start + len(tile)
        cuts = np.arange(start // size * size, end, size)  # the first rows of outputs
        sums = np.add.reduceat(tile, np.maximum(cuts - start, 0), axis=0, dtype=np.int64)
        if cuts[0] < start:
            sums[0] += counts[columns]
        is_open = end % size > 0
        if np.any(sums[: len(sums) - is_open] != ones // outputs):
            return 0
        counts[columns] = sums[-1]
    if width == 1:
        return _find_change_step(bits, (outer_size, size), 0) or outer_size
    step = _find_change_step(bits, (outer_size * size, width), 1) or width
    return step if outer_size == 1 else math.gcd(step, width)


def _read_tiles(bits: np.ndarray, rows: int, width: int) -> Iterator[tuple[int, slice, np.ndarray]]:
    """Yields tiles of the mask as a matrix [rows, width]: first row, columns, uint8 entries.

    A tile holds complete groups of 32 rows, and all columns unless bytes divide them.
    """
    step = max(TILE // width // 32, 1) * 32
    for start in range(0, rows, step):
        count = min(step, rows - start)
        part = bits[start * width // 8 : -(-(start + count) * width // 8)]
        if width % 8 or width * 32 <= TILE:
            entries = np.unpackbits(part, count=count * width)
            yield start, slice(None), entries.reshape(count, width)
            continue
        part = part.reshape(count, width // 8)
        for first in range(0, width // 8, TILE // 256):
            last = first + TILE // 256  # or beyond the width, where slices end
            yield start, slice(8 * first, 8 * last), np.unpackbits(part[:, first:last], axis=1)
