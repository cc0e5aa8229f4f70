"""`sparsity.shrink`: a model without its dead channels, and the optimizer's state with it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding

from sparsity.core import extras, sharding, trees
from sparsity.core.checks import check_kind
from sparsity.core.trees import Masks, Params, Path, PyTree, Tree
from sparsity.graph import Graph
from sparsity.graph.groups import solve_kept_indices
from sparsity.masks import apply_masks
from sparsity.masks.slice_layout import check_entries
from sparsity.programs.axes import Variable
from sparsity.reports import time_in_turn
from sparsity.shrinking import cutting
from sparsity.shrinking.dead import find_dead
from sparsity.shrinking.plan import Plan, plan_cut, solve_proven_indices
from sparsity.training.base_updater import BaseUpdater, WrappedOptimizer
from sparsity.training.checks import check_masks_and_state
from sparsity.training.state import get_sparse_state


def shrink(
    graph: Graph,
    params: Tree,
    masks: Masks | Plan,
    opt_state: optax.OptState | None = None,
    tx: optax.GradientTransformation | None = None,
) -> Small[Tree]:
    """Removes dead channels from the parameters, the model and the optimizer's state.

    A channel is dead if the masked model provably computes the same without it: all entries that
    read the channel are masked, or all that compute it are, and its readers read 0. Cutting one may
    leave others dead. Other entries keep their masks. The smaller model computes exactly what the
    masked model computes, also gradients of kept entries. Training continues from its state.

    Args:
      graph: the graph of the model, from `sparsity.trace`.
      params: the parameters, the tree that was traced, or a part of that tree.
      masks: masks of any pattern, not packed, `None` if dense; or a `Plan`. Layers of a scan keep
        equally many channels, dead ones included; every group keeps one.
      opt_state: state of any optax optimizer of `params`. Moments are cut like their parameters,
        counters and schedules stay, and a SparseState keeps the masks of all entries that stay.
        Factored moments that average over removed channels are refused.
      tx: the optimizer of that state, to train on with `small.tx`; or the inner one of a
        SparseState. The program of its update must prove that training continues as on the masked
        model. Entrywise optimizers pass, and norms to which removed entries add 0
        (`clip_by_global_norm`, `lars`). Means over an array (`clip_by_block_rms`), noise, factored
        moments, factors that depend on the shape (`muon`) and norms of moments that removed entries
        still have (`lamb`) are refused. Without `tx` you vouch for the optimizer.

    Raises:
      ValueError: params lack a parameter, masks are traced or of another model, hold other entries
        than 0 and 1 or remove a group, the state cannot be cut, or no proof is found for `tx`.

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
    check_masks_and_state(masks, opt_state, tx, may_hold_masks=True)
    graph.parameters.check_complete(params)
    plan, by_path = _read_plan(graph, masks)
    cuts = cutting.list_cut_parameters(graph, params, plan.kept, by_path)
    small_params = cutting.cut_params(cuts, params)
    small_masks = cutting.cut_masks(cuts, small_params)
    state = None if opt_state is None else cutting.cut_state(cuts, params, small_params, opt_state)
    if tx is not None:
        cutting.check_optimizer(tx, *trees.strip_variables((params, opt_state)), cuts)
        tx = _convert_optimizer(tx, plan, state)
    replicated = _find_replicated(graph, params, small_params)
    masked = apply_masks(small_params, small_masks)
    return Small(masked, state, plan, graph, replicated, small_masks, tx)


def _convert_optimizer(
    tx: optax.GradientTransformation, plan: Plan, small_state: PyTree
) -> optax.GradientTransformation:
    """Returns the optimizer of the smaller model: a wrapped one, whose updater knows the cut."""
    if not isinstance(tx, WrappedOptimizer) or tx.updater is None or tx.inner is None:
        return tx
    masks = None if tx.masks is None else get_sparse_state(small_state).masks
    return plan.updater(tx.updater).wrap_optax(tx.inner, masks)


def _read_plan(graph: Graph, masks: Masks | Plan) -> tuple[Plan, dict[Path, jax.Array]]:
    """Returns a checked plan of the channels that masks remove, and the masks by path."""
    if isinstance(masks, Plan):
        solve_proven_indices(graph, masks)  # raises for a plan of another model
        return masks, {}
    by_path = {x.path: mask for x, mask in graph.parameters.match_masks(masks)}
    for path, mask in by_path.items():
        check_entries(np.asarray(mask), trees.join_names(path))
    return plan_cut(graph, *find_dead(graph, by_path)), by_path


def _find_replicated(
    graph: Graph, params: Params, small_params: Params
) -> dict[tuple[Path, int], int]:
    """Returns the attribute `replicated` of a `Small`."""
    parameters, small = graph.parameters.match(params), trees.leaves_by_path(small_params)
    replicated = {}
    for key_path, leaf in trees.leaves_by_path(params).items():
        old_sharding = getattr(leaf, "sharding", None)
        if isinstance(old_sharding, NamedSharding) and leaf.shape != small[key_path].shape:
            for axis, count in enumerate(sharding.count_devices(old_sharding, leaf.ndim)):
                if small[key_path].shape[axis] % count:
                    replicated[parameters[key_path].path, axis] = count
    return replicated


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

        def make_program(plan: Plan, params: Params) -> Callable[[], object]:
            arrays, rebuild = trees.split_arrays((params, args))

            @jax.jit
            def run(arrays: list[jax.Array]) -> object:
                params, inputs = rebuild(arrays)
                return plan.apply(self.before, params, *inputs)

            return functools.partial(run, arrays)

        self.before.parameters.match(params, may_be_smaller=False)
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
        densities = {}
        for path, mask in trees.leaves_by_names(self.masks).items():
            parameter = self.before.parameters.find(path, mask, may_be_smaller=True)
            densities[parameter.path] = f"{np.count_nonzero(mask) / mask.size:.3g}"
        columns = ["entries", "left", "bytes", "left", "MACs", "left", "density"]
        columns = columns if densities else columns[:-1]
        table = extras.make_table(("parameter", "shape", "smaller"), columns)
        totals = np.zeros(6, object)

        def add_row(names: Sequence[str], numbers: Sequence[int], density: str = "") -> None:
            cells = (*names, *(f"{n:,}" for n in numbers), density)
            table.add_row(*cells if densities else cells[:-1])

        for x in self.before.parameters:
            shape = self.plan.shrink_shape(x.path, x.shape)
            size = math.prod(shape)
            nbytes = [n * x.dtype.itemsize for n in (x.size, size)]
            macs = self.before.costs.count_macs(x.path), self.macs(x.path)
            numbers = (x.size, size, *nbytes, *macs)
            totals += numbers
            names = (x.name, trees.shape_text(x.shape), trees.shape_text(shape))
            add_row(names, numbers, densities.get(x.path, ""))
        table.add_section()
        # Products of two parameters count once in the sum of all.
        add_row(("all", "", ""), (*totals[:4], self.before.macs(), self.macs()))
        parts = [extras.as_text(table), *self._list_notes()]
        if seconds:
            times = extras.make_table(("time",), ("before", "after", "ratio"))
            for name, pair in seconds.items():
                milliseconds = [f"{1000 * x:.3g} ms" for x in pair]
                times.add_row(name, *milliseconds, f"{pair[1] / pair[0]:.2f}")
            parts.append(extras.as_text(times))
        return "\n\n".join(parts)

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
