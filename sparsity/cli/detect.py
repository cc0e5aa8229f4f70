"""Detects the patterns of a mask: N:M, blocks, channels, constant fan-in."""

from __future__ import annotations

import math

import numpy as np

GROUPS = (2, 4, 8, 16, 32)  # the sizes M of the N:M patterns to look for


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
    ones, axes = int(np.count_nonzero(mask)), [*range(-mask.ndim, 0)]
    if ones in (0, mask.size):
        return []
    periods = [_find_period(mask, axis) for axis in axes]
    changing_axes = [axis for axis in axes if periods[axis] < mask.shape[axis]]
    if len(changing_axes) == 1 and mask.ndim > 1:
        return [f"channel_{changing_axes[0]}"]
    rows, columns = [1, *periods][-2:]
    patterns = [f"block_{rows},{columns}"] if rows * columns > 1 else []
    groups = {axis: _find_groups(mask, axis, ones) for axis in axes}
    patterns += [f"nm_{n},{m},{axis}" for axis, pairs in groups.items() for n, m in pairs]
    inputs = [(axis,) for axis in axes]
    inputs += [tuple(axes[:-1]), tuple(axes[1:])] if mask.ndim > 2 else []
    # The largest group of outputs that patterns in the list imply, by contracted axis.
    implied = {axis: len(pairs) for axis, pairs in groups.items()}
    for contracted in inputs:
        size = _find_fan_in(mask, contracted, ones)
        if size > max(implied[axis] for axis in contracted):
            patterns.append(f"fanin_{size},{','.join(map(str, contracted))}")
            implied[contracted[0]] = max(implied[contracted[0]], size)
    return patterns


def _find_period(mask: np.ndarray, axis: int) -> int:
    """Returns the largest step along an axis whose multiples are the only places of changes."""
    other_axes = tuple(x for x in range(-mask.ndim, 0) if x != axis)
    changes = np.flatnonzero(np.any(np.diff(mask, axis=axis), axis=other_axes)) + 1
    return int(np.gcd.reduce(changes)) if changes.size else mask.shape[axis]


def _find_groups(mask: np.ndarray, axis: int, ones: int) -> list[tuple[int, int]]:
    """Returns the sparsest N:M pattern of a mask along an axis, if any; on ties the smallest M."""
    candidates = []
    for m in GROUPS:
        if mask.shape[axis] % m == 0:
            n = int(np.moveaxis(mask, axis, -1).reshape(-1, m).sum(axis=1).max())
            if n == -(-ones * m // mask.size) < m:  # the fullest group has at least the mean
                candidates.append((n, m))
    return sorted(candidates, key=lambda pair: (pair[0] / pair[1], pair[1]))[:1]


def _find_fan_in(mask: np.ndarray, contracted: tuple[int, ...], ones: int) -> int:
    """Returns how many neighbouring outputs read the same inputs; 0 without a constant fan-in.

    Where outputs lie on both sides of the inputs, groups divide the axes behind them.
    """
    first_axis = contracted[0] + mask.ndim
    outer_size = math.prod(mask.shape[:first_axis])
    layers = mask.reshape(outer_size, -1, math.prod(mask.shape[first_axis + len(contracted) :]))
    counts = layers.sum(axis=1)
    if counts.size == 1 or np.any(counts != ones / counts.size):
        return 0
    if layers.shape[2] == 1:
        return _find_period(layers, -3)
    period = _find_period(layers, -1)
    return period if outer_size == 1 else math.gcd(period, layers.shape[2])
