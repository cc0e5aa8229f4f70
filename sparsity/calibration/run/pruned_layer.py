"""A pruned and refitted parameter, or one layer of a stack, and the shares of outputs it lost."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsity.calibration.statistics import (
    Statistic,
    centre,
    errors,
    output_error,
    ratio,
    squared_means,
)
from sparsity.core import host


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


class PrunedLayer(NamedTuple):
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
