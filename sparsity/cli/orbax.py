"""Checkpoints of Orbax: a folder with the tree in `_METADATA` and the arrays in TensorStore.

Here TensorStore reads and writes one array at a time. Orbax itself opens all arrays at once,
reports some failures from other threads, and needs the devices on which an array was. A copy keeps
everything else: shardings, random keys, text, scalars.
Format: https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsity.cli.stored import StoredArray, split_into_pieces
from sparsity.core import extras
from sparsity.core.checks import unique_keys
from sparsity.core.trees import PyTree

ARRAYS = {"jax.Array", "np.ndarray", "scalar"}  # types of values that are arrays
SEQUENCE = 1  # the type of a key that is an index
# Names of files: descriptions, the database of all arrays, the folder of one array.
DESCRIPTIONS = (
    r"(_METADATA|_CHECKPOINT_METADATA|_sharding|_strings\.json|checkpoint|commit_success\.txt"
    r"|array_metadatas/process_\d+)"
)
DATABASE = r"(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/[0-9a-f]{32})"
ZARR = r"(\.zarray|zarr\.json|[c\d./]+)"


class _TreeValue(NamedTuple):
    """A value of the tree: its keys, the name under which it is stored, and its type."""

    keys: tuple[str | int, ...]
    name: str
    type: str


@dataclasses.dataclass(frozen=True)
class ArrayFolder:
    """The place of the arrays of a checkpoint.

    Attributes:
      path: the folder, absolute.
      driver: the driver of TensorStore, 'zarr' or 'zarr3'.
      is_database: whether one OCDBT database holds all arrays, or a folder each array.
      has_zeros: whether chunks of zeros are stored, so that a missing chunk is an error.
    """

    path: Path
    driver: str
    is_database: bool
    has_zeros: bool

    def describe_store(self, name: str = "") -> dict[str, Any]:
        """Returns the specification of the files of an array, or of all arrays."""
        inner = f"{name}/" if name else ""
        if self.is_database:
            base = {"driver": "file", "path": f"{self.path}/"}
            return {"driver": "ocdbt", "base": base, "path": inner}
        return {"driver": "file", "path": f"{self.path}/{inner}"}

    def open(self, name: str, **options: Any) -> Any:
        """Opens an array.

        Raises:
          ValueError: the array is damaged, or its chunks are larger than the array: TensorStore
            ends the process when it allocates memory for a wrong size.
        """
        zeros = {"fill_missing_data_reads": not self.has_zeros}
        spec = {"driver": self.driver, "kvstore": self.describe_store(name)} | zeros
        spec["store_data_equal_to_fill_value"] = True
        array = _tensorstore().open(spec, open=True, **options).result()
        chunk = array.chunk_layout.write_chunk.shape or ()  # None for a scalar
        if any(n > max(size, 1) for n, size in zip(chunk, array.shape, strict=True)):
            raise ValueError(f"the chunks {chunk} of {name!r} are larger than its {array.shape}")
        return array

    def check_chunks(self, name: str, shape: tuple[int, ...], chunk: tuple[int, ...]) -> None:
        """Raises a ValueError if chunks are missing: memory is not taken for a shape that lies."""
        if not self.has_zeros:
            return
        files = _tensorstore().KvStore.open(self.describe_store(name)).result().list().result()
        stored = sum(file not in (b".zarray", b".zattrs", b"zarr.json") for file in files)
        chunks = math.prod(-(-size // n) for size, n in zip(shape, chunk, strict=True))
        if stored < chunks:
            raise ValueError(f"{chunks - stored} of the {chunks} chunks of {name!r} are missing")


def read(path: Path) -> PyTree:
    """Returns the tree of a folder: nested dictionaries of its arrays."""
    folder, entries = _describe(path)
    tree: dict[str | int, PyTree] = {}
    for keys, name, value_type in entries:
        if value_type in ARRAYS:
            array = folder.open(name)
            folder.check_chunks(name, array.shape, array.chunk_layout.write_chunk.shape or ())
            node = tree
            for key in keys[:-1]:
                node = node.setdefault(key, {})
            pieces = functools.partial(_read_pieces, array)
            dtype = array.dtype.numpy_dtype
            node[keys[-1]] = StoredArray(folder.path, name, tuple(array.shape), dtype, pieces)
    return tree


def write(source: Path, target: Path, changed: list[tuple[StoredArray, np.ndarray]]) -> None:
    """Copies the checkpoint in a folder, with other values for some of its arrays."""
    folder, entries = _describe(source)
    copy = dataclasses.replace(folder, path=target.absolute())
    for file in _list_files(folder.path):
        if re.fullmatch(DESCRIPTIONS, file):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder.path / file, target / file)
    tensorstore = _tensorstore()
    context = tensorstore.Context()  # shared, so that writes are seen before they are committed
    old_store = tensorstore.KvStore.open(folder.describe_store()).result()
    new_store = tensorstore.KvStore.open(copy.describe_store(), context=context).result()
    with tensorstore.Transaction() as transaction:
        for entry in entries:
            # '0' comes after '/'.
            inside = tensorstore.KvStore.KeyRange(f"{entry.name}/", f"{entry.name}0")
            for key in old_store.list(inside).result():
                new_store.with_transaction(transaction)[key] = old_store[key]
        for leaf, values in changed:
            array = copy.open(leaf.key, context=context, transaction=transaction)
            array.write(values).result()


def find_foreign_files(path: Path) -> list[str]:
    """Returns the files of a folder that are not part of its checkpoint, by relative path."""
    folder, entries = _describe(path)
    arrays = "|".join(re.escape(entry.name) for entry in entries)
    arrays = DATABASE if folder.is_database else f"({arrays})/{ZARR}"
    return [
        file for file in _list_files(path) if not re.fullmatch(f"{DESCRIPTIONS}|{arrays}", file)
    ]


def _read_pieces(array: Any) -> Iterator[np.ndarray]:
    np.empty((2, *array.shape), array.dtype.numpy_dtype)  # raises; TensorStore ends the process
    yield from split_into_pieces(np.asarray(array.read().result()))


def _list_files(path: Path) -> list[str]:
    """Returns the files of a folder and of its subfolders, relative to the folder."""
    files = (file for file in path.rglob("*") if file.is_symlink() or not file.is_dir())
    return sorted(file.relative_to(path).as_posix() for file in files)


def _describe(path: Path) -> tuple[ArrayFolder, list[_TreeValue]]:
    """Returns the place of the arrays of a folder, and the entries of its tree."""
    path = path.absolute()
    if not (path / "_METADATA").is_file():
        raise ValueError("it has no _METADATA; name the folder of an item, such as STEP/default")
    text = (path / "_METADATA").read_text(encoding="utf-8")
    described = json.loads(text, object_pairs_hook=unique_keys)
    entries = []
    for value in described["tree_metadata"].values():
        parts = [(part["key"], part["key_type"]) for part in value["key_metadata"]]
        name = ".".join(key for key, _ in parts)
        if ".." in name.split("/"):
            raise ValueError(f"the name {name!r} leads out of the folder")
        keys = tuple(int(key) if key_type == SEQUENCE else key for key, key_type in parts)
        entries.append(_TreeValue(keys, name, value["value_metadata"]["value_type"]))
    folder = ArrayFolder(
        path,
        driver="zarr3" if described.get("use_zarr3") else "zarr",
        is_database=(path / "manifest.ocdbt").exists(),
        has_zeros=bool(described.get("store_array_data_equal_to_fill_value")),
    )
    return folder, entries


def _tensorstore() -> ModuleType:
    return extras.load("tensorstore", "cli")
