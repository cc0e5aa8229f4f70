"""Parameters and masks of a run, as they change layer by layer."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import sharding, trees
from sparsity.core.trees import Masks, Params, Path
from sparsity.masks import pack_masks

# (axis, index) of each axis that scans take apart.
LayerIndex: TypeAlias = tuple[tuple[int, int], ...]


class ModelWeights:
    """Current parameters and masks; the user's arrays stay unchanged.

    Args:
      params: tree of parameters.
      paths: the paths of its arrays, in their order.

    Attributes:
      dense: the tree before pruning.
      before: the parameters before pruning, by path.
      current: the current parameters, by path.
    """

    def __init__(self, params: Params, paths: Iterable[Path]) -> None:
        self.dense = params
        arrays, self._rebuild = trees.split_arrays(params)
        self.before: Mapping[Path, jax.Array] = dict(zip(paths, arrays, strict=True))
        self.current: dict[Path, jax.Array] = {**self.before}
        self._masks: dict[Path, jax.Array] = {}
        self._copied: set[Path] = set()  # arrays that change in place: copies of the user's

    def make_tree(self) -> Params:
        """Returns the tree of current parameters, with copies of the user's arrays of numpy."""
        arrays = self.current.values()
        return self._rebuild([x.copy() if isinstance(x, np.ndarray) else x for x in arrays])

    def make_masks(self, pack: bool) -> Masks:
        """Returns the tree of masks, `None` for parameters that stay dense."""
        masks = trees.map_matched(
            lambda path, _: self._masks.get(trees.path_names(path)), self.dense
        )
        return pack_masks(masks, self.dense) if pack else masks

    def read(self, path: Path, *layers: int) -> jax.Array:
        """Returns a parameter or one of its first layers, unaffected by later changes."""
        if layers:
            return self.current[path][layers]
        return jnp.copy(self.current[path]) if path in self._copied else self.current[path]

    def replace(self, path: Path, index: LayerIndex, part: jax.Array) -> None:
        """Puts a layer into a parameter, in time that does not grow with a stack."""
        if index and path not in self._copied:
            self.current[path] = jnp.array(self.current[path], copy=True)
            self._copied.add(path)
        self.current[path] = _put_layer(self.current[path], part, index)

    def replace_mask(self, path: Path, index: LayerIndex, part: jax.Array) -> None:
        """Puts the mask of a layer into the mask of a parameter."""
        mask = self._masks.get(path)
        if index and mask is None:
            like = self.current[path]
            mask = sharding.place_like(like, sharding.ones_like(like))
        self._masks[path] = _put_layer(mask, part, index)


def read_layer(array: jax.Array, index: LayerIndex) -> jax.Array:
    """Returns a parameter, or one of its layers."""
    layers = dict(index)
    return array[tuple(layers.get(axis, slice(None)) for axis in range(array.ndim))]


def _put_layer(array: jax.Array | None, part: jax.Array, index: LayerIndex) -> jax.Array:
    """Returns an array with a layer replaced in the same memory; no index replaces all of it."""
    if array is None or not index:
        return part
    axes, layers = zip(*sorted(index), strict=True)
    return _update_layer(array, part, axes, layers)


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _update_layer(
    array: jax.Array, part: jax.Array, axes: tuple[int, ...], layers: Sequence[int]
) -> jax.Array:
    """Replaces a part, which lacks some ascending axes, at a place along each of these."""
    starts = [0] * array.ndim
    for axis, layer in zip(axes, layers, strict=True):
        starts[axis] = layer
    return lax.dynamic_update_slice(array, jnp.expand_dims(part, axes).astype(array.dtype), starts)
