"""Results of hooks, checked and placed in the trees of a step."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.sharding import abstract, evaluate_now
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.masks import (
    Sites,
    TreeScope,
    adapt_scope,
    are_kept,
    check_user_mask,
    place_masks,
    read_masks,
)
from sparsity.sparsity_schedules import has_updates
from sparsity.training.hooks import StepInputs
from sparsity.training.overrides import read_attribute
from sparsity.training.state import SparseState
from sparsity.training.updater_hooks import UpdaterHooks


def read_gradients(updater: UpdaterHooks, modified: PyTree, inputs: StepInputs) -> PyTree:
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
        lambda _, grad, new: grad if new is None else new, inputs.all_grads, modified
    )


def read_new_masks(masks: Masks, old: PyTree, params: Params, may_be_packed: bool) -> Masks:
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


def read_user_masks(
    updater: UpdaterHooks, masks: Masks, state: SparseState, params: Params, sites: Sites
) -> SparseState:
    """Returns the first state with masks of a user, and a target for each leaf with a mask."""
    with evaluate_now():
        masks = jax.tree.map(lambda x: x != 0 if jnp.iscomplexobj(x) else x, masks)
    user_masks = trees.leaves_by_path(masks)
    for path, mask in user_masks.items():
        is_float = jnp.issubdtype(jnp.result_type(mask), jnp.floating)
        if is_float and _is_readable(mask) and np.isnan(jax.device_get(mask)).any():
            raise ValueError(
                f"The mask of {trees.path_string(path)!r} among the masks of wrap_optax has a NaN. "
                "An entry of 0 removes a weight, and any other number keeps it."
            )
    read = read_masks(masks, params, updater.use_packed_masks, "masks of wrap_optax")
    first = place_masks(read, params)

    def target_sparsity(
        path: trees.KeyPath, param: chex.Array, mask: chex.Array | None, target: chex.Numeric | None
    ) -> chex.Numeric | None:
        if mask is None:
            return None
        if target is None:
            check_user_mask(updater.scope, sites, path)
            target = 1 - jnp.mean(mask, dtype=jnp.float32)
        return target

    first = trees.map_matched(lambda _, param, mask: mask, params, first)
    targets = trees.map_matched(target_sparsity, params, first, state.target_sparsities)
    check_movable(updater, sites, masks, params, "masks of wrap_optax")
    return state._replace(masks=first, target_sparsities=targets)


def _is_readable(mask: chex.Array) -> bool:
    """Returns whether this process knows all entries of a mask."""
    return not is_traced(mask) and getattr(mask, "is_fully_addressable", True)


def check_movable(
    updater: UpdaterHooks, sites: Sites, masks: Masks, params: Params, role: str
) -> None:
    """Raises a ValueError if masks keep parts of what an update keeps or removes together.

    A pattern counts a unit as kept if the mask keeps any of its entries, and `Coupled` a channel:
    an update of a random mask of half of the entries would keep nearly all blocks.

    Args:
      updater: the updater.
      sites: sites of the parameters.
      masks: tree of masks as the user or a state has them; those without values here pass.
      params: tree of parameters.
      role: name of the masks in the message.
    """
    keeps_exact = read_attribute(updater, "keeps_count") == "exact"
    if not has_updates(updater.scheduler) or (keeps_exact and not updater.regrows):
        return
    leaves, likes = trees.leaves_by_path(masks), trees.leaves_by_path(params)
    if not all(map(_is_readable, leaves.values())):
        return
    if isinstance(updater.scope, TreeScope) and leaves:
        _check_channels(updater, sites, masks, params, role)
    elif updater.regrows and keeps_exact:
        for path, mask in leaves.items():
            _check_units(updater, sites, path, mask, likes[path], role)


def _check_units(
    updater: UpdaterHooks,
    sites: Sites,
    path: trees.KeyPath,
    mask: chex.Array,
    param: chex.Array,
    role: str,
) -> None:
    """Raises a ValueError if a mask keeps parts of the units of its pattern."""
    if path not in sites:
        return
    pattern, axes = sites[path].pattern, sites[path].batch_axes
    if pattern.is_elementwise or not pattern.ranks_units:
        return
    shape = param.shape
    pattern.check(shape, axes, sites[path].name)
    with evaluate_now():
        like = jax.ShapeDtypeStruct(shape, param.dtype)
        bits = read_masks(jax.device_get(mask), like, updater.use_packed_masks)
        kept = pattern.expand(are_kept(pattern.pool(bits, axes)), shape, axes)
        is_complete = np.array_equal(jax.device_get(are_kept(kept)), jax.device_get(bits))
    if not is_complete:
        raise ValueError(
            f"The mask of {sites[path].name!r} among the {role} keeps parts of the units of "
            f"sparsity_type = {pattern!r}: {type(updater).__name__} would complete them, and keep "
            "more weights. Leave masks out, or give masks of this pattern, such as those of "
            "MagnitudePruning(sparsity_type=...).instant_sparsify(params)."
        )


def _check_channels(
    updater: UpdaterHooks, sites: Sites, masks: Masks, params: Params, role: str
) -> None:
    """Raises a ValueError if masks keep parts of channels that go together."""
    with evaluate_now():
        bits = read_masks(jax.device_get(masks), abstract(params), updater.use_packed_masks, role)
        shapes = trees.prunable(abstract(params))
        scores = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), shapes)
        # A move of no channel completes those of which a mask keeps parts.
        moved = adapt_scope(updater.scope, sites).move_tree(bits, scores, scores, 0.0)
        leaves, moved_leaves = map(trees.leaves_by_path, jax.device_get((bits, moved)))
    for path, mask in leaves.items():
        if path not in moved_leaves or (moved_leaves[path] > mask).any():
            raise ValueError(
                f"The mask of {trees.path_string(path)!r} among the {role} keeps parts of "
                f"channels, or a parameter that goes with it has no mask: an update by "
                f"{type(updater).__name__} with scope = {updater.scope!r} would complete them, and "
                "keep more weights. Start from masks of whole channels, such as those of "
                "MagnitudePruning(scope=...).instant_sparsify(params)."
            )


def read_algorithm_state(new: PyTree, old: PyTree) -> PyTree:
    """Returns the new `algorithm_state`; raises a ValueError if its structure differs."""
    structures = [jax.tree.structure(tree) for tree in (old, new)]
    if len({*structures}) > 1:
        raise ValueError(
            "accumulate must return an algorithm_state of the structure that init_algorithm_state "
            f"gave it, {structures[0]}, got {structures[1]}. Override init_algorithm_state."
        )
    return new
