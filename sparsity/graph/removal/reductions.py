"""Reductions over channels, in the words of the layers that models are made of."""

from __future__ import annotations

import functools

from sparsity.programs.entrywise import REDUCTIONS, is_copy
from sparsity.programs.layout import is_move
from sparsity.programs.program import Equation, Program, Value


class Reductions:
    """Names reductions over channels by what a program computes before and after.

    Args:
      program: the program, or the body, that holds the reductions.
    """

    def __init__(self, program: Program):
        self._program = program

    def describe(self, reduction: Equation) -> str:
        """Returns text such as 'a mean over the channels: LayerNorm'."""
        name = reduction.name.removeprefix("reduce_")
        before = self._find_maker(reduction.inputs[0])
        after = self._list_readers(reduction.outputs[0])
        text, layer = REDUCTIONS[reduction.name].text or name, ""
        if name == "sum" and any(_divides_by_constant(equation) for equation in after):
            text, layer = "a mean", ": LayerNorm"
        if before is not None and _is_square(before):
            centred = self._find_maker(before.inputs[0])
            if layer and centred is not None and centred.name == "sub":
                text = "a variance"
            else:
                text, layer = f"{text} of squares", ": RMSNorm" if layer else ""
        is_exp = text == "a sum" and before is not None and before.name == "exp"
        if is_exp or (name == "max" and any(equation.name == "sub" for equation in after)):
            layer = ": softmax"
        return f"{text} over the channels{layer}"

    @functools.cached_property
    def _readers(self) -> dict[Value, list[Equation]]:
        readers: dict[Value, list[Equation]] = {}
        for equation in self._program.flat():
            for value in equation.inputs:
                readers.setdefault(value, []).append(equation)
        return readers

    def _find_maker(self, value: Value) -> Equation | None:
        """Returns the equation that computes a value, before copies of it."""
        makers = self._program.makers
        maker = makers.get(value)
        while maker is not None and (is_copy(maker) or is_move(maker)):
            maker = makers.get(maker.inputs[0])
        return maker

    def _list_readers(self, value: Value) -> list[Equation]:
        """Returns the equations that read a value or a copy of it."""
        readers: list[Equation] = []
        for equation in self._readers.get(value, ()):
            if is_copy(equation) or is_move(equation) or _has_constant(equation, "max"):
                readers += [x for copy in equation.outputs for x in self._list_readers(copy)]
            else:
                readers.append(equation)
        return readers


def _has_constant(equation: Equation, name: str) -> bool:
    return equation.name == name and any(x.constant is not None for x in equation.inputs)


def _divides_by_constant(equation: Equation) -> bool:
    """Returns whether an equation scales by a number that the program holds."""
    return _has_constant(equation, "div") or _has_constant(equation, "mul")


def _is_square(equation: Equation) -> bool:
    if equation.name == "mul":
        return equation.inputs[0] is equation.inputs[1]
    is_power = equation.name == "integer_pow" and equation.params["y"] == 2
    return is_power or equation.name == "square"
