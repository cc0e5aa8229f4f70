"""Programs that run with sums beside them, in loops and branches, too."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from sparsity.calibration.statistics.counts import Count
from sparsity.core.jaxprs import Equation, Program, Value
from sparsity.core.trees import PyTree
from sparsity.graph import Use

Steps: TypeAlias = Mapping[Equation, jax.Array]  # the step of each scan around a product
Sums: TypeAlias = dict[int, PyTree]  # by number of the use: arrays and counts that add up
SumUp: TypeAlias = Callable[[int, jax.Array, Steps], PyTree]


def add(one: PyTree, other: PyTree) -> PyTree:
    """Adds trees of arrays and counts."""
    return jax.tree.map(operator.add, one, other, is_leaf=lambda x: isinstance(x, Count))


class Walk:
    """Runs programs with the sums of some uses beside them.

    Args:
      uses: by number.
      sum_up: `sum_up(number, x, steps)` returns what a use adds, a tree of arrays and counts.
      stacks: keep the sums of each layer of a stacked weight apart, in leading axes.
    """

    def __init__(self, uses: Mapping[int, Use], sum_up: SumUp, stacks: bool = False) -> None:
        self._uses, self._sum_up, self._stacks = uses, sum_up, stacks
        self._at: dict[Equation, list[int]] = {}
        for number, use in uses.items():
            self._at.setdefault(use.equation, []).append(number)

    def at(self, equation: Equation) -> Sequence[int]:
        """The uses, by number, that a product is."""
        return self._at.get(equation, ())

    def within(self, equation: Equation) -> list[int]:
        """The uses in the body of a loop or in a branch, in program order."""
        return [
            number
            for body in equation.bodies
            for inner in body.flat()
            for number in (*self.at(inner), *self.within(inner))
        ]

    def evaluate(
        self, program: Program, inputs: Sequence[Any], steps: Steps | None = None
    ) -> tuple[list[Any], Sums]:
        """The outputs of a program or of a part of it, and its sums."""
        arrays: dict[Value, Any] = dict(zip(program.inputs, inputs, strict=True))
        sums: Sums = {}

        def read(value: Value) -> Any:
            return arrays.get(value, value.known)

        for equation in program.flat():
            operands = [read(value) for value in equation.inputs]
            outputs, more = self.run(equation, operands, steps or {})
            sums |= more
            arrays.update(zip(equation.outputs, outputs, strict=True))
        return [read(value) for value in program.outputs], sums

    def run(
        self, equation: Equation, inputs: list[Any], steps: Steps
    ) -> tuple[Sequence[Any], Sums]:
        """The outputs of an equation, and the sums of the uses in it."""
        if equation.name in _BODIES and self.within(equation):
            return _BODIES[equation.name](self, equation, inputs, steps)
        sums = {
            number: self._sum_up(number, inputs[1 - self._uses[number].operand], steps)
            for number in self.at(equation)
        }
        return equation.bind(inputs), sums

    def _scan(
        self, equation: Equation, inputs: list[Any], steps: Steps
    ) -> tuple[Sequence[Any], Sums]:
        params, (body,) = equation.params, equation.bodies
        fixed, carried = params["num_consts"], params["num_carry"]
        end = fixed + carried
        stacked = {
            number
            for number in self.within(equation)
            if self._stacks and equation in self._uses[number].view.scans
        }

        def of_step(step: jax.Array, inputs: list[Any]) -> tuple[list[Any], Sums]:
            return self.evaluate(body, inputs, {**steps, equation: step})

        def run(state: Any, layer: Any) -> Any:
            (carry, total), (step, xs) = state, layer
            outputs, sums = of_step(step, [*inputs[:fixed], *carry, *xs])
            apart = {number: sums.pop(number) for number in stacked}
            return (outputs[:carried], add(total, sums)), (outputs[carried:], apart)

        structs = [value.struct() for value in body.inputs]
        shapes = jax.eval_shape(of_step, jax.ShapeDtypeStruct((), jnp.int32), structs)[1]
        total = _zeros({number: x for number, x in shapes.items() if number not in stacked})
        how = {key: params[key] for key in ("length", "reverse", "unroll")}
        layers = jnp.arange(params["length"], dtype=jnp.int32), inputs[end:]
        (carry, total), (outputs, apart) = lax.scan(run, (inputs[fixed:end], total), layers, **how)
        return [*carry, *outputs], total | _stacked(apart)

    def _cond(
        self, equation: Equation, inputs: list[Any], steps: Steps
    ) -> tuple[Sequence[Any], Sums]:
        index, *operands = inputs

        def branch(body: Program) -> Callable[..., tuple[list[Any], Sums]]:
            return lambda *operands: self.evaluate(body, operands, steps)

        def with_zeros(branch: Callable[..., Any]) -> Callable[..., Any]:
            """A branch that sums nothing for the uses of others."""

            def run(*operands: Any) -> Any:
                outputs, sums = branch(*operands)
                return outputs, _zeros(shapes) | sums

            return run

        branches = [branch(body) for body in equation.bodies]
        shapes: Sums = {}
        for each in branches:
            shapes |= jax.eval_shape(each, *operands)[1]
        if index.dtype == jnp.bool_:
            index = index.astype(jnp.int32)
        found: tuple[list[Any], Sums] = lax.switch(index, [*map(with_zeros, branches)], *operands)
        return found


def _zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)


def _stacked(sums: Sums) -> Sums:
    """The sums of the layers of a scan, whose counts have the layers behind the digits."""

    def moved(x: Any) -> Any:
        return Count(jnp.moveaxis(x.digits, 0, 1)) if isinstance(x, Count) else x

    moved_sums: Sums = jax.tree.map(moved, sums, is_leaf=lambda x: isinstance(x, Count))
    return moved_sums


_BODIES: dict[str, Callable[..., tuple[Sequence[Any], Sums]]] = {
    "scan": Walk._scan,
    "cond": Walk._cond,
}
