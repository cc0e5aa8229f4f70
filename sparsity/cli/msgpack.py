"""Checkpoints in msgpack as `flax.serialization` writes them: nested maps that hold arrays.

Flax takes a file into memory as a whole: its bytes are mapped, and each array is a copy of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparsity.cli.leaf import Leaf, split
from sparsity.core import extras
from sparsity.core.checks import unique_keys


def read(path: Path) -> Any:
    """Returns the nested maps of a file, with `None` for what is no array."""

    def leaf(key: Any, value: Any) -> Leaf | None:
        if not isinstance(value, np.ndarray | np.generic):
            return None
        pieces = functools.partial(split, np.asarray(value))
        return Leaf(path, key, value.shape, value.dtype, pieces)

    return _map(leaf, _restore(path))


def write(source: Path, target: Path, changed: list[tuple[Leaf, np.ndarray]]) -> None:
    """Writes the maps of a file with other values for some of its arrays."""
    values = {leaf.key: array for leaf, array in changed}

    def value(key: Any, old: Any) -> Any:
        new = values.get(key, old)
        return new[()] if isinstance(old, np.generic) else new

    tree = _map(value, _restore(source))
    target.write_bytes(extras.load("flax.serialization", "cli").msgpack_serialize(tree))


def _map(fn: Callable[[Any, Any], Any], tree: Any) -> Any:
    # A tuple is an extension that flax does not know: a code and bytes.
    is_leaf = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree_util.tree_map_with_path(fn, tree, is_leaf=is_leaf)


def _restore(path: Path) -> dict[Any, Any]:
    serialization = extras.load("flax.serialization", "cli")
    data = np.memmap(path, np.uint8, "r")
    # Flax takes the last of two values with one key.
    skip = {"ext_hook": lambda code, data: None, "strict_map_key": False}
    extras.load("msgpack", "cli").unpackb(data, object_pairs_hook=unique_keys, **skip)
    tree = serialization.msgpack_restore(data)
    if not isinstance(tree, dict):
        raise ValueError("it holds no map of arrays")
    return tree
