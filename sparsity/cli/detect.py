"""Detects the patterns of a mask: N:M, blocks, channels, constant fan-in."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

GROUPS = (2, 4, 8, 16, 32)  # the sizes M of the N:M patterns to look for
TILE = 1 << 18  # entries to look at between two decisions


def find_patterns(mask: np.ndarray) -> list[str]:
    """Returns the patterns of a mask by the names that `parse_sparsity_type` reads.

    Args:
      mask: bool, True = kept.

    Returns:
      The channel pattern, if channels are kept or removed as a whole. Otherwise the largest block
      pattern, for each axis the N:M pattern with the smallest N that the number of ones allows, and
      constant fan-in with its largest groups of outputs: along each axis, all axes but the last,
      and all but the first, unless a pattern before implies the groups.
      An empty list for a mask of ones or of zeros.

    Example:
      >>> find_patterns(np.array([[1, 0, 1, 0], [0, 0, 1, 1]], bool))
      ['nm_2,4,-1']
    """
    ones = int(np.count_nonzero(mask))
    if ones in (0, mask.size):
        return []
    patterns = _find_units(mask)
    if patterns and patterns[0].startswith("channel"):
        return patterns
    axes = list(range(-mask.ndim, 0))
    groups = {axis: _find_groups(mask, axis, ones) for axis in axes}
    patterns += [f"nm_{best[0]},{best[1]},{axis}" for axis, best in groups.items() if best]
    inputs: list[tuple[int, ...]] = [(axis,) for axis in axes]
    inputs += [tuple(axes[:-1]), tuple(axes[1:])] if mask.ndim > 2 else []
    # The largest group of outputs that patterns in the list imply, by contracted axis.
    implied = {axis: int(groups[axis] is not None) for axis in axes}
    for contracted in inputs:
        size = _find_fan_in(mask, contracted, ones)
        if size > max(implied[axis] for axis in contracted):
            patterns.append(f"fanin_{size},{','.join(map(str, contracted))}")
            implied[contracted[0]] = max(implied[contracted[0]], size)
    return patterns


def _find_units(mask: np.ndarray) -> list[str]:
    """Returns the channel pattern of a mask, or its block pattern."""
    steps = [_find_change_step(mask, axis) for axis in range(mask.ndim)]
    changing_axes = [axis - mask.ndim for axis, step in enumerate(steps) if step]
    if len(changing_axes) == 1 and mask.ndim > 1:
        return [f"channel_{changing_axes[0]}"]
    rows, columns = [1, *(step or size for step, size in zip(steps, mask.shape, strict=True))][-2:]
    return [f"block_{rows},{columns}"] if rows * columns > 1 else []


def _find_change_step(mask: np.ndarray, axis: int) -> int:
    """Returns the largest step whose multiples are the only places where a mask changes; 0 = none.

    Places are counted along an axis, from 0.
    """
    size, step = mask.shape[axis], 0
    rows = mask.reshape(-1, math.prod(mask.shape[axis + 1 :]))
    for start, tile in _read_tiles(rows):
        first, end = max(start, 1), start + len(tile)
        is_change = np.any(rows[first:end] != rows[first - 1 : end - 1], axis=1)
        places = (first + np.flatnonzero(is_change)) % size
        step = int(np.gcd.reduce(places, initial=step))
        if step == 1:
            break
    return step


def _find_groups(mask: np.ndarray, axis: int, ones: int) -> tuple[int, int] | None:
    """Returns the sparsest N:M pattern of a mask along an axis; on ties the smallest M."""
    max_counts = {m: 0 for m in GROUPS if mask.shape[axis] % m == 0}
    # The fullest group has at least the mean number of ones.
    fewest_counts = {m: -(-ones * m // mask.size) for m in max_counts}
    width = math.prod(mask.shape[mask.ndim + axis + 1 :])
    for _, tile in _read_tiles(mask.reshape(-1, width)):
        counts = tile.view(np.uint8)
        for m in max_counts:
            counts = counts[::2] + counts[1::2]
            max_counts[m] = max(max_counts[m], int(counts.max()))
        if all(max_counts[m] > fewest_counts[m] for m in max_counts):
            return None
    candidates = [(n, m) for m, n in max_counts.items() if n == fewest_counts[m] < m]
    return min(candidates, key=lambda nm: (nm[0] / nm[1], nm[1]), default=None)


def _find_fan_in(mask: np.ndarray, contracted: tuple[int, ...], ones: int) -> int:
    """Returns how many neighbouring outputs read the same inputs; 0 without a constant fan-in.

    Where outputs lie on both sides of the inputs, groups divide the axes behind them.
    """
    first_axis = contracted[0] + mask.ndim
    outer_size = math.prod(mask.shape[:first_axis])
    width = math.prod(mask.shape[first_axis + len(contracted) :])
    outputs = outer_size * width
    if outputs == 1 or ones % outputs:
        return 0
    layers = mask.reshape(outer_size, -1, width)
    count = max(TILE * outer_size // mask.size, 1)
    for start in range(0, outer_size, count):
        if np.any(np.count_nonzero(layers[start : start + count], axis=1) != ones // outputs):
            return 0
    if width == 1:
        return _find_change_step(mask.reshape(outer_size, -1), 0) or outer_size
    step = _find_change_step(mask.reshape(-1, width), 1) or width
    return step if outer_size == 1 else math.gcd(step, width)


def _read_tiles(rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields tiles of a mask [rows, columns]: the first row, and complete groups of 32 rows."""
    step = max(TILE // rows.shape[1] // 32, 1) * 32
    for start in range(0, len(rows), step):
        yield start, rows[start : start + step]
