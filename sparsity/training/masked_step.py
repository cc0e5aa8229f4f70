"""One training step whose inner optimizer sees complete parameters.

A weight that returns to the mask and is not 0, as in the first step of a dense model, is marked: by
a 2 in its mask, or in `MaskChange.grown` if masks are packed. The step starts it from 0.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity.core import trees
from sparsity.core.dtypes import promote
from sparsity.core.owners import replace_where
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.masks import Sites, apply_masks, mask_updates, pack_masks, unpack_masks
from sparsity.training.hooks import StepInputs
from sparsity.training.kept_state import KeptState
from sparsity.training.regrow import (
    check_resettable,
    name_opaque_state,
    start_from_zero,
    without_grown,
)
from sparsity.training.state import SparseState
from sparsity.training.step import MaskChange, Step


class MaskedStep(Step):
    """Step whose inner optimizer sees complete parameters; attributes as in `Step`."""

    def init_placeholder(self, params: Params) -> optax.OptState:
        return self.inner.init(params)

    def init_inner(self, params: Params, masks: Masks, sites: Sites) -> optax.OptState:
        state = self.inner.init(params)
        if self.pruned_are_zero and self.updater.regrows:
            check_resettable(params, state, type(self.updater).__name__)
        return state

    def is_inner_state(self, inner_state: optax.OptState, params: Params) -> bool:
        if not isinstance(inner_state, KeptState):
            return True
        # `train_only` keeps such a state, too.
        return isinstance(jax.eval_shape(self.inner.init, params), KeptState)

    def can_restart(self, state: SparseState, inputs: StepInputs) -> bool:
        return self.pruned_are_zero and name_opaque_state(inputs.params, state.inner_state) is None

    def mark_no_growth(self, state: SparseState) -> PyTree:
        if not self.updater.use_packed_masks:
            return None
        return jax.tree.map(jnp.zeros_like, state.masks)

    def restart(
        self, new: SparseState, old_masks: Masks, inputs: StepInputs
    ) -> tuple[SparseState, PyTree]:
        params, masked = inputs.params, apply_masks(inputs.params, old_masks)
        grown = _find_grown(new.masks, old_masks)
        # The first `init` may have seen the weights alone, without the functions of a model.
        fresh = self.inner.init(trees.prunable(masked))
        inner_state = replace_where(new.inner_state, fresh, grown)
        new = new._replace(inner_state=inner_state)
        nonzero = trees.map_matched(
            lambda _, param, is_grown: None if is_grown is None else is_grown & (param != 0),
            params,
            grown,
        )
        if self.updater.use_packed_masks:
            return new, pack_masks(nonzero, params)
        marked = trees.map_matched(
            lambda _, mask, is_marked: mask + is_marked.astype(mask.dtype), new.masks, nonzero
        )
        return new._replace(masks=marked), None

    def carry_inner(
        self,
        inner_state: PyTree,
        new: SparseState,
        old_masks: PyTree,
        inputs: StepInputs,
        fresh: PyTree,
    ) -> PyTree:
        masks = new.masks
        if self.updater.use_packed_masks:
            masks, old_masks = (unpack_masks(bits, inputs.params) for bits in (masks, old_masks))
        return replace_where(inner_state, fresh, _find_grown(masks, old_masks))

    def transform(
        self, state: SparseState, inputs: StepInputs, change: MaskChange
    ) -> tuple[PyTree, SparseState]:
        state, grown, kept = self._read_marks(state, inputs, change)
        plain, inputs = self.unpack_for_hooks(state, inputs)
        kept = plain.masks if kept is None else kept
        params, grads = inputs.params, self.modify_gradients(inputs, plain)
        if self.updater.is_sparse_gradients:
            grads = mask_updates(grads, kept, "gradients")
        seen = without_grown(params, grown)
        updates, inner_state = self.run_inner(grads, state.inner_state, seen, inputs, change)
        count = optax.safe_increment(state.count)
        updates = start_from_zero(updates, params, grown)
        if self.zeroes_updates:
            updates = make_updates_set_zeros(updates, params, kept)
        return updates, state._replace(inner_state=inner_state, count=count)

    def _read_marks(
        self, state: SparseState, inputs: StepInputs, change: MaskChange
    ) -> tuple[SparseState, PyTree, Masks]:
        """Returns the state without marks, and two trees of bools, or `None`: marked and kept.

        A TPU would write masks of the state before it reads them: the step reads other bools.
        """
        if change.is_update is False or not self.can_restart(state, inputs):
            return state, None, None
        if self.updater.use_packed_masks:
            marks = unpack_masks(change.grown, inputs.params)
            return state, jax.tree.map(lambda mark: mark > 0, marks), None
        masks = jax.tree.map(lambda mask: jnp.minimum(mask, 1), state.masks)
        grown, kept = (
            jax.tree.map(lambda mask, least=x: mask > least, state.masks) for x in (1, 0)
        )
        return state._replace(masks=masks), grown, kept


def _find_grown(masks: Masks, old_masks: Masks) -> PyTree:
    """Returns a tree of bools: which weights have returned to the mask; `None` where dense."""
    return trees.map_matched(
        lambda _, mask, before: (mask > 0) & (before == 0), masks, old_masks, role="new masks"
    )


def make_updates_set_zeros(updates: PyTree, params: Params, masks: Masks) -> PyTree:
    """Returns updates by which `optax.apply_updates` sets pruned weights to exactly 0.0.

    Args:
      updates: tree of updates.
      params: tree of parameters.
      masks: tree of masks, not packed.

    Returns:
      Tree of updates. Masked leaves have the dtype that updates and parameters promote to, because
      a bfloat16 `-p` would not cancel a float32 `p`.
    """

    likes = trees.leaves_by_path(params)

    def set_zero(path: trees.KeyPath, update: jax.Array, mask: chex.Array | None) -> jax.Array:
        if mask is None:
            return update
        param = likes[path]
        dtype = promote(update.dtype, param.dtype)
        return jnp.where(mask.astype(bool), update.astype(dtype), -param.astype(dtype))

    return trees.map_matched(set_zero, updates, masks, role="updates")
