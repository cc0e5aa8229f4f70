"""Checkpoints by path: which format one has, reading it lazily, writing a copy at once or not."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import numpy as np

from sparsity.cli import msgpack, npz, orbax, safetensors
from sparsity.cli.leaf import Leaf, reading
from sparsity.core import names, trees
from sparsity.core.trees import PyTree

FORMATS = {".safetensors": safetensors, ".npz": npz, ".msgpack": msgpack}


def read(path: Path) -> PyTree:
    """Returns the tree of a checkpoint with a `Leaf` for each array, and `None` for others.

    Raises:
      ValueError: there is nothing at the path, or it is damaged or of no known format.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist. Give the path of a checkpoint.")
    format_ = _format_of(path)
    with reading(path):
        return format_.read(path)


def leaves_by_name(tree: PyTree) -> dict[str, Leaf]:
    """Returns the leaves of a tree by their paths, joined by '/'."""
    return {trees.path_string(path): leaf for path, leaf in trees.leaves_by_path(tree).items()}


def chosen(known: Iterable[str], key: str | None) -> set[str]:
    """Returns the names of leaves that a filter chooses, all of them without one.

    Raises:
      ValueError: the filter chooses none; the nearest is named.
    """
    known = set(known)
    found = {name for name in known if key is None or names.matches(key, name)}
    if key is not None and not found:
        near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)
        hint = f"the nearest of {len(known)} is {near[0]!r}" if near else "there are none"
        raise ValueError(f"--filter {key!r} names no leaf; {hint}. 'sparsity inspect' lists them.")
    return found


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raises a ValueError if a copy of a checkpoint cannot be written to a path."""
    if target.exists() and not overwrite:
        raise ValueError(f"{target} exists. Give another path, or --overwrite to replace it.")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{target}: its folder does not exist. Make it first.")
    if source.suffix != target.suffix and (source.suffix in FORMATS or target.suffix in FORMATS):
        raise ValueError(
            f"{target} must have the format of {source}: give a path with the ending "
            f"{source.suffix!r}."
        )


def write(source: Path, target: Path, changed: list[tuple[Leaf, np.ndarray]]) -> None:
    """Writes a copy of a checkpoint with other values for some leaves: complete, or not at all."""
    folder = target.absolute().parent
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=folder) as made:
        new = Path(made) / target.name
        _format_of(source).write(source, new, changed)
        if target.is_dir():  # no folder takes the place of one that is not empty
            os.rename(target, Path(made) / "old")
        os.replace(new, target)


def _format_of(path: Path) -> ModuleType:
    if path.is_dir():
        return orbax
    if path.suffix not in FORMATS:
        raise ValueError(
            f"{path} has no known format. Known are files that end in {', '.join(FORMATS)}, and "
            "folders of Orbax."
        )
    return FORMATS[path.suffix]
