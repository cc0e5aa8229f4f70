"""Arrays on disk: checkpoints that are read slice by slice, and the folder that a run writes.

A folder holds `model.safetensors` and `masks.safetensors`, which grow in place as `*.part` until
the run is finished, and a journal with a line for each finished block.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import extras, trees
from sparsity.core.extras import reading, writing
from sparsity.core.trees import PyTree

Index: TypeAlias = tuple[int | slice, ...]

_CHUNK = 1 << 24  # bytes that are copied at once
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16",
    "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip
_CODES = {name: code for code, name in _DTYPES.items()}


class LazyArray:
    """An array that is read when it is indexed.

    Attributes:
      shape: its shape.
      dtype: its dtype.

    Example:
      >>> array = LazyArray((2, 3), np.float32, lambda index: np.ones((2, 3), np.float32)[index])
      >>> array[0].shape, np.asarray(array).shape
      ((3,), (2, 3))
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, read: Callable[[Index], np.ndarray]
    ) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._read = read

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    nbytes = property(lambda self: self.size * self.dtype.itemsize)

    def __getitem__(self, index: object) -> np.ndarray:
        entries = index if isinstance(index, tuple) else (index,)
        return self._read(() if entries == (...,) else entries)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[...], dtype)

    def __repr__(self) -> str:
        return f"LazyArray({trees.shape_text(self.shape)}, {self.dtype})"


class _Entry(NamedTuple):
    """Place of an array in a file: its shape, dtype and first byte."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int


def open_checkpoint(path: str | os.PathLike[str]) -> PyTree:
    """Returns the tree of a checkpoint, whose arrays are read when they are indexed.

    Args:
      path: a file of safetensors or npz, a folder of Orbax, or a Hugging Face folder with
        `model.safetensors` or `model.safetensors.index.json` and its shards.

    Returns:
      A tree of `LazyArray`: {name: array} of safetensors and npz, the tree of Orbax.

    Raises:
      ValueError: the path is missing, damaged or of no known format, or a shard is missing, lies
        outside of the folder or lacks an array.

    Example:
      >>> import tempfile
      >>> from safetensors.numpy import save_file
      >>> path = f"{tempfile.mkdtemp()}/model.safetensors"
      >>> save_file({"kernel": np.ones((2, 3), np.float32)}, path)
      >>> open_checkpoint(path)["kernel"][0]
      array([1., 1., 1.], dtype=float32)
    """
    path = Path(path)
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if not path.exists():
        raise ValueError(f"{path} does not exist. Give the path of a checkpoint.")
    if index.is_file():
        return _open_shards(path, index)
    if single.is_file():
        return _open_safetensors(single)
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix == ".npz":
        return _open_npz(path)
    if (path / "_METADATA").is_file():
        return _open_orbax(path)
    raise ValueError(
        f"{path} is no checkpoint that is read array by array: give a file that ends in "
        ".safetensors or .npz, a folder with model.safetensors or its index, or the folder of an "
        "item of Orbax, such as STEP/default."
    )


def _open_safetensors(path: Path) -> dict[str, LazyArray]:
    return {name: _make_lazy(path, entry) for name, entry in _read_header(path).items()}


def _make_lazy(path: Path, entry: _Entry) -> LazyArray:
    return LazyArray(entry.shape, entry.dtype, lambda index: _read_slice(path, entry, index))


def _read_header(path: Path) -> dict[str, _Entry]:
    """Returns the places of the arrays of a file of safetensors, and checks its size."""
    with reading(path, "download or save it again"), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if length > size - 8:
            raise ValueError("its header ends after the file")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        entries = {}
        for name, x in header.items():
            shape, dtype = tuple(x["shape"]), np.dtype(jnp.dtype(_DTYPES[x["dtype"]]))
            start, end = x["data_offsets"]
            if end - start != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
                raise ValueError(f"the bytes of {name!r} are not all there")
            entries[name] = _Entry(shape, dtype, 8 + length + start)
    return entries


def _locate(entry: _Entry, index: Index) -> tuple[int, tuple[int, ...], Index]:
    """Returns the first byte of the layers that leading entries choose, their shape, the rest."""
    shape, offset = entry.shape, 0
    entries: list[PyTree] = [*index]
    while entries and shape and isinstance(entries[0], int | np.integer):
        offset = offset * shape[0] + range(shape[0])[int(entries.pop(0))]
        shape = shape[1:]
    start = entry.start + offset * math.prod(shape) * entry.dtype.itemsize
    if entries and shape and isinstance(entries[0], slice) and entries[0].step in (None, 1):
        rows = range(shape[0])[entries[0]]
        entries[0] = slice(None)
        start += rows.start * math.prod(shape[1:]) * entry.dtype.itemsize
        shape = (len(rows), *shape[1:])
    return start, shape, tuple(entries)


def _read_slice(path: Path, entry: _Entry, index: Index) -> np.ndarray:
    start, shape, others = _locate(entry, index)
    count = math.prod(shape) * entry.dtype.itemsize
    memory = np.empty(count + 64, np.uint8)
    first = -memory.ctypes.data % 64  # jax takes an aligned array without a copy
    with path.open("rb") as file:
        file.seek(start)
        if file.readinto(memory[first : first + count].data) < count:
            raise ValueError(f"{path} ends within an array: it has been cut off. Save it again.")
    array = memory[first : first + count].view(entry.dtype).reshape(shape)
    return array[others] if others else array


def _open_shards(folder: Path, index: Path) -> dict[str, LazyArray]:
    with reading(index, "download it again"):
        shards: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    headers = {}
    for shard in sorted({*shards.values()}):
        if Path(shard).name != shard:
            raise ValueError(f"{index} names the file {shard!r}, which is not in its folder.")
        if not (folder / shard).is_file():
            raise ValueError(f"{index} names the file {shard!r}, which {folder} lacks.")
        headers[shard] = _open_safetensors(folder / shard)
    for name, shard in shards.items():
        if name not in headers[shard]:
            raise ValueError(f"{index} names {name!r} in {shard!r}, which lacks this array.")
    return {name: headers[shard][name] for name, shard in shards.items()}


def _open_npz(path: Path) -> dict[str, LazyArray]:
    def load(name: str, index: Index) -> np.ndarray:
        with reading(path), np.load(path) as archive:
            return np.asarray(archive[name][index])

    with reading(path), np.load(path) as archive:
        arrays = {}
        for name in archive.files:
            with archive.zip.open(f"{name}.npy") as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0
                shape, _, dtype = (
                    read if version == (1, 0) else np.lib.format.read_array_header_2_0
                )(file)
            arrays[name] = LazyArray(shape, dtype, functools.partial(load, name))
    return arrays


def _open_orbax(path: Path) -> PyTree:
    orbax = extras.load("orbax.checkpoint", "resume")
    tensorstore = extras.load("tensorstore", "resume")
    with reading(path), orbax.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(path.absolute()).item_metadata
    driver = "zarr3" if metadata.use_zarr3 else "zarr"

    def make(key_path: trees.KeyPath, leaf: PyTree) -> LazyArray:
        name = ".".join(trees.path_names(key_path))
        base = {"driver": "ocdbt", "base": f"file://{path.absolute()}", "path": f"{name}/"}
        file = {"driver": "file", "path": f"{path.absolute()}/{name}/"}
        kvstore = base if (path / "manifest.ocdbt").exists() else file

        def read(index: Index) -> np.ndarray:
            with reading(path):
                array = tensorstore.open({"driver": driver, "kvstore": kvstore}).result()
                return np.asarray(array[index].read().result())

        return LazyArray(tuple(leaf.shape), leaf.dtype, read)

    return trees.map_matched(make, metadata.tree)


class RunFolder:
    """The folder of a run: parameters and masks in place, and a journal of finished blocks.

    Args:
      folder: a new or empty folder, or that of the same run.
      identity: what the results depend on, by name.
      params: the dense parameters by name, which are copied to a new folder.
      masks: the names of the parameters that get a mask.

    Attributes:
      done: the records of the blocks that are finished, by name.

    Raises:
      ValueError: the folder holds another run or other files, or there are several processes.
      OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        identity: Mapping[str, str],
        params: Mapping[str, PyTree],
        masks: list[str],
    ) -> None:
        self._folder = Path(folder).absolute()
        if jax.process_count() > 1:
            raise ValueError(f"out = {folder} serves one process, and there are several.")
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"out = {folder} is a file. Give a new or empty folder.")
        self._journal = self._folder / "journal.jsonl"
        self.done: dict[str, PyTree] = {}
        lines = [*self._read_journal()]
        if not lines:
            shapes = {name: (tuple(x.shape), np.dtype(x.dtype)) for name, x in params.items()}
            self._start(identity, params, shapes, masks)
            lines = [{"identity": dict(identity)}]
        earlier = lines[0]["identity"]
        names = {**earlier, **identity}
        if differing := [name for name in names if earlier.get(name) != identity.get(name)]:
            raise ValueError(
                f"out = {folder} holds another run: its {trees.listed(differing)} differ. Give "
                "another folder, or delete this one to start afresh."
            )
        self.done = {line["block"]: line["record"] for line in lines[1:]}
        self._entries = {kind: _read_header(self._find(kind)) for kind in ("model", "masks")}

    def write(self, kind: str, name: str, index: Index, array: np.ndarray) -> None:
        """Writes an array of 'model' or 'masks', or the part at an index."""
        path, entry = self._find(kind), self._entries[kind][name]
        start, shape, others = _locate(entry, index)
        if others and any(x != slice(None) for x in others):
            start, shape, _ = _locate(entry, ())
            layers = _read_slice(path, entry, ()).copy()
            layers[index] = array
            array = layers
        data = np.ascontiguousarray(array, entry.dtype).reshape(shape)
        with writing(path), path.open("r+b") as file:
            file.seek(start)
            file.write(data.reshape(-1).view(np.uint8).data)
            os.fsync(file.fileno())

    def read(self, name: str, index: Index) -> np.ndarray:
        """Returns a parameter, or the part at an index."""
        return _read_slice(self._find("model"), self._entries["model"][name], index)

    def commit(self, block: str, record: PyTree) -> None:
        """Notes that all parts of a block are written."""
        self._append({"block": block, "record": record})
        self.done[block] = record

    def finish(self) -> None:
        """Gives the files their names."""
        with writing(self._folder):
            for kind in ("model", "masks"):
                if (part := self._folder / f"{kind}.safetensors.part").exists():
                    part.replace(self._folder / f"{kind}.safetensors")

    def open(self, kind: str) -> dict[str, LazyArray]:
        """Returns the arrays of 'model' or 'masks', read when they are indexed."""
        return _open_safetensors(self._find(kind))

    def _find(self, kind: str) -> Path:
        final = self._folder / f"{kind}.safetensors"
        return final if final.exists() else self._folder / f"{kind}.safetensors.part"

    def _read_journal(self) -> Iterator[PyTree]:
        if not self._journal.exists():
            return
        with reading(self._journal, "delete the folder to start afresh"):
            lines = self._journal.read_bytes().splitlines(keepends=True)
            for number, line in enumerate(lines):
                # A kill may leave a part of the last line, whose block is then done again.
                if line.endswith(b"\n"):
                    yield json.loads(line)
                elif number + 1 == len(lines):
                    os.truncate(self._journal, sum(map(len, lines[:-1])))

    def _append(self, line: PyTree) -> None:
        with writing(self._journal), self._journal.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _start(
        self,
        identity: Mapping[str, str],
        params: Mapping[str, PyTree],
        shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
        masks: list[str],
    ) -> None:
        """Writes the dense parameters and empty masks, and then the first line of the journal."""
        ours = {"journal.jsonl", "model.safetensors.part", "masks.safetensors.part"}
        if self._folder.exists() and {x.name for x in self._folder.iterdir()} - ours:
            raise ValueError(f"out = {self._folder} holds other files. Give a new or empty folder.")
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            _preallocate(self._folder / "model.safetensors.part", shapes)
            mask_shapes = {name: (shapes[name][0], np.dtype(np.uint8)) for name in masks}
            _preallocate(self._folder / "masks.safetensors.part", mask_shapes)
        self._entries = {kind: _read_header(self._find(kind)) for kind in ("model", "masks")}
        for name, array in params.items():
            for index in _list_chunks(*shapes[name]):
                part = array[index] if index else array[...]
                self.write("model", name, index, np.asarray(part))
        self._append({"identity": dict(identity)})


def _preallocate(path: Path, shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Makes a file of safetensors of zeros, which takes no space until it is written."""
    header: dict[str, PyTree] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype.name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _list_chunks(shape: tuple[int, ...], dtype: np.dtype) -> list[Index]:
    """Returns indices of the parts that are copied at once."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    if not shape or shape[0] * row_bytes <= _CHUNK:
        return [()]
    size = max(_CHUNK // row_bytes, 1)
    return [(slice(i, min(i + size, shape[0])),) for i in range(0, shape[0], size)]


def copy_metadata(source: PyTree, folder: str | os.PathLike[str]) -> None:
    """Copies the configuration and the tokenizer of a Hugging Face folder, if `source` is one."""
    if not isinstance(source, str | os.PathLike) or not Path(source).is_dir():
        return
    for path in Path(source).iterdir():
        is_index = path.name == "model.safetensors.index.json"
        if path.suffix in (".json", ".txt", ".model", ".jinja") and path.is_file() and not is_index:
            shutil.copyfile(path, Path(folder) / path.name)


def digest(tree: PyTree) -> str:
    """Returns a digest of arrays, numbers and text: equal in every process if these are equal.

    A function counts by its name, an object by its class and attributes, an array on disk by its
    shape, dtype and first entries.
    """
    digester = hashlib.blake2b(digest_size=16)

    def add(x: PyTree) -> None:
        if isinstance(x, Mapping):
            x = [*x.items()]
        if isinstance(x, list | tuple | set | frozenset):
            digester.update(f"{type(x).__name__}{len(x)}".encode())
            for item in x:
                add(item)
        elif hasattr(x, "shape") and hasattr(x, "dtype"):
            digester.update(f"{x.dtype}{tuple(x.shape)}".encode())
            is_lazy = not isinstance(x, jax.Array | np.ndarray) and len(x.shape) > 0
            array = np.asarray(x[(0,) * (len(x.shape) - 1)] if is_lazy and x.shape[0] else x[...])
            digester.update(np.ascontiguousarray(array).tobytes())
        elif x is None or isinstance(x, str | bytes | int | float | complex | np.generic):
            digester.update(f"{type(x).__name__}{x!r}".encode())
        elif callable(x) and hasattr(x, "__qualname__"):
            digester.update(f"{x.__module__}.{x.__qualname__}".encode())
        else:
            digester.update(f"{type(x).__module__}.{type(x).__qualname__}".encode())
            add(sorted(vars(x).items()) if hasattr(x, "__dict__") else repr(type(x)))

    add(tree)
    return digester.hexdigest()
