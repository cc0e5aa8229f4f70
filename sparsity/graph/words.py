"""Reductions over channels, in the words of the layers that models are made of."""

from __future__ import annotations

from sparsity.programs.program import Equation, Program, Value

# These pass values on, entry by entry.
_COPIES = (
    "broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "stop_gradient",
)  # fmt: skip
_NAMES = {
    "argmax": "an argmax", "argmin": "an argmin", "max": "a maximum", "min": "a minimum",
    "prod": "a product", "sum": "a sum",
}  # fmt: skip


def describe_reduction(program: Program, reduction: Equation) -> str:
    """Names a reduction over channels by what the program computes before and after.

    Args:
      program: the program, or the body, that holds the reduction.
      reduction: the equation.

    Returns:
      Text such as 'a mean over the channels: LayerNorm'.
    """
    name = reduction.name.removeprefix("reduce_")
    before = _find_maker(program, reduction.inputs[0])
    after = _list_readers(program, reduction.outputs[0])
    text, layer = _NAMES.get(name, name), ""
    if name == "sum" and any(_divides_by_constant(equation) for equation in after):
        text, layer = "a mean", ": LayerNorm"
    if before is not None and _is_square(before):
        centred = _find_maker(program, before.inputs[0])
        if layer and centred is not None and centred.name == "sub":
            text = "a variance"
        else:
            text, layer = f"{text} of squares", ": RMSNorm" if layer else ""
    is_exp = text == "a sum" and before is not None and before.name == "exp"
    if is_exp or (name == "max" and any(equation.name == "sub" for equation in after)):
        layer = ": softmax"
    return f"{text} over the channels{layer}"


def _find_maker(program: Program, value: Value) -> Equation | None:
    """Returns the equation that computes a value, before copies of it."""
    makers = {output: equation for equation in program.flat() for output in equation.outputs}
    maker = makers.get(value)
    while maker is not None and maker.name in _COPIES:
        maker = makers.get(maker.inputs[0])
    return maker


def _list_readers(program: Program, value: Value) -> list[Equation]:
    """Returns the equations that read a value or a copy of it."""
    copies, readers = {value}, []
    for equation in program.flat():
        if copies & {*equation.inputs}:
            is_copy = equation.name in _COPIES or _has_constant(equation, "max")
            if is_copy:
                copies.update(equation.outputs)
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
