"""Channels that each layer of a scan may choose for itself.

A scan runs one program on layer after layer of stacked arrays. Channels that live within a layer,
as hidden units do, may differ between layers; channels of the carry may not.
"""

from __future__ import annotations

from sparsity.graph.channels.coupling import Coupling
from sparsity.programs.axes import Axis, list_variables
from sparsity.programs.program import Program, Value


def find_layered(program: Program, coupling: Coupling) -> dict[Axis, int]:
    """Returns {variable: number of layers} where layers of a scan may keep different entries."""
    layers: dict[Axis, int] = {}
    for scan in program.flat():
        if scan.name != "scan":
            continue
        (body,) = scan.within()
        for value in (scan.inputs[number] for number in body.layers):
            steps, *axes = coupling.axes(value)
            for variable in (v for axis in axes for v in list_variables(axis)):
                if (
                    variable.pin is None
                    and variable not in layers
                    and _is_within_layers(program, coupling, variable, steps.root)
                ):
                    layers[variable] = scan.length
    return layers


def _is_within_layers(program: Program, coupling: Coupling, variable: Axis, steps: Axis) -> bool:
    """Returns whether all arrays with a variable are stacks of layers, or lie within the layers.

    Args:
      program: the program, or a body.
      coupling: the axes of the program.
      variable: the variable.
      steps: the axis of the layers.
    """

    def has_variable(value: Value) -> bool:
        return any(variable in list_variables(axis) for axis in coupling.axes(value))

    def is_stack(value: Value) -> bool:
        first, *_ = coupling.axes(value)
        return first.root is steps and variable not in list_variables(first)

    values = {*program.inputs, *program.outputs}
    for equation in program.flat():
        values.update(equation.inputs, equation.outputs)
    calls = (value for equation, _ in program.rules() for value in equation.inputs)
    if not all(map(is_stack, filter(has_variable, values))) or any(map(has_variable, calls)):
        return False
    for equation in program.flat():
        if equation.name == "scan":
            (body,) = equation.within()
            if not any(map(has_variable, body.program.inputs[: body.layers.start])):
                continue  # each step reads a layer of the stacks
        if not all(_is_within_layers(body, coupling, variable, steps) for body in equation.bodies):
            return False
    return True
