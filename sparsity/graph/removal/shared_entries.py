"""Entries that are equal in all removed channels, which a smaller program adds to its sums.

The variance of LayerNorm sums squares of x - mean(x). Where channels are masked, x is 0 and each
term is the square of -mean(x): not a constant, but the same number in all masked channels. The
smaller program adds this number once for each removed channel, so that the sum stays exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from sparsity.graph.removal.constants import Constants
from sparsity.programs import entrywise
from sparsity.programs.axes import AxisIndex, Variable
from sparsity.programs.entrywise import ENTRYWISE
from sparsity.programs.program import CALLS, Equation, Program, Value

# {value that is available where an equation runs: the equation that makes the value, if one does}
AvailableValues: TypeAlias = Mapping[Value, Equation | None]
_MAX_EQUATIONS = 64  # equations that a smaller program evaluates for one sum


@dataclasses.dataclass(frozen=True, eq=False)
class SharedEntry:
    """An entry that all removed channels share along an axis of a value.

    Without a constant and a maker, the entry is the value itself, which has size 1 along the axis,
    or no such axis.

    Attributes:
      value: the value.
      axis: the axis, -1 if the value has no such axis.
      constant: the entry if it is a constant.
      maker: the equation that computes the entry from entries of its inputs.
      inputs: these entries.
    """

    value: Value
    axis: AxisIndex
    constant: float | None = None
    maker: Equation | None = None
    inputs: Sequence[SharedEntry] = ()

    def list_values(self) -> list[Value]:
        """Returns the values of the program from which the entry is computed."""
        if self.constant is None and self.maker is None:
            return [self.value]
        return [value for entry in self.inputs for value in entry.list_values()]


def find_shared_entry(
    value: Value,
    axis: AxisIndex,
    variable: Variable,
    available: AvailableValues,
    find_constants: Callable[[Value], Constants],
) -> SharedEntry | None:
    """Returns the entry of all removed channels along an axis, `None` if they may differ.

    Args:
      value: the value.
      axis: the axis.
      variable: the variable of the channels.
      available: the values from which an entry may be computed.
      find_constants: returns the constants of a value.
    """

    @functools.cache
    def find(value: Value, axis: AxisIndex) -> SharedEntry | None:
        if find.cache_info().misses > _MAX_EQUATIONS:
            return None
        constants = find_constants(value)
        constant = constants.everywhere if axis < 0 else constants[axis, variable]
        if constant is not None:
            return None if math.isnan(constant) else SharedEntry(value, axis, constant)
        if axis < 0 or value.shape[axis] == 1:
            is_available = value in available or value.constant is not None
            return SharedEntry(value, axis) if is_available else None
        maker = available.get(value)
        if maker is None:
            return None
        if maker.name == "broadcast_in_dim":
            (source, *_), axes = maker.inputs, maker.params["broadcast_dimensions"]
            places = [(source, axes.index(axis) if axis in axes else -1)]
        elif maker.name in ENTRYWISE and len(maker.outputs) == 1:
            may_be_nan = any(find_constants(x).may_be_nan for x in maker.inputs)
            if may_be_nan and entrywise.may_remove_nan(maker):
                return None
            places = [(x, axis if x.shape else -1) for x in maker.inputs]
        else:
            return None
        inputs = [entry for place in places if (entry := find(*place)) is not None]
        # The sign of a 0 is not followed.
        reads_zero = entrywise.reads_zero_sign(maker) and [x.constant for x in inputs[1:]] == [0]
        is_complete = len(inputs) == len(places) and not reads_zero
        return SharedEntry(value, axis, maker=maker, inputs=inputs) if is_complete else None

    return find(value, axis)


def find_available_values(program: Program) -> dict[Equation, AvailableValues]:
    """Returns the values that are available to each equation of a program, and of its calls.

    Only inputs and outputs enter and leave a call that is not inline: jax traces it by itself.
    """
    by_equation: dict[Equation, AvailableValues] = {}

    def enter(program: Program, available: dict[Value, Equation | None]) -> None:
        for equation in program.equations:
            by_equation[equation] = available
            if equation.is_inline:
                enter(equation.inner_programs[0], available)
            elif equation.name in CALLS:
                enter(equation.inner_programs[0], dict.fromkeys(equation.inner_programs[0].inputs))
                available.update(dict.fromkeys(equation.outputs))
            else:
                available.update(dict.fromkeys(equation.outputs, equation))

    enter(program, dict.fromkeys(program.inputs))
    return by_equation
