"""Numbers of entries that masks of a pattern keep, without scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import as_float, check_fraction, check_int, check_values
from sparsity.core.sharding import evaluate_now
from sparsity.patterns.base import SparsityType, count_kept_entries, is_ranking_units
from sparsity.selection.kept_counts import count_kept_int

ROUNDING = 1e-6  # of sparsities that patterns compute


def read_final_sparsity(pattern: SparsityType, target: float, name: str) -> float | None:
    """Returns the sparsity of masks at the end of a ramp, `None` if the pattern does not know it.

    Args:
      pattern: the pattern of the mask.
      target: end of the ramp.
      name: the parameter's path, for messages.

    Raises:
      ValueError: the sparsity of the pattern is no number in [0, 1], beyond rounding.
    """
    with evaluate_now():
        final: object = pattern.final_sparsity(target)
    if final is None:
        return None
    label = f"{pattern}.final_sparsity of {name!r}"
    check_values(label, final, "Return a number.")
    number = as_float(final)
    nearest = min(max(number, 0.0), 1.0)
    if not abs(number - nearest) <= ROUNDING:  # NaN, too
        check_fraction(label, final)
    return nearest


def read_count(
    pattern: SparsityType, shape: tuple[int, ...], sparsity: float, batch_axes: int, name: str
) -> int | None:
    """Returns the number of entries that a slice keeps, `None` if it depends on scores.

    Raises:
      ValueError: `count_kept` of the pattern returns no number of entries of a slice.
    """
    count: object = count_kept_entries(pattern, shape, sparsity, batch_axes)
    if count is None:
        return None
    label = f"{pattern}.count_kept of {name!r}"
    check_values(label, count, "Return a number.")
    number = as_float(count)
    check_int(
        label, int(number) if number.is_integer() else count, 0, math.prod(shape[batch_axes:])
    )
    return int(number)


def entry_counter(
    pattern: SparsityType, shape: tuple[int, ...], batch_axes: int = 0, name: str = "params"
) -> Callable[[float], int]:
    """Returns a function from a sparsity to the largest number of entries that a mask keeps.

    Args:
      pattern: the pattern of the mask.
      shape: shape of the parameter, batch axes included.
      batch_axes: number of leading axes that index separate slices.
      name: the parameter's path, for messages.

    Raises:
      ValueError: from the function, if `count_kept` or `final_sparsity` of the pattern returns no
        number of entries of a slice, or no number in [0, 1].

    Example:
      >>> from sparsity.patterns import Block
      >>> entry_counter(Block((2, 2)), (4, 6))(0.5)
      12
    """
    slices, size = math.prod(shape[:batch_axes]), math.prod(shape[batch_axes:])
    if not slices * size:
        return lambda sparsity: 0
    if count_kept_entries(pattern, shape, 0.5, batch_axes) is not None:
        return lambda x: slices * (read_count(pattern, shape, x, batch_axes, name) or 0)
    if not is_ranking_units(pattern):
        return lambda x: math.ceil(
            slices * size * (1 - Fraction(read_final_sparsity(pattern, x, name) or 0))
        )
    units, largest = _count_units(pattern, shape, batch_axes)
    return lambda sparsity: slices * min(size, count_kept_int(units, sparsity) * largest)


def _count_units(pattern: SparsityType, shape: tuple[int, ...], batch_axes: int) -> tuple[int, int]:
    """Returns the units of a group, and the entries of the first, full unit of all groups."""
    scores = jax.ShapeDtypeStruct(shape, np.float32)
    units = jax.eval_shape(lambda scores: pattern.pool(scores, batch_axes), scores).shape
    first_unit = np.zeros(units, np.uint8)
    leading = batch_axes + pattern.group_axes
    first_unit[
        (0,) * batch_axes + (slice(None),) * pattern.group_axes + (0,) * len(units[leading:])
    ] = 1
    with evaluate_now():
        entries = np.count_nonzero(pattern.expand(jnp.asarray(first_unit), shape, batch_axes))
    return math.prod(units[leading:]), int(entries)
