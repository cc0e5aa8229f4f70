"""Pruning and refitting of one parameter, or of one layer of a stack."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from sparsity.base_updater import BaseUpdater
from sparsity.calibration.refits import Refit
from sparsity.calibration.run.prune import prune, reconstruct
from sparsity.calibration.run.weights import LayerIndex
from sparsity.calibration.statistics import (
    Statistic,
    centre,
    errors,
    output_error,
    ratio,
    squared_means,
)
from sparsity.core import host, sharding, trees
from sparsity.core.trees import PyTree
from sparsity.masks import Site
from sparsity.patterns.base import absolute_axis


class Errors(NamedTuple):
    """Lost shares of the outputs of a parameter.

    Attributes:
      error: the share after the refit.
      unrefitted: the share before the refit.
      centred: the share after the refit, without the means of the outputs.
    """

    error: float
    unrefitted: float
    centred: float


class Solved(NamedTuple):
    """Pruned and refitted parameter, or one of its layers.

    Attributes:
      statistic: the statistic of its inputs.
      dense: the weights before pruning, cut along a mesh.
      pruned: the weights after the pruner.
      refitted: the weights after the refit.
      mask: uint8.
      keeps_means: whether a bias takes over the means of the lost outputs.
    """

    statistic: Statistic
    dense: jax.Array
    pruned: jax.Array
    refitted: jax.Array
    mask: jax.Array
    keeps_means: bool = False

    def errors(self) -> Errors:
        """Returns the lost shares of the outputs, by Gram matrices."""
        if self.keeps_means:
            pair = self.dense - self.refitted, self.dense
            losses = [jnp.sum(output_error(self.statistic, x)) for x in pair]
            return self.share(jnp.stack(losses))
        leaves = self.dense, self.refitted, self.pruned
        (after, before), (centred, _) = jax.device_get(_errors(self.statistic, *leaves))
        return Errors(float(after), float(before), float(centred))

    def share(self, losses: jax.Array) -> Errors:
        """Returns the lost shares from the sums of squares of the lost and the dense outputs."""
        shares = jax.device_get(_share(self.statistic, losses, self.dense, self.refitted))
        error, without_means, centred = map(float, shares)
        return Errors(without_means if self.keeps_means else error, error, centred)

    def matrices(self) -> list[jax.Array]:
        """Returns the lost and the dense weights, [*batch, outputs, inputs] each."""
        return _matrices(self.statistic, self.dense, self.refitted)


_errors = host.instead(errors)(jax.jit(errors))


def _lost_and_dense(statistic: Statistic, dense: jax.Array, refitted: jax.Array) -> list[jax.Array]:
    return [statistic.matrices(x) for x in (dense - refitted, dense)]


_matrices = host.instead(_lost_and_dense)(_lost_and_dense)


def _share_sums(
    statistic: Statistic, losses: jax.Array, dense: jax.Array, refitted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns errors of weights from the sums of squares of outputs.

    They are the error, the error if a bias keeps the means of the outputs, and the centred error.
    """
    lost, total = losses
    leaves = dense - refitted, dense
    lost_mean, mean = (squared_means(statistic, param).sum() for param in leaves)
    without_means = ratio((lost - lost_mean).clip(0), total)
    return ratio(lost, total), without_means, centre(lost, lost_mean, total, mean)


_share = host.instead(_share_sums)(jax.jit(_share_sums))


def solve(
    pruner: BaseUpdater,
    refit: Refit | None,
    site: Site,
    target: chex.Numeric,
    tree: PyTree,
    dense: jax.Array,
    cut: LayerIndex,
    statistic: Statistic,
) -> Solved:
    """Prunes and refits a parameter, or one of its layers.

    Args:
      pruner: the updater.
      refit: corrects the kept weights; `None` for no correction.
      site: path, pattern and batch axes of the parameter.
      target: sparsity of the parameter.
      tree: tree of parameters, of which only the structure matters.
      dense: the parameter, or the layer.
      cut: the axes that the layer does not have.
      statistic: the statistic of its inputs.

    Raises:
      ValueError: the pattern does not fit the layer.
    """
    pruner = _for_leaf(pruner, site, target, cut, dense.ndim + len(cut))
    dense = sharding.shard_along(
        dense, (*statistic.batch, *statistic.output)
    )  # a part on each device
    alone = trees.map_matched(lambda path, _: dense if path == site.path else None, tree)
    statistics = {trees.path_names(site.path): statistic}
    first, masks = prune(pruner, alone, statistics)
    last = first
    if refit is not None:
        last, masks = reconstruct(refit, pruner, alone, first, masks, statistics)
    pruned, refitted, mask = (trees.leaves_by_path(x)[site.path] for x in (first, last, masks))
    return Solved(statistic, dense, pruned, refitted, mask)


def _for_leaf(
    pruner: BaseUpdater, site: Site, target: chex.Numeric, cut: LayerIndex, ndim: int
) -> BaseUpdater:
    """Returns the pruner for one parameter, or for one of its layers.

    Raises:
      ValueError: units of the pattern lie along an axis of layers.
    """

    def distribution(params: PyTree) -> PyTree:
        return trees.map_matched(lambda path, _: target if path == site.path else None, params)

    def without(axis: int) -> int:
        return axis - sum(removed < axis for removed, _ in cut)

    pattern: Any = site.pattern
    batch_axes = without(site.batch_axes)
    if cut and (axis := getattr(pattern, "axis", None)) is not None:
        axes = axis if isinstance(axis, tuple) else (axis,)
        axes = tuple(absolute_axis(axis, site.batch_axes, ndim) for axis in axes)
        for axis in axes:
            if axis in dict(cut):
                raise ValueError(
                    f"{pattern} of {site.name!r} lies along axis {axis}, whose layers are pruned "
                    "one after the other. Give another axis, or sequential=False."
                )
        places = tuple(without(axis) - batch_axes for axis in axes)
        pattern = dataclasses.replace(pattern, axis=places if len(places) > 1 else places[0])
    return dataclasses.replace(
        pruner,
        sparsity_distribution_fn=distribution,
        sparsity_type=pattern,
        batch_axes=batch_axes,
        use_packed_masks=False,
    )
