"""Selects weights and channels by score per cost, within a budget."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.hashing import flat_index
from sparsity.core.polynomials import Polynomial
from sparsity.selection.keys import to_keys


class MaskBudget(abc.ABC):
    """Base of distributions with a budget for global scopes: costs of kept weights add up."""

    @abc.abstractmethod
    def cost(self, path: tuple[str, ...], param: jax.Array) -> float:
        """Returns the cost of a weight of a parameter; the scope divides scores by this cost."""

    def total(self, leaves: Sequence[tuple[tuple[str, ...], jax.Array]]) -> Polynomial:
        """Returns the cost of masks, a polynomial in each parameter's number of kept weights.

        Budgets in which the cost of a weight depends on other kept weights override this method.

        Args:
          leaves: path and parameter, by the index of its variable.
        """
        costs = [Fraction(float(np.float32(self.cost(*leaf)))) for leaf in leaves]
        return sum((Polynomial.variable(i) * x for i, x in enumerate(costs)), Polynomial({}))


def within_budget(
    scores: Sequence[jax.Array], costs: Sequence[float], fits: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """Keeps the highest scores per cost, of all parameters under one threshold.

    Args:
      scores: scores of each parameter; they rank as float32, NaN lowest.
      costs: cost of one weight of each parameter.
      fits: returns whether a budget allows the numbers of weights uint32[parameters]; must be
        monotone.

    Returns:
      uint8 masks. Weights that tie at the threshold stay by the lowest index in their parameter, as
      far as the budget allows.
    """
    # A quotient by a constant is rounded otherwise in a loop than after it; a product is not.
    with np.errstate(divide="ignore"):
        factors = np.float32(1) / np.asarray(costs, np.float32)

    def keys() -> list[jax.Array]:
        pairs = zip(scores, factors, strict=True)
        return [to_keys(_divide_by_cost(x.astype(jnp.float32), factor)) for x, factor in pairs]

    def allowed(masks: Iterable[jax.Array]) -> jax.Array:
        return fits(jnp.stack([jnp.sum(mask, dtype=jnp.uint32) for mask in masks]))

    def above(threshold: jax.Array) -> list[jax.Array]:
        return [key > threshold for key in keys()]

    threshold = first_that_fits(lambda x: allowed(above(x)), np.uint32(0), np.uint32(2**32 - 1))

    def with_ties(end: jax.Array) -> list[jax.Array]:
        """Adds the entries at the threshold before the index `end`."""
        return [
            (key > threshold) | ((key == threshold) & (flat_index(key.shape) < end))
            for key in keys()
        ]

    largest = max(score.size for score in scores)
    end = most_that_fit(lambda x: allowed(with_ties(x)), largest)
    return [mask.astype(jnp.uint8) for mask in with_ties(end)]


def _divide_by_cost(scores: jax.Array, factor: np.float32) -> jax.Array:
    """Returns scores times the inverse of a cost; infinite, but NaN, if a weight costs nothing."""
    return jnp.where(jnp.isnan(scores), scores, factor) if np.isinf(factor) else scores * factor


def best_that_fit(
    ranks: Sequence[jax.Array], fits: Callable[[list[jax.Array]], jax.Array]
) -> list[jax.Array]:
    """Returns the number of entries of each array among the highest of all, as many as fit.

    Args:
      ranks: arrays of one axis. Of equal entries those of the first arrays come first; entries that
        are 0 or NaN do not count, unless all are.
      fits: returns whether the numbers of entries fit; must be monotone.
    """
    joined = jnp.concatenate(ranks)
    # `argsort` twice gives the place of each entry in the order.
    place = jnp.argsort(jnp.argsort(-joined))
    places = jnp.split(place, np.cumsum([len(x) for x in ranks])[:-1])
    positive = jnp.sum(joined > 0, dtype=jnp.int32)
    most = jnp.where(positive > 0, positive, len(joined))

    def counts(n: jax.Array) -> list[jax.Array]:
        return [jnp.sum(x < n, dtype=jnp.int32) for x in places]

    return counts(most_that_fit(lambda n: fits(counts(n)), most))


def most_that_fit(fits: Callable[[jax.Array], jax.Array], most: int | jax.Array) -> jax.Array:
    """Returns the highest int32 up to `most` that fits, and 0 if none does."""
    return -first_that_fits(lambda x: fits(-x), -jnp.int32(most), np.int32(0))


def first_that_fits(
    fits: Callable[[jax.Array], jax.Array], low: chex.Array, high: chex.Array
) -> jax.Array:
    """Returns the lowest integer that fits, by 32 bisections between two bounds of one dtype."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + ((high - low) >> 1)
        fitting = fits(middle)
        return jnp.where(fitting, low, middle + 1), jnp.where(fitting, middle, high)

    lowest: jax.Array
    lowest, _ = lax.fori_loop(0, 32, halve, (jnp.asarray(low), jnp.asarray(high)))
    return lowest
