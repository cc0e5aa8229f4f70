"""Programs that run with sums beside them, in loops and branches, too."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from sparsity.calibration.statistics.counts import Count
from sparsity.core import host
from sparsity.core.trees import PyTree
from sparsity.graph import Use
from sparsity.programs.program import Equation, Program
from sparsity.programs.walk import Interpreter

Steps: TypeAlias = Mapping[Equation, jax.Array]  # the step of each scan around a product
Sums: TypeAlias = dict[int, PyTree]  # by number of the use: arrays and counts that add up
SumUp: TypeAlias = Callable[[int, jax.Array, Steps], PyTree]


def add(one: PyTree, other: PyTree) -> PyTree:
    """Adds trees of arrays and counts."""
    return jax.tree.map(_plus, one, other, is_leaf=is_count)


def is_count(x: object) -> bool:
    """Returns whether a value is a `Count`."""
    return isinstance(x, Count)


def _plus(one: PyTree, other: PyTree) -> PyTree:
    return one + other if is_count(one) else _sum(one, other)


_sum = host.instead(host.add)(operator.add)


class Walk(Interpreter[jax.Array]):
    """Runs a program and sums the inputs of chosen uses on the way.

    Args:
      uses: uses by number.
      sum_up: `sum_up(number, x, steps)` returns the sums of a use, a tree of arrays and counts.
      stacks: keep the sums of each layer of a stacked weight apart, in leading axes.
    """

    def __init__(self, uses: Mapping[int, Use], sum_up: SumUp, stacks: bool = False) -> None:
        super().__init__()
        self._uses, self._sum_up, self._stacks = uses, sum_up, stacks
        self._steps: Steps = {}
        self._at: dict[Equation, list[int]] = {}
        for number, use in uses.items():
            self._at.setdefault(use.equation, []).append(number)

    def at(self, equation: Equation) -> Sequence[int]:
        """Returns the numbers of the uses that are this product."""
        return self._at.get(equation, ())

    def within(self, equation: Equation) -> list[int]:
        """Returns the uses in the body of a loop or in a branch, in program order."""
        return [
            number
            for body in equation.bodies
            for inner in body.flat()
            for number in (*self.at(inner), *self.within(inner))
        ]

    def run_with_sums(
        self, program: Program, inputs: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], Sums]:
        """Runs a program, and returns its outputs and sums."""
        inside = self.inside()
        return inside.run(program, inputs), inside.sums

    def sum_equation(self, equation: Equation, inputs: list[jax.Array]) -> Sums:
        """Runs an equation, and returns the sums of its uses."""
        inside = self.inside()
        inside.evaluate(equation, inputs)
        return inside.sums

    def bind(self, equation: Equation, inputs: list[jax.Array]) -> list[jax.Array]:
        for number in self.at(equation):
            x = inputs[1 - self._uses[number].operand]
            self.sums[number] = self._sum_up(number, x, self._steps)
        return equation.bind(inputs)

    def enters(self, equation: Equation) -> bool:
        return equation.name in ("scan", "cond") and self.sums_up(equation)

    def sums_up(self, equation: Equation) -> bool:
        return bool(self.within(equation))

    def add(self, one: Sums, other: Sums) -> Sums:
        sums: Sums = add(one, other)
        return sums

    def rows(self, scan: Equation) -> jax.Array:
        return jnp.arange(scan.params["length"], dtype=jnp.int32)

    def at_step(self, scan: Equation, rows: jax.Array) -> Walk:
        step = self.inside()
        step._steps = {**self._steps, scan: rows}
        return step

    def take_stacked(self, scan: Equation) -> Sums:
        """Removes the sums of the layers of weights that the scan takes apart."""
        numbers = [n for n in self.sums if self._stacks and scan in self._uses[n].view.scans]
        return {number: self.sums.pop(number) for number in numbers}

    def put_stacked(self, sums: Sums) -> None:
        """Adds sums with leading axes of layers; counts have them behind their digits."""

        def moved(x: Count | jax.Array) -> Count | jax.Array:
            return Count(jnp.moveaxis(x.digits, 0, 1)) if isinstance(x, Count) else x

        self.sums |= jax.tree.map(moved, sums, is_leaf=is_count)
