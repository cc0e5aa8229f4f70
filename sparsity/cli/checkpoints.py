"""Checkpoints by path: detects the format, reads lazily, writes a copy completely or not at all.

A format is an entry of `FORMATS`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

from sparsity.cli import msgpack, npz, orbax, safetensors
from sparsity.cli.stored import StoredArray
from sparsity.core import trees
from sparsity.core.files import reading, temporary_folder, writing
from sparsity.core.names import explain_syntax, matches
from sparsity.core.trees import PyTree

T = TypeVar("T")
Changes: TypeAlias = list[tuple[StoredArray, np.ndarray]]  # arrays, each with its new values


@dataclasses.dataclass(frozen=True)
class CheckpointFormat:
    """A format of checkpoints.

    Attributes:
      read: returns the tree of a checkpoint, with a `StoredArray` for each array and `None` for
        other values; may raise any exception that a damaged checkpoint leads to.
      write: `write(source, target, changed)` writes a copy with other values for some arrays.
      find_foreign_files: returns the files of a folder that are not part of the checkpoint.
    """

    read: Callable[[Path], PyTree]
    write: Callable[[Path, Path, Changes], None]
    find_foreign_files: Callable[[Path], list[str]] = lambda path: []


# By the ending of a file, or by the name of a folder's format.
FORMATS: dict[str, CheckpointFormat] = {
    ".safetensors": CheckpointFormat(safetensors.read, safetensors.write),
    ".npz": CheckpointFormat(npz.read, npz.write),
    ".msgpack": CheckpointFormat(msgpack.read, msgpack.write),
    "Orbax": CheckpointFormat(orbax.read, orbax.write, orbax.find_foreign_files),
}
_ENDINGS = [name for name in FORMATS if name.startswith(".")]
FORMATS_TEXT = f"files that end in {', '.join(_ENDINGS)}, and folders of Orbax"


def read(path: Path) -> PyTree:
    """Returns the tree of a checkpoint: a `StoredArray` for each array, and no other values.

    Raises:
      ValueError: the path does not exist, or its checkpoint is damaged or of an unknown format.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist. Give the path of a checkpoint.")
    file_format = _find_format(path)
    with reading(path):
        return file_format.read(path)


def filter_leaves(leaves: Mapping[str, T], key: str | None) -> dict[str, T]:
    """Returns the parameters that a filter names; all without a filter.

    Raises:
      ValueError: the filter names no parameter; the message has the nearest name.
    """
    selected = {name: leaf for name, leaf in leaves.items() if key is None or matches(key, name)}
    if key is not None and not selected:
        closest = difflib.get_close_matches(key, sorted(leaves), n=1, cutoff=0.0)
        hint = f"the nearest of {len(leaves)} is {closest[0]!r}" if closest else "there are none"
        raise ValueError(
            f"--filter {key!r} names no parameter; {hint}. {explain_syntax(key)}"
            "'sparsity inspect' lists them."
        )
    return selected


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raises a ValueError if a copy of a checkpoint cannot be written to a path.

    A copy replaces only a whole checkpoint that is recognised and has the same format.
    """
    exists = os.path.lexists(target)  # links that lead nowhere, too
    if exists and not overwrite:
        raise ValueError(f"{target} exists. Give another path, or --overwrite to replace it.")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{target}: its folder does not exist. Make it first.")
    endings = {path.suffix for path in (source, target)}
    if len(endings) > 1 and not endings.isdisjoint(_ENDINGS):
        raise ValueError(
            f"{target} must have the format of {source}: give a path with the ending "
            f"{source.suffix!r}."
        )
    if target.is_symlink():
        raise ValueError(f"{target} is a link, which is not replaced. Give the path it leads to.")
    source_path, target_path = source.resolve(), target.resolve()
    if source_path != target_path and (
        source_path.is_relative_to(target_path) or target_path.is_relative_to(source_path)
    ):
        raise ValueError(f"{target} and {source} contain one another. Give a path outside.")
    if exists:
        _check_replaced(source, target)
    if source.exists():
        _find_format(source)


def write(source: Path, target: Path, changed: Changes, *, overwrite: bool) -> None:
    """Writes a copy of a checkpoint with other values for some arrays, completely or not at all.

    The copy is written next to the target and moved there when complete. If the process is killed
    while it replaces a folder, the old folder lies in a hidden folder next to the target.
    """
    with writing(target), temporary_folder(target) as folder:
        new, old = folder / f"new{target.suffix}", folder / "old"
        with reading(source):
            _find_format(source).write(source, new, changed)
        check_target(source, target, overwrite)  # again: another program may have written there
        try:
            if target.is_dir():  # no folder takes the place of one that is not empty
                os.rename(target, old)
            os.replace(new, target)
        except BaseException:
            if old.exists() and not target.exists():
                os.rename(old, target)
            raise


def _check_replaced(source: Path, target: Path) -> None:
    """Raises a ValueError unless a path holds a checkpoint like the source, and nothing else."""
    if target.is_dir() and Path.cwd().is_relative_to(target.resolve()):
        raise ValueError(f"{target} contains the current folder. Change to another one first.")
    try:
        if source.is_dir() != target.is_dir():
            raise ValueError("one is a file, the other a folder.")
        read(target)
        if foreign := _find_format(target).find_foreign_files(target):
            raise ValueError(f"it has other files: {trees.listed(foreign)}.")
    except ValueError as error:
        raise ValueError(
            f"{target} is not replaced, for it is no checkpoint like {source}: {error} Give "
            "another path."
        ) from error


def _find_format(path: Path) -> CheckpointFormat:
    if path.is_dir():
        return FORMATS["Orbax"]
    if path.is_file() and path.suffix in FORMATS:
        return FORMATS[path.suffix]
    raise ValueError(f"{path} has no known format. Known are {FORMATS_TEXT}.")
