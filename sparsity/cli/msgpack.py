"""Checkpoints in msgpack as `flax.serialization` writes them: nested maps that hold arrays.

Flax reads a complete file: the bytes are mapped into memory, and each array is a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from sparsity.cli.stored import StoredArray, split_into_pieces
from sparsity.core import extras
from sparsity.core.checks import unique_keys
from sparsity.core.trees import KeyPath, PyTree


def read(path: Path) -> PyTree:
    """Returns the nested maps of a file, with `None` for values that are no arrays."""

    def read_leaf(key: KeyPath, value: object) -> StoredArray | None:
        if not isinstance(value, np.ndarray | np.generic):
            return None
        pieces = functools.partial(split_into_pieces, np.asarray(value))
        return StoredArray(path, key, value.shape, value.dtype, pieces)

    return _map_leaves(read_leaf, _restore(path))


def write(source: Path, target: Path, changed: list[tuple[StoredArray, np.ndarray]]) -> None:
    """Writes the maps of a file with other values for some of its arrays."""
    values = {leaf.key: array for leaf, array in changed}

    def replace_value(key: KeyPath, old_value: object) -> object:
        new_value: PyTree = values.get(key, old_value)
        return new_value[()] if isinstance(old_value, np.generic) else new_value

    tree = _map_leaves(replace_value, _restore(source))
    target.write_bytes(extras.load("flax.serialization", "cli").msgpack_serialize(tree))


def _map_leaves(fn: Callable[[KeyPath, object], object], tree: PyTree) -> PyTree:
    # A tuple is an extension that flax does not know: a code and bytes.
    return jax.tree_util.tree_map_with_path(fn, tree, is_leaf=lambda x: isinstance(x, tuple))


def _restore(path: Path) -> PyTree:
    serialization = extras.load("flax.serialization", "cli")
    content = np.memmap(path, np.uint8, "r")
    # Flax takes the last of two values with one key.
    skip = {"ext_hook": lambda code, data: None, "strict_map_key": False}
    extras.load("msgpack", "cli").unpackb(content, object_pairs_hook=unique_keys, **skip)
    tree = serialization.msgpack_restore(content)
    if not isinstance(tree, dict):
        raise ValueError("it holds no map of arrays")
    return tree
