"""`sparsity diff` shows which masks moved and which weights changed between two checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from sparsity.cli import checkpoints
from sparsity.cli.output import JsonObject, print_json, print_table, shape_text
from sparsity.cli.stored import StoredArray

ABOUT = "Show which masks moved and which weights changed between two checkpoints."
EXAMPLES = """\
  sparsity diff before.safetensors after.safetensors
  sparsity diff runs/1/default runs/2/default --json
"""
COUNTS = ("kept", "dropped", "grown", "changed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("old", type=Path, help="a checkpoint")
    parser.add_argument("new", type=Path, help="the checkpoint to compare with it")
    parser.add_argument("--json", action="store_true", help="print JSON, with all leaves")


def run(arguments: argparse.Namespace) -> int:
    """Prints the differences of two checkpoints; returns 1 if there are any, else 0."""
    old, new = (
        checkpoints.leaves_by_name(checkpoints.read(path))
        for path in (arguments.old, arguments.new)
    )
    selected = checkpoints.select(old | new, arguments.filter)
    leaves = {name: compare(old.get(name), new.get(name)) for name in selected}
    total = {key: sum(leaf.get(key, 0) for leaf in leaves.values()) for key in COUNTS}
    differing = {name: leaf for name, leaf in leaves.items() if _differs(leaf)}
    if arguments.json:
        print_json({"leaves": leaves, "total": total})
    elif differing:
        rows = [[name, *_cells(leaf)] for name, leaf in differing.items()]
        last = f"{len(differing)} of {len(leaves)} leaves differ"
        print_table(["leaf", "array", *COUNTS], rows, [last, *_cells(total)], text=2)
    else:
        print(f"No difference in {len(leaves)} leaves.")
    return 1 if differing else 0


def compare(old: StoredArray | None, new: StoredArray | None) -> JsonObject:
    """Compares two arrays; reads both once, piece by piece.

    Returns:
      `old` and `new`: the `shape` and `dtype` of each array, `None` for a missing one. For equal
      shapes also counts of entries: `kept` are non-zero in both arrays, `dropped` in the old one
      only, `grown` in the new one only; `changed` are kept with another value. NaN equals NaN.
    """
    report: JsonObject = {"old": _kind(old), "new": _kind(new)}
    if old is None or new is None or old.shape != new.shape:
        return report
    counts = np.zeros(len(COUNTS), np.int64)
    for a, b in zip(old.pieces(), new.pieces(), strict=True):
        before, after = a != 0, b != 0
        kept = before & after
        changed = kept & (a != b) & ((a == a) | (b == b))
        masks = (kept, before & ~after, after & ~before, changed)
        counts += [np.count_nonzero(mask) for mask in masks]
    return report | dict(zip(COUNTS, counts.tolist(), strict=True))


def _kind(leaf: StoredArray | None) -> JsonObject | None:
    return None if leaf is None else {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def _differs(leaf: JsonObject) -> bool:
    return leaf["old"] != leaf["new"] or any(leaf[key] for key in COUNTS[1:])


def _cells(leaf: JsonObject) -> list[str]:
    return [_change(leaf), *(f"{leaf[key]:,}" if key in leaf else "" for key in COUNTS)]


def _change(leaf: JsonObject) -> str:
    """Returns the shape and dtype of an array, or those of both if they differ."""
    if "old" not in leaf:
        return ""
    kinds = [
        f"{shape_text(kind['shape'])} {kind['dtype']}" if kind else "nothing"
        for kind in (leaf["old"], leaf["new"])
    ]
    return kinds[0] if kinds[0] == kinds[1] else " -> ".join(kinds)
