"""What a program costs: multiply-adds of its dots and convolutions, bytes of its leaves."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from sparsity.core.polynomials import Polynomial
from sparsity.graph.coupling import Coupling
from sparsity.programs.axes import Axis, size_of
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import Equation, Program

Number = Any  # an int, a fraction, or a polynomial


def cost(program: Program, of_product: Callable[[Equation], Number]) -> Number:
    """The costs of all products of a call: of branches the costliest, of a `while` one trip."""
    total: Number = 0
    for equation in program.flat():
        if equation.name in PRODUCTS:
            total = total + of_product(equation)
        elif equation.bodies:
            bodies = equation.within()
            each = [cost(x.program, of_product) * (x.trips or 1) for x in bodies]
            total = total + functools.reduce(_larger if equation.is_choice else operator.add, each)
    return total


def macs_left(coupling: Coupling, left: Mapping[Axis, Number]) -> Callable[[Equation], Number]:
    """Multiply-adds of a product if only so many entries are left of some variables."""

    def of_product(equation: Equation) -> Number:
        product = read_product(equation)
        macs = entries_left([coupling.axes(value)[axis] for value, axis in product.cost], left)
        return macs if product.inserted == 1 else macs * Fraction(1, product.inserted)

    return of_product


def entries_left(dims: Iterable[Axis], left: Mapping[Axis, Number]) -> Number:
    """The product of the sizes of axes if only so many entries are left of some variables."""
    return functools.reduce(operator.mul, [size_of(dim, left) for dim in dims], 1)


def _larger(one: Number, other: Number) -> Number:
    if isinstance(one, Polynomial) or isinstance(other, Polynomial):
        return Polynomial.maximum(one, other)
    return max(one, other)
