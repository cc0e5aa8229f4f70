"""Checkpoints of the commands: arrays by name, and copies with other values in the same format."""

from __future__ import annotations

import difflib
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias, TypeVar

import jax
import numpy as np

from sparsity.core import extras, trees
from sparsity.core.checkpoints import (
    LazyArray,
    find_format,
    open_checkpoint,
    read_header,
    restore_orbax,
    write_part,
)
from sparsity.core.checks import unique_keys
from sparsity.core.extras import reading, temporary_folder, writing
from sparsity.core.names import explain_syntax, matches
from sparsity.core.trees import PyTree

T = TypeVar("T")
Arrays: TypeAlias = Mapping[str, np.ndarray]  # by name


def read(path: Path) -> PyTree:
    """Returns `open_checkpoint` with `None` for leaves that are no arrays of numbers."""

    def keep(_: trees.KeyPath, leaf: PyTree) -> PyTree:
        return leaf if isinstance(leaf, LazyArray) or trees.is_numeric(leaf) else None

    return trees.map_matched(keep, open_checkpoint(path))


def read_by_name(path: Path, key: str | None = None) -> dict[str, PyTree]:
    """Returns the arrays of `read` by their paths, joined by '/'; those that a filter names."""
    leaves = trees.leaves_by_path(read(path)).items()
    with reading(path):
        named = unique_keys((trees.path_string(key_path), leaf) for key_path, leaf in leaves)
    return filter_names(named, key)


def filter_names(leaves: Mapping[str, T], key: str | None) -> dict[str, T]:
    """Returns the parameters that a filter names; all without a filter.

    Raises:
      ValueError: the filter names no parameter; the message has the nearest name.
    """
    selected = {name: leaf for name, leaf in leaves.items() if key is None or matches(key, name)}
    if key is not None and not selected:
        closest = difflib.get_close_matches(key, sorted(leaves), n=1, cutoff=0.0)
        raise ValueError(
            f"--filter {key!r} names no parameter; nearest: {closest}. {explain_syntax(key)}"
        )
    return selected


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raises a ValueError if a copy of a checkpoint cannot be written to a path."""
    _find_copy(source)
    ending = source.suffix if source.is_file() else ""
    if os.path.lexists(target):
        if not overwrite:
            raise ValueError(f"{target} exists. Give another path, or --overwrite to replace it.")
        if target.is_symlink() or not target.is_file():
            raise ValueError(f"{target} is not replaced, for it is no file. Give another path.")
    if ending != (target.suffix if target.suffix in FORMATS else ""):
        raise ValueError(f"{target} must have the format of {source}: the ending {ending!r}.")


def write(source: Path, target: Path, arrays: Arrays) -> None:
    """Writes a copy of a checkpoint with other values for some arrays, completely or not at all."""
    copy = _find_copy(source)
    with writing(target), temporary_folder(target) as folder:
        copy(source, folder / "new", arrays)
        os.replace(folder / "new", target)


def _find_copy(path: Path) -> Callable[[Path, Path, Arrays], None]:
    """Returns the function of `FORMATS` for a path."""
    name = find_format(path)
    name = "Orbax" if name == "_METADATA" else name
    if name not in FORMATS:
        raise ValueError(f"{path} is not copied as a folder. Give one of its files.")
    return FORMATS[name]


def _copy_safetensors(source: Path, target: Path, arrays: Arrays) -> None:
    shutil.copyfile(source, target)
    places = read_header(target)
    for name, array in arrays.items():
        write_part(places[name], (), array)


def _copy_npz(source: Path, target: Path, arrays: Arrays) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.infolist():
            copied = zipfile.ZipInfo(member.filename)
            copied.compress_type = member.compress_type
            array = arrays.get(member.filename.removesuffix(".npy"))
            with new.open(copied, "w", force_zip64=True) as file, old.open(member) as old_file:
                if array is None:
                    shutil.copyfileobj(old_file, file)
                else:
                    np.lib.format.write_array(file, array, allow_pickle=False)


def _copy_msgpack(source: Path, target: Path, arrays: Arrays) -> None:
    serialization = extras.load("flax.serialization", "cli")
    tree = _replace(serialization.msgpack_restore(source.read_bytes()), arrays)
    target.write_bytes(serialization.msgpack_serialize(tree))


def _copy_orbax(source: Path, target: Path, arrays: Arrays) -> None:
    orbax = extras.load("orbax.checkpoint", "cli")
    metadata, tree = restore_orbax(source)
    handler = orbax.PyTreeCheckpointHandler(use_zarr3=metadata.use_zarr3)
    with orbax.Checkpointer(handler) as checkpointer, jax.enable_x64(True):
        saved = orbax.args.PyTreeSave(
            _replace(tree, arrays), custom_metadata=metadata.custom_metadata
        )
        checkpointer.save(target.absolute(), args=saved)


def _replace(tree: PyTree, arrays: Arrays) -> PyTree:
    """Returns a tree with other arrays at some paths, of the types of the arrays there."""

    def replace(key_path: trees.KeyPath, old: PyTree) -> PyTree:
        new = arrays.get(trees.path_string(key_path))
        if new is None:
            return old
        if isinstance(old, jax.Array):
            return jax.device_put(new, old.sharding)
        return new[()] if isinstance(old, np.generic) else new

    with jax.enable_x64(True):
        return trees.map_matched(replace, tree)


# Functions that copy a checkpoint with other arrays, by the ending of a file.
FORMATS: dict[str, Callable[[Path, Path, Arrays], None]] = {
    ".safetensors": _copy_safetensors,
    ".npz": _copy_npz,
    ".msgpack": _copy_msgpack,
    "Orbax": _copy_orbax,
}
