"""Finds what is wrong with a set-up, as far as parameters and optimizer state show."""

from __future__ import annotations

import jax
import numpy as np
import optax

from sparsity.core import trees
from sparsity.core.checks import check_values
from sparsity.core.trees import Params
from sparsity.masks import read_masks
from sparsity.training.state import SparseState, get_sparse_state


def check(params: Params, opt_state: optax.OptState) -> list[str]:
    """Returns what is wrong with a set-up, a sentence or two for each fault; [] if nothing is.

    Call it after the first steps: it says that nothing is pruned, that all masks are ones, or that
    masked weights are not 0, as where the wrapper is not the outermost transformation.

    Args:
      params: tree of parameters as the model uses them (masked for straight-through methods).
      opt_state: optimizer state with one SparseState.

    Raises:
      ValueError: values are traced, or the state is of other parameters.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> masks = {"w": jnp.array([[1, 0]], jnp.uint8)}
      >>> pruner = sparsity.StaticRandomSparse()
      >>> tx = optax.chain(pruner.wrap_optax(optax.sgd(0.1), masks), optax.scale(0.5))
      >>> params = {"w": jnp.ones((1, 2))}
      >>> updates, opt_state = tx.update(params, tx.init(params), params)
      >>> [fault] = check(optax.apply_updates(params, updates), opt_state)
      >>> fault.partition(':')[0]
      "Masked weights are not 0 in 'w' (masks 0.50, weights 0.00)"
    """
    remedy = "Call check outside of jit, scan and vmap."
    check_values("params", params, remedy)
    check_values("opt_state", opt_state, remedy)
    state = get_sparse_state(opt_state)
    faults = []
    if not jax.tree.leaves((state.masks, state.target_sparsities)):
        faults.append(
            "No parameter is pruned: set sparsity_distribution_fn, for example Uniform(0.8)."
        )
    masks = _read_masks(params, state)
    if masks and all(np.all(mask) for mask in masks.values()):
        faults.append(
            f"All masks are ones after {int(state.count)} steps: training is dense until the "
            "scheduler updates them."
        )
    return faults + _explain_dense_weights(params, masks, state)


def explain_dense_weights(params: Params, state: SparseState) -> list[str]:
    """Returns what to do about masked weights that are not 0, [] if all are."""
    return _explain_dense_weights(params, _read_masks(params, state), state)


def _explain_dense_weights(
    params: Params, masks: dict[trees.KeyPath, np.ndarray], state: SparseState
) -> list[str]:
    weights, shares = trees.leaves_by_path(params), []
    for path, mask in masks.items():
        weight, name = np.asarray(weights[path]), trees.path_string(path)
        if np.any(weight[mask == 0]):
            masked, zeros = np.mean(mask == 0), np.mean(weight == 0)
            shares.append(f"{name!r} (masks {masked:.2f}, weights {zeros:.2f})")
    if not shares:
        return []
    places = ", ".join(shares[:4]) + (f" and {len(shares) - 4} more" if len(shares) > 4 else "")
    if state.count == 0:
        remedy = "start with params, opt_state = updater.init(tx, params), which masks them."
    else:
        remedy = (
            "wrap the complete optimizer, updater.wrap_optax(optax.chain(...)), as another "
            "transformation changes the updates of the wrapper. For straight-through methods, give "
            "the parameters that the model uses."
        )
    return [f"Masked weights are not 0 in {places}: {remedy}"]


def _read_masks(params: Params, state: SparseState) -> dict[trees.KeyPath, np.ndarray]:
    """Returns the masks by path; none of an algorithm that stores none."""
    if state.masks is None:
        return {}
    masks = read_masks(state.masks, params, may_be_packed=True)
    return {path: np.asarray(mask) for path, mask in trees.leaves_by_path(masks).items()}
