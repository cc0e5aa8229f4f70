"""Costs as polynomials in the sizes of groups: integers, exact also where sizes are traced."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import exact
from sparsity.core.exact import Words

Monomial: TypeAlias = tuple[int, ...]  # indices of variables, repeated for powers
Terms: TypeAlias = Mapping[Monomial, Fraction]
Number: TypeAlias = "Polynomial | int | Fraction"
CombineFn: TypeAlias = "Callable[[list[Fraction]], Fraction | int]"

# A float32 times this factor is no more than the number that was rounded to it.
_MARGIN = 1 - 2.0**-18
_MAX_TOTAL = 2**62  # fits two words, with room for a sum


class Polynomial:
    """A polynomial with coefficients >= 0, plus maxima of polynomials.

    Sums take any two; products only take a second factor without maxima.

    Attributes:
      terms: coefficients by monomial.
      largest: lists of polynomials; the largest of each list is added.
    """

    def __init__(self, terms: Terms, largest: Sequence[Sequence[Polynomial]] = ()) -> None:
        self.terms: Terms = terms
        self.largest: Sequence[Sequence[Polynomial]] = largest

    @classmethod
    def convert(cls, value: Number) -> Polynomial:
        """Converts a number to a polynomial."""
        return value if isinstance(value, Polynomial) else cls({(): Fraction(value)})

    @classmethod
    def variable(cls, index: int) -> Polynomial:
        """Returns the variable with an index."""
        return cls({(index,): Fraction(1)})

    @classmethod
    def maximum(cls, *values: Number) -> Polynomial:
        """Returns the largest of the values."""
        return cls({}, [[cls.convert(value) for value in values]])

    def __add__(self, other: Number) -> Polynomial:
        other = Polynomial.convert(other)
        terms = _sum_terms([*self.terms.items(), *other.terms.items()])
        return Polynomial(terms, [*self.largest, *other.largest])

    def __mul__(self, other: Number) -> Polynomial:
        other = Polynomial.convert(other)
        assert not other.largest  # a size or a number
        pairs = itertools.product(self.terms.items(), other.terms.items())
        terms = _sum_terms((tuple(sorted(x + y)), a * b) for (x, a), (y, b) in pairs)
        return Polynomial(
            terms, [[x * other for x in alternatives] for alternatives in self.largest]
        )

    def __truediv__(self, other: int) -> Polynomial:
        return self * Fraction(1, other)

    def __radd__(self, other: Number) -> Polynomial:
        return self + other

    def __rmul__(self, other: Number) -> Polynomial:
        return self * other

    def value(self, sizes: Sequence[Fraction | int], choose: CombineFn = max) -> Fraction:
        """Returns the value at given sizes; `choose` reduces the values of alternatives."""
        products = (a * math.prod(sizes[i] for i in x) for x, a in self.terms.items())
        chosen = (
            choose([x.value(sizes, choose) for x in alternatives]) for alternatives in self.largest
        )
        return sum(products, Fraction(0)) + sum(chosen, Fraction(0))

    def slope(self, variables: Collection[int]) -> Fraction | None:
        """Returns the common slope of these variables, `None` if there is no such constant."""
        slopes = {self.terms.get((i,), Fraction(0)) for i in variables}
        products = [monomial for monomial in self.terms if len(monomial) > 1]
        is_linear = not self.largest and not any(i in x for x in products for i in variables)
        return slopes.pop() if is_linear and len(slopes) == 1 else None

    def denominators(self) -> Iterator[int]:
        """Yields the denominators of all coefficients."""
        yield from (a.denominator for a in self.terms.values())
        for alternatives in self.largest:
            for alternative in alternatives:
                yield from alternative.denominators()


class Cost:
    """A cost of traced sizes, in integers, without the constant term.

    Attributes:
      steps_per_unit: the number of integer steps in a cost of 1.
      savings: the saving of one entry less of each size, if all branches run.
    """

    def __init__(self, polynomial: Polynomial, sizes: Sequence[int]) -> None:
        """Checks a polynomial for sizes of at most `sizes`."""
        reduced_sizes = [[n - (i == j) for j, n in enumerate(sizes)] for i in range(len(sizes))]
        full = polynomial.value(sizes, sum)
        self.savings: list[Fraction] = [full - polynomial.value(x, sum) for x in reduced_sizes]
        terms = {monomial: a for monomial, a in polynomial.terms.items() if monomial}
        variable_part = Polynomial(terms, polynomial.largest)
        self.steps_per_unit: int = math.lcm(*variable_part.denominators())
        if variable_part.value(sizes, sum) * self.steps_per_unit >= _MAX_TOTAL:
            raise ValueError(
                f"The model costs {float(full):.3g}, more than can be counted exactly. Trace it "
                "with smaller inputs, or let no groups or leaves compete."
            )
        self._variable_part, self._num_sizes = variable_part, len(sizes)

    def at(self, sizes: jax.Array) -> Words:
        """Returns the cost of uint32[sizes]."""
        factors = jnp.append(sizes, jnp.uint32(1))
        return self._evaluate(self._variable_part, functools.partial(_sum_exactly, factors))

    def limit(self, sizes: jax.Array) -> Words:
        """Returns the cost of float32[sizes], rounded down; exact for integers."""
        one = jnp.float32(1)
        upper, lower = jnp.append(sizes, one), jnp.append(jnp.floor(sizes), one)
        sum_terms = functools.partial(_sum_lower_bounds, upper, lower)
        return self._evaluate(self._variable_part, sum_terms)

    def _evaluate(
        self, polynomial: Polynomial, sum_terms: Callable[[Words, np.ndarray], Words]
    ) -> Words:
        """Adds the sum of the terms and the largest value of each list of polynomials.

        Args:
          polynomial: a part of the cost.
          sum_terms: sums up terms with coefficients [terms], and factors from `_list_factors`.
        """
        terms = polynomial.terms or {(): Fraction(0)}
        words = [exact.split(int(a * self.steps_per_unit)) for a in terms.values()]
        high, low = (jnp.asarray(np.array(x, np.uint32)) for x in zip(*words, strict=True))
        total = sum_terms((high, low), self._list_factors(terms))
        for alternatives in polynomial.largest:
            values = [self._evaluate(x, sum_terms) for x in alternatives]
            total = exact.plus(total, functools.reduce(_take_larger, values))
        return total

    def _list_factors(self, terms: Terms) -> np.ndarray:
        """Returns the sizes that multiply each term, int32[terms, most].

        Rows are filled up with the index after all sizes, which stands for the factor 1.
        """
        degree = max(map(len, terms))
        rows = [[*x, *[self._num_sizes] * (degree - len(x))] for x in terms]
        return np.array(rows, np.int32).reshape(len(terms), degree)


def _sum_exactly(factors: jax.Array, terms: Words, variables: np.ndarray) -> Words:
    for column in variables.T:
        terms = exact.times(terms, factors[column])
    return exact.total_words(terms)


def _sum_lower_bounds(
    upper: jax.Array, lower: jax.Array, terms: Words, variables: np.ndarray
) -> Words:
    # The excess of the products over those at the base, which are integers. No summand is negative,
    # so that the rounding is relative to the excess alone.
    product = jnp.ones(len(variables), jnp.float32)
    growth = product - 1
    for column in variables.T:
        # The product rule for differences: growth = prod(upper) - prod(lower)
        growth = growth * upper[column] + product * (upper[column] - lower[column])
        product = product * lower[column]
    excess = jnp.sum(exact.to_float(terms) * growth) * jnp.float32(_MARGIN)
    high = jnp.floor(excess * jnp.float32(2.0**-32))
    low = excess - high * jnp.float32(2.0**32)
    words = high.astype(jnp.uint32), low.astype(jnp.uint32)
    return exact.plus(_sum_exactly(lower.astype(jnp.uint32), terms, variables), words)


def _take_larger(a: Words, b: Words) -> Words:
    return exact.choose(exact.at_least(a, b), a, b)


def _sum_terms(terms: Iterable[tuple[Monomial, Fraction]]) -> Terms:
    sums: dict[Monomial, Fraction] = {}
    for monomial, coefficient in terms:
        sums[monomial] = sums.get(monomial, Fraction(0)) + coefficient
    return {monomial: a for monomial, a in sums.items() if a}
