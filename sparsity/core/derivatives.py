"""Derivatives of states that pass through a loop, which reverse mode cannot differentiate."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsity.core import trees
from sparsity.core.trees import PyTree, Tree


def hold_constant(tree: Tree) -> Tree:
    """Returns a tree whose arrays have no derivatives; other leaves pass."""
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if _is_inexact(x) else x, tree)


def replace_values(like: Tree, values: PyTree) -> Tree:
    """Returns `values` with the derivatives of `like`, which is computed only for derivatives.

    Args:
      like: tree of arrays.
      values: tree of the same structure, shapes and dtypes.
    """
    leaves, treedef = jax.tree.flatten(values)
    at = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]
    likes = jax.tree.leaves(like)
    replaced = _take_values([leaves[i] for i in at], [likes[i] for i in at])
    for i, leaf in zip(at, replaced, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


@jax.custom_jvp
def _take_values(values: list[jax.Array], likes: list[jax.Array]) -> list[jax.Array]:
    return values


@_take_values.defjvp
def _take_derivatives(
    primals: tuple[list[jax.Array], list[jax.Array]],
    tangents: tuple[list[jax.Array], list[jax.Array]],
) -> tuple[list[jax.Array], list[jax.Array]]:
    return _take_values(*primals), tangents[1]


def _is_inexact(leaf: PyTree) -> bool:
    return trees.is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
