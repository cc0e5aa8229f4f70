"""Moves the masks of a compact model, as a step of the wrapped optimizer that updates masks does.

The parameters become dense for the move, and a loss has a dense gradient. The hooks of the updater
choose the masks; values and moments of entries that stay go to their new slots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity.compacting.formats import FormatLayout
from sparsity.compacting.state import StoredParameter, map_moments
from sparsity.core import sharding, trees
from sparsity.core.checks import check_loss, is_traced
from sparsity.core.trees import Masks, Params, PyTree, Sparsities
from sparsity.masks import Sites
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.checks import read_state
from sparsity.training.hooks import is_overridden
from sparsity.training.state import SparseState
from sparsity.training.step import call_mask_hooks

if TYPE_CHECKING:
    from sparsity.compacting.compact import Compact

Loss: TypeAlias = Callable[[Callable[..., PyTree], PyTree], jax.Array]


def move_masks(
    model: Compact[PyTree],
    pruner: BaseUpdater,
    params: Params,
    opt_state: optax.OptState,
    count: chex.Numeric,
    loss: Loss | None,
    tx: optax.GradientTransformation | None,
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns new positions, parameters and state; compiled outside of compiled functions.

    Raises:
      ValueError: see `Compact.move`.
    """
    # An updater that keeps the counts and never regrows weights leaves the masks as they are.
    if pruner.keeps_count == "exact" and not pruner.regrows:
        return model.indices, params, opt_state
    if tx is not None:
        read_state(tx, params, opt_state)
    elif trees.find_nodes(opt_state, optax.ScaleByRssState):
        raise ValueError(
            "New entries of a ScaleByRssState in opt_state, as adagrad has it, do not start at 0. "
            "Give the optimizer to move: tx=tx."
        )
    if loss is not None and jax.tree_util.all_leaves([loss]):
        loss = jax.tree_util.Partial(loss)
    arguments = model, params, opt_state, count, loss
    is_inside = any(map(is_traced, jax.tree.leaves(arguments)))
    moved: tuple[PyTree, PyTree, PyTree]
    moved = (_move if is_inside else _move_compiled)(*arguments, pruner=pruner, tx=tx)
    return moved


def _move(
    model: Compact[PyTree],
    params: Params,
    opt_state: optax.OptState,
    count: chex.Numeric,
    loss: Loss | None,
    *,
    pruner: BaseUpdater,
    tx: optax.GradientTransformation | None,
) -> tuple[PyTree, PyTree, PyTree]:
    masks = trees.leaves_by_path(_update_masks(model, pruner, model.dense(params), count, loss))

    def find(path: trees.KeyPath, stored: StoredParameter) -> jax.Array:
        def locate(mask: jax.Array) -> jax.Array:
            return stored.layout.locate(mask).astype(stored.positions.dtype)

        return sharding.shard_like(stored.positions, locate, masks[path])

    new = trees.map_matched(find, model.stored_tree)
    by_name = {trees.path_string(path): at for path, at in trees.leaves_by_path(new).items()}

    def carry(
        stored: StoredParameter, values: jax.Array, fresh: jax.Array | None = None
    ) -> jax.Array:
        carry = functools.partial(_carry_values, stored.layout)
        return sharding.shard_like(
            values, carry, values, stored.positions, by_name[stored.name], fresh
        )

    fresh = () if tx is None else (tx.init(jax.tree.map(jnp.zeros_like, params)),)
    opt_state = map_moments(carry, model.stored_tree, opt_state, *fresh)
    params = trees.map_matched(
        lambda _, values, stored: values if stored is None else carry(stored, values),
        params,
        model.stored_tree,
    )
    return new, params, opt_state


_move_compiled = jax.jit(_move, static_argnames=("pruner", "tx"))


def _carry_values(
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
    model: Compact[PyTree],
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
    model: Compact[PyTree], pruner: BaseUpdater, sites: Sites, targets: Sparsities
) -> None:
    """Raises a ValueError if an update may change the number of kept values of a slice."""
    name, target_by_path = type(pruner).__name__, trees.leaves_by_path(targets)
    if not getattr(pruner.scope, "keeps_targets", False):
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
        refused = f"The mask of {stored.name!r} of shape {layout.shape} cannot move"
        if inner := [axis for axis in layout.stack if axis >= site.batch_axes]:
            raise ValueError(
                f"{refused}: axis {inner[0]} indexes slices, which store equally many values, but "
                f"under batch_axes = {site.batch_axes} slices may trade entries. Give the updater "
                f"batch_axes={inner[-1] + 1}, a number or a function of (path, param)."
            )
        kept = layout.num_kept // math.prod(layout.batch_shape)
        after = pruner.count_after_move(site, layout.shape, kept, target_by_path.get(path))
        if after != kept and not layout.stores_all:
            number = "another number of" if after is None else after
            raise ValueError(
                f"{refused}: of {site.pattern!r} {name} may keep {number} entries of a slice, "
                f"where {kept} are stored. Use SET or RigL with Unstructured(), NByM, FanIn, or a "
                "Block that divides the axes, SRigL with min_salient=None, or "
                "formats={path: 'dense'}."
            )
        if not layout.fits(site):
            raise ValueError(
                f"{refused}: {site.pattern!r} keeps no groups of {layout.kept_shape[-1]} outputs "
                f"that read the same inputs, as the format {layout.format!r} has. Give compact "
                f"formats={{{stored.name!r}: 'values'}}."
            )
