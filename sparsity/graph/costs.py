"""Costs of a program: multiply-adds of dots and convolutions, sizes of axes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

from sparsity.core.polynomials import Polynomial
from sparsity.graph.coupling import Coupling
from sparsity.programs.axes import Axis, count_entries
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import Equation, Program

Number: TypeAlias = Any  # an int, a fraction, or a polynomial


def sum_products(program: Program, count: Callable[[Equation], Number]) -> Number:
    """Sums `count` over the products of a call: the costliest branch, one trip of a `while`."""
    total: Number = 0
    for equation in program.flat():
        if equation.name in PRODUCTS:
            total = total + count(equation)
        elif equation.bodies:
            bodies = equation.within()
            each = [sum_products(x.program, count) * (x.trips or 1) for x in bodies]
            total = total + functools.reduce(_larger if equation.is_choice else operator.add, each)
    return total


def product_counter(
    coupling: Coupling, sizes: Mapping[Axis, Number]
) -> Callable[[Equation], Number]:
    """Returns a function that counts the multiply-adds of a product at smaller sizes."""

    def count(equation: Equation) -> Number:
        product = read_product(equation)
        macs = multiply_sizes([coupling.axes(value)[axis] for value, axis in product.cost], sizes)
        return macs if product.inserted == 1 else macs * Fraction(1, product.inserted)

    return count


def multiply_sizes(dims: Iterable[Axis], sizes: Mapping[Axis, Number]) -> Number:
    """Returns the product of the sizes of axes, at smaller sizes of some variables."""
    return functools.reduce(operator.mul, [count_entries(dim, sizes) for dim in dims], 1)


def _larger(one: Number, other: Number) -> Number:
    if isinstance(one, Polynomial) or isinstance(other, Polynomial):
        return Polynomial.maximum(one, other)
    return max(one, other)
