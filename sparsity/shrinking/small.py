"""`Small`: a model without its dead channels, as `shrink` returns it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.core import extras, trees
from sparsity.core.checks import check_kind
from sparsity.core.pictures import draw_bars, pick_pair
from sparsity.core.trees import Masks, Params, Path, PyTree, Tree
from sparsity.graph import Graph, Parameter
from sparsity.graph.groups import solve_kept_indices
from sparsity.programs.axes import Variable
from sparsity.reports import time_in_turn
from sparsity.shrinking.plan import Plan
from sparsity.training.base_updater import BaseUpdater

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class _Row(NamedTuple):
    """A row of the table: a parameter, its shape after the cut, and sizes before and after."""

    parameter: Parameter
    shape: tuple[int, ...]
    sizes: tuple[int, int]
    macs: tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Small(Generic[Tree]):
    """A smaller model. Made by `shrink`.

    Attributes:
      params: the parameters, the same tree with smaller arrays; 0 where `masks` are.
      opt_state: the optimizer's state, cut like the parameters; `None` without `opt_state`.
      plan: the channels that stay; `plan.to_json()` cuts another checkpoint of the model.
      before: the graph of the model before the cut.
      replicated: {(path, axis): number of devices} where that number no longer divides the axis.
      masks: uint8 masks of `params`, 1 where an entry stays; `None` for a parameter without masked
        entries, as all are after a cut by a plan.
      tx: the optimizer of `opt_state`, `None` without `tx`. A result of `wrap_optax` is wrapped
        again by an updater that knows the cut; the inner optimizer of a SparseState goes with
        `opt_state.inner_state`.
      graph: the graph of the smaller model.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"up": jnp.array([[1.0, 5.0]]), "down": jnp.array([[2.0], [3.0]])}
      >>> masks = {"up": jnp.array([[0, 1]]), "down": jnp.array([[0], [1]])}
      >>> def model(params, x):
      ...     return x @ params["up"] @ params["down"]
      >>> graph = sparsity.trace(model, params, jnp.ones((1, 1)))
      >>> small = sparsity.shrink(graph, params, masks)
      >>> small.params["up"], small.apply(small.params, jnp.ones((1, 1)))
      (Array([[5.]], dtype=float32), Array([[15.]], dtype=float32))
    """

    params: Tree
    opt_state: PyTree
    plan: Plan
    before: Graph
    replicated: Mapping[tuple[Path, int], int]
    masks: Masks = None
    tx: optax.GradientTransformation | None = None

    @property
    def update_error(self) -> float | None:
        """0.0: `tx` is proved to continue as on the masked model; `None` without `tx`."""
        return None if self.tx is None else 0.0

    @functools.cached_property
    def graph(self) -> Graph:
        """Graph of the smaller model, traced at first use; its channels can be cut again."""
        return self.plan.graph(self.before)

    def apply(self, params: Params, *args: PyTree) -> PyTree:
        """Runs the model at its smaller size: returns `fn(params, *args)` of the masked model.

        Can be compiled, differentiated, mapped and exported like `fn`, at any batch size.

        Args:
          params: the smaller parameters.
          *args: inputs of the model.
        """
        return self.plan.apply(self.before, params, *args)

    def updater(self, updater: BaseUpdater) -> BaseUpdater:
        """Converts an updater of the model before the cut for this model: see `Plan.updater`."""
        return self.plan.updater(updater)

    def macs(self, path: Path | None = None) -> int:
        """Counts multiply-adds at the batch size of the trace: of a call, or of one parameter.

        Raises:
          ValueError: the model has no parameter of this path, which is a tuple of strings.
        """
        paths = [parameter.path for parameter in self.before.parameters]
        if path is not None and path not in paths:
            raise ValueError(f"path must be one of {paths}, got path = {path!r}.")
        return round(self.before.costs.count_small_macs(self._sizes, path))

    def measure(self, params: Params, *args: PyTree, rounds: int = 20) -> list[float]:
        """Measures the model before and after the cut, both compiled and called in turn.

        Args:
          params: the parameters before the cut, which `shrink` took.
          *args: inputs of the model.
          rounds: number of calls of each model.

        Returns:
          Median seconds of a call before and after the cut: an entry of `report`.

        Raises:
          ValueError: the parameters are those after the cut, or of another model.
        """
        for path, array in trees.leaves_by_names(trees.only_arrays(params)).items():
            shape = self.before.parameters.find(path, array, may_be_smaller=True).shape
            if jnp.shape(array) != shape:
                raise ValueError(
                    f"measure takes the parameters before the cut, and has the smaller ones: "
                    f"{trees.join_names(path)!r} must have shape {shape}, got {array.shape}. Give "
                    "the params that shrink got."
                )

        def make_program(plan: Plan, params: Params) -> Callable[[], object]:
            arrays, rebuild = trees.split_arrays((params, args))

            @jax.jit
            def run(arrays: list[jax.Array]) -> object:
                params, inputs = rebuild(arrays)
                return plan.apply(self.before, params, *inputs)

            return functools.partial(run, arrays)

        full = make_program(Plan({}, {}), params)
        return time_in_turn(full, make_program(self.plan, self.params), rounds=rounds)

    def report(self, seconds: Mapping[str, Sequence[float]] | None = None) -> str:
        """Returns a table of shapes, sizes, bytes and MACs before and after, by parameter.

        Args:
          seconds: measured times shown below the table, `{name: (before, after)}`, as `measure` and
            `sparsity.reports.time_in_turn` return them.

        Returns:
          Text of several lines.
        """
        seconds = seconds or {}
        check_kind("seconds", seconds, Mapping, "a dict {name: (before, after)}")
        densities = self._compute_densities()
        columns = ("entries", "left", "bytes", "left", "MACs", "left")
        last_columns = ("density",) if densities else ()
        table = extras.make_table(("parameter", "shape", "smaller"), (*columns, *last_columns))
        totals = np.zeros(4, object)
        for parameter, shape, sizes, macs in self._list_rows():
            numbers = (*sizes, *(size * parameter.dtype.itemsize for size in sizes))
            totals += numbers
            shapes = trees.shape_text(parameter.shape), trees.shape_text(shape)
            density = densities.get(parameter.path)
            density_texts = ["" if density is None else f"{density:.3g}" for _ in last_columns]
            table.add_row(
                parameter.name, *shapes, *(f"{n:,}" for n in (*numbers, *macs)), *density_texts
            )
        table.add_section()
        numbers = (*totals, self.before.macs(), self.macs())
        table.add_row("all", "", "", *(f"{n:,}" for n in numbers), *("" for _ in last_columns))
        parts = [extras.as_text(table), *self._list_notes()]
        if seconds:
            times = extras.make_table(("time",), ("before", "after", "ratio"))
            for name, (before, after) in seconds.items():
                milliseconds = [f"{1000 * x:.3g} ms" for x in (before, after)]
                times.add_row(name, *milliseconds, f"{after / before:.2f}")
            parts.append(extras.as_text(times))
        return "\n\n".join(parts)

    def plot(self, axes: Sequence[Axes] | None = None) -> Sequence[Axes]:
        """Draws multiply-adds and sizes of all parameters: before in light, after in dark.

        Leaves out parameters of one axis that no product reads, such as biases.

        Args:
          axes: two matplotlib axes to draw on; new ones side by side by default.

        Returns:
          The matplotlib axes.
        """
        rows = self._list_rows()
        plotted = [row for row in rows if row.macs[0] or len(row.parameter.shape) > 1]
        names = [row.parameter.name for row in plotted]
        axes = pick_pair(axes, len(plotted))
        columns = (
            ("multiply-adds", [row.macs for row in plotted], self.before.macs()),
            ("parameters", [row.sizes for row in plotted], sum(row.sizes[0] for row in rows)),
        )
        for ax, (quantity, pairs, total) in zip(axes, columns, strict=True):
            draw_bars(ax, quantity, names, [n for n, _ in pairs], [n for _, n in pairs], total)
        return axes

    def _list_rows(self) -> list[_Row]:
        """Returns the rows of tables and pictures, in tree order."""
        rows = []
        for parameter in self.before.parameters:
            path, shape = parameter.path, self.plan.shrink_shape(parameter.path, parameter.shape)
            macs = self.before.costs.count_macs(path), self.macs(path)
            rows.append(_Row(parameter, shape, (parameter.size, math.prod(shape)), macs))
        return rows

    def _compute_densities(self) -> dict[Path, float]:
        """Returns the part of the entries that masks keep, for each parameter with a mask."""
        densities = {}
        for path, mask in trees.leaves_by_names(self.masks).items():
            parameter = self.before.parameters.find(path, mask, may_be_smaller=True)
            densities[parameter.path] = np.count_nonzero(mask) / mask.size
        return densities

    def _list_notes(self) -> list[str]:
        notes = []
        if self.replicated:
            names = [f"{trees.join_names(path)}:{axis}" for path, axis in self.replicated]
            notes.append(
                f"{trees.listed(names)}: the remaining entries do not divide among the devices "
                "of the mesh, and are replicated. "
                f"Coupled(round_to={math.lcm(*self.replicated.values())}) keeps it sharded."
            )
        if self.tx is not None:
            notes.append("The optimizer continues as on the masked model, by its program.")
        elif self.opt_state is not None:
            notes.append(
                "Whether the optimizer continues as on the masked model was not checked: shrink("
                "..., opt_state, tx) proves it from the program of the update."
            )
        return notes

    @functools.cached_property
    def _sizes(self) -> dict[Variable, int]:
        """Sizes of the variables that lose entries."""
        kept_indices = solve_kept_indices(self.before.removal.list_parameter_axes(), self.plan)
        return {variable: index.shape[-1] for variable, index in kept_indices.items()}
