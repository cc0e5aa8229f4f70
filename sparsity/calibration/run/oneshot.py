"""`sparsity.oneshot`: pruning of a trained model in one pass over calibration data.

A run visits the blocks of the model in order, holds one, and writes it when it is done: see `walk`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypedDict, Unpack, overload

import chex
import jax
import numpy as np

from sparsity.calibration.refits.block import Batch, BlockRefit
from sparsity.calibration.refits.layers import BiasRefit, Refit
from sparsity.calibration.run.blocks import BlockNameFn, BlockPlan, name_block
from sparsity.calibration.run.dry_run import DryRun
from sparsity.calibration.run.frames import Lane, list_equations, make_frame, make_lanes
from sparsity.calibration.run.prune import check_pruner_and_refit
from sparsity.calibration.run.reached import ReachedWeight, sum_losses, sum_statistic
from sparsity.calibration.run.report import LayerReport, OutputSums, Report, read_metric
from sparsity.calibration.run.task import PrunedLayer, PruningTask, make_task
from sparsity.calibration.run.walk import RunBlock, Walk
from sparsity.calibration.run.weights import (
    LayerIndex,
    ModelWeights,
    Part,
    Place,
    put_parts,
    read_layer,
)
from sparsity.calibration.statistics.capture import calibrate, sum_losses as sum_model_losses
from sparsity.calibration.statistics.row_axes import RowWeights
from sparsity.calibration.store import RunFolder, copy_metadata, digest, open_checkpoint
from sparsity.core import extras, sharding, trees
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

_VERSION = "1"  # of the results: a folder of another version does not continue

ModelFn: TypeAlias = Callable[[PyTree, PyTree], PyTree]  # from params and a batch to outputs
AnyRefit: TypeAlias = Refit | BiasRefit | BlockRefit


class _Keywords(TypedDict, total=False):
    """Keyword arguments of `oneshot` that do not change the type of its results."""

    row_weights: RowWeights | None
    blocks: BlockNameFn | None
    held: Iterable[PyTree] | None
    metric: Callable[[PyTree], chex.Numeric] | None
    donate: bool
    progress: bool


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: PyTree,
    batches: Iterable[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None = ...,
    sequential: bool = ...,
    out: str | os.PathLike[str] | None = ...,
    *,
    dry_run: Literal[True],
    **options: Unpack[_Keywords],
) -> DryRun: ...


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: str | os.PathLike[str],
    batches: Iterable[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None = ...,
    sequential: bool = ...,
    out: str | os.PathLike[str] | None = ...,
    *,
    dry_run: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> tuple[PyTree, Masks, Report]: ...


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: Tree,
    batches: Iterable[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None = ...,
    sequential: bool = ...,
    out: str | os.PathLike[str] | None = ...,
    *,
    dry_run: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> tuple[Tree, Masks, Report]: ...


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: Tree,
    batches: Iterable[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None = ...,
    sequential: bool = ...,
    out: str | os.PathLike[str] | None = ...,
    *,
    dry_run: bool,
    **options: Unpack[_Keywords],
) -> tuple[Tree, Masks, Report] | DryRun: ...


def oneshot(
    pruner: BaseUpdater,
    fn: ModelFn,
    params: Tree,
    batches: Iterable[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None = None,
    sequential: bool = True,
    out: str | os.PathLike[str] | None = None,
    *,
    row_weights: RowWeights | None = None,
    blocks: BlockNameFn | None = None,
    held: Iterable[PyTree] | None = None,
    metric: Callable[[PyTree], chex.Numeric] | None = None,
    donate: bool = False,
    progress: bool = False,
    dry_run: bool = False,
) -> tuple[Tree, Masks, Report] | DryRun:
    """Prunes a trained model by calibration data, block by block.

    Args:
      pruner: any updater that prunes at once.
      fn: the model, `fn(params, batch)`.
      params: a tree of arrays, of objects with `shape`, `dtype` and `[index]` that are read block
        by block, or the path of a checkpoint for `open_checkpoint`.
      batches: second arguments of `fn`, which may differ in shape; a generator is read once.
      refit: `ADMM()`, another `Refit` or `BiasRefit`, `BlockRefit()`, or a pair with the latter.
      sequential: each layer sees outputs of pruned layers; otherwise those of the dense model.
      out: folder to which each finished block is written; the same call continues from there.
      row_weights: function of the batch, or array of its leading axes: rows of 0 count nowhere.
      blocks: `blocks(path)` names the block of a parameter; a step of a scan is always one.
      held: batches for `report.outputs`; by default `batches`, with `()` none.
      metric: `metric(params) -> number`, for `report.outputs` before and after.
      donate: delete arrays of `params` as they are replaced.
      progress: show a bar of the blocks. Needs tqdm.
      dry_run: only return the bytes of each block; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      (pruned params, masks, report) with the errors of parameters, blocks and the model; with `out`
      arrays are read lazily from the folder. Or a `DryRun`.

    Raises:
      ValueError: an argument does not fit, no product reads a parameter that has a sparsity, or
        activations are not finite.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> params, x = jnp.array([[4.0], [1.0]]), jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> oneshot(pruner, lambda params, x: x @ params, params, [x])[0].T
      Array([[4., 0.]], dtype=float32)
    """
    flags = {"sequential": sequential, "donate": donate, "progress": progress, "dry_run": dry_run}
    _check_arguments(pruner, batches, held, metric, out, blocks, flags)
    options = _Options(fn, out, row_weights, blocks or name_block, held, metric, **flags)
    return _start(pruner, params, [*batches], refit, options)


class _Options(NamedTuple):
    """Arguments of `oneshot`, by the names that they have there."""

    fn: ModelFn
    out: str | os.PathLike[str] | None
    row_weights: RowWeights | None
    blocks: BlockNameFn
    held: Iterable[PyTree] | None
    metric: Callable[[PyTree], chex.Numeric] | None
    sequential: bool
    donate: bool
    progress: bool
    dry_run: bool


def _start(
    pruner: BaseUpdater,
    params: PyTree,
    batches: list[PyTree],
    refit: AnyRefit | Sequence[AnyRefit] | None,
    options: _Options,
) -> tuple[PyTree, Masks, Report] | DryRun:
    """Checks what needs no data, traces the model, and runs."""
    matrix_refit, block_refit = _split_refits(refit)
    check_pruner_and_refit(pruner, matrix_refit)
    if not options.sequential and (options.dry_run or block_refit or options.donate):
        raise ValueError(
            "dry_run, donate and BlockRefit need sequential = True, got sequential = False."
        )
    tree = open_checkpoint(params) if isinstance(params, str | os.PathLike) else params
    if not batches:
        raise ValueError("batches has no batch: give at least one.")
    if not options.dry_run:
        remedy = "Call oneshot outside of jit; shapes are enough for dry_run=True."
        check_values("params", tree, remedy)
        check_values("batches", batches, remedy)
    like, leaves = _read_leaves(tree)
    task = make_task(pruner, matrix_refit, options.fn, like, batches[0])
    if options.dry_run:
        plan = BlockPlan(task.make_calibration(), options.blocks)
        return DryRun.measure(task, plan, len(batches), block_refit)
    return _Run(task, block_refit, like, batches, options).run(params, leaves)


class _Bar:
    """A bar of the blocks, with the time that the others will take."""

    def __init__(self, plan: BlockPlan, refit: BlockRefit | None) -> None:
        program = plan.calibration.graph.model.program
        total = plan.count_blocks(program, refit.window if refit else 1)
        self._bar = extras.load("tqdm.auto", "progress").tqdm(
            total=total, desc="oneshot", unit="block"
        )

    def advance(self, text: str) -> None:
        self._bar.set_postfix_str(text)
        self._bar.update(1)
        if self._bar.n >= self._bar.total:
            self._bar.close()


def _split_refits(
    refit: AnyRefit | Sequence[AnyRefit] | None,
) -> tuple[Refit | BiasRefit | None, BlockRefit | None]:
    """Returns the refit of matrices and that of blocks; raises a ValueError for other sequences."""
    refits: list[PyTree] = [*refit] if isinstance(refit, list | tuple) else [refit]
    refits = [x for x in refits if x is not None]
    block_refits = [x for x in refits if isinstance(x, BlockRefit)]
    others = [x for x in refits if not isinstance(x, BlockRefit)]
    if len(block_refits) > 1 or len(others) > 1 or refits[:1] == block_refits != refits:
        raise ValueError(
            "refit takes one refit of matrices, one BlockRefit(), or both in this order, got "
            f"{refit!r}."
        )
    return next(iter(others), None), next(iter(block_refits), None)


def _check_arguments(
    pruner: BaseUpdater,
    batches: object,
    held: object,
    metric: object,
    out: object,
    blocks: object,
    flags: Mapping[str, bool],
) -> None:
    """Raises a ValueError for other types, and if parameters compete with each other."""
    check_pruner_and_refit(pruner)
    if not has_statement(pruner.scope, "per_slice"):
        raise ValueError(
            "oneshot prunes one parameter after the other and needs scope = Layerwise(), got "
            f"{pruner.scope!r}. Prune all of them at once: pruner.instant_sparsify(params, "
            "statistics=statistics). A scope of your own that does not compare parameters says "
            "`per_slice = True`."
        )
    for name, flag in flags.items():
        check_bool(name, flag)
    check_iterable("batches", batches)
    if held is not None:
        check_iterable("held", held)
    check_function("metric", metric, "params", optional=True)
    check_function("blocks", blocks, "path", optional=True)
    check_kind("out", out, str | os.PathLike | None, "a path or None")


def _read_leaves(params: Params) -> tuple[Params, dict[Path, PyTree]]:
    """Returns the tree with shapes in place of lazily read arrays, and all arrays by path."""

    def describe(leaf: PyTree) -> PyTree:
        is_lazy = not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct) and all(
            hasattr(leaf, name) for name in ("shape", "dtype", "__getitem__")
        )
        return jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype) if is_lazy else leaf

    like = jax.tree.map(describe, params)
    kept = jax.tree.map(lambda x, leaf: leaf if trees.is_array(x) else None, like, params)
    return like, trees.leaves_by_names(kept)


@dataclasses.dataclass(eq=False)
class _Run:
    """One pass over a model; the hooks of `Walk`.

    Attributes:
      task: what to prune.
      block_refit: trains blocks, or `None`.
      like: the tree of parameters, with shapes in place of lazily read arrays.
      batches: the batches.
      options: the arguments of `oneshot`.
      reports: reports of the layers that are done, by place.
      blocks: held-out errors of refitted blocks, by name.
    """

    task: PruningTask
    block_refit: BlockRefit | None
    like: Params
    batches: Sequence[PyTree]
    options: _Options
    reports: dict[Place, LayerReport] = dataclasses.field(default_factory=dict)
    blocks: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    lanes: Sequence[Lane] = ()
    folder: RunFolder | None = None
    bar: _Bar | None = None
    weights: ModelWeights = dataclasses.field(init=False)

    def run(self, source: PyTree, leaves: Mapping[Path, PyTree]) -> tuple[PyTree, Masks, Report]:
        """Prunes all parameters, and returns the results of `oneshot`."""
        task, options, held = self.task, self.options, self.options.held
        lanes = make_lanes(task, self.like, self.batches, self.options.row_weights)
        if held is not None and (held := list(held)):
            lanes += make_lanes(task, self.like, held, self.options.row_weights, is_counted=False)
        self.lanes = [lane for lane, _ in lanes]
        if options.out is not None:
            self.folder = self._open_folder(options.out, source, leaves)
        plan = BlockPlan(lanes[0][0].calibration, self.options.blocks)
        donated = plan.list_read_once() if options.donate else ()
        self.weights = weights = ModelWeights(leaves, self.folder, donated)
        self.bar = _Bar(plan, self.block_refit) if options.progress else None
        compares = held is None or bool(held)
        has_dense = compares or self.block_refit is not None
        frames = [make_frame(lane, data, weights.read) for lane, data in lanes]
        dense = [make_frame(lane, data, weights.read_dense) for lane, data in lanes]
        window = self.block_refit.window if self.block_refit else 1
        walk = Walk(plan, self, frames, dense if has_dense else [], window, bool(self.block_refit))
        dense_metric = None
        if options.metric is not None:
            dense_metric = read_metric(options.metric, weights.load(self.like))
        if not options.sequential:
            self._prune_at_once()
        if options.sequential or compares:
            walk.run()
        self._check_all_done()
        sums = OutputSums()
        if compares:
            walk.compare_outputs(held is None, sums.add)
        return self._finish(sums, dense_metric)

    def _open_folder(
        self,
        out: str | os.PathLike[str],
        source: PyTree,
        leaves: Mapping[Path, PyTree],
    ) -> RunFolder:
        """Returns the folder of the run."""
        task, named = self.task, {trees.join_names(path): x for path, x in leaves.items()}
        if len(named) < len(leaves):
            raise ValueError("out: two parameters have one name when '/' joins their paths.")
        fields = dict(vars(task.pruner))
        for name in ("sparsity_distribution_fn", "sparsity_type", "batch_axes"):
            fields.pop(name, None)
        sites = [(path, repr(x.pattern), x.batch_axes) for path, x in task.sites.items()]
        identity = {
            "pruner": digest((type(task.pruner).__qualname__, fields)),
            "refit": digest((task.refit, self.block_refit)),
            "sparsities": digest((sites, [np.asarray(task.targets[path]) for path in task.sites])),
            "params": digest(named),
            "batches": digest([trees.split_arrays(batch)[0] for batch in self.batches]),
            "row_weights": digest(self.options.row_weights),
            "model": digest(list_equations(task.graph.model.program)),
            "sequential": str(self.options.sequential),
            "version": f"{_VERSION}, jax {jax.__version__}",
        }
        folder = RunFolder(out, identity, named, [*map(trees.join_names, task.sites)])
        copy_metadata(source, out)
        return folder

    # Hooks of the walk.

    def is_done(self, path: Path, index: LayerIndex) -> bool:
        """Returns whether a weight is done: several readers prune it only once."""
        return path not in self.task.sites or any(
            place[0] == path and (place[1] == index or () in (place[1], index))
            for place in self.reports
        )

    def on_start(self, name: str) -> None:
        """Takes over a block that an earlier call has written."""
        record = self.folder.done.get(name) if self.folder else None
        if record is not None:
            places = [((*path,), tuple(map(tuple, index))) for path, index in record["places"]]
            reports = [LayerReport(**fields) for fields in record["reports"]]
            self.reports.update(zip(places, reports, strict=True))
            self.weights.mark_committed([((*p,), tuple(map(tuple, i))) for p, i in record["parts"]])
            if record["refit"]:
                self.blocks[name] = record["refit"][0], record["refit"][1]

    def on_weight(self, path: Path, index: LayerIndex, places: Sequence[ReachedWeight]) -> None:
        """Prunes a parameter, or one of its layers, by its inputs at the places that read it."""
        started, task = time.perf_counter(), self.task
        statistic = sum_statistic(places, task.name_layer(path, index))
        calibration = places[0].frame.lane.calibration
        statistic = calibration.add_multiplier(statistic, path, self.weights.read, dict(index))
        dense = self.weights.read_place(path, index)
        layer = task.prune_layer(dense, path, index, statistic)
        if not task.needs.has_grams:
            losses = sum_losses(places, *layer.list_weights_and_losses())
            layer = layer._replace(output_squares=losses)
        self._take_layer(path, index, layer, started)
        self.weights.forget()

    def _take_layer(
        self, path: Path, index: LayerIndex, layer: PrunedLayer, started: float
    ) -> None:
        """Puts a pruned layer in its place, and shifts its bias if the refit does so."""
        self.reports[path, index] = layer.make_report(started)
        dense = self.weights.read_place(path, index)
        weights, mask = (sharding.place_like(dense, x) for x in (layer.weights, layer.mask))
        bias = self.task.find_bias(path, index)
        if bias is not None:
            array = read_layer(self.weights.read(bias[0]), bias[1])
            shifted = self.task.shift_bias(path, array, layer, self.weights.read)
            self.weights.parts[bias] = Part(shifted)
        self.weights.parts[path, index] = Part(weights, mask)

    def on_block(self, block: RunBlock) -> bool:
        """Refits a block, writes its parts, and returns whether the refit changed them."""
        parts, errors = self.weights.parts, None
        if self.folder and block.name in self.folder.done:
            self._advance(block)
            return False
        if self.block_refit and any(part.mask is not None for part in parts.values()):
            errors = self.blocks[block.name] = self._refit_block(block, self.block_refit)
        places = [place for place, part in parts.items() if part.mask is not None]
        record = {
            "places": places,
            "parts": [*parts],
            "reports": [dataclasses.asdict(self.reports[place]) for place in places],
            "refit": errors,
        }
        self.weights.commit()
        if self.folder:
            self.folder.commit(block.name, record)
        self._advance(block)
        return errors is not None and errors[1] < errors[0]

    def _advance(self, block: RunBlock) -> None:
        if self.bar is not None:
            self.bar.advance(f"{block.name}, {len(self.batches)} batches")

    def _refit_block(self, block: RunBlock, refit: BlockRefit) -> tuple[float, float]:
        """Trains the weights of a block, and returns its held-out errors before and after."""
        parts, weights = self.weights.parts, self.weights
        counted = [i for i, lane in enumerate(self.lanes) if lane.is_counted]
        requested = dict[Place, None]()

        def record(path: Path, *layers: int) -> jax.Array:
            requested[path, tuple(enumerate(layers))] = None
            return weights.read(path, *layers)

        first = block.list_inputs(counted[0], False)[0]
        jax.eval_shape(functools.partial(block.call, counted[0], record), first)
        trained = {place: part.weights for place, part in parts.items()}
        others = {
            place: weights.read(place[0], *(layer for _, layer in place[1]))
            for place in requested
            if place not in trained
        }
        masks = {place: part.mask for place, part in parts.items() if part.mask is not None}
        for place in [x for x in others if refit.trains(x[0], others[x])]:
            trained[place] = others.pop(place)
        batches = []
        for lane in counted:
            call = functools.partial(_call_block, block, lane)
            values, frame = block.list_output_values(lane), self.lanes[lane]
            inputs = block.list_inputs(lane, refit.inputs == "dense")
            pairs = zip(inputs, block.list_outputs(lane, True), frame.row_weights, strict=True)
            for arrays, targets, row_weights in pairs:
                spread = [frame.spread(value, row_weights) for value in values]
                if row_weights is not None and any(x is None for x in spread):
                    raise ValueError(
                        f"row_weights: the rows of the outputs of the block {block.name!r} cannot "
                        "be told apart. Give weights of the axes that all its outputs have, or no "
                        "BlockRefit."
                    )
                batches.append(Batch(call, arrays, targets, spread))
        result = refit.train(trained, masks, others, batches)
        if not np.isfinite(result.before):
            raise ValueError(
                f"The outputs of the block {block.name!r} are not finite on the held-out batches: "
                "an activation is NaN or infinite. Compute in a wider dtype, or leave these "
                "batches out."
            )
        if result.after < result.before:
            for place, array in result.weights.items():
                mask = parts[place].mask if place in parts else None
                parts[place] = Part(sharding.place_like(trained[place], array), mask)
        return result.before, result.after

    def _prune_at_once(self) -> None:
        """Prunes all parameters by their inputs in the dense model."""
        task, weights, started = self.task, self.weights, time.perf_counter()
        params, kind = weights.make_tree(self.like), task.needs.statistics_kind
        statistics = calibrate(
            task.fn,
            params,
            self.batches,
            kind,
            lambda path, _: path in task.sites,
            row_weights=self.options.row_weights,
        )
        layers = {}
        for path in task.sites:
            layers[path] = task.prune_layer(weights.read_dense(path), path, (), statistics[path])
        if not task.needs.has_grams:
            matrices = {path: layer.list_weights_and_losses() for path, layer in layers.items()}
            losses = sum_model_losses(
                task.fn, params, self.batches, matrices, self.options.row_weights
            )
            layers = {n: x._replace(output_squares=losses[n]) for n, x in layers.items()}
        for path, layer in layers.items():
            self._take_layer(path, (), layer, started)
        weights.commit()

    def _check_all_done(self) -> None:
        """Raises a ValueError if the batches have not reached a parameter."""
        for path, site in self.task.sites.items():
            if not any(place[0] == path for place in self.reports):
                raise ValueError(
                    f"No row of the batches reaches {site.name!r}. Give batches that reach it, or "
                    "keep it dense with filter_fn."
                )

    def _finish(self, sums: OutputSums, dense_metric: float | None) -> tuple[PyTree, Masks, Report]:
        """Returns the results, and closes the folder."""
        by_path: dict[Path, list[LayerReport]] = {}
        for (path, _), layer in self.reports.items():
            by_path.setdefault(path, []).append(layer)
        report = Report({path: LayerReport.combine(x) for path, x in by_path.items()})
        report.blocks = self.blocks
        if self.folder:
            self.folder.finish()
        masks = self.weights.make_masks(self.like, self.task.pruner.use_packed_masks)
        tree, metric = self.weights.make_tree(self.like), None
        if self.options.metric is not None:
            metric = read_metric(self.options.metric, self.weights.load(self.like))
        report.outputs = sums.make_report(dense_metric, metric)
        return tree, masks, report


def _call_block(
    block: RunBlock, lane: int, trained: Mapping[Place, jax.Array], others: PyTree, inputs: PyTree
) -> list[jax.Array]:
    """Returns the outputs of a block with trained weights in their places."""
    parts = {place: Part(array) for place, array in trained.items()}

    def read(path: Path, *layers: int) -> jax.Array:
        def look_up(path: Path, *layers: int) -> jax.Array:
            return others[path, tuple(enumerate(layers))]

        return put_parts(look_up, parts, path, layers)

    return block.call(lane, read, inputs)
