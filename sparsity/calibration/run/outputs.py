"""Errors of a pruned model's outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.refits.block import sum_losses
from sparsity.calibration.run.frames import Frame
from sparsity.core.arrays import promote
from sparsity.core.trees import Params, PyTree


@dataclasses.dataclass(frozen=True)
class OutputReport:
    """Errors of a pruned model's outputs.

    Attributes:
      error: sum of squares of the lost outputs over that of the dense outputs.
      unexplained: the lost sum of squares over that of the dense outputs without their means, one
        mean for each place along the last axis: 0 is no loss, 1 as much as if the model returned
        these means for any input.
      batches: number of batches.
      dense_metric: the user's metric of the dense parameters, `None` without one.
      metric: the user's metric of the pruned parameters, `None` without one.
    """

    error: float
    unexplained: float
    batches: int
    dense_metric: float | None = None
    metric: float | None = None

    def __str__(self) -> str:
        text = (
            f"outputs of the model on {self.batches} batches: error {self.error:.5f}, "
            f"{self.unexplained:.2%} of their variance lost"
        )
        if self.metric is not None:
            text += f"; metric {self.dense_metric:.6g} before, {self.metric:.6g} after"
        return text


class OutputSums:
    """Sums over the outputs of a dense and a pruned model, batch by batch."""

    def __init__(self) -> None:
        self._lost = self._total = 0.0
        self._batches = 0
        # By output and size of the last axis: sums along that axis, and their weights.
        self._sums: dict[tuple[int, int], tuple[np.ndarray, float]] = {}

    def add(
        self, frame: Frame, batch: int, expected: list[jax.Array], returned: list[jax.Array]
    ) -> None:
        """Adds the outputs of a batch.

        Rows count by their weights; outputs without the axes of the weights, as of a model that
        pools its rows, count as they are.
        """
        outputs, weights = frame.program.outputs, frame.lane.row_weights[batch]
        kept = [i for i, y in enumerate(expected) if jnp.issubdtype(y.dtype, jnp.inexact)]
        spread = [frame.lane.spread(outputs[i], weights) for i in kept]
        dense = [expected[i] for i in kept]
        sums = _sum_outputs(dense, [returned[i] for i in kept], spread)
        lost, total, axis_sums = jax.device_get(sums)
        self._lost, self._total = self._lost + float(lost), self._total + float(total)
        self._batches += 1
        for i, (axis_sum, rows) in zip(kept, axis_sums, strict=True):
            before, count = self._sums.get((i, axis_sum.size), (0, 0.0))
            wide = axis_sum.astype(np.result_type(axis_sum, np.float64))
            self._sums[i, axis_sum.size] = before + wide, count + float(rows)

    def make_report(self, dense_metric: float | None, metric: float | None) -> OutputReport | None:
        """Returns the report, `None` without batches and metric."""
        if not self._batches and metric is None:
            return None
        means = sum(
            float(np.sum(np.abs(x) ** 2)) / max(rows, np.finfo(float).tiny)
            for x, rows in self._sums.values()
        )
        variance = max(self._total - means, 0.0)
        return OutputReport(
            error=_divide_losses(self._lost, self._total),
            unexplained=_divide_losses(self._lost, variance),
            batches=self._batches,
            dense_metric=dense_metric,
            metric=metric,
        )


@jax.jit
def _sum_outputs(
    expected: list[jax.Array], returned: list[jax.Array], row_weights: list[jax.Array | None]
) -> tuple[jax.Array, jax.Array, list[tuple[jax.Array, jax.Array]]]:
    """Returns the sums of squares, lost and in total, and sums by last axis with their rows."""
    lost, total = sum_losses(returned, expected, row_weights)
    sums = []
    for y, weights in zip(expected, row_weights, strict=True):
        wide = jnp.atleast_1d(y.astype(promote(y.dtype, jnp.float32)))
        scale = jnp.broadcast_to(1 if weights is None else weights, wide.shape)
        axes = tuple(range(max(wide.ndim - 1, 1)))[: wide.ndim]
        axes = axes if wide.ndim > 1 else ()
        rows = jnp.sum(scale, axis=axes, dtype=jnp.float32)
        sums.append((jnp.sum(wide * scale, axis=axes), jnp.max(rows, initial=0)))
    return lost, total, sums


def read_metric(metric: Callable[[PyTree], chex.Numeric], params: Params) -> float:
    """Returns the number that a metric returns; raises a ValueError for anything else."""
    value = metric(params)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric must return a number, got metric(params) = {value!r}.") from error


def _divide_losses(lost: float, total: float) -> float:
    """Returns a quotient; nothing lost is 0, something of nothing is infinite."""
    if lost == 0:
        return 0.0
    return lost / total if total else float("inf")
