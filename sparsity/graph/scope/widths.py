"""Numbers of channels that stay where several groups are factors of one axis.

A sparsity is the part of an axis that goes, not of each factor: 4 heads of 16 channels that lie
along one axis of 64 keep 3 heads of 11 channels at sparsity 0.5. All comparisons are of integers,
so that counts are the same traced and not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import exact
from sparsity.core.checks import is_traced
from sparsity.core.trees import PyTree
from sparsity.programs.axes import Axis, Variable, count_entries, list_variables
from sparsity.selection import num_kept

# Numbers of channels by the axis of their group; Any, as `count_entries` takes no arrays.
Counts: TypeAlias = Mapping[Variable, PyTree]


@dataclasses.dataclass(frozen=True, eq=False)
class Width:
    """Axis of a weight, or one of several that follow one another along an axis.

    Attributes:
      axis: the axis in the program.
      variables: the variables that make up the axis, each once.
      targets: the sparsities of the parameters with this axis, at the end of a ramp.
    """

    axis: Axis
    variables: Sequence[Variable]
    targets: list[chex.Numeric] = dataclasses.field(default_factory=list)


def list_widths(
    weights: Iterable[tuple[Sequence[Axis], chex.Numeric]],
) -> dict[Variable, list[Width]]:
    """Returns the widths with each variable; the axes of weights with a sparsity are widths.

    Args:
      weights: the axes and the target of each weight.
    """
    widths: dict[tuple[Variable, ...], Width] = {}
    for axes, target in weights:
        for term in (term for axis in axes for term in _list_terms(axis)):
            variables = tuple(list_variables(term))
            width = widths.setdefault(variables, Width(term, list(dict.fromkeys(variables))))
            width.targets.append(target)
    by_variable: dict[Variable, list[Width]] = {}
    for width in widths.values():
        for variable in width.variables:
            by_variable.setdefault(variable, []).append(width)
    return by_variable


def _list_terms(axis: Axis) -> Iterator[Axis]:
    """Yields the products and variables that follow one another along an axis."""
    root = axis.root
    if root.join == "sum":
        for part in root.parts:
            yield from _list_terms(part)
    else:
        yield root


def find_largest(sparsities: Sequence[chex.Numeric]) -> chex.Numeric:
    """Returns the largest of some sparsities."""
    if len(sparsities) == 1:
        return sparsities[0]
    if any(map(is_traced, sparsities)):
        return jnp.max(jnp.stack([jnp.float32(x) for x in sparsities]))
    return max(float(x) for x in jax.device_get(list(sparsities)))


def share_width(
    axis: Axis,
    sparsity: chex.Numeric,
    factors: Sequence[Variable],
    counts: Counts,
    limit: Callable[[Variable, PyTree], PyTree],
) -> dict[Variable, PyTree]:
    """Returns the numbers of channels of some factors, with which an axis has its width.

    From the smallest factor to the largest, each keeps an equal share of what remains, rounded; the
    largest makes up for the rounding.

    Args:
      axis: the axis.
      sparsity: the part of the axis that goes.
      factors: variables without a number.
      counts: numbers of other variables; those without one keep all channels.
      limit: raises a number to those that a group may keep.
    """
    width = num_kept(count_entries(axis, {}), sparsity)
    counts = dict(counts)
    *smaller, largest = sorted(factors, key=lambda variable: variable.size)
    for index, variable in enumerate(smaller):
        remaining: PyTree = count_entries(axis, counts)
        count = _take_share(variable.size, width, remaining, len(factors) - index)
        counts[variable] = limit(variable, count)
    without: PyTree = count_entries(axis, counts | {largest: 0})
    per_channel: PyTree = count_entries(axis, counts | {largest: 1}) - without
    double = 2 * (width - without) + per_channel  # rounded to the nearest number
    counts[largest] = limit(largest, double // (2 * per_channel))
    return counts


def _take_share(n: int, width: PyTree, remaining: PyTree, num_factors: int) -> chex.Numeric:
    """Returns n * (width / remaining) ** (1 / num_factors), rounded, exactly."""
    # A count of j or more: ((2 j - 1) / 2 n) ** num_factors <= width / remaining
    halves = [(2 * j - 1) ** num_factors for j in range(1, n + 1)]
    full = (2 * n) ** num_factors
    dropped_bits = max(full.bit_length() - 32, 0)  # of axes that no model has
    full, halves = full >> dropped_bits, [half >> dropped_bits for half in halves]
    if not is_traced(width) and not is_traced(remaining):
        return sum(width * full >= remaining * half for half in halves)
    words = [exact.as_words(jnp.asarray(x, jnp.uint32)) for x in (width, remaining)]
    low, high = words[1]
    thresholds = exact.times((low, high), jnp.asarray(np.array(halves, np.uint32)))
    fits = exact.at_least(exact.times(words[0], jnp.uint32(full)), thresholds)
    return jnp.sum(fits, dtype=jnp.int32)


def count_on_ramp(
    n: int, final: chex.Numeric, sparsity: chex.Numeric, target: chex.Numeric
) -> chex.Numeric:
    """Returns n - (n - final) * sparsity / target, rounded: `final` at the target.

    Numbers that make up for the rounding of others rise and fall with the sparsity; along a ramp
    they must not rise.
    """
    if sparsity is target:
        return final
    xp = jnp if any(map(is_traced, (final, sparsity, target))) else np
    numbers = np.arange(1, n + 1)
    removed = n - xp.asarray(final)
    # Products, which round alike everywhere, in place of a quotient
    products = (2 * removed).astype(np.float32) * xp.float32(sparsity)
    is_removed = (numbers <= removed) & (
        products >= np.float32(2 * numbers - 1) * xp.float32(target)
    )
    count: jax.Array = n - xp.sum(is_removed, dtype=np.int32)
    return count if xp is jnp else int(count)
