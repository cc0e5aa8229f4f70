"""Parameters and masks of a run: read from memory or from disk, replaced layer by layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.calibration.store import RunFolder
from sparsity.core import sharding, trees
from sparsity.core.trees import Masks, Params, Path, PyTree
from sparsity.masks import pack_masks

# (axis, index) of each axis that scans take apart.
LayerIndex: TypeAlias = tuple[tuple[int, int], ...]
Place: TypeAlias = tuple[Path, LayerIndex]  # a parameter, or one of its layers
ReadFn: TypeAlias = Callable[
    ..., jax.Array
]  # `read(path, *layers)`, the first layers of leading axes


class Part(NamedTuple):
    """New weights of a parameter or of a layer, and their mask if they were pruned."""

    weights: jax.Array
    mask: jax.Array | None = None


class ModelWeights:
    """Dense and current parameters; arrays of the user stay unchanged unless they are donated.

    Args:
      leaves: the parameters by path: arrays, or objects with a shape and a dtype that read arrays
        by `[index]`, as `open_checkpoint` returns them.
      folder: keeps finished parts; `None` keeps them in memory.
      donated: paths whose arrays may be deleted when they are replaced.

    Attributes:
      parts: new weights and masks by place, until `commit`.
      committed: the places whose parts the folder holds.
    """

    def __init__(
        self, leaves: Mapping[Path, PyTree], folder: RunFolder | None, donated: Iterable[Path] = ()
    ) -> None:
        self.parts: dict[Place, Part] = {}
        self.masks: dict[Path, jax.Array] = {}
        self._dense, self._current, self._folder = leaves, dict(leaves), folder
        self._donated, self._copied = {*donated}, set[Path]()
        self.committed: set[Place] = set()
        self._loaded: dict[tuple[Path, tuple[int, ...]], jax.Array] = {}

    def read_dense(self, path: Path, *layers: int) -> jax.Array:
        """Returns a parameter before pruning, or one of its first layers."""
        leaf = self._dense[path]
        if isinstance(leaf, jax.Array):
            return leaf[layers] if layers else leaf
        if (path, layers) not in self._loaded:
            array = leaf[layers] if layers else leaf[...]
            # Arrays of the user may change later.
            copies = isinstance(leaf, np.ndarray)
            self._loaded[path, layers] = jnp.array(array) if copies else jnp.asarray(array)
        return self._loaded[path, layers]

    def read(self, path: Path, *layers: int) -> jax.Array:
        """Returns a current parameter or one of its first layers, unaffected by later changes."""
        if self._folder is not None:
            placed = {place for place in self.committed if place[0] == path}
            stored = {
                place: self._read_stored(place) for place in placed if overlaps(place, layers)
            }
            return put_parts(self.read_dense, stored | self.parts, path, layers)
        if self._current[path] is self._dense[path] and path not in self._copied:
            return put_parts(self.read_dense, self.parts, path, layers)
        return put_parts(self._read_changed, self.parts, path, layers)

    def _read_changed(self, path: Path, *layers: int) -> jax.Array:
        array = self._current[path]
        return array[layers] if layers else jnp.copy(array)  # a stack changes in place

    def _read_stored(self, place: Place) -> Part:
        assert self._folder is not None
        path, index = place
        stored = self._folder.read(trees.join_names(path), _list_indices(index, self._dense[path]))
        return Part(jnp.asarray(stored))

    def read_place(self, path: Path, index: LayerIndex) -> jax.Array:
        """Returns a parameter before pruning, or one of its layers."""
        layers = [layer for axis, layer in sorted(index)]
        if [axis for axis, _ in sorted(index)] == [*range(len(index))]:
            return self.read_dense(path, *layers)
        return read_layer(self.read_dense(path), index)

    def load(self, params: Params) -> Params:
        """Returns the tree of current parameters in memory."""
        rebuild = trees.split_arrays(params)[1]
        return rebuild([self.read(path) for path in self._current])

    def commit(self) -> None:
        """Takes over all parts, and forgets what was read from files."""
        for (path, index), part in self.parts.items():
            if self._folder is not None:
                indices, name = _list_indices(index, self._dense[path]), trees.join_names(path)
                self._folder.write("model", name, indices, np.asarray(part.weights))
                if part.mask is not None:
                    self._folder.write("masks", name, indices, np.asarray(part.mask))
                self.committed.add((path, index))
            else:
                self._replace(path, index, part)
        self.parts.clear()
        self.forget()

    def forget(self) -> None:
        """Forgets what was read from files."""
        self._loaded.clear()

    def _replace(self, path: Path, index: LayerIndex, part: Part) -> None:
        """Puts a layer into a parameter, in time that does not grow with a stack."""
        dense, mask = self._dense[path], self.masks.get(path)
        if index and path not in self._copied:
            is_donated = path in self._donated and isinstance(dense, jax.Array)
            loaded = self.read_dense(path)
            self._current[path] = loaded if is_donated else jnp.array(loaded, copy=True)
            self._copied.add(path)
        if part.mask is not None:
            if index and mask is None:
                current = self._current[path]
                mask = sharding.place_like(current, sharding.ones_like(current))
            self.masks[path] = _put_layer(mask, part.mask, index)
        self._current[path] = _put_layer(self._current[path], part.weights, index)
        if path in self._donated:
            if not index and isinstance(dense, jax.Array):
                dense.delete()
            self._dense = {**self._dense, path: self._current[path]}

    def make_tree(self, params: Params) -> Params:
        """Returns a tree like `params` of current parameters, or of those in the folder."""
        stored = {} if self._folder is None else self._folder.open("model")
        rebuild = trees.split_arrays(params)[1]
        leaves = [
            stored[trees.join_names(path)] if stored else _copy_numpy(array)
            for path, array in self._current.items()
        ]
        return rebuild(leaves)

    def make_masks(self, params: Params, pack: bool) -> Masks:
        """Returns the tree of masks, `None` for parameters that stay dense."""
        masks: dict[Path, PyTree] = {**self.masks}
        if self._folder is not None:
            stored = self._folder.open("masks")
            masks = {path: stored.get(trees.join_names(path)) for path in self._dense}
        tree = trees.map_matched(lambda path, _: masks.get(trees.path_names(path)), params)
        return pack_masks(tree, params) if pack else tree


def put_parts(
    read: ReadFn, parts: Mapping[Place, Part], path: Path, layers: tuple[int, ...]
) -> jax.Array:
    """Returns a parameter or one of its first layers, with new parts in their places."""
    inner: list[tuple[LayerIndex, jax.Array]] = []
    for (other, index), part in parts.items():
        if other != path or not overlaps((other, index), layers):
            continue
        if not index:  # all of the parameter
            return part.weights[layers] if layers else part.weights
        inner_index = tuple(
            (axis - len(layers), layer) for axis, layer in index if axis >= len(layers)
        )
        if not inner_index:
            return part.weights
        inner.append((inner_index, part.weights))
    array = read(path, *layers)
    for inner_index, weights in inner:
        array = _put(array, weights, inner_index)
    return array


def read_layer(array: PyTree, index: LayerIndex) -> PyTree:
    """Returns a parameter, or one of its layers."""
    return array[_list_indices(index, array)] if index else array


def _list_indices(index: LayerIndex, array: PyTree) -> tuple[int | slice, ...]:
    layers = dict(index)
    return tuple(layers.get(axis, slice(None)) for axis in range(len(array.shape))) if index else ()


def overlaps(place: Place, layers: tuple[int, ...]) -> bool:
    """Returns whether a place has entries among the first layers of its parameter."""
    return all(layers[axis] == layer for axis, layer in place[1] if axis < len(layers))


def _copy_numpy(array: PyTree) -> PyTree:
    return array.copy() if isinstance(array, np.ndarray) else array


def _put_layer(array: jax.Array | None, part: jax.Array, index: LayerIndex) -> jax.Array:
    """Returns an array with a layer replaced in the same memory; no index replaces all of it."""
    if array is None or not index:
        return part
    return _put_in_place(array, part, *zip(*sorted(index), strict=True))


def _put(array: jax.Array, part: jax.Array, index: LayerIndex) -> jax.Array:
    """Returns a copy of an array with a layer replaced."""
    axes, layers = zip(*sorted(index), strict=True)
    starts = [0] * array.ndim
    for axis, layer in zip(axes, layers, strict=True):
        starts[axis] = layer
    return lax.dynamic_update_slice(array, jnp.expand_dims(part, axes).astype(array.dtype), starts)


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _put_in_place(
    array: jax.Array, part: jax.Array, axes: tuple[int, ...], layers: tuple[int, ...]
) -> jax.Array:
    return _put(array, part, tuple(zip(axes, layers, strict=True)))
