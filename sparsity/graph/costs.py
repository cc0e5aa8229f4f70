"""What a program costs: multiply-adds of its dots and convolutions, bytes of its leaves."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

from sparsity.core.jaxprs import Equation, Program
from sparsity.graph.coupling import Coupling
from sparsity.graph.dims import Dim, size_of
from sparsity.graph.polynomials import Polynomial
from sparsity.graph.uses import PRODUCTS, shards

Number = Any  # an int, a fraction, or a polynomial


def cost(program: Program, of_product: Callable[[Equation], Number]) -> Number:
    """The costs of all products of a call: of branches the costliest, of a `while` one trip."""
    total: Number = 0
    for equation in program.flat():
        if equation.name in PRODUCTS:
            total = total + of_product(equation)
        elif equation.bodies:
            each = [cost(body, of_product) for body in equation.bodies]
            match equation.name:
                case "cond":
                    total = total + functools.reduce(_larger, each)
                case "scan":
                    total = total + sum(each) * equation.params["length"]
                case "shard_map":
                    total = total + sum(each) * shards(equation)
                case _:
                    total = total + sum(each)
    return total


def macs_left(coupling: Coupling, left: Mapping[Dim, Number]) -> Callable[[Equation], Number]:
    """Multiply-adds of a product if only so many entries are left of some variables."""

    def of_product(equation: Equation) -> Number:
        (one, other), (output,), params = equation.inputs, equation.outputs, equation.params
        if equation.name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            axes = [coupling.dims(one)[i] for i in contracted]
        else:
            axes = [coupling.dims(other)[i] for i in params["dimension_numbers"].rhs_spec[1:]]
        found = entries_left((*coupling.dims(output), *axes), left)
        inserted = 1 if equation.name == "dot_general" else math.prod(params["lhs_dilation"])
        if inserted == 1:
            return found
        return Fraction(found, inserted) if isinstance(found, int) else found / inserted

    return of_product


def entries_left(dims: Iterable[Dim], left: Mapping[Dim, Number]) -> Number:
    """The product of the sizes of axes if only so many entries are left of some variables."""
    return functools.reduce(operator.mul, [size_of(dim, left) for dim in dims], 1)


def _larger(one: Number, other: Number) -> Number:
    if isinstance(one, Polynomial) or isinstance(other, Polynomial):
        return Polynomial.largest_of(one, other)
    return max(one, other)
