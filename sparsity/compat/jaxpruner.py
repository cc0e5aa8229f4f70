"""Names for programs that were written for jaxpruner.

`import sparsity as jaxpruner` has the classes at the top. The functions of the modules `utils` and
`mask_calculator` are here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping

import chex
import jax

from sparsity.core.trees import Masks, Params, PyTree, Tree
from sparsity.masks import apply_masks, read_masks
from sparsity.patterns import Block, NByM, SparsityType, Unstructured
from sparsity.reports import summarize_intersection, summarize_sparsity
from sparsity.training.state import SparseState

__all__ = [
    "KERNEL_FILTER_FN",
    "NOT_DIM_ONE_FILTER_FN",
    "apply_mask",
    "convert_state",
    "get_topk_fn",
    "summarize_intersection",
    "summarize_sparsity",
    "topk_block_mask_calculator",
    "topk_mask_calculator",
    "topk_n_by_m_mask_calculator",
]

_FIELDS = ("masks", "inner_state", "target_sparsities", "count")


def KERNEL_FILTER_FN(path: tuple[str, ...], param: chex.Array) -> bool:
    """Selects parameters with the name 'kernel'."""
    return bool(path) and path[-1] == "kernel"


def NOT_DIM_ONE_FILTER_FN(path: tuple[str, ...], param: chex.Array) -> bool:
    """Selects parameters with two axes or more."""
    return param.ndim > 1


def apply_mask(param: Tree, mask: Masks, is_packed: bool = False) -> Tree:
    """Returns a parameter, or a tree of parameters, with pruned entries at exactly 0.0."""
    return apply_masks(param, read_masks(mask, param, is_packed))


def convert_state(state: PyTree, params: Params) -> SparseState:
    """Converts the state of an optimizer that jaxpruner wrapped.

    Args:
      state: a tuple or a mapping of masks, inner_state, target_sparsities and count. Masks may be
        packed as in jaxpruner, each leaf as one row of bits.
      params: tree of parameters.

    Returns:
      A state for an updater without `use_packed_masks`.

    Raises:
      ValueError: the state has other fields, or a mask does not fit its parameter.

    Example:
      >>> import jax.numpy as jnp
      >>> old = {"masks": jnp.packbits(jnp.array([1, 0, 1])), "inner_state": None,
      ...        "target_sparsities": 0.3, "count": 7}
      >>> convert_state(old, jnp.ones(3)).masks
      Array([1, 0, 1], dtype=uint8)
    """
    named = state if isinstance(state, Mapping) else getattr(state, "_asdict", dict)()
    if not named and isinstance(state, tuple) and len(state) == len(_FIELDS):
        named = dict(zip(_FIELDS, state, strict=True))
    if set(named) != set(_FIELDS):
        raise ValueError(
            f"state must have the fields {', '.join(_FIELDS)} of jaxpruner's SparseState, got "
            f"{', '.join(map(str, named)) or type(state).__name__}."
        )
    converted = SparseState(**named)
    return converted._replace(masks=read_masks(converted.masks, params, may_be_packed=True))


def get_topk_fn(sparsity_type: SparsityType) -> Callable[[chex.Array, chex.Numeric], jax.Array]:
    """Returns the function from scores and a sparsity to the mask of a pattern.

    Args:
      sparsity_type: an instance, or a class that needs no arguments.

    Raises:
      ValueError: `sparsity_type` is neither. The returned function raises a ValueError if the
        pattern does not fit the scores.
    """
    pattern = sparsity_type
    if isinstance(sparsity_type, type) and issubclass(sparsity_type, SparsityType):
        with contextlib.suppress(TypeError):  # a class that needs arguments
            pattern = sparsity_type()
    if not isinstance(pattern, SparsityType):
        raise ValueError(
            "sparsity_type must be an instance such as Unstructured(), NByM(2, 4) or "
            f"Block((4, 4)), got {sparsity_type!r}."
        )
    return functools.partial(_select_mask, sparsity_type=pattern)


def topk_mask_calculator(scores: chex.Array, sparsity: chex.Numeric) -> jax.Array:
    """Returns the mask of the highest scores."""
    return _select_mask(scores, sparsity, Unstructured())


def topk_n_by_m_mask_calculator(scores: chex.Array, sparsity_type: NByM) -> jax.Array:
    """Returns the mask of the n highest of every m scores."""
    return _select_mask(scores, 1.0, sparsity_type)


def topk_block_mask_calculator(
    scores: chex.Array,
    sparsity: chex.Numeric,
    block_height: int,
    block_width: int,
    use_avg_pooling: bool,
) -> jax.Array:
    """Returns the mask of the highest blocks of the last two axes."""
    return _select_mask(scores, sparsity, Block((block_height, block_width), use_avg_pooling))


def _select_mask(
    scores: chex.Array, sparsity: chex.Numeric, sparsity_type: SparsityType
) -> jax.Array:
    sparsity_type.check(scores.shape, 0, "scores")
    return sparsity_type.select(scores, sparsity)
