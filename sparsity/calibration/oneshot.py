"""`sparsity.oneshot`: a trained model pruned in one pass over calibration data.

Each layer sees what the pruned layers before it produce. The program runs in lockstep on all
batches: up to a product, whose inputs are summed up and whose weight is pruned and refitted, and on
from there with the new weight. No equation runs twice, and only values that are still needed are
kept: memory does not grow with depth. A scan runs one layer at a time. Of a weight that lies whole
on every device of a mesh, each device solves some of the outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.base_updater import BaseUpdater
from sparsity.calibration.capture import Capture, calibrate, check_structure, statistic_of_use
from sparsity.calibration.frames import Frame
from sparsity.calibration.prune import check_runs, prune, reconstruct
from sparsity.calibration.pruners import is_per_slice
from sparsity.calibration.refits import Refit
from sparsity.calibration.report import LayerReport, Report
from sparsity.calibration.resume import Finished, Layer, described, digest, digest_of_program
from sparsity.calibration.statistics import (
    Path,
    Statistic,
    Statistics,
    check_memory,
    not_finite,
    relative_error,
)
from sparsity.core import sharding, trees
from sparsity.core.checks import check_bool
from sparsity.core.jaxprs import Equation
from sparsity.core.trees import KeyPath, PyTree
from sparsity.graph import Graph, trace
from sparsity.masks import Site, pack_masks
from sparsity.sparsity_distributions import target_sparsities


def oneshot(
    pruner: BaseUpdater,
    fn: Callable[..., PyTree],
    params: PyTree,
    batches: Iterable[PyTree],
    refit: Refit | None = None,
    sequential: bool = True,
    folder: str | os.PathLike[str] | None = None,
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
      folder: each layer is saved there when it is finished; the same call goes on from the last
        one if it was interrupted. Needs orbax.

    Returns:
      (pruned params, masks, report): `report[path]` has sparsity, error and rows of a leaf.

    Raises:
      ValueError: an argument is none of these, there are no batches, activations are not finite, a
        leaf that has a sparsity is read by no product, a pattern does not fit, or the folder holds
        another run; the leaf, the batch or what differs is named.

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
    check_runs(pruner, refit)
    check_bool("sequential", sequential)
    seen = list(batches)
    if not seen:
        raise ValueError("batches has no batch: give at least one.")
    if not is_per_slice(pruner.scope):
        raise ValueError(
            "oneshot prunes one leaf after the other and needs scope = Layerwise(), got "
            f"{pruner.scope!r}. Prune all of them at once: pruner.instant_sparsify(params, "
            "statistics=statistics). A scope of your own that does not compare leaves says "
            "`per_slice = True`."
        )
    run = _Run(pruner, params, refit, trace(fn, params, seen[0]))
    if folder is not None:
        run.keep_in(folder, params, seen, sequential)
    if sequential:
        run.follow(seen)
    if left := [site for path, site in run.sites.items() if path not in run.masks]:
        names, now = {trees.path_names(site.path) for site in left}, run.params()

        @functools.cache
        def statistics() -> Statistics:
            return calibrate(fn, now, seen, "gram", lambda path, _: path in names)

        def of_path(path: Path, _: str) -> Statistic | None:
            return statistics().get(path)

        for site in left:
            run.prune(site, (), functools.partial(of_path, trees.path_names(site.path)))
    return run.params(), run.all_masks(), run.report


class _Run:
    """One pass over the model: its parameters, masks and report so far."""

    def __init__(
        self, pruner: BaseUpdater, params: PyTree, refit: Refit | None, graph: Graph
    ) -> None:
        self.pruner, self.refit, self.graph = pruner, refit, graph
        self.report = Report()
        self.finished: Finished | None = None
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
        self._own: set[int] = set()  # leaves that are changed in place: copies of those given
        self._frames: list[Frame] = []
        self._done: set[tuple[KeyPath, tuple[tuple[int, int], ...]]] = set()
        self._layers: dict[Path, list[LayerReport]] = {}
        self._capture = Capture(graph, "gram", lambda path, _: path in self._by_names)

    def keep_in(
        self,
        folder: str | os.PathLike[str],
        params: PyTree,
        batches: Sequence[PyTree],
        sequential: bool,
    ) -> None:
        """Keeps finished layers in a folder."""
        table = [(str(site), float(self.targets[path])) for path, site in self.sites.items()]
        identity = {
            "pruner": described(self.pruner),
            "refit": described(self.refit),
            "sequential": str(sequential),
            "sparsities": str(table),
            "fn": digest_of_program(self.graph.program),
            "params": digest(params),
            "batches": digest(batches),
        }
        self.finished = Finished(folder, identity)

    def params(self) -> PyTree:
        """The parameters as they are now."""
        return self._rebuild(self._leaves)

    def all_masks(self) -> PyTree:
        """The masks of all leaves."""
        masks = trees.map_matched(lambda path, _: self.masks.get(path), self._tree)
        return pack_masks(masks, self._tree) if self.pruner.use_packed_masks else masks

    def follow(self, batches: Sequence[Any]) -> None:
        """Runs the model on all batches, and prunes each weight when its product is reached."""
        for name, gram in self._capture.grams(of_layer=True).items():
            check_memory({name: gram})  # one is held at a time
        program, count = self.graph.program, len(self.graph.leaves)
        values = program.inputs
        inputs = [trees.split_arrays(batch)[0] for batch in batches]
        for number, (batch, arrays) in enumerate(zip(batches, inputs, strict=True)):
            check_structure(batch, batches[0], number)
            if (found := _shapes(arrays)) != (first := _shapes(inputs[0])):
                raise ValueError(
                    f"Batch {number} has arrays {found}, batch 0 has {first}. All batches run in "
                    "lockstep and must be alike: leave out or fill up the one that is smaller, or "
                    "give sequential=False."
                )
        data = [dict(zip(values[count:], arrays, strict=True)) for arrays in inputs]
        bound = {value: functools.partial(self._leaf, i) for i, value in enumerate(values[:count])}
        self._run(Frame(program, bound, data, {}))

    def _run(self, frame: Frame) -> None:
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

    def _scan(self, frame: Frame, equation: Equation) -> None:
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
                    of_layer = (layer,) if at >= end else ()
                    bound[inner] = functools.partial(frame.free, value, *of_layer)
                    continue
                for b in batches:
                    whole = carry[b][at - fixed] if fixed <= at < end else frame.read(b, value)
                    data[b][inner] = whole[layer] if at >= end else whole
            inside = Frame(body, bound, data, {**frame.layers, equation: layer})
            self._run(inside)
            for b in batches:
                outputs = [inside.read(b, value) for value in body.outputs]
                carry[b] = outputs[: end - fixed]
                stacked[b].append(outputs[end - fixed :])
        for b, values in enumerate(frame.data):
            layers = stacked[b][::-1] if params["reverse"] else stacked[b]
            joined = [jnp.stack(x) for x in zip(*layers, strict=True)]
            values.update(zip(equation.outputs, [*carry[b], *joined], strict=True))

    def _meet(self, frame: Frame, number: int, equation: Equation) -> None:
        """A product is reached: prunes its weight by its inputs of all batches."""
        use = self._capture.uses[number]
        layer = tuple(
            (a, frame.layers[s]) for a, s in zip(use.view.stacked, use.view.scans, strict=True)
        )

        def statistic(name: str) -> Statistic:
            sums: Any = None
            finite = []
            for batch in range(len(frame.data)):
                x = frame.read(batch, equation.inputs[1 - use.operand])
                now = self._capture.sums(number, x)
                finite.append(jnp.all(jnp.isfinite(now[0])))
                sums = now if sums is None else jax.tree.map(jnp.add, sums, now)
            for batch, is_finite in enumerate(jax.device_get(finite)):
                if not is_finite:
                    raise not_finite(name, batch)
            return statistic_of_use(use, self.graph, "gram", sums[0], sums[1], bool(layer))

        site = self.sites[self._by_names[use.path]]
        known = {(site.path, layer), (site.path, ())}  # once, though several products read it
        if self._done.isdisjoint(known) and (layer or use.path not in self._layers):
            self.prune(site, layer, statistic)

    def prune(
        self,
        site: Site,
        layer: tuple[tuple[int, int], ...],
        statistic: Callable[[str], Statistic | None],
    ) -> None:
        """Prunes a leaf, or one layer of it, or takes it from the folder.

        Args:
          site: the leaf.
          layer: (axis, index) of each axis that is cut.
          statistic: of what is pruned; it is called with its name, if it is needed.
        """
        number = self._numbers[trees.path_names(site.path)]
        at = tuple(dict(layer).get(axis, slice(None)) for axis in range(self._leaves[number].ndim))
        dense = self._dense[number][at]
        found = self.finished.read(len(self._done), dense) if self.finished else None
        if found is None:
            name = site.name + "".join(f"[{index}]" for _, index in layer)
            found = self._solve(site, dense, len(layer), name, statistic)
            if self.finished:
                self.finished.write(len(self._done), found)
        self._done.add((site.path, layer))
        self._replace(site, number, layer, found)
        for frame in self._frames:
            frame.forget()
        layers = self._layers.setdefault(trees.path_names(site.path), [])
        layers.append(found.report)
        self.report[trees.path_names(site.path)] = LayerReport.of_stack(layers)

    def _replace(
        self, site: Site, number: int, layer: tuple[tuple[int, int], ...], found: Layer
    ) -> None:
        """Puts what was found into a leaf and its mask, in time that does not grow with a stack."""
        if not layer:
            self._leaves[number], self.masks[site.path] = found.weights, found.mask
            return
        if site.path not in self.masks:
            whole = self._leaves[number] = jnp.array(self._leaves[number], copy=True)
            self.masks[site.path] = sharding.place_like(whole, sharding.ones_like(whole))
            self._own.add(number)
        axes, at = zip(*sorted(layer), strict=True)
        self._leaves[number] = _put(self._leaves[number], found.weights, axes, at)
        self.masks[site.path] = _put(self.masks[site.path], found.mask, axes, at)

    def _leaf(self, number: int, *layers: int) -> Any:
        """A leaf as it is now, or a layer of it; later changes do not reach what it returns."""
        whole = self._leaves[number]
        if layers:
            return whole[layers]
        return jnp.copy(whole) if number in self._own else whole

    def _solve(
        self,
        site: Site,
        dense: jax.Array,
        fewer: int,
        name: str,
        statistic: Callable[[str], Statistic | None],
    ) -> Layer:
        """Prunes and refits a leaf, or a layer of it with fewer axes."""
        started = time.perf_counter()
        own = statistic(name)
        if own is None:
            raise ValueError(
                f"No product reads {site.name!r}, which has a sparsity, as a whole, but parts of "
                "it, a while loop, or nothing. Split it, or leave it out of the distribution."
            )
        if not (rows := int(np.max(jax.device_get(own.count)))):
            raise ValueError(
                f"No row of the batches reaches {name!r}: they are empty, or the model takes other "
                "branches. Give batches that reach it, or keep it dense with filter_fn."
            )
        pruner = _for_leaf(self.pruner, site, self.targets[site.path], fewer)
        cut = sharding.spread(dense, (*own.batch, *own.output))  # each device solves a part
        tree = trees.map_matched(lambda path, _: cut if path == site.path else None, self._tree)
        statistics = {trees.path_names(site.path): own}
        first, masks = prune(pruner, tree, statistics)
        last = first
        if self.refit is not None:
            last, masks = reconstruct(self.refit, pruner, tree, first, masks, statistics)
        before, after, mask = (trees.leaves_by_path(x)[site.path] for x in (first, last, masks))
        report = LayerReport(
            sparsity=int(jnp.sum(mask == 0)) / max(mask.size, 1),
            error=float(relative_error(own, cut, after)),
            unrefitted=float(relative_error(own, cut, before)),
            count=rows,
            seconds=time.perf_counter() - started,
        )
        weights, mask = (sharding.place_like(dense, x) for x in (after, mask))
        return Layer(weights, mask, report)


def _shapes(arrays: Sequence[Any]) -> str:
    return ", ".join(f"{jnp.result_type(x)}{list(x.shape)}" for x in arrays)


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _put(whole: jax.Array, part: jax.Array, axes: tuple[int, ...], at: Sequence[int]) -> jax.Array:
    """An array with a part of it replaced, in the same memory.

    Args:
      whole: the array; it is used up.
      part: without the axes.
      axes: ascending.
      at: index of the part along each of them.
    """
    starts = [0] * whole.ndim
    for axis, index in zip(axes, at, strict=True):
        starts[axis] = index
    return lax.dynamic_update_slice(whole, jnp.expand_dims(part, axes).astype(whole.dtype), starts)


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
