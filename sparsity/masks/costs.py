"""What stays of weights and channels that cost differently: the best per cost, within a budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.hashing import flat_index
from sparsity.selection import Scores
from sparsity.selection.keys import to_keys

_MARGIN = 1 - 2.0**-16  # more than the rounding of costs that are added up in float32


def within_budget(
    scores: Sequence[Scores], costs: Sequence[float], kept: jax.Array
) -> list[jax.Array]:
    """Keeps the highest scores per cost, of all leaves under one threshold.

    Args:
      scores: of each leaf; they rank as float32, NaN lowest.
      costs: of one weight of each leaf.
      kept: [leaves] how many weights of each have together the cost that is the budget.

    Returns:
      uint8 masks. They cost no more than the budget. Of weights that tie at the threshold, those of
      the lowest indices in their leaves stay, as far as the budget goes.
    """
    budget = _total(costs, kept) * _MARGIN
    limits = jnp.iinfo(jnp.int32)

    def keys() -> list[jax.Array]:
        found = zip(scores, costs, strict=True)
        # A weight that costs nothing ranks above all others.
        return [to_keys(x.compute().astype(jnp.float32) / jnp.float32(cost)) for x, cost in found]

    def fits(masks: Iterable[jax.Array]) -> jax.Array:
        counts = jnp.stack([jnp.sum(mask, dtype=jnp.int32) for mask in masks])
        return (_total(costs, counts) <= budget) | jnp.all(counts <= kept)

    def above(threshold: jax.Array) -> list[jax.Array]:
        return [key > threshold for key in keys()]

    threshold = first_that_fits(lambda x: fits(above(x)), limits.min, limits.max)

    def with_ties(first: jax.Array) -> list[jax.Array]:
        """And of those at the threshold the entries before an index, given with a minus."""
        return [
            (key > threshold) | ((key == threshold) & (flat_index(key.shape) < -first))
            for key in keys()
        ]

    largest = max(score.size for score in scores)
    first = first_that_fits(lambda x: fits(with_ties(x)), -largest, 0)
    return [mask.astype(jnp.uint8) for mask in with_ties(first)]


def best_that_fit(
    ranks: Sequence[jax.Array], fits: Callable[[list[jax.Array]], jax.Array]
) -> list[jax.Array]:
    """How many of each array are among the highest of all, if these are as many as fit.

    Args:
      ranks: of one axis each. Of equal ones those of the first arrays come first; those that are 0
        or NaN do not count, unless all are.
      fits: whether so many of each do; if not, more do not either.
    """
    joined = jnp.concatenate(ranks)
    place = jnp.argsort(jnp.argsort(-joined))
    places = jnp.split(place, np.cumsum([len(x) for x in ranks])[:-1])
    positive = jnp.sum(joined > 0, dtype=jnp.int32)
    most = jnp.where(positive > 0, positive, len(joined))

    def counts(n: jax.Array) -> list[jax.Array]:
        return [jnp.sum(x < n, dtype=jnp.int32) for x in places]

    return counts(-first_that_fits(lambda n: fits(counts(-n)), -most, 0))


def first_that_fits(
    fits: Callable[[jax.Array], jax.Array], low: int | jax.Array, high: int
) -> jax.Array:
    """The lowest int32 that fits, if all above it do: 32 bisections between two bounds."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        fitting = fits(middle)
        return jnp.where(fitting, low, middle + 1), jnp.where(fitting, middle, high)

    found: jax.Array
    found, _ = lax.fori_loop(0, 32, halve, (jnp.int32(low), jnp.int32(high)))
    return found


def _total(costs: Sequence[float], counts: Iterable[chex.Numeric] | jax.Array) -> jax.Array:
    """The cost of so many weights, added up in one order on every mesh."""
    each = [
        jnp.float32(cost) * jnp.asarray(count, jnp.float32)
        for cost, count in zip(costs, counts, strict=True)
    ]
    total: jax.Array = functools.reduce(jnp.add, each)
    return total
