"""Checks of the inputs of a step: gradients, masks, states and schedules."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.trees import Masks, Params, PyTree, Sparsities
from sparsity.core.warn import warn
from sparsity.masks import (
    Sites,
    adapt_scope,
    check_complete,
    check_user_mask,
    place_masks,
    read_masks,
)
from sparsity.masks.sites import leading_axes
from sparsity.sparsity_schedules import update_range
from sparsity.training.hooks import StepInputs
from sparsity.training.state import SparseState
from sparsity.training.updater import Updater


def check_optimizer(name: str, value: object) -> None:
    """Raises a ValueError that names the argument unless it is a transformation of optax."""
    if isinstance(value, type) or not (hasattr(value, "init") and hasattr(value, "update")):
        raise ValueError(
            f"{name} must be an optax.GradientTransformation such as optax.adam(1e-3), got {name} "
            f"= {value!r}."
        )


def check_state(state: object) -> None:
    """Raises a ValueError unless a wrapped optimizer made the state."""
    if not isinstance(state, SparseState):
        raise ValueError(
            "The state of a wrapped optimizer is a SparseState, as its `init` returns; got a state "
            f"of type {type(state).__name__}. A chain takes the state of the chain."
        )


def check_gradients(updates: PyTree, params: Params, masks: Masks) -> None:
    """Raises a ValueError that names a parameter without a gradient, or of another model.

    A masked parameter needs a gradient of its shape; that of others may be `None`.
    """
    likes = trees.leaves_by_path(params)
    check_complete(params, updates, "gradients", "the gradients of all parameters")

    def check(path: trees.KeyPath, grad: chex.Array, mask: chex.Array | None) -> None:
        if mask is not None and jnp.shape(grad) != likes[path].shape:
            raise ValueError(
                f"The gradient of {trees.path_string(path)!r} has shape {jnp.shape(grad)}, but its "
                f"parameter has shape {likes[path].shape}."
            )

    trees.map_matched(check, updates, masks, role="gradients")


def check_is_tree(hook: str, masks: object, params: Params) -> None:
    """Raises a ValueError if a hook returned a state, or several results, in place of masks."""
    is_tuple = type(masks) is tuple and not isinstance(params, tuple | list)
    if is_tuple or isinstance(masks, SparseState):
        raise ValueError(
            f"The result of {hook} must be a tree of masks like the params, got a "
            f"{type(masks).__name__}: {masks!r}. update_state returns a state."
        )


def check_masked(
    updater: Updater, hook: str, masks: Masks, params: Params, targets: Sparsities
) -> None:
    """Raises a ValueError that names a parameter to prune for which a hook returned no mask."""
    paths = adapt_scope(updater.scope).masked(params, targets) - trees.leaves_by_path(masks).keys()
    if lacking := sorted(map(trees.path_string, paths)):
        raise ValueError(
            f"{type(updater).__name__}.{hook} returned no mask for {trees.listed(lacking)}, which "
            "would stay dense in spite of a target sparsity. Return an array for each parameter "
            "that has a target, None for the others."
        )


def take_gradients(updater: Updater, modified: PyTree, inputs: StepInputs) -> PyTree:
    """Returns the gradients of a step with those of a hook in place of the weights' gradients.

    Raises:
      ValueError: the hook returned no gradient of a weight. The message names the weight.
    """
    lacking = trees.leaves_by_path(inputs.grads).keys() - trees.leaves_by_path(modified).keys()
    if lacking:
        raise ValueError(
            f"{type(updater).__name__}.modify_gradients returned no gradient of "
            f"{trees.listed(sorted(map(trees.path_string, lacking)))}. Return the complete tree, "
            "with the gradients that stay as they are."
        )
    return trees.map_matched(
        lambda _, grad, new: grad if new is None else new, inputs.updates, modified
    )


def take_masks(masks: Masks, old: PyTree, params: Params, may_be_packed: bool) -> Masks:
    """Returns the masks of a hook in the containers of the old masks.

    Raises:
      ValueError: a leaf gained or lost a mask by the update. The message names the leaf.
    """
    masks = read_masks(masks, params, may_be_packed, "new masks")
    new_paths, old_paths = (trees.leaves_by_path(tree).keys() for tree in (masks, old))
    if differing := [trees.path_string(path) for path in new_paths ^ old_paths]:
        raise ValueError(
            f"A mask update must return masks for the leaves that had one before; {differing} "
            "differ. Return None where target_sparsities has None, and an array elsewhere."
        )
    return trees.map_matched(lambda _, before, mask: mask, old, masks)


def take_user_masks(
    updater: Updater, masks: Masks, state: SparseState, params: Params, sites: Sites
) -> SparseState:
    """Returns the first state with masks of a user, and a target for each leaf with a mask."""
    for path, mask in trees.leaves_by_path(masks).items():
        is_float = jnp.issubdtype(jnp.result_type(mask), jnp.floating)
        if is_float and not is_traced(mask) and np.isnan(jax.device_get(mask)).any():
            raise ValueError(
                f"The mask of {trees.path_string(path)!r} among the masks of wrap_optax has a NaN. "
                "An entry of 0 removes a weight, and any other number keeps it."
            )
    masks = read_masks(masks, params, updater.use_packed_masks, "masks of wrap_optax")
    first = place_masks(masks, params)

    def target_sparsity(
        path: trees.KeyPath,
        param: chex.Array,
        mask: chex.Array | None,
        target: chex.Numeric | None,
    ) -> chex.Numeric | None:
        if mask is None:
            return None
        if target is None:
            check_user_mask(updater.scope, sites, path)
            target = 1 - jnp.mean(mask, dtype=jnp.float32)
        return target

    first = trees.map_matched(lambda _, param, mask: mask, params, first)
    targets = trees.map_matched(target_sparsity, params, first, state.target_sparsities)
    return state._replace(masks=first, target_sparsities=targets)


def check_algorithm_state(updater: Updater, state: SparseState, inputs: StepInputs) -> None:
    """Raises a ValueError if an updater starts with an `algorithm_state`, which the state lacks."""
    init = functools.partial(inputs.call, updater.init_algorithm_state)
    if jax.eval_shape(init, inputs.masked_weights, state.masks) is not None:
        raise ValueError(
            f"{type(updater).__name__} has an algorithm_state, and that of the state is None: "
            "another algorithm made the state. Start a new one, tx.init(params), or give this "
            "one state._replace(algorithm_state=updater.init_algorithm_state(params, masks))."
        )


def take_algorithm_state(new: PyTree, old: PyTree) -> PyTree:
    """Returns the new `algorithm_state`; raises a ValueError if its structure differs."""
    structures = [jax.tree.structure(tree) for tree in (old, new)]
    if len({*structures}) > 1:
        raise ValueError(
            "accumulate must return an algorithm_state of the structure that init_algorithm_state "
            f"gave it, {structures[0]}, got {structures[1]}. Override init_algorithm_state."
        )
    return new


def warn_of_idle(
    updater: Updater, params: Params, targets: Sparsities, masks: Masks, starts_dense: bool
) -> None:
    """Warns of masks that are missing or stay all ones, and of weights that no step would train.

    Args:
      updater: updater of the masks.
      params: tree of parameters.
      targets: tree of target sparsities.
      masks: tree of the first masks.
      starts_dense: whether traced masks, whose values are unknown, count as all ones.
    """
    steps = update_range(updater.scheduler)
    prunes = any(is_traced(t) or jax.device_get(t) > 0 for t in jax.tree.leaves(targets))
    leaves = jax.tree.leaves(masks)
    dense = all(
        starts_dense if is_traced(mask) else np.all(jax.device_get(mask)) for mask in leaves
    )
    if steps is None and prunes and leaves and dense:
        warn(
            f"{type(updater).__name__} has target sparsities, but all masks are ones and "
            f"scheduler = {updater.scheduler!r} never updates them: training stays dense. Set a "
            "scheduler, for example PolynomialSchedule(update_freq=100, update_start_step=1_000, "
            "update_end_step=10_000) (update_freq, update_start_step and update_end_step in a "
            "configuration), or start from masks with wrap_optax(tx, masks=masks).",
        )
    has_no_target = updater.get_distribution_fn() is not None and not jax.tree.leaves(targets)
    if steps is not None and has_no_target and not leaves and _has_matrices(updater, params):
        warn(
            f"{type(updater).__name__} has scheduler = {updater.scheduler!r}, but no parameter has "
            "a target sparsity: training stays dense. Set sparsity_distribution_fn, for example "
            "Uniform(0.8), or start from masks with wrap_optax(tx, masks=masks).",
        )
    if updater.skip_gradients and steps is not None:
        start, end = steps
        last = start + 3 if end is None else end
        samples = {start, start + 1, (start + last) // 2}
        every = all(bool(updater.scheduler.is_mask_update_iter(step)) for step in samples)
        if every and last > start + 1:
            warn(
                f"{type(updater).__name__} skips the gradients of steps that update masks, and "
                f"scheduler = {updater.scheduler!r} updates them in every step from {start} "
                f"{'on' if end is None else f'to {end}'}: no weight is trained then. Set a larger "
                "update_freq, or skip_gradients=False.",
            )


def _has_matrices(updater: Updater, params: Params) -> bool:
    """Returns whether a parameter has more than one axis beyond its batch axes."""
    weights = trees.leaves_by_path(trees.prunable(params))
    return any(
        param.ndim - leading_axes(updater.batch_axes, trees.path_names(path), param) > 1
        for path, param in weights.items()
    )
