"""One training step: the flow of a wrapped optimizer's `update`.

1. An algorithm with an `algorithm_state` accumulates.
2. Masks are updated in the steps that the scheduler chooses.
3. Gradients are modified and masked.
4. The inner optimizer runs, and its updates are made to set pruned weights to exact zeros.

Choices made while tracing leave no trace in the compiled program. A mask update is the only trip
of a loop over the state, which XLA keeps in place: steps without an update copy no moment. For
derivatives masks are constants. Hooks that compute masks get plain masks: `Step` unpacks and packs.

A weight that returns to the mask and is not 0, as in the first step of a dense model, is marked: by
a 2 in its mask, or in `MaskChange.grown` if masks are packed. The step starts it from 0.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity.core import trees
from sparsity.core.arrays import hold_constant, pin_layout, promote, replace_values, sums
from sparsity.core.checks import check_kind, is_traced
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.masks import (
    apply_mask,
    apply_masks,
    check_masks,
    is_layerwise,
    mask_updates,
    pack_masks,
    unpack_masks,
)
from sparsity.training.checks import (
    check_algorithm_state,
    check_gradients,
    check_masked,
    check_sparse_state,
    exclude_frozen,
    read_new_masks,
    read_user_masks,
    warn_of_idle,
)
from sparsity.training.hooks import (
    ExtraArg,
    StepInputs,
    UpdaterHooks,
    is_overridden,
    keeps_dense_weights,
)
from sparsity.training.inner import InnerOptimizer
from sparsity.training.state import SparseState, check_wrapped_once, to_stored_form


class MaskChange(NamedTuple):
    """Change of the masks by one step.

    Attributes:
      is_update: whether masks were updated; may be traced.
      grown: tree of packed masks that mark weights that returned to the mask; `None` if no weight
        can return, or marks stand in the masks.
    """

    is_update: chex.Numeric
    grown: PyTree | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """Wrapped optimizer: `init`, and `update` with its phases.

    Attributes:
      inner: the optimizer, with the updater, which decides which masks exist and when they change,
        and the initial masks of the user; `None` leaves the choice to the updater.
    """

    inner: InnerOptimizer

    @property
    def updater(self) -> UpdaterHooks:
        """The updater that wraps the optimizer."""
        return self.inner.updater

    @property
    def user_masks(self) -> Masks | None:
        """The initial masks of the user."""
        return self.inner.user_masks

    @functools.cached_property
    def zeroes_updates(self) -> bool:
        """Whether updates put pruned weights at exactly 0.0."""
        is_stated = self.updater.is_sparse_updates
        return not keeps_dense_weights(self.updater) if is_stated is None else is_stated

    @functools.cached_property
    def pruned_are_zero(self) -> bool:
        """Whether pruned weights are 0 between steps; one that returns to a mask restarts."""
        return self.zeroes_updates or not keeps_dense_weights(self.updater)

    def init(self, params: Params) -> SparseState:
        """Returns the first state."""
        updater = self.updater
        if is_placeholder(params):
            # Masks and targets are no parameters for optax.tree.map_params: each is one leaf.
            return SparseState(
                masks=0,
                inner_state=self.inner.init_placeholder(params),
                target_sparsities=0,
                count=jnp.zeros([], jnp.int32),
                algorithm_state=updater.init_algorithm_state(params, params),
            )
        all_sites = updater.sites(params)
        sites = exclude_frozen(updater, self.inner.tx, params, self.user_masks, all_sites)
        inputs = updater.make_inputs(params, sites=sites)
        state = inputs.call(updater.init_state, params)
        check_kind("the result of init_state", state, SparseState, "a SparseState")
        if self.user_masks is not None:
            state = read_user_masks(updater, self.user_masks, state, params, inputs.sites)
        elif is_overridden(updater, "get_initial_masks"):
            targets = state.target_sparsities
            check_masked(updater, "get_initial_masks", state.masks, inputs.weights, targets)
        # Again: an override of init_state, or a user, may pass masks of any real dtype.
        state = to_stored_form(state, params, updater.use_packed_masks, "initial masks")
        masks = self.unpack_for_hooks(state, inputs)[0].masks
        starts_dense = not is_overridden(updater, "get_initial_masks") and self.user_masks is None
        if sites is all_sites or jax.tree.leaves(state.target_sparsities):  # not warned before
            warn_of_idle(updater, params, state.target_sparsities, masks, starts_dense)
        algorithm_state = state.algorithm_state
        if algorithm_state is None:
            algorithm_state = inputs.call(updater.init_algorithm_state, inputs.weights, masks)
        inner_state = self.inner.init(params, masks, inputs.sites, self.pruned_are_zero)
        check_wrapped_once(inner_state)
        return state._replace(inner_state=inner_state, algorithm_state=algorithm_state)

    def update(
        self, updates: PyTree, state: PyTree, params: Params | None = None, **extra_args: ExtraArg
    ) -> tuple[PyTree, SparseState]:
        """Returns the updates of a step, computed from gradients, and the next state."""
        inputs = self.read_inputs(updates, state, params, extra_args)
        state = self.accumulate(state, inputs)
        state, change = self.maybe_update_masks(state, inputs)
        return self.transform(state, inputs, change)

    def read_inputs(
        self, grads: PyTree, state: SparseState, params: Params | None, extra: dict[str, ExtraArg]
    ) -> StepInputs:
        """Returns the checked inputs of a step; raises a ValueError that names an unfit leaf."""
        if params is None:
            raise ValueError(  # in the words of optax
                "You are using a transformation that requires the current value of parameters, but "
                "you are not passing `params` when calling `update`."
            )
        check_sparse_state(state)
        check_masks(params, state.masks, are_packed=self.updater.use_packed_masks)
        option = self.updater.use_compact_state
        if not self.inner.is_state(state.inner_state, params):
            raise ValueError(
                f"use_compact_state={option}, and the state was made with use_compact_state="
                f"{not option}. Restore it with that option."
            )
        check_gradients(grads, params, state.masks)
        inputs = self.updater.make_inputs(params, grads, extra)
        if state.algorithm_state is None and is_overridden(self.updater, "init_algorithm_state"):
            check_algorithm_state(self.updater, *self.unpack_for_hooks(state, inputs))
        return inputs

    def accumulate(self, state: SparseState, inputs: StepInputs) -> SparseState:
        """Returns the state with the `algorithm_state` that the hook `accumulate` returns."""
        if not is_overridden(self.updater, "accumulate"):
            return state
        plain, inputs = self.unpack_for_hooks(state, inputs)
        new = inputs.call(self.updater.accumulate, plain, inputs.masked_weights, inputs.grads)
        check_kind("the result of accumulate", new, SparseState, "a SparseState")
        structures: PyTree = [jax.tree.structure(x.algorithm_state) for x in (state, new)]
        before, after = structures
        if before != after:
            raise ValueError(
                f"accumulate must return an algorithm_state of the structure {before}, which "
                f"init_algorithm_state gave it, got {after}."
            )
        return state._replace(algorithm_state=new.algorithm_state)

    def maybe_update_masks(
        self, state: SparseState, inputs: StepInputs
    ) -> tuple[SparseState, MaskChange]:
        """Updates the masks in the steps that the scheduler chooses."""
        is_update = self.updater.scheduler.is_mask_update_iter(state.count)
        if not is_traced(is_update):
            if not jax.device_get(is_update):
                return state, MaskChange(False)
            new, grown = self.replace_masks(state, inputs, self.can_restart(state, inputs))
            return new, MaskChange(True, grown)
        constant, restarts = inputs.hold_constant(), self.can_restart(state, inputs)
        pin = pin_layout if self.updater.searches_columns else lambda x: x

        def replace(carry: PyTree) -> PyTree:
            is_pending, state, _ = carry
            state, constants = pin((state, constant))
            new = self.replace_masks(state, constants, restarts)
            return pin((jnp.zeros_like(is_pending), *new))

        marks_bits = restarts and self.updater.use_packed_masks
        no_growth = jax.tree.map(jnp.zeros_like, state.masks) if marks_bits else None
        first = (is_update, hold_constant(state), no_growth)
        _, new, grown = jax.lax.while_loop(lambda carry: carry[0], replace, first)
        new = self.restore_derivatives(new, state, inputs, is_update, restarts)
        return new, MaskChange(is_update, grown)

    def restore_derivatives(
        self,
        new: SparseState,
        old: SparseState,
        inputs: StepInputs,
        is_update: chex.Numeric,
        restarts: bool,
    ) -> SparseState:
        """Returns a state after a loop with the derivatives of the state before, masks constant."""
        inner_state, algorithm_state = old.inner_state, old.algorithm_state
        if restarts:
            masks, old_masks = (self.unpack_for_hooks(x, inputs)[0].masks for x in (new, old))
            grown = find_grown(masks, old_masks)
            inner_state = self.inner.carry(
                inner_state, new.inner_state, inputs.params, grown, old_masks
            )
        if is_overridden(self.updater, "update_state"):
            algorithm_state = jax.tree.map(
                functools.partial(jnp.where, is_update), new.algorithm_state, algorithm_state
            )
        return new._replace(
            inner_state=replace_values(inner_state, new.inner_state),
            algorithm_state=replace_values(algorithm_state, new.algorithm_state),
        )

    def replace_masks(
        self, state: SparseState, inputs: StepInputs, restarts: bool
    ) -> tuple[SparseState, PyTree]:
        """Returns the state with new masks, and `MaskChange.grown`."""
        updater, params = self.updater, inputs.params
        old, inputs = self.unpack_for_hooks(state, inputs)
        new = call_mask_hooks(updater, old, inputs)
        check_kind("the result of update_state", new, SparseState, "a SparseState")
        masks = read_new_masks(new.masks, old.masks, params, updater.use_packed_masks)
        # A ramp starts from the masks of the user, and no weight returns that could not restart.
        only_shrinks = self.user_masks is not None or not restarts
        if only_shrinks and not updater.regrows and self.pruned_are_zero:
            masks = trees.map_matched(lambda _, mask, before: mask & before, masks, old.masks)
        elif self.user_masks is not None and not is_overridden(updater, "new_masks"):
            masks = keep_sparser(masks, old.masks, is_layerwise(updater.scope))
        new, grown = new._replace(masks=masks), None
        if restarts:
            new, grown = self.restart(new, old.masks, inputs)
        if updater.use_packed_masks:
            new = new._replace(masks=pack_masks(new.masks, params))
        return new, grown

    def can_restart(self, state: SparseState, inputs: StepInputs) -> bool:
        """Returns whether weights that return to a mask get a fresh state."""
        return self.pruned_are_zero and self.inner.can_restart(state.inner_state, inputs.params)

    def restart(
        self, new: SparseState, old_masks: Masks, inputs: StepInputs
    ) -> tuple[SparseState, PyTree]:
        """Returns the new state with a fresh optimizer state of grown weights, and their marks.

        Args:
          new: the state after the update, with masks that are not packed.
          old_masks: tree of the masks before the update, not packed.
          inputs: inputs of the step.
        """
        params, masked = inputs.params, apply_masks(inputs.params, old_masks)
        fresh = self.inner.start(new.inner_state, masked, new.masks, inputs.sites)
        grown = find_grown(new.masks, old_masks)
        inner_state = self.inner.carry(new.inner_state, fresh, params, grown, old_masks)
        new = new._replace(inner_state=inner_state)
        marks = trees.map_matched(
            lambda _, param, has_grown: None if has_grown is None else has_grown & (param != 0),
            params,
            grown,
        )
        if self.updater.use_packed_masks:
            return new, pack_masks(marks, params)
        masks = trees.map_matched(
            lambda _, mask, is_marked: mask + is_marked.astype(mask.dtype), new.masks, marks
        )
        return new._replace(masks=masks), None

    def transform(
        self, state: SparseState, inputs: StepInputs, change: MaskChange
    ) -> tuple[PyTree, SparseState]:
        """Runs the inner optimizer on modified and masked gradients.

        Returns:
          Updates that start grown weights from 0 and take pruned weights to 0, and the next state.
        """
        state, grown, kept = self._read_marks(state, inputs, change)
        plain, inputs = self.unpack_for_hooks(state, inputs)
        kept = plain.masks if kept is None else kept
        params, grads = inputs.params, self.modify_gradients(inputs, plain)
        if self.updater.is_sparse_gradients:
            grads = mask_updates(grads, kept, "gradients")
        skips = change.is_update if self.updater.skip_gradients else False
        seen = without_grown(params, grown)
        updates, inner_state = self.inner.run(skips, inputs.extra, grads, state.inner_state, seen)
        updates = start_from_zero(updates, params, grown)
        if self.zeroes_updates:
            updates = make_updates_set_zeros(updates, params, kept)
        count = optax.safe_increment(state.count)
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

    def modify_gradients(self, inputs: StepInputs, plain: SparseState) -> PyTree:
        """Returns the gradients that the hook `modify_gradients` returns.

        Args:
          inputs: inputs of the step, as hooks see them.
          plain: the state with masks that are not packed.
        """
        if not is_overridden(self.updater, "modify_gradients"):
            return inputs.all_grads
        hook = self.updater.modify_gradients
        modified = inputs.call(hook, inputs.grads, inputs.masked_weights, plain)
        grads, new = map(trees.leaves_by_path, (inputs.grads, modified))
        if lacking := grads.keys() - new.keys():
            raise ValueError(
                f"{type(self.updater).__name__}.modify_gradients returned no gradient of "
                f"{trees.list_paths(lacking)}. Return all, also those that stay as they are."
            )
        changed = trees.map_matched(
            lambda _, grad, new: grad if new is None else new, inputs.all_grads, modified
        )
        check_gradients(changed, inputs.params, plain.masks)
        return changed

    def unpack_for_hooks(
        self, state: SparseState, inputs: StepInputs
    ) -> tuple[SparseState, StepInputs]:
        """Returns the state and the inputs as hooks see them: plain masks, weights under them."""
        if self.updater.use_packed_masks:
            state = state._replace(masks=unpack_masks(state.masks, inputs.params))
        return state, inputs._replace(masks=state.masks if self.pruned_are_zero else None)


def call_mask_hooks(updater: UpdaterHooks, state: SparseState, inputs: StepInputs) -> SparseState:
    """Returns the state with the masks of a mask update; masks are not packed."""
    if is_overridden(updater, "update_state"):
        return inputs.call(updater.update_state, state, inputs.masked_weights, inputs.grads)
    return state._replace(masks=inputs.call(updater.new_masks, state, inputs))


def find_grown(masks: Masks, old_masks: Masks) -> PyTree:
    """Returns a tree of bools: which weights have returned to the mask; `None` where dense."""
    return trees.map_matched(
        lambda _, mask, before: (mask > 0) & (before == 0), masks, old_masks, role="new masks"
    )


def keep_sparser(masks: Masks, old_masks: Masks, each_alone: bool) -> Masks:
    """Returns new masks, and old ones where the new masks would keep more entries.

    Args:
      masks: tree of new masks.
      old_masks: tree of the masks before.
      each_alone: compare each parameter for itself, and not all together.
    """
    pairs = list(zip(jax.tree.leaves(masks), jax.tree.leaves(old_masks), strict=True))
    if not pairs:
        return masks
    added = [jnp.subtract(*sums(pair, range(pair[0].ndim))) for pair in pairs]
    if not each_alone:
        added = [jnp.sum(jnp.stack(added))] * len(pairs)
    chosen = [jnp.where(x <= 0, *pair) for x, pair in zip(added, pairs, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(masks), chosen)


def is_placeholder(params: Params) -> bool:
    """Returns whether `params` is the placeholder that `optax.tree.map_params` passes to `init`."""
    cls = type(params)
    return cls.__module__.startswith("optax.") and cls.__name__ == "_ParamsPlaceholder"


def without_grown(params: Params, grown: PyTree) -> Params:
    """Returns the arrays for the inner optimizer: zeros where weights have grown, in bools."""
    return trees.map_matched(
        lambda _, param, where: param if where is None else apply_mask(param, ~where), params, grown
    )


def start_from_zero(updates: PyTree, params: Params, grown: PyTree) -> PyTree:
    """Returns updates that start grown weights from zero."""
    likes = trees.leaves_by_path(params)

    def restart(path: trees.KeyPath, update: jax.Array, where: jax.Array | None) -> jax.Array:
        if where is None:
            return update
        update, param = _promote(update, likes[path])
        return jnp.where(where, update - param, update)

    return trees.map_matched(restart, updates, grown, role="updates")


def make_updates_set_zeros(updates: PyTree, params: Params, masks: Masks) -> PyTree:
    """Returns updates by which `optax.apply_updates` sets pruned weights to exactly 0.0.

    Masked leaves have the dtype that updates and parameters promote to, because a bfloat16 `-p`
    would not cancel a float32 `p`.
    """
    likes = trees.leaves_by_path(params)

    def set_zero(path: trees.KeyPath, update: jax.Array, mask: chex.Array | None) -> jax.Array:
        if mask is None:
            return update
        update, param = _promote(update, likes[path])
        return jnp.where(mask.astype(bool), update, -param)

    return trees.map_matched(set_zero, updates, masks, role="updates")


def _promote(update: jax.Array, param: jax.Array) -> tuple[jax.Array, jax.Array]:
    dtype = promote(update.dtype, param.dtype)
    return update.astype(dtype), param.astype(dtype)
