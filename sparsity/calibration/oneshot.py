"""`sparsity.oneshot`: a trained model pruned in one pass over calibration data.

Each layer sees what the pruned layers before it produce. The program runs in lockstep on all
batches: up to a product, whose inputs are summed up and whose weight is pruned and refitted, and on
from there with the new weight. No equation runs twice, and only values that are still needed are
kept: memory does not grow with depth. A scan runs one layer at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.base_updater import BaseUpdater
from sparsity.calibration.capture import Capture, calibrate, statistic_of_use
from sparsity.calibration.prune import prune, reconstruct
from sparsity.calibration.refits import Refit
from sparsity.calibration.statistics import Path, Statistic, relative_error
from sparsity.core import extras, trees
from sparsity.core.jaxprs import Equation, Program, Value
from sparsity.core.trees import KeyPath, PyTree
from sparsity.graph import Graph, trace
from sparsity.masks import Site
from sparsity.sparsity_distributions import target_sparsities


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What pruning did to a leaf.

    Attributes:
      sparsity: fraction of its weights that are 0.
      error: tr(D^T G D) / tr(W^T G W) of what was lost, over the calibration data: of a stack of
        layers the mean.
      unrefitted: the same before a refit.
      count: rows that it has seen.
      seconds: spent on it.
    """

    sparsity: float
    error: float
    unrefitted: float
    count: int
    seconds: float


class Report(dict[Path, LayerReport]):
    """{path: LayerReport} of the pruned leaves, in the order in which they were pruned."""

    def table(self) -> str:
        """Returns a table of the leaves: sparsity, error without and with a refit, seconds."""
        shown = extras.load("rich.table", "summary").Table(
            "leaf", box=extras.load("rich.box", "summary").SIMPLE
        )
        for column in ("sparsity", "error, not refitted", "error", "rows", "seconds"):
            shown.add_column(column, justify="right")
        for path, row in self.items():
            numbers = (f"{row.sparsity:.4f}", f"{row.unrefitted:.5f}", f"{row.error:.5f}")
            shown.add_row("/".join(path), *numbers, f"{row.count:,}", f"{row.seconds:.2f}")
        return extras.as_text(shown)


def oneshot(
    pruner: BaseUpdater,
    fn: Callable[..., PyTree],
    params: PyTree,
    batches: Iterable[PyTree],
    refit: Refit | None = None,
    sequential: bool = True,
) -> tuple[PyTree, PyTree, Report]:
    """Prunes a trained model by calibration data, layer by layer.

    Args:
      pruner: any updater that prunes at once: magnitude, Wanda, RIA, SparseGPT, ...
      fn: the model, `fn(params, batch)`.
      params: its parameters; they are not changed.
      batches: what `fn` takes as its second argument, all of one shape; a generator is read once.
      refit: `LeastSquares()`, `ADMM()`, or `None`.
      sequential: each layer sees what the pruned layers before it produce; otherwise all see the
        inputs that the dense model gives them.

    Returns:
      (pruned params, masks, report): `report[path]` has sparsity, error and rows of a leaf.

    Raises:
      ValueError: there are no batches, activations are not finite, a leaf that has a sparsity is
        read by no product, or a pattern does not fit; the leaf is named.

    Example:
      >>> from sparsity.algorithms import MagnitudePruning
      >>> from sparsity.sparsity_distributions import Uniform
      >>> params = {"kernel": jnp.array([[4.0], [1.0]])}
      >>> pruner = MagnitudePruning(sparsity_distribution_fn=Uniform(0.5))
      >>> batch = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> pruned, masks, report = oneshot(pruner, lambda p, x: x @ p["kernel"], params, [batch])
      >>> pruned["kernel"].T, round(report[("kernel",)].error, 3)
      (Array([[4., 0.]], dtype=float32), 0.024)
    """
    seen = list(batches)
    if not seen:
        raise ValueError("batches has no batch: give at least one.")
    run = _Run(pruner, fn, params, refit, trace(fn, params, seen[0]))
    if sequential:
        run.follow(seen)
    if left := [site for path, site in run.sites.items() if path not in run.masks]:
        names = {trees.path_names(site.path) for site in left}
        at = functools.partial(_among, names)
        statistics = calibrate(fn, run.params(), seen, kind="gram", filter_fn=at)
        for site in left:
            run.prune(site, statistics.get(trees.path_names(site.path)), ())
    return run.params(), run.all_masks(), run.report


def _among(names: set[Path], path: Path, _: Any) -> bool:
    return path in names


class _Frame:
    """A program that runs on all batches: the values of each that are still needed.

    Args:
      program: the program.
      bound: inputs that depend on parameters alone, as functions that compute them.
      data: for each batch the values of the other inputs.
      layers: the layer of each scan that it is in, by scan.
    """

    def __init__(
        self,
        program: Program,
        bound: Mapping[Value, Callable[[], Any]],
        data: list[dict[Value, Any]],
        layers: Mapping[Equation, int],
    ) -> None:
        self.program, self.bound, self.data, self.layers = program, bound, data, layers
        self.made_by = {value: e for e in program.flat() for value in e.outputs}
        self._free: dict[Value, Any] = {}

    def free(self, value: Value) -> Any:
        """A value that depends on parameters alone."""
        if value not in self._free:
            if value in self.bound:
                return self.bound[value]()
            if value not in self.made_by:
                return value.known
            equation = self.made_by[value]
            outputs = equation.bind([self.free(x) for x in equation.inputs])
            self._free.update(zip(equation.outputs, outputs, strict=True))
        return self._free[value]

    def forget(self) -> None:
        """Parameters have changed."""
        self._free.clear()

    def read(self, batch: int, value: Value) -> Any:
        """A value for a batch."""
        found = self.data[batch]
        return found[value] if value in found else self.free(value)

    def last_uses(self) -> dict[Value, Equation | None]:
        """After which equation a value is needed no more, `None` for outputs."""
        last: dict[Value, Equation | None] = {}
        for equation in self.program.flat():
            last.update(dict.fromkeys(equation.inputs, equation))
        last.update(dict.fromkeys(self.program.outputs))
        return last


class _Run:
    """One pass over the model: its parameters, masks and report so far."""

    def __init__(
        self, pruner: BaseUpdater, fn: Any, params: PyTree, refit: Refit | None, graph: Graph
    ) -> None:
        self.pruner, self.refit, self.graph = pruner, refit, graph
        self.report = Report()
        self.masks: dict[KeyPath, jax.Array] = {}
        self._tree = params
        self._leaves, self._rebuild = trees.split_arrays(params)
        self._dense = list(self._leaves)
        self._numbers = {leaf.path: i for i, leaf in enumerate(graph.leaves)}
        table = pruner.sites(params)
        self.targets = trees.leaves_by_path(
            target_sparsities(
                pruner.get_distribution_fn(), params, table, pruner.scope, pruner.batch_axes
            )
        )
        self.sites: dict[KeyPath, Site] = {path: table[path] for path in self.targets}
        self._by_names = {trees.path_names(path): path for path in self.sites}
        self._frames: list[_Frame] = []
        self._done: set[tuple[KeyPath, tuple[int, ...]]] = set()
        self._layers: dict[Path, list[LayerReport]] = {}
        self._capture = Capture(graph, "gram", lambda path, _: path in self._by_names)
        self._sums = jax.jit(self._capture.sums, static_argnums=0)

    def params(self) -> PyTree:
        """The parameters as they are now."""
        return self._rebuild(self._leaves)

    def all_masks(self) -> PyTree:
        """The masks of all leaves."""
        return trees.map_matched(lambda path, _: self.masks.get(path), self._tree)

    def follow(self, batches: Sequence[Any]) -> None:
        """Runs the model on all batches, and prunes each weight when its product is reached."""
        program, count = self.graph.program, len(self.graph.leaves)
        values = program.inputs
        inputs = [trees.split_arrays(batch)[0] for batch in batches]
        data = [dict(zip(values[count:], arrays, strict=True)) for arrays in inputs]
        bound = {
            value: functools.partial(self._leaves.__getitem__, i)
            for i, value in enumerate(values[:count])
        }
        self._run(_Frame(program, bound, data, {}))

    def _run(self, frame: _Frame) -> None:
        self._frames.append(frame)
        last = frame.last_uses()
        for equation in frame.program.flat():
            if any(value in frame.data[0] for value in equation.inputs):
                for number in self._capture.at(equation):
                    self._meet(frame, number, equation)
                if equation.name == "scan" and self._capture.is_within(equation):
                    self._scan(frame, equation)
                else:
                    for batch, values in enumerate(frame.data):
                        read = [frame.read(batch, value) for value in equation.inputs]
                        values.update(zip(equation.outputs, equation.bind(read), strict=True))
            for value in {*equation.inputs, *equation.outputs}:
                if last.get(value, equation) is equation:
                    for values in frame.data:
                        values.pop(value, None)
        self._frames.pop()

    def _scan(self, frame: _Frame, equation: Equation) -> None:
        """Runs a scan layer by layer."""
        params, (body,) = equation.params, equation.bodies
        fixed = params["num_consts"]
        end = fixed + params["num_carry"]
        order = range(params["length"])
        batches = range(len(frame.data))
        is_data = [value in frame.data[0] for value in equation.inputs]
        # A carry depends on the data from the first step on.
        is_data[fixed:end] = [True] * (end - fixed)
        carry = [[frame.read(b, v) for v in equation.inputs[fixed:end]] for b in batches]
        stacked: list[list[list[Any]]] = [[] for _ in batches]
        for layer in reversed(order) if params["reverse"] else order:
            bound, data = {}, [{} for _ in batches]  # type: ignore[var-annotated]
            for at, (value, inner) in enumerate(zip(equation.inputs, body.inputs, strict=True)):
                if not is_data[at]:
                    bound[inner] = functools.partial(
                        _layer_of, frame, value, layer if at >= end else None
                    )
                    continue
                for b in batches:
                    whole = carry[b][at - fixed] if fixed <= at < end else frame.read(b, value)
                    data[b][inner] = whole[layer] if at >= end else whole
            inside = _Frame(body, bound, data, {**frame.layers, equation: layer})
            self._run(inside)
            for b in batches:
                outputs = [inside.read(b, value) for value in body.outputs]
                carry[b] = outputs[: end - fixed]
                stacked[b].append(outputs[end - fixed :])
        for b, values in enumerate(frame.data):
            layers = stacked[b][::-1] if params["reverse"] else stacked[b]
            joined = [jnp.stack(x) for x in zip(*layers, strict=True)]
            values.update(zip(equation.outputs, [*carry[b], *joined], strict=True))

    def _meet(self, frame: _Frame, number: int, equation: Equation) -> None:
        """A product is reached: sums up its inputs over all batches and prunes its weight."""
        use = self._capture.uses[number]
        site = self.sites[self._by_names[use.path]]
        layers = tuple(frame.layers[scan] for scan in use.view.scans)
        if (site.path, layers) in self._done:
            return
        sums: Any = None
        for batch in range(len(frame.data)):
            x = frame.read(batch, equation.inputs[1 - use.operand])
            now = self._sums(number, x)
            sums = now if sums is None else jax.tree.map(jnp.add, sums, now)
        own = statistic_of_use(use, self.graph, "gram", sums[0], sums[1], of_layer=bool(layers))
        self.prune(site, own, tuple(zip(use.view.stacked, layers, strict=True)))
        self._done.add((site.path, layers))

    def prune(
        self, site: Site, statistic: Statistic | None, layer: tuple[tuple[int, int], ...]
    ) -> None:
        """Prunes a leaf, or one layer of it: (axis, index) says which."""
        started = time.perf_counter()
        name = trees.path_names(site.path)
        if statistic is None:
            raise ValueError(
                f"No product of the model reads {site.name!r}, which has a sparsity, so that it "
                "has no statistics. Keep it dense with filter_fn."
            )
        number = self._numbers[name]
        at = tuple(dict(layer).get(axis, slice(None)) for axis in range(self._leaves[number].ndim))
        dense = self._dense[number][at]
        pruner = _for_leaf(self.pruner, site, self.targets[site.path], len(layer))
        tree = trees.map_matched(lambda path, _: dense if path == site.path else None, self._tree)
        statistics = {name: statistic}
        first, masks = prune(pruner, tree, statistics)
        last = first
        if self.refit is not None:
            last, masks = reconstruct(self.refit, pruner, tree, first, masks, statistics)
        leaves = [trees.leaves_by_path(x)[site.path] for x in (first, last, masks)]
        self._leaves[number] = jnp.asarray(self._leaves[number]).at[at].set(leaves[1])
        whole = self.masks.get(site.path, jnp.ones(self._leaves[number].shape, jnp.uint8))
        self.masks[site.path] = whole.at[at].set(leaves[2])
        for frame in self._frames:
            frame.forget()
        errors = [float(relative_error(statistic, dense, x)) for x in leaves[:2]]
        self._tell(name, leaves[2], errors, statistic, time.perf_counter() - started)

    def _tell(
        self,
        name: Path,
        mask: jax.Array,
        errors: Sequence[float],
        statistic: Statistic,
        seconds: float,
    ) -> None:
        rows = int(np.max(jax.device_get(statistic.count)))
        new = LayerReport(float(1 - jnp.mean(mask)), errors[1], errors[0], rows, seconds)
        self._layers.setdefault(name, []).append(new)
        layers = self._layers[name]
        self.report[name] = LayerReport(
            float(np.mean([layer.sparsity for layer in layers])),
            float(np.mean([layer.error for layer in layers])),
            float(np.mean([layer.unrefitted for layer in layers])),
            rows,
            sum(layer.seconds for layer in layers),
        )


def _layer_of(frame: _Frame, value: Value, layer: int | None) -> Any:
    found = frame.free(value)
    return found if layer is None else found[layer]


def _for_leaf(pruner: BaseUpdater, site: Site, target: Any, fewer: int) -> BaseUpdater:
    """The pruner for one leaf, or for a layer of it with fewer axes."""

    def distribution(params: PyTree) -> PyTree:
        return trees.map_matched(lambda path, _: target if path == site.path else None, params)

    pattern: Any = site.pattern
    axis = getattr(pattern, "axis", None)
    if fewer and not site.batch_axes and axis is not None and axis >= 0:
        pattern = dataclasses.replace(pattern, axis=axis - fewer)
    return dataclasses.replace(
        pruner,
        sparsity_distribution_fn=distribution,
        sparsity_type=pattern,
        batch_axes=max(site.batch_axes - fewer, 0),
        use_packed_masks=False,
    )
