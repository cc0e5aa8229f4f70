"""Checkpoints in numpy's npz: a zip archive with a file .npy for each array; never pickle."""

from __future__ import annotations

import copy
import functools
import math
import os
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from sparsity.cli.stored import PIECE, StoredArray, split_into_pieces
from sparsity.core.checks import unique_keys

MAX_RATIO = 1032  # the most bytes that deflate expands one byte to
MAX_FILE_COUNT = 0xFFFF  # stands for this number of files and any larger one
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read(path: Path) -> dict[str, StoredArray]:
    """Returns the arrays of an archive by their names."""
    leaves = {}
    with zipfile.ZipFile(path) as archive:
        sizes = unique_keys((member.filename, member.file_size) for member in archive.infolist())
        if sum(sizes.values()) > MAX_RATIO * path.stat().st_size:
            raise ValueError("its files cannot be as large as it says")
        count = _read_file_count(path, archive)
        if count not in (len(sizes), MAX_FILE_COUNT):
            raise ValueError(f"its directory has {len(sizes)} files, not {count}")
        for member, size in sizes.items():
            if not member.endswith(".npy"):
                raise ValueError(f"its file {member!r} is no .npy, and pickles are never read")
            with archive.open(member) as file:
                shape, _, dtype = _read_header(file)
                nbytes = size - file.tell()
            pieces = functools.partial(_read_pieces, path, member)
            leaf = StoredArray(path, member, shape, dtype, pieces)
            if leaf.nbytes != nbytes:
                raise ValueError(f"{member!r} has {nbytes} bytes of entries, not {leaf.nbytes}")
            leaves[member.removesuffix(".npy")] = leaf
    return leaves


def write(source: Path, target: Path, changed: list[tuple[StoredArray, np.ndarray]]) -> None:
    """Copies an archive with other values for some of its arrays."""
    values = {leaf.key: array for leaf, array in changed}
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.infolist():
            new_file = new.open(copy.copy(member), "w", force_zip64=True)
            with old.open(member) as old_file, new_file:
                if member.filename in values:
                    np.lib.format.write_array(new_file, values[member.filename], allow_pickle=False)
                else:
                    shutil.copyfileobj(old_file, new_file)


def _read_pieces(path: Path, member: str) -> Iterator[np.ndarray]:
    with zipfile.ZipFile(path) as archive, archive.open(member) as file:
        shape, fortran_order, dtype = _read_header(file)
        if fortran_order:
            file.seek(0)
            yield from split_into_pieces(np.lib.format.read_array(file, allow_pickle=False))
            return
        size = math.prod(shape)
        for start in range(0, size, PIECE):
            count = min(PIECE, size - start)
            yield np.frombuffer(file.read(count * dtype.itemsize), dtype, count)


def _read_file_count(path: Path, archive: zipfile.ZipFile) -> int:
    """Returns the number of files in the last record of an archive, which `zipfile` ignores."""
    with path.open("rb") as file:
        file.seek(-12 - len(archive.comment), os.SEEK_END)
        return int.from_bytes(file.read(2), "little")


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Reads the header of a .npy file: shape, whether in Fortran order, dtype."""
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"the version {version} of a file .npy is not that of numbers")
    with warnings.catch_warnings(action="ignore"):  # of headers that Python 2 wrote
        return HEADERS[version](file)
