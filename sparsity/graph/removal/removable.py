"""Removal of channels: coupled axes, and proofs that the channels may be removed."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from sparsity.core.trees import Path
from sparsity.graph.channels.coupling import Coupling
from sparsity.graph.channels.groups import Channels, find_channels
from sparsity.graph.readers.uses import Use
from sparsity.graph.removal.proof import Proof
from sparsity.graph.removal.shared_entries import SharedEntry
from sparsity.graph.traced_model import Model, Parameter
from sparsity.programs.axes import Axis, AxisIndex, Reason, Variable, list_variables
from sparsity.programs.program import Equation, Program, Value


class Removal:
    """Channels that can be removed from a model; computed when first asked for.

    Args:
      model: the model.
      products: the dots and convolutions that read parameters.
    """

    def __init__(self, model: Model, products: Sequence[Use]) -> None:
        self._model, self._products = model, products
        self._proofs: dict[frozenset[tuple[object, ...]], Any] = {}

    def list_members(self) -> set[tuple[Path, AxisIndex]]:
        """Returns (path, axis) of all axes of parameters that can lose channels."""
        return {member for group in self.channels.groups for member in group.members}

    def list_parameter_axes(self) -> list[tuple[Parameter, list[Axis]]]:
        """Returns the parameters with their axes."""
        return [(x, self.coupling.axes(value)) for value, x in self._model.parameter_inputs.items()]

    @functools.cached_property
    def coupling(self) -> Coupling:
        """The axes of all values of the program."""
        return Coupling(self._model)

    def find_unproven(
        self, masked: Mapping[Path, Collection[tuple[AxisIndex, Variable]]]
    ) -> dict[Variable, Reason]:
        """Returns the variables whose removal differs from masking, and why.

        Each variable is proven by itself: its masked entries prove nothing about another variable.

        Args:
          masked: {path: (axis, variable) of all removed entries at which the parameter is 0}.
        """
        return self._prove(masked)[0]

    @property
    def shared_entries(self) -> dict[Equation, SharedEntry]:
        """{sum along channels: the entry that removed channels share}, which a cut model adds."""
        return self._prove(self._maskable_entries)[1]

    def _prove(
        self, masked: Mapping[Path, Collection[tuple[AxisIndex, Variable]]]
    ) -> tuple[dict[Variable, Reason], dict[Equation, SharedEntry]]:
        """Returns `refused` and `shared_entries` of a proof; removed entries are 0."""
        key = frozenset((path, *entry) for path, entries in masked.items() for entry in entries)
        if key not in self._proofs:
            values = self._model.parameter_inputs.items()
            entries = {value: masked[x.path] for value, x in values if x.path in masked}
            proof = Proof(self._model.program, self.coupling, entries)
            # Without the facts from which they follow.
            self._proofs[key] = proof.refused, proof.shared_entries
        return self._proofs[key]

    @functools.cached_property
    def updated_state(self) -> set[Path]:
        """Paths of the parameters that a call replaces, so that masks do not keep zeros there."""
        program, parameters = self._model.program, self._model.parameters
        pairs = self._model.carried.items()
        return {parameters[i].path for n, i in pairs if program.outputs[n] is not program.inputs[i]}

    @functools.cached_property
    def _maskable_entries(self) -> dict[Path, set[tuple[AxisIndex, Variable]]]:
        """Entries that masking all channels sets to 0, as `find_unproven` takes them."""
        return {
            parameter.path: {(i, v) for i, axis in enumerate(axes) for v in list_variables(axis)}
            for parameter, axes in self.list_parameter_axes()
            if parameter.path not in self.updated_state
            and jnp.issubdtype(parameter.dtype, jnp.inexact)
        }

    @functools.cached_property
    def channels(self) -> Channels:
        """The channels that can be removed, and the axes that have none."""
        output_axes: dict[Path, set[AxisIndex]] = {}
        window_axes: dict[Path, set[AxisIndex]] = {}
        for use in self._products:
            output_axes.setdefault(use.path, set()).update(use.output)
            window = {*use.contracting} - {*use.channels}
            window_axes.setdefault(use.path, set()).update(window)
        unproven = self.find_unproven(self._maskable_entries)
        num_layers = _find_layered_variables(self._model.program, self.coupling)
        return find_channels(
            self.list_parameter_axes(), unproven, output_axes, window_axes, num_layers
        )


def _find_layered_variables(program: Program, coupling: Coupling) -> dict[Variable, int]:
    """Returns {variable: number of layers} where layers of a scan may keep different entries.

    A scan runs one program on layer after layer of stacked arrays. Channels that live within a
    layer, as hidden units do, may differ between layers; channels of the carry may not.
    """
    layers: dict[Variable, int] = {}
    for scan in (equation for equation in program.flat_equations() if equation.name == "scan"):
        (body,) = scan.list_bodies()
        for value in (scan.inputs[index] for index in body.layers):
            steps, *axes = coupling.axes(value)
            for variable in (v for axis in axes for v in list_variables(axis)):
                is_free = variable.pin is None and variable not in layers
                if is_free and _is_within_layers(program, coupling, variable, steps.root):
                    layers[variable] = scan.length
    return layers


def _is_within_layers(
    program: Program, coupling: Coupling, variable: Variable, steps: Axis
) -> bool:
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
        first_axis, *_ = coupling.axes(value)
        return first_axis.root is steps and variable not in list_variables(first_axis)

    values = {*program.inputs, *program.outputs}
    for equation in program.flat_equations():
        values.update(equation.inputs, equation.outputs)
    calls = (value for equation, _ in program.calls_with_rules() for value in equation.inputs)
    if not all(map(is_stack, filter(has_variable, values))) or any(map(has_variable, calls)):
        return False
    for equation in program.flat_equations():
        if equation.name == "scan":
            (body,) = equation.list_bodies()
            if not any(map(has_variable, body.program.inputs[: body.layers.start])):
                continue  # each step reads a layer of the stacks
        inner = equation.inner_programs
        if not all(_is_within_layers(body, coupling, variable, steps) for body in inner):
            return False
    return True
