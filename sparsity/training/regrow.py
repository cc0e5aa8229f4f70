"""Restarts weights that return to a mask at zero, with the state of a fresh optimizer."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity.core import owners, trees
from sparsity.core.checks import is_traced
from sparsity.core.dtypes import promote
from sparsity.core.kernels import at_runtime
from sparsity.core.trees import Masks, Params, PyTree
from sparsity.core.warn import warn
from sparsity.masks import apply_mask, pack_masks, unpack, unpack_masks
from sparsity.training.kept_state import KeptState
from sparsity.training.state import SparseState


def pack_before_update(
    masks: Masks, params: Params, count: chex.Numeric
) -> tuple[PyTree, chex.Numeric]:
    """Returns packed masks, and `count` as a value that exists once the masks are packed.

    New masks depend on the count. So XLA may write the first of them over the old masks, whose last
    reader is the branch that packs them. XLA:CPU removes barriers before it looks for copies.

    Args:
      masks: tree of masks, not packed.
      params: tree of parameters.
      count: number of updates so far.
    """
    if not is_traced(count):
        return pack_masks(masks, params), count

    def skip(masks: Masks, count: jax.Array) -> tuple[PyTree, jax.Array]:
        return jax.tree.map(jnp.zeros_like, pack_masks(masks, params)), count + 1

    bits, count = jax.lax.cond(
        at_runtime(1) > 0, lambda x, n: (pack_masks(x, params), n), skip, masks, count
    )
    return bits, count


def restart_regrown(
    old_bits: PyTree, new: SparseState, params: Params, fresh: PyTree
) -> tuple[SparseState, PyTree]:
    """Gives weights that are new in the mask the state of a fresh optimizer.

    Args:
      old_bits: tree of the packed masks before the mask update.
      new: the state after the mask update.
      params: tree of parameters.
      fresh: result of `init` of the inner optimizer.

    Returns:
      The new state and the packed mask of the weights that have grown.
    """

    new_bits = pack_masks(new.masks, params)
    grown = trees.map_matched(
        lambda _, bits, old: bits & ~old, new_bits, old_bits, role="new masks"
    )
    regrown = unpack_masks(grown, params)
    # All later code, the new masks included, reads the packed mask of grown weights. The compiler
    # then sees the last read of the old masks, and writes the new masks in their place. Otherwise
    # every step copies the masks; tests look for the copies in the compiled program.
    masks = trees.map_matched(lambda _, mask, more: mask | more, new.masks, regrown)
    chosen = trees.map_matched(lambda _, param, mask: mask, params, regrown)
    inner_state = owners.replace_where(new.inner_state, fresh, chosen)
    return new._replace(masks=masks, inner_state=inner_state), grown


def without_grown(params: Params, grown: PyTree) -> Params:
    """Returns the arrays for the inner optimizer: zeros where weights have grown.

    Args:
      params: tree of parameters, or of kept entries.
      grown: tree of bools like `params`, or of packed masks; `None` if nothing has grown.
    """

    def zero(_: trees.KeyPath, param: jax.Array, where: jax.Array | None) -> jax.Array:
        if where is None:
            return param
        return apply_mask(param, ~_read_grown(where, param))

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
        return jnp.where(_read_grown(where, likes[path]), update - param, update)

    return trees.map_matched(restart, updates, grown, role="updates")


def _read_grown(where: jax.Array, like: jax.Array) -> jax.Array:
    """Returns which entries have grown, a bool for each, from bools or a packed mask."""
    return where if where.dtype == bool else unpack(where, like) > 0


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
