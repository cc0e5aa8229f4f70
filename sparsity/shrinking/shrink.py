"""`sparsity.shrink`: a model without its masked channels, and the optimizer's state with it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import optax
from jax.sharding import NamedSharding

from sparsity.base_updater import BaseUpdater
from sparsity.core import sharding, trees
from sparsity.core.trees import PyTree
from sparsity.graph import Graph
from sparsity.graph.cuts import kept_of_variables
from sparsity.programs.axes import Axis
from sparsity.reports import time_in_turn
from sparsity.shrinking import report
from sparsity.shrinking.cutting import check_updates, cut_params, cut_state
from sparsity.shrinking.plan import Plan, check_proven, chosen_by, plan_of
from sparsity.shrinking.report import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Small:
    """A model that has become smaller. Made by `shrink`.

    Attributes:
      params: the parameters, the same tree with smaller leaves.
      opt_state: the optimizer's state, cut with them; `None` if none was given.
      plan: what stays: `plan.to_json()` cuts another checkpoint of the model.
      before: the graph of the model before.
      replicated: axes of leaves whose devices, so many, no longer divide what is left of them.
      update_error: how far updates of the smaller parameters are from those of the masked ones, as
        a part of the largest entry of an array; `None` if `shrink` got no `tx`.
      graph: that of the smaller one.

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

    params: PyTree
    opt_state: optax.OptState | None
    plan: Plan
    before: Graph
    replicated: Mapping[tuple[Path, int], int]
    update_error: float | None = None

    @functools.cached_property
    def graph(self) -> Graph:
        """The graph of the smaller model: channels can be cut again."""
        return self.plan.graph(self.before)

    def apply(self, params: PyTree, *args: PyTree) -> PyTree:
        """The model at its smaller size: what `fn(params, *args)` of the masked model returns.

        It can be compiled, differentiated, mapped and exported like `fn`, at any batch size.

        Args:
          params: the smaller parameters.
          *args: inputs of the model.
        """
        return self.plan.apply(self.before, params, *args)

    def updater(self, updater: BaseUpdater) -> BaseUpdater:
        """Returns an updater of the model before for the smaller one: see `Plan.updater`."""
        return self.plan.updater(updater)

    def macs(self, path: Path | None = None) -> int:
        """Multiply-adds that are left, at the batch size of the trace: of a call, or of a leaf."""
        found: float = self.before.macs_left(self._left, path)
        return round(found)

    def measure(self, params: PyTree, *args: PyTree, rounds: int = 20) -> list[float]:
        """Measures the model before and after, both compiled and called in turn.

        Args:
          params: the parameters before, as `shrink` got them.
          *args: inputs of the model.
          rounds: how often each is called.

        Returns:
          Median seconds of a call before, and after: an entry of `report`.
        """

        def program(plan: Plan, params: PyTree) -> Callable[[], object]:
            arrays, rebuild = trees.split_arrays((params, args))

            @jax.jit
            def run(arrays: list[jax.Array]) -> object:
                params, inputs = rebuild(arrays)
                return plan.apply(self.before, params, *inputs)

            return functools.partial(run, arrays)

        whole = program(Plan({}, {}), params)
        return time_in_turn(whole, program(self.plan, self.params), rounds=rounds)

    def report(self, seconds: Mapping[str, Sequence[float]] | None = None) -> str:
        """Returns a table of what became smaller: shapes, parameters, bytes and MACs by leaf.

        Args:
          seconds: measured times to be shown below, `{what: (before, after)}`, as `measure` and
            `sparsity.reports.time_in_turn` return them.

        Returns:
          Text of several lines.
        """
        macs = self.before.macs(), self.macs()
        return report.table(self._rows(), macs, self._notes(), seconds or {})

    def plot(self, axes: Sequence[Axes] | None = None) -> Sequence[Axes]:
        """Draws multiply-adds and parameters of every leaf: before in light, what is left in dark.

        Leaves of one axis that no product reads, such as biases, are too small to be seen.

        Args:
          axes: two matplotlib axes to draw on; new ones side by side by default.

        Returns:
          The matplotlib axes.
        """
        return report.plot(self._rows(), self.before.macs(), axes)

    def _rows(self) -> list[Row]:
        """What tables and pictures show of each leaf, in tree order."""
        rows = []
        for leaf in self.before.leaves:
            shape = self.plan.shape_left(leaf.path, leaf.shape)
            sizes = leaf.size, math.prod(shape)
            nbytes = sizes[0] * leaf.dtype.itemsize, sizes[1] * leaf.dtype.itemsize
            macs = self.before.macs_of(leaf.path), self.macs(leaf.path)
            rows.append(Row(leaf.name, (leaf.shape, shape), sizes, nbytes, macs))
        return rows

    def _notes(self) -> list[str]:
        notes = []
        if self.replicated:
            names = [f"{'/'.join(path)}:{axis}" for path, axis in self.replicated]
            notes.append(
                f"{trees.listed(names)}: what is left does not divide among the devices of the "
                "mesh that held it, and lies on each of them. "
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
    def _left(self) -> dict[Axis, int]:
        """How many entries stay of each variable."""
        chosen = kept_of_variables(self.before.axes(), self.plan)
        return {variable: index.shape[-1] for variable, index in chosen.items()}


def shrink(
    graph: Graph,
    params: PyTree,
    masks: PyTree | Plan,
    opt_state: optax.OptState | None = None,
    tx: optax.GradientTransformation | None = None,
) -> Small:
    """Removes the masked channels: of the parameters, of the model, and of the optimizer's state.

    What is left computes exactly what the masked model computes, gradients included, and training
    goes on with the state that is returned.

    Args:
      graph: the graph of the model, from `sparsity.trace`.
      params: its parameters, the tree that was traced, or a part of it.
      masks: masks of whole channels, as `scope=sparsity.Coupled(graph)` makes them; or a `Plan`.
      opt_state: state of any optax optimizer of `params`. Moments are cut with their parameters,
        counters and schedules stay, and a SparseState keeps the masks of what is left. Factored
        moments that average over removed channels are refused.
      tx: the optimizer of that state, or the inner one of a SparseState, to check that it trains on
        as it would the masked model: at least four updates by random gradients are compared. What
        works entry by entry does, and so does a norm of gradients, to which zeros add nothing
        (`clip_by_global_norm`, `lars`). A mean
        over an array (`clip_by_block_rms`), noise, a factor made of the shape (`muon`), or a norm
        of moments that removed entries still have (`lamb`) does not, and is refused.

    Returns:
      The smaller model.

    Raises:
      ValueError: a mask does not remove whole channels, masks belong to another model, a group of
        channels would vanish, a leaf of the optimizer's state cannot be cut, or `tx` would train
        the smaller model otherwise; the leaf is named.

    Example:
      >>> import jax.numpy as jnp
      >>> from sparsity.graph import trace
      >>> params = {"up": jnp.ones((3, 4)), "down": jnp.ones((4, 2))}
      >>> graph = trace(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"], params, jnp.ones((5, 3)))
      >>> stays = jnp.array([1, 0, 1, 1])
      >>> masks = {"up": jnp.tile(stays, (3, 1)), "down": jnp.tile(stays[:, None], (1, 2))}
      >>> small = shrink(graph, params, masks)
      >>> jax.tree.map(jnp.shape, small.params)
      {'down': (3, 2), 'up': (3, 3)}
      >>> small.apply(small.params, jnp.ones((5, 3))).shape
      (5, 2)
    """
    if masks is None:
        raise ValueError("masks is None: nothing would be cut. Give masks of params, or a Plan.")
    if isinstance(opt_state, optax.GradientTransformation):
        raise ValueError("opt_state is an optimizer: give its state, and the optimizer as tx.")
    if tx is not None and not hasattr(tx, "update"):
        raise ValueError(f"tx must be an optax.GradientTransformation, got {tx!r}.")
    if isinstance(masks, Plan):
        plan = masks
        check_proven(graph, kept_of_variables(graph.axes(), plan))
    else:
        plan = plan_of(graph, chosen_by(graph, masks))
    small_params = cut_params(graph, plan, params)
    state = None if opt_state is None else cut_state(graph, plan, params, small_params, opt_state)
    small = Small(small_params, state, plan, graph, _replicated(graph, params, small_params))
    if tx is None:
        return small
    if opt_state is None:
        raise ValueError("tx is checked with the optimizer's state: give opt_state, too.")
    return dataclasses.replace(
        small, update_error=check_updates(tx, graph, plan, params, opt_state)
    )


def _replicated(graph: Graph, params: PyTree, small_params: PyTree) -> dict[tuple[Path, int], int]:
    """`Small.replicated`."""
    left = trees.leaves_by_path(small_params)
    found = {}
    for key, leaf in trees.leaves_by_path(params).items():
        own = getattr(leaf, "sharding", None)
        if isinstance(own, NamedSharding) and leaf.shape != left[key].shape:
            path = graph.leaf(trees.path_names(key), leaf).path
            counts = sharding.num_devices(own, leaf.ndim)
            for axis, count in enumerate(counts):
                if left[key].shape[axis] % count:
                    found[path, axis] = count
    return found
