"""Checks of the inputs of a step: gradients, masks and states."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity.core import trees
from sparsity.core.checks import check_values
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.masks import check_complete
from sparsity.training.state import SparseState, check_no_state, check_optax_state


def check_optimizer(name: str, value: object) -> None:
    """Raises a ValueError that names the argument unless it is a transformation of optax."""
    if isinstance(value, type) or not (hasattr(value, "init") and hasattr(value, "update")):
        raise ValueError(
            f"{name} must be an optax.GradientTransformation such as optax.adam(1e-3), got {name} "
            f"= {value!r}."
        )


def check_masks_and_state(
    masks: Masks,
    opt_state: optax.OptState | None,
    tx: optax.GradientTransformation | None,
    may_hold_masks: bool,
) -> None:
    """Raises a ValueError if masks, state and optimizer are missing, traced or confused.

    `may_hold_masks` as in `check_optax_state`.
    """
    if masks is None:
        raise ValueError("masks is None: no entry would be removed. Give the masks of params.")
    check_no_state(masks)
    check_values("masks", masks, "Call this function outside of jit, scan and vmap.")
    if isinstance(opt_state, optax.GradientTransformation):
        raise ValueError("opt_state is an optimizer: give its state, and the optimizer as tx.")
    if tx is not None:
        check_optimizer("tx", tx)
    if tx is not None and opt_state is None:
        raise ValueError("tx is checked with the optimizer's state: give opt_state, too.")
    check_optax_state(opt_state, tx, may_hold_masks)


def read_state(tx: optax.GradientTransformation, params: Params, state: PyTree) -> PyTree:
    """Returns a state of `tx`, also from a SparseState; raises a ValueError for another's."""
    expected = trees.leaves_by_path(jax.eval_shape(tx.init, params)).keys()
    if (
        isinstance(state, SparseState)
        and trees.leaves_by_path(state.inner_state).keys() == expected
    ):
        return state.inner_state
    if differing := expected ^ trees.leaves_by_path(state).keys():
        raise ValueError(
            f"opt_state is no state of tx for these params: {trees.list_paths(differing)} differ. "
            "Give the state that tx.init(params) starts, or an update of it."
        )
    return state


def check_sparse_state(state: object) -> None:
    """Raises a ValueError unless a wrapped optimizer made the state."""
    if not isinstance(state, SparseState):
        raise ValueError(
            "The state of a wrapped optimizer is a SparseState, as its `init` returns; got a state "
            f"of type {type(state).__name__}. A chain takes the state of the chain."
        )


def check_gradients(grads: PyTree, params: Params, masks: Masks) -> None:
    """Raises a ValueError that names a parameter without a gradient, or of another model.

    A masked parameter needs a gradient of its shape; that of others may be `None`.
    """
    likes = trees.leaves_by_path(params)
    check_complete(params, grads, "gradients", "the gradients of all parameters")

    def check(path: trees.KeyPath, grad: chex.Array, mask: chex.Array | None) -> None:
        if mask is not None and jnp.shape(grad) != likes[path].shape:
            raise ValueError(
                f"The gradient of {trees.path_string(path)!r} has shape {jnp.shape(grad)}, but its "
                f"parameter has shape {likes[path].shape}."
            )

    trees.map_matched(check, grads, masks, role="gradients")
