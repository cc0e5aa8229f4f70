"""Plans: the channels of each parameter that stay."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sparsity.core import sharding, trees
from sparsity.core.checks import check_kind, check_sizes
from sparsity.core.trees import Params, Path, PyTree
from sparsity.graph import Coupled, Graph
from sparsity.graph.groups import AxisArrays, list_kept_indices, solve_kept_indices
from sparsity.programs.axes import KeptIndices, list_variables
from sparsity.shrinking.dead import Evidence, find_group_in_use
from sparsity.shrinking.interpreter import CutInterpreter
from sparsity.training.base_updater import BaseUpdater

_FORMAT = 2  # of the text of a plan


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The indices that stay along all axes that lose some.

    Attributes:
      kept: {path: {axis: the indices that stay, ascending}}; [layers, indices] where the layers of
        a stack keep different ones.
      shapes: {path: shape before the cut}.
      evidence: {path: {axis: indices for each layer}}: the removed indices at which masks remove
        all entries, which prove the channels dead; one row if layers keep the same indices. An axis
        that is left out stands for all its removed indices.

    Raises:
      ValueError: a path has no shape, a parameter lacks an axis, or indices are not as `kept` and
        `evidence` describe: in range, ascending, none twice, at least one kept, a row for each
        layer.

    Example:
      >>> plan = Plan({("up",): {1: np.array([0, 2])}}, {("up",): (3, 4)})
      >>> Plan.from_json(plan.to_json()).kept[("up",)][1]
      array([0, 2])
    """

    kept: AxisArrays
    shapes: Mapping[Path, tuple[int, ...]]
    evidence: Evidence = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("kept", "shapes", "evidence"):
            check_kind(name, getattr(self, name), Mapping, "a dict with a path as each key")
            kind = tuple if name == "shapes" else Mapping
            for path, value in getattr(self, name).items():
                check_kind(f"{name}[{path!r}]", value, kind, "a shape, or a dict by axis")
        for path, axes in self.kept.items():
            for axis, index in axes.items():
                fault = _find_fault(index, axis, self.shapes.get(path, ()))
                rows = self.evidence.get(path, {}).get(axis)
                if not fault and rows is not None:
                    fault = _find_fault_of_evidence(rows, index, self.shapes[path][axis])
                if fault:
                    raise ValueError(
                        f"The plan keeps of the parameter {trees.join_names(path)!r}, shape "
                        f"{self.shapes.get(path)}, along axis {axis}: {fault}."
                    )
        for path, rows_by_axis in self.evidence.items():
            if not rows_by_axis.keys() <= self.kept.get(path, {}).keys():
                name = trees.join_names(path)
                raise ValueError(f"evidence has axes of {name!r} that keep all of their indices.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def shrink_shape(self, path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a parameter after the cut."""
        return cut_shape(shape, self.kept.get(path, {}))

    def apply(self, graph: Graph, params: Params, *args: PyTree) -> PyTree:
        """Runs the model at its smaller size.

        Args:
          graph: the graph of the model before the cut; shapes are enough to trace it.
          params: the smaller parameters, in any dtype or container.
          *args: inputs of the model, at any batch size; flags and numbers as in the model itself.

        Raises:
          ValueError: parameters are missing or of another size, or the model needs the channels
            with these arguments; the error names the parameter.
        """
        check_kind("graph", graph, Graph, "made by sparsity.trace")
        arrays, rebuild = trees.split_arrays(params)
        inputs = trees.split_arrays(args)[0]
        remedy = "jax.vmap of lambda row: small.apply(params, row[None])"
        check_sizes("small.apply", inputs, f"Export it for any number of rows by {remedy}.")
        shapes = {parameter.path: parameter.shape for parameter in graph.parameters}
        given = {x: y.shape for x, y in trees.leaves_by_names(trees.only_arrays(params)).items()}
        expected = {path: self.shrink_shape(path, shape) for path, shape in shapes.items()}
        if given != expected:
            differing = {path for path, _ in given.items() ^ expected.items()}
            raise ValueError(
                "params must be all parameters of the smaller model, in its shapes, and no others: "
                f"{trees.listed([trees.join_names(path) for path in sorted(differing)])} differ."
            )
        structs = zip(sharding.abstract(arrays), given, strict=True)
        example = rebuild([sharding.resize_struct(x, shapes[path]) for x, path in structs])
        retraced = graph.retrace(example, *args)
        interpreter = CutInterpreter(retraced.removal, solve_proven_indices(retraced, self))
        return retraced.model.run(interpreter, [*arrays, *inputs])

    def graph(self, graph: Graph) -> Graph:
        """Traces the smaller model: makes its graph from that of the model before the cut.

        Nothing is computed: a process that has the plan and the smaller parameters traces the model
        from shapes (`jax.eval_shape` of its init) and continues from there.
        """
        check_kind("graph", graph, Graph, "made by sparsity.trace")
        params, args = graph.model.example
        arrays, rebuild = trees.split_arrays(params)
        structs = [
            sharding.resize_struct(array, self.shrink_shape(parameter.path, parameter.shape))
            for array, parameter in zip(arrays, graph.parameters, strict=True)
        ]
        return graph.trace(functools.partial(self.apply, graph), rebuild(structs), *args)

    def updater(self, updater: BaseUpdater) -> BaseUpdater:
        """Converts an updater of the model before the cut: makes one for the smaller model.

        Returns a copy whose scope `Coupled` has this plan, after an earlier one that it had; other
        updaters are returned as they are. A ramp continues: it counts channels of the model before
        the cut. An updater that is not converted infers the cut from shapes, which fails where an
        axis joins several groups.
        """
        check_kind("updater", updater, BaseUpdater, "an updater such as MagnitudePruning()")
        if not isinstance(updater.scope, Coupled):
            return updater
        plan, earlier = self, updater.scope.plan
        # The earlier plan may be that of another model, or of this one before another cut.
        if isinstance(earlier, Plan) and all(
            earlier.shrink_shape(path, earlier.shapes[path]) == self.shapes[path]
            for path in earlier.kept.keys() & self.kept.keys()
        ):
            plan = earlier.then(self)
        return dataclasses.replace(updater, scope=dataclasses.replace(updater.scope, plan=plan))

    def to_json(self) -> str:
        """Returns the plan as text, which `from_json` reads."""
        leaves = [
            {
                "path": list(path),
                "shape": list(self.shapes[path]),
                "kept": {str(axis): index.tolist() for axis, index in sorted(axes.items())},
                "evidence": {
                    str(axis): [row.tolist() for row in rows]
                    for axis, rows in sorted(self.evidence.get(path, {}).items())
                },
            }
            for path, axes in sorted(self.kept.items())
        ]
        return json.dumps({"format": _FORMAT, "leaves": leaves})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads the plan that `to_json` wrote.

        Raises:
          ValueError: the text is not a plan; the error says what is wrong.
        """
        try:
            stored = json.loads(text)
            if stored["format"] != _FORMAT:
                raise ValueError(f"the format is {stored['format']!r}, not {_FORMAT}")
            leaves = {tuple(leaf["path"]): leaf for leaf in stored["leaves"]}
            return cls(
                {path: _read_arrays(leaf["kept"], np.array) for path, leaf in leaves.items()},
                {path: tuple(leaf["shape"]) for path, leaf in leaves.items()},
                {path: _read_arrays(leaf["evidence"], _read_rows) for path, leaf in leaves.items()},
            )
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"Not a plan written by Plan.to_json: {error!r}.") from error

    def then(self, later: Plan) -> Plan:
        """Composes two cuts: this plan, then `later`, which was made for the smaller model.

        Raises:
          ValueError: `later` has a parameter of another shape than this plan leaves.
        """
        check_kind("later", later, Plan, "a Plan")
        kept = {path: dict(axes) for path, axes in self.kept.items()}
        shapes = dict(self.shapes)
        for path, axes in later.kept.items():
            axes_before = kept.setdefault(path, {})
            shape = cut_shape(shapes.setdefault(path, later.shapes[path]), axes_before)
            if shape != later.shapes[path]:
                raise ValueError(
                    f"The later plan has {trees.join_names(path)!r} of shape {later.shapes[path]}, "
                    f"this plan leaves {shape}. Compose plans in the order of the cuts."
                )
            for axis, index in axes.items():
                earlier_index = axes_before.get(axis)
                axes_before[axis] = (
                    index if earlier_index is None else _compose_indices(earlier_index, index)
                )
        return Plan(kept, shapes, _compose_evidence(self, later))


def _find_fault(index: np.ndarray, axis: int, shape: tuple[int, ...]) -> str | None:
    """Returns why an axis of a parameter cannot keep these indices; `None` if it can."""
    if not isinstance(axis, int) or isinstance(axis, bool) or not 0 <= axis < len(shape):
        return "there is no such axis"
    if getattr(index, "ndim", 0) not in (1, 2) or index.dtype.kind not in "iu" or not index.size:
        return f"{index!r}, not an array of indices, or of as many indices for each layer"
    if index.ndim == 2 and (axis == 0 or len(index) != shape[0]):
        return f"{len(index)} rows of indices, which are not the layers along axis 0"
    if not _are_ascending(index, shape[axis]):
        return f"indices that do not ascend within [0, {shape[axis]}): {index!r:.80}"
    return None


def _find_fault_of_evidence(rows: Sequence[np.ndarray], index: np.ndarray, size: int) -> str | None:
    """Returns why rows cannot be evidence for an axis that keeps an index; `None` if they can."""
    kept = np.atleast_2d(index)
    is_listed = isinstance(rows, Sequence) and len(rows) == len(kept)
    for row, kept_row in zip(rows, kept, strict=True) if is_listed else ():
        is_index = getattr(row, "ndim", 0) == 1 and (row.dtype.kind in "iu" or not row.size)
        is_listed &= is_index and _are_ascending(row, size) and not np.isin(row, kept_row).any()
    text = "evidence lists removed indices, ascending, for each layer that keeps different ones"
    return None if is_listed else f"{text}, got {rows!r:.80}"


def _are_ascending(index: np.ndarray, size: int) -> bool:
    is_inside = (index >= 0).all() and (index < size).all()
    return bool(is_inside and (index[..., 1:] > index[..., :-1]).all())


def _read_arrays(stored: Mapping[str, PyTree], read: Callable[..., PyTree]) -> dict[int, PyTree]:
    return {int(axis): read(value) for axis, value in stored.items()}


def _read_rows(stored: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(row, None if row else np.int64) for row in stored]


def cut_shape(shape: tuple[int, ...], kept: Mapping[int, np.ndarray]) -> tuple[int, ...]:
    """Returns a shape after `kept` selects indices along some axes."""
    return tuple(kept[i].shape[-1] if i in kept else size for i, size in enumerate(shape))


def _compose_indices(first: np.ndarray, later: np.ndarray) -> np.ndarray:
    layers = np.broadcast_shapes(first.shape[:-1], later.shape[:-1])
    first, later = (np.broadcast_to(x, (*layers, x.shape[-1])) for x in (first, later))
    return np.take_along_axis(first, later, axis=-1)


def _compose_evidence(first: Plan, later: Plan) -> Evidence:
    """Returns the evidence of two cuts, at indices before the first."""
    evidence = {path: dict(axes) for path, axes in first.evidence.items()}
    for path, axes in later.kept.items():
        for axis in axes:
            if not any(axis in plan.evidence.get(path, {}) for plan in (first, later)):
                continue
            rows = _list_evidence(later, path, axis)
            if (kept_before := first.kept.get(path, {}).get(axis)) is not None:
                parts = _list_evidence(first, path, axis), [*np.atleast_2d(kept_before)], rows
                count = max(map(len, parts))
                layers = zip(*(part * (count // len(part)) for part in parts), strict=True)
                rows = [np.union1d(earlier, kept_row[row]) for earlier, kept_row, row in layers]
            evidence.setdefault(path, {})[axis] = rows
    return evidence


def _list_evidence(plan: Plan, path: Path, axis: int) -> list[np.ndarray]:
    """Returns the evidence at an axis that loses indices: a row for each row of `kept`."""
    if axis in plan.evidence.get(path, {}):
        return list(plan.evidence[path][axis])
    all_indices = np.arange(plan.shapes[path][axis])
    return [np.setdiff1d(all_indices, kept) for kept in np.atleast_2d(plan.kept[path][axis])]


def plan_cut(graph: Graph, kept_indices: KeptIndices, evidence: Evidence) -> Plan:
    """Returns the plan that keeps only some entries of variables.

    Args:
      graph: the graph of the model.
      kept_indices: {variable: channels that stay}.
      evidence: as in `Plan`; axes at which masks remove all removed indices need not be left out.
    """
    kept = list_kept_indices(graph.removal.list_parameter_axes(), kept_indices)
    shapes = {x.path: x.shape for x in graph.parameters if x.path in kept}

    def is_partial(path: Path, axis: int, rows: Sequence[np.ndarray]) -> bool:
        num_removed = shapes[path][axis] - kept[path][axis].shape[-1]
        return any(len(row) < num_removed for row in rows)

    partial = {
        path: {axis: rows for axis, rows in axes.items() if is_partial(path, axis, rows)}
        for path, axes in evidence.items()
    }
    return Plan(kept, shapes, partial)


def solve_proven_indices(graph: Graph, plan: Plan) -> KeptIndices:
    """Returns the entries that a plan keeps of each variable.

    Raises:
      ValueError: removing the other entries differs from masking them.
    """
    kept_indices = solve_kept_indices(graph.removal.list_parameter_axes(), plan)
    removable = {group.variable for group in graph.groups}
    reasons = {(x.path, x.axis): x.explain() for x in graph.refused}
    for parameter, axes in graph.removal.list_parameter_axes():
        for i, axis in enumerate(axes):
            if any(v in kept_indices and v not in removable for v in list_variables(axis)):
                unknown = "they belong to several groups, or to a part of one"
                raise ValueError(
                    f"The plan removes indices of axis {i} of {parameter.name!r}, which this model "
                    f"needs: {reasons.get((parameter.path, i), unknown)}. The plan was made for "
                    "another model, or for other flags."
                )
    for group in graph.groups:
        index = kept_indices.get(group.variable)
        if index is not None and index.ndim == 2 and len(index) != group.layers:
            raise ValueError(
                f"The plan keeps different channels of {group.name!r} in each of {len(index)} "
                "layers, which this model does not run as a scan. The plan was made for another "
                "model, or for other flags."
            )
    has_evidence = any(plan.evidence.values())
    if has_evidence and (in_use := find_group_in_use(graph, kept_indices, plan.evidence)):
        raise ValueError(
            f"The masks remove channels of {in_use.name!r} in part, and with these arguments the "
            "model reads the other part. Trace the model with these arguments before the cut, or "
            "mask whole channels: scope=sparsity.Coupled(graph)."
        )
    return kept_indices
