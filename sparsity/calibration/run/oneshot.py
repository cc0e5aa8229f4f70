"""`sparsity.oneshot`: pruning of a trained model in one pass over calibration data.

Each layer sees the outputs of the pruned layers before it. The program runs in lockstep on all
batches up to a product, sums up its inputs, prunes and refits its weight, and continues with the
new weight. Only values that are still needed are kept, so that memory does not grow with depth. If
every device of a mesh holds all of a weight, each device solves some of the outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeAlias, overload

import chex

from sparsity.calibration.refits.base import BiasRefit, Refit
from sparsity.calibration.run.estimate import Estimate, MemoryMeter
from sparsity.calibration.run.lockstep import Lockstep
from sparsity.calibration.run.outputs import compare_outputs
from sparsity.calibration.run.prune import check_pruner_and_refit
from sparsity.calibration.run.reached import ReachedWeight
from sparsity.calibration.run.report import LayerReport, Report
from sparsity.calibration.run.resume import LayerStore, StoredLayer, identify
from sparsity.calibration.run.task import PrunedLayer, PruningTask, make_task
from sparsity.calibration.run.weights import LayerIndex, ModelWeights, read_layer
from sparsity.calibration.statistics.capture import calibrate, sum_losses
from sparsity.calibration.statistics.memory import check_memory
from sparsity.calibration.statistics.statistic import Statistics
from sparsity.core import extras, sharding
from sparsity.core.checks import (
    check_bool,
    check_function,
    check_iterable,
    check_kind,
    check_values,
)
from sparsity.core.trees import Masks, Params, Path, PyTree, Tree
from sparsity.masks import has_statement
from sparsity.training.base_updater import BaseUpdater

ModelFn: TypeAlias = Callable[[PyTree, PyTree], PyTree]  # from params and a batch to outputs


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: Tree,
    batches: Iterable[PyTree],
    refit: Refit | BiasRefit | None = ...,
    sequential: bool = ...,
    folder: str | os.PathLike[str] | None = ...,
    *,
    held: Iterable[PyTree] | None = ...,
    metric: Callable[[PyTree], chex.Numeric] | None = ...,
    progress: bool = ...,
    estimate: Literal[False] = ...,
) -> tuple[Tree, Masks, Report]: ...


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: Tree,
    batches: Iterable[PyTree],
    refit: Refit | BiasRefit | None = ...,
    sequential: bool = ...,
    folder: str | os.PathLike[str] | None = ...,
    *,
    held: Iterable[PyTree] | None = ...,
    metric: Callable[[PyTree], chex.Numeric] | None = ...,
    progress: bool = ...,
    estimate: Literal[True],
) -> Estimate: ...


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: Tree,
    batches: Iterable[PyTree],
    refit: Refit | BiasRefit | None = ...,
    sequential: bool = ...,
    folder: str | os.PathLike[str] | None = ...,
    *,
    held: Iterable[PyTree] | None = ...,
    metric: Callable[[PyTree], chex.Numeric] | None = ...,
    progress: bool = ...,
    estimate: bool,
) -> tuple[Tree, Masks, Report] | Estimate: ...


def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: Tree,
    batches: Iterable[PyTree],
    refit: Refit | BiasRefit | None = None,
    sequential: bool = True,
    folder: str | os.PathLike[str] | None = None,
    *,
    held: Iterable[PyTree] | None = None,
    metric: Callable[[PyTree], chex.Numeric] | None = None,
    progress: bool = False,
    estimate: bool = False,
) -> tuple[Tree, Masks, Report] | Estimate:
    """Prunes a trained model by calibration data, layer by layer.

    Args:
      pruner: any updater that prunes at once: magnitude, Wanda, RIA, SparseGPT, ...
      fn: the model, `fn(params, batch)`.
      params: its parameters, which stay unchanged.
      batches: second arguments of `fn`; if sequential, all of one shape. A generator is read once.
      refit: `ADMM()`, `LeastSquares()`, `Means()`, another `Refit` or `BiasRefit`, or `None`.
      sequential: each layer sees outputs of pruned layers; otherwise those of the dense model.
      folder: saves each layer; the same call continues after an interruption. Needs orbax, and a
        pruner and a refit of numbers, text, arrays, functions, and objects of these.
      held: batches for `report.outputs`; by default `batches`, with `()` none.
      metric: `metric(params) -> number`, for `report.outputs` before and after.
      progress: show a bar of the layers with the time left. Needs tqdm.
      estimate: only return the bytes of a sequential run; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      (pruned params, masks, report): `report[path]` has sparsity and errors of a parameter,
      `report.outputs` those of the model, `report.table()` both; or an `Estimate`.

    Raises:
      ValueError: there are no batches, arrays are traced, activations are not finite, no product
        reads a parameter that has a sparsity, a pattern or the folder does not fit.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"kernel": jnp.array([[4.0], [1.0]])}
      >>> pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> batch = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> pruned, masks, report = oneshot(pruner, lambda p, x: x @ p["kernel"], params, [batch])
      >>> pruned["kernel"].T, round(report[("kernel",)].error, 3)
      (Array([[4., 0.]], dtype=float32), 0.024)
    """
    _check_arguments(pruner, refit, sequential=sequential, progress=progress, estimate=estimate)
    _check_data(batches, held, metric, folder)
    batches = _read_batches(batches, params, may_be_shapes=estimate)
    task = make_task(pruner, refit, fn, params, batches[0])
    if estimate:
        return MemoryMeter(task, batches).estimate()
    identity = functools.partial(identify, task, fn, params, batches, sequential=sequential)
    store = None if folder is None else LayerStore(folder, identity())
    weights = ModelWeights(params, [param.path for param in task.graph.parameters])
    run = _Run(task, weights, batches, store, _show_progress(task, batches) if progress else None)
    report, pruned = run.run(fn, sequential), weights.make_tree()
    report.outputs = compare_outputs(fn, params, pruned, batches if held is None else held, metric)
    return pruned, weights.make_masks(pruner.use_packed_masks), report


def _check_arguments(pruner: BaseUpdater, refit: Refit | BiasRefit | None, **flags: object) -> None:
    """Raises a ValueError for other types, and if parameters compete with each other."""
    check_pruner_and_refit(pruner, refit)
    for name, flag in flags.items():
        check_bool(name, flag)
    if flags["estimate"] and not flags["sequential"]:
        raise ValueError("estimate follows a sequential run, got sequential = False.")
    if not has_statement(pruner.scope, "per_slice"):
        raise ValueError(
            "oneshot prunes one parameter after the other and needs scope = Layerwise(), got "
            f"{pruner.scope!r}. Prune all of them at once: pruner.instant_sparsify(params, "
            "statistics=statistics). A scope of your own that does not compare parameters says "
            "`per_slice = True`."
        )


def _check_data(batches: object, held: object, metric: object, folder: object) -> None:
    """Raises a ValueError for arguments of other types."""
    check_iterable("batches", batches)
    if held is not None:
        check_iterable("held", held)
    check_function("metric", metric, "params", optional=True)
    check_kind("folder", folder, str | os.PathLike | None, "a path or None")


def _read_batches(batches: Iterable[PyTree], params: Params, may_be_shapes: bool) -> list[PyTree]:
    """Returns the batches; raises a ValueError without any, and for arrays without values."""
    if not (batch_list := list(batches)):
        raise ValueError("batches has no batch: give at least one.")
    if not may_be_shapes:
        remedy = "Call oneshot outside of jit; shapes are enough for estimate=True."
        check_values("params", params, remedy)
        check_values("batches", batch_list, remedy)
    return batch_list


def _show_progress(
    task: PruningTask, batches: Sequence[PyTree]
) -> Callable[[Path, LayerIndex], None]:
    """Shows a bar of the layers, and returns the function that advances it by a layer."""
    graph = task.graph
    scanned, shapes = graph.tracker.find_scanned_axes(), graph.parameters.find_shape
    num_layers = {
        path: math.prod(shapes(path)[axis] for axis in scanned.get(path, ())) for path in task.sites
    }
    tqdm = extras.load("tqdm.auto", "progress").tqdm
    bar = tqdm(total=sum(num_layers.values()), desc="oneshot", unit="layer")

    def on_layer_done(path: Path, index: LayerIndex) -> None:
        bar.set_postfix_str(f"{task.sites[path].name}, {len(batches)} batches")
        bar.update(1 if index else num_layers[path])
        if bar.n >= bar.total:
            bar.close()

    return on_layer_done


@dataclasses.dataclass(frozen=True, eq=False)
class _Run:
    """One pass over a model.

    Attributes:
      task: what to prune.
      weights: parameters and masks so far.
      batches: the batches.
      store: the folder of finished layers, if any.
      on_layer_done: is called with the path and the index of each layer that is done.
      reports: reports of the layers that are done, by path and index.
    """

    task: PruningTask
    weights: ModelWeights
    batches: Sequence[PyTree]
    store: LayerStore | None
    on_layer_done: Callable[[Path, LayerIndex], None] | None
    reports: dict[Path, dict[LayerIndex, LayerReport]] = dataclasses.field(default_factory=dict)

    def run(self, fn: ModelFn, sequential: bool) -> Report:
        """Prunes all parameters, those that the model reaches first, and returns their report."""
        if sequential:
            self._follow_model()
        self._finish_others(fn)
        reports = self.reports.items()
        return Report({path: LayerReport.combine([*x.values()]) for path, x in reports})

    def _follow_model(self) -> None:
        """Finishes each parameter, or layer, when a run of the model on all batches reaches it."""
        task, calibration = self.task, self.task.make_calibration()
        if task.needs.has_grams:
            for name, gram in calibration.list_gram_shapes(one_layer=True).items():
                check_memory({name: gram}, task.needs.gram_copies)  # one is held at a time

        def on_reached(path: Path, index: LayerIndex, reached: ReachedWeight) -> None:
            self._finish(path, index, functools.partial(self._prune_reached, path, index, reached))

        Lockstep(calibration, self.batches, self.weights.read, self._is_done, on_reached).run()

    def _prune_reached(self, path: Path, index: LayerIndex, reached: ReachedWeight) -> PrunedLayer:
        """Prunes a parameter, or one layer of it, by its inputs at the place that reads it."""
        task = self.task
        statistic = reached.sum_statistic(task.name_layer(path, index))
        layer = task.prune_layer(self.weights, path, index, statistic)
        if task.needs.has_grams:
            return layer
        return layer._replace(output_squares=reached.sum_losses(*layer.list_weights_and_losses()))

    def _finish_others(self, fn: ModelFn) -> None:
        """Finishes the parameters that are not done, each by its inputs in the present model.

        The model runs for all of them at once, and only if the folder lacks one.
        """
        task, params, batches = self.task, self.weights.make_tree(), self.batches
        paths = [path for path in task.sites if path not in self.reports]

        @functools.cache
        def calibrate_all() -> Statistics:
            kind = task.needs.statistics_kind
            return calibrate(fn, params, batches, kind, lambda path, _: path in paths)

        def prune(path: Path) -> PrunedLayer:
            return task.prune_layer(self.weights, path, (), calibrate_all()[path])

        @functools.cache
        def prune_all() -> dict[Path, PrunedLayer]:
            """Prunes by moments, and sums up the losses in one more run of the model."""
            layers = {path: prune(path) for path in paths}
            matrices = {path: layer.list_weights_and_losses() for path, layer in layers.items()}
            losses = sum_losses(fn, params, batches, matrices)
            return {path: layers[path]._replace(output_squares=losses[path]) for path in paths}

        for path in paths:
            # Gram matrices of the inputs also give the losses.
            prune_one = prune if task.needs.has_grams else lambda path: prune_all()[path]
            self._finish(path, (), functools.partial(prune_one, path))

    def _finish(
        self, path: Path, index: LayerIndex, prune_layer: Callable[[], PrunedLayer]
    ) -> None:
        """Takes a parameter, or one layer of it, from the folder, or prunes and saves it."""
        bias_place = self.task.find_bias(path, index)
        bias = None
        if bias_place is not None:
            bias = read_layer(self.weights.current[bias_place[0]], bias_place[1])
        dense = read_layer(self.weights.before[path], index)
        num_done = sum(map(len, self.reports.values()))
        stored = self.store.read(num_done, dense, bias) if self.store else None
        if stored is None:
            started = time.perf_counter()
            layer = prune_layer()
            report = layer.make_report(started)
            weights, mask = (sharding.place_like(dense, x) for x in (layer.refitted, layer.mask))
            if bias is not None:
                bias = self.task.shift_bias(path, bias, layer, self.weights)
            stored = StoredLayer(weights, mask, report, bias)
            if self.store:
                self.store.write(num_done, stored)
        if bias_place is not None and stored.bias is not None:
            self.weights.replace(*bias_place, stored.bias)
        self.weights.replace(path, index, stored.weights)
        self.weights.replace_mask(path, index, stored.mask)
        self.reports.setdefault(path, {})[index] = stored.report
        if self.on_layer_done is not None:
            self.on_layer_done(path, index)

    def _is_done(self, path: Path, index: LayerIndex) -> bool:
        """Returns whether a parameter or layer is done: several readers prune it only once."""
        reports = self.reports.get(path, {})
        return index in reports or () in reports or (not index and bool(reports))
