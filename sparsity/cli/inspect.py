"""`sparsity inspect` shows the sparsity, the patterns and the bytes of a checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

from sparsity.cli import checkpoints
from sparsity.cli.detect import find_patterns
from sparsity.cli.output import JsonObject, format_bytes, print_json, print_table
from sparsity.core import extras, trees

ABOUT = "Show what a checkpoint holds: sparsity, patterns, bytes."
EXAMPLES = """\
  sparsity inspect model.safetensors
  sparsity inspect checkpoints/100/default --filter '.*kernel' --json
"""
BYTES = ("dense", "bitmask", "zstd")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("path", type=Path, help="the checkpoint")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints a row for each array of a checkpoint, and their sum."""
    leaves = checkpoints.read_by_name(arguments.path, arguments.filter)
    zstd = _load_zstd()
    reports = {name: describe_array(load(), zstd) for name, load in leaves.items()}
    total = _sum_reports(list(reports.values()))
    if arguments.json:
        print_json({"path": str(arguments.path), "leaves": reports, "total": total})
    else:
        rows = [[name, *_format_cells(report)] for name, report in reports.items()]
        columns = ["parameter", "shape", "dtype", "patterns", "sparsity", *BYTES]
        print_table(columns, rows, ["total", *_format_cells(total)], num_text_columns=4)
    return 0


def _load_zstd() -> ModuleType | None:
    """Returns the package `zstandard`; if it is missing, prints the remedy and returns `None`."""
    try:
        return extras.load("zstandard", "cli")
    except ImportError as error:
        print(f"sparsity: sizes under zstd are left out. {error}", file=sys.stderr)
        return None


def describe_array(array: np.ndarray, zstd: ModuleType | None) -> JsonObject:
    """Describes an array.

    Args:
      array: the array.
      zstd: the package `zstandard`, `None` where it is not installed.

    Returns:
      `shape`, `dtype`, `size`, `nonzeros`, `sparsity`, `patterns`, and `bytes`: `dense`; `bitmask`,
      the non-zeros and a bit for each entry; `zstd`, compressed, `None` without the package.
    """
    nonzeros = int(np.count_nonzero(array))
    if zstd:
        compressor = zstd.ZstdCompressor().compressobj()
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        compressed = len(compressor.compress(content)) + len(compressor.flush())
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "size": array.size,
        "nonzeros": nonzeros,
        "sparsity": _compute_sparsity(nonzeros, array.size),
        "patterns": find_patterns(array != 0),
        "bytes": {
            "dense": array.nbytes,
            "bitmask": -(-array.size // 8) + nonzeros * array.dtype.itemsize,
            "zstd": compressed if zstd else None,
        },
    }


def _sum_reports(reports: list[JsonObject]) -> JsonObject:
    size, nonzeros = (sum(report[key] for report in reports) for key in ("size", "nonzeros"))
    counts = {form: [report["bytes"][form] for report in reports] for form in BYTES}
    return {
        "size": size,
        "nonzeros": nonzeros,
        "sparsity": _compute_sparsity(nonzeros, size),
        "bytes": {
            form: None if None in counts_of_form else sum(counts_of_form)
            for form, counts_of_form in counts.items()
        },
    }


def _compute_sparsity(nonzeros: int, size: int) -> float:
    return (size - nonzeros) / max(size, 1)


def _format_cells(report: JsonObject) -> list[str]:
    return [
        trees.shape_text(report["shape"]) if "shape" in report else f"{report['size']:,}",
        report.get("dtype", ""),
        " ".join(report.get("patterns", [])),
        f"{report['sparsity']:.4f}",
        *(format_bytes(report["bytes"][form]) for form in BYTES),
    ]
