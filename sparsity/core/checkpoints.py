"""Checkpoints by path, whose arrays are read when they are indexed.

Safetensors, npz and Orbax are read layer by layer; flax's msgpack is read at once.
"""

from __future__ import annotations

import functools
import json
import math
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from sparsity.core import extras, trees
from sparsity.core.checks import unique_keys
from sparsity.core.extras import reading
from sparsity.core.trees import PyTree

Index: TypeAlias = tuple[Any, ...]  # of integers, slices, and all else that numpy takes

FORMATS_TEXT = (
    "files that end in .safetensors, .npz, .msgpack, and folders of Orbax, with model.safetensors, "
    "or with model.safetensors.index.json and its shards"
)
DTYPES = {
    "BOOL": "bool", "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "U8": "uint8", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


class LazyArray:
    """An array that is read when it is indexed.

    Args:
      shape: the shape of the array.
      dtype: its dtype, of numpy or of ml_dtypes.
      read: returns the values at an index, which is a tuple.
      file: a file that changes with the values. An array whose file has changed is not read.

    Attributes:
      stamp: name, size and time of the file; `None` without a file.

    Example:
      >>> array = LazyArray((2, 3), np.float32, np.ones((2, 3), np.float32).__getitem__)
      >>> array, array[0].shape, np.asarray(array).shape
      (LazyArray(2x3, float32), (3,), (2, 3))
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        read: Callable[[Index], np.ndarray],
        file: Path | None = None,
    ) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._read, self._file, self.stamp = read, file, _stamp(file)

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    nbytes = property(lambda self: self.size * self.dtype.itemsize)

    def __getitem__(self, index: object) -> np.ndarray:
        if _stamp(self._file) != self.stamp:
            raise ValueError(f"{self._file} has changed since it was opened. Open it again.")
        entries = index if isinstance(index, tuple) else (index,)
        return np.asarray(self._read(() if len(entries) == 1 and entries[0] is ... else entries))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[...], dtype)

    def __repr__(self) -> str:
        return f"LazyArray({trees.shape_text(self.shape)}, {self.dtype})"


class ArrayPlace(NamedTuple):
    """Place of an array in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int  # the first byte


def open_checkpoint(path: str | os.PathLike[str]) -> PyTree:
    """Returns the tree of a checkpoint, whose arrays are read when they are indexed.

    Args:
      path: a file of safetensors, npz or flax's msgpack, a folder of Orbax, or a folder of Hugging
        Face with `model.safetensors`, or with `model.safetensors.index.json` and its shards.

    Returns:
      `{name: LazyArray}` of safetensors and npz, with names as the files state them; the tree of
      Orbax, with `LazyArray` for arrays; the tree of msgpack in memory. An index into a compressed
      member of npz, or one in the order of Fortran, reads that array completely.

    Raises:
      ValueError: the path is missing, damaged or of no known format; a shard is missing, lies
        outside of the folder, or lacks an array; two shards hold one name.
      ImportError: msgpack needs flax, and Orbax needs orbax; the message has the command.

    Example:
      >>> import tempfile
      >>> path = f"{tempfile.mkdtemp()}/model.npz"
      >>> np.savez(path, kernel=np.ones((2, 3), np.float32))
      >>> open_checkpoint(path)["kernel"][0]
      array([1., 1., 1.], dtype=float32)
    """
    return _READERS[find_format(Path(path))](Path(path))


def find_format(path: Path) -> str:
    """Returns the ending of a file, or the name of the file that makes a folder a checkpoint.

    Raises:
      ValueError: the path does not exist, or has no known format.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist. Give the path of a checkpoint.")
    if path.is_file() and path.suffix in _READERS:
        return path.suffix
    for name in _READERS:
        if not name.startswith(".") and (path / name).is_file():
            return name
    remedy = "; of Orbax, name the folder of an item, such as STEP/default" if path.is_dir() else ""
    raise ValueError(f"{path} has no known format. Known are {FORMATS_TEXT}{remedy}.")


def narrow(shape: tuple[int, ...], index: Index) -> tuple[Index, Index]:
    """Splits an index: the entries that choose adjacent values, not negative, and the others.

    Example:
      >>> narrow((4, 5, 6), (-1, slice(2), 0))
      ((3, slice(0, 2, None)), (slice(None, None, None), 0))
    """
    if any(np.ndim(x) for x in index if not isinstance(x, slice)):
        return (), index  # arrays of indices order the axes by all entries
    box: list[int | slice] = []
    for size, entry in zip(shape, index, strict=False):
        if isinstance(entry, slice) and entry.step in (None, 1):
            start, stop, _ = entry.indices(size)
            box.append(slice(start, max(start, stop)))
            return tuple(box), (slice(None), *index[len(box) :])
        if not isinstance(entry, int | np.integer) or isinstance(entry, bool):
            break
        box.append(range(size)[int(entry)])
    return tuple(box), index[len(box) :]


def _locate(place: ArrayPlace, box: Index) -> ArrayPlace:
    """Returns the place of the values that `narrow` chooses."""
    path, shape, dtype, start = place
    for entry in box:
        first = entry.start if isinstance(entry, slice) else entry
        start += first * math.prod(shape[1:]) * dtype.itemsize
        shape = (*([entry.stop - first] if isinstance(entry, slice) else []), *shape[1:])
    return ArrayPlace(path, shape, dtype, start)


def read_part(place: ArrayPlace, index: Index) -> np.ndarray:
    """Returns the values of an array of a file at an index; raises a ValueError if they lack."""
    box, others = narrow(place.shape, index)
    path, shape, dtype, start = _locate(place, box)
    count = math.prod(shape) * dtype.itemsize
    memory = np.empty(count + 64, np.uint8)
    first = -memory.ctypes.data % 64  # jax takes an aligned array without a copy
    with path.open("rb") as file:
        file.seek(start)
        if file.readinto(memory[first : first + count].data) < count:
            raise ValueError(f"{path} ends within an array: it has been cut off. Save it again.")
    array = memory[first : first + count].view(dtype).reshape(shape)
    return array[others] if others else array


def write_part(place: ArrayPlace, index: Index, array: np.ndarray) -> None:
    """Writes values into an array of a file, in place.

    Raises:
      ValueError: the values have another shape, or a dtype that does not fit.
    """
    box, others = narrow(place.shape, index)
    part = _locate(place, box)
    is_adjacent = all(isinstance(x, slice) and x == slice(None) for x in others)
    values = array if is_adjacent else read_part(place, box)
    shape = part.shape if is_adjacent else values[others].shape
    if array.shape != shape or not np.can_cast(array.dtype, part.dtype, "safe"):
        raise ValueError(
            f"{part.path}: values must be {trees.shape_text(shape)} {part.dtype}, got "
            f"{trees.shape_text(array.shape)} {array.dtype}."
        )
    if not is_adjacent:
        values[others] = array
    data = np.asarray(values, part.dtype, order="C").reshape(-1).view(np.uint8).data
    descriptor = os.open(part.path, os.O_WRONLY)
    try:
        write_all(descriptor, data, part.start)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: memoryview, start: int) -> None:
    """Writes bytes at a place of an open file."""
    while len(data):
        count = os.pwrite(descriptor, data, start)
        data, start = data[count:], start + count


def read_header(path: Path) -> dict[str, ArrayPlace]:
    """Returns the places of the arrays of a file of safetensors, each byte of one array."""
    with reading(path), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size - 8 - length
        if size < 0:
            raise ValueError("it ends within its header")
        header = json.loads(file.read(length), object_pairs_hook=unique_keys)
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its metadata are no texts")
        places, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name!r} has the unknown dtype {entry['dtype']!r}")
            shape, dtype = tuple(entry["shape"]), np.dtype(DTYPES[entry["dtype"]])
            if any(type(x) is not int or x < 0 for x in shape):
                raise ValueError(f"{name!r} has the shape {entry['shape']}")
            start, end = end, end + math.prod(shape) * dtype.itemsize
            if entry["data_offsets"] != [start, end]:
                raise ValueError(f"{name!r} is not at bytes {start} to {end} of its data")
            places[name] = ArrayPlace(path, shape, dtype, 8 + length + start)
        if end != size:
            raise ValueError(f"it has {size} bytes of data, not {end}")
    return {name: places[name] for name in header}


def make_header(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[bytes, int]:
    """Returns the first bytes of a file of safetensors, and the number of bytes that follow."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    # Without this format, transformers refuses the file.
    header: dict[str, PyTree] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, x in shapes.items():
        dtype = np.dtype(x.dtype)
        if dtype.name not in codes:
            raise ValueError(f"{name}: safetensors holds no {dtype}. Known are {[*codes]}.")
        start, end = end, end + math.prod(x.shape) * dtype.itemsize
        entry = {"dtype": codes[dtype.name], "shape": [*x.shape], "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _stamp(file: Path | None) -> str | None:
    """Returns the name of a file, its size, and the time of its last change."""
    if file is None:
        return None
    status = file.stat()
    return f"{file.name} {status.st_size} {status.st_mtime_ns}"


def _open_safetensors(path: Path) -> dict[str, LazyArray]:
    return {
        name: LazyArray(x.shape, x.dtype, functools.partial(read_part, x), path)
        for name, x in read_header(path).items()
    }


def _open_shards(folder: Path) -> dict[str, LazyArray]:
    index, remedy = folder / "model.safetensors.index.json", "download it again"
    with reading(index, remedy):
        text = index.read_text(encoding="utf-8")
        names: dict[str, str] = json.loads(text, object_pairs_hook=unique_keys)["weight_map"]
        for shard in dict.fromkeys(names.values()):
            if Path(shard).name != shard:
                raise ValueError(f"it names the file {shard!r}, which is not in its folder")
            if not (folder / shard).is_file():
                raise ValueError(f"it names the file {shard!r}, which {folder} lacks")
    shards = {shard: _open_safetensors(folder / shard) for shard in sorted({*names.values()})}
    with reading(index, remedy):
        arrays = unique_keys(item for shard in shards.values() for item in shard.items())
        for name, shard in names.items():
            if name not in shards[shard]:
                raise ValueError(f"it names {name!r} in {shard!r}, which lacks it")
    return arrays


def _open_npz(path: Path) -> dict[str, LazyArray]:
    with reading(path), zipfile.ZipFile(path) as archive:
        return unique_keys(_open_member(path, archive, x) for x in archive.infolist())


def _open_member(
    path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo
) -> tuple[str, LazyArray]:
    """Returns the name of a member of npz, and its array."""
    name, numpy_format = member.filename.removesuffix(".npy"), np.lib.format
    with archive.open(member) as file, path.open("rb") as raw:
        if file.read(6) != numpy_format.MAGIC_PREFIX:
            raise ValueError(f"{name!r} holds no numbers")
        version = (*file.read(2),)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"{name!r} must have version 1, 2 or 3, not {version}")
        is_first = version == (1, 0)
        read_form = (
            numpy_format.read_array_header_1_0 if is_first else numpy_format.read_array_header_2_0
        )
        shape, is_fortran, dtype = read_form(file)
        raw.seek(member.header_offset + 26)
        lengths = struct.unpack("<HH", raw.read(4))  # of the name and of an extra field
        place = ArrayPlace(
            path, shape, dtype, member.header_offset + 30 + sum(lengths) + file.tell()
        )
        count = math.prod(shape) * dtype.itemsize
        is_direct = not (
            is_fortran or member.compress_type or file.tell() + count != member.file_size
        )

    def read(index: Index) -> np.ndarray:
        if not trees.is_numeric(array):
            remedy = "npz cannot say bfloat16 or float8, safetensors can"
            raise ValueError(f"{path}, {name!r}: dtype {dtype} holds no numbers ({remedy}).")
        if is_direct and _locate(place, narrow(shape, index)[0]).shape != shape:
            return read_part(place, index)
        with reading(path), zipfile.ZipFile(path) as again, again.open(member) as file:
            values = numpy_format.read_array(file, allow_pickle=False)  # with its checksum
        return values[index]

    array = LazyArray(shape, dtype, read, path)
    return name, array


def _open_msgpack(path: Path) -> PyTree:
    serialization = extras.load("flax.serialization", "cli")
    with reading(path):
        return serialization.msgpack_restore(path.read_bytes())


def _open_orbax(path: Path) -> PyTree:
    tensorstore, path = extras.load("tensorstore", "cli"), path.absolute()

    def is_lazy(leaf: PyTree) -> bool:
        # Only Orbax tells random keys from arrays of uint32, and numbers of Python from scalars.
        return trees.is_numeric(leaf) and leaf.shape != () and leaf.dtype != np.uint32

    def open_array(_: trees.KeyPath, leaf: PyTree, value: PyTree) -> PyTree:
        if not is_lazy(leaf):
            return value
        kvstore: dict[str, PyTree] = {"driver": "file", "path": f"{path / leaf.name}/"}
        if (path / "manifest.ocdbt").is_file():
            base = {"driver": "file", "path": f"{path}/"}
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{leaf.name}/"}
        specification = {"driver": "zarr3" if metadata.use_zarr3 else "zarr", "kvstore": kvstore}

        def read(index: Index) -> np.ndarray:
            box, others = narrow(leaf.shape, index)
            with reading(path):
                array = tensorstore.open(specification, open=True, read=True).result()
                values = array[box].read().result() if box else array.read().result()
            return values[others] if others else values

        return LazyArray(tuple(leaf.shape), leaf.dtype, read, path / "_METADATA")

    with reading(path):
        metadata, others = restore_orbax(path, is_lazy)
        return trees.map_matched(open_array, metadata.tree, others)


def restore_orbax(
    path: Path, is_skipped: Callable[[PyTree], bool] = lambda leaf: False
) -> tuple[PyTree, PyTree]:
    """Returns the metadata of a folder of Orbax, and its tree, `...` for what is skipped."""
    orbax = extras.load("orbax.checkpoint", "cli")
    here = orbax.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    with orbax.PyTreeCheckpointer() as checkpointer, jax.enable_x64(True):
        metadata = checkpointer.metadata(path.absolute()).item_metadata
        restore_args = jax.tree.map(
            lambda leaf: here if getattr(leaf, "sharding", None) else orbax.RestoreArgs(),
            metadata.tree,
        )
        item = jax.tree.map(
            lambda leaf: orbax.PLACEHOLDER if is_skipped(leaf) else leaf, metadata.tree
        )
        return metadata, checkpointer.restore(path.absolute(), item=item, restore_args=restore_args)


# By the ending of a file, or by the name of a file in a folder; the first one decides.
_READERS: dict[str, Callable[[Path], PyTree]] = {
    ".safetensors": _open_safetensors,
    ".npz": _open_npz,
    ".msgpack": _open_msgpack,
    "model.safetensors": lambda folder: _open_safetensors(folder / "model.safetensors"),
    "model.safetensors.index.json": _open_shards,
    "_METADATA": _open_orbax,
}
