"""Parameters that products multiply by constants: pruned as the weights that the products read.

Methods see multiplier * parameter, and their weights are divided by the multiplier. Where that is 0
no output depends on the parameter: the entry scores 0, and keeps its value if the mask keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.validation import check_statistic
from sparsity.core import sharding, trees
from sparsity.core.checks import is_traced
from sparsity.core.trees import KeyPath, Masks, PyTree, Tree


def scale_params(
    params: Tree, statistics: PyTree
) -> tuple[Tree, PyTree, Callable[[Tree, Masks], Tree]]:
    """Returns the weights that products read, less offsets, their statistics, and the way back.

    Args:
      params: tree of parameters.
      statistics: `{path: Statistic}`; anything else is returned as it is.

    Returns:
      (weights, statistics of weights, `restore(new_weights, masks)`, which returns parameters).

    Raises:
      ValueError: a multiplier does not fit its parameter; from `restore`: kept weights differ from
        0 where the multiplier is 0.
    """
    by_path = statistics if isinstance(statistics, Mapping) else {}
    leaves: dict[KeyPath, tuple[jax.Array, jax.Array, jax.Array]] = {}
    for key_path, param in trees.leaves_by_path(params).items():
        statistic = by_path.get(trees.path_names(key_path))
        if isinstance(statistic, Statistic) and statistic.multiplier is not None:
            check_statistic(statistic, param.shape, trees.path_string(key_path))
            leaves[key_path] = param, statistic.scale_weights(param), statistic.multiplier

    def restore(weights: Tree, masks: Masks) -> Tree:
        masks_by_path = trees.leaves_by_path(masks) if leaves else {}

        def restore_leaf(key_path: KeyPath, new: jax.Array) -> jax.Array:
            if key_path not in leaves:
                return new
            mask = masks_by_path.get(key_path, jnp.ones(new.shape, jnp.uint8))
            like = new, jnp.zeros(())
            restored, is_lost = sharding.shard_like(like, _restore, *leaves[key_path], new, mask)
            if not is_traced(is_lost) and is_lost:
                raise ValueError(
                    f"{trees.path_string(key_path)!r}: the model multiplies some of its entries by "
                    "0, and the method gives weights to these entries, which no output would show. "
                    "Prune with WandaPruning, RIAPruning or SparseGPTPruning."
                )
            return sharding.place_like(leaves[key_path][0], restored)

        return trees.map_matched(restore_leaf, weights)

    if not leaves:
        return params, statistics, restore
    weights = trees.map_matched(lambda path, x: leaves[path][1] if path in leaves else x, params)
    names = {trees.path_names(key_path) for key_path in leaves}
    scaled = {path: x.for_scaled_weights() if path in names else x for path, x in by_path.items()}
    return weights, scaled, restore


def _restore(
    param: jax.Array, scaled: jax.Array, multiplier: jax.Array, new: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the parameter of new weights, and whether weights are lost on the way."""
    is_dead, is_kept = multiplier == 0, mask != 0
    quotient = new / jnp.where(is_dead, 1, multiplier).astype(new.dtype)
    # Quotients of weights that have not changed would be rounded.
    restored = jnp.where((new == scaled) | is_dead, param.astype(new.dtype), quotient)
    is_lost = (is_dead & is_kept & (new != 0)).any()
    return jnp.where(is_kept, restored, 0).astype(param.dtype), is_lost
