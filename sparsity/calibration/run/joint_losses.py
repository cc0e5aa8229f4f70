"""Losses of parameters that are pruned together, by one run of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from sparsity.calibration.statistics.capture import Calibration, collect
from sparsity.calibration.statistics.summing import Steps
from sparsity.core.trees import Path, PyTree
from sparsity.graph import Graph


def sum_losses(
    fn: Callable[..., PyTree],
    params: PyTree,
    batches: Sequence[PyTree],
    matrices: Mapping[Path, Sequence[jax.Array]],
) -> dict[Path, jax.Array]:
    """Returns the sums of |y|^2 over the outputs y that each matrix gives in place of a parameter.

    Args:
      fn: the model.
      params: its parameters.
      batches: the batches.
      matrices: [*batch, outputs, inputs] by path of the parameter.
    """

    def make(graph: Graph) -> Calibration:
        return Calibration(graph, "squares", lambda path, _: path in matrices)

    calibration, sums = collect(fn, params, batches, make, _sum_layer, matrices, stacks=False)
    losses = dict.fromkeys(matrices, jnp.zeros(()))
    for number, each in sums.items():
        losses[calibration.uses[number].path] += each
    return losses


def _sum_layer(
    calibration: Calibration, number: int, x: jax.Array, steps: Steps, matrices: PyTree
) -> jax.Array:
    use = calibration.uses[number]
    layer = tuple(steps[scan] for scan in use.view.scans)
    return calibration.sum_outputs(number, x, steps, [each[layer] for each in matrices[use.path]])
