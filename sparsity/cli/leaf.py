"""Arrays of a checkpoint, read piece by piece where the format allows that."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

PIECE = 1 << 20  # entries of a piece; a multiple of 8, so that packed bits join


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a checkpoint.

    Attributes:
      path: the file or folder.
      key: where the format finds the array in it.
      shape: of the array.
      dtype: of its entries.
      read: returns the pieces, as `pieces` does; may raise whatever a damaged file leads to.
    """

    path: Path
    key: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
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
        """Yields the entries in C order, flat: `PIECE` at a time, fewer in the end.

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


def split(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the pieces of an array."""
    # Of an array in another order, only a piece is copied.
    entries: Any = array.reshape(-1) if array.flags.c_contiguous else array.flat
    yield from (entries[start : start + PIECE] for start in range(0, array.size, PIECE))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns whatever a parser raises into one error that names the file."""
    try:
        yield
    except (ImportError, OSError):
        raise
    except Exception as error:  # damaged bytes reach any line of a parser
        # TensorStore adds many lines that say how it was called.
        what = str(error).partition(" [tensorstore_spec=")[0].rstrip(".") or type(error).__name__
        raise ValueError(
            f"{path} cannot be read: {what}. If it is damaged, save it again."
        ) from error
