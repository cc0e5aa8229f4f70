"""One training step whose inner optimizer sees complete parameters.

The state of grown weights is reset where their packed mask, `MaskChange.grown`, is 1.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity.core import trees
from sparsity.core.dtypes import promote
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.masks import Sites, apply_masks, mask_updates, pack_masks, unpack_masks
from sparsity.training.hooks import StepInputs
from sparsity.training.kept_state import KeptState
from sparsity.training.regrow import (
    check_resettable,
    name_opaque_state,
    restart_regrown,
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
        if self.may_regrow:
            name, is_sure = type(self.updater).__name__, bool(self.updater.regrows)
            check_resettable(params, state, name, is_sure)
        return state

    def is_inner_state(self, inner_state: optax.OptState, params: Params) -> bool:
        if not isinstance(inner_state, KeptState):
            return True
        # `train_only` keeps such a state, too.
        return isinstance(jax.eval_shape(self.inner.init, params), KeptState)

    def can_restart(self, state: SparseState, inputs: StepInputs) -> bool:
        return self.may_regrow and name_opaque_state(inputs.params, state.inner_state) is None

    def mark_no_growth(self, state: SparseState, inputs: StepInputs) -> PyTree:
        plain, _ = self.unpack_for_hooks(state, inputs)
        return jax.tree.map(jnp.zeros_like, pack_masks(plain.masks, inputs.params))

    def restart(
        self, old_bits: PyTree, new: SparseState, inputs: StepInputs
    ) -> tuple[SparseState, PyTree]:
        params = masked = inputs.params
        if self.pruned_are_zero:
            masked = apply_masks(params, unpack_masks(old_bits, params))
        # `init` may have seen the weights alone, without the functions of a model.
        return restart_regrown(old_bits, new, params, self.inner.init(trees.prunable(masked)))

    def transform(
        self, state: SparseState, inputs: StepInputs, change: MaskChange
    ) -> tuple[PyTree, SparseState]:
        plain, inputs = self.unpack_for_hooks(state, inputs)
        params, grads = inputs.params, self.modify_gradients(inputs, plain)
        if self.updater.is_sparse_gradients:
            grads = mask_updates(grads, plain.masks, "gradients")
        seen = params
        if self.pruned_are_zero:
            seen = without_grown(params, change.grown)
        updates, inner_state = self.run_inner(grads, state.inner_state, seen, inputs, change)
        count = optax.safe_increment(state.count)
        if self.pruned_are_zero:
            updates = start_from_zero(updates, params, change.grown)
        if self.zeroes_updates:
            updates = make_updates_set_zeros(updates, params, plain.masks)
        return updates, state._replace(inner_state=inner_state, count=count)


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
        return jnp.where(mask > 0, update.astype(dtype), -param.astype(dtype))

    return trees.map_matched(set_zero, updates, masks, role="updates")
