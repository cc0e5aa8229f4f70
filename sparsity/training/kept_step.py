"""One training step whose inner optimizer sees kept entries only (`use_compact_state`).

Parameters, gradients and updates are dense; the state of the inner optimizer has one entry for each
kept weight. Each step gathers gradients and parameters at the positions of kept entries, and
scatters the updates. A step that moves masks takes the state of the entries that stay to their new
slots. `MaskChange.grown` is a tree of bool[*batch, k], whether the entry of a slot has grown.
"""

from __future__ import annotations

import math
from typing import Self

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.sharding import evaluate_now
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.masks import Site, Sites, read_masks, unpack_masks
from sparsity.masks.slice_layout import KeptLayout, SliceLayout
from sparsity.patterns.base import read_count
from sparsity.programs.optimizers import Removed, check_entrywise
from sparsity.sparsity_schedules import has_updates
from sparsity.training.hooks import StepInputs
from sparsity.training.kept_checks import check_compact_fields, check_first_masks, check_moves
from sparsity.training.kept_state import (
    KeptParameter,
    KeptState,
    KeptTree,
    Layouts,
    Positions,
    carry,
    check_sharding,
    find_kept,
    find_slot_maps,
    gather,
    read_kept,
    scatter_updates,
)
from sparsity.training.regrow import check_resettable, start_from_zero, without_grown
from sparsity.training.state import SparseState
from sparsity.training.step import MaskChange, Step
from sparsity.training.updater_hooks import UpdaterHooks


class KeptStep(Step):
    """Step whose inner optimizer sees kept entries only; attributes as in `Step`."""

    @classmethod
    def wrap(
        cls, updater: UpdaterHooks, inner: optax.GradientTransformation, masks: Masks | None
    ) -> Self:
        check_compact_fields(updater)  # again: a subclass may override `check_fields`
        if masks is None:
            check_first_masks(updater)
        elif any(map(is_traced, jax.tree.leaves(masks))):
            raise ValueError(
                "use_compact_state=True needs the numbers of kept weights, but the masks of "
                "wrap_optax are traced. Call wrap_optax outside of jit, scan and vmap."
            )
        return super().wrap(updater, inner, masks)

    def init_placeholder(self, params: Params) -> KeptState:
        return KeptState(0, self.inner.init(params))

    def init_inner(self, params: Params, masks: Masks, sites: Sites) -> KeptState:
        layouts = self.find_layouts(params, masks, sites)
        for path, layout in trees.leaves_by_path(layouts).items():
            check_sharding(path, trees.leaves_by_path(params)[path], len(layout.stack))
        kept = find_kept(params, masks, layouts)
        values = gather(params, kept)
        check_entrywise(
            self.inner,
            params,
            values,
            [Removed(are_zero=False, have_gradients=False)],  # params are not masked yet
            remedy="Leave use_compact_state off",
            claim="The optimizer might train kept entries alone otherwise than with others.",
            masks_move=has_updates(self.updater.scheduler),
        )
        state = self.inner.init(values)
        if self.restarts:
            check_resettable(values, state, type(self.updater).__name__)
        return KeptState(_read_positions(kept), state)

    def is_inner_state(self, inner_state: optax.OptState, params: Params) -> bool:
        return isinstance(inner_state, KeptState)

    def mark_no_growth(self, state: SparseState) -> PyTree:
        positions = state.inner_state.positions
        return jax.tree.map(lambda at: jnp.zeros_like(at, bool), positions)

    def can_restart(self, state: SparseState, inputs: StepInputs) -> bool:
        return self.restarts

    def restart(
        self, new: SparseState, old_masks: Masks, inputs: StepInputs
    ) -> tuple[SparseState, PyTree]:
        """Carries the state of kept entries to their new slots; grown entries start afresh."""
        params = inputs.params
        kept = find_kept(params, new.masks, self._find_stored_layouts(new, inputs))
        slot_maps = find_slot_maps(kept, old_masks)
        values = gather(params, kept)
        grown = jax.tree.map(lambda slot_map: jnp.logical_not(slot_map.stays), slot_maps)
        fresh = self.inner.init(trees.prunable(without_grown(values, grown)))
        inner_state = carry(new.inner_state.state, fresh, slot_maps)
        return new._replace(inner_state=KeptState(_read_positions(kept), inner_state)), grown

    def carry_inner(
        self,
        inner_state: PyTree,
        new: SparseState,
        old_masks: PyTree,
        inputs: StepInputs,
        fresh: PyTree,
    ) -> PyTree:
        if self.updater.use_packed_masks:
            old_masks = unpack_masks(old_masks, inputs.params)
        kept = read_kept(inputs.params, new.inner_state.positions)
        slot_maps = find_slot_maps(kept, old_masks)
        return fresh._replace(state=carry(inner_state.state, fresh.state, slot_maps))

    def transform(
        self, state: SparseState, inputs: StepInputs, change: MaskChange
    ) -> tuple[PyTree, SparseState]:
        plain, inputs = self.unpack_for_hooks(state, inputs)
        params, grads = inputs.params, self.modify_gradients(inputs, plain)
        positions, inner_state = state.inner_state
        kept = read_kept(params, positions)
        values, grads = gather(params, kept), gather(grads, kept)
        seen = without_grown(values, change.grown)
        updates, inner_state = self.run_inner(grads, inner_state, seen, inputs, change)
        updates = start_from_zero(updates, values, change.grown)
        count = optax.safe_increment(state.count)
        updates = scatter_updates(updates, kept, plain.masks)
        return updates, state._replace(inner_state=KeptState(positions, inner_state), count=count)

    def find_layouts(self, params: Params, masks: Masks, sites: Sites) -> Layouts:
        """Returns the layout of the kept entries of each masked parameter, for new masks.

        Raises:
          ValueError: the number of kept entries is not static. The message names the parameter.
        """
        has_user_masks = self.user_masks is not None
        tree = self.user_masks if has_user_masks else self.updater.compute_targets(params, sites)
        sources = trees.leaves_by_path(tree)  # of the numbers

        def layout(
            path: trees.KeyPath, param: jax.Array, mask: jax.Array | None
        ) -> KeptLayout | None:
            if mask is None:
                return None
            site, unused = sites[path], 0
            if has_user_masks:
                check_moves(self.updater, site)
                count = unused = _count_mask(sources[path], param.shape, site)
            else:
                count = _count_target(site, param.shape, sources[path])
            # Slots that are not in use have positions beyond the slice.
            if math.prod(param.shape[site.batch_axes :]) + unused >= 2**31 - 32:
                raise ValueError(
                    f"use_compact_state=True: {site.name!r} of shape {param.shape} has slices of "
                    "more entries than 32-bit positions reach. Set batch_axes, or leave "
                    "use_compact_state off."
                )
            return KeptLayout(param.shape, tuple(range(site.batch_axes)), slice_kept_shape=(count,))

        return trees.map_matched(layout, params, masks)

    def _find_stored_layouts(self, state: SparseState, inputs: StepInputs) -> Layouts:
        """Returns the layout of the kept entries of each masked parameter in a state.

        Raises:
          ValueError: new masks may keep more entries than the state has slots. The message names
            the parameter.
        """
        sites = inputs.sites

        def in_units(path: trees.KeyPath, mask: jax.Array) -> jax.Array | None:
            return None if sites[path].pattern.is_elementwise else mask

        masks = trees.map_matched(in_units, state.masks)
        dense = sites.keys() - trees.leaves_by_path(state.masks).keys()
        layouts = self.find_layouts(inputs.params, masks, sites.without(dense))

        def check(
            path: trees.KeyPath, kept: KeptParameter, layout: KeptLayout | None
        ) -> KeptLayout:
            site, stored = sites[path], kept.layout
            if layout in (None, stored) and site.batch_axes == len(stored.stack):
                return stored
            raise ValueError(
                f"use_compact_state=True: the state has kept entries of shape {stored.kept_shape} "
                f"for {site.name!r}, which {site.pattern!r} with batch_axes = {site.batch_axes} "
                "may change. Restore the state with the pattern, the sparsity and the batch_axes "
                "that it was made with."
            )

        kept = read_kept(inputs.params, state.inner_state.positions)
        return trees.map_matched(check, kept, layouts)


def _count_target(site: Site, shape: tuple[int, ...], target: chex.Numeric) -> int:
    """Returns the number of entries that the first mask keeps of each slice."""
    if is_traced(target):
        raise ValueError(
            f"use_compact_state=True needs the sparsity of {site.name!r} as a number, but it is "
            "traced. Make the updater outside of jit, scan and vmap."
        )
    count = read_count(site.pattern, shape, float(target), site.batch_axes, site.name)
    if count is None:
        raise ValueError(
            f"use_compact_state=True: how many entries {site.pattern!r} keeps of {site.name!r} of "
            f"shape {shape} depends on their scores. Use a pattern whose units have one size: "
            "Unstructured(), NByM, FanIn, or a Block that divides the axes; or give masks: "
            "wrap_optax(tx, masks=masks)."
        )
    return count


def _count_mask(mask: jax.Array, shape: tuple[int, ...], site: Site) -> int:
    """Returns the largest number of entries that a mask, perhaps packed, keeps of a slice."""
    like = jax.ShapeDtypeStruct(shape, jnp.uint8)
    with evaluate_now():
        entries = jax.device_get(read_masks(jax.device_get(mask), like, may_be_packed=True))
    layout = SliceLayout(shape, tuple(range(site.batch_axes)))
    return int(layout.count_kept(entries).max(initial=0))


def _read_positions(kept: KeptTree) -> Positions:
    """Returns the tree of positions of a tree of `KeptParameter`."""
    return jax.tree.map(lambda parameter: parameter.positions, kept)
