"""Channels that each layer of a scan may choose for itself.

A scan runs one program on layer after layer of stacked arrays. Channels that live within a layer,
as hidden units do, need not be the same ones in all layers; those of the carry must.
"""

from __future__ import annotations

from sparsity.graph.coupling import Coupling
from sparsity.programs.axes import Axis, variables
from sparsity.programs.program import Equation, Program, Value


def layered(program: Program, coupling: Coupling) -> dict[Axis, int]:
    """Variables of which each layer of a scan has entries of its own, and how many layers."""
    found: dict[Axis, int] = {}
    for scan in program.flat():
        if scan.name != "scan":
            continue
        (body,) = scan.within()
        for value in (scan.inputs[number] for number in body.layers):
            steps, *others = coupling.axes(value)
            for variable in (v for dim in others for v in variables(dim)):
                if variable.pin is None and variable not in found:
                    look = _Look(coupling, variable, steps.root)
                    if look.is_within(program):
                        found[variable] = scan.params["length"]
    return found


class _Look:
    """Looks for a variable outside of the layers of a scan."""

    def __init__(self, coupling: Coupling, variable: Axis, steps: Axis) -> None:
        self._coupling, self._variable, self._steps = coupling, variable, steps

    def is_within(self, program: Program) -> bool:
        """Whether all arrays that have it are stacks, or lie within the layers."""
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
            own = body.layers.start
            if not any(map(self._has, body.program.inputs[:own])):
                stacks = [value for value in equation.inputs[own:] if self._has(value)]
                return all(self._coupling.axes(x)[0].root is self._steps for x in stacks)
        return all(map(self.is_within, equation.bodies))

    def _has(self, value: Value) -> bool:
        return any(self._variable in variables(dim) for dim in self._coupling.axes(value))

    def _is_stack(self, value: Value) -> bool:
        if not self._has(value):
            return True
        first = self._coupling.axes(value)[0]
        return first.root is self._steps and self._variable not in variables(first)
