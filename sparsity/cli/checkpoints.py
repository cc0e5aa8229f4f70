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
from typing import TypeAlias, TypeVar

import jax
import numpy as np

from sparsity.core import extras, trees
from sparsity.core.checks import unique_keys
from sparsity.core.extras import reading, temporary_folder, writing
from sparsity.core.names import explain_syntax, matches
from sparsity.core.trees import PyTree

T = TypeVar("T")
Load: TypeAlias = Callable[[], np.ndarray]
Format: TypeAlias = tuple[Callable[..., PyTree], Callable[..., None]]  # see `_find_format`
# Dtypes of safetensors that the package does not return to numpy.
FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}


def read(path: Path) -> PyTree:
    """Returns the tree of a checkpoint: a function that loads each array, and no other values.

    Raises:
      ValueError: the path does not exist, or its checkpoint is damaged or of an unknown format; a
        function: the array is damaged, or holds no numbers.
    """
    restore, _ = _find_format(path)
    with reading(path):
        tree, _ = restore(path)

    def defer(key_path: trees.KeyPath, leaf: PyTree) -> Load | None:
        if not callable(leaf) and not trees.is_numeric(leaf):
            return None
        return functools.partial(_load, path, trees.path_string(key_path), leaf)

    return trees.map_matched(defer, tree)


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
        raise ValueError(
            f"--filter {key!r} names no parameter; nearest: {closest}. {explain_syntax(key)}"
        )
    return selected


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raises a ValueError if a copy of a checkpoint cannot be written to a path."""
    _find_format(source)
    ending = source.suffix if source.is_file() else ""
    if os.path.lexists(target):
        if not overwrite:
            raise ValueError(f"{target} exists. Give another path, or --overwrite to replace it.")
        if target.is_symlink() or not target.is_file():
            raise ValueError(f"{target} is not replaced, for it is no file. Give another path.")
    if ending != (target.suffix if target.suffix in FORMATS else ""):
        raise ValueError(f"{target} must have the format of {source}: the ending {ending!r}.")


def write(source: Path, target: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a copy of a checkpoint with other values for some arrays, completely or not at all."""

    def replace(key_path: trees.KeyPath, old: PyTree) -> PyTree:
        new = arrays.get(trees.path_string(key_path))
        if new is None:
            return old
        if isinstance(old, jax.Array):
            return jax.device_put(new, old.sharding)
        return new[()] if isinstance(old, np.generic) else new

    restore, save = _find_format(source)
    with writing(target), temporary_folder(target) as folder, jax.enable_x64(True):
        tree, metadata = restore(source)
        save(folder / "new", trees.map_matched(replace, tree), metadata)
        os.replace(folder / "new", target)


def _find_format(path: Path) -> Format:
    """Returns functions of the format of a path.

    Returns:
      restore: returns a tree, in which a function may stand for an array, and other contents.
      save: writes a path from such a tree, with arrays in place of some functions, and contents.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist. Give the path of a checkpoint.")
    name = "Orbax" if path.is_dir() else path.suffix
    if name not in FORMATS or not (path.is_dir() or path.is_file()):
        raise ValueError(f"{path} has no known format. Known are {FORMATS_TEXT}.")
    return FORMATS[name]


def _load(path: Path, name: str, leaf: PyTree) -> np.ndarray:
    """Returns an array of numbers; raises a ValueError for a damaged one and for others."""
    with reading(path):
        array = np.asarray(leaf() if callable(leaf) else leaf)
        if not trees.is_numeric(array):
            remedy = "npz cannot say bfloat16 or float8, safetensors can"
            raise ValueError(f"{name!r}: dtype {array.dtype} holds no numbers ({remedy})")
    return array


def _restore_safetensors(path: Path) -> tuple[PyTree, PyTree]:
    safetensors = extras.load("safetensors", "cli")
    file = safetensors.safe_open(path, framework="np")
    read_all = functools.cache(lambda: dict(safetensors.deserialize(path.read_bytes())))

    def load(name: str) -> np.ndarray:
        code = file.get_slice(name).get_dtype()
        if code not in FLOAT8:
            return file.get_tensor(name)
        entry = read_all()[name]
        return np.frombuffer(entry["data"], FLOAT8[code]).reshape(entry["shape"])

    return {name: functools.partial(load, name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def _save_safetensors(path: Path, tree: PyTree, metadata: PyTree) -> None:
    arrays = {name: leaf() if callable(leaf) else leaf for name, leaf in tree.items()}
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    extras.load("safetensors.numpy", "cli").save_file(arrays, path, metadata=metadata)


def _restore_npz(path: Path) -> tuple[PyTree, PyTree]:
    def load(name: str) -> PyTree:
        with path.open("rb") as file, np.load(file) as archive:
            return archive[name]

    with path.open("rb") as file, np.load(file) as archive:
        compression = max((member.compress_type for member in archive.zip.infolist()), default=0)
        return {name: functools.partial(load, name) for name in archive.files}, compression


def _save_npz(path: Path, tree: PyTree, compression: int) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, leaf in tree.items():
            array = leaf() if callable(leaf) else leaf
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _restore_msgpack(path: Path) -> tuple[PyTree, PyTree]:
    serialization = extras.load("flax.serialization", "cli")
    return serialization.msgpack_restore(path.read_bytes()), None


def _save_msgpack(path: Path, tree: PyTree, _: PyTree) -> None:
    path.write_bytes(extras.load("flax.serialization", "cli").msgpack_serialize(tree))


def _restore_orbax(path: Path) -> tuple[PyTree, PyTree]:
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


def _save_orbax(path: Path, tree: PyTree, metadata: PyTree) -> None:
    orbax = extras.load("orbax.checkpoint", "cli")
    handler = orbax.PyTreeCheckpointHandler(use_zarr3=metadata.use_zarr3)
    with orbax.Checkpointer(handler) as checkpointer:
        saved = orbax.args.PyTreeSave(tree, custom_metadata=metadata.custom_metadata)
        checkpointer.save(path.absolute(), args=saved)


# By the ending of a file, or by the name of a folder's format.
FORMATS: dict[str, Format] = {
    ".safetensors": (_restore_safetensors, _save_safetensors),
    ".npz": (_restore_npz, _save_npz),
    ".msgpack": (_restore_msgpack, _save_msgpack),
    "Orbax": (_restore_orbax, _save_orbax),
}
FORMATS_TEXT = "files that end in .safetensors, .npz, .msgpack, and folders of Orbax"
