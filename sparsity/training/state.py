"""The state of a wrapped optimizer: finding it in a nested state, its masks, its sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from sparsity import masks as masks_lib
from sparsity.core import sharding, trees


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


def check_masks(
    tree: chex.ArrayTree, masks: chex.ArrayTree, role: str, packed: bool | None = None
) -> None:
    """Raises as `apply_masks` does when masks and tree do not fit.

    Args:
      tree: parameters or gradients.
      masks: tree of masks.
      role: what `tree` is, for the message.
      packed: whether the masks shall be packed; `None` takes both.
    """

    def check(path: trees.KeyPath, leaf: Any, mask: Any) -> None:
        if mask is None:
            return
        shape = jnp.shape(leaf)
        if mask.shape not in masks_lib.mask_shapes(shape):
            raise ValueError(
                f"The mask of {trees.path_string(path)!r} has shape {mask.shape}, but its leaf in "
                f"the {role} has shape {shape}. Masks belong to the model that the optimizer's "
                "`init` saw."
            )
        wanted = masks_lib.packed_shape(shape) if packed else shape
        if packed is not None and mask.shape != wanted:
            raise ValueError(
                f"The mask of {trees.path_string(path)!r} has shape {mask.shape}, but with "
                f"use_packed_masks={packed} it needs {wanted}. Restore a state with the "
                "setting that it was saved with, or convert its masks with "
                f"sparsity.sparse_state.{'pack' if packed else 'unpack'}_masks(masks, params)."
            )

    trees.map_matched(check, tree, masks, role=role)


def fit_masks(masks: chex.ArrayTree, params: chex.ArrayTree, packed: bool) -> chex.ArrayTree:
    """Packs or unpacks masks, whatever they are now."""
    return pack_masks(masks, params) if packed else unpack_masks(masks, params)


def place_masks(masks: chex.ArrayTree, params: chex.ArrayTree) -> chex.ArrayTree:
    """Gives fresh masks, packed or not, the sharding of their parameters."""
    return _with_params(lambda mask, like: sharding.place_like(like, mask), masks, params)


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


def sharding_like(params: chex.ArrayTree, opt_state: Any) -> Any:
    """Returns the shardings of an optimizer state: each leaf has that of its parameter.

    For `out_shardings` of a jitted `init`, which otherwise leaves moments and counts where the
    compiler likes, and for restoring a checkpoint on a mesh. Packed masks are sharded as their
    parameters, along the last axis only if its bytes divide. Scalars, and leaves whose shape is not
    their parameter's (factored moments, histories), are replicated.

    Args:
      params: tree of arrays, or of `jax.ShapeDtypeStruct` with shardings.
      opt_state: the state of any optimizer, or its shapes: `jax.eval_shape(tx.init, params)`.

    Returns:
      A tree like `opt_state` of shardings.

    Raises:
      ValueError: a parameter has no sharding; it is named.

    Example:
      >>> import optax
      >>> from jax.sharding import AxisType
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
      >>> rows = NamedSharding(mesh, PartitionSpec("data"))
      >>> params = {"kernel": jax.device_put(jnp.ones((8, 4)), rows)}
      >>> tx = optax.adam(0.1)  # or what wrap_optax returns
      >>> shardings = sharding_like(params, jax.eval_shape(tx.init, params))
      >>> opt_state = jax.jit(tx.init, out_shardings=shardings)(params)
      >>> opt_state[0].mu["kernel"].sharding.spec, opt_state[0].count.sharding.spec
      (P('data',), P())
    """
    leaves = trees.leaves_by_path(params)
    for path, leaf in leaves.items():
        if not isinstance(getattr(leaf, "sharding", None), Sharding):
            raise ValueError(
                f"{trees.path_string(path)!r} of params has no sharding. Pass arrays, or "
                "jax.ShapeDtypeStruct(shape, dtype, sharding=...)."
            )
    given = [leaf.sharding for leaf in leaves.values()]
    meshes = [own.mesh for own in given if isinstance(own, NamedSharding)]
    elsewhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else given[0]

    def sharding_of(param: Any, leaf: Any) -> Sharding:
        shape = jnp.shape(leaf)
        if param is None or shape not in (param.shape, masks_lib.packed_shape(param.shape)):
            return elsewhere
        return sharding.fit(param.sharding, shape)

    return trees.map_owned(sharding_of, params, opt_state)
