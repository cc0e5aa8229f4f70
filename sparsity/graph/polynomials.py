"""Costs as polynomials in the sizes of groups: integers, exact also where sizes are traced."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import exact
from sparsity.core.exact import Words

Monomial: TypeAlias = tuple[int, ...]  # numbers of variables, each as often as it is a factor
Terms: TypeAlias = Mapping[Monomial, Fraction]

# The part of a float32 that is surely no more than what it was rounded from.
_MARGIN = 1 - 2.0**-18
_MOST = 2**62  # that two words hold, with room for a sum
_ALTERNATIVES = 256


class Polynomial:
    """A polynomial with coefficients of at least 0, or the largest of several.

    It is added and multiplied like a number.
    """

    def __init__(self, *alternatives: Terms) -> None:
        found: list[Terms] = []
        for terms in alternatives:
            if not any(_is_less(terms, other) for other in found):
                found = [other for other in found if not _is_less(other, terms)] + [terms]
        if len(found) > _ALTERNATIVES:
            raise ValueError(
                f"Of more than {_ALTERNATIVES} combinations of branches of the model any may cost "
                "most, depending on the channels that stay. Use across = False."
            )
        self.alternatives = tuple(found)

    @classmethod
    def of(cls, value: Polynomial | int | Fraction) -> Polynomial:
        """A number as a polynomial."""
        return value if isinstance(value, Polynomial) else cls({(): Fraction(value)})

    @classmethod
    def variable(cls, number: int) -> Polynomial:
        """The variable of that number."""
        return cls({(number,): Fraction(1)})

    @classmethod
    def largest(cls, *values: Polynomial | int | Fraction) -> Polynomial:
        """The largest of some."""
        return cls(*[terms for value in values for terms in cls.of(value).alternatives])

    def __add__(self, other: Polynomial | int | Fraction) -> Polynomial:
        pairs = itertools.product(self.alternatives, Polynomial.of(other).alternatives)
        return Polynomial(*[_sum([*one.items(), *more.items()]) for one, more in pairs])

    def __mul__(self, other: Polynomial | int | Fraction) -> Polynomial:
        pairs = itertools.product(self.alternatives, Polynomial.of(other).alternatives)
        return Polynomial(
            *[
                _sum((tuple(sorted(x + y)), a * b) for x, a in one.items() for y, b in more.items())
                for one, more in pairs
            ]
        )

    def __truediv__(self, other: int) -> Polynomial:
        return self * Fraction(1, other)

    __radd__, __rmul__ = __add__, __mul__

    def value(self, sizes: Sequence[int]) -> Fraction:
        """Its value, of known sizes."""
        return max(
            sum((a * math.prod(sizes[i] for i in x) for x, a in terms.items()), Fraction(0))
            for terms in self.alternatives
        )


class Cost:
    """A cost of traced sizes, in integers, without what is constant.

    Attributes:
      unit: how many of these integers make 1.
      each: what one entry less of each size saves.
    """

    def __init__(self, polynomial: Polynomial, sizes: Sequence[int]) -> None:
        """Of a polynomial, and the largest sizes."""
        less = [[n - (i == j) for j, n in enumerate(sizes)] for i in range(len(sizes))]
        self.each = [polynomial.value(sizes) - polynomial.value(x) for x in less]
        own = polynomial.alternatives
        constant = min(terms.get((), Fraction(0)) for terms in own)
        rest = [_sum([*terms.items(), ((), -constant)]) for terms in own]
        self.unit = math.lcm(*[a.denominator for terms in rest for a in terms.values()])
        if (Polynomial(*rest) * self.unit).value(sizes) >= _MOST:
            raise ValueError(
                f"The model costs {float(polynomial.value(sizes)):.3g}, more than can be counted "
                "exactly. Trace it with smaller inputs."
            )
        self._tables = [_table(terms, self.unit, len(sizes)) for terms in rest]

    def of(self, sizes: jax.Array) -> Words:
        """That of uint32[sizes]."""
        return functools.reduce(_larger, self._alternatives(sizes))

    def limit(self, sizes: jax.Array) -> Words:
        """That of float32[sizes], rounded down; exact if these are whole."""
        whole = jnp.floor(sizes)
        most, base = jnp.append(sizes, jnp.float32(1)), jnp.append(whole, jnp.float32(1))
        found = []
        known = self._alternatives(whole.astype(jnp.uint32))
        for at_base, ((high, low), numbers) in zip(known, self._tables, strict=True):
            # How much larger the products are: a sum of what is not negative, so that its rounding
            # is a part of the difference and not of the whole.
            product = jnp.ones(len(numbers), jnp.float32)
            more = product - 1
            for column in numbers.T:
                more = more * most[column] + product * (most[column] - base[column])
                product = product * base[column]
            terms = exact.to_float((jnp.asarray(high), jnp.asarray(low))) * more
            real = exact.ordered_sum(terms, (0,)) * jnp.float32(_MARGIN)
            top = jnp.floor(real * jnp.float32(2.0**-32))
            rest = real - top * jnp.float32(2.0**32)
            found.append(exact.plus(at_base, (top.astype(jnp.uint32), rest.astype(jnp.uint32))))
        return functools.reduce(_larger, found)

    def _alternatives(self, sizes: jax.Array) -> list[Words]:
        factors = jnp.append(sizes, jnp.uint32(1))
        found: list[Words] = []
        for (high, low), numbers in self._tables:
            terms = jnp.asarray(high), jnp.asarray(low)
            for column in numbers.T:
                terms = exact.times(terms, factors[column])
            found.append(exact.total_of_words(terms))
        return found


def _larger(a: Words, b: Words) -> Words:
    return exact.choose(exact.at_least(a, b), a, b)


def _is_less(one: Terms, other: Terms) -> bool:
    """Whether it is nowhere larger."""
    return all(a <= other.get(monomial, 0) for monomial, a in one.items())


def _sum(terms: Iterable[tuple[Monomial, Fraction]]) -> Terms:
    found: dict[Monomial, Fraction] = {}
    for monomial, coefficient in terms:
        found[monomial] = found.get(monomial, Fraction(0)) + coefficient
    return {monomial: a for monomial, a in found.items() if a}


def _table(terms: Terms, unit: int, count: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Coefficients as words, [terms], and which variables they are multiplied by, [terms, most].

    The number of a variable that does not count, which is 1, is `count`.
    """
    terms = terms or {(): Fraction(0)}
    most = max(map(len, terms))
    numbers = [[*x, *[count] * (most - len(x))] for x in terms]
    words = [exact.split(int(a * unit)) for a in terms.values()]
    coefficients = tuple(np.array(word, np.uint32) for word in zip(*words, strict=True))
    return coefficients, np.array(numbers, np.int32).reshape(len(terms), most)
