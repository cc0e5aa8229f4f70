"""Arrays of a checkpoint, read piece by piece where the format allows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from sparsity.core.files import reading

PIECE = 1 << 20  # entries of a piece; a multiple of 8, so that packed bits join


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint.

    Attributes:
      path: the file or folder.
      key: position or name of the array in the file or folder.
      shape: shape of the array.
      dtype: dtype of the entries.
      read: returns the pieces; may raise any exception that a damaged file leads to.
    """

    path: Path
    key: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], Iterable[np.ndarray]]

    def __post_init__(self) -> None:
        if not all(type(n) is int and n >= 0 for n in self.shape):
            raise ValueError(f"{self.key!r} has the shape {self.shape}")
        if self.dtype.kind != "b" and not jnp.issubdtype(self.dtype, np.number):
            raise ValueError(
                f"{self.key!r}: dtype {self.dtype} holds no numbers (npz cannot say bfloat16 or "
                "float8, safetensors can)"
            )

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self.size * self.dtype.itemsize

    def pieces(self) -> Iterator[np.ndarray]:
        """Yields the entries in C order, flat, `PIECE` at a time and fewer at the end.

        Raises:
          ValueError: the file is damaged; its path is named.
        """
        size = 0
        with reading(self.path):
            for piece in self.read():
                size += piece.size
                yield piece
            if size != self.size:
                raise ValueError(f"{self.key!r} has {size} entries, not {self.size}")

    def load(self) -> np.ndarray:
        """Returns the array; raises as `pieces` does."""
        with reading(self.path):
            array, start = np.empty(self.shape, self.dtype), 0
        entries = array.reshape(-1)
        for piece in self.pieces():
            entries[start : start + piece.size] = piece
            start += piece.size
        return array

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """Returns `load()`, so that functions of arrays take checkpoints."""
        return self.load().astype(dtype or self.dtype, copy=False)


def split_into_pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the pieces of an array."""
    # An array in another order is copied piece by piece.
    entries: np.ndarray | np.flatiter[np.ndarray]
    entries = array.reshape(-1) if array.flags.c_contiguous else array.flat
    yield from (entries[start : start + PIECE] for start in range(0, array.size, PIECE))
