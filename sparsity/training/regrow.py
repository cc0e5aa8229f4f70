"""Restarts weights that return to a mask at zero, with the state of a fresh optimizer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from sparsity.core import owners, trees
from sparsity.core.dtypes import promote
from sparsity.core.trees import Params, PyTree
from sparsity.masks import apply_mask
from sparsity.training.kept_state import KeptState


def without_grown(params: Params, grown: PyTree) -> Params:
    """Returns the arrays for the inner optimizer: zeros where weights have grown.

    Args:
      params: tree of parameters, or of kept entries.
      grown: tree of bools like `params`; `None` if nothing has grown.
    """

    def zero(_: trees.KeyPath, param: jax.Array, where: jax.Array | None) -> jax.Array:
        if where is None:
            return param
        return apply_mask(param, ~where)

    return trees.map_matched(zero, params, grown)


def start_from_zero(updates: PyTree, params: Params, grown: PyTree) -> PyTree:
    """Returns updates that start grown weights from zero; arguments as in `without_grown`."""

    likes = trees.leaves_by_path(params)

    def restart(path: trees.KeyPath, update: jax.Array, where: jax.Array | None) -> jax.Array:
        if where is None:
            return update
        param = likes[path]
        dtype = promote(update.dtype, param.dtype)
        update, param = update.astype(dtype), param.astype(dtype)
        return jnp.where(where, update - param, update)

    return trees.map_matched(restart, updates, grown, role="updates")


def check_resettable(params: Params, inner_state: optax.OptState, name: str) -> None:
    """Rejects optimizers whose state hides which entry belongs to which parameter.

    Args:
      params: tree of parameters.
      inner_state: state of the optimizer.
      name: name of the class of the updater.
    """
    hidden = name_opaque_state(params, inner_state)
    if hidden is None:
        return
    raise ValueError(
        f"{name} may regrow weights, and cannot wrap {hidden}, whose state hides which entry "
        "belongs to which parameter. Leave that out, or state regrows = False in the class "
        f"{name} if its masks only shrink."
    )


def name_opaque_state(params: Params, inner_state: optax.OptState) -> str | None:
    """Names the part of a state that hides the entries of parameters; `None` without one."""
    if any(jax.tree.leaves(node.positions) for _, node in trees.find_nodes(inner_state, KeptState)):
        return "sparsity.train_only"
    if trees.find_nodes(inner_state, optax.LookaheadState):
        return "optax.lookahead"
    arrays = trees.leaves_by_path(trees.only_arrays(params))
    # A parameter without a tree has the path of every leaf of a state, and so owns them all.
    is_bare = () in arrays
    if not arrays or (is_bare and arrays[()].ndim == 1):
        return None
    size = sum(leaf.size for leaf in arrays.values())
    owned = owners.map_owned(lambda owner, _: owner is not None, params, inner_state)
    unowned = {
        path: leaf
        for (path, leaf), is_owned in zip(
            trees.leaves_by_path(inner_state).items(), jax.tree.leaves(owned), strict=True
        )
        if trees.is_prunable(leaf) and not is_owned
    }
    candidates = jax.tree.leaves(inner_state) if is_bare else unowned.values()
    if any(jnp.shape(leaf) == (size,) and trees.is_prunable(leaf) for leaf in candidates):
        return "optax.flatten"
    # Vectors of a state, such as histories, may be as long as a bias by chance.
    shapes = {leaf.shape for leaf in arrays.values() if leaf.ndim > 1 and leaf.size > 1}
    for path, leaf in unowned.items():
        if jnp.shape(leaf) in shapes:
            return f"arrays such as {trees.path_string(path)!r} outside of trees of parameters"
    return None
