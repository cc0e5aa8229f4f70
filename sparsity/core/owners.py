"""Assigns the leaves of an optimizer state to parameters.

An optimizer keeps trees that look like the parameters (moments, averages) inside its containers.
The search goes down from the root to the first node whose leaves have the paths of the parameters.
So a parameter called `mu`, or a tuple of moments, is never mistaken for another.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sparsity.core import trees
from sparsity.core.trees import KeyPath, Params, PyTree


def map_owned(fn: Callable[..., object], params: Params, state: PyTree, *others: PyTree) -> PyTree:
    """Maps `fn(owner, leaf, *other_leaves)` over an optimizer state.

    The owner of a state leaf is the leaf of `params` at the same path of a subtree that looks like
    `params`, or `None`. Shapes may differ: factored second moments (adafactor) and histories
    (lbfgs) have owners, too.

    Args:
      fn: a function of leaves.
      params: tree with the parameters' paths; its leaves may be `None`.
      state: an optimizer state.
      *others: trees of the structure of `state`.

    Example:
      >>> map_owned(lambda owner, leaf: owner, {"w": 1.0}, [{"count": 0, "mu": {"w": 2.0}}])
      [{'count': None, 'mu': {'w': 1.0}}]
    """
    by_path = trees.leaves_by_path(params)
    owners = [
        None if owner_path is None else by_path.get(owner_path)
        for owner_path in _find_owner_paths(state, trees.covered_paths(params))
    ]
    treedef: Any  # jax has no types for its methods
    leaves, treedef = jax.tree.flatten(state)
    columns = [treedef.flatten_up_to(other) for other in others]
    return treedef.unflatten(map(fn, owners, leaves, *columns))


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


def check_stray(leaf: PyTree, names: Mapping[tuple[int, ...], str], remedy: str) -> None:
    """Raises a ValueError if a leaf of an optimizer state that has no owner looks like a moment.

    Args:
      leaf: the leaf.
      names: {shape: name} of the parameters whose moments change.
      remedy: last remedy in the error.
    """
    if trees.is_prunable(leaf) and leaf.ndim and leaf.shape in names:
        raise ValueError(
            f"The optimizer's state has a leaf of the shape {leaf.shape} of {names[leaf.shape]!r} "
            "in a tree whose leaves are not those of params. Give the state of these params, or "
            f"{remedy}."
        )


def check_state(params: Params, state: PyTree, remedy: str) -> None:
    """Raises a ValueError if a value is no state, or has arrays and none of a parameter.

    Args:
      params: tree with the parameters' paths; its leaves may be `None`.
      state: an optimizer state; numbers and integers need no parameter.
      remedy: last remedy in the error.
    """
    leaves = trees.leaves_by_path(state)
    root = leaves.get(())
    if root is not None and not trees.is_array(root) and not isinstance(root, numbers.Number):
        raise ValueError(f"opt_state must be an optimizer's state, got opt_state = {root!r}.")
    owner_paths = zip(
        leaves.items(), _find_owner_paths(state, trees.covered_paths(params)), strict=True
    )
    arrays = [
        (x, owner_path) for x, owner_path in owner_paths if trees.is_prunable(x[1]) and x[1].ndim
    ]
    if arrays and all(owner_path is None for _, owner_path in arrays):
        (key_path, leaf), _ = arrays[0]
        raise ValueError(
            "No leaf of opt_state belongs to one of params, and "
            f"{trees.path_string(key_path)!r} is an array of shape {leaf.shape}: opt_state is the "
            f"state of other params. Give the state of these params, or {remedy}."
        )


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
