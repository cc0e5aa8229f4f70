"""`sparsity.oneshot`: pruning of a trained model in one pass over calibration data.

Each layer sees the outputs of the pruned layers before it. The program runs in lockstep on all
batches up to a product, sums up its inputs, prunes and refits its weight, and continues with the
new weight. Only values that are still needed are kept, so that memory does not grow with depth. If
every device of a mesh holds all of a weight, each device solves some of the outputs.
"""

from __future__ import annotations

import functools
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, overload

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.base_updater import BaseUpdater
from sparsity.calibration.pruners import SparseGPTPruning, statistics_kind
from sparsity.calibration.refits import ADMM, LeastSquares, Means, Refit, count_bytes, shift_bias
from sparsity.calibration.run.estimate import Estimate, Meter
from sparsity.calibration.run.lockstep import LayerIndex, Lockstep, Stop
from sparsity.calibration.run.outputs import compare_outputs
from sparsity.calibration.run.prune import check_runs
from sparsity.calibration.run.report import LayerReport, Report
from sparsity.calibration.run.resume import Finished, Layer, identify
from sparsity.calibration.run.solve import Errors, Solved, solve
from sparsity.calibration.statistics import Statistic, Statistics, warn_of_zeros
from sparsity.calibration.statistics.capture import Calibration, Collector, calibrate, collect
from sparsity.calibration.statistics.memory import check_memory
from sparsity.calibration.statistics.rows import Kind, sum_outputs
from sparsity.calibration.statistics.walk import Steps
from sparsity.core import extras, sharding, trees
from sparsity.core.checks import check_bool, check_function, check_iterable, check_kind
from sparsity.core.trees import KeyPath, Path, PyTree
from sparsity.graph import Bias, trace
from sparsity.masks import is_per_slice, pack_masks

# Arrays of the size of a Gram matrix that are held at once, the matrix included.
_GRAMS = {SparseGPTPruning: 5, ADMM: 3, LeastSquares: 2}


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: Callable[..., PyTree],
    params: PyTree,
    batches: Iterable[PyTree],
    refit: Refit | Means | None = None,
    sequential: bool = True,
    folder: str | os.PathLike[str] | None = None,
    *,
    held: Iterable[PyTree] | None = None,
    metric: Callable[[PyTree], chex.Numeric] | None = None,
    progress: bool = False,
    estimate: Literal[False] = False,
) -> tuple[PyTree, PyTree, Report]: ...


@overload
def oneshot(
    pruner: BaseUpdater,
    fn: Callable[..., PyTree],
    params: PyTree,
    batches: Iterable[PyTree],
    refit: Refit | Means | None = None,
    *,
    estimate: Literal[True],
) -> Estimate: ...


def oneshot(
    pruner: BaseUpdater,
    fn: Callable[..., PyTree],
    params: PyTree,
    batches: Iterable[PyTree],
    refit: Refit | Means | None = None,
    sequential: bool = True,
    folder: str | os.PathLike[str] | None = None,
    *,
    held: Iterable[PyTree] | None = None,
    metric: Callable[[PyTree], chex.Numeric] | None = None,
    progress: bool = False,
    estimate: bool = False,
) -> tuple[PyTree, PyTree, Report] | Estimate:
    """Prunes a trained model by calibration data, layer by layer.

    Args:
      pruner: any updater that prunes at once: magnitude, Wanda, RIA, SparseGPT, ...
      fn: the model, `fn(params, batch)`.
      params: its parameters, which stay unchanged.
      batches: second arguments of `fn`, all of one shape; a generator is read once.
      refit: `ADMM()`, `LeastSquares()`, `Means()`, or `None`.
      sequential: each layer sees outputs of pruned layers; otherwise those of the dense model.
      folder: saves each layer; the same call continues after an interruption. Needs orbax, and a
        pruner and a refit of numbers, text, arrays, functions, and objects of these.
      held: batches for `report.outputs`; by default `batches`, with `()` none.
      metric: `metric(params) -> number`, for `report.outputs` before and after.
      progress: show a bar of the layers with the time left. Needs tqdm.
      estimate: only return the bytes of a sequential run; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      (pruned params, masks, report): `report[path]` has sparsity and errors of a leaf,
      `report.outputs` those of the model, `report.table()` both; or an `Estimate`.

    Raises:
      ValueError: there are no batches, activations are not finite, no product reads a leaf that has
        a sparsity, a pattern does not fit, or the folder holds another run; the error names which.

    Example:
      >>> import sparsity
      >>> params = {"kernel": jnp.array([[4.0], [1.0]])}
      >>> pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> batch = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> pruned, masks, report = oneshot(pruner, lambda p, x: x @ p["kernel"], params, [batch])
      >>> pruned["kernel"].T, round(report[("kernel",)].error, 3)
      (Array([[4., 0.]], dtype=float32), 0.024)
    """
    _check_arguments(pruner, refit, sequential=sequential, progress=progress, estimate=estimate)
    run = _Run(pruner, params, refit, fn, _read_data(batches, held, metric, folder))
    if estimate:
        return run.estimate()
    if progress:
        run.show_progress()
    if folder is not None:
        run.keep_in(folder, fn, params, sequential)
    if sequential:
        run.follow()
    run.finish(fn)
    run.compare(fn, held, metric)
    return run.params(), run.all_masks(), run.report


def _check_arguments(pruner: BaseUpdater, refit: Refit | Means | None, **flags: object) -> None:
    """Raises a ValueError for other types, and if leaves of the pruner compete with each other."""
    check_runs(pruner, refit)
    for name, flag in flags.items():
        check_bool(name, flag)
    if flags["estimate"] and not flags["sequential"]:
        raise ValueError("estimate follows a sequential run, got sequential = False.")
    if not is_per_slice(pruner.scope):
        raise ValueError(
            "oneshot prunes one leaf after the other and needs scope = Layerwise(), got "
            f"{pruner.scope!r}. Prune all of them at once: pruner.instant_sparsify(params, "
            "statistics=statistics). A scope of your own that does not compare leaves says "
            "`per_slice = True`."
        )


def _read_data(
    batches: Iterable[PyTree], held: object, metric: object, folder: object
) -> list[PyTree]:
    """Returns the batches; raises a ValueError without any, or for arguments of other types."""
    check_iterable("batches", batches)
    if held is not None:
        check_iterable("held", held)
    check_function("metric", metric, "params", optional=True)
    check_kind("folder", folder, str | os.PathLike | None, "a path or None")
    if not (seen := list(batches)):
        raise ValueError("batches has no batch: give at least one.")
    return seen


class _Losses(Collector):
    """Sums |y|^2 over the outputs of matrices; `arguments` holds the matrices by path."""

    stacks = False

    def sum_up(self, number: int, x: jax.Array, steps: Steps, arguments: PyTree) -> jax.Array:
        use, alignment = self.uses[number], self.alignments[number]
        layer = tuple(steps[scan] for scan in use.view.scans)
        matrices = [each[layer] for each in arguments[use.path]]
        return sharding.replicated(functools.partial(sum_outputs, use, alignment), x, *matrices)


class _Run:
    """One pass over the model: its parameters, masks and report so far."""

    def __init__(
        self,
        pruner: BaseUpdater,
        params: PyTree,
        refit: Refit | Means | None,
        fn: Callable[..., PyTree],
        batches: Sequence[PyTree],
    ) -> None:
        self.pruner, self.refit, self.batches = pruner, refit, batches
        self.graph = trace(fn, params, batches[0])
        self.report = Report()
        self.finished: Finished | None = None
        self.masks: dict[KeyPath, jax.Array] = {}
        self._tree = params
        self._leaves, self._rebuild = trees.split_arrays(params)
        self._dense = list(self._leaves)
        self._numbers = {leaf.path: i for i, leaf in enumerate(self.graph.leaves)}
        table = pruner.sites(params)
        self.targets = trees.leaves_by_path(pruner.target_numbers(params, table))
        self.sites = {trees.path_names(path): table[path] for path in self.targets}
        self._copied: set[int] = set()  # leaves that are changed in place: copies of the user's
        self._done: set[tuple[Path, LayerIndex]] = set()
        self._layers: dict[Path, list[LayerReport]] = {}
        self._advance: Callable[[Path, LayerIndex], None] | None = None  # a progress bar
        self._biases = self._find_biases() if isinstance(refit, Means) else {}
        kind = statistics_kind(pruner)
        if refit is not None and kind != "gram":
            kind = getattr(refit, "statistics_kind", "gram")
        # The means of the inputs, which centred errors need, cost a vector more.
        self._kind: Kind = "moments" if kind == "squares" else kind

    def keep_in(
        self,
        folder: str | os.PathLike[str],
        fn: Callable[..., PyTree],
        params: PyTree,
        sequential: bool,
    ) -> None:
        """Keeps finished layers in a folder."""
        table = [
            (path, site.pattern, site.batch_axes, float(self.targets[site.path]))
            for path, site in self.sites.items()
        ]
        run = {"sequential": sequential, "sparsities": table}
        identity = identify(self.pruner, self.refit, fn, params, self.batches, **run)
        self.finished = Finished(folder, identity)

    def show_progress(self) -> None:
        """Shows a bar of the layers from now on."""
        scanned, shapes = self.graph.tracker.find_scanned_axes(), self.graph.parameters.find_shape
        sizes = {
            path: math.prod(shapes(path)[axis] for axis in scanned.get(path, ()))
            for path in self.sites
        }
        tqdm = extras.load("tqdm.auto", "progress").tqdm
        bar = tqdm(total=sum(sizes.values()), desc="oneshot", unit="layer")

        def advance(path: Path, cut: LayerIndex) -> None:
            bar.set_postfix_str(f"{self.sites[path].name}, {len(self.batches)} batches")
            bar.update(1 if cut else sizes[path])
            if bar.n >= bar.total:
                bar.close()

        self._advance = advance

    def params(self) -> PyTree:
        """Returns the current parameters."""
        return self._rebuild(self._leaves)

    def all_masks(self) -> PyTree:
        """Returns the masks of all leaves."""
        masks = trees.map_matched(lambda path, _: self.masks.get(path), self._tree)
        return pack_masks(masks, self._tree) if self.pruner.use_packed_masks else masks

    def follow(self) -> None:
        """Runs the model on all batches, and prunes each weight when the run reaches it."""
        calibration = Calibration(self.graph, self._kind, self._is_pruned)
        if self._kind == "gram":
            for name, gram in calibration.grams(one_layer=True).items():
                check_memory({name: gram}, copies=self._count_grams())  # one is held at a time
        Lockstep(calibration, self.batches, self._leaf, self._is_done, self._prune_at).run()

    def estimate(self) -> Estimate:
        """Returns the bytes of a sequential run, from shapes alone."""
        calibration = Calibration(self.graph, self._kind, self._is_pruned)
        grams = self._count_grams() if self._kind == "gram" else 0
        solving = count_bytes if isinstance(self.refit, LeastSquares) else None
        return Meter(calibration, self.batches, grams, solving).estimate()

    def _count_grams(self) -> int:
        """Returns the number of arrays of the size of a Gram matrix that a layer needs at once."""
        methods: list[object] = [] if self.refit is None else [self.refit]
        if statistics_kind(self.pruner) == "gram":
            methods.append(self.pruner)
        return max(_GRAMS.get(type(method), max(_GRAMS.values())) for method in methods)

    def finish(self, fn: Callable[..., PyTree]) -> None:
        """Prunes all other leaves, by their inputs in the current model."""
        unpruned, now = [path for path in self.sites if path not in self._layers], self.params()

        @functools.cache
        def statistics() -> Statistics:
            return calibrate(fn, now, self.batches, self._kind, lambda path, _: path in unpruned)

        def solved(path: Path) -> Solved:
            return self._solve(path, (), self.sites[path].name, statistics().get(path))

        def by_grams(path: Path) -> tuple[Solved, Errors]:
            result = solved(path)
            return result, result.errors()

        @functools.cache
        def all_losses() -> dict[Path, tuple[Solved, jax.Array]]:
            """Solves all leaves, and sums up their losses in one run of the model."""
            leaves = {path: solved(path) for path in unpruned}
            matrices = {path: result.matrices() for path, result in leaves.items()}
            make = functools.partial(_Losses, filter_fn=lambda path, _: path in unpruned)
            losses, sums = collect(fn, now, self.batches, make, matrices)
            total = dict.fromkeys(unpruned, jnp.zeros(2))
            for number, each in sums.items():
                total[losses.uses[number].path] += each
            return {path: (result, total[path]) for path, result in leaves.items()}

        def by_outputs(path: Path) -> tuple[Solved, Errors]:
            result, losses = all_losses()[path]
            return result, result.share(losses)

        for path in unpruned:
            measure = by_grams if self._kind == "gram" else by_outputs
            self._prune(path, (), functools.partial(measure, path))

    def compare(
        self,
        fn: Callable[..., PyTree],
        held: Iterable[PyTree] | None,
        metric: Callable[[PyTree], chex.Numeric] | None,
    ) -> None:
        """Reports the errors of the model's outputs on batches, by default those of the run."""
        batches = self.batches if held is None else held
        pruned = self.params()
        self.report.outputs = compare_outputs(fn, self._tree, pruned, batches, metric)

    def _prune_at(self, path: Path, cut: LayerIndex, stop: Stop) -> None:
        """Prunes a leaf, or one layer of it, where the program reaches it."""

        def solved() -> tuple[Solved, Errors]:
            name = self.sites[path].name + "".join(f"[{index}]" for _, index in cut)
            result = self._solve(path, cut, name, stop.statistic(name))
            if self._kind == "gram":
                return result, result.errors()
            return result, result.share(stop.losses(*result.matrices()))

        self._prune(path, cut, solved)

    def _prune(
        self, path: Path, cut: LayerIndex, solved: Callable[[], tuple[Solved, Errors]]
    ) -> None:
        """Prunes a leaf, or one layer of it, or takes it from the folder."""
        number = len(self._done)
        bias = self._find_bias_at(path, cut)
        before = None if bias is None else self._part(self._leaves, *bias)
        dense = self._part(self._dense, path, cut)
        layer = self.finished.read(number, dense, before) if self.finished else None
        if layer is None:
            started = time.perf_counter()
            result, errors = solved()
            report = LayerReport(
                sparsity=_num_zeros(result.mask) / max(result.mask.size, 1),
                **errors._asdict(),
                count=_num_rows(result.statistic),
                seconds=time.perf_counter() - started,
            )
            weights, mask = (sharding.place_like(dense, x) for x in (result.refitted, result.mask))
            after = None if before is None else self._shift(path, before, result)
            layer = Layer(weights, mask, report, after)
            if self.finished:
                self.finished.write(number, layer)
        self._done.add((path, cut))
        self._replace(path, cut, layer)
        if bias is not None and layer.bias is not None:
            self._replace_leaf(*bias, layer.bias)
        layers = self._layers.setdefault(path, [])
        layers.append(layer.report)
        self.report[path] = LayerReport.combine(layers)
        if self._advance is not None:
            self._advance(path, cut)

    def _is_pruned(self, path: Path, _: object) -> bool:
        return path in self.sites

    def _is_done(self, path: Path, cut: LayerIndex) -> bool:
        """Returns whether a leaf or layer is done: several readers prune it only once."""
        return bool({(path, cut), (path, ())} & self._done) or (not cut and path in self._layers)

    def _replace(self, path: Path, cut: LayerIndex, layer: Layer) -> None:
        """Puts a layer into a leaf and its mask, in time that does not grow with a stack."""
        leaf, at = self._replace_leaf(path, cut, layer.weights), self.sites[path].path
        if not cut:
            self.masks[at] = layer.mask
            return
        if at not in self.masks:
            self.masks[at] = sharding.place_like(leaf, sharding.ones_like(leaf))
        axes, places = zip(*sorted(cut), strict=True)
        self.masks[at] = _put(self.masks[at], layer.mask, axes, places)

    def _replace_leaf(self, path: Path, cut: LayerIndex, part: jax.Array) -> jax.Array:
        """Puts a layer into a leaf, and returns the leaf."""
        number = self._numbers[path]
        if not cut:
            self._leaves[number] = part
            return part
        if number not in self._copied:
            self._leaves[number] = jnp.array(self._leaves[number], copy=True)
            self._copied.add(number)
        axes, places = zip(*sorted(cut), strict=True)
        leaf: jax.Array = _put(self._leaves[number], part, axes, places)
        self._leaves[number] = leaf
        return leaf

    def _leaf(self, number: int, *layers: int) -> jax.Array:
        """Returns the current leaf or one of its layers, unaffected by later changes."""
        leaf: jax.Array = self._leaves[number]
        if layers:
            return leaf[layers]
        return jnp.copy(leaf) if number in self._copied else leaf

    def _part(self, leaves: Sequence[jax.Array], path: Path, cut: LayerIndex) -> jax.Array:
        """Returns one of the leaves, or one of its layers."""
        leaf, index = leaves[self._numbers[path]], dict(cut)
        layer: jax.Array = leaf[tuple(index.get(axis, slice(None)) for axis in range(leaf.ndim))]
        return layer

    def _solve(self, path: Path, cut: LayerIndex, name: str, statistic: Statistic | None) -> Solved:
        """Prunes and refits a leaf, or one of its layers."""
        if statistic is None:
            raise ValueError(self._why_unread(path))
        if not _num_rows(statistic):
            raise ValueError(
                f"No row of the batches reaches {name!r}: they are empty, or the model takes other "
                "branches. Give batches that reach it, or keep it dense with filter_fn."
            )
        site, dense = self.sites[path], self._part(self._dense, path, cut)
        warn_of_zeros(statistic, site.name)
        target = self.targets[site.path]
        refit = None if isinstance(self.refit, Means) else self.refit
        solved = solve(self.pruner, refit, site, target, self._tree, dense, cut, statistic)
        return solved._replace(keeps_means=path in self._biases)

    def _find_biases(self) -> dict[Path, Bias]:
        """Returns the biases of the leaves to prune, and warns of leaves without one."""
        dtypes = {leaf.path: leaf.dtype for leaf in self.graph.leaves}
        biases = {path: self.graph.biases[path] for path in self.sites if path in self.graph.biases}
        for path, bias in [*biases.items()]:
            outputs = [
                use.equation.outputs[0].dtype for use in self.graph.tracker.find_products(path)
            ]
            is_complex = any(jnp.issubdtype(x, jnp.complexfloating) for x in outputs)
            if is_complex and not jnp.issubdtype(dtypes[bias.path], jnp.complexfloating):
                del biases[path]  # which would lose the imaginary parts
        if missing := [site.name for path, site in self.sites.items() if path not in biases]:
            warnings.warn(
                f"Means leaves {trees.listed(missing, len(missing))} as the pruner does: the model "
                "adds no bias of their own to their outputs. A BatchNorm in inference mode serves "
                "if its running mean or its shift is among the params.",
                stacklevel=4,
            )
        return biases

    def _find_bias_at(self, path: Path, cut: LayerIndex) -> tuple[Path, LayerIndex] | None:
        """Returns the bias of a leaf, and its layer of the same number."""
        if path not in self._biases:
            return None
        place = self._biases[path].path
        axes = self.graph.tracker.find_scanned_axes().get(place, ())
        return place, tuple((axis, layer) for axis, (_, layer) in zip(axes, cut, strict=False))

    def _shift(self, path: Path, bias: jax.Array, solved: Solved) -> jax.Array:
        """Returns the bias of a leaf that keeps the means of its outputs."""
        read = self.graph.model.reader(
            {leaf.path: array for leaf, array in zip(self.graph.leaves, self._leaves, strict=True)}
        )
        lost = solved.dense, solved.refitted, solved.statistic
        return shift_bias(self._biases[path], bias, *lost, read)

    def _why_unread(self, path: Path) -> str:
        """Returns the reason why a leaf can have no statistic."""
        name = self.sites[path].name
        uses = [use for use in self.graph.uses if use.path == path and use.contracting]
        if any(use.trips is None for use in uses):
            return (
                f"{name!r}, which has a sparsity, is read in a while loop, which says neither how "
                "often it runs nor what its steps see. Write the loop as a scan, or leave the leaf "
                "out of the distribution: filter_fn, or custom_sparsity_map={path: None}."
            )
        ragged = [use for use in uses if use.primitive.startswith("ragged_dot")]
        if ragged:
            return (
                f"{name!r}, which has a sparsity, is read by {ragged[0].primitive} at "
                f"{ragged[0].source}, whose groups of rows have no statistics of their own. Write "
                "the groups as a batch axis of einsum, or leave the leaf out of the distribution: "
                "filter_fn, or custom_sparsity_map={path: None}."
            )
        reader = f" ({uses[0].primitive} at {uses[0].source})" if uses else ""
        return (
            f"No product reads {name!r}, which has a sparsity, as a whole{reader}: it is read in "
            "parts, joined with others, in another shape, or not at all. Store it as its products "
            "read it, or leave it out of the distribution: filter_fn, or custom_sparsity_map={path:"
            " None}."
        )


def _num_zeros(mask: jax.Array) -> int:
    return mask.size - int(np.count_nonzero(jax.device_get(mask)))


def _num_rows(statistic: Statistic) -> int:
    """Returns the largest number of rows of a slice."""
    return int(np.max(np.asarray(statistic.count)))


@functools.partial(jax.jit, static_argnums=2, donate_argnums=0)
def _put(array: jax.Array, part: jax.Array, axes: tuple[int, ...], at: Sequence[int]) -> jax.Array:
    """Replaces a part of an array in the same memory.

    Args:
      array: the array, which is donated.
      part: its new part, without the axes.
      axes: axes that the part lacks, ascending.
      at: index of the part along each of these axes.
    """
    starts = [0] * array.ndim
    for axis, index in zip(axes, at, strict=True):
        starts[axis] = index
    return lax.dynamic_update_slice(array, jnp.expand_dims(part, axes).astype(array.dtype), starts)
