"""Describes a one-shot run, and solves one parameter, or one of its layers, at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.rates import Rates
from sparsity.calibration.refits.layers import BiasRefit, Refit, holds_outputs
from sparsity.calibration.run.prune import combine_kinds, method_name, prune_and_refit
from sparsity.calibration.run.report import LayerReport
from sparsity.calibration.run.weights import LayerIndex
from sparsity.calibration.statistics.alignment import describe_function, meets_data
from sparsity.calibration.statistics.capture import Calibration
from sparsity.calibration.statistics.grams import output_error, ratio, squared_means
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.sums import StatisticsKind
from sparsity.calibration.statistics.validation import is_finite, warn_of_zeros
from sparsity.core import sharding, trees
from sparsity.core.checks import check_kind, warn
from sparsity.core.trees import Params, Path, PyTree
from sparsity.graph import Bias, Graph, trace
from sparsity.masks import Site
from sparsity.patterns import SparsityType
from sparsity.patterns.base import absolute_axis
from sparsity.training.base_updater import BaseUpdater


class PrunedLayer(NamedTuple):
    """Pruned and refitted parameter, or one of its layers.

    Attributes:
      statistic: the statistic of its inputs.
      dense: the weights that the product reads before pruning, cut along a mesh.
      pruned: those after the pruner.
      refitted: those after the refit.
      weights: the parameter after the refit.
      mask: uint8.
      keeps_means: whether a bias restores the means of the outputs, which pruning changes.
      output_squares: float[2 or 3], the sum of the squared outputs of each matrix of
        `list_weights_and_losses`; `None` if the Gram matrices of the statistic give the sums.
    """

    statistic: Statistic
    dense: jax.Array
    pruned: jax.Array
    refitted: jax.Array
    weights: jax.Array
    mask: jax.Array
    keeps_means: bool = False
    output_squares: jax.Array | None = None

    def make_report(self, started: float) -> LayerReport:
        """Returns the report of the parameter, which took the time since then."""
        shares = jax.device_get(sharding.call_replicated(_compute_lost_shares, self))
        mask = np.asarray(jax.device_get(self.mask))
        return LayerReport(
            sparsity=(mask.size - np.count_nonzero(mask)) / max(mask.size, 1),
            count=find_max_rows(self.statistic),
            seconds=time.perf_counter() - started,
            **{name: float(share) for name, share in shares.items()},
        )

    def list_weights_and_losses(self) -> list[jax.Array]:
        """Returns the dense weights, and the losses after and before a refit, as matrices.

        A loss is the dense weights less the kept ones; without a refit there is one loss.
        """
        unrefitted = () if self.pruned is self.refitted else (self.pruned,)
        losses = (self.dense - x for x in (self.refitted, *unrefitted))
        return [self.statistic.to_matrices(x) for x in (self.dense, *losses)]


@dataclasses.dataclass(frozen=True)
class PruningTask:
    """Describes the parameters of a run, their target sparsities, and the methods that solve them.

    Attributes:
      pruner: the updater.
      refit: corrects the kept weights, or biases; `None` for no correction.
      graph: the graph of the model.
      sites: sites of the parameters to prune, by path.
      targets: sparsities of these parameters, by path.
      kind: the kind of statistics that pruner and refit need.
      biases: the biases that a `BiasRefit` changes, by path of the parameter.
      fn: the model.
      like: the tree of parameters, with shapes in place of lazily read arrays.
    """

    pruner: BaseUpdater
    refit: Refit | BiasRefit | None
    graph: Graph
    sites: Mapping[Path, Site]
    targets: Mapping[Path, float]
    kind: StatisticsKind
    biases: Mapping[Path, Bias]
    fn: Callable[[PyTree, PyTree], PyTree]
    like: Params

    def make_calibration(self, graph: Graph | None = None) -> Calibration:
        """Returns the sums of the inputs of all parameters to prune, in this or another graph."""
        chooses = self.sites.__contains__
        return Calibration(graph or self.graph, self.kind, lambda path, _: chooses(path))

    def name_layer(self, path: Path, index: LayerIndex) -> str:
        """Returns the name of a parameter, or of one of its layers."""
        return self.sites[path].name + "".join(f"[{layer}]" for _, layer in index)

    def prune_layer(
        self, dense: jax.Array, path: Path, index: LayerIndex, statistic: Statistic
    ) -> PrunedLayer:
        """Prunes and refits a parameter, or one of its layers, by the statistic of its inputs.

        Raises:
          ValueError: the statistic has no rows, or the pattern does not fit the layer.
        """
        if not find_max_rows(statistic):
            raise ValueError(
                f"No row of the batches reaches {self.name_layer(path, index)!r}: they are empty, "
                "of weight 0, or the model takes other branches. Give batches that reach it, or "
                "keep it dense with filter_fn."
            )
        if not is_finite(dense):
            raise ValueError(
                f"{self.name_layer(path, index)!r} has weights that are NaN or infinite. Repair "
                "the checkpoint, or keep the parameter dense with filter_fn."
            )
        warn_of_zeros(statistic, self.sites[path].name)
        site = self._make_layer_site(path, index, dense.ndim + len(index))
        target = self.targets[path]
        if np.ndim(target):
            target = np.asarray(target)[tuple(layer for _, layer in sorted(index))]
        pruner = dataclasses.replace(
            self.pruner,
            sparsity_distribution_fn=Rates({path: target}),
            sparsity_type=site.pattern,
            batch_axes=site.batch_axes,
            use_packed_masks=False,
        )
        # Each device solves a part of the outputs.
        placed = sharding.shard_along(dense, (*statistic.batch, *statistic.output))
        tree = trees.map_matched(lambda x, _: placed if x == site.key_path else None, self.like)
        refit = None if isinstance(self.refit, BiasRefit) else self.refit
        results = prune_and_refit(pruner, tree, {path: statistic}, refit, [site.key_path])
        pruned, weights, mask = (trees.leaves_by_path(x)[site.key_path] for x in results)
        dense, read_pruned = statistic.read_weights(placed), statistic.read_weights(pruned)
        refitted = read_pruned if weights is pruned else statistic.read_weights(weights)
        statistic, keeps_means = statistic.for_scaled_weights(), path in self.biases
        return PrunedLayer(statistic, dense, read_pruned, refitted, weights, mask, keeps_means)

    def find_bias(self, path: Path, index: LayerIndex) -> tuple[Path, LayerIndex] | None:
        """Returns the bias of a parameter, and its layer of the same index."""
        if path not in self.biases:
            return None
        bias = self.biases[path].path
        axes = self.graph.tracker.find_scanned_axes().get(bias, ())
        return bias, tuple((axis, layer) for axis, (_, layer) in zip(axes, index, strict=False))

    def _make_layer_site(self, path: Path, index: LayerIndex, ndim: int) -> Site:
        """Returns the site of a parameter of `ndim` axes, or of one of its layers.

        Raises:
          ValueError: units of the pattern lie along an axis of layers.
        """
        site = self.sites[path]

        def shift_axis(axis: int) -> int:
            return axis - sum(removed < axis for removed, _ in index)

        batch_axes = shift_axis(site.batch_axes)

        def renumber(axis: int) -> int:
            axis = absolute_axis(axis, site.batch_axes, ndim)
            if axis in dict(index):
                raise ValueError(
                    f"{site.pattern} of {site.name!r} lies along axis {axis}, whose layers are "
                    "pruned one after the other. Give another axis."
                )
            return shift_axis(axis) - batch_axes

        pattern = site.pattern.renumber_axes(renumber) if index else site.pattern
        label = f"{site.pattern}.renumber_axes of {site.name!r}"
        check_kind(label, pattern, SparsityType, "a pattern")
        return Site(site.key_path, pattern, batch_axes)


def make_task(
    pruner: BaseUpdater,
    refit: Refit | BiasRefit | None,
    fn: Callable[[PyTree, PyTree], PyTree],
    params: Params,
    batch: PyTree,
) -> PruningTask:
    """Traces a model, and finds the parameters to prune.

    Raises:
      ValueError: a parameter to prune can have no statistic.
    """
    kind = combine_kinds(pruner, refit)
    graph, table = trace(fn, params, batch), pruner.sites(params)
    targets = trees.leaves_by_path(pruner.compute_targets(params, table))
    sites = {trees.path_names(path): table[path] for path in targets}
    uses = Calibration(graph, kind, lambda path, _: path in sites).uses.values()
    summed = {use.path for use in uses}
    if unread := _list_unread_in_stacks(pruner, graph, {*sites} - summed):
        names = [site.name for path, site in sites.items() if path in unread]
        warn(
            f"oneshot leaves {trees.listed(names)} dense: no product reads these parameters of "
            "scanned layers. Choose parameters with filter_fn=graph.is_weight."
        )
        sites = {path: site for path, site in sites.items() if path not in unread}
    for path, site in sites.items():
        if path not in summed:
            raise ValueError(_explain_unread(graph, path, site.name))
    return PruningTask(
        pruner,
        refit,
        graph,
        sites,
        targets={path: targets[site.key_path] for path, site in sites.items()},
        kind=kind,
        biases=_find_biases(refit, graph, sites) if isinstance(refit, BiasRefit) else {},
        fn=fn,
        like=params,
    )


def _list_unread_in_stacks(pruner: BaseUpdater, graph: Graph, paths: Collection[Path]) -> set[Path]:
    """Returns the norms and biases of scanned layers that a default filter took for matrices."""
    distribution: PyTree = pruner.sparsity_distribution_fn
    if getattr(distribution, "filter_fn", graph) is not None:
        return set()
    scanned = graph.tracker.find_scanned_axes()
    chosen = getattr(distribution, "custom_sparsity_map", None) or {}
    names = {key if isinstance(key, str) else trees.join_names(key) for key in chosen}
    return {
        path
        for path in paths
        if path in scanned and not graph.tracker.find_products(path)
        if trees.join_names(path) not in names
    }


def _find_biases(refit: BiasRefit, graph: Graph, sites: Mapping[Path, Site]) -> dict[Path, Bias]:
    """Returns the biases of the parameters to prune, and warns of parameters without one."""
    biases = {path: graph.biases[path] for path in sites if path in graph.biases}
    biases = {path: bias for path, bias in biases.items() if holds_outputs(graph, path, bias)}
    if missing := [site.name for path, site in sites.items() if path not in biases]:
        warn(
            f"{method_name(refit)} leaves {trees.listed(missing, len(missing))} as the pruner "
            "does: the model adds no bias of their own to their outputs. A BatchNorm in inference "
            "mode serves if its running mean or its shift is among the params."
        )
    return biases


def _explain_unread(graph: Graph, path: Path, name: str) -> str:
    """Returns the reason why a parameter can have no statistic."""
    uses = [use for use in graph.uses if use.path == path and use.contracting]
    advice = "or leave it out of the distribution: filter_fn, or custom_sparsity_map={path: None}."
    if any(use.trips is None for use in uses):
        return (
            f"{name!r}, which has a sparsity, is read in a while loop, which says neither how "
            f"often it runs nor what its steps see. Write the loop as a scan, {advice}"
        )
    ragged = [use for use in uses if use.kind == "ragged"]
    if ragged:
        return (
            f"{name!r}, which has a sparsity, is read by {ragged[0].primitive} at "
            f"{ragged[0].source}, whose groups of rows have no statistics of their own. Write "
            f"the groups as a batch axis of einsum, {advice}"
        )
    if others := [use for use in uses if not meets_data(use, graph)]:
        return (
            f"The {others[0].primitive} at {others[0].source} reads {name!r}, which has a "
            "sparsity, behind a function, or without data. Store the array that multiplies the "
            "data as the parameter (casts, and sums and products with what does not depend on it, "
            f"may stay), {advice}"
        )
    if len({describe_function(use, graph) for use in uses}) > 1:
        return (
            f"Products read {name!r}, which has a sparsity, behind different functions: "
            f"{trees.listed(sorted({use.source for use in uses}))}. Give each a parameter of its "
            f"own, {advice}"
        )
    reader = f" ({uses[0].primitive} at {uses[0].source})" if uses else ""
    return (
        f"No product reads {name!r}, which has a sparsity, as a whole{reader}: it is read in "
        "parts, joined with others, in another shape, behind a function, or not at all. Store it "
        f"as its products read it, {advice}"
    )


@jax.jit
def _compute_lost_shares(layer: PrunedLayer) -> dict[str, jax.Array]:
    """Returns the lost shares of the outputs of a parameter, by field of `LayerReport`."""
    statistic, dense = layer.statistic, layer.dense
    leaves = dense - layer.refitted, dense
    if layer.output_squares is None:
        lost, total = (output_error(statistic, x).sum() for x in leaves)
        unrefitted = output_error(statistic, dense - layer.pruned).sum()
    else:
        total, lost, *_ = layer.output_squares
        unrefitted = layer.output_squares[-1]
    lost_mean, total_mean = (squared_means(statistic, x).sum() for x in leaves)
    centred_lost, centred_total = (lost - lost_mean).clip(0), total - total_mean
    # A variance within some eps of the total is rounding.
    exceeds_rounding = centred_total > 16 * jnp.finfo(total.dtype).eps * total
    uncorrected = jnp.where(layer.keeps_means, centred_lost, lost)
    return {
        "error": ratio(uncorrected, total),
        "unrefitted": ratio(unrefitted, total),
        "centred": ratio(centred_lost, centred_total * exceeds_rounding),
    }


def find_max_rows(statistic: Statistic) -> int:
    """Returns the largest number of rows of a slice."""
    return int(np.max(np.asarray(statistic.count)))
