"""Checkpoints in safetensors: a header in JSON, then the bytes of all arrays.

Read here and not by the package of that name, which maps the whole file into memory. Format:
https://huggingface.co/docs/safetensors, section "Format".
"""

from __future__ import annotations

import json
from pathlib import Path

from sparsity.cli.leaf import StoredLeaf, copy_with, number_dtype

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
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}

write = copy_with


def read(path: Path) -> dict[str, StoredLeaf]:
    """Returns the arrays of a file by their names."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size - 8:
            raise ValueError("its header is cut off")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    leaves = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"array {name!r} has the unknown dtype {entry['dtype']!r}")
        start, stop = entry["data_offsets"]
        leaves[name] = StoredLeaf(
            shape=tuple(entry["shape"]),
            dtype=number_dtype(DTYPES[entry["dtype"]]),
            path=path,
            spans=((8 + length + start, stop - start),),
        )
    return leaves
