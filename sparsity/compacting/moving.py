"""Moves the masks of a compact model, as a step of the wrapped optimizer that updates masks does.

The parameters become dense for the move, and a loss has a dense gradient. The hooks of the updater
choose the masks; values and moments of entries that stay go to their new slots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.compacting.formats import FormatLayout
from sparsity.compacting.state import CompactModel, StoredParameter, map_moments
from sparsity.core import owners, sharding, trees
from sparsity.core.checks import check_function, check_kind, check_loss, is_traced
from sparsity.core.trees import Masks, Params, PyTree, Sparsities
from sparsity.masks import Sites, has_statement
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.checks import check_optimizer, read_state
from sparsity.training.hooks import is_overridden
from sparsity.training.state import SparseState
from sparsity.training.step import call_mask_hooks

Loss: TypeAlias = Callable[[Callable[..., PyTree], PyTree], jax.Array]
Moved: TypeAlias = tuple[PyTree, PyTree, PyTree]  # positions, parameters and state


def check_arguments(
    model: CompactModel, pruner: object, count: chex.Numeric, loss: object, tx: object
) -> None:
    """Raises a ValueError that names an argument of `Compact.move` of another type."""
    check_kind("pruner", pruner, BaseUpdater, "an updater such as RigL()")
    check_function("loss", loss, "(apply, params)", optional=True)
    if tx is not None:
        check_optimizer("tx", tx)
    dtype = getattr(count, "dtype", type(count))
    is_integer = not getattr(count, "shape", ()) and np.issubdtype(dtype, np.integer)
    if not is_integer or (not is_traced(count) and count < 0):
        raise ValueError(f"count must be a number of steps, got count = {count!r}.")
    if any(layout.is_frozen for _, layout in model.layouts):
        raise ValueError("Masks among entries of outside = 'frozen' cannot move: use 'zero'.")


def move_masks(
    model: CompactModel,
    pruner: BaseUpdater,
    params: Params,
    opt_state: optax.OptState,
    count: chex.Numeric,
    loss: Loss | None,
    tx: optax.GradientTransformation | None,
) -> Moved:
    """Returns new positions, parameters and state; compiled outside of compiled functions.

    Raises:
      ValueError: see `Compact.move`.
    """
    # An updater that keeps the counts and never regrows weights leaves the masks as they are.
    if pruner.keeps_count == "exact" and not pruner.regrows:
        return model.indices, params, opt_state
    if tx is not None:
        read_state(tx, params, opt_state)
    elif name := owners.name_start_above_zero(opt_state):
        raise ValueError(
            f"New entries of a {name} in opt_state do not start at 0. Give the optimizer to move: "
            "tx=tx."
        )
    if loss is not None and jax.tree_util.all_leaves([loss]):
        loss = jax.tree_util.Partial(loss)
    arguments = model, params, opt_state, count, loss
    is_inside = any(map(is_traced, jax.tree.leaves(arguments)))
    return (_move if is_inside else _move_compiled)(*arguments, pruner=pruner, tx=tx)


def _move(
    model: CompactModel,
    params: Params,
    opt_state: optax.OptState,
    count: chex.Numeric,
    loss: Loss | None,
    *,
    pruner: BaseUpdater,
    tx: optax.GradientTransformation | None,
) -> Moved:
    masks = trees.leaves_by_path(_update_masks(model, pruner, model.dense(params), count, loss))
    new = trees.map_matched(lambda path, x: x.locate(masks[path]), model.stored_tree)
    new_by_name = {trees.join_names(x): at for x, at in trees.leaves_by_names(new).items()}

    def carry(stored: StoredParameter, values: jax.Array, fresh: PyTree = None) -> jax.Array:
        arrays = values, stored.positions, new_by_name[stored.name], fresh
        moved = sharding.shard_like(values, functools.partial(_carry, stored.layout), *arrays)
        return sharding.place_like(values, moved)

    def carry_param(_: trees.KeyPath, leaf: jax.Array, stored: StoredParameter | None) -> PyTree:
        return leaf if stored is None else carry(stored, leaf)

    fresh = () if tx is None else (tx.init(jax.tree.map(jnp.zeros_like, params)),)
    opt_state = map_moments(carry, model.stored_tree, opt_state, *fresh)
    return new, trees.map_matched(carry_param, params, model.stored_tree), opt_state


_move_compiled: Callable[..., Moved] = jax.jit(_move, static_argnames=("pruner", "tx"))


def _carry(
    layout: FormatLayout, values: jax.Array, old: jax.Array, new: jax.Array, fresh: PyTree
) -> jax.Array:
    """Returns kept values at new positions; entries that are new are `fresh`, 0 for `None`."""
    # A 0 that depends on the new positions: no moment is dense before masks have moved.
    token = jnp.min(new, initial=0).astype(jnp.int32)
    moved = layout.take(layout.wrap(values, old).densify(token), new)
    if fresh is None:
        return moved
    return jnp.where(layout.take(layout.make_mask(old), new) > 0, moved, fresh)


def _update_masks(
    model: CompactModel,
    pruner: BaseUpdater,
    params: Params,
    count: chex.Numeric,
    loss: Loss | None,
) -> Masks:
    """Returns the masks that the updater makes of those of the model, by dense parameters."""
    shapes, grads = sharding.abstract(params), None
    sites = pruner.sites(shapes)
    targets = trees.leaves_by_path(pruner.compute_targets(shapes, sites))
    targets = trees.map_matched(lambda path, _: targets.get(path), model.indices)
    _check_counts(model, pruner, sites, targets)

    def compute_loss(weights: Params) -> jax.Array:
        complete = trees.map_matched(
            lambda _, leaf, weight: leaf if weight is None else weight, params, weights
        )
        assert loss is not None
        value = loss(model.graph.model.fn, complete)
        check_loss("loss", value)
        return value

    if loss is not None:
        grads = jax.grad(compute_loss)(trees.prunable(params))
    state = SparseState(model.masks, None, targets, jnp.asarray(count, jnp.int32), None)
    return call_mask_hooks(pruner, state, pruner.make_inputs(params, grads, sites=sites)).masks


def _check_counts(
    model: CompactModel, pruner: BaseUpdater, sites: Sites, targets: Sparsities
) -> None:
    """Raises a ValueError if an update may change the number of kept values of a slice."""
    name, target_by_path = type(pruner).__name__, trees.leaves_by_path(targets)
    if not has_statement(pruner.scope, "keeps_targets"):
        raise ValueError(
            f"{name} cannot move the masks of a compact model: under scope = {pruner.scope!r} "
            "parameters may trade entries. Use Layerwise(), or state keeps_targets = True in a "
            "scope that keeps their numbers."
        )
    if hooks := [x for x in ("accumulate", "init_algorithm_state") if is_overridden(pruner, x)]:
        raise ValueError(
            f"{name} cannot move the masks of a compact model: its hook {hooks[0]} keeps a state "
            "from step to step. Wrap an optimizer of dense parameters: wrap_optax."
        )
    for path, stored in trees.leaves_by_path(model.stored_tree).items():
        layout, site = stored.layout, sites[path]
        kept = layout.num_kept // math.prod(layout.batch_shape)
        after = pruner.count_after_move(site, layout.shape, kept, target_by_path.get(path))
        number = "another number of" if after is None else after
        if inner := [axis for axis in layout.stack if axis >= site.batch_axes]:
            reason = (
                f"slices along axis {inner[0]} may trade entries under batch_axes = "
                f"{site.batch_axes}. Give batch_axes={inner[-1] + 1}, or a function"
            )
        elif after != kept and not layout.stores_all:
            reason = (
                f"of {site.pattern!r} {name} may keep {number} entries of a slice, where {kept} "
                "are stored. Use SET or RigL with units of one size, SRigL with min_salient=None, "
                "or formats={path: 'dense'}"
            )
        elif not layout.fits(site):
            reason = (
                f"{site.pattern!r} keeps no groups of {layout.kept_shape[-1]} outputs that read "
                f"the same inputs. Give compact formats={{{stored.name!r}: 'values'}}"
            )
        else:
            continue
        raise ValueError(
            f"The mask of {stored.name!r} of shape {layout.shape} cannot move: {reason}."
        )
