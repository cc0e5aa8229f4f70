"""Checkpoints by path: each format is read and written by the package that it is from.

A tree of a checkpoint has a function that loads the array in the place of each array. Arrays of
safetensors and npz are read one at a time; flax and Orbax read complete checkpoints.
"""

from __future__ import annotations

import difflib
import functools
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from sparsity.core import extras, trees
from sparsity.core.checks import unique_keys
from sparsity.core.files import reading, temporary_folder, writing
from sparsity.core.names import explain_syntax, matches
from sparsity.core.trees import PyTree

T = TypeVar("T")
Load: TypeAlias = Callable[[], Any]
FLOAT8 = {  # of safetensors, which returns no such arrays to numpy
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


class CheckpointFormat(NamedTuple):
    """A format of checkpoints.

    Attributes:
      read: returns the tree of a checkpoint: a function for each array, `None` for other values.
      write: `write(source, target, arrays)` writes a copy with other values for some arrays, by
        name.
    """

    read: Callable[[Path], PyTree]
    write: Callable[[Path, Path, Mapping[str, np.ndarray]], None]


def read(path: Path) -> PyTree:
    """Returns the tree of a checkpoint: a function that loads each array, and no other values.

    Raises:
      ValueError: the path does not exist, or its checkpoint is damaged or of an unknown format; a
        function: the array is damaged, or holds no numbers.
    """
    file_format = _find_format(path)
    with reading(path):
        tree = file_format.read(path)
    return trees.map_matched(
        lambda key, load: functools.partial(_load, path, trees.path_string(key), load), tree
    )


def read_by_name(path: Path, key: str | None = None) -> dict[str, Load]:
    """Returns the arrays of `read` by their paths, joined by '/'; those that a filter names."""
    leaves = trees.leaves_by_path(read(path)).items()
    with reading(path):
        named = unique_keys((trees.path_string(key_path), load) for key_path, load in leaves)
    return filter_names(named, key)


def filter_names(leaves: Mapping[str, T], key: str | None) -> dict[str, T]:
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
    """Raises a ValueError if a copy of a checkpoint cannot be written to a path."""
    _find_format(source)
    ending = source.suffix if source.is_file() else ""
    if os.path.lexists(target) and not overwrite:  # links that lead nowhere, too
        raise ValueError(f"{target} exists. Give another path, or --overwrite to replace it.")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        raise ValueError(f"{target} is not replaced, for it is no file. Give another path.")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{target}: its folder does not exist. Make it first.")
    if ending != (target.suffix if target.suffix in FORMATS else ""):
        raise ValueError(f"{target} must have the format of {source}: the ending {ending!r}.")


def write(source: Path, target: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a copy of a checkpoint with other values for some arrays, completely or not at all."""
    with writing(target), temporary_folder(target) as folder:
        new = folder / f"new{target.suffix}"
        _find_format(source).write(source, new, arrays)
        os.replace(new, target)


def _find_format(path: Path) -> CheckpointFormat:
    """Returns the format of a checkpoint by its path."""
    if not path.exists():
        raise ValueError(f"{path} does not exist. Give the path of a checkpoint.")
    name = "Orbax" if path.is_dir() else path.suffix
    if name not in FORMATS or not (path.is_dir() or path.is_file()):
        raise ValueError(f"{path} has no known format. Known are {FORMATS_TEXT}.")
    return FORMATS[name]


def _load(path: Path, name: str, load: Load) -> np.ndarray:
    """Returns an array of numbers; raises a ValueError for a damaged one and for others."""
    with reading(path):
        array = np.asarray(load())
        if not trees.is_numeric(array):
            raise ValueError(
                f"{name!r}: dtype {array.dtype} holds no numbers (npz cannot say bfloat16 or "
                "float8, safetensors can)"
            )
    return array


def _defer(tree: PyTree) -> PyTree:
    """Returns a function in the place of each array of numbers, `None` for other values."""
    return jax.tree.map(
        lambda leaf: (lambda: leaf) if trees.is_numeric(leaf) else None,
        tree,
        is_leaf=lambda x: isinstance(x, tuple),  # an extension of msgpack that flax does not know
    )


def _replace(tree: PyTree, arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Returns a tree with other values for some arrays, of the same types."""

    def replace(key_path: trees.KeyPath, old: PyTree) -> PyTree:
        new = arrays.get(trees.path_string(key_path))
        if new is None:
            return old
        if isinstance(old, jax.Array):
            return jax.device_put(new, old.sharding)
        return new[()] if isinstance(old, np.generic) else new

    return trees.map_matched(replace, tree)


def _read_safetensors(path: Path) -> PyTree:
    safetensors = extras.load("safetensors", "cli")
    file = safetensors.safe_open(path, framework="np")
    read_all = functools.cache(lambda: dict(safetensors.deserialize(path.read_bytes())))

    def load(name: str) -> np.ndarray:
        code = file.get_slice(name).get_dtype()
        if code not in FLOAT8:
            return file.get_tensor(name)
        entry = read_all()[name]
        return np.frombuffer(entry["data"], FLOAT8[code]).reshape(entry["shape"])

    return {name: functools.partial(load, name) for name in file.keys()}  # noqa: SIM118


def _write_safetensors(source: Path, target: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with extras.load("safetensors", "cli").safe_open(source, framework="np") as file:
        metadata = file.metadata()
    copies = {
        name: np.asarray(arrays[name] if name in arrays else load(), order="C")
        for name, load in read(source).items()
    }
    extras.load("safetensors.numpy", "cli").save_file(copies, target, metadata=metadata)


def _read_npz(path: Path) -> PyTree:
    def load(name: str) -> Any:
        with path.open("rb") as file, np.load(file) as archive:
            return archive[name]

    with path.open("rb") as file, np.load(file) as archive:
        return {name: functools.partial(load, name) for name in archive.files}


def _write_npz(source: Path, target: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        leaves = read(source)
        for member in old.infolist():
            name = member.filename.removesuffix(".npy")
            copy = zipfile.ZipInfo(member.filename)
            copy.compress_type = member.compress_type
            with new.open(copy, "w", force_zip64=True) as file:
                array = arrays[name] if name in arrays else leaves[name]()
                np.lib.format.write_array(file, array, allow_pickle=False)


def _read_msgpack(path: Path) -> PyTree:
    serialization = extras.load("flax.serialization", "cli")
    return _defer(serialization.msgpack_restore(path.read_bytes()))


def _write_msgpack(source: Path, target: Path, arrays: Mapping[str, np.ndarray]) -> None:
    serialization = extras.load("flax.serialization", "cli")
    tree = _replace(serialization.msgpack_restore(source.read_bytes()), arrays)
    target.write_bytes(serialization.msgpack_serialize(tree))


def _restore_orbax(path: Path) -> tuple[PyTree, Any]:
    """Returns the tree of a folder, with arrays of jax on one device, and its metadata."""
    orbax = extras.load("orbax.checkpoint", "cli")
    if not (path / "_METADATA").is_file():
        raise ValueError("it has no _METADATA; name the folder of an item, such as STEP/default")
    here = orbax.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    with orbax.PyTreeCheckpointer() as checkpointer, jax.enable_x64(True):
        metadata = checkpointer.metadata(path.absolute()).item_metadata
        restore_args = jax.tree.map(
            lambda leaf: here if getattr(leaf, "sharding", None) else orbax.RestoreArgs(),
            metadata.tree,
        )
        return checkpointer.restore(path.absolute(), restore_args=restore_args), metadata


def _read_orbax(path: Path) -> PyTree:
    return _defer(_restore_orbax(path)[0])


def _write_orbax(source: Path, target: Path, arrays: Mapping[str, np.ndarray]) -> None:
    orbax = extras.load("orbax.checkpoint", "cli")
    tree, metadata = _restore_orbax(source)
    handler = orbax.PyTreeCheckpointHandler(use_zarr3=metadata.use_zarr3)
    with orbax.Checkpointer(handler) as checkpointer, jax.enable_x64(True):
        saved = orbax.args.PyTreeSave(
            _replace(tree, arrays), custom_metadata=metadata.custom_metadata
        )
        checkpointer.save(target.absolute(), args=saved)


# By the ending of a file, or by the name of a folder's format.
FORMATS = {
    ".safetensors": CheckpointFormat(_read_safetensors, _write_safetensors),
    ".npz": CheckpointFormat(_read_npz, _write_npz),
    ".msgpack": CheckpointFormat(_read_msgpack, _write_msgpack),
    "Orbax": CheckpointFormat(_read_orbax, _write_orbax),
}
FORMATS_TEXT = "files that end in .safetensors, .npz, .msgpack, and folders of Orbax"
