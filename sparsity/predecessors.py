"""Names that programs written for jaxpruner and jax_pruning use, and nothing else.

`import sparsity as jaxpruner` finds all of them at the top, and the functions of its modules
`utils` and `mask_calculator` here. They are plain functions of the package by other names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import chex
import jax

from sparsity.activations import prune_act_struct, prune_act_unstruct
from sparsity.core.trees import PyTree
from sparsity.masks import apply_masks, create_mask, read_masks
from sparsity.patterns import Block, NByM, SparsityType, Unstructured
from sparsity.reports import summarize_intersection, summarize_sparsity

__all__ = [
    "KERNEL_FILTER_FN",
    "NOT_DIM_ONE_FILTER_FN",
    "apply_mask",
    "get_topk_fn",
    "pruning_act_struct",
    "pruning_act_unstruct",
    "summarize_intersection",
    "summarize_sparsity",
    "topk_block_mask_calculator",
    "topk_mask_calculator",
    "topk_n_by_m_mask_calculator",
]

pruning_act_struct = prune_act_struct
pruning_act_unstruct = prune_act_unstruct


def KERNEL_FILTER_FN(path: tuple[str, ...], param: chex.Array) -> bool:
    """Selects parameters that are called 'kernel'."""
    return bool(path) and path[-1] == "kernel"


def NOT_DIM_ONE_FILTER_FN(path: tuple[str, ...], param: chex.Array) -> bool:
    """Selects parameters with two axes or more."""
    return param.ndim > 1


def apply_mask(param: PyTree, mask: PyTree, is_packed: bool = False) -> PyTree:
    """Returns a parameter, or a tree of them, with pruned entries at exactly 0.0."""
    return apply_masks(param, read_masks(mask, param, is_packed))


def get_topk_fn(sparsity_type: SparsityType) -> Callable[[chex.Array, chex.Numeric], jax.Array]:
    """Returns the function from scores and a sparsity to the mask of a type."""
    kind = sparsity_type() if isinstance(sparsity_type, type) else sparsity_type
    return functools.partial(create_mask, sparsity_type=kind)


def topk_mask_calculator(scores: chex.Array, sparsity: chex.Numeric) -> jax.Array:
    """Returns the mask of the highest scores."""
    return create_mask(scores, sparsity, Unstructured())


def topk_n_by_m_mask_calculator(scores: chex.Array, sparsity_type: NByM) -> jax.Array:
    """Returns the mask of the n highest of every m scores."""
    return create_mask(scores, 1.0, sparsity_type)


def topk_block_mask_calculator(
    scores: chex.Array,
    sparsity: chex.Numeric,
    block_height: int,
    block_width: int,
    use_avg_pooling: bool,
) -> jax.Array:
    """Returns the mask of the highest blocks of the last two axes."""
    return create_mask(scores, sparsity, Block((block_height, block_width), use_avg_pooling))
