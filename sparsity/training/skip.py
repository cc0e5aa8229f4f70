"""Updates of the inner optimizer that a traced flag skips."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity.core.trees import PyTree
from sparsity.programs import program as jaxprs


def update_unless(
    skip: chex.Numeric,
    update: Callable[..., tuple[PyTree, optax.OptState]],
    updates: PyTree,
    state: optax.OptState,
    params: PyTree,
) -> tuple[PyTree, optax.OptState]:
    """Returns `update(updates, state, params)`, but zero updates and `state` where `skip` holds.

    Selecting between the old and the new state after the update would be slow. XLA could not write
    the new moments in place, because the old moments are read twice: for the new moments and for
    the update. On a CPU the copies make a complete step with Adam up to 1.3 times as long. A branch
    of `lax.cond`, which copies all its results, makes the step up to 1.7 times as long
    (benchmarks/skipping.py). Therefore the update is traced, and each new moment is selected where
    it is defined; later equations read the selected moment. Nothing is copied, and steps that are
    not skipped compute the same values. Scalars are selected at the end: an old count of 0 would
    divide by zero in between, which gradients would show, although no value would.

    Args:
      skip: bool, or a traced bool scalar.
      update: the `update` function of an optax transformation.
      updates: tree of gradients.
      state: state of the transformation; `update` must keep its structure.
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
    # A leaf that shares its variable, or is an input or a constant, is selected at the end.
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
