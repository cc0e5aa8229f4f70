"""Arrays of a checkpoint, read piece by piece, so that large ones need no more memory."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

PIECE = 1 << 20  # entries that are read at once; a multiple of 8, so that packed bits join


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a checkpoint; a format says how its pieces are read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        if not all(type(n) is int and n >= 0 for n in self.shape):
            raise ValueError(f"an array has the shape {self.shape}")

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self.size * self.dtype.itemsize

    def pieces(self) -> Iterator[np.ndarray]:
        """Yields the entries in C order, flat: `PIECE` at a time, fewer in the end."""
        raise NotImplementedError

    def load(self) -> np.ndarray:
        """Returns the whole array."""
        entries, start = np.empty(self.size, self.dtype), 0
        for piece in self.pieces():
            entries[start : start + piece.size] = piece
            start += piece.size
        return entries.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class StoredLeaf(Leaf):
    """An array that lies in a file as plain bytes.

    Attributes:
      path: the file.
      spans: where its bytes lie, one part after the other: offset and length.
    """

    path: Path
    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        found, end = sum(length for _, length in self.spans), self.path.stat().st_size
        fits = found == self.nbytes and all(start + length <= end for start, length in self.spans)
        if not fits:
            raise ValueError(
                f"an array {self.dtype}{list(self.shape)} does not have its {self.nbytes} bytes"
            )

    def pieces(self) -> Iterator[np.ndarray]:
        with self.path.open("rb") as file:
            for start in range(0, self.nbytes, PIECE * self.dtype.itemsize):
                stop = min(start + PIECE * self.dtype.itemsize, self.nbytes)
                parts = []
                for offset, low, high in self._within(start, stop):
                    file.seek(offset)
                    parts.append(file.read(high - low))
                yield np.frombuffer(b"".join(parts), self.dtype)

    def overwrite(self, path: Path, values: np.ndarray) -> None:
        """Puts other values in the place of this array, in a copy of its file."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        with path.open("r+b") as file:
            for offset, low, high in self._within(0, self.nbytes):
                file.seek(offset)
                file.write(data[low:high].data)

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The parts of the bytes [start, stop) of the array: offset in the file, start and stop."""
        before = 0
        for offset, length in self.spans:
            low, high = max(start, before), min(stop, before + length)
            if low < high:
                yield offset + low - before, low, high
            before += length


def copy_with(source: Path, target: Path, changed: list[tuple[Any, np.ndarray]]) -> None:
    """Copies a file and puts other values in the place of some of its `StoredLeaf`s."""
    shutil.copyfile(source, target)
    for leaf, values in changed:
        leaf.overwrite(target, values)


def number_dtype(name: Any) -> np.dtype[Any]:
    """Returns the dtype of that name, jax's own included; a ValueError if it holds no numbers."""
    try:
        dtype: np.dtype[Any] = jnp.dtype(name)
    except TypeError:
        raise ValueError(f"dtype {name!r} is not known") from None
    if dtype.kind != "b" and not jnp.issubdtype(dtype, np.number):
        raise ValueError(
            f"dtype {dtype} holds no numbers (npz cannot say bfloat16 or float8, safetensors can)"
        )
    return dtype


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever a parser raises into one error that names the file."""
    try:
        yield
    except (ImportError, OSError):
        raise
    except Exception as error:  # damaged bytes reach any line of a parser
        what = str(error).partition(" [tensorstore_spec=")[0] or type(error).__name__
        raise ValueError(
            f"{path} cannot be read: {what.rstrip('.')}. If it is damaged, save it again."
        ) from error
