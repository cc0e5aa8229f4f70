"""`sparsity diff` shows which masks moved and which weights changed; shows and saves deltas."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

import numpy as np

from sparsity.cli import checkpoints
from sparsity.cli.output import JsonObject, format_bytes, print_json, print_table
from sparsity.core import trees
from sparsity.finetuning.delta import Delta, have_other_bits

ABOUT = "Show which masks moved and which weights changed between two checkpoints, or in a delta."
EXAMPLES = """\
  sparsity diff before.safetensors after.safetensors
  sparsity diff runs/1/default runs/2/default --json
  sparsity diff base.safetensors tuned.safetensors --save delta.safetensors
  sparsity diff delta.safetensors
"""
COUNTS = ("kept", "dropped", "grown", "changed", "bits")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("old", type=Path, help="a checkpoint, or a delta alone")
    parser.add_argument("new", type=Path, nargs="?", help="the checkpoint to compare with it")
    parser.add_argument(
        "--save", metavar="DELTA", type=Path, help="write the changed entries, for 'sparsity apply'"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with all parameters")


def run(arguments: argparse.Namespace) -> int:
    """Prints the differences of two checkpoints, or a delta; returns 1 if there are any, else 0."""
    if arguments.new is None:
        return _show_delta(arguments)
    if arguments.save and os.path.lexists(arguments.save):
        raise ValueError(f"{arguments.save} exists. Give another path to --save.")
    old, new = (checkpoints.read_by_name(path) for path in (arguments.old, arguments.new))
    selected = checkpoints.filter_names(old | new, arguments.filter)
    if arguments.save:
        base, params = ({name: x[name]() for name in selected if name in x} for x in (old, new))
        Delta.between(base, params).save(arguments.save)
        sizes = [_count_bytes(path) for path in (arguments.save, arguments.new)]
        if sizes[0] >= sizes[1]:
            print(
                f"sparsity: {arguments.save} takes {format_bytes(sizes[0])}, "
                f"{arguments.new} itself {format_bytes(sizes[1])}: keep the checkpoint instead",
                file=sys.stderr,
            )
    reports = {
        name: compare(*(x[name]() if name in x else None for x in (old, new))) for name in selected
    }
    total = {key: sum(report.get(key, 0) for report in reports.values()) for key in COUNTS}
    differing = {name: x for name, x in reports.items() if _has_differences(x)}
    if arguments.json:
        print_json({"leaves": reports, "total": total})
    elif differing:
        rows = [[name, *_format_cells(report)] for name, report in differing.items()]
        last = f"{len(differing)} of {len(reports)} parameters differ"
        print_table(
            ["parameter", "array", *COUNTS], rows, [last, *_format_cells(total)], num_text_columns=2
        )
    else:
        print(f"No difference in {len(reports)} parameters.")
    return 1 if differing else 0


def _show_delta(arguments: argparse.Namespace) -> int:
    """Prints the entries of a delta by parameter; returns 1 if there are any, else 0."""
    if arguments.save:
        raise ValueError("--save needs two checkpoints. See 'sparsity diff --help'.")
    try:
        delta = Delta.load(arguments.old)
    except ValueError as error:
        raise ValueError(f"{error} To compare checkpoints, name two.") from error
    selected = checkpoints.filter_names(delta.base, arguments.filter)
    rows: list[JsonObject] = [
        {
            "leaf": name,
            "shape": list(selected[name].shape),
            "dtype": selected[name].dtype,
            "weight": term.weight,
            "entries": entries.values.size,
            "density": entries.values.size / math.prod(selected[name].shape),
            "bytes": entries.indices.nbytes + entries.values.nbytes,
        }
        for term in delta.terms
        for name, entries in term.entries.items()
        if name in selected
    ]
    size = sum(math.prod(parameter.shape) for parameter in selected.values())
    total: JsonObject = {key: sum(row[key] for row in rows) for key in ("entries", "bytes")}
    if arguments.json:
        print_json({"changes": rows, "total": {"leaves": len(selected), "size": size} | total})
    else:
        last = {"leaf": "total", "shape": [size], "density": total["entries"] / max(size, 1)}
        columns = ["parameter", "array", "weight", "entries", "density", "bytes"]
        print_table(
            columns,
            map(_format_delta_cells, rows),
            _format_delta_cells(last | total),
            num_text_columns=2,
        )
    return 1 if rows else 0


def _format_delta_cells(row: JsonObject) -> list[str]:
    return [
        row["leaf"],
        f"{trees.shape_text(row['shape'])} {row.get('dtype', '')}",
        f"{row['weight']:g}" if "weight" in row else "",
        f"{row['entries']:,}",
        f"{row['density']:.4%}",
        format_bytes(row["bytes"]),
    ]


def compare(old: np.ndarray | None, new: np.ndarray | None) -> JsonObject:
    """Compares two arrays.

    Returns:
      `old` and `new`: the `shape` and `dtype` of each array, `None` for a missing one. For equal
      shapes also counts of entries: `kept` are non-zero in both arrays, `dropped` in the old one
      only, `grown` in the new one only; `changed` are kept with another value. NaN equals NaN.
      `bits` are equal in value, but not in bits, as 0.0 and -0.0.
    """
    report: JsonObject = {"old": _describe_type(old), "new": _describe_type(new)}
    if old is None or new is None or old.shape != new.shape:
        return report
    a, b = old.reshape(-1), new.reshape(-1)
    before, after = a != 0, b != 0
    changed = before & after & (a != b) & ((a == a) | (b == b))
    differs = have_other_bits(a, b) if a.dtype == b.dtype else changed
    bits = differs & (before == after) & ~changed
    masks = (before & after, before & ~after, after & ~before, changed, bits)
    return report | {name: int(mask.sum()) for name, mask in zip(COUNTS, masks, strict=True)}


def _count_bytes(path: Path) -> int:
    """Returns the bytes of a file, or of all files in a folder."""
    return sum(x.stat().st_size for x in [path, *path.rglob("*")] if x.is_file())


def _describe_type(array: np.ndarray | None) -> JsonObject | None:
    return None if array is None else {"shape": list(array.shape), "dtype": str(array.dtype)}


def _has_differences(report: JsonObject) -> bool:
    return report["old"] != report["new"] or any(report[key] for key in COUNTS[1:])


def _format_cells(report: JsonObject) -> list[str]:
    """Returns the shape and dtype of an array, or those of both if they differ, and the counts."""
    texts = [
        f"{trees.shape_text(array['shape'])} {array['dtype']}" if array else "nothing"
        for array in (report[key] for key in ("old", "new") if key in report)
    ]
    change = " -> ".join(dict.fromkeys(texts))
    return [change, *(f"{report[key]:,}" if key in report else "" for key in COUNTS)]
