"""Plans: the channels of each parameter that stay."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized

import numpy as np

from sparsity.core import sharding, trees
from sparsity.core.checks import check_kind, check_sizes
from sparsity.core.trees import Params, Path, PyTree
from sparsity.graph import Coupled, Graph
from sparsity.graph.groups import (
    AxisArrays,
    count_layers,
    list_kept_indices,
    solve_kept_indices,
)
from sparsity.programs.axes import AxisIndex, KeptIndices, list_variables
from sparsity.shrinking.dead import Evidence, find_name_in_use
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
      ValueError: a path has no shape, a parameter lacks an axis, indices are not as `kept`
        describes (in range, ascending, none twice, a row for each layer), or
        `evidence` has other axes or other numbers of rows.

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
                fault = _find_fault(index, axis, self.shapes.get(path, ()), axes.get(0))
                rows = self.evidence.get(path, {}).get(axis, np.atleast_2d(index))
                num_rows = math.prod(getattr(index, "shape", ())[:-1])
                if not fault and (not isinstance(rows, Sized) or len(rows) != num_rows):
                    fault = (
                        f"evidence must have a row for each row of the indices, got {rows!r:.80}"
                    )
                if fault:
                    raise ValueError(
                        f"The plan keeps of the parameter {trees.join_names(path)!r}, shape "
                        f"{self.shapes.get(path)}, along axis {axis}: {fault}."
                    )
        for path, by_axis in self.evidence.items():
            if not by_axis.keys() <= self.kept.get(path, {}).keys():
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
        actual = {x: y.shape for x, y in trees.leaves_by_names(trees.only_arrays(params)).items()}
        expected = {path: self.shrink_shape(path, shape) for path, shape in shapes.items()}
        if actual != expected:
            differing = {path for path, _ in actual.items() ^ expected.items()}
            raise ValueError(
                "params must be all parameters of the smaller model, in its shapes, and no others: "
                f"{trees.listed([trees.join_names(path) for path in sorted(differing)])} differ."
            )
        structs = zip(sharding.abstract(arrays), actual, strict=True)
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
            if not all(isinstance(name, str) for path in leaves for name in path):
                raise ValueError("a path has a name that is no text")
            return cls(
                {path: _read_arrays(leaf["kept"], _read_indices) for path, leaf in leaves.items()},
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
        evidence = {path: dict(axes) for path, axes in self.evidence.items()}
        shapes = {**later.shapes, **self.shapes}
        for path, axes in later.kept.items():
            shape = self.shrink_shape(path, shapes[path])
            if shape != later.shapes[path]:
                raise ValueError(
                    f"The later plan has {trees.join_names(path)!r} of shape {later.shapes[path]}, "
                    f"this plan leaves {shape}. Compose plans in the order of the cuts."
                )
            _take_layers(axes.get(0), kept.get(path, {}), evidence.get(path, {}))
            for axis, index in axes.items():
                before = kept.get(path, {}).get(axis, np.arange(shapes[path][axis]))
                if any(axis in plan.evidence.get(path, {}) for plan in (self, later)):
                    parts = self._list_evidence(path, axis), [*np.atleast_2d(before)]
                    layers = _repeat_rows(*parts, later._list_evidence(path, axis))
                    rows = [np.union1d(old, row[new]) for old, row, new in layers]
                    evidence.setdefault(path, {})[axis] = rows
                rows = [
                    x[y] for x, y in _repeat_rows(*map(list, map(np.atleast_2d, (before, index))))
                ]
                is_flat = before.ndim == index.ndim == 1
                kept.setdefault(path, {})[axis] = rows[0] if is_flat else np.stack(rows)
        return Plan(kept, shapes, evidence)

    def _list_evidence(self, path: Path, axis: int) -> list[np.ndarray]:
        """Returns the evidence at an axis: a row for each row of `kept`."""
        if axis in self.evidence.get(path, {}):
            return list(self.evidence[path][axis])
        if axis not in self.kept.get(path, {}):
            return [np.arange(0)]
        all_indices = np.arange(self.shapes[path][axis])
        return [np.setdiff1d(all_indices, row) for row in np.atleast_2d(self.kept[path][axis])]


def _take_layers(
    layers: np.ndarray | None,
    kept: dict[AxisIndex, np.ndarray],
    evidence: dict[AxisIndex, Sequence[np.ndarray]],
) -> None:
    """Takes the rows of the layers that stay, where layers keep different indices."""
    if layers is not None:
        for axis, index in kept.items():
            if index.ndim == 2:
                kept[axis] = index[layers]
                if axis in evidence:
                    evidence[axis] = [evidence[axis][i] for i in layers]


def _repeat_rows(*parts: list[np.ndarray]) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields the rows of several lists together, one row for all layers or a row for each."""
    count = max(map(len, parts))
    return zip(*(part * (count // len(part)) for part in parts), strict=True)


def _find_fault(
    index: np.ndarray, axis: int, shape: tuple[int, ...], layers: np.ndarray | None
) -> str | None:
    """Returns why an axis of a parameter cannot keep these indices; `None` if it can."""
    if not isinstance(axis, int) or isinstance(axis, bool) or not 0 <= axis < len(shape):
        return "there is no such axis"
    if getattr(index, "ndim", 0) not in (1, 2) or index.dtype.kind not in "iu":
        return f"{index!r}, not an array of indices, or of as many indices for each layer"
    num_layers = shape[0] if layers is None else np.shape(layers)[-1]
    if index.ndim == 2 and (axis == 0 or len(index) != num_layers):
        return f"{len(index)} rows of indices, which are not the layers along axis 0"
    if not _are_ascending(index, shape[axis]):
        return f"indices that do not ascend within [0, {shape[axis]}): {index!r:.80}"
    return None


def _are_ascending(index: np.ndarray, size: int) -> bool:
    is_inside = (index >= 0).all() and (index < size).all()
    return bool(is_inside and (index[..., 1:] > index[..., :-1]).all())


def _read_arrays(stored: Mapping[str, PyTree], read: Callable[..., PyTree]) -> dict[int, PyTree]:
    return {int(axis): read(value) for axis, value in stored.items()}


def _read_indices(stored: PyTree) -> np.ndarray:
    index = np.array(stored)
    return index if index.size else index.astype(np.int64)  # an empty list has no integers


def _read_rows(stored: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(row, None if row else np.int64) for row in stored]


def cut_shape(shape: tuple[int, ...], kept: Mapping[int, np.ndarray]) -> tuple[int, ...]:
    """Returns a shape after `kept` selects indices along some axes."""
    return tuple(kept[i].shape[-1] if i in kept else size for i, size in enumerate(shape))


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
    may_be_empty = graph.removal.may_be_empty
    kept_indices = solve_kept_indices(graph.removal.list_parameter_axes(), plan, may_be_empty)
    removable = {group.variable for group in graph.groups}
    removable |= {stack.variable for stack in graph.stacks}
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
    by_path = {x.path: axes for x, axes in graph.removal.list_parameter_axes()}
    sizes = {variable: index.shape[-1] for variable, index in kept_indices.items()}
    for group in graph.groups:
        index = kept_indices.get(group.variable)
        if (
            index is not None
            and index.ndim == 2
            and len(index) != count_layers(group, by_path, sizes)
        ):
            raise ValueError(
                f"The plan keeps different channels of {group.name!r} in each of {len(index)} "
                "layers, which this model does not run as a scan. The plan was made for another "
                "model, or for other flags."
            )
    has_evidence = any(plan.evidence.values())
    if has_evidence and (in_use := find_name_in_use(graph, kept_indices, plan.evidence)):
        raise ValueError(
            f"The masks remove channels of {in_use!r} in part, and with these arguments the "
            "model reads the other part. Trace the model with these arguments before the cut, or "
            "mask whole channels: scope=sparsity.Coupled(graph)."
        )
    return kept_indices
