"""Restarts weights that return to a mask at zero, with the state of a fresh optimizer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from sparsity.core import owners, trees
from sparsity.core.dtypes import promote
from sparsity.core.trees import Params, PyTree
from sparsity.core.warn import warn
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


def check_resettable(
    params: Params, inner_state: optax.OptState, name: str = "", is_sure: bool = True
) -> None:
    """Rejects optimizers whose state hides which entry belongs to which parameter.

    Args:
      params: tree of parameters.
      inner_state: state of the optimizer.
      name: name of the class of the updater.
      is_sure: raise a ValueError, because weights regrow; `False` warns that they may.
    """
    hidden = name_opaque_state(params, inner_state)
    if hidden is None:
        return
    if is_sure:
        raise ValueError(
            f"An updater that regrows weights cannot wrap {hidden}: the state hides which "
            "entry belongs to which parameter, and regrown weights need a fresh state. Leave "
            f"{hidden} out."
        )
    warn(
        f"{name} may regrow weights, and cannot give them a fresh optimizer state: that of "
        f"{hidden} hides which entry belongs to which parameter. State regrows = False in "
        f"the class {name} if its masks only shrink, or leave {hidden} out."
    )


def name_opaque_state(params: Params, inner_state: optax.OptState) -> str | None:
    """Names the part of a state that hides the entries of parameters; `None` without one."""
    if any(jax.tree.leaves(node.positions) for _, node in trees.find_nodes(inner_state, KeptState)):
        return "sparsity.train_only"
    return owners.name_hiding_state(params, inner_state)
