"""`sparsity diff` compares checkpoints, shows and saves deltas; `sparsity apply` applies them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from pathlib import Path

import numpy as np

from sparsity.cli import checkpoints
from sparsity.cli.inspect import JsonObject, format_bytes
from sparsity.core import extras, trees
from sparsity.finetuning.delta import Delta, have_other_bits

COUNTS = ("kept", "dropped", "grown", "changed", "bits")


def apply(arguments: argparse.Namespace) -> int:
    """Writes a copy of a checkpoint with the changes of a delta."""
    checkpoints.check_target(arguments.source, arguments.target, arguments.overwrite)
    delta = Delta.load(arguments.delta)
    delta = dataclasses.replace(delta, base=checkpoints.filter_names(delta.base, arguments.filter))
    arrays = checkpoints.read_by_name(arguments.source)
    params = {name: np.asarray(array) for name, array in arrays.items()}
    applied = delta.apply(params)
    names = {name for term in delta.terms for name in term.entries if name in delta.base}
    checkpoints.write(arguments.source, arguments.target, {name: applied[name] for name in names})
    print(f"{len(names)} of {len(params)} parameters changed.")
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """Shows which masks and weights changed between two checkpoints, or in a delta."""
    if arguments.new is None:
        return _show_delta(arguments)
    if arguments.save and os.path.lexists(arguments.save):
        raise ValueError(f"{arguments.save} exists. Give another path to --save.")
    pair = [checkpoints.read_by_name(path) for path in (arguments.old, arguments.new)]
    selected = checkpoints.filter_names(pair[0] | pair[1], arguments.filter)
    if arguments.save:
        models = [{name: np.asarray(x[name]) for name in selected if name in x} for x in pair]
        Delta.between(*models).save(arguments.save)
        sizes = [format_bytes(_count_bytes(path)) for path in (arguments.save, arguments.new)]
        print(f"sparsity: delta of {sizes[0]}, checkpoint of {sizes[1]}", file=sys.stderr)
    reports = {name: compare(*(x.get(name) for x in pair)) for name in selected}
    total = {key: sum(report.get(key, 0) for report in reports.values()) for key in COUNTS}
    differing = {
        name: report
        for name, report in reports.items()
        if report["old"] != report["new"] or any(report[key] for key in COUNTS[1:])
    }
    if arguments.json:
        print(json.dumps({"leaves": reports, "total": total}, indent=2))
    elif differing:
        table = extras.make_table(["parameter", "array"], COUNTS)
        for name, report in differing.items():
            types = [report[key] for key in ("old", "new")]
            texts = [
                f"{trees.shape_text(x['shape'])} {x['dtype']}" if x else "nothing" for x in types
            ]
            counts = [f"{report[key]:,}" if key in report else "" for key in COUNTS]
            table.add_row(extras.escape_controls(name), " -> ".join(dict.fromkeys(texts)), *counts)
        table.add_section()
        last = f"{len(differing)} of {len(reports)} parameters differ"
        table.add_row(last, "", *(f"{total[key]:,}" for key in COUNTS))
        print(extras.as_text(table))
    else:
        print(f"No difference in {len(reports)} parameters.")
    return 1 if differing else 0


def compare(*arrays: trees.PyTree) -> JsonObject:
    """Compares two arrays, `None` for a missing one.

    Returns:
      `old` and `new`: the `shape` and `dtype` of each array, `None` for a missing one. For equal
      shapes also counts of entries: `kept` are non-zero in both arrays, `dropped` in the old one
      only, `grown` in the new one only; `changed` are kept with another value. NaN equals NaN.
      `bits` are equal in value, but not in bits, as 0.0 and -0.0.
    """
    old, new = (None if array is None else np.asarray(array) for array in arrays)
    report: JsonObject = {
        role: x if x is None else {"shape": list(x.shape), "dtype": str(x.dtype)}
        for role, x in (("old", old), ("new", new))
    }
    if old is None or new is None or old.shape != new.shape:
        return report
    a, b = old.reshape(-1), new.reshape(-1)
    before, after = a != 0, b != 0
    changed = before & after & (a != b) & ((a == a) | (b == b))
    differs = have_other_bits(a, b) if a.dtype == b.dtype else changed
    bits = differs & (before == after) & ~changed
    masks = (before & after, before & ~after, after & ~before, changed, bits)
    return report | {name: int(mask.sum()) for name, mask in zip(COUNTS, masks, strict=True)}


def _show_delta(arguments: argparse.Namespace) -> int:
    """Prints the entries of a delta by parameter; returns 1 if there are any, else 0."""
    if arguments.save or arguments.json:
        raise ValueError("--save and --json need two checkpoints. See 'sparsity diff --help'.")
    delta = Delta.load(arguments.old)
    selected = checkpoints.filter_names(delta.base, arguments.filter)
    table = extras.make_table(["parameter", "array"], ["weight", "entries", "density", "bytes"])
    for term in delta.terms:
        for name, (indices, values, _) in term.entries.items():
            if name in selected:
                shape, dtype, _ = selected[name]
                array = f"{trees.shape_text(shape)} {dtype}"
                density = f"{values.size / math.prod(shape):.4%}"
                numbers = f"{term.weight:g}", f"{values.size:,}", density
                table.add_row(
                    extras.escape_controls(name),
                    array,
                    *numbers,
                    format_bytes(indices.nbytes + values.nbytes),
                )
    print(f"{extras.as_text(table)}\n{delta}")
    return 1 if delta.nbytes else 0


def _count_bytes(path: Path) -> int:
    """Returns the bytes of a file, or of all files in a folder."""
    return sum(x.stat().st_size for x in [path, *path.rglob("*")] if x.is_file())
