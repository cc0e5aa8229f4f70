"""Merges adapters of low rank into pruned weights without making the weights dense.

Source of the adapters: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax.tree_util import SequenceKey

from sparsity.core import sharding, trees
from sparsity.core.arrays import promote
from sparsity.core.trees import Masks, PyTree, Tree
from sparsity.masks import apply_mask, read_masks


def merge_lora(params: Tree, lora: PyTree, masks: Masks, *, scale: chex.Numeric = 1.0) -> Tree:
    """Merges adapters into weights under the masks: mask * (W + scale * A @ B).

    The sum without a mask is dense. Use this function in the forward pass, too, so that adapters
    train as they will be merged.

    Args:
      params: tree of weights W, of shape [*batch, *in, *out].
      lora: tree like `params` with a tuple (A, B) in the place of each adapted weight: A of shape
        [*batch, *in, rank], B of shape [*batch, rank, *out]; `None` in the place of others. The
        numbers of axes determine the number of batch axes.
      masks: tree of masks, packed or not, `None` for a dense weight: the masks of
        `get_sparse_state(opt_state)`, or the second result of `instant_sparsify`.
      scale: factor of A @ B, a real number, often alpha / rank.

    Returns:
      Tree like `params`, with pruned weights at exactly 0.0. Sums are taken in float32 or wider and
      rounded once, to the dtype of W. A weight without an adapter is only masked.

    Raises:
      ValueError: an adapter has no weight, is no tuple (A, B), or has shapes or a dtype that do not
        fit, or a weight has neither a mask nor `None`; the message names the path. `scale` is no
        real number.

    Example:
      >>> params = {"kernel": jnp.array([[1.0, 0.0], [0.0, 2.0]])}
      >>> lora = {"kernel": (jnp.array([[1.0], [2.0]]), jnp.array([[3.0, 4.0]]))}
      >>> masks = {"kernel": jnp.array([[1, 0], [0, 1]])}
      >>> merge_lora(params, lora, masks, scale=0.5)["kernel"]
      Array([[2.5, 0. ],
             [0. , 6. ]], dtype=float32)
    """
    if jnp.shape(scale) or jnp.iscomplexobj(scale):
        raise ValueError(f"scale must be a real number, got scale = {scale!r}.")
    factors = trees.leaves_by_path(lora)

    def merge(path: trees.KeyPath, param: jax.Array, mask: jax.Array | None) -> jax.Array:
        a, b = (factors.pop((*path, SequenceKey(i)), None) for i in range(2))
        if a is None and b is None:
            return apply_mask(param, mask)
        _check_adapter(trees.path_string(path), param, a, b)
        return sharding.shard_like(param, _merge, param, a, b, mask, scale)

    unpacked = read_masks(masks, params, may_be_packed=True)
    merged: Tree = trees.map_matched(merge, params, unpacked)
    if factors:
        raise ValueError(
            f"lora has leaves at {trees.listed([trees.path_string(path) for path in factors])}: "
            "give a tuple (A, B) at the path of a weight, and None elsewhere."
        )
    return merged


def _merge(
    param: jax.Array, a: jax.Array, b: jax.Array, mask: jax.Array | None, scale: chex.Numeric
) -> jax.Array:
    dtype = promote(*(jnp.result_type(x) for x in (param, a, b)), jnp.float32)
    a, b = a.astype(dtype), b.astype(dtype)
    batch = _count_batch_axes(param, a, b)
    axes = tuple(range(batch))
    contracted = ((a.ndim - 1,), (batch,)), (axes, axes)
    product = jax.lax.dot_general(a, b, contracted, precision=jax.lax.Precision.HIGHEST)
    merged = param.astype(dtype) + jnp.asarray(scale, dtype) * product
    return apply_mask(merged.astype(param.dtype), mask)


def _count_batch_axes(param: jax.Array, a: jax.Array, b: jax.Array) -> int:
    """Returns the number of leading axes that W, A and B share."""
    return jnp.ndim(a) + jnp.ndim(b) - 2 - jnp.ndim(param)


def _check_adapter(name: str, param: jax.Array, a: jax.Array | None, b: jax.Array | None) -> None:
    """Raises a ValueError that names the weight unless A and B fit."""
    fits, batch = False, 0 if a is None or b is None else _count_batch_axes(param, a, b)
    if a is not None and b is not None and 0 <= batch < min(jnp.ndim(a), jnp.ndim(b)):
        fits = a.shape[:-1] + b.shape[batch + 1 :] == param.shape
        fits &= a.shape[:batch] == b.shape[:batch] and a.shape[-1] == b.shape[batch]
    if not fits:
        shapes = [None if factor is None else jnp.shape(factor) for factor in (a, b)]
        raise ValueError(
            f"The adapter of {name!r} has the shapes A = {shapes[0]} and B = {shapes[1]}; a weight "
            f"of shape {param.shape} needs A of [*batch, *in, rank], B of [*batch, rank, *out]."
        )
    is_complex = jnp.iscomplexobj(a) or jnp.iscomplexobj(b)
    if not trees.is_prunable(param) or (is_complex and not jnp.iscomplexobj(param)):
        raise ValueError(
            f"A weight of dtype {jnp.result_type(param)} cannot hold the adapter of {name!r} of "
            f"dtype {jnp.result_type(a, b)}. Give None to this weight."
        )
