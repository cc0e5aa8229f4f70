"""Groups of channels from the axes of parameters, and refusals for all other axes."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from sparsity.core.trees import Path
from sparsity.graph.traced_model import Parameter
from sparsity.programs.axes import Axis, AxisIndex, Reason, Variable, label_entries, list_variables

# The parameters of a model, with their axes.
ParameterAxes: TypeAlias = Sequence[tuple[Parameter, Sequence[Axis]]]


@dataclasses.dataclass(frozen=True, eq=False)
class ChannelGroup:
    """Channels whose entries are removed together. Made by `sparsity.trace`.

    The model without a channel computes what the model with the channel masked computes.

    Attributes:
      name: the parameter and the axis that make the channels.
      size: number of channels.
      members: (path, axis) of all entries that are removed with a channel.
      positions: for each member int[size, n]: where each channel lies along its axis.
      variable: the axis of the channels.
      layers: number of layers of a scan that may keep different channels; the stacked axis is the
        first axis of every member. 0 if all layers keep the same channels.
    """

    name: str
    size: int
    members: tuple[tuple[Path, int], ...]
    positions: tuple[np.ndarray, ...]
    variable: Variable = dataclasses.field(repr=False)
    layers: int = 0

    @property
    def paths(self) -> list[Path]:
        """The parameters of the members, each once."""
        return list(dict.fromkeys(path for path, _ in self.members))


@dataclasses.dataclass(frozen=True)
class Refusal:
    """An axis of a parameter that cannot lose entries, and why. Made by `sparsity.trace`.

    Attributes:
      path: path of the parameter.
      axis: the axis.
      primitive: the primitive that needs all entries, or 'input', 'output' or 'state' of the
        model; 'unread' if nothing reads the parameter, 'axis' if entries cannot be told apart.
      source: the line of the model that needs all entries.
      reason: the reason in words.
    """

    path: Path
    axis: int
    primitive: str
    source: str
    reason: str

    def explain(self) -> str:
        """Returns the reason, with the primitive and the line of the model if there is one."""
        return f"{self.reason} ({self.primitive} at {self.source})" if self.source else self.reason


class Channels(NamedTuple):
    """The channels of a model, and the axes that have none; both in tree order."""

    groups: list[ChannelGroup]
    refused: list[Refusal]


def find_channels(
    parameters: ParameterAxes,
    unproven: Mapping[Variable, Reason],
    output_axes: Mapping[Path, set[AxisIndex]],
    window_axes: Mapping[Path, set[AxisIndex]],
    num_layers: Mapping[Variable, int],
) -> Channels:
    """Returns the groups that can be removed, and the refused axes.

    Args:
      parameters: the parameters with their axes.
      unproven: variables whose removal would differ from masking them, and why.
      output_axes: {path: the axes of the parameter that become outputs of a product}.
      window_axes: {path: the axes of the parameter that are windows of a convolution}.
      num_layers: {variable: number of layers} where layers may keep different entries.
    """
    refusals = _find_refusals(parameters, unproven)
    groups, refused = [], list[Refusal]()
    names: dict[str, int] = {}
    for variable, members in _find_members(parameters).items():
        if variable in refusals:
            for parameter, axis_index, axis in members:
                if axis_index not in window_axes.get(parameter.path, ()):
                    reasons = [refusals.get(v) for v in list_variables(axis) if v.size > 1]
                    refused += _make_refusals(parameter, axis_index, refusals[variable], reasons)
            continue
        output_members = [x for x in members if x[1] in output_axes.get(x[0].path, ())]
        parameter, axis_index, _ = (output_members or members)[0]
        name = f"{parameter.name}:{axis_index}"
        names[name] = names.get(name, 0) + 1
        groups.append(
            ChannelGroup(
                name if names[name] == 1 else f"{name}.{names[name]}",
                variable.size,
                tuple((parameter.path, axis_index) for parameter, axis_index, _ in members),
                tuple(find_positions(axis, variable) for _, _, axis in members),
                variable,
                num_layers.get(variable, 0),
            )
        )
    return Channels(groups, list(dict.fromkeys(refused)))


def find_positions(
    axis: Axis, variable: Variable, sizes: Mapping[Variable, int] = types.MappingProxyType({})
) -> np.ndarray:
    """Returns int[size, n]: where each entry of a variable lies along an axis, at these sizes."""
    entries = label_entries(axis, variable, sizes)
    assert entries is not None  # refused before
    # Entries of no channel, -1, are first in the order, and are left out.
    order = np.argsort(entries, kind="stable")[np.count_nonzero(entries < 0) :]
    return order.reshape(sizes.get(variable, variable.size), -1)


def resize_groups(
    groups: list[ChannelGroup], parameters: ParameterAxes, sizes: Mapping[Variable, int]
) -> list[ChannelGroup]:
    """Returns the groups of channels in a smaller model, at these sizes of some axes.

    Groups stay in the same order, also those with one channel.

    Args:
      groups: groups of the full model.
      parameters: the parameters with their axes.
      sizes: {axis: size in the smaller model}.
    """
    if not sizes:
        return groups
    axes = {parameter.path: parameter_axes for parameter, parameter_axes in parameters}

    def resize(group: ChannelGroup) -> ChannelGroup:
        variable, members = group.variable, group.members
        positions = [find_positions(axes[path][i], variable, sizes) for path, i in members]
        size = sizes.get(variable, group.size)
        return dataclasses.replace(group, size=size, positions=tuple(positions))

    return [resize(group) for group in groups]


def _find_refusals(
    parameters: ParameterAxes, unproven: Mapping[Variable, Reason]
) -> dict[Variable, Reason]:
    """Returns the variables that cannot lose entries, and why."""
    refusals = dict(unproven)
    for axis in (axis for _, axes in parameters for axis in axes):
        for variable in list_variables(axis):
            if variable.pin is not None:
                refusals[variable] = variable.pin
            elif label_entries(axis, variable) is None:
                reason = Reason(None, "an axis of pairs of its own entries", "axis")
                refusals.setdefault(variable, reason)
            elif _has_only_single_entries(axis):
                reason = Reason(None, "an axis that is cut into single entries", "axis")
                refusals.setdefault(variable, reason)
    return refusals


def _find_members(
    parameters: ParameterAxes,
) -> dict[Variable, list[tuple[Parameter, AxisIndex, Axis]]]:
    """Returns {variable: the axes of parameters along which its entries lie}."""
    members: dict[Variable, list[tuple[Parameter, AxisIndex, Axis]]] = {}
    for parameter, axes in parameters:
        for axis_index, axis in enumerate(axes):
            for variable in dict.fromkeys(list_variables(axis)):
                if variable.size > 1 or _has_only_single_entries(axis):
                    members.setdefault(variable, []).append((parameter, axis_index, axis))
    return members


def _has_only_single_entries(axis: Axis) -> bool:
    """Returns whether a longer axis consists of variables of one entry each."""
    return axis.size > 1 and all(variable.size == 1 for variable in list_variables(axis))


def _make_refusals(
    parameter: Parameter, axis_index: int, reason: Reason, reasons: Sequence[Reason | None]
) -> list[Refusal]:
    """Returns the refusal of a part of an axis; none for positions next to channels.

    Args:
      parameter: the parameter.
      axis_index: index of the axis.
      reason: why the part cannot lose entries.
      reasons: the same for all parts, `None` for those that can.
    """
    is_position = reason.kind == "space"
    if is_position and any(other is None or other.kind != "space" for other in reasons):
        return []
    equation = reason.equation
    primitive = reason.kind if equation is None else equation.name
    source = "" if equation is None else equation.source
    text = f"{reason.text}; other entries of the axis can go" if None in reasons else reason.text
    return [Refusal(parameter.path, axis_index, primitive, source, text)]
