"""Compares updates: does an optimizer train a cut model as it trains the masked one?

`shrink` and `compact` ask here when they get `tx`: they have arrays and a state, so that updates by
random gradients run on both models. `use_compact_state` and `train_only` have shapes alone when the
state starts, and ask `training.entrywise_proof`, which compares the programs of the optimizer.

A comparison accepts more optimizers than a proof, such as those that accumulate gradients or reduce
along axes that are not cut, and does not notice what only other gradients or later updates bring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.core import sharding, trees
from sparsity.core.checks import check_values
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.training.state import SparseState, check_no_state
from sparsity.training.step_checks import check_optimizer

_MOST_UPDATES = 64
# Of the gradients in each of four updates; 0 for both signs. Removed entries, which are 0, are then
# within the range of the others, below all of them, and above.
_SIGNS = 0, 0, 1, -1


def check_masks_and_state(
    masks: Masks, opt_state: optax.OptState | None, tx: optax.GradientTransformation | None
) -> None:
    """Raises a ValueError if masks, state and optimizer are missing, traced or confused."""
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


def check_updates(
    tx: optax.GradientTransformation,
    params: Params,
    state: optax.OptState,
    *,
    mask: Callable[[trees.KeyPath, jax.Array], jax.Array],
    cut: Callable[[PyTree], PyTree],
    cut_state: Callable[[optax.OptState], optax.OptState],
    model: str,
    remedy: str,
) -> float:
    """Compares updates by random gradients, of masked parameters and of what remains of them.

    Compares four updates, or more until one is not 0, as where `MultiSteps` accumulates gradients.
    Gradients of the third are positive, of the fourth negative. A difference that only other
    gradients or later updates bring is not noticed.

    Args:
      tx: the optimizer.
      params: masked parameters, arrays and `None`.
      state: state of `tx`, or a SparseState around that state.
      mask: `mask(path, array)` sets removed entries to 0.
      cut: removes entries from a tree like the parameters.
      cut_state: removes entries from a state.
      model: name of the model without entries, for the error.
      remedy: last remedy in the error.

    Returns:
      The largest difference, as a part of the largest entry of its array.
    """
    rng = np.random.default_rng(0)
    state = read_state(tx, params, state)

    def make_gradient(sign: int, path: trees.KeyPath, leaf: jax.Array) -> jax.Array:
        if not trees.is_prunable(leaf):
            return leaf
        drawn = rng.standard_normal(leaf.shape)
        signed = jnp.asarray(sign * np.abs(drawn) if sign else drawn, leaf.dtype)
        return mask(path, sharding.place_like(leaf, signed))

    # Some transforms ask for the value of the loss.
    update = jax.jit(
        functools.partial(optax.with_extra_args_support(tx).update, value=jnp.float32(1))
    )
    small_update = _explain_errors(update, model, remedy)
    largest, is_still = 0.0, True
    small_params, small_state = cut(params), cut_state(state)
    for step in range(_MOST_UPDATES):
        if step >= 4 and not is_still:
            break
        sign = _SIGNS[step % len(_SIGNS)]
        grads = trees.map_matched(functools.partial(make_gradient, sign), params)
        updates, state = update(grads, state, params)
        small_updates, small_state = small_update(cut(grads), small_state, small_params)
        moves = jax.device_get(jax.tree.leaves(trees.prunable(updates)))
        is_still = is_still and not any(map(np.any, moves))
        expected = {"state": cut_state(state), "update": cut(updates)}
        computed = {"state": small_state, "update": small_updates}
        largest = max(largest, _compare(expected, computed, model, remedy))
    return largest


def read_state(tx: optax.GradientTransformation, params: Params, state: PyTree) -> PyTree:
    """Returns a state of `tx`, also from a SparseState; raises a ValueError for another's."""
    expected = trees.leaves_by_path(jax.eval_shape(tx.init, params)).keys()
    if (
        isinstance(state, SparseState)
        and trees.leaves_by_path(state.inner_state).keys() == expected
    ):
        return state.inner_state
    if differing := sorted(map(trees.path_string, expected ^ trees.leaves_by_path(state).keys())):
        raise ValueError(
            f"opt_state is no state of tx for these params: {trees.listed(differing)} differ. "
            "Give the state that tx.init(params) starts, or an update of it."
        )
    return state


def _explain_errors(
    update: Callable[..., PyTree], model: str, remedy: str
) -> Callable[..., PyTree]:
    """Returns the update of an optimizer with an error for optimizers that read shapes."""

    def run(*args: PyTree) -> PyTree:
        try:
            return update(*args)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The optimizer would not train the {model} as the masked one: it fails on arrays "
                f"of other shapes. Use an optimizer that works entry by entry, or {remedy}. It "
                f"says: {error}"
            ) from error

    return run


def _compare(expected: PyTree, computed: PyTree, model: str, remedy: str) -> float:
    """Returns the largest difference; raises a ValueError if it is more than rounding."""
    largest = 0.0
    exact_leaves, leaves = trees.leaves_by_path(expected), jax.tree.leaves(computed)
    if len(leaves) != len(exact_leaves):
        raise ValueError(
            f"The optimizer would not train the {model} as the masked one: updates and state have "
            f"{len(leaves)} leaves in place of {len(exact_leaves)}. Use an optimizer whose state "
            f"does not depend on the shapes of arrays, or {remedy}."
        )
    for (path, exact), actual in zip(exact_leaves.items(), leaves, strict=True):
        if jnp.issubdtype(exact.dtype, jax.dtypes.prng_key) or not exact.size:
            continue
        # 7e-5 in float32: sums of fewer terms round otherwise, and a transform may amplify that.
        rounding = jnp.finfo(exact.dtype).eps ** 0.6 if trees.is_prunable(exact) else 0.0
        exact, actual = (np.asarray(x).astype(complex) for x in (exact, actual))
        is_same = (exact == actual) | (np.isnan(exact) & np.isnan(actual))
        scale = np.abs(exact[np.isfinite(exact)]).max(initial=0) or 1.0
        difference = np.abs(np.where(is_same, 0, exact) - np.where(is_same, 0, actual)) / scale
        largest = max(largest, float(difference.max()))
        if not difference.max() <= rounding:
            index = np.unravel_index(difference.argmax(), difference.shape)
            raise ValueError(
                f"The optimizer would not train the {model} as the masked one: "
                f"{trees.path_string(path)!r} has {actual[index].real:.6g} in place of "
                f"{exact[index].real:.6g} at {[int(i) for i in index]}. It reads the shapes of "
                "arrays, averages over them, joins moments of removed entries with others, or "
                "updates masks across groups. Cut when masks are final, use an optimizer that "
                f"works entry by entry, or {remedy}."
            )
    return largest
