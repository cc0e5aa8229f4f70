"""Channels that each layer of a scan may choose for itself.

A scan runs one program on layer after layer of stacked arrays. Channels that live within a layer,
as hidden units do, may differ between layers; channels of the carry may not.
"""

from __future__ import annotations

from sparsity.graph.channels.coupling import Coupling
from sparsity.programs.axes import Axis, list_variables
from sparsity.programs.program import Equation, Program, Value


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
                if variable.pin is None and variable not in layers:
                    look = _Look(coupling, variable, steps.root)
                    if look.is_within(program):
                        layers[variable] = scan.length
    return layers


class _Look:
    """A search for a variable outside of the layers of a scan."""

    def __init__(self, coupling: Coupling, variable: Axis, steps: Axis) -> None:
        self._coupling, self._variable, self._steps = coupling, variable, steps

    def is_within(self, program: Program) -> bool:
        """Returns whether all arrays with the variable are stacks, or lie within the layers."""
        values = {*program.inputs, *program.outputs}
        for equation in program.flat():
            values.update(equation.inputs, equation.outputs)
        if not all(map(self._is_stack, values)):
            return False
        rules = [value for rule in program.with_rules() for value in rule.inputs]
        return not any(map(self._has, rules)) and all(map(self._stays, program.flat()))

    def _stays(self, equation: Equation) -> bool:
        if equation.name == "scan":
            (body,) = equation.within()
            first = body.layers.start
            if not any(map(self._has, body.program.inputs[:first])):
                stacks = [value for value in equation.inputs[first:] if self._has(value)]
                return all(self._coupling.axes(x)[0].root is self._steps for x in stacks)
        return all(map(self.is_within, equation.bodies))

    def _has(self, value: Value) -> bool:
        return any(self._variable in list_variables(axis) for axis in self._coupling.axes(value))

    def _is_stack(self, value: Value) -> bool:
        if not self._has(value):
            return True
        first = self._coupling.axes(value)[0]
        return first.root is self._steps and self._variable not in list_variables(first)
