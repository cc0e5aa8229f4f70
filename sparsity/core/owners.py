"""The leaves of an optimizer state and the parameters to which they belong.

An optimizer keeps trees that look like the parameters (moments, averages) inside its containers.
The search goes down from the root to the first node whose leaves have the paths of the parameters.
So a parameter called `mu`, or a tuple of moments, is never mistaken for another.

All rules about transformations of optax are here: which states hide the entries of parameters,
which moments do not start at 0, and along which axes an average lies.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.core import trees
from sparsity.core.trees import KeyPath, Params, Path, PyTree

# States of transformations that keep parameters among their own fields.
_HIDING = {optax.LookaheadState: "optax.lookahead"}
# States with moments that do not start at 0.
_STARTING_ABOVE_ZERO = (optax.ScaleByRssState,)
# Fields of averages that several axes of one size could give: the averaged axis, by length.
_AVERAGED = {"v_row": -1, "v_col": -2}  # of optax.scale_by_factored_rms


def list_owners(params: Params, state: PyTree) -> list[PyTree]:
    """Returns the owner of each leaf of an optimizer state, in the order of the leaves.

    The owner of a state leaf is the leaf of `params` at the same path of a subtree that looks like
    `params`, or `None`. Shapes may differ: factored second moments (adafactor) and histories
    (lbfgs) have owners, too.

    Args:
      params: tree with the parameters' paths; its leaves may be `None`.
      state: an optimizer state.

    Example:
      >>> list_owners({"w": 1.0}, [{"count": 0, "mu": {"w": 2.0}}])
      [None, 1.0]
    """
    by_path = trees.leaves_by_path(params)
    owner_paths = _find_owner_paths(state, trees.covered_paths(params))
    return [None if path is None else by_path.get(path) for path in owner_paths]


def map_owned(fn: Callable[..., object], params: Params, state: PyTree, *others: PyTree) -> PyTree:
    """Maps `fn(owner, leaf, *other_leaves)` over an optimizer state; see `list_owners`.

    Args:
      fn: a function of leaves.
      params: tree with the parameters' paths; its leaves may be `None`.
      state: an optimizer state.
      *others: trees of the structure of `state`.

    Example:
      >>> map_owned(lambda owner, leaf: owner, {"w": 1.0}, [{"count": 0, "mu": {"w": 2.0}}])
      [{'count': None, 'mu': {'w': 1.0}}]
    """
    treedef: Any  # jax has no types for its methods
    leaves, treedef = jax.tree.flatten(state)
    columns = [treedef.flatten_up_to(other) for other in others]
    return treedef.unflatten(map(fn, list_owners(params, state), leaves, *columns))


def map_with_fresh(
    fn: Callable[..., object], params: Params, state: PyTree, fresh: PyTree
) -> PyTree:
    """Maps `fn(owner, leaf, fresh_leaf)` as `map_owned` does.

    Leaves of `fresh`, as `init` returns it, are found by path: where `init` saw the weights alone,
    those of other parameters are missing, and `fresh_leaf` is `None`.
    """
    leaves = trees.leaves_by_path(fresh)
    matched = trees.map_matched(lambda path, _: leaves.get(path), state)
    return map_owned(fn, params, state, matched)


def replace_where(state: PyTree, fresh: PyTree, chosen: PyTree) -> PyTree:
    """Replaces entries of an optimizer state by those of `fresh` where `chosen` is true.

    Leaves without an owner (see `map_owned`), leaves of another shape than their owner, and leaves
    that are neither floating nor complex stay.

    Args:
      state: an optimizer state.
      fresh: the state that `init` returns for the weights.
      chosen: tree like the parameters of bool arrays; `None` keeps all state of that parameter.
    """

    def replace(is_chosen: jax.Array | None, old: PyTree, new: PyTree) -> PyTree:
        if (
            is_chosen is None
            or jnp.shape(old) != jnp.shape(is_chosen)
            or not trees.is_prunable(old)
        ):
            return old
        return jnp.where(is_chosen, new, old)

    return map_with_fresh(replace, chosen, state, fresh)


def list_axes(shape: tuple[int, ...], leaf_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the axes of a parameter along which a leaf of its state may lie.

    A moment lies along all axes, a factored one along all but the axis over which it averages; a
    leaf of any other shape may lie along none, so that the list is empty. Axes of one size leave
    several answers.

    Args:
      shape: shape of the parameter.
      leaf_shape: shape of the leaf.

    Example:
      >>> list_axes((4, 6, 6), (4, 6)), list_axes((4, 6, 6), (3,))
      ([(0, 2), (0, 1)], [])
    """
    axes = tuple(range(len(shape)))
    if leaf_shape == shape:
        return [axes]
    factored = [axes[:i] + axes[i + 1 :] for i in axes]
    return [each for each in factored if tuple(shape[i] for i in each) == leaf_shape]


def find_axes(
    shape: tuple[int, ...], leaf_shape: tuple[int, ...], path: Path
) -> tuple[int, ...] | None:
    """Returns the axes of `list_axes`, by the path of the leaf where shapes leave several.

    `None` if nothing tells the axes.
    """
    candidates = list_axes(shape, leaf_shape)
    for name in path if len(candidates) > 1 else ():
        if name in _AVERAGED:  # optax averages over the two longest axes
            averaged = int(np.argsort(shape, stable=True)[_AVERAGED[name]])
            return tuple(i for i in range(len(shape)) if i != averaged)
    return candidates[0] if len(candidates) == 1 else None


def name_hiding_state(params: Params, state: PyTree) -> str | None:
    """Names the part of a state that hides the entries of parameters; `None` without one."""
    if names := [name for kind, name in _HIDING.items() if trees.find_nodes(state, kind)]:
        return names[0]
    arrays = trees.leaves_by_path(trees.only_arrays(params))
    # A parameter without a tree has the path of every leaf of a state, and so owns them all.
    is_bare = () in arrays
    if not arrays or (is_bare and arrays[()].ndim == 1):
        return None
    leaves = trees.leaves_by_path(state)
    pairs = zip(leaves.items(), list_owners(params, state), strict=True)
    unowned = {
        path: leaf
        for (path, leaf), owner in pairs
        if trees.is_prunable(leaf) and (is_bare or owner is None)
    }
    size = sum(leaf.size for leaf in arrays.values())
    if any(leaf.shape == (size,) for leaf in unowned.values()):
        return "optax.flatten"
    # Vectors of a state, such as histories, may be as long as a bias by chance.
    shapes = {leaf.shape for leaf in arrays.values() if leaf.ndim > 1 and leaf.size > 1}
    for path, leaf in unowned.items():
        if leaf.shape in shapes and not is_bare:
            return f"arrays such as {trees.path_string(path)!r} outside of trees of parameters"
    return None


def name_start_above_zero(state: PyTree) -> str | None:
    """Names the part of a state in which moments do not start at 0; `None` without one."""
    nodes = [x for kind in _STARTING_ABOVE_ZERO for x in trees.find_nodes(state, kind)]
    return type(nodes[0][1]).__name__ if nodes else None


def check_state(
    params: Params, state: PyTree, remedy: str, changed: Mapping[KeyPath, tuple[int, ...]] = {}
) -> None:
    """Raises a ValueError if a value is no state, or has arrays and none of a parameter.

    Args:
      params: tree with the parameters' paths; its leaves may be `None`.
      state: an optimizer state; numbers and integers need no parameter.
      remedy: last remedy in the error.
      changed: {path: shape} of parameters whose moments change: an array without an owner may have
        neither the shape of one, nor lie below the path of one.
    """
    leaves = trees.leaves_by_path(state)
    root = leaves.get(())
    if root is not None and not trees.is_array(root) and not isinstance(root, numbers.Number):
        raise ValueError(f"opt_state must be an optimizer's state, got opt_state = {root!r}.")
    owner_paths = _find_owner_paths(state, trees.covered_paths(params))
    pairs = list(zip(leaves.items(), owner_paths, strict=True))
    arrays = [(x, owner) for x, owner in pairs if trees.is_prunable(x[1]) and x[1].ndim]
    strays = [x for x, owner in arrays if owner is None]
    if strays and len(strays) == len(arrays):
        path, leaf = strays[0]
        raise ValueError(
            f"No leaf of opt_state belongs to one of params, and {trees.path_string(path)!r} is an "
            f"array of shape {leaf.shape}: opt_state is the state of other params. Give the state "
            f"of these params, or {remedy}."
        )
    for path, leaf in strays:
        for owner, shape in changed.items():
            if leaf.shape == shape or _is_below(trees.path_names(path), trees.path_names(owner)):
                raise ValueError(
                    f"opt_state has an array {trees.path_string(path)!r} of shape {leaf.shape}, "
                    f"and nothing tells its entries for {trees.path_string(owner)!r} of shape "
                    f"{shape}. Give the state of these params, of an optimizer that keeps a moment "
                    f"for each weight, or {remedy}."
                )


def _is_below(names: Path, part: Path) -> bool:
    return any(names[i : i + len(part)] == part for i in range(len(names) - len(part) + 1))


def _find_owner_paths(node: PyTree, paths: set[KeyPath]) -> list[KeyPath | None]:
    """Returns for each leaf its path within a subtree like the parameters, or `None`."""
    leaves = trees.leaves_by_path(node)
    if leaves and _has_paths(node, paths):
        return list(leaves)
    below = trees.children(node)
    if not below:
        return [None] * len(leaves)
    return [owner_path for _, child in below for owner_path in _find_owner_paths(child, paths)]


def _has_paths(node: PyTree, paths: set[KeyPath]) -> bool:
    """Returns whether the leaves and placeholders of a node have the parameters' paths."""
    covered = trees.covered_paths(node)

    # A placeholder may stand for a subtree of the parameters, and the other way round.
    return (
        all(trees.is_within(key_path, covered) for key_path in paths)
        and all(
            trees.is_within(x, paths) or any(other[: len(x)] == x for other in paths)
            for x in covered
        )
        and all(key_path in paths for key_path in trees.leaves_by_path(node))
    )
