"""`sparsity.oneshot`: pruning of a trained model in one pass over calibration data.

A run visits the blocks of the model in order, holds one, and writes it when it is done: see `walk`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypedDict, Unpack, overload

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

from sparsity.calibration.refits.block import BlockRefit
from sparsity.calibration.refits.layers import BiasRefit, Refit
from sparsity.calibration.run.block_refit import refit_block
from sparsity.calibration.run.blocks import BlockNameFn, BlockPlan, name_block
from sparsity.calibration.run.dry_run import DryRun
from sparsity.calibration.run.frames import Lane, make_frame, make_lanes
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
    overlaps,
    read_layer,
)
from sparsity.calibration.statistics.capture import calibrate, sum_losses as sum_model_losses
from sparsity.calibration.statistics.row_axes import RowWeights
from sparsity.calibration.store import (
    RunFolder,
    copy_metadata,
    describe_program,
    digest,
    open_checkpoint,
)
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
        window = block_refit.window if block_refit else 1
        plan = BlockPlan(task.make_calibration(), options.blocks, window)
        return DryRun.measure(task, plan, len(batches), block_refit)
    names = {path: options.blocks(path) for path in task.sites}
    for path, name in names.items():
        check_kind(f"blocks({path!r})", name, str, "the name of a block")
    if block_refit:
        block_refit.check(leaves)
    return _Run(task, block_refit, batches, options, names).run(params, leaves)


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
    for name, value in {"batches": batches, "held": () if held is None else held}.items():
        check_iterable(name, value)
        if isinstance(value, str | bytes | Mapping):
            raise ValueError(f"{name} must be a list or an iterator of batches, got {value!r}.")
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
      batches: the batches.
      options: the arguments of `oneshot`.
      names: the name of the block of each parameter to prune.
      reports: reports of the layers that are done, by place.
      blocks: held-out errors of refitted blocks, by name.
    """

    task: PruningTask
    block_refit: BlockRefit | None
    batches: Sequence[PyTree]
    options: _Options
    names: Mapping[Path, str]
    reports: dict[Place, LayerReport] = dataclasses.field(default_factory=dict)
    blocks: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    lanes: Sequence[Lane] = ()
    folder: RunFolder | None = None
    bar: PyTree = None  # of tqdm
    weights: ModelWeights = dataclasses.field(init=False)
    is_stale: bool = False  # whether a weight was read before it was pruned
    _reads: dict[Path, dict[tuple[int, ...], int]] = dataclasses.field(default_factory=dict)
    _block: int = 0  # the number of the block that runs

    def run(self, source: PyTree, leaves: Mapping[Path, PyTree]) -> tuple[PyTree, Masks, Report]:
        """Prunes all parameters, and returns the results of `oneshot`."""
        task, options, held = self.task, self.options, self.options.held
        lanes = make_lanes(task, self.batches, options.row_weights)
        if held is not None and (held := list(held)):
            lanes += make_lanes(task, held, options.row_weights, is_counted=False)
        self.lanes = [lane for lane, _ in lanes]
        if options.out is not None:
            self.folder = self._open_folder(options.out, source, leaves)
        window = self.block_refit.window if self.block_refit else 1
        plan = BlockPlan(lanes[0][0].calibration, self.options.blocks, window)
        owners = Counter(map(id, leaves.values()))
        donated = [x for x in plan.list_read_once() if options.donate and owners[id(leaves[x])] < 2]
        self.weights = weights = ModelWeights(leaves, self.folder, donated)
        if options.progress:
            total = plan.count_blocks(task.graph.model.program)
            tqdm = extras.load("tqdm.auto", "progress").tqdm
            self.bar = tqdm(total=total, desc="oneshot", unit="block")
        compares = held is None or bool(held)
        has_dense = compares or self.block_refit is not None
        frames = [make_frame(lane, data, self._read) for lane, data in lanes]
        dense = [make_frame(lane, data, weights.read_dense) for lane, data in lanes]
        walk = Walk(plan, self, frames, dense if has_dense else [], bool(self.block_refit))
        dense_metric = None
        if options.metric is not None:
            dense_metric = read_metric(options.metric, weights.load(task.like))
        if not options.sequential:
            self._prune_at_once()
        if options.sequential or compares:
            with self._explaining():
                walk.run()
        self._check_all_done()
        sums = OutputSums()
        if compares and self.is_stale:
            frames[:] = [make_frame(lane, data, weights.read) for lane, data in lanes]
            Walk(plan, _Rerun(weights), frames, []).run()
        if compares:
            walk.compare_outputs(held is None, sums.add)
        return self._finish(sums, dense_metric)

    def _read(self, path: Path, *layers: int) -> jax.Array:
        """Returns a current parameter, and notes the block that reads it first."""
        self._reads.setdefault(path, {}).setdefault(layers, self._block)
        return self.weights.read(path, *layers)

    def _was_read(self, place: Place, before: int) -> bool:
        """Returns whether a block of a smaller number has read some of a parameter."""
        reads = self._reads.get(place[0], {}).items()
        return any(block < before and overlaps(place, layers) for layers, block in reads)

    def _may_train(self, place: Place) -> bool:
        """Returns whether a parameter without a mask may change with this block."""
        return place[0] not in self.task.sites and not self._was_read(place, self._block)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Adds to an error how to go on."""
        try:
            yield
        except Exception as error:
            if self.folder:
                error.add_note(
                    f"out = {self.options.out} keeps the {len(self.folder.done)} finished blocks: "
                    "the same call continues after them."
                )
            raise

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
        for path, leaf in leaves.items():
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
            if is_key or (path in task.sites and leaf.dtype != canonicalize_dtype(leaf.dtype)):
                raise ValueError(
                    f"out: {trees.join_names(path)!r} is {leaf.dtype}, which a file or jax cannot "
                    "hold. Leave random keys out of the params; cast float64, or set "
                    "jax_enable_x64."
                )
        fields = dict(vars(task.pruner))
        for name in ("sparsity_distribution_fn", "sparsity_type", "batch_axes"):
            fields.pop(name, None)
        sites = [(path, repr(x.pattern), x.batch_axes) for path, x in task.sites.items()]
        identity = {
            "pruner": digest((type(task.pruner).__qualname__, fields)),
            "refit": digest((task.refit, self._describe_refit(leaves))),
            "sparsities": digest((sites, [np.asarray(task.targets[path]) for path in task.sites])),
            "params": digest(named),
            "batches": digest([trees.split_arrays(batch)[0] for batch in self.batches]),
            "row_weights": digest([x.row_weights for x in self.lanes if x.is_counted]),
            "blocks": digest([*self.names.items()]),
            "model": digest(describe_program(task.graph.model.program)),
            "sequential": str(self.options.sequential),
            "version": f"{_VERSION}, jax {jax.__version__}",
        }
        folder = RunFolder(out, identity, named, [*map(trees.join_names, task.sites)])
        if not (folder.done or folder.is_finished):
            copy_metadata(source, out)
        return folder

    def _describe_refit(self, leaves: Mapping[Path, PyTree]) -> PyTree:
        """Returns the fields of the refit of blocks, with the parameters that its filter takes."""
        if self.block_refit is None:
            return None
        return vars(self.block_refit) | {"filter_fn": self.block_refit.check(leaves)}

    # Hooks of the walk.

    def is_done(self, path: Path, index: LayerIndex) -> bool:
        """Returns whether a weight is done: several readers prune it only once."""
        return path not in self.task.sites or any(
            place[0] == path and (place[1] == index or () in (place[1], index))
            for place in self.reports
        )

    def on_start(self, name: str) -> None:
        """Takes over a block that an earlier call has written."""
        self._block += 1
        record = self.folder.done.get(name) if self.folder else None
        if record is not None:
            places = [((*path,), tuple(map(tuple, index))) for path, index in record["places"]]
            reports = [LayerReport(**fields) for fields in record["reports"]]
            self.reports.update(zip(places, reports, strict=True))
            self.weights.mark_committed([((*p,), tuple(map(tuple, i))) for p, i in record["parts"]])
            self.is_stale |= record["is_stale"]
            if record["refit"]:
                self.blocks[name] = record["refit"][0], record["refit"][1]

    def on_weight(self, path: Path, index: LayerIndex, places: Sequence[ReachedWeight]) -> None:
        """Prunes a parameter, or one of its layers, by its inputs at the places that read it."""
        started, task = time.perf_counter(), self.task
        self.is_stale |= self._was_read((path, index), self._block + 1)
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
        if not (self.folder and block.name in self.folder.done):
            if self.block_refit and any(part.mask is not None for part in parts.values()):
                errors = self.blocks[block.name] = refit_block(
                    self.block_refit, block, self.lanes, self.weights, self._may_train
                )
            self._commit(block.name, errors)
        self._advance(block.name)
        return errors is not None and errors[1] < errors[0]

    def _commit(self, name: str, errors: tuple[float, float] | None = None) -> None:
        """Writes the parts of a block, and its errors before and after a refit."""
        parts = self.weights.parts
        places = [place for place, part in parts.items() if part.mask is not None]
        record = {
            "places": places,
            "parts": [*parts],
            "reports": [dataclasses.asdict(self.reports[place]) for place in places],
            "refit": errors,
            "is_stale": self.is_stale,
        }
        self.weights.commit()
        if self.folder:
            self.folder.commit(name, record)

    def _advance(self, name: str) -> None:
        if self.bar is not None:
            self.bar.set_postfix_str(f"{name}, {len(self.batches)} batches")
            self.bar.update(1)

    def _prune_at_once(self) -> None:
        """Prunes all parameters by their inputs in the dense model."""
        task, weights, started = self.task, self.weights, time.perf_counter()
        self.on_start("(all)")
        if self.folder and "(all)" in self.folder.done:
            return
        params, kind = weights.load(task.like), task.needs.statistics_kind
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
        self._commit("(all)")

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
        metric = None
        if self.options.metric is not None:
            metric = read_metric(self.options.metric, self.weights.load(self.task.like))
        report.outputs = sums.make_report(dense_metric, metric)
        if self.folder:
            self.folder.finish(report.to_json())
        if self.bar is not None:
            self.bar.close()
        masks = self.weights.make_masks(self.task.like, self.task.pruner.use_packed_masks)
        return self.weights.make_tree(self.task.like), masks, report


class _Rerun(NamedTuple):
    """Hooks of a walk with weights that are all done."""

    weights: ModelWeights

    def is_done(self, path: Path, index: LayerIndex) -> bool:
        return True

    def on_weight(self, path: Path, index: LayerIndex, places: Sequence[ReachedWeight]) -> None:
        raise AssertionError(path)

    def on_start(self, name: str) -> None:
        pass

    def on_block(self, block: RunBlock) -> bool:
        self.weights.forget()
        return False
