"""The text of a plan, in JSON: `Plan.to_json` writes it, `Plan.from_json` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sparsity.core import trees
from sparsity.core.checks import unique_keys
from sparsity.core.trees import Path, PyTree
from sparsity.graph.groups import AxisArrays
from sparsity.shrinking.dead import Evidence

_FORMAT = 2


class _StoredParameter(NamedTuple):
    """A parameter in the text of a plan."""

    path: Path
    shape: tuple[int, ...]
    kept: dict[int, np.ndarray]
    evidence: dict[int, list[np.ndarray]]


def write_plan(kept: AxisArrays, shapes: Mapping[Path, tuple[int, ...]], evidence: Evidence) -> str:
    """Returns the text of the plan with these attributes."""
    leaves = [
        {
            "path": list(path),
            "shape": list(shapes[path]),
            "kept": {str(axis): index.tolist() for axis, index in sorted(axes.items())},
            "evidence": {
                str(axis): [row.tolist() for row in rows]
                for axis, rows in sorted(evidence.get(path, {}).items())
            },
        }
        for path, axes in sorted(kept.items())
    ]
    return json.dumps({"format": _FORMAT, "leaves": leaves})


def read_plan(text: str) -> tuple[AxisArrays, Mapping[Path, tuple[int, ...]], Evidence]:
    """Returns `kept`, `shapes` and `evidence` of the plan in a text.

    Raises:
      ValueError, TypeError, RecursionError: the text is not that of a plan.
    """
    stored = json.loads(text, object_pairs_hook=unique_keys)
    if not isinstance(stored, dict) or not isinstance(stored.get("leaves"), list):
        raise ValueError("leaves is not a list")
    if type(stored.get("format")) is not int or stored["format"] != _FORMAT:
        raise ValueError(f"the format is {stored.get('format')!r}, not {_FORMAT}")
    parameters = [_parse_parameter(entry) for entry in stored["leaves"]]
    kept = unique_keys((x.path, x.kept) for x in parameters)
    shapes = {x.path: x.shape for x in parameters}
    return kept, shapes, {x.path: x.evidence for x in parameters}


def _parse_parameter(entry: object) -> _StoredParameter:
    """Reads a parameter in the text of a plan."""
    if not isinstance(entry, dict) or entry.keys() != {"path", "shape", "kept", "evidence"}:
        raise ValueError(f"{entry!r:.80} in leaves must have path, shape, kept, and evidence")
    path, shape = entry["path"], entry["shape"]
    if not isinstance(path, list) or not all(isinstance(name, str) for name in path):
        raise ValueError(f"the path {path!r} is not a list of strings")
    name = trees.join_names(path)
    if not _are_sizes(shape):
        raise ValueError(f"the shape {shape!r} of the parameter {name!r} is not a list of sizes")
    kept, evidence = {}, {}
    for axis, index in _parse_axes(entry["kept"], name, shape).items():
        rows = index if isinstance(index, list) and isinstance((index or [0])[0], list) else [index]
        if not all(map(_are_sizes, rows)) or len(set(map(len, rows))) > 1:
            raise ValueError(
                f"axis {axis} of the parameter {name!r} must keep indices from 0 on, or a list of "
                f"equally many for each layer, got {index!r:.80}"
            )
        kept[axis] = np.array(index, np.int64)
    for axis, rows in _parse_axes(entry["evidence"], name, shape).items():
        if not isinstance(rows, list) or not all(map(_are_sizes, rows)):
            raise ValueError(
                f"evidence for axis {axis} of the parameter {name!r} must list indices for each "
                f"layer, got {rows!r:.80}"
            )
        evidence[axis] = [np.array(row, np.int64) for row in rows]
    return _StoredParameter(tuple(path), tuple(shape), kept, evidence)


def _parse_axes(stored: object, name: str, shape: Sequence[int]) -> dict[int, PyTree]:
    """Returns {axis: value} of a parameter in the text of a plan."""
    if not isinstance(stored, dict):
        raise ValueError(f"the parameter {name!r} has no axes in {stored!r:.80}")
    for axis in stored:
        if axis not in map(str, range(len(shape))):
            raise ValueError(f"the parameter {name!r} of shape {shape} has no axis {axis!r}")
    return {int(axis): value for axis, value in stored.items()}


def _are_sizes(values: object) -> bool:
    """Returns whether `values` is a list of integers that numpy holds, none of them negative."""
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)
