"""One training step: the flow of a wrapped optimizer's `update`.

An algorithm that remembers accumulates; masks are refreshed in the steps that the scheduler
chooses; gradients are modified and masked; the inner optimizer runs, and its updates are made to
land on exact zeros. What is known while tracing leaves no trace in the compiled program, and
nothing here copies an array in steps without a refresh. Masks are packed and unpacked here only:
hooks see plain ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.sharding import on_device
from sparsity.core.trees import PyTree
from sparsity.masks import (
    apply_masks,
    check_masks,
    pack_masks,
    place_masks,
    read_masks,
    unpack_masks,
)
from sparsity.training.checks import (
    check_gradients,
    same_structure,
    take_initial_masks,
    take_masks,
    warn_of_idle,
)
from sparsity.training.hooks import ExtraArg, Inputs, call_hook
from sparsity.training.regrow import (
    check_resettable,
    hidden_by,
    restart_regrown,
    start_from_zero,
    without_grown,
)
from sparsity.training.skip import update_unless
from sparsity.training.state import SparseState
from sparsity.training.updater import Updater, is_overridden

T = TypeVar("T")


def wrap(
    updater: Updater, inner: optax.GradientTransformation, masks: PyTree | None = None
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with the masks of `updater` in its state.

    Args:
      updater: says which masks there are, and when they change.
      inner: any optax transformation.
      masks: masks to start from; `None` leaves them to the updater.
    """
    inner = optax.with_extra_args_support(inner)
    packed = updater.use_packed_masks
    # Whether updates put pruned weights at zero, and whether these are zero between steps.
    lands_on_zeros = updater.is_sparse_updates
    if lands_on_zeros is None:
        lands_on_zeros = not updater.keeps_dense_weights
    keeps_zeros = lands_on_zeros or not updater.keeps_dense_weights
    may_regrow = keeps_zeros if updater.regrows is None else updater.regrows

    def init_fn(params: PyTree) -> SparseState:
        if _is_placeholder(params):
            # Masks and targets are no parameters for optax.tree.map_params: each is one leaf.
            own = updater.init_algorithm_state(params, params)
            count = jnp.zeros([], jnp.int32)
            return SparseState(0, inner.init(params), 0, count, own)
        table = updater.sites(params)
        state = call_hook(updater.init_state, params, extra={}, named={"sites": table})
        first = read_masks(state.masks, params, packed, "initial masks")
        if masks is not None:
            first, targets = take_initial_masks(
                updater, masks, state.target_sparsities, params, table
            )
            state = state._replace(target_sparsities=targets)
        starts_dense = not is_overridden(updater, "get_initial_masks") and masks is None
        warn_of_idle(updater, state.target_sparsities, first, starts_dense)
        own = state.algorithm_state
        if own is None:
            args = trees.prunable(params), first
            own = call_hook(updater.init_algorithm_state, *args, extra={}, named={"sites": table})
        # A hook may have made the state by hand, of Python numbers.
        state = SparseState(
            masks=place_masks(pack_masks(first, params) if packed else first, params),
            inner_state=inner.init(params),
            target_sparsities=jax.tree.map(on_device, state.target_sparsities),
            count=on_device(0 if state.count is None else state.count, np.int32),
            algorithm_state=own,
        )
        if may_regrow:
            name, is_sure = type(updater).__name__, bool(updater.regrows)
            check_resettable(params, state.inner_state, name, is_sure)
        return state

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: ExtraArg
    ) -> tuple[PyTree, SparseState]:
        if params is None:  # optax says what is missing, in its own words
            optax.add_decayed_weights(0.0).update(updates, optax.EmptyState(), None)
        check_masks(params, state.masks, packed=packed)
        check_gradients(updates, params, state.masks)
        inputs = Inputs(params, updates, updater.sites(params), extra_args)
        grads = inputs.grads
        regrows = may_regrow and hidden_by(params, state.inner_state) is None

        def plain(state: SparseState) -> SparseState:
            """The state as hooks see it."""
            return state._replace(masks=unpack_masks(state.masks, params)) if packed else state

        def kept(state: SparseState) -> SparseState:
            return state._replace(masks=pack_masks(state.masks, params)) if packed else state

        def masked(masks: PyTree) -> PyTree:
            return apply_masks(params, masks) if keeps_zeros else params

        def call(hook: Callable[..., T], *args: PyTree) -> T:
            return inputs.call(hook, *args)

        def refresh(state: SparseState) -> tuple[SparseState, PyTree]:
            old = plain(state)
            seen = masked(old.masks)
            if is_overridden(updater, "update_state"):
                new = call(updater.update_state, old, trees.prunable(seen), grads)
            else:
                under = old.masks if keeps_zeros else None
                new = old._replace(masks=updater.new_masks(old, inputs._replace(masks=under)))
            new = new._replace(masks=take_masks(new.masks, old.masks, params, packed))
            if not regrows:
                return kept(new), None
            new, grown = restart_regrown(old, new, params, inner.init(seen))
            return kept(new), grown

        def go_on(state: SparseState) -> tuple[SparseState, PyTree]:
            grown = pack_masks(plain(state).masks, params) if regrows else None
            return state, jax.tree.map(jnp.zeros_like, grown)

        if is_overridden(updater, "accumulate"):
            old = plain(state)
            new = call(updater.accumulate, old, trees.prunable(masked(old.masks)), grads)
            state = state._replace(
                algorithm_state=same_structure(new.algorithm_state, state.algorithm_state)
            )
        is_update = updater.scheduler.is_mask_update_iter(state.count)
        if is_traced(is_update):
            # Returned, it is stored: else every kernel that reads it would compute it again.
            state, grown, is_update = jax.lax.cond(
                is_update,
                lambda state: (*refresh(state), True),
                lambda state: (*go_on(state), False),
                state,
            )
        else:
            is_update = bool(is_update)
            state, grown = refresh(state) if is_update else (state, None)
        now = plain(state)
        if is_overridden(updater, "modify_gradients"):
            seen = trees.prunable(masked(now.masks))
            modified = call(updater.modify_gradients, grads, seen, now)
            updates = trees.map_matched(
                lambda _, given, own: given if own is None else own, updates, modified
            )
        if updater.is_sparse_gradients:
            updates = apply_masks(updates, now.masks, role="gradients")
        steps, inner_state = update_unless(
            is_update if updater.skip_gradients else False,
            functools.partial(inner.update, **extra_args),
            updates,
            state.inner_state,
            without_grown(params, grown) if keeps_zeros else params,
        )
        if keeps_zeros:
            steps = start_from_zero(steps, params, grown)
        if lands_on_zeros:
            steps = land_on_zeros(steps, params, now.masks)
        count = optax.safe_increment(state.count)
        return steps, state._replace(inner_state=inner_state, count=count)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def wrap_dense(
    updater: Updater, inner: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with a SparseState that has no masks; `params` may be left out."""
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: PyTree) -> SparseState:
        if _is_placeholder(params):
            count = jnp.zeros([], jnp.int32)
            return SparseState(0, inner.init(params), None, count)
        return updater.init_state(params)._replace(inner_state=inner.init(params))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: ExtraArg
    ) -> tuple[PyTree, SparseState]:
        steps, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        count = optax.safe_increment(state.count)
        return steps, state._replace(inner_state=inner_state, count=count)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def land_on_zeros(steps: PyTree, params: PyTree, masks: PyTree) -> PyTree:
    """Updates that `optax.apply_updates` takes to exactly 0.0 where weights are pruned.

    Args:
      steps: tree of updates.
      params: tree of parameters.
      masks: tree of masks, not packed.

    Returns:
      The tree of updates, masked leaves in the dtype that updates and parameters promote to: a
      bfloat16 `-p` would miss a float32 `p`.
    """

    likes = trees.leaves_by_path(params)

    def land(path: trees.KeyPath, step: Any, mask: Any) -> Any:
        if mask is None:
            return step
        param = likes[path]
        dtype = jnp.promote_types(step.dtype, param.dtype)
        return jnp.where(mask > 0, step.astype(dtype), -param.astype(dtype))

    return trees.map_matched(land, steps, masks, role="updates")


def _is_placeholder(params: PyTree) -> bool:
    """Whether `init` is called by optax.tree.map_params, with a node that has no leaf."""
    kind = type(params)
    return kind.__module__.startswith("optax.") and kind.__name__ == "_ParamsPlaceholder"
