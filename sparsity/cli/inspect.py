"""`sparsity inspect` shows the sparsity, the patterns and the bytes of a checkpoint."""

from __future__ import annotations

import argparse
import json
import math
import sys
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from sparsity.cli import checkpoints
from sparsity.core import extras, trees

JsonObject: TypeAlias = dict[str, Any]  # an object of JSON
BYTES = ("dense", "bitmask", "zstd")
GROUPS = (2, 4, 8, 16, 32)  # the sizes M of the N:M patterns to look for


def inspect(arguments: argparse.Namespace) -> int:
    """Shows what a checkpoint holds: sparsity, patterns, bytes."""
    leaves = checkpoints.read_by_name(arguments.path, arguments.filter)
    zstd = None
    try:
        zstd = extras.load("zstandard", "cli")
    except ImportError as error:
        print(f"sparsity: sizes under zstd are left out. {error}", file=sys.stderr)
    reports = {name: describe_array(np.asarray(array), zstd) for name, array in leaves.items()}
    size, nonzeros = (sum(x[key] for x in reports.values()) for key in ("size", "nonzeros"))
    sizes = {form: [x["bytes"][form] for x in reports.values()] for form in BYTES}
    total = {
        "size": size,
        "nonzeros": nonzeros,
        "sparsity": (size - nonzeros) / max(size, 1),
        "bytes": {form: None if None in x else sum(x) for form, x in sizes.items()},
    }
    if arguments.json:
        print(json.dumps({"leaves": reports, "total": total}, indent=2))
        return 0
    table = extras.make_table(["parameter", "shape", "dtype", "patterns"], ["sparsity", *BYTES])
    for name, x in reports.items():
        shape = trees.shape_text(x["shape"])
        table.add_row(
            extras.escape_controls(name),
            shape,
            x["dtype"],
            " ".join(x["patterns"]),
            *_format_numbers(x),
        )
    table.add_section()
    table.add_row("total", f"{size:,}", "", "", *_format_numbers(total))
    print(extras.as_text(table))
    return 0


def describe_array(array: np.ndarray, zstd: ModuleType | None) -> JsonObject:
    """Describes an array.

    Args:
      array: the array.
      zstd: the package `zstandard`, `None` where it is not installed.

    Returns:
      `shape`, `dtype`, `size`, `nonzeros`, `sparsity`, `patterns`, and `bytes`: `dense`; `bitmask`,
      the non-zeros and a bit for each entry; `zstd`, compressed, `None` without the package.
    """
    mask = array != 0
    nonzeros, compressed = int(np.count_nonzero(mask)), None
    if zstd:
        stream, content = zstd.ZstdCompressor().compressobj(), np.asarray(array, order="C")
        compressed = len(stream.compress(content.reshape(-1).view(np.uint8))) + len(stream.flush())
    bitmask = -(-array.size // 8) + nonzeros * array.dtype.itemsize
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "size": array.size,
        "nonzeros": nonzeros,
        "sparsity": (array.size - nonzeros) / max(array.size, 1),
        "patterns": find_patterns(mask),
        "bytes": {"dense": array.nbytes, "bitmask": bitmask, "zstd": compressed},
    }


def format_bytes(count: int | None) -> str:
    """Returns a number of bytes as text for a table, '-' for an unknown one.

    Example:
      >>> format_bytes(999), format_bytes(2_500_000), format_bytes(None)
      ('999 B', '2.50 MB', '-')
    """
    if count is None or count < 1000:
        return "-" if count is None else f"{count} B"
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.2f} {' kMGT'[power]}B"


def _format_numbers(report: JsonObject) -> list[str]:
    return [f"{report['sparsity']:.4f}", *(format_bytes(report["bytes"][form]) for form in BYTES)]


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
    for contracted in inputs:
        size = _find_fan_in(mask, contracted, ones)
        if size > any(groups[axis] for axis in contracted):  # which N:M implies for one output
            patterns.append(f"fanin_{size},{','.join(map(str, contracted))}")
            break
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
