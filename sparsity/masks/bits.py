"""Masks: stored, packed, read and applied.

A mask is a uint8 array of its parameter's shape, 1 where the weight is kept. A packed mask holds
one bit a weight: `packbits` along the last axis, each row padded to full bytes, so that leading
axes keep their sharding. The field `use_packed_masks`, or the shapes of the parameters, tell packed
masks from others.
"""

from __future__ import annotations

import functools
import math
from typing import TypeVar, overload

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import sharding, trees
from sparsity.core.checks import is_real
from sparsity.core.trees import Masks, Params, PyTree, Tree

Param = TypeVar("Param", bound=chex.Array)


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the packed mask of an array of a shape."""
    return (*shape[:-1], -(-shape[-1] // 8)) if shape else (1,)


def pack(mask: chex.Array, like: chex.Array) -> jax.Array:
    """Packs a mask to bits: uint8[*shape[:-1], ceil(shape[-1] / 8)].

    Args:
      mask: a mask of the shape of `like`.
      like: the parameter. The packed mask has the sharding of its leading axes, and of the last
        axis if the devices divide the bytes.

    Example:
      >>> pack(jnp.array([[1, 0, 0, 0, 0, 0, 0, 0, 1]], jnp.uint8), jnp.zeros((1, 9)))
      Array([[128, 128]], dtype=uint8)
    """
    shape = packed_shape(jnp.shape(like))
    return sharding.shard_like(like, _to_bits, mask, shape=shape)


def unpack(bits: chex.Array, like: chex.Array) -> jax.Array:
    """Undoes `pack`; returns uint8 of the shape of the parameter `like`."""
    return sharding.shard_like(like, functools.partial(_to_bytes, jnp.shape(like)), bits)


def _to_bytes(shape: tuple[int, ...], bits: jax.Array) -> jax.Array:
    if 0 in shape:
        return jnp.zeros(shape, jnp.uint8)
    if shape[-1:] == (1,):  # a byte a weight, packed or not
        return (bits != 0).astype(jnp.uint8)
    return jnp.unpackbits(bits, axis=-1, count=(shape or (1,))[-1]).reshape(shape)


@jax.jit
def _to_bits(mask: jax.Array) -> jax.Array:
    # `jnp.packbits` sums in uint32, four bytes for each byte of the result. XLA:CPU adds across
    # devices, but knows no bitwise or there.
    bits = mask.astype(bool).astype(jnp.uint8).reshape(mask.shape or (1,))
    bits = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % 8)])
    places = np.arange(7, -1, -1, dtype=np.uint8)
    shifted = bits.reshape(*packed_shape(mask.shape), 8) << places[(None,) * bits.ndim]
    # The bits are distinct: their sum is their bitwise or.
    return jnp.sum(shifted, axis=-1, dtype=jnp.uint8)


def pack_masks(masks: Tree, params: Params) -> Tree:
    """Packs masks to bits, as `use_packed_masks=True` stores them.

    Args:
      masks: tree of masks [*axes, n], `None` for dense parameters.
      params: tree of parameters with the shapes of the masks.

    Returns:
      Tree like `masks`, uint8[*axes, ceil(n / 8)]: eight masks in a byte along the last axis.

    Raises:
      ValueError: a mask does not fit its parameter; the message names the path.

    Example:
      >>> masks = {"w": jnp.array([[1, 0, 1]], jnp.uint8)}
      >>> packed = pack_masks(masks, {"w": jnp.ones((1, 3))})
      >>> packed["w"].tolist(), unpack_masks(packed, {"w": jnp.ones((1, 3))})["w"].tolist()
      ([[160]], [[1, 0, 1]])
    """
    check_masks(params, masks, are_packed=False)
    likes = trees.leaves_by_path(params)
    return trees.map_matched(lambda key_path, mask: pack(mask, likes[key_path]), masks)


def unpack_masks(masks: Tree, params: Params) -> Tree:
    """Unpacks the masks of a state with `use_packed_masks=True`; undoes `pack_masks`.

    Args:
      masks: tree of packed masks, `None` for dense parameters.
      params: tree of parameters, which give the shapes.

    Returns:
      Tree like `masks`: uint8 masks (1 = keep) of the shapes of the parameters.

    Raises:
      ValueError: a packed mask does not fit its parameter; the message names the path.

    Example:
      >>> packed = {"w": jnp.array([[160]], jnp.uint8)}  # 10100000
      >>> unpack_masks(packed, {"w": jnp.ones((1, 3))})["w"].tolist()
      [[1, 0, 1]]
    """
    check_masks(params, masks, are_packed=True)
    likes = trees.leaves_by_path(params)
    return trees.map_matched(lambda key_path, bits: unpack(bits, likes[key_path]), masks)


def are_packed(masks: Masks, likes: PyTree) -> bool:
    """Returns whether masks have the shapes of packed masks.

    A mask whose last axis has one entry is a byte a weight, packed or not.

    Args:
      masks: tree of masks.
      likes: tree of arrays with the shapes of parameters; some may be missing.
    """
    arrays = trees.leaves_by_path(likes)
    return any(
        key_path in arrays and jnp.shape(mask) != jnp.shape(arrays[key_path])
        for key_path, mask in trees.leaves_by_path(masks).items()
    )


def place_masks(masks: Masks, params: Params) -> Masks:
    """Gives fresh masks, packed or not, the sharding of their parameters."""
    likes = trees.leaves_by_path(params)
    return trees.map_matched(lambda key_path, x: sharding.place_like(likes[key_path], x), masks)


def read_masks(masks: Masks, params: Params, may_be_packed: bool, role: str = "masks") -> Masks:
    """Converts masks of a hook or a user to uint8 masks of zeros and ones.

    Args:
      masks: tree of masks of any real dtype; non-zero entries are kept.
      params: tree of parameters.
      may_be_packed: whether masks may be packed: by `pack_masks`, or each as one row of bits, as by
        `jax.tree.map(jnp.packbits, masks)`.
      role: name of the masks in messages.

    Raises:
      ValueError: a mask has no parameter or another shape, or a parameter has neither a mask nor
        `None`.
    """
    check_complete(params, masks, role)
    likes = trees.leaves_by_path(params)

    def read(key_path: trees.KeyPath, mask: jax.Array) -> jax.Array:
        shape, name = jnp.shape(likes[key_path]), trees.path_string(key_path)
        dtype: PyTree = getattr(mask, "dtype", type(mask))  # of a Python number, its class
        if not is_real(dtype):
            raise ValueError(
                f"The mask of {name!r} among the {role} must have real numbers, "
                f"got {np.dtype(dtype).name}."
            )
        if jnp.shape(mask) == shape:
            # A row of one weight is one byte, packed or not.
            return are_kept(mask)
        count = math.prod(shape)
        if may_be_packed and jnp.shape(mask) in (packed_shape(shape), (-(-count // 8),)):
            _check_bits(mask, name)
            if jnp.shape(mask) == packed_shape(shape):
                return unpack(mask, likes[key_path])
            return sharding.shard_like(
                likes[key_path], lambda bits: jnp.unpackbits(bits, count=count).reshape(shape), mask
            )
        packed = f", and its packed mask {packed_shape(shape)}" if may_be_packed else ""
        raise ValueError(
            f"The mask of {name!r} among the {role} has shape {jnp.shape(mask)}, but its parameter "
            f"has shape {shape}{packed}."
        )

    return trees.map_matched(read, masks)


@jax.jit
def are_kept(mask: chex.Array) -> jax.Array:
    """Returns uint8 ones where a mask of any real dtype is not zero."""
    return jnp.asarray(mask, bool).astype(jnp.uint8)


def check_complete(
    params: Params,
    masks: PyTree,
    role: str = "masks",
    remedy: str = "an array for a parameter that has a mask and None for one that stays dense",
) -> None:
    """Raises a ValueError that names a mask or `None` without a parameter, or the reverse.

    Args:
      params: tree of parameters.
      masks: tree of masks, or another that needs an array or `None` for each parameter.
      role: name of `masks` in messages.
      remedy: says what to give.
    """
    leaves, nodes = trees.leaves_by_path(params), trees.node_paths(params)
    entries = trees.leaves_and_none(masks).items()
    unknown = [x for x, mask in entries if x not in (nodes if mask is None else leaves)]
    trees.check_paths(leaves, unknown, "params", role)
    covered = trees.covered_paths(masks)
    lacking = [
        trees.path_string(key_path)
        for key_path, param in leaves.items()
        if trees.is_prunable(param) and not trees.is_within(key_path, covered)
    ]
    if lacking:
        raise ValueError(f"The {role} have nothing for {trees.listed(lacking)}. Give {remedy}.")


def check_masks(params: Params, masks: Masks, *, are_packed: bool) -> None:
    """Raises a ValueError that names a parameter without a mask of its shape or `None`."""
    check_complete(params, masks)
    check_shapes(params, masks, are_packed=are_packed)


def check_shapes(
    tree: PyTree, masks: Masks, *, are_packed: bool = False, role: str = "params"
) -> None:
    """Raises a ValueError that names a mask of another shape than the array at its path.

    Args:
      tree: parameters, gradients or updates.
      masks: tree of masks.
      are_packed: whether masks must be packed; otherwise none may be.
      role: name of `tree` in messages.
    """

    def check(key_path: trees.KeyPath, array: PyTree, mask: jax.Array | None) -> None:
        if mask is None:
            return
        shape, name = jnp.shape(array), trees.path_string(key_path)
        expected = packed_shape(shape) if are_packed else shape
        if jnp.shape(mask) != expected:
            raise ValueError(
                f"The mask of {name!r} has shape {jnp.shape(mask)}, but for {role} of shape "
                f"{shape} it needs {expected} with use_packed_masks={are_packed}. Give masks of "
                f"this model; sparsity.masks.{'pack' if are_packed else 'unpack'}_masks(masks, "
                "params) converts those of the other setting."
            )
        if are_packed:
            _check_bits(mask, name)

    trees.map_matched(check, tree, masks, role=role)


def _check_bits(mask: chex.Array, name: str) -> None:
    if mask.dtype != jnp.uint8:
        raise ValueError(
            f"The packed mask of {name!r} has dtype {mask.dtype} and not uint8. Pack masks with "
            "sparsity.masks.pack_masks(masks, params)."
        )


def apply_masks(params: Tree, masks: Masks) -> Tree:
    """Applies unpacked masks to parameters by path; raises as `check_masks`."""
    check_complete(params, masks)
    return mask_updates(params, masks, "params")


def mask_updates(updates: Tree, masks: Masks, role: str = "updates") -> Tree:
    """Applies unpacked masks by path; arrays without a mask stay unchanged.

    Raises:
      ValueError: a mask has another shape than the array at its path in `updates`, which messages
        call `role`.
    """
    check_shapes(updates, masks, role=role)
    return trees.map_matched(lambda _, x, mask: apply_mask(x, mask), updates, masks, role=role)


def are_ones(masks: Masks) -> jax.Array:
    """Returns whether unpacked masks remove nothing, a bool scalar."""
    return jnp.all(jnp.stack([jnp.all(mask > 0) for mask in jax.tree.leaves(masks)] or [True]))


@overload
def apply_mask(param: chex.Array, mask: chex.Array) -> jax.Array: ...
@overload
def apply_mask(param: Param, mask: None) -> Param: ...
def apply_mask(param: chex.Array, mask: chex.Array | None) -> chex.Array:
    """Selects kept entries; all others become exactly 0.0, also NaN, inf and -0.0.

    Args:
      param: array of any shape and dtype.
      mask: array of the same shape, not zero where entries are kept; `None` for a dense parameter.

    Raises:
      ValueError: one of both is no array, or their shapes differ.
    """
    if mask is None:
        return param
    shapes = [x.shape if trees.is_array(x) else x for x in (param, mask)]
    if not trees.is_array(param) or shapes[0] != shapes[1]:
        raise ValueError(f"param and mask must be arrays of one shape, got {shapes}.")
    return _apply(param, mask)


@jax.jit
def _apply(param: chex.Array, mask: chex.Array) -> jax.Array:
    return jnp.where(mask.astype(bool), param, jnp.zeros((), param.dtype))


@jax.custom_jvp
def apply_mask_straight_through(param: chex.Array, mask: chex.Array) -> jax.Array:
    """Applies a mask; the gradient with respect to `param` is the identity."""
    return apply_mask(param, mask)


@apply_mask_straight_through.defjvp
def _straight_through_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return apply_mask_straight_through(*primals), tangents[0]
