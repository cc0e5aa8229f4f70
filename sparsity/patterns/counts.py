"""Numbers of entries that masks of a pattern keep, without scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.sharding import evaluate_now
from sparsity.patterns.base import SparsityType
from sparsity.selection.kept_counts import num_kept_int


def entry_counter(
    pattern: SparsityType, shape: tuple[int, ...], batch_axes: int = 0
) -> Callable[[float], int]:
    """Returns a function from a sparsity to the largest number of entries that a mask keeps.

    Args:
      pattern: the pattern of the mask.
      shape: shape of the parameter, batch axes included.
      batch_axes: number of leading axes that index separate slices.

    Example:
      >>> from sparsity.patterns import Block
      >>> entry_counter(Block((2, 2)), (4, 6))(0.5)
      12
    """
    slices, size = math.prod(shape[:batch_axes]), math.prod(shape[batch_axes:])
    if not slices * size:
        return lambda sparsity: 0
    if pattern.count_kept(shape, 0.5, batch_axes) is not None:
        return lambda sparsity: slices * (pattern.count_kept(shape, sparsity, batch_axes) or 0)
    if not pattern.ranks_units:
        return lambda sparsity: math.ceil(
            slices * size * (1 - Fraction(pattern.final_sparsity(sparsity)))
        )
    units, largest = _count_units(pattern, shape, batch_axes)
    return lambda sparsity: slices * min(size, num_kept_int(units, sparsity) * largest)


def _count_units(pattern: SparsityType, shape: tuple[int, ...], batch_axes: int) -> tuple[int, int]:
    """Returns the units of a group, and the entries of the first, full unit of all groups."""
    scores = jax.ShapeDtypeStruct(shape, np.float32)
    units = jax.eval_shape(lambda scores: pattern.pool(scores, batch_axes), scores).shape
    first = np.zeros(units, np.uint8)
    leading = batch_axes + pattern.group_axes
    first[(0,) * batch_axes + (slice(None),) * pattern.group_axes + (0,) * len(units[leading:])] = 1
    with evaluate_now():
        entries = np.count_nonzero(pattern.expand(jnp.asarray(first), shape, batch_axes))
    return math.prod(units[leading:]), int(entries)
