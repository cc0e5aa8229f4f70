"""Cuts of a model: the channels that are left, from kept indices or shapes of parameters."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np

from sparsity.core import trees
from sparsity.core.trees import Path
from sparsity.graph.channels.groups import ParameterAxes
from sparsity.graph.traced_model import Parameter
from sparsity.programs.axes import (
    Axis,
    AxisIndex,
    KeptIndices,
    Variable,
    count_entries,
    find_kept_indices,
    label_entries,
    list_variables,
)

AxisSizes: TypeAlias = dict[Variable, int]
AxisArrays: TypeAlias = Mapping[Path, Mapping[AxisIndex, np.ndarray]]  # {path: {axis: array}}


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


def solve_kept_indices(parameters: ParameterAxes, cut: PlanLike) -> dict[Variable, np.ndarray]:
    """Returns the entries that a cut keeps of each variable, at any batch size.

    Raises:
      ValueError: the cut has a parameter that the model does not have, or of another shape, or
        keeps only some of the indices that belong together.
    """
    by_path = {parameter.path: (parameter, axes) for parameter, axes in parameters}
    kept: dict[Variable, np.ndarray] = {}
    for path, indices in cut.kept.items():
        shape = by_path[path][0].shape if path in by_path else None
        if shape != cut.shapes[path]:
            raise ValueError(
                f"The plan is of another model: it has {trees.join_names(path)!r} of shape "
                f"{cut.shapes[path]}, the graph has {shape or 'no such parameter'}."
            )
        for axis_index, index in indices.items():
            kept |= _find_kept_entries(by_path[path][1][axis_index], index)
    kept = {v: entries for v, entries in kept.items() if entries.shape[-1] < v.size}
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
    parameters: ParameterAxes, shapes: Mapping[Path, tuple[int, ...]], cut: PlanLike | None = None
) -> AxisSizes:
    """Returns the sizes of all variables that lose entries.

    Each axis of a smaller parameter is an equation: its size is a sum or a product of sizes of
    variables. Equations with one unknown are solved until no such equation is left.

    Args:
      parameters: the parameters of the model, with their axes.
      shapes: {path: shape} in the smaller model; some parameters may be missing.
      cut: decides where shapes are ambiguous, as for two parts of one axis.

    Raises:
      ValueError: no sizes give these shapes, or several do; the parameter is named.
    """
    equations = [
        _SizeEquation(parameter, axis_index, axis, shapes[parameter.path][axis_index])
        for parameter, axes in parameters
        if parameter.path in shapes
        for axis_index, axis in enumerate(axes)
    ]
    if all(equation.is_full for equation in equations):
        return {}
    sizes = _solve_equations(equations)
    ambiguous = [x for x in equations if x.list_unknowns(sizes)]
    if ambiguous and cut is None:
        names = [f"{x.parameter.name}:{x.axis_index}" for x in ambiguous]
        raise ValueError(
            "The params are those of a smaller model, and shapes do not tell which channels of "
            f"{trees.listed(names)} are left. Train on with small.tx, or make the optimizer again "
            "by small.updater(pruner) or Coupled(graph, plan=plan), which know the cut."
        )
    if cut is not None:
        kept = {v: index.shape[-1] for v, index in solve_kept_indices(parameters, cut).items()}
        for equation in ambiguous:
            sizes |= {v: kept.get(v, v.size) for v in equation.list_unknowns(sizes)}
    for parameter, axis_index, axis, size in equations:
        if count_entries(axis, sizes) != size:
            raise ValueError(
                f"The params have {parameter.name!r} of shape {shapes[parameter.path]}, the graph "
                f"was traced with {parameter.shape}, and no channels that are removed together "
                f"leave {size} of axis {axis_index}. Trace the model with these parameters."
            )
    return {variable: size for variable, size in sizes.items() if size < variable.size}


class _SizeEquation(NamedTuple):
    """An axis of a smaller parameter, whose variables have this size together."""

    parameter: Parameter
    axis_index: int
    axis: Axis
    size: int

    @property
    def is_full(self) -> bool:
        """True if the axis has lost no entries."""
        return self.parameter.shape[self.axis_index] == self.size

    def list_unknowns(self, sizes: AxisSizes) -> list[Variable]:
        """Returns the variables that may lose entries and whose sizes are not solved yet."""
        variables = dict.fromkeys(list_variables(self.axis))
        return [v for v in variables if v.pin is None and v not in sizes]

    def solve(self, variable: Variable, sizes: AxisSizes) -> int:
        """Returns the size of a variable at which the axis has its size, or the nearest one."""
        candidates = range(1, variable.size)
        return 1 + bisect.bisect_left(
            candidates, self.size, key=lambda n: count_entries(self.axis, sizes | {variable: n})
        )


def _solve_equations(equations: Sequence[_SizeEquation]) -> AxisSizes:
    """Returns the sizes that follow from equations with one unknown, one after the other."""
    sizes: AxisSizes = {}
    count = -1
    while count < len(sizes):
        count = len(sizes)
        for equation in equations:
            unknowns = equation.list_unknowns(sizes)
            ones = dict.fromkeys(unknowns, 1)
            if equation.is_full:
                sizes |= {variable: variable.size for variable in unknowns}
            # The axis is as short as it can be, so that each unknown is 1.
            elif equation.size == count_entries(equation.axis, sizes | ones):
                sizes |= ones
            elif len(unknowns) == 1:
                sizes |= {unknowns[0]: equation.solve(unknowns[0], sizes)}
    return sizes
