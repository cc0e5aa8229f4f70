"""Creates the mask of a single tensor by its pattern."""

from __future__ import annotations

import chex
import jax

from sparsity.core.checks import check_fraction
from sparsity.masks.sites import TopkFn
from sparsity.patterns import SparsityType


def create_mask(
    scores: chex.Array,
    sparsity: chex.Numeric,
    sparsity_type: SparsityType,
    *,
    target: chex.Numeric | None = None,
    batch_axes: int = 0,
    topk_fn: TopkFn | None = None,
) -> jax.Array:
    """Keeps the highest scores; ties go to the lowest index, NaN scores lowest.

    Of the n entries, blocks or channels of every slice exactly
    `max(1, round_half_even(n * (1 - float32(sparsity))))` are kept; of `FanIn`, of the n inputs of
    every group.

    Args:
      scores: [*batch, ...] array of any real dtype.
      sparsity: scalar in [0, 1], Python or traced.
      sparsity_type: pattern of the entries that are kept or removed together.
      target: for N:M, the sparsity at which n of m entries are kept: a lower `sparsity` keeps
        proportionally more of each group. `None` means `sparsity` itself.
      batch_axes: number of leading axes that index separate slices.
      topk_fn: `topk_fn(scores, sparsity) -> mask` replaces the selection; called with the scores
        of the entries, blocks or channels of one slice, or of the inputs of one group.

    Returns:
      uint8 mask of the shape of `scores`.
    """
    if not isinstance(sparsity_type, SparsityType):
        raise ValueError(
            f"sparsity_type must be a pattern such as NByM(2, 4), got sparsity_type = "
            f"{sparsity_type!r}."
        )
    check_fraction("sparsity", sparsity)
    return sparsity_type.select(
        scores, sparsity, target=target, batch_axes=batch_axes, topk_fn=topk_fn
    )
