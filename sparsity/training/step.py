"""One training step: the flow of a wrapped optimizer's `update`.

Masks are refreshed in the steps that the scheduler chooses, gradients are masked, the inner
optimizer runs, and its updates are made to land on exact zeros. What is known while tracing leaves
no trace in the compiled program, and nothing here copies an array in steps without a refresh.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal
from optax._src.base import NO_PARAMS_MSG

from sparsity import masks as masks_lib
from sparsity.core import trees
from sparsity.training.state import (
    SparseState,
    apply_masks,
    check_masks,
    fit_masks,
    pack_masks,
    unpack_masks,
)


def wrap(
    updater: Any, inner: optax.GradientTransformation, *, keeps_zeros: bool, lands_on_zeros: bool
) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` with the masks of `updater` in its state.

    Args:
      updater: a BaseUpdater.
      inner: any optax transformation.
      keeps_zeros: whether pruned weights are zero between steps; hooks see parameters like that.
      lands_on_zeros: whether the updates themselves see to it.
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: chex.ArrayTree) -> SparseState:
        state = updater.init_state(params)
        masks = fit_masks(state.masks, params, updater.use_packed_masks)
        state = state._replace(masks=masks, inner_state=inner.init(params))
        if updater.regrows:
            check_resettable(params, state.inner_state)
        return state

    def update_fn(
        updates: chex.ArrayTree,
        state: SparseState,
        params: chex.ArrayTree | None = None,
        **extra_args: Any,
    ) -> tuple[chex.ArrayTree, SparseState]:
        if params is None:
            raise ValueError(NO_PARAMS_MSG)
        check_masks(params, state.masks, "params", updater.use_packed_masks)
        check_masks(updates, state.masks, "gradients")
        is_update = updater.scheduler.is_mask_update_iter(state.count)

        def refresh(state: SparseState) -> tuple[SparseState, chex.ArrayTree]:
            seen = apply_masks(params, state.masks, "params") if keeps_zeros else params
            old = state._replace(masks=unpack_masks(state.masks, params))
            new = call_hook(updater.update_state, old, seen, updates, extra=extra_args)
            check_same_leaves(new.masks, old.masks)
            new = new._replace(masks=unpack_masks(new.masks, params))
            grown = None
            if updater.regrows:
                new, grown = restart_regrown(old, new, inner.init(seen))
            masks = fit_masks(new.masks, params, updater.use_packed_masks)
            return new._replace(masks=masks), grown

        def go_on(state: SparseState) -> tuple[SparseState, chex.ArrayTree]:
            grown = pack_masks(state.masks, params) if updater.regrows else None
            return state, jax.tree.map(jnp.zeros_like, grown)

        if isinstance(is_update, jax.core.Tracer):
            new_state, grown = jax.lax.cond(is_update, refresh, go_on, state)
        else:
            is_update = bool(is_update)
            new_state, grown = refresh(state) if is_update else (state, None)
        if updater.is_sparse_gradients:
            updates = apply_masks(updates, new_state.masks, "gradients")
        start = without_grown(params, grown) if keeps_zeros else params
        steps, inner_state = update_unless(
            is_update if updater.skip_gradients else False,
            functools.partial(inner.update, **extra_args),
            updates,
            new_state.inner_state,
            start,
        )
        if keeps_zeros:
            steps = start_from_zero(steps, params, grown)
        if lands_on_zeros:
            steps = land_on_zeros(steps, params, new_state.masks)
        count = optax.safe_increment(state.count)
        return steps, new_state._replace(inner_state=inner_state, count=count)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def call_hook(hook: Callable[..., Any], *args: Any, extra: dict[str, Any], **kwargs: Any) -> Any:
    """Calls a hook with those of the `extra` arguments that its signature names (or takes all)."""
    parameters = inspect.signature(hook).parameters
    taken = {*list(parameters)[: len(args)], *kwargs}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    wanted = extra.keys() if takes_all else extra.keys() & parameters.keys()
    return hook(*args, **kwargs, **{key: extra[key] for key in wanted - taken})


def check_same_leaves(masks: chex.ArrayTree, old: chex.ArrayTree) -> None:
    """Raises a ValueError that names the leaves which got a mask, or lost it, by an update."""
    new_paths, old_paths = (trees.leaves_by_path(tree).keys() for tree in (masks, old))
    if differing := [trees.path_string(path) for path in new_paths ^ old_paths]:
        raise ValueError(
            f"A mask update must return masks for the leaves that had one before; {differing} "
            "differ. Return None where target_sparsities has None, and an array elsewhere."
        )


def land_on_zeros(
    steps: chex.ArrayTree, params: chex.ArrayTree, masks: chex.ArrayTree
) -> chex.ArrayTree:
    """Updates that `optax.apply_updates` takes to exactly 0.0 where weights are pruned.

    Args:
      steps: tree of updates.
      params: tree of parameters.
      masks: tree of masks, packed or not.

    Returns:
      The tree of updates, masked leaves in the dtype that updates and parameters promote to: a
      bfloat16 `-p` would miss a float32 `p`.
    """

    def land(_: trees.KeyPath, step: Any, param: Any, mask: Any) -> Any:
        if mask is None:
            return step
        dtype = jnp.promote_types(step.dtype, param.dtype)
        kept = masks_lib.unpack(mask, param) > 0
        return jnp.where(kept, step.astype(dtype), -param.astype(dtype))

    return trees.map_matched(land, steps, params, masks, role="updates")


def restart_regrown(
    old: SparseState, new: SparseState, fresh: Any
) -> tuple[SparseState, chex.ArrayTree]:
    """Gives weights that are new in the mask the state of a fresh optimizer.

    Args:
      old: the state before the mask update, masks not packed.
      new: the state after it.
      fresh: what the inner optimizer's `init` returns.

    Returns:
      The new state with packed masks, and the packed mask of the weights that have grown.
    """
    grown = trees.map_matched(
        lambda _, mask, before: mask & (1 - before), new.masks, old.masks, role="new masks"
    )
    # All that follows reads the packed mask, and formally the new masks do, too: so the compiler
    # sees that the old masks are read no more and writes the new ones in their place. Otherwise
    # every step copies them.
    grown = pack_masks(grown, new.masks)
    packed = pack_masks(new.masks, new.masks)
    return new._replace(
        masks=trees.map_matched(lambda _, bits, more: bits | more, packed, grown),
        inner_state=trees.replace_where(new.inner_state, fresh, unpack_masks(grown, new.masks)),
    ), grown


def without_grown(params: chex.ArrayTree, grown: chex.ArrayTree) -> chex.ArrayTree:
    """Parameters with zeros where weights have grown: what the inner optimizer shall see."""

    def zero(_: trees.KeyPath, param: Any, bits: Any) -> Any:
        return (
            param
            if bits is None
            else masks_lib.apply_mask(param, 1 - masks_lib.unpack(bits, param))
        )

    return trees.map_matched(zero, params, grown)


def start_from_zero(
    steps: chex.ArrayTree, params: chex.ArrayTree, grown: chex.ArrayTree
) -> chex.ArrayTree:
    """Updates that take weights which have grown from zero, whatever they hold now."""

    def restart(_: trees.KeyPath, step: Any, param: Any, bits: Any) -> Any:
        if bits is None:
            return step
        return jnp.where(masks_lib.unpack(bits, param) > 0, step - param, step)

    return trees.map_matched(restart, steps, params, grown, role="updates")


def update_unless(
    skip: bool | jax.Array,
    update: Callable[..., tuple[chex.ArrayTree, Any]],
    updates: chex.ArrayTree,
    state: Any,
    params: chex.ArrayTree,
) -> tuple[chex.ArrayTree, Any]:
    """Returns `update(updates, state, params)`, but zero updates and `state` where `skip` holds.

    Selecting between the old and the new state after the update would be slow: the old moments are
    read once for the new moments and once more for the update, so that XLA cannot write the new
    ones in place and copies them first (1.3x the time of a whole step of a small network on a CPU).
    So the update is traced, and each new state leaf is replaced by the selection where it is
    defined; what is computed from it later reads the selected one. No copies, and the same values
    in steps that are not skipped.

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
    closed, out_shape = jax.make_jaxpr(update, return_shape=True)(updates, state, params)
    jaxpr = closed.jaxpr
    old_leaves = jax.tree.leaves(state)
    state_vars = jaxpr.outvars[len(jaxpr.outvars) - len(old_leaves) :]
    # A leaf that shares its variable, or is an input or a constant, is selected in the end.
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    early = {
        var: old
        for var, old in zip(state_vars, old_leaves, strict=True)
        if not isinstance(var, Literal) and var not in inputs and state_vars.count(var) == 1
    }
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, jax.tree.leaves((updates, state, params)), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        bound = equation.primitive.get_bind_params(equation.params)
        functions, static = bound if isinstance(bound, tuple) else ((), bound)
        with equation.ctx.manager:
            outs = equation.primitive.bind(*functions, *map(read, equation.invars), **static)
        outs = outs if equation.primitive.multiple_results else [outs]
        for var, value in zip(equation.outvars, outs, strict=True):
            old = early.get(var)
            values[var] = value if old is None else jnp.where(skip, old, value)
    outs = [
        read(var) if var in early else jnp.where(skip, old, read(var))
        for var, old in zip(state_vars, old_leaves, strict=True)
    ]
    steps = [read(var) for var in jaxpr.outvars[: len(jaxpr.outvars) - len(old_leaves)]]
    steps = [jnp.where(skip, jnp.zeros_like(step), step) for step in steps]
    return jax.tree.unflatten(jax.tree.structure(out_shape), steps + outs)


def check_resettable(params: chex.ArrayTree, inner_state: Any) -> None:
    """Refuses inner optimizers whose state hides which entry belongs to which parameter."""
    sizes = [leaf.size for leaf in trees.leaves_by_path(params).values()]
    flat = [leaf for leaf in jax.tree.leaves(inner_state) if jnp.shape(leaf) == (sum(sizes),)]
    hidden = None
    if trees.find_nodes(inner_state, optax.LookaheadState):
        hidden = "lookahead"
    elif len(sizes) > 1 and any(trees.is_prunable(leaf) for leaf in flat):
        hidden = "flatten"
    if hidden:
        raise ValueError(
            f"An updater that regrows weights cannot wrap optax.{hidden}: its state hides which "
            f"entry belongs to which parameter. Put optax.{hidden} around the wrapped optimizer "
            "instead."
        )
