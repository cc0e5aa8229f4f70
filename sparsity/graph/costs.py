"""Costs of a program: multiply-adds of dots and convolutions, sizes of axes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from sparsity.core.trees import Path
from sparsity.graph.channels.coupling import ANALYSED_PRIMITIVES
from sparsity.graph.readers.uses import Tracker, Use
from sparsity.graph.removal.removable import Removal
from sparsity.graph.traced_model import Model
from sparsity.masks.budgets import Cost
from sparsity.programs.axes import Axis, Variable, count_entries
from sparsity.programs.products import NO_PRODUCTS, PRODUCTS, read_product
from sparsity.programs.program import Equation, Program

Number: TypeAlias = Any  # int, Fraction or Cost


class Costs:
    """Multiply-adds and bytes of a model: dense, masked, or without some channels.

    Args:
      model: the model.
      tracker: the uses of its parameters.
      removal: the axes of its values.
    """

    def __init__(self, model: Model, tracker: Tracker, removal: Removal) -> None:
        self._model, self._tracker, self._removal = model, tracker, removal

    def count_macs(self, path: Path) -> int:
        """Counts multiply-adds of all products of a parameter; each product counts once."""
        return sum(use.macs for use in self._list_largest_uses(path))

    def count_sparse_macs(self, density: Mapping[Path, Number]) -> Number:
        """Counts multiply-adds if only a part of the entries of some parameters differs from 0."""
        readers: dict[Equation, list[Use]] = {}
        for use in self._tracker.products:
            readers.setdefault(use.equation, []).append(use)

        def count(product: Equation) -> Number:
            uses = readers.get(product, ())
            lhs, rhs = ([use for use in uses if use.operand == i] for i in range(2))
            return (
                read_product(product).macs
                * _compute_operand_density(lhs, density)
                * _compute_operand_density(rhs, density)
            )

        return _sum_products(self._model.program, count)

    def count_small_macs(
        self, sizes: Mapping[Variable, Number], path: Path | None = None
    ) -> Number:
        """Counts multiply-adds at smaller sizes of some axes: of a call, or of one parameter."""

        def count(equation: Equation) -> Number:
            product, axes = read_product(equation), self._removal.coupling.axes
            macs = _multiply_sizes([axes(value)[axis] for value, axis in product.cost], sizes)
            return macs if product.inserted == 1 else macs * Fraction(1, product.inserted)

        if path is None:
            return _sum_products(self._model.program, count)
        return sum(
            (1 if use.trips is None else use.trips) * use.view.share * count(use.equation)
            for use in self._list_largest_uses(path)
        )

    def count_small_bytes(self, sizes: Mapping[Variable, Number], paths: Container[Path]) -> Number:
        """Counts bytes of some parameters at smaller sizes of some axes."""
        return sum(
            _multiply_sizes(axes, sizes) * parameter.dtype.itemsize
            for parameter, axes in self._removal.list_parameter_axes()
            if parameter.path in paths
        )

    @functools.cached_property
    def uncounted(self) -> dict[str, str]:
        """Primitives whose multiply-adds do not count, each with the first line that uses them."""
        counted, sources = NO_PRODUCTS.union(*ANALYSED_PRIMITIVES), dict[str, str]()
        for program in self._model.program.nested_programs():
            for equation in program.flat_equations():
                if not equation.inner_programs and equation.name not in counted:
                    sources.setdefault(equation.name, equation.source)
        return sources

    def _list_largest_uses(self, path: Path) -> list[Use]:
        """Returns one use for each product of a parameter: that of the largest part."""
        uses = sorted(self._tracker.find_products(path), key=lambda use: use.view.share)
        return list({use.equation: use for use in uses}.values())


def _sum_products(program: Program, count: Callable[[Equation], Number]) -> Number:
    """Sums `count` over the products of a call: the costliest branch, one trip of a `while`."""
    total: Number = 0
    for equation in program.flat_equations():
        if equation.name in PRODUCTS:
            total = total + count(equation)
        elif equation.inner_programs:
            counts = [
                _sum_products(body.program, count) * (1 if body.trips is None else body.trips)
                for body in equation.list_bodies()
            ]
            if not equation.is_choice:
                total = total + sum(counts)
            elif any(isinstance(count, Cost) for count in counts):
                total = total + Cost({}, [[Cost.convert(count) for count in counts]])
            else:
                total = total + max(counts)
    return total


def _multiply_sizes(axes: Iterable[Axis], sizes: Mapping[Variable, Number]) -> Number:
    """Returns the product of the sizes of axes, at smaller sizes of some variables."""
    return functools.reduce(operator.mul, [count_entries(axis, sizes) for axis in axes], 1)


def _compute_operand_density(uses: Sequence[Use], density: Mapping[Path, Number]) -> Number:
    """Returns the part of the entries of an operand that may differ from 0.

    Parameters that were joined add up. Parameters that were multiplied bound each other: a
    parameter with a density counts.
    """
    total: Number = Fraction(0)
    uncovered = Fraction(1)  # the part of the operand that no earlier parameter has
    # Parameters with a density come first: dense ones do not bound the entries.
    for use in sorted(uses, key=lambda use: use.path not in density or not use.view.keeps_zeros):
        share = min(use.view.share, uncovered)
        uncovered -= share
        kept_share = density.get(use.path, Fraction(1)) if use.view.keeps_zeros else Fraction(1)
        total = total + kept_share * share
    return total + uncovered if uncovered else total
