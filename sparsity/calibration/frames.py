"""A program that runs on several batches in lockstep, with parameters that change on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sparsity.programs.program import Equation, Program, Value

Layers: TypeAlias = Mapping[Equation, int]  # the layer of each scan, the outermost first


class Frame:
    """A program that runs on all batches: the values of each that are still needed.

    Args:
      program: the program.
      bound: inputs that depend on parameters alone, as functions that compute them, or the part
        of them that lies at some indices of their first axes.
      data: for each batch the values of the other inputs.
      layers: the layer of each scan around the program.
    """

    def __init__(
        self,
        program: Program,
        bound: Mapping[Value, Callable[..., Any]],
        data: list[dict[Value, Any]],
        layers: Layers,
    ) -> None:
        self.program, self.bound, self.data, self.layers = program, bound, data, layers
        self._made_by = {value: e for e in program.flat() for value in e.outputs}
        self._free: dict[Value, Any] = {}

    def free(self, value: Value, *layers: int) -> Any:
        """A value that depends on parameters alone, or a layer of it."""
        if value in self.bound:
            return self.bound[value](*layers)
        if value not in self._free and value in self._made_by:
            equation = self._made_by[value]
            if layers and equation.name == "convert_element_type":  # of a stack: only the layer
                return equation.bind([self.free(equation.inputs[0], *layers)])[0]
            outputs = equation.bind([self.free(x) for x in equation.inputs])
            self._free.update(zip(equation.outputs, outputs, strict=True))
        found = self._free.get(value, value.constant)
        return found[layers] if layers else found

    def forget(self) -> None:
        """Drops what was computed from parameters, which have changed."""
        self._free.clear()

    def read(self, batch: int, value: Value) -> Any:
        """A value for a batch."""
        values = self.data[batch]
        return values[value] if value in values else self.free(value)

    def inputs(self, batch: int, equation: Equation) -> list[Any]:
        """What an equation reads, for a batch."""
        return [self.read(batch, value) for value in equation.inputs]

    def last_uses(self) -> dict[Value, Equation | None]:
        """After which equation a value is needed no more, `None` for outputs."""
        last: dict[Value, Equation | None] = {}
        for equation in self.program.flat():
            last.update(dict.fromkeys(equation.inputs, equation))
        last.update(dict.fromkeys(self.program.outputs))
        return last
