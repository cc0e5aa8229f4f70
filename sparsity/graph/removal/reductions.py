"""Reductions over channels, in the words of the layers that models are made of."""

from __future__ import annotations

from sparsity.programs.entrywise import REDUCTIONS, is_copy
from sparsity.programs.layout import is_move
from sparsity.programs.program import Equation, Program, Value


def describe_reduction(reduction: Equation, program: Program) -> str:
    """Returns text such as 'a mean over the channels: LayerNorm'.

    Args:
      reduction: the reduction.
      program: the program, or the body, that holds the reduction.
    """
    name = reduction.name.removeprefix("reduce_")
    maker = _find_maker(reduction.inputs[0], program)
    readers = _list_readers(reduction.outputs[0], program)
    text, layer = REDUCTIONS[reduction.name].text or name, ""
    if name == "sum" and any(_has_constant(equation, "div", "mul") for equation in readers):
        text, layer = "a mean", ": LayerNorm"
    if maker is not None and _is_square(maker):
        centred = _find_maker(maker.inputs[0], program)
        if layer and centred is not None and centred.name == "sub":
            text = "a variance"
        else:
            text, layer = f"{text} of squares", ": RMSNorm" if layer else ""
    is_exp = text == "a sum" and maker is not None and maker.name == "exp"
    if is_exp or (name == "max" and any(equation.name == "sub" for equation in readers)):
        layer = ": softmax"
    return f"{text} over the channels{layer}"


def _find_maker(value: Value, program: Program) -> Equation | None:
    """Returns the equation that computes a value, before copies of the value."""
    maker = program.makers.get(value)
    while maker is not None and (is_copy(maker) or is_move(maker)):
        maker = program.makers.get(maker.inputs[0])
    return maker


def _list_readers(value: Value, program: Program) -> list[Equation]:
    """Returns the equations that read a value or a copy of the value."""
    readers: list[Equation] = []
    for equation in program.readers.get(value, ()):
        if is_copy(equation) or is_move(equation) or _has_constant(equation, "max"):
            readers += [x for copy in equation.outputs for x in _list_readers(copy, program)]
        else:
            readers.append(equation)
    return readers


def _has_constant(equation: Equation, *names: str) -> bool:
    """Returns whether an equation of these names reads a number that the program holds."""
    return equation.name in names and any(x.constant is not None for x in equation.inputs)


def _is_square(equation: Equation) -> bool:
    if equation.name == "mul":
        return equation.inputs[0] is equation.inputs[1]
    is_power = equation.name == "integer_pow" and equation.params["y"] == 2
    return is_power or equation.name == "square"
