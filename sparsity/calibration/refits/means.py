"""Means: biases take over what pruned weights added to the outputs on average."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from sparsity.calibration.statistics.errors import mean_outputs
from sparsity.calibration.statistics.row_sums import StatisticsKind
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.core import sharding
from sparsity.core.trees import Path
from sparsity.graph import Bias, Graph
from sparsity.programs.program import Value


@dataclasses.dataclass(frozen=True)
class Means:
    """Adds the means of the lost outputs to biases: the cheapest refit, for `refit=` of `oneshot`.

    The bias of a layer becomes b + (W - W_pruned) mean(x), so that pruning keeps the mean of each
    output. Weights stay as the pruner leaves them, and no Gram matrix is needed. A BatchNorm in
    inference mode that follows a layer serves as well: its running mean, if that is among the
    params, or its shift, times the scale before. Parameters without either are pruned and named in
    a warning.

    `ADMM` and `LeastSquares` gain more; `Means` costs one product with a vector, and suits networks
    of one-sided activations.

    Example:
      >>> import sparsity
      >>> params = {"kernel": jnp.array([[4.0], [1.0]]), "bias": jnp.zeros(1)}
      >>> pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> batch = jnp.array([[1.0, 2.0], [1.0, 4.0]])
      >>> model = lambda p, x: x @ p["kernel"] + p["bias"]
      >>> pruned, _, _ = sparsity.oneshot(pruner, model, params, [batch], refit=Means())
      >>> pruned["kernel"].T, pruned["bias"]  # the mean of the lost input is 3
      (Array([[4., 0.]], dtype=float32), Array([3.], dtype=float32))
    """

    statistics_kind: ClassVar[StatisticsKind] = "moments"

    def shift(
        self,
        place: Bias,
        bias: jax.Array,
        dense: jax.Array,
        pruned: jax.Array,
        statistic: Statistic,
        read: Callable[[Value], jax.Array],
    ) -> jax.Array:
        """Returns the bias that keeps the means of the outputs, as `BiasRefit.shift` says."""

        def add(
            bias: jax.Array, lost: jax.Array, statistic: Statistic, *scales: jax.Array
        ) -> jax.Array:
            return place.shift(bias, mean_outputs(statistic, lost), scales)

        scales = [read(scale.value) for scale in place.scales]
        return sharding.place_like(
            bias, sharding.shard_like(bias, add, bias, dense - pruned, statistic, *scales)
        )


def holds_outputs(graph: Graph, path: Path, bias: Bias) -> bool:
    """Returns whether a bias can hold outputs: a real one would lose their imaginary parts."""
    outputs = [use.equation.outputs[0].dtype for use in graph.tracker.find_products(path)]
    (dtype,) = (param.dtype for param in graph.parameters if param.path == bias.path)
    is_complex = [jnp.issubdtype(x, jnp.complexfloating) for x in (dtype, *outputs)]
    return is_complex[0] or not any(is_complex)
