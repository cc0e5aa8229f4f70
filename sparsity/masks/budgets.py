"""Budgets of masks: exact costs of kept weights or channels, and the best that fit a cost."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.hashing import flat_index
from sparsity.selection.keys import to_keys

_MAX_COST = 2**62  # fits two words, with room for a sum

Words: TypeAlias = tuple[jax.Array, jax.Array]  # uint32 (high, low): an integer below 2**64


def split(k: int) -> tuple[np.uint32, np.uint32]:
    """Returns the words of a Python integer."""
    return np.uint32(k >> 32), np.uint32(k & 0xFFFFFFFF)


def total_words(a: Words) -> Words:
    """Sums fewer than 2**16 integers along the first axis, to less than 2**64."""
    words = a[1] & 0xFFFF, a[1] >> 16, a[0] & 0xFFFF, a[0] >> 16
    digits = [jnp.sum(x, 0, dtype=jnp.uint32) for x in words]
    for i in (1, 2, 3):
        digits[i] += digits[i - 1] >> 16
    low, middle, high, top = (x & 0xFFFF for x in digits)
    return (top << 16) | high, (middle << 16) | low


def plus(a: Words, b: Words) -> Words:
    """Returns a + b."""
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(jnp.uint32), low


def times(a: Words, b: jax.Array) -> Words:
    """Returns a * b, by halves of 16 bits."""
    x, y, u, v = a[1] & 0xFFFF, a[1] >> 16, b & 0xFFFF, b >> 16
    middle = y * u + (x * u >> 16)
    other = x * v + (middle & 0xFFFF)
    return a[0] * b + y * v + (middle >> 16) + (other >> 16), a[1] * b


def at_least(a: Words, b: Words) -> jax.Array:
    """Returns a >= b."""
    return (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] >= b[1]))


def choose(condition: jax.Array, a: Words, b: Words) -> Words:
    """Returns a where the condition holds, else b."""
    return jnp.where(condition, a[0], b[0]), jnp.where(condition, a[1], b[1])


def to_float(a: Words) -> jax.Array:
    """Converts a to float32, rounded."""
    high: jax.Array = a[0].astype(jnp.float32) * jnp.float32(2.0**32)
    return high + a[1].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost in numbers of kept weights or channels: products of these, and maxima, added up.

    Attributes:
      terms: {indices of the numbers that are multiplied: coefficient, at least 0}.
      choices: alternatives, such as the branches of a conditional; the costliest of each counts.
    """

    terms: Mapping[tuple[int, ...], Fraction]
    choices: Sequence[Sequence[Cost]] = ()

    @classmethod
    def convert(cls, value: Cost | Fraction | int) -> Cost:
        """Returns a number as a cost that depends on nothing."""
        return value if isinstance(value, Cost) else cls({(): Fraction(value)})

    @classmethod
    def variable(cls, index: int) -> Cost:
        """Returns the number with an index, as a cost of 1 each."""
        return cls({(index,): Fraction(1)})

    def __add__(self, other: Cost | Fraction | int) -> Cost:
        other = Cost.convert(other)
        terms = _add_up([*self.terms.items(), *other.terms.items()])
        return Cost(terms, [*self.choices, *other.choices])

    def __mul__(self, other: Cost | Fraction | int) -> Cost:
        """Multiplies by a number, or by a cost without choices."""
        other = Cost.convert(other)
        pairs = itertools.product(self.terms.items(), other.terms.items())
        terms = _add_up((tuple(sorted(x + y)), a * b) for (x, a), (y, b) in pairs)
        return Cost(terms, [[x * other for x in choice] for choice in self.choices])

    __radd__, __rmul__ = __add__, __mul__

    def value(
        self, numbers: Sequence[int], choose: Callable[[list[Fraction]], Fraction | int] = max
    ) -> Fraction:
        """Returns the cost of numbers; `choose` reduces the costs of alternatives."""
        products = (a * math.prod(numbers[i] for i in x) for x, a in self.terms.items())
        chosen = (choose([x.value(numbers, choose) for x in choice]) for choice in self.choices)
        return sum(products, Fraction(0)) + sum(chosen, Fraction(0))

    def list_savings(self, numbers: Sequence[int]) -> list[Fraction]:
        """Returns what one less of each number saves, if all branches run."""
        full = self.value(numbers, sum)
        fewer = ([n - (i == j) for j, n in enumerate(numbers)] for i in range(len(numbers)))
        return [full - self.value(x, sum) for x in fewer]

    def is_alike(self, n: int) -> bool:
        """Returns whether weights of the first n parameters cost the same, whatever others stay."""
        prices = {self.terms.get((i,)) for i in range(n)}
        return not self.choices and len(prices) == 1 and all(len(x) < 2 for x in self.terms)

    def make_limit(
        self, most: Sequence[int], numbers: jax.Array
    ) -> Callable[[jax.Array], jax.Array]:
        """Returns whether uint32 numbers cost at most what `numbers` cost, as a function.

        Args:
          most: bounds of the numbers.
          numbers: uint32, or float32 with fractions, whose cost is rounded down.
        """
        steps = self._count_steps()
        if self.value(most, sum) * steps >= _MAX_COST:
            raise ValueError(
                f"The model costs {float(self.value(most, sum)):.3g}, more than can be counted "
                "exactly. Trace it with smaller inputs, or let no groups or leaves compete."
            )
        limit = self._count(numbers, steps)
        return lambda others: at_least(limit, self._count(others, steps))

    def _count_steps(self) -> int:
        """Returns the number of integer steps in a cost of 1."""
        inner = [x._count_steps() for choice in self.choices for x in choice]
        return math.lcm(*inner, *(x.denominator for x in self.terms.values()))

    def _count(self, numbers: jax.Array, steps: int) -> Words:
        """Returns the cost of numbers in steps, in two words; of fractions a lower bound."""
        terms = self.terms or {(): Fraction(0)}
        words = np.array([split(int(a * steps)) for a in terms.values()], np.uint32)
        products: Words = (jnp.asarray(words[:, 0]), jnp.asarray(words[:, 1]))
        upper = jnp.append(numbers, jnp.ones_like(numbers, shape=1))
        floors, lower = upper.astype(jnp.uint32), jnp.floor(upper)
        # The part of the cost that is due to fractions, by the product rule for differences:
        # growth = prod(upper) - prod(lower). No summand is negative, so that rounding is relative.
        coefficients, product = to_float(products), jnp.ones(len(terms), jnp.float32)
        growth = product - 1
        # Index -1 is that of the 1 after all numbers.
        for column in np.array([*itertools.zip_longest(*terms, fillvalue=-1)], int):
            products = times(products, floors[column])
            growth = growth * upper[column] + product * (upper[column] - lower[column])
            product = product * lower[column]
        total = total_words(products)
        if jnp.issubdtype(numbers.dtype, jnp.floating):
            excess = jnp.sum(coefficients * growth) * jnp.float32(1 - (len(terms) + 64) * 2.0**-23)
            high = jnp.floor(excess * jnp.float32(2.0**-32))
            low = (excess - high * jnp.float32(2.0**32)).astype(jnp.uint32)
            total = plus(total, (high.astype(jnp.uint32), low))
        for choice in self.choices:
            costliest = functools.reduce(
                lambda a, b: choose(at_least(a, b), a, b),
                [x._count(numbers, steps) for x in choice],
            )
            total = plus(total, costliest)
        return total


def _add_up(terms: Iterable[tuple[tuple[int, ...], Fraction]]) -> dict[tuple[int, ...], Fraction]:
    sums: dict[tuple[int, ...], Fraction] = {}
    for factors, coefficient in terms:
        sums[factors] = sums.get(factors, Fraction(0)) + coefficient
    return sums


class MaskBudget(abc.ABC):
    """Base of distributions with a budget for global scopes: costs of kept weights add up."""

    @abc.abstractmethod
    def cost(self, path: tuple[str, ...], param: jax.Array) -> float:
        """Returns the cost of a weight of a parameter; the scope divides scores by this cost."""

    def total(self, leaves: Sequence[tuple[tuple[str, ...], jax.Array]]) -> Cost:
        """Returns the cost of masks in each parameter's number of kept weights.

        Budgets in which the cost of a weight depends on other kept weights override this method.

        Args:
          leaves: path and parameter, by the index of its number.
        """
        costs = [Fraction(float(np.float32(self.cost(*leaf)))) for leaf in leaves]
        return Cost({(i,): x for i, x in enumerate(costs)})


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

    def list_keys() -> list[jax.Array]:
        pairs = zip(scores, factors, strict=True)
        return [to_keys(_divide_by_cost(x.astype(jnp.float32), factor)) for x, factor in pairs]

    def keep(threshold: jax.Array, end: jax.Array | int) -> list[jax.Array]:
        """Keeps the keys above a threshold, and those at the threshold before the index `end`."""
        return [
            (x > threshold) | ((x == threshold) & (flat_index(x.shape) < end)) for x in list_keys()
        ]

    def is_allowed(threshold: jax.Array, end: jax.Array | int) -> jax.Array:
        masks = keep(threshold, end)
        return fits(jnp.stack([jnp.sum(mask, dtype=jnp.uint32) for mask in masks]))

    threshold = _find_lowest(lambda x: is_allowed(x, 0), np.uint32(0), np.uint32(2**32 - 1))
    end = _find_highest(lambda x: is_allowed(threshold, x), max(score.size for score in scores))
    return [mask.astype(jnp.uint8) for mask in keep(threshold, end)]


def _divide_by_cost(scores: jax.Array, factor: np.float32) -> jax.Array:
    """Returns scores times the inverse of a cost; infinite, but NaN, if a weight costs nothing."""
    return jnp.where(jnp.isnan(scores), scores, factor) if np.isinf(factor) else scores * factor


def best_that_fit(
    ranks: Sequence[jax.Array], fits: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """Returns the number of entries of each array among the highest of all, as many as fit.

    Args:
      ranks: arrays of one axis. Of equal entries those of the first arrays come first; entries that
        are 0 or NaN do not count, unless all are.
      fits: returns whether the numbers of entries int32[arrays] fit; must be monotone.
    """
    joined = jnp.concatenate(ranks)
    # `argsort` twice gives the place of each entry in the order.
    place = jnp.argsort(jnp.argsort(-joined))
    places = jnp.split(place, np.cumsum([len(x) for x in ranks])[:-1])
    positive = jnp.sum(joined > 0, dtype=jnp.int32)

    def count(n: jax.Array) -> jax.Array:
        return jnp.stack([jnp.sum(x < n, dtype=jnp.int32) for x in places])

    most = jnp.where(positive > 0, positive, len(joined))
    return list(count(_find_highest(lambda n: fits(count(n)), most)))


def _find_highest(fits: Callable[[jax.Array], jax.Array], most: int | jax.Array) -> jax.Array:
    """Returns the highest int32 up to `most` that fits, and 0 if none does."""
    return -_find_lowest(lambda x: fits(-x), -jnp.int32(most), np.int32(0))


def _find_lowest(
    fits: Callable[[jax.Array], jax.Array], low: jax.Array | np.uint32, high: np.int32 | np.uint32
) -> jax.Array:
    """Returns the lowest integer that fits, by 32 bisections between two bounds of one dtype."""

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + ((high - low) >> 1)
        fitting = fits(middle)
        return jnp.where(fitting, low, middle + 1), jnp.where(fitting, middle, high)

    lowest: jax.Array = lax.fori_loop(0, 32, halve, (jnp.asarray(low), jnp.asarray(high)))[0]
    return lowest
