"""One mask update of a compact model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity.compacting.moving.carry import PositionChange, carry_state
from sparsity.compacting.moving.gradients import differentiate_directly, find_positions_by_gradient
from sparsity.compacting.moving.make_mask_updates import make_mask_updates
from sparsity.compacting.moving.mask_update import find_all_positions
from sparsity.compacting.stored_model import StoredModel, run_stored
from sparsity.core import owners, trees
from sparsity.core.checks import check_loss, is_traced
from sparsity.core.trees import Params, Path, PyTree
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.checks import read_state

Loss: TypeAlias = Callable[[Callable[..., PyTree], PyTree], jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ModelInTraining:
    """A compact model and its training so far, which a move of masks continues.

    Attributes:
      model: the model.
      params: its parameters.
      opt_state: the optimizer's state of the parameters.
      count: number of steps so far.
    """

    model: StoredModel
    params: Params
    opt_state: optax.OptState
    count: chex.Numeric


def move_masks(
    training: ModelInTraining,
    pruner: BaseUpdater,
    loss: Loss | None,
    tx: optax.GradientTransformation | None,
) -> tuple[PyTree, PyTree, PyTree]:
    """Moves masks; outside of compiled functions, compiled for the arrays that `loss` holds.

    Args:
      training: the model before the move.
      pruner: the updater.
      loss: ranks entries by gradient.
      tx: the optimizer, for states in which new entries are not 0.

    Returns:
      The new positions, the parameters, and the optimizer's state.

    Raises:
      ValueError: the state needs `tx`, or is that of another optimizer; or masks cannot move, see
        `make_mask_updates`.
    """
    leaves, treedef = jax.tree.flatten(loss)
    arrays = [leaf if trees.is_array(leaf) else None for leaf in leaves]
    objects = tuple(None if trees.is_array(leaf) else leaf for leaf in leaves)
    is_inside = any(map(is_traced, jax.tree.leaves((training, arrays))))
    call = _move_masks if is_inside else _move_masks_compiled
    moved: tuple[PyTree, PyTree, PyTree]
    moved = call(training, arrays, pruner=pruner, static_loss=(treedef, objects), tx=tx)
    return moved


def _move_masks(
    training: ModelInTraining,
    arrays: list[jax.Array | None],
    *,
    pruner: BaseUpdater,
    static_loss: tuple[jax.tree_util.PyTreeDef, tuple[object, ...]],
    tx: optax.GradientTransformation | None,
) -> tuple[PyTree, PyTree, PyTree]:
    """Moves masks; the structure of the loss is static, its leaves are `arrays`."""
    model, params, opt_state = training.model, training.params, training.opt_state
    treedef, objects = static_loss
    if tx is not None:
        read_state(tx, params, opt_state)
    elif name := owners.name_start_above_zero(opt_state):
        raise ValueError(
            f"opt_state has an {name}, in which new entries do not start at "
            "0, as in adagrad. Give the optimizer to move: tx=tx."
        )
    leaves = [x if array is None else array for array, x in zip(arrays, objects, strict=True)]
    chosen_loss: Loss | None = jax.tree.unflatten(treedef, leaves)
    loss = None if chosen_loss is None else functools.partial(_checked_loss, chosen_loss)
    mask_updates = make_mask_updates(pruner, model.graph.model.example[0], dict(model.layouts))
    values, positions = map(trees.leaves_by_names, (params, model.indices))
    direct: dict[Path, jax.Array] = {}
    if loss is not None:

        def apply(params: Params, *args: PyTree) -> PyTree:
            return run_stored(model, jax.lax.stop_gradient(params), *args)

        masked = {path: values[path] for path in mask_updates}
        direct = differentiate_directly(
            lambda chosen: loss(apply, _replace_leaves(params, chosen)), masked
        )
    slices = {
        path: mask_update.make_slices(
            values[path], positions[path], training.count, direct.get(path)
        )
        for path, mask_update in mask_updates.items()
    }
    if loss is None:
        new = find_all_positions(mask_updates, slices)
    else:
        new = find_positions_by_gradient(
            mask_updates,
            slices,
            lambda observers: loss(
                functools.partial(run_stored, model, observers=observers), params
            ),
        )
    fresh = None if tx is None else tx.init(jax.tree.map(jnp.zeros_like, params))
    changes = {
        path: PositionChange(layout, positions[path], new[path])
        for path, layout in model.layouts
        if path in mask_updates
    }
    new, params, opt_state = carry_state(
        changes, params, opt_state, fresh, model.densifies_one_at_a_time
    )
    return _replace_leaves(model.indices, new), params, opt_state


def _checked_loss(loss: Loss, apply: Callable[..., PyTree], params: Params) -> jax.Array:
    value = loss(apply, params)
    check_loss("loss", value)
    return value


_move_masks_compiled = jax.jit(_move_masks, static_argnames=("pruner", "static_loss", "tx"))


def _replace_leaves(tree: PyTree, leaves: Mapping[Path, jax.Array]) -> PyTree:
    return trees.map_matched(lambda path, leaf: leaves.get(trees.path_names(path), leaf), tree)
