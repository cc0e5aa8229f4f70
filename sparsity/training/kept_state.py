"""Kept entries of masked parameters: gathered, scattered, carried to new masks.

The kept entries of a parameter form an array [*batch, k], where k is the number of slots of a slice
(`sparsity.masks.slice_layout`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from sparsity.core import owners, sharding, trees
from sparsity.core.checks import is_traced
from sparsity.core.dtypes import promote
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.masks.slice_layout import (
    KeptLayout,
    are_set,
    carry_values,
    kept_positions,
    read_words,
    scatter_by_words,
    slots_of_positions,
)

# Trees like the parameters, with `None` where a parameter has no mask; see `PyTree` for their type.
Positions: TypeAlias = PyTree  # int32[*batch, k]
Layouts: TypeAlias = PyTree  # `KeptLayout`
KeptTree: TypeAlias = PyTree  # `KeptParameter`
SlotMaps: TypeAlias = PyTree  # `SlotMap`


class KeptState(NamedTuple):
    """State of an inner optimizer that sees kept entries only.

    Attributes:
      positions: tree like the params of int32[*batch, k], the positions of the kept entries in each
        slice, ascending; `None` for dense leaves. Unused slots come last and hold n, n + 1, ...,
        for slices of n entries.
      state: state of the inner optimizer; a masked leaf has an array [*batch, k].
    """

    positions: Positions
    state: optax.OptState


@dataclasses.dataclass(frozen=True, eq=False)
class KeptParameter:
    """Kept entries of a masked parameter. Not a pytree, so that trees hold it as a leaf.

    Attributes:
      param: the parameter, which gives its sharding to results.
      layout: layout of the kept entries.
      positions: int32[*batch, k], the positions of the kept entries in each slice.
    """

    param: jax.Array
    layout: KeptLayout
    positions: jax.Array

    def gather(self, values: jax.Array) -> jax.Array:
        """Returns the kept entries, [*batch, k], of an array like the parameter."""

        def take(values: jax.Array, positions: jax.Array) -> jax.Array:
            at = jnp.asarray(values).at[positions]
            return at.get(mode="fill", fill_value=0, indices_are_sorted=True, unique_indices=True)

        return self.layout.map_slices(take, self.param, values, self.positions)

    def make_dense_update(self, update: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the update of the parameter; arguments as in `scatter_updates`."""
        layout, param = self.layout, self.param
        dtype = promote(update.dtype, param.dtype)
        words = layout.map_slices(read_words, param, mask)
        words, update = jax.lax.optimization_barrier((words, update.astype(dtype)))
        fn = functools.partial(scatter_by_words, n=layout.slice_size)
        dense = layout.map_slices(fn, param, words, update, dense=True)
        keep = functools.partial(are_set, n=layout.slice_size)
        is_kept = layout.map_slices(keep, param, words, dense=True)
        return jnp.where(is_kept, dense, -param.astype(dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class SlotMap:
    """Maps each slot of a parameter under its new mask to the slot under the old one.

    Not a pytree, so that trees hold it as a leaf.

    Attributes:
      kept: kept entries under the new mask.
      slots: int32[*batch, k], the old slot of each new slot.
      stays: bool[*batch, k], whether the old mask kept the entry.
    """

    kept: KeptParameter
    slots: jax.Array
    stays: jax.Array


def read_kept(params: Params, positions: Positions) -> KeptTree:
    """Returns a tree of `KeptParameter` from the parameters and the positions of a `KeptState`."""

    def read(_: trees.KeyPath, param: jax.Array, at: jax.Array | None) -> KeptParameter | None:
        if at is None:
            return None
        stack = tuple(range(at.ndim - 1))
        layout = KeptLayout(param.shape, stack, slice_kept_shape=at.shape[-1:])
        return KeptParameter(param, layout, at)

    return trees.map_matched(read, params, positions)


def find_kept(params: Params, masks: Masks, layouts: Layouts) -> KeptTree:
    """Returns a tree of `KeptParameter` from the parameters and their masks.

    Args:
      params: tree of parameters.
      masks: tree of masks, not packed.
      layouts: tree of layouts.
    """
    arrays = trees.leaves_by_path(params)

    def find(path: trees.KeyPath, layout: KeptLayout, mask: PyTree) -> KeptParameter:
        (k,) = layout.slice_kept_shape
        fn = functools.partial(kept_positions, k=k)
        return KeptParameter(arrays[path], layout, layout.map_slices(fn, arrays[path], mask))

    return trees.map_matched(find, layouts, masks)


def gather(tree: PyTree, kept: KeptTree) -> PyTree:
    """Returns the tree with kept entries, [*batch, k], in place of masked leaves.

    Args:
      tree: parameters or gradients.
      kept: tree of `KeptParameter`.
    """

    def take(_: trees.KeyPath, leaf: jax.Array, parameter: KeptParameter | None) -> jax.Array:
        return leaf if parameter is None else parameter.gather(leaf)

    return trees.map_matched(take, tree, kept, role="gradients")


def scatter_updates(updates: PyTree, kept: KeptTree, masks: Masks) -> PyTree:
    """Returns dense updates: those of kept entries, and `-param` elsewhere.

    `optax.apply_updates` then sets pruned weights to exactly 0.0. Masked leaves have the dtype that
    updates and parameters promote to.

    Args:
      updates: tree of updates, of kept entries for masked leaves.
      kept: tree of `KeptParameter`.
      masks: tree of masks, not packed.
    """

    def scatter_update(
        _: trees.KeyPath, update: jax.Array, parameter: KeptParameter | None, mask: PyTree
    ) -> jax.Array:
        return update if parameter is None else parameter.make_dense_update(update, mask)

    return trees.map_matched(scatter_update, updates, kept, masks, role="updates")


def find_slot_maps(kept: KeptTree, old_masks: Masks) -> SlotMaps:
    """Returns a `SlotMap` for each masked parameter.

    Args:
      kept: tree of `KeptParameter`, under the new masks.
      old_masks: tree of the masks before the update, not packed.
    """

    def map_slots(_: trees.KeyPath, parameter: KeptParameter, mask: PyTree) -> SlotMap:
        fn, map_slices = slots_of_positions, parameter.layout.map_slices
        slots, stays = map_slices(fn, parameter.param, mask, parameter.positions)
        return SlotMap(parameter, slots, stays)

    return trees.map_matched(map_slots, kept, old_masks)


def carry(state: PyTree, fresh: PyTree, slot_maps: SlotMaps) -> PyTree:
    """Moves the optimizer state of entries that stay to their new slots; others start afresh.

    Args:
      state: state of the inner optimizer, of kept entries.
      fresh: the state that `init` returns for the weights under the new masks.
      slot_maps: result of `find_slot_maps`.
    """

    def moved(slot_map: SlotMap | None, old: PyTree, new: PyTree) -> PyTree:
        if slot_map is None or jnp.shape(old) != slot_map.kept.layout.kept_shape:
            return old
        param, map_slices = slot_map.kept.param, slot_map.kept.layout.map_slices
        return map_slices(carry_values, param, slot_map.slots, slot_map.stays, old, new)

    return owners.map_with_fresh(moved, slot_maps, state, fresh)


def find_sharding(array: PyTree) -> NamedSharding | None:
    """Returns how a mesh divides an array, by its type if traced; `None` for no mesh."""
    placed = jax.typeof(array).sharding if is_traced(array) else getattr(array, "sharding", None)
    return placed if isinstance(placed, NamedSharding) and not placed.mesh.empty else None


def count_parts(array: PyTree) -> tuple[int, ...]:
    """Returns the number of parts that a mesh makes of an array along each axis."""
    placed, ndim = find_sharding(array), jnp.ndim(array)
    return (1,) * ndim if placed is None else tuple(sharding.count_devices(placed, ndim))


def check_sharding(path: trees.KeyPath, param: jax.Array, batch_axes: int) -> None:
    """Raises a ValueError if a masked parameter is sharded along another axis than batch axes.

    Flat positions within a slice that lies on several devices would gather it in every step, and
    its shards keep different numbers of entries.
    """
    placed, counts = find_sharding(param), count_parts(param)
    cut = [axis for axis in range(batch_axes, param.ndim) if counts[axis] > 1]
    if placed is not None and cut:
        raise ValueError(
            f"use_compact_state=True: {trees.path_string(path)!r} of shape {param.shape} is "
            f"sharded along axes {cut} ({placed.spec}), where devices keep unequal numbers. "
            "Shard it along batch_axes only (stacked layers, experts), whose slices keep equally "
            "many, replicate it, or leave use_compact_state off."
        )
