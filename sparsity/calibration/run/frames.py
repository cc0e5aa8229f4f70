"""Values of a program that runs on all batches, as long as they are needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax

from sparsity.programs.program import Equation, Program, Value

ScanLayers: TypeAlias = Mapping[Equation, int]  # the layer of each scan, the outermost first


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """Program that runs on all batches, with the values that are still needed.

    Attributes:
      program: the program.
      param_inputs: functions that compute the inputs that depend on parameters alone, or their
        parts at some indices of their first axes.
      data: the values of the other inputs, for each batch.
      layers: the layer of each scan around the program.
    """

    program: Program
    param_inputs: Mapping[Value, Callable[..., jax.Array]]
    data: list[dict[Value, jax.Array]]
    layers: ScanLayers
    # Values, or some of their layers, of parameters alone, which change as weights are pruned.
    _from_params: dict[tuple[Value, tuple[int, ...]], jax.Array] = dataclasses.field(
        default_factory=dict
    )

    @functools.cached_property
    def last_uses(self) -> Mapping[Value, Equation | None]:
        """The last equation that needs each value."""
        return find_last_uses(self.program)

    def read_from_params(self, value: Value, *layers: int) -> jax.Array:
        """Returns a value that depends on parameters alone, or one of its layers."""
        values = self._from_params
        if value in self.param_inputs:
            if not self.layers:  # all layers would be held
                return self.param_inputs[value](*layers)
            if (value, layers) not in values:  # once for all batches
                values[value, layers] = self.param_inputs[value](*layers)
            return values[value, layers]
        if (value, ()) not in values and value in self.program.makers:
            equation = self.program.makers[value]
            if layers and equation.name == "convert_element_type":  # of a stack: only the layer
                return equation.bind([self.read_from_params(equation.inputs[0], *layers)])[0]
            outputs = equation.bind([self.read_from_params(x) for x in equation.inputs])
            values.update(zip([(x, ()) for x in equation.outputs], outputs, strict=True))
        result: jax.Array = values.get((value, ()), value.constant)
        return result[layers] if layers else result

    def forget_params(self) -> None:
        """Drops values computed from parameters, which have changed."""
        self._from_params.clear()

    def read(self, batch: int, value: Value) -> jax.Array:
        """Returns a value for a batch."""
        values = self.data[batch]
        return values[value] if value in values else self.read_from_params(value)

    def read_inputs(self, batch: int, equation: Equation) -> list[jax.Array]:
        """Returns the inputs of an equation, for a batch."""
        return [self.read(batch, value) for value in equation.inputs]

    def write(self, batch: int, equation: Equation, outputs: Sequence[jax.Array]) -> None:
        """Stores the outputs of an equation for a batch, and drops values as `drop_unneeded`."""
        self.data[batch].update(zip(equation.outputs, outputs, strict=True))
        self.drop_unneeded(batch, equation)

    def drop_unneeded(self, batch: int, equation: Equation) -> None:
        """Drops the values of a batch that no equation after this one needs."""
        for value in {*equation.inputs, *equation.outputs}:
            if self.last_uses.get(value, equation) is equation:
                self.data[batch].pop(value, None)


def find_last_uses(program: Program) -> dict[Value, Equation | None]:
    """Returns the last equation that needs each value, `None` for outputs."""
    last_uses: dict[Value, Equation | None] = {}
    for equation in program.flat_equations():
        last_uses.update(dict.fromkeys(equation.inputs, equation))
    last_uses.update(dict.fromkeys(program.outputs))
    return last_uses
