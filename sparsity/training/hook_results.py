"""Masks of hooks and users, read into the trees of a step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from sparsity import masks as masks_lib
from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.sharding import abstract, evaluate_now
from sparsity.core.trees import Masks, Params, PyTree, Sparsities
from sparsity.masks import Sites
from sparsity.patterns.base import is_ranking_units
from sparsity.sparsity_schedules import has_updates
from sparsity.training.state import SparseState
from sparsity.training.updater_hooks import UpdaterHooks


def check_masked(
    updater: UpdaterHooks, hook: str, masks: Masks, params: Params, targets: Sparsities
) -> None:
    """Raises a ValueError that names a parameter to prune for which a hook returned no mask."""
    scope = masks_lib.adapt_scope(updater.scope, updater.sites(params))
    paths = scope.masked_paths(params, targets) - trees.leaves_by_path(masks).keys()
    if paths:
        raise ValueError(
            f"{type(updater).__name__}.{hook} returned no mask for {trees.list_paths(paths)}. "
            "Return an array for each parameter that has a target, None for the others."
        )


def read_new_masks(masks: Masks, old: PyTree, params: Params, may_be_packed: bool) -> Masks:
    """Returns the masks of a hook in the containers of the old masks.

    Raises:
      ValueError: a leaf gained or lost a mask by the update. The message names the leaf.
    """
    masks = masks_lib.read_masks(masks, params, may_be_packed, "new masks")
    new_paths, old_paths = (trees.leaves_by_path(tree).keys() for tree in (masks, old))
    if differing := new_paths ^ old_paths:
        raise ValueError(
            "A mask update must return masks for the leaves that had one before; "
            f"{trees.list_paths(differing)} differ. Return None where target_sparsities has None, "
            "and an array elsewhere."
        )
    return trees.map_matched(lambda _, before, mask: mask, old, masks)


def read_user_masks(
    updater: UpdaterHooks, masks: Masks, state: SparseState, params: Params, sites: Sites
) -> SparseState:
    """Returns the first state with masks of a user, and a target for each leaf with a mask."""
    with evaluate_now():
        masks = jax.tree.map(lambda x: x != 0 if jnp.iscomplexobj(x) else x, masks)
    read = masks_lib.read_masks(masks, params, updater.use_packed_masks, "masks of wrap_optax")
    first = masks_lib.place_masks(read, params)

    def read_target(path: trees.KeyPath, _: PyTree, mask: PyTree, target: PyTree) -> PyTree:
        if mask is None or target is not None:
            return None if mask is None else target
        masks_lib.check_user_mask(updater.scope, sites, path)
        return 1 - jnp.mean(mask, dtype=jnp.float32)

    first = trees.map_matched(lambda _, param, mask: mask, params, first)
    targets = trees.map_matched(read_target, params, first, state.target_sparsities)
    is_fixed = updater.keeps_count == "exact" and not updater.regrows
    if has_updates(updater.scheduler) and not is_fixed:
        check_movable(updater, sites, masks, params)
    return state._replace(masks=first, target_sparsities=targets)


def check_movable(updater: UpdaterHooks, sites: Sites, masks: Masks, params: Params) -> None:
    """Raises a ValueError if masks keep parts of what an update keeps or removes together.

    A pattern counts a unit as kept if the mask keeps any of its entries, and `Coupled` a channel:
    an update of a random mask of half of the entries would keep nearly all blocks.

    Args:
      updater: the updater.
      sites: sites of the parameters.
      masks: tree of masks, perhaps packed; traced ones, and those of other processes, pass.
      params: tree of parameters.
    """
    if any(
        is_traced(x) or not getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(masks)
    ):
        return
    shapes = trees.prunable(abstract(params))
    with evaluate_now():
        bits = masks_lib.read_masks(jax.device_get(masks), shapes, updater.use_packed_masks)
        completed = jax.device_get(_complete_units(updater, sites, bits, shapes))
    complete = trees.leaves_by_path(completed)
    for path, mask in trees.leaves_by_path(jax.device_get(bits)).items():
        if path not in complete or (complete[path] > mask).any():
            raise ValueError(
                f"The mask of {trees.path_string(path)!r} among the masks of wrap_optax keeps "
                f"parts of what {type(updater).__name__} keeps or removes together, and would keep "
                "more weights. Leave masks out, or give masks of its pattern and scope, such as "
                "those of MagnitudePruning(...).instant_sparsify(params)."
            )


def _complete_units(updater: UpdaterHooks, sites: Sites, masks: Masks, shapes: PyTree) -> Masks:
    """Returns masks with every unit or channel of which a mask keeps a part."""
    if isinstance(updater.scope, masks_lib.TreeScope):
        scores = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), shapes)
        return masks_lib.adapt_scope(updater.scope, sites).move_tree(masks, scores, scores, 0.0)

    def complete(path: trees.KeyPath, mask: jax.Array) -> jax.Array:
        pattern, axes = sites[path].pattern, sites[path].batch_axes
        if pattern.is_elementwise or not is_ranking_units(pattern) or not updater.regrows:
            return mask
        pattern.check(mask.shape, axes, sites[path].name)
        pooled = masks_lib.are_kept(pattern.pool(mask, axes))
        return masks_lib.are_kept(pattern.expand(pooled, mask.shape, axes))

    return trees.map_matched(complete, masks)
