"""Checkpoints of Orbax: a folder, of which a part of one array is read at a time.

TensorStore, on which Orbax rests, reads the arrays: a call of Orbax for each would read the whole
description of the folder each time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparsity.cli import zarr
from sparsity.cli.leaf import PIECE, Leaf, number_dtype, reading
from sparsity.core import extras

# More threads would each keep memory for themselves.
THREADS = {"data_copy_concurrency": {"limit": 1}, "file_io_concurrency": {"limit": 1}}
M_MMAP_THRESHOLD = -3  # of glibc's mallopt


@dataclasses.dataclass(frozen=True)
class OrbaxLeaf(Leaf):
    """An array of a folder.

    Attributes:
      path: the folder.
      key: where the array is in the tree.
      spec: where the folder keeps it, for TensorStore.
    """

    path: Path
    key: tuple[Any, ...]
    spec: dict[str, Any]

    def pieces(self) -> Iterator[np.ndarray]:
        parts = None
        if self.size > PIECE:
            with reading(self.path):
                parts = zarr.stream(self._open(), PIECE * self.dtype.itemsize)
        if parts is None:
            entries = self.load().reshape(-1)
            yield from (entries[start : start + PIECE] for start in range(0, self.size, PIECE))
            return
        while True:
            with reading(self.path):
                part = next(parts, None)
            if part is None:
                return
            yield np.frombuffer(part, self.dtype)

    def load(self) -> np.ndarray:
        with reading(self.path):
            return np.asarray(self._open().read().result())

    def _open(self) -> Any:
        tensorstore = extras.load("tensorstore", "cli")
        return tensorstore.open(self.spec, context=_context(), read=True, open=True).result()


def read(path: Path) -> Any:
    """Returns the tree of a folder; text and what else is no array is `None`."""
    path = path.absolute()
    _give_memory_back()
    if not (path / "_METADATA").is_file():
        raise ValueError("it has no _METADATA; name the folder of an item, such as STEP/default")
    described = json.loads((path / "_METADATA").read_text(encoding="utf-8"))
    driver = "zarr3" if described.get("use_zarr3") else "zarr"

    def leaf(key: tuple[Any, ...], meta: Any) -> OrbaxLeaf | None:
        if not _is_array(meta):
            return None
        stored = {"driver": "file", "path": f"{path}/{meta.name}"}
        if (path / "manifest.ocdbt").exists():
            stored = {"driver": "ocdbt", "base": f"file://{path}/", "path": meta.name}
        spec = {"driver": driver, "kvstore": stored}
        return OrbaxLeaf(tuple(meta.shape), number_dtype(meta.dtype), path, key, spec)

    return jax.tree_util.tree_map_with_path(leaf, _metadata(path))


def write(source: Path, target: Path, changed: list[tuple[Any, np.ndarray]]) -> None:
    """Writes the tree of a folder to another one, with other values for some of its arrays."""
    values = {leaf.key: array for leaf, array in changed}
    ocp = _orbax()

    def as_numpy(meta: Any) -> Any:
        is_scalar = isinstance(meta, ocp.metadata.value.ScalarMetadata)
        return ocp.RestoreArgs(
            restore_type=np.ndarray if _is_array(meta) and not is_scalar else None
        )

    arguments = jax.tree.map(as_numpy, _metadata(source.absolute()))
    old = ocp.PyTreeCheckpointer().restore(source.absolute(), restore_args=arguments)
    new = jax.tree_util.tree_map_with_path(lambda key, array: values.get(key, array), old)
    ocp.PyTreeCheckpointer().save(target.absolute(), new)


def _is_array(meta: Any) -> bool:
    return getattr(meta, "dtype", None) is not None


def _give_memory_back() -> None:
    """Has glibc return what an array took: else it keeps that of several arrays that are freed."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, PIECE)


@functools.cache
def _context() -> Any:
    return extras.load("tensorstore", "cli").Context(THREADS)


def _metadata(path: Path) -> Any:
    return _orbax().PyTreeCheckpointer().metadata(path).item_metadata.tree


def _orbax() -> Any:
    return extras.load("orbax.checkpoint", "cli")
