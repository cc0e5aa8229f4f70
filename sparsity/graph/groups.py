"""Groups of channels from the axes of parameters, refusals for all other axes, and cuts."""

from __future__ import annotations

import bisect
import dataclasses
import fnmatch
import types
from collections.abc import Container, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from sparsity.core import trees
from sparsity.core.checks import check_kind, check_real_array
from sparsity.core.names import suggest
from sparsity.core.trees import Path
from sparsity.graph.traced_model import Parameter
from sparsity.programs.axes import (
    Axis,
    AxisIndex,
    KeptIndices,
    Reason,
    Variable,
    count_entries,
    find_kept_indices,
    label_entries,
    list_variables,
)

AxisSizes: TypeAlias = dict[Variable, int]
AxisArrays: TypeAlias = Mapping[Path, Mapping[AxisIndex, np.ndarray]]  # {path: {axis: array}}

GroupKind: TypeAlias = Literal["experts", "heads", "head_channels", "stream", "channels", "hidden"]

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
      kind: what the channels are, as the program uses them: 'heads' of attention and their
        'head_channels', the residual 'stream', 'experts', 'channels' of convolutions, or other
        'hidden' units. Queries that share keys are heads of a group of their own.
    """

    name: str
    size: int
    members: tuple[tuple[Path, int], ...]
    positions: tuple[np.ndarray, ...]
    variable: Variable = dataclasses.field(repr=False)
    layers: int = 0
    kind: GroupKind = "hidden"

    @property
    def paths(self) -> list[Path]:
        """The parameters of the members, each once."""
        return list(dict.fromkeys(path for path, _ in self.members))

    def matches(self, key: str) -> bool:
        """Returns whether a key is the kind, the name, or a pattern of the name or its beginning.

        The name of a stream counts as a whole alone.

        Example:
          >>> group = ChannelGroup("layers/3/mlp/up:1", 8, (), (), Axis(8), kind="hidden")
          >>> [group.matches(key) for key in ("hidden", "layers/*/mlp", "layers/4")]
          [True, True, False]
        """
        patterns = [key]
        if self.kind != "stream":  # which has the name of the first layer that writes it
            patterns += [f"{key}{mark}*" for mark in "/.:"]
        return key == self.kind or any(fnmatch.fnmatchcase(self.name, x) for x in patterns)


def find_matching(groups: Sequence[ChannelGroup], key: str, argument: str) -> list[ChannelGroup]:
    """Returns the groups that a key names; raises a ValueError that names the argument if none."""
    check_kind(f"each key of {argument}", key, str, "a kind, a name or a pattern of groups")
    if matching := [group for group in groups if group.matches(key)]:
        return matching
    kinds = trees.listed([*dict.fromkeys(group.kind for group in groups)])
    names = [group.name for group in groups]
    raise ValueError(
        f"{argument}: {key!r} is no group of the model. Its kinds are {kinds}. "
        f"{suggest(key, names)}"
    )


def check_importance(groups: Sequence[ChannelGroup], importance: Mapping[str, np.ndarray]) -> None:
    """Raises a ValueError unless importance has arrays of groups, in their shapes."""
    check_kind("importance", importance, Mapping, "a dict {group: importance of its channels}")
    by_name = {group.name: group for group in groups}
    for name, numbers in importance.items():
        if name not in by_name:
            raise ValueError(f"importance: {name!r} is no group. {suggest(str(name), by_name)}")
        group = by_name[name]
        shape = (group.layers, group.size) if group.layers else (group.size,)
        check_real_array(f"importance[{name!r}]", numbers, shape)


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
    kinds: Mapping[Variable, GroupKind],
) -> Channels:
    """Returns the groups that can be removed, and the refused axes.

    Args:
      parameters: the parameters with their axes.
      unproven: variables whose removal would differ from masking them, and why.
      output_axes: {path: the axes of the parameter that become outputs of a product}.
      window_axes: {path: the axes of the parameter that are windows of a convolution}.
      num_layers: {variable: number of layers} where layers may keep different entries.
      kinds: {variable: kind} of channels that are not 'hidden'.
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
                kinds.get(variable, "hidden"),
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
    size = sizes.get(variable, variable.size)
    return order.reshape(size, len(order) // max(size, 1))


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
        size, layers = sizes.get(variable, group.size), count_layers(group, axes, sizes)
        return dataclasses.replace(group, size=size, positions=tuple(positions), layers=layers)

    return [resize(group) for group in groups]


def count_layers(
    group: ChannelGroup, axes: Mapping[Path, Sequence[Axis]], sizes: Mapping[Variable, int]
) -> int:
    """Counts the layers of a group in a smaller model; 0 if all layers keep the same channels."""
    count: int = count_entries(axes[group.members[0][0]][0], sizes) if group.layers else 0
    return count


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


@runtime_checkable
class PlanLike(Protocol):
    """The indices that stay along all axes that lose some, such as a `sparsity.Plan`.

    Attributes:
      kept: {path: {axis: indices}}, [layers, indices] where layers keep different ones.
      shapes: {path: shape before the cut}.
    """

    @property
    def kept(self) -> AxisArrays: ...

    @property
    def shapes(self) -> Mapping[Path, tuple[int, ...]]: ...


def list_kept_indices(
    parameters: ParameterAxes, kept_indices: KeptIndices
) -> dict[Path, dict[AxisIndex, np.ndarray]]:
    """Returns `PlanLike.kept` from the kept entries of each variable that loses some."""
    kept: dict[Path, dict[AxisIndex, np.ndarray]] = {}
    for parameter, axes in parameters:
        for axis_index, axis in enumerate(axes):
            index = find_kept_indices(axis, kept_indices)
            if index is not None:
                kept.setdefault(parameter.path, {})[axis_index] = index
    return kept


def solve_kept_indices(
    parameters: ParameterAxes, cut: PlanLike, may_be_empty: Container[Variable]
) -> dict[Variable, np.ndarray]:
    """Returns the entries that a cut keeps of each variable, at any batch size.

    Args:
      parameters: the parameters with their axes.
      cut: the cut.
      may_be_empty: variables that may lose all entries; of an axis without entries, other factors
        stay whole.

    Raises:
      ValueError: the cut has a parameter that the model does not have, or of another shape, or
        keeps only some of the indices that belong together.
    """
    by_path = {parameter.path: (parameter, axes) for parameter, axes in parameters}
    for path in cut.kept:
        shape = by_path[path][0].shape if path in by_path else None
        if shape != cut.shapes[path]:
            raise ValueError(
                f"The plan is of another model: it has {trees.join_names(path)!r} of shape "
                f"{cut.shapes[path]}, the graph has {shape or 'no such parameter'}."
            )
    kept: dict[Variable, np.ndarray] = {}
    full = set[Variable]()
    for parameter, axes in parameters:
        for axis_index, axis in enumerate(axes):
            index = cut.kept.get(parameter.path, {}).get(axis_index)
            if index is None:
                full.update(list_variables(axis))
                continue
            for variable, entries in _find_kept_entries(axis, index).items():
                if not entries.shape[-1] and variable not in may_be_empty:
                    continue
                # An axis without entries tells nothing of its factors: others do.
                if variable not in kept or entries.shape[-1] > kept[variable].shape[-1]:
                    kept[variable] = entries
    kept = {v: x for v, x in kept.items() if x.shape[-1] < v.size and v not in full}
    implied = list_kept_indices(parameters, kept)
    for path in {**cut.kept, **implied}:
        one, other = cut.kept.get(path, {}), implied.get(path, {})
        for axis_index in {**one, **other}:
            if not np.array_equal(one.get(axis_index, ()), other.get(axis_index, ())):
                raise ValueError(
                    f"The plan keeps indices of {trees.join_names(path)!r} along axis {axis_index} "
                    "that do not belong to those of other parameters: it was made for another "
                    "model."
                )
    return kept


def _find_kept_entries(axis: Axis, index: np.ndarray) -> dict[Variable, np.ndarray]:
    """Returns the entries of each variable of an axis that appear at some indices of the axis.

    Args:
      axis: the axis.
      index: [indices], or [layers, indices]; a variable has entries for each layer, too. Layers
        that keep different numbers of its entries leave it out.
    """
    kept: dict[Variable, np.ndarray] = {}
    for variable in list_variables(axis):
        labels = label_entries(axis, variable)
        if labels is None or variable.size == 1:
            continue
        by_layer = [np.unique(x[x >= 0]) for x in np.atleast_2d(labels[index])]
        if len({len(entries) for entries in by_layer}) == 1:
            kept[variable] = np.stack(by_layer) if index.ndim == 2 else by_layer[0]
    return kept


def solve_sizes(
    parameters: ParameterAxes,
    shapes: Mapping[Path, tuple[int, ...]],
    cut: PlanLike | None = None,
    may_be_empty: Container[Variable] = (),
) -> AxisSizes:
    """Returns the sizes of all variables that lose entries.

    Each axis of a smaller parameter is an equation: its size is a sum or a product of sizes of
    variables. Equations with one unknown are solved until no such equation is left.

    Args:
      parameters: the parameters of the model, with their axes.
      shapes: {path: shape} in the smaller model; some parameters may be missing.
      cut: decides where shapes are ambiguous, as for two parts of one axis.
      may_be_empty: variables that may lose all entries.

    Raises:
      ValueError: no sizes give these shapes, or several do; the parameter is named.
    """
    equations = [
        (parameter, axis_index, axis, shapes[parameter.path][axis_index])
        for parameter, axes in parameters
        if parameter.path in shapes
        for axis_index, axis in enumerate(axes)
    ]
    if all(parameter.shape[axis_index] == size for parameter, axis_index, _, size in equations):
        return {}
    sizes = _solve_equations(equations)
    ambiguous = [x for x in equations if _list_unknowns(x[2], sizes)]
    if ambiguous and cut is None:
        names = [f"{parameter.name}:{axis_index}" for parameter, axis_index, _, _ in ambiguous]
        raise ValueError(
            "The params are those of a smaller model, and shapes do not tell which channels of "
            f"{trees.listed(names)} are left. Train on with small.tx, or make the optimizer again "
            "by small.updater(pruner) or Coupled(graph, plan=plan), which know the cut."
        )
    if cut is not None:
        indices = solve_kept_indices(parameters, cut, may_be_empty)
        kept = {v: index.shape[-1] for v, index in indices.items()}
        for _, _, axis, _ in ambiguous:
            sizes |= {v: kept.get(v, v.size) for v in _list_unknowns(axis, sizes)}
    for parameter, axis_index, axis, size in equations:
        if count_entries(axis, sizes) != size:
            raise ValueError(
                f"The params have {parameter.name!r} of shape {shapes[parameter.path]}, the graph "
                f"was traced with {parameter.shape}, and no channels that are removed together "
                f"leave {size} of axis {axis_index}. Trace the model with these parameters."
            )
    return {variable: size for variable, size in sizes.items() if size < variable.size}


def _list_unknowns(axis: Axis, sizes: AxisSizes) -> list[Variable]:
    """Returns the variables that may lose entries and whose sizes are not solved yet."""
    variables = dict.fromkeys(list_variables(axis))
    return [v for v in variables if v.pin is None and v not in sizes]


def _solve_equations(equations: Sequence[tuple[Parameter, AxisIndex, Axis, int]]) -> AxisSizes:
    """Returns the sizes that follow from equations with one unknown, one after the other."""
    sizes: AxisSizes = {}
    count = -1
    while count < len(sizes):
        count = len(sizes)
        for parameter, axis_index, axis, size in equations:
            unknowns = _list_unknowns(axis, sizes)
            if parameter.shape[axis_index] == size:
                sizes |= {variable: variable.size for variable in unknowns}
            elif unknowns:
                sizes |= _solve_axis(axis, unknowns, sizes, size)
    return sizes


def _solve_axis(axis: Axis, unknowns: Sequence[Variable], sizes: AxisSizes, size: int) -> AxisSizes:
    """Returns the sizes at which an axis has this size, or the nearest one.

    Several unknowns are solved only if the axis is as short as it can be.
    """

    def measure(n: int) -> int:
        length: int = count_entries(axis, sizes | dict.fromkeys(unknowns, n))
        return length

    is_ambiguous = size != measure(1) if len(unknowns) > 1 else measure(1) == 0
    if is_ambiguous:
        return {}
    if len(unknowns) > 1:
        return dict.fromkeys(unknowns, 1)
    return {unknowns[0]: bisect.bisect_left(range(unknowns[0].size), size, key=measure)}
