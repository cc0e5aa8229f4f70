"""Checkpoints in numpy's npz: a zip archive with a file .npy for each array; never pickle."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparsity.cli.leaf import PIECE, Leaf, number_dtype, reading
from sparsity.core.checks import unique_keys

MAX_RATIO = 1032  # of bytes that deflate makes to those that it reads
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclasses.dataclass(frozen=True)
class NpzLeaf(Leaf):
    """An array of an archive.

    Attributes:
      path: the archive.
      member: name of the file within it.
      fortran_order: whether its entries lie in Fortran's order; it is read at once then.
    """

    path: Path
    member: str
    fortran_order: bool

    def pieces(self) -> Iterator[np.ndarray]:
        with (
            reading(self.path),
            zipfile.ZipFile(self.path) as archive,
            archive.open(self.member) as file,
        ):
            if self.fortran_order:
                entries = np.lib.format.read_array(file, allow_pickle=False).reshape(-1)
                yield from (entries[i : i + PIECE] for i in range(0, self.size, PIECE))
                return
            _read_header(file)
            for start in range(0, self.size, PIECE):
                count = min(PIECE, self.size - start)
                yield np.frombuffer(file.read(count * self.dtype.itemsize), self.dtype, count)


def read(path: Path) -> dict[str, NpzLeaf]:
    """Returns the arrays of an archive by their names."""
    leaves = {}
    with zipfile.ZipFile(path) as archive:
        members = unique_keys((member.filename, member.file_size) for member in archive.infolist())
        if sum(members.values()) > MAX_RATIO * path.stat().st_size:
            raise ValueError("its files cannot be as large as it says")
        for member in members:
            if not member.endswith(".npy"):
                raise ValueError(f"its file {member!r} is no .npy, and pickles are never read")
            with archive.open(member) as file:
                shape, fortran_order, dtype = _read_header(file)
                found = members[member] - file.tell()
            leaf = NpzLeaf(shape, number_dtype(dtype), path, member, fortran_order)
            if leaf.nbytes != found:
                raise ValueError(f"{member!r} has {found} bytes of entries, not {leaf.nbytes}")
            leaves[member.removesuffix(".npy")] = leaf
    return leaves


def write(source: Path, target: Path, changed: list[tuple[Any, np.ndarray]]) -> None:
    """Copies an archive with other values for some of its arrays."""
    values = {leaf.member: array for leaf, array in changed}
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for member in old.infolist():
            made = new.open(copy.copy(member), "w", force_zip64=True)
            with old.open(member) as file, made:
                if member.filename in values:
                    np.lib.format.write_array(made, values[member.filename], allow_pickle=False)
                else:
                    shutil.copyfileobj(file, made)


def _read_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and dtype of a file .npy, which is left where its entries start."""
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"the version {version} of a file .npy is not that of numbers")
    with warnings.catch_warnings(action="ignore"):  # of headers that Python 2 wrote
        return HEADERS[version](file)
