"""The state of a wrapped optimizer: finding it in a nested state, and its trees of masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from sparsity import masks as masks_lib
from sparsity import trees


class SparseState(NamedTuple):
    """State of a wrapped optimizer.

    Attributes:
      masks: tree like the params; uint8 masks (1 = keep), `None` for dense leaves. With
        `use_packed_masks` they are packed along the last axis.
      inner_state: state of the inner optimizer.
      target_sparsities: tree like the params of float32 scalars, `None` for dense leaves.
      count: int32 scalar, number of updates so far.
    """

    masks: chex.ArrayTree = None
    inner_state: Any = None
    target_sparsities: chex.ArrayTree = None
    count: Any = None


def get_sparse_state(opt_state: Any) -> SparseState:
    """Returns the only `SparseState` in an optimizer state, however nested.

    Raises:
      ValueError: there is none, or more than one; their paths are named.

    Example:
      >>> opt_state = ("of clipping", SparseState(masks=None, count=3))
      >>> get_sparse_state(opt_state).count
      3
    """
    found = trees.find_nodes(opt_state, SparseState)
    if len(found) == 1:
        return found[0][1]
    places = ", ".join(repr(jax.tree_util.keystr(path) or "the root") for path, _ in found)
    raise ValueError(
        "Exactly one SparseState is needed, but the optimizer state holds "
        + (f"{len(found)}, at {places}" if found else "none")
        + ". Pass the state of an optimizer that was wrapped once with wrap_optax, or that part of "
        "it which is meant."
    )


def set_sparse_state(opt_state: Any, sparse_state: SparseState) -> Any:
    """Returns `opt_state` with its only `SparseState` replaced; raises as `get_sparse_state`."""
    get_sparse_state(opt_state)
    is_state = lambda node: isinstance(node, SparseState)  # noqa: E731
    replace = lambda node: sparse_state if is_state(node) else node  # noqa: E731
    return jax.tree.map(replace, opt_state, is_leaf=is_state)


def apply_masks(tree: chex.ArrayTree, masks: chex.ArrayTree, role: str) -> chex.ArrayTree:
    """Applies masks, packed or not, by path; leaves without a mask are returned as they are.

    Raises:
      ValueError: a mask has no leaf in `tree` (which plays the `role`), or one of another shape.
    """
    check_masks(tree, masks, role)
    return trees.map_matched(
        lambda _, leaf, mask: masks_lib.apply_mask(leaf, mask), tree, masks, role=role
    )


def check_masks(tree: chex.ArrayTree, masks: chex.ArrayTree, role: str) -> None:
    """Raises as `apply_masks` does when masks and tree do not fit."""

    def check(path: trees.KeyPath, leaf: Any, mask: Any) -> None:
        shape = jnp.shape(leaf)
        if mask is not None and mask.shape not in masks_lib.mask_shapes(shape):
            raise ValueError(
                f"The mask of {trees.path_string(path)!r} has shape {mask.shape}, but its leaf in "
                f"the {role} has shape {shape}. Masks belong to the model that the optimizer's "
                "`init` saw."
            )

    trees.map_matched(check, tree, masks, role=role)


def fit_masks(masks: chex.ArrayTree, params: chex.ArrayTree, packed: bool) -> chex.ArrayTree:
    """Packs or unpacks masks, whatever they are now."""
    return pack_masks(masks, params) if packed else unpack_masks(masks, params)


def pack_masks(masks: chex.ArrayTree, params: chex.ArrayTree) -> chex.ArrayTree:
    """Packs the masks of `params` to bits; those that are packed already stay as they are."""
    return _with_params(masks_lib.pack, masks, params)


def unpack_masks(masks: chex.ArrayTree, params: chex.ArrayTree) -> chex.ArrayTree:
    """Undoes `pack_masks`."""
    return _with_params(masks_lib.unpack, masks, params)


def _with_params(
    fn: Callable[..., jax.Array], masks: chex.ArrayTree, params: chex.ArrayTree
) -> chex.ArrayTree:
    check_masks(params, masks, "params")
    likes = trees.leaves_by_path(params)
    return trees.map_matched(lambda path, mask: fn(mask, likes[path]), masks)
