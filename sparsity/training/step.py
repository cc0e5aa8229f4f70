"""One training step: the flow of a wrapped optimizer's `update`.

An algorithm that remembers accumulates; masks are refreshed in the steps that the scheduler
chooses; gradients are modified and masked; the inner optimizer runs, and its updates are made to
land on exact zeros. What is known while tracing leaves no trace in the compiled program, and
nothing here copies an array in steps without a refresh. Masks are packed and unpacked here only:
hooks see plain ones.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.core import jaxprs, trees
from sparsity.core.checks import is_traced
from sparsity.core.sharding import on_device
from sparsity.core.trees import PyTree
from sparsity.masks import (
    Sites,
    apply_masks,
    check_given,
    check_masks,
    pack_masks,
    place_masks,
    read_masks,
    unpack_masks,
)
from sparsity.sparsity_schedules import update_range
from sparsity.training.hooks import ExtraArg, Inputs, call_hook
from sparsity.training.regrow import (
    check_resettable,
    hidden_by,
    restart_regrown,
    start_from_zero,
    without_grown,
)
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
            first, targets = _given_masks(updater, masks, state.target_sparsities, params, table)
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


def check_gradients(updates: PyTree, params: PyTree, masks: PyTree) -> None:
    """Raises a ValueError that names a masked parameter whose gradient is missing or odd."""
    likes = trees.leaves_by_path(params)

    def check(path: trees.KeyPath, grad: Any, mask: Any) -> None:
        if mask is not None and jnp.shape(grad) != likes[path].shape:
            raise ValueError(
                f"The gradient of {trees.path_string(path)!r} has shape {jnp.shape(grad)}, but its "
                f"parameter has shape {likes[path].shape}."
            )

    trees.map_matched(check, updates, masks, role="gradients")


def take_masks(masks: PyTree, old: PyTree, params: PyTree, packed: bool) -> PyTree:
    """The masks of a hook in the containers of the old ones.

    Raises:
      ValueError: a leaf got a mask, or lost it, by the update; it is named.
    """
    masks = read_masks(masks, params, packed, "new masks")
    new_paths, old_paths = (trees.leaves_by_path(tree).keys() for tree in (masks, old))
    if differing := [trees.path_string(path) for path in new_paths ^ old_paths]:
        raise ValueError(
            f"A mask update must return masks for the leaves that had one before; {differing} "
            "differ. Return None where target_sparsities has None, and an array elsewhere."
        )
    return trees.map_matched(lambda _, before, mask: mask, old, masks)


def same_structure(new: PyTree, old: PyTree) -> PyTree:
    """Returns what an algorithm remembers now; a ValueError says that it is of another form."""
    forms = [jax.tree.structure(tree) for tree in (old, new)]
    if len({*forms}) > 1:
        raise ValueError(
            "accumulate must return an algorithm_state of the structure that init_algorithm_state "
            f"gave it, {forms[0]}, got {forms[1]}. Override init_algorithm_state."
        )
    return new


def warn_of_idle(updater: Updater, targets: PyTree, masks: PyTree, starts_dense: bool) -> None:
    """Warns of masks that would stay all ones, and of weights that no step would train.

    Args:
      updater: whose masks they are.
      targets: tree of target sparsities.
      masks: tree of the first masks.
      starts_dense: whether masks are ones where they are traced, so that their values do not tell.
    """
    steps = update_range(updater.scheduler)
    wanted = any(is_traced(t) or jax.device_get(t) > 0 for t in jax.tree.leaves(targets))
    leaves = jax.tree.leaves(masks)
    dense = all(starts_dense if is_traced(mask) else _is_all_ones(mask) for mask in leaves)
    if steps is None and wanted and leaves and dense:
        warnings.warn(
            f"{type(updater).__name__} has target sparsities, but all masks are ones and "
            f"scheduler = {updater.scheduler!r} never updates them: training stays dense. Set a "
            "scheduler, for example PolynomialSchedule(update_freq=100, update_start_step=1_000, "
            "update_end_step=10_000) (update_freq, update_start_step and update_end_step in a "
            "configuration), or start from masks with wrap_optax(tx, masks=masks).",
            stacklevel=3,
        )
    if updater.skip_gradients and steps is not None:
        start, end = steps
        last = start + 3 if end is None else end
        looked_at = {start, start + 1, (start + last) // 2}
        every = all(bool(updater.scheduler.is_mask_update_iter(step)) for step in looked_at)
        if every and last > start + 1:
            warnings.warn(
                f"{type(updater).__name__} skips the gradients of steps that update masks, and "
                f"scheduler = {updater.scheduler!r} updates them in every step from {start} "
                f"{'on' if end is None else f'to {end}'}: no weight is trained then. Set a larger "
                "update_freq, or skip_gradients=False.",
                stacklevel=3,
            )


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


def update_unless(
    skip: chex.Numeric,
    update: Callable[..., tuple[PyTree, optax.OptState]],
    updates: PyTree,
    state: optax.OptState,
    params: PyTree,
) -> tuple[PyTree, optax.OptState]:
    """Returns `update(updates, state, params)`, but zero updates and `state` where `skip` holds.

    Selecting between the old and the new state after the update would be slow: the old moments are
    read once for the new moments and once more for the update, so that XLA cannot write the new
    ones in place and copies them first (1.3x the time of a whole step of a small network on a CPU).
    So the update is traced, and each new moment is replaced by the selection where it is defined;
    what is computed from it later reads the selected one. No copies, and the same values in steps
    that are not skipped. Scalars are selected in the end: an old count of 0 would divide by zero
    on the way, and although no value would show it, gradients would.

    Args:
      skip: bool, or a traced bool scalar.
      update: the `update` function of an optax transformation.
      updates: tree of gradients.
      state: its state; the new one has the same structure.
      params: tree of parameters.
    """
    if skip is True:
        return jax.tree.map(jnp.zeros_like, updates), state
    if skip is False:
        return update(updates, state, params)
    program, out_shape = jax.make_jaxpr(update, return_shape=True)(updates, state, params)
    old_leaves = jax.tree.leaves(state)
    outs = program.jaxpr.outvars
    state_vars = outs[len(outs) - len(old_leaves) :]
    # A leaf that shares its variable, or is an input or a constant, is selected in the end.
    inputs = {*program.jaxpr.invars, *program.jaxpr.constvars}
    early = {
        var: old
        for var, old in zip(state_vars, old_leaves, strict=True)
        if jnp.ndim(old)
        and not isinstance(var, jaxprs.Literal)
        and var not in inputs
        and state_vars.count(var) == 1
    }

    def define(var: jaxprs.Var, value: jax.Array) -> jax.Array:
        return jnp.where(skip, early[var], value) if var in early else value

    values = jaxprs.evaluate(program, jax.tree.leaves((updates, state, params)), define)
    steps, new_leaves = values[: -len(old_leaves) or None], values[len(outs) - len(old_leaves) :]
    steps = [jnp.where(skip, jnp.zeros_like(step), step) for step in steps]
    new_leaves = [
        new if not isinstance(var, jaxprs.Literal) and var in early else jnp.where(skip, old, new)
        for var, old, new in zip(state_vars, old_leaves, new_leaves, strict=True)
    ]
    result: tuple[PyTree, optax.OptState] = jax.tree.unflatten(
        jax.tree.structure(out_shape), steps + new_leaves
    )
    return result


def _given_masks(
    updater: Updater, masks: PyTree, targets: PyTree, params: PyTree, table: Sites
) -> tuple[PyTree, PyTree]:
    """The masks that a user starts from, and a target for each leaf that has one."""
    first = read_masks(masks, params, updater.use_packed_masks, "masks of wrap_optax")

    def target_of(path: trees.KeyPath, param: Any, mask: Any, target: Any) -> Any:
        if mask is None or target is not None:
            return None if mask is None else target
        check_given(updater.scope, table, path)
        return 1 - jnp.mean(mask, dtype=jnp.float32)

    first = trees.map_matched(lambda _, param, mask: mask, params, first)
    return first, trees.map_matched(target_of, params, first, targets)


def _is_placeholder(params: PyTree) -> bool:
    """Whether `init` is called by optax.tree.map_params, with a node that has no leaf."""
    kind = type(params)
    return kind.__module__.startswith("optax.") and kind.__name__ == "_ParamsPlaceholder"


def _is_all_ones(mask: jax.Array) -> bool:
    return bool(np.all(jax.device_get(mask)))
