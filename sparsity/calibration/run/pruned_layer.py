"""A pruned and refitted parameter, or one layer of a stack, and the shares of outputs it lost."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.run.report import LayerReport
from sparsity.calibration.statistics.errors import output_error, ratio, squared_means
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.core import host


class PrunedLayer(NamedTuple):
    """Pruned and refitted parameter, or one of its layers.

    Attributes:
      statistic: the statistic of its inputs.
      dense: the weights before pruning, cut along a mesh.
      pruned: the weights after the pruner.
      refitted: the weights after the refit.
      mask: uint8.
      keeps_means: whether a bias takes over the means of the lost outputs.
      losses: sums of squares of the lost and the dense outputs; `None` if the Gram matrices of the
        statistic have them.
    """

    statistic: Statistic
    dense: jax.Array
    pruned: jax.Array
    refitted: jax.Array
    mask: jax.Array
    keeps_means: bool = False
    losses: jax.Array | None = None

    def report(self) -> LayerReport:
        """Returns the report of the parameter, of 0 seconds."""
        leaves = self.dense, self.refitted, self.pruned
        shares = jax.device_get(_lost_shares(self.statistic, self.losses, *leaves))
        error, without_means, unrefitted, centred = map(float, shares)
        mask = np.asarray(jax.device_get(self.mask))
        return LayerReport(
            sparsity=(mask.size - np.count_nonzero(mask)) / max(mask.size, 1),
            error=without_means if self.keeps_means else error,
            unrefitted=unrefitted,
            count=count_rows(self.statistic),
            seconds=0.0,
            centred=centred,
        )

    def matrices(self) -> list[jax.Array]:
        """Returns the lost and the dense weights, [*batch, outputs, inputs] each."""
        dense, refitted = host.read((self.dense, self.refitted))
        return [self.statistic.matrices(x) for x in (dense - refitted, dense)]


def _compute_shares(
    statistic: Statistic,
    losses: jax.Array | None,
    dense: jax.Array,
    refitted: jax.Array,
    pruned: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns lost shares of the outputs of a parameter.

    They are the error, the error if a bias keeps the means of the outputs, the error before the
    refit, and the centred error. Without Gram matrices nothing is refitted.
    """
    leaves = dense - refitted, dense
    if losses is None:
        lost, total = (output_error(statistic, x).sum() for x in leaves)
        before = output_error(statistic, dense - pruned).sum()
    else:
        lost, total = losses
        before = lost
    lost_mean, mean = (squared_means(statistic, x).sum() for x in leaves)
    lost_spread, spread = (lost - lost_mean).clip(0), total - mean
    is_seen = spread > 16 * jnp.finfo(total.dtype).eps * total  # else rounding hides the variance
    centred = ratio(lost_spread, spread * is_seen)
    return ratio(lost, total), ratio(lost_spread, total), ratio(before, total), centred


_lost_shares = host.instead(_compute_shares)(jax.jit(_compute_shares))


def count_rows(statistic: Statistic) -> int:
    """Returns the largest number of rows of a slice."""
    return int(np.max(np.asarray(statistic.count)))
