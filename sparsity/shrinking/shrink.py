"""`sparsity.shrink`: a model without its dead channels, and the optimizer's state with it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from sparsity.core import sharding, trees
from sparsity.core.checks import check_kind
from sparsity.core.trees import Masks, Params, Path, PyTree
from sparsity.graph import Graph
from sparsity.graph.channels.cuts import solve_kept
from sparsity.masks import apply_masks
from sparsity.masks.positions import check_entries
from sparsity.programs.axes import Axis
from sparsity.reports import time_in_turn
from sparsity.shrinking import savings
from sparsity.shrinking.cutting import Cutter
from sparsity.shrinking.dead import find_dead
from sparsity.shrinking.plan import Plan, check_proven, plan_cut
from sparsity.shrinking.savings import SizeRow
from sparsity.training import comparison
from sparsity.training.base_updater import BaseUpdater

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclasses.dataclass(frozen=True, eq=False)
class Small:
    """A smaller model. Made by `shrink`.

    Attributes:
      params: the parameters, the same tree with smaller leaves; 0 where `masks` are.
      opt_state: the optimizer's state, cut like the parameters; `None` without `opt_state`.
      plan: the channels that stay; `plan.to_json()` cuts another checkpoint of the model.
      before: the graph of the model before the cut.
      replicated: {(path, axis): number of devices} where that number no longer divides the axis.
      update_error: the largest difference between updates of smaller and of masked parameters, as
        a part of the largest entry of an array; `None` without `tx`.
      masks: uint8 masks of `params`, 1 where an entry stays; `None` for a parameter without masked
        entries, as all are after a cut by a plan.
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

    params: Params
    opt_state: optax.OptState | None
    plan: Plan
    before: Graph
    replicated: Mapping[tuple[Path, int], int]
    update_error: float | None = None
    masks: Masks = None

    @functools.cached_property
    def graph(self) -> Graph:
        """Graph of the smaller model, whose channels can be cut again."""
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
        """Converts an updater of the model before for the smaller model: see `Plan.updater`."""
        return self.plan.updater(updater)

    def macs(self, path: Path | None = None) -> int:
        """Counts multiply-adds at the batch size of the trace: of a call, or of one parameter.

        Raises:
          ValueError: the model has no parameter of this path, which is a tuple of strings.
        """
        paths = [leaf.path for leaf in self.before.leaves]
        if path is not None and path not in paths:
            raise ValueError(f"path must be one of {paths}, got path = {path!r}.")
        return round(self.before.costs.count_small_macs(self._sizes, path))

    def measure(self, params: Params, *args: PyTree, rounds: int = 20) -> list[float]:
        """Measures the model before and after, both compiled and called in turn.

        Args:
          params: the parameters before, as `shrink` got them.
          *args: inputs of the model.
          rounds: number of calls of each model.

        Returns:
          Median seconds of a call before and after: an entry of `report`.
        """

        def program(plan: Plan, params: Params) -> Callable[[], object]:
            arrays, rebuild = trees.split_arrays((params, args))

            @jax.jit
            def run(arrays: list[jax.Array]) -> object:
                params, inputs = rebuild(arrays)
                return plan.apply(self.before, params, *inputs)

            return functools.partial(run, arrays)

        full = program(Plan({}, {}), params)
        return time_in_turn(full, program(self.plan, self.params), rounds=rounds)

    def report(self, seconds: Mapping[str, Sequence[float]] | None = None) -> str:
        """Returns a table of shapes, sizes, bytes and MACs before and after, by parameter.

        Args:
          seconds: measured times shown below the table, `{name: (before, after)}`, as `measure` and
            `sparsity.reports.time_in_turn` return them.

        Returns:
          Text of several lines.
        """
        macs = self.before.macs(), self.macs()
        return savings.show_savings(self._rows(), macs, self._notes(), seconds or {})

    def plot(self, axes: Sequence[Axes] | None = None) -> Sequence[Axes]:
        """Draws multiply-adds and sizes of all parameters: before in light, after in dark.

        Leaves out parameters of one axis that no product reads, such as biases.

        Args:
          axes: two matplotlib axes to draw on; new ones side by side by default.

        Returns:
          The matplotlib axes.
        """
        return savings.plot(self._rows(), self.before.macs(), axes)

    def _rows(self) -> list[SizeRow]:
        """Returns the rows of tables and pictures, in tree order."""
        rows, densities = [], self._densities()
        for leaf in self.before.leaves:
            shape = self.plan.shrink_shape(leaf.path, leaf.shape)
            sizes = leaf.size, math.prod(shape)
            nbytes = sizes[0] * leaf.dtype.itemsize, sizes[1] * leaf.dtype.itemsize
            macs = self.before.costs.count_macs(leaf.path), self.macs(leaf.path)
            density = densities.get(leaf.path)
            rows.append(SizeRow(leaf.name, (leaf.shape, shape), sizes, nbytes, macs, density))
        return rows

    def _densities(self) -> dict[Path, float]:
        """Returns the part of the entries that masks keep, for each parameter with a mask."""
        densities = {}
        for key, mask in trees.leaves_by_path(self.masks).items():
            leaf = self.before.parameters.find(trees.path_names(key), mask, may_be_smaller=True)
            densities[leaf.path] = np.count_nonzero(mask) / mask.size
        return densities

    def _notes(self) -> list[str]:
        notes = []
        if self.replicated:
            names = [f"{trees.join_names(path)}:{axis}" for path, axis in self.replicated]
            notes.append(
                f"{trees.listed(names)}: what is left does not divide among the devices of the "
                "mesh that held it, and is replicated. "
                f"Coupled(round_to={math.lcm(*self.replicated.values())}) keeps it sharded."
            )
        if self.update_error is not None:
            notes.append(
                "The optimizer continues as on the masked model: the updates that were compared "
                f"differ by {self.update_error:.1g} of their largest entry at most."
            )
        elif self.opt_state is not None:
            notes.append(
                "Whether the optimizer continues as on the masked model was not checked: shrink("
                "..., opt_state, tx) compares updates."
            )
        return notes

    @functools.cached_property
    def _sizes(self) -> dict[Axis, int]:
        """Sizes of the variables that lose entries."""
        chosen = solve_kept(self.before.removal.list_axes(), self.plan)
        return {variable: index.shape[-1] for variable, index in chosen.items()}


def shrink(
    graph: Graph,
    params: Params,
    masks: Masks | Plan,
    opt_state: optax.OptState | None = None,
    tx: optax.GradientTransformation | None = None,
) -> Small:
    """Removes dead channels from the parameters, the model and the optimizer's state.

    A channel is dead if the masked model provably computes the same without it, also after others
    are cut: all that reads it is masked, or all that makes it, and readers meet a 0. All others
    keep their masks. The smaller model computes exactly what the masked model computes, gradients
    of kept entries included. Training continues from the returned state.

    Args:
      graph: the graph of the model, from `sparsity.trace`.
      params: the parameters, the tree that was traced, or a part of that tree.
      masks: masks of any pattern, not packed, `None` for dense parameters; or a `Plan`. Layers of
        a scan keep equally many channels, dead ones included; every group keeps one.
      opt_state: state of any optax optimizer of `params`. Moments are cut like their parameters,
        counters and schedules stay, and a SparseState keeps the masks of all entries that stay.
        Factored moments that average over removed channels are refused.
      tx: the optimizer of that state, or the inner one of a SparseState, to check that training
        continues as with the masked model: at least four updates by random gradients are compared.
        Entrywise optimizers pass, and norms of masked gradients (`clip_by_global_norm`, `lars`).
        Refused are means over an array (`clip_by_block_rms`), noise, factors made of the shape
        (`muon`), and norms of moments (`lamb`) or weights that removed entries still have.

    Returns:
      The smaller model.

    Raises:
      ValueError: params lack a leaf of the graph, masks are traced or of another model, hold other
        entries than 0 and 1 or remove a group, the optimizer's state cannot be cut, or `tx` would
        train otherwise; the error names the leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from sparsity.graph import trace
      >>> params = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 2))}
      >>> graph = trace(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"], params, jnp.ones((5, 3)))
      >>> masks = {"up": params["up"].at[:, 1].set(0), "down": params["down"].at[1].set(0)}
      >>> small = shrink(graph, params, masks)
      >>> jax.tree.map(jnp.shape, small.params)
      {'down': (3, 2), 'up': (3, 3)}
      >>> small.apply(small.params, jnp.ones((5, 3))).shape
      (5, 2)
    """
    check_kind("graph", graph, Graph, "made by sparsity.trace")
    comparison.check_arguments(masks, opt_state, tx)
    graph.parameters.check_complete(params)
    plan, by_path = _read_plan(graph, masks)
    cutter = Cutter(graph, plan)
    small_params = cutter.params(params)
    small_masks = cutter.masks(params, small_params, by_path)
    state = None if opt_state is None else cutter.state(params, small_params, opt_state)
    error = None if tx is None else cutter.check_updates(tx, params, opt_state, by_path)
    replicated = _find_replicated(graph, params, small_params)
    masked = apply_masks(small_params, small_masks)
    return Small(masked, state, plan, graph, replicated, error, small_masks)


def _read_plan(graph: Graph, masks: Masks | Plan) -> tuple[Plan, dict[Path, jax.Array]]:
    """Returns a checked plan that removes what masks remove, and the masks by path."""
    if isinstance(masks, Plan):
        check_proven(graph, solve_kept(graph.removal.list_axes(), masks), masks)
        return masks, {}
    by_path = {leaf.path: mask for leaf, mask in graph.parameters.match_masks(masks)}
    for path, mask in by_path.items():
        check_entries(np.asarray(mask), trees.join_names(path))
    return plan_cut(graph, *find_dead(graph, by_path)), by_path


def _find_replicated(
    graph: Graph, params: Params, small_params: Params
) -> dict[tuple[Path, int], int]:
    """Returns `Small.replicated`."""
    small = trees.leaves_by_path(small_params)
    replicated = {}
    for key, leaf in trees.leaves_by_path(params).items():
        placed = getattr(leaf, "sharding", None)
        if isinstance(placed, NamedSharding) and leaf.shape != small[key].shape:
            path = graph.parameters.find(trees.path_names(key), leaf).path
            for axis, count in enumerate(sharding.num_devices(placed, leaf.ndim)):
                if small[key].shape[axis] % count:
                    replicated[path, axis] = count
    return replicated
