"""Checkpoints in safetensors: a header in JSON, then the bytes of all arrays.

The package `safetensors` checks the offsets, sizes, overlaps and holes of a file. The bytes are
read here, because the package returns no float8 arrays. Format:
https://huggingface.co/docs/safetensors, section "Format".
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sparsity.cli.stored import PIECE, StoredArray
from sparsity.core import extras
from sparsity.core.checks import unique_keys

MAX_HEADER = 100_000_000  # bytes, the limit of the package

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


def read(path: Path) -> dict[str, StoredArray]:
    """Returns the arrays of a file by their names."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(path.stat().st_size - 8, MAX_HEADER):
            raise ValueError("its header is cut off, or too long")
        text = file.read(length).decode()
    if not text.startswith("{"):
        raise ValueError("its header is no JSON object")
    entries = json.loads(text, object_pairs_hook=unique_keys)  # the package takes the last of two
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"array {name!r} has the unknown dtype {entry['dtype']!r}")
    with extras.load("safetensors", "cli").safe_open(path, framework="np"):
        pass  # opening a file checks all entries
    leaves = {}
    for name, entry in entries.items():
        offset = 8 + length + entry["data_offsets"][0]
        shape, dtype = tuple(entry["shape"]), np.dtype(DTYPES[entry["dtype"]])
        pieces = functools.partial(_read_pieces, path, offset, math.prod(shape), dtype)
        leaves[name] = StoredArray(path, offset, shape, dtype, pieces)
    return leaves


def write(source: Path, target: Path, changed: list[tuple[StoredArray, np.ndarray]]) -> None:
    """Copies a file with other values for some of its arrays."""
    shutil.copyfile(source, target)
    with target.open("r+b") as file:
        for leaf, values in changed:
            file.seek(leaf.key)
            values.tofile(file)


def _read_pieces(path: Path, offset: int, size: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    for start in range(0, size, PIECE):
        count = min(PIECE, size - start)
        yield np.fromfile(path, dtype, count, offset=offset + start * dtype.itemsize)
