"""One pass over a model: what happens at its weights and blocks, and the results."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

from sparsity.calibration.refits.block import BlockRefit
from sparsity.calibration.refits.layers import BiasRefit
from sparsity.calibration.run.block_refit import refit_block
from sparsity.calibration.run.blocks import BlockNameFn, BlockPlan
from sparsity.calibration.run.frames import Frame, Lane, make_frame, make_lanes
from sparsity.calibration.run.reached import ReachedWeight, sum_losses, sum_statistic
from sparsity.calibration.run.report import LayerReport, OutputSums, Report, read_metric
from sparsity.calibration.run.task import PrunedLayer, PruningTask
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
)
from sparsity.core import extras, sharding, trees
from sparsity.core.trees import Masks, Path, PyTree

_VERSION = "1"  # of the results: a folder of another version does not continue

ModelFn: TypeAlias = Callable[[PyTree, PyTree], PyTree]  # from params and a batch to outputs


class Options(NamedTuple):
    """Arguments of `oneshot`, by the names that they have there."""

    fn: ModelFn
    out: str | os.PathLike[str] | None
    row_weights: RowWeights | None
    blocks: BlockNameFn | None
    held: Iterable[PyTree] | None
    metric: Callable[[PyTree], chex.Numeric] | None
    sequential: bool
    donate: bool
    progress: bool
    dry_run: bool


@dataclasses.dataclass(eq=False)
class Run:
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
    options: Options
    names: Mapping[Path, str]
    reports: dict[Place, LayerReport] = dataclasses.field(default_factory=dict)
    blocks: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    lanes: Sequence[Lane] = ()
    frames: Sequence[Frame] = ()
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
        plan = BlockPlan(lanes[0][0].calibration, self.names, window)
        owners = Counter(map(id, leaves.values()))
        donated = [x for x in plan.list_read_once() if options.donate and owners[id(leaves[x])] < 2]
        self.weights = weights = ModelWeights(leaves, self.folder, donated)
        if options.progress:
            total = plan.count_blocks(task.graph.model.program)
            tqdm = extras.load("tqdm.auto", "progress").tqdm
            self.bar = tqdm(total=total, desc="oneshot", unit="block")
        compares = held is None or bool(held)
        has_dense = compares or self.block_refit is not None
        self.frames = frames = [make_frame(lane, data, self._read) for lane, data in lanes]
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
            self.weights.committed |= {((*p,), tuple(map(tuple, i))) for p, i in record["parts"]}
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
        if task.kind != "gram":
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
            refit, frame = self.task.refit, self.frames[0]
            assert isinstance(refit, BiasRefit)  # others have no biases
            frame.forget_params()
            leaves = array, layer.dense, layer.refitted, layer.statistic
            shifted = refit.shift(self.task.biases[path], *leaves, frame.read_from_params)
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
        params, kind = weights.load(task.like), task.kind
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
        if task.kind != "gram":
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
