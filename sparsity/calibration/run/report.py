"""Reports of one-shot pruning: the errors of parameters, of blocks and of the model's outputs."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.rates import Rates, Sensitivity
from sparsity.calibration.refits.block import sum_losses
from sparsity.calibration.run.prune import check_pruner_and_refit, prune, read_kind
from sparsity.calibration.statistics.capture import calibrate
from sparsity.core import extras, trees
from sparsity.core.arrays import promote
from sparsity.core.checks import check_fraction, check_iterable
from sparsity.core.extras import DARK, LIGHT, add_legend, label_rows, pick_axes
from sparsity.core.trees import Params, Path, PyTree
from sparsity.training.base_updater import BaseUpdater

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        self,
        expected: Sequence[jax.Array],
        returned: Sequence[jax.Array],
        row_weights: Sequence[jax.Array | None],
    ) -> None:
        """Adds the outputs of a batch.

        Rows count by their weights; outputs without the axes of the weights, as of a model that
        pools its rows, count as they are.
        """
        kept = [i for i, y in enumerate(expected) if jnp.issubdtype(y.dtype, jnp.inexact)]
        chosen = [[x[i] for i in kept] for x in (expected, returned, row_weights)]
        sums = _sum_outputs(*chosen)
        lost, total, axis_sums = jax.device_get(sums)
        self._lost, self._total = self._lost + float(lost), self._total + float(total)
        self._batches += bool(kept)
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
        wide = jnp.where(scale > 0, wide, 0)
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


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """Results of pruning a parameter. Made by `sparsity.oneshot`.

    Attributes:
      sparsity: fraction of its weights that its mask removes.
      error: tr(D^T G D) / tr(W^T G W) over the calibration data, for the lost weights D; without
        the means of the lost outputs where `Means` adds these to a bias. The mean over the layers
        of a stack.
      unrefitted: the error before a refit.
      count: number of rows in the calibration data.
      seconds: time spent on the parameter.
      centred: the error without the means of the outputs: tr(D^T C D) / tr(W^T C W) with C = G -
        s s^T / n, for the sum s of n rows. Where it is far above `error` the outputs hardly differ
        between inputs, and a small error loses their differences.
    """

    sparsity: float
    error: float
    unrefitted: float
    count: int
    seconds: float
    centred: float = math.nan

    @staticmethod
    def combine(layers: Sequence[LayerReport]) -> LayerReport:
        """Returns the report of a parameter from the reports of its layers."""
        names = "sparsity", "error", "unrefitted", "centred"
        means = {name: float(np.mean([getattr(x, name) for x in layers])) for name in names}
        seconds = sum(layer.seconds for layer in layers)
        return LayerReport(**means, count=layers[-1].count, seconds=seconds)


class Report(dict[Path, LayerReport]):
    """Results {path: LayerReport} of the pruned parameters, in order. Made by `sparsity.oneshot`.

    Attributes:
      outputs: errors of the model's outputs, `None` if they were not measured.
      blocks: by name of a block that `BlockRefit` trained: the errors of its outputs on held-out
        batches before and after; errors of parameters are those before.
    """

    outputs: OutputReport | None = None
    blocks: Mapping[str, tuple[float, float]] = types.MappingProxyType({})

    def table(self) -> str:
        """Returns a table of the parameters, and a line of the errors of the model's outputs."""
        numbers = ("sparsity", "error, not refitted", "error", "centred", "rows", "seconds")
        table = extras.make_table(("parameter",), numbers)
        for path, row in self.items():
            errors = [f"{x:.5f}" for x in (row.unrefitted, row.error, row.centred)]
            table.add_row(
                trees.join_names(path),
                f"{row.sparsity:.4f}",
                *errors,
                f"{row.count:,}",
                f"{row.seconds:.2f}",
            )
        text = extras.as_text(table)
        return text if self.outputs is None else f"{text}\n\n{self.outputs}"

    def to_json(self) -> dict[str, PyTree]:
        """Returns the report as numbers and texts, `None` for NaN."""
        layers = {trees.join_names(path): dataclasses.asdict(row) for path, row in self.items()}
        outputs = self.outputs and dataclasses.asdict(self.outputs)
        numbers = {"layers": layers, "blocks": {**self.blocks}, "outputs": outputs}
        return jax.tree.map(lambda x: x if math.isfinite(x) else None, numbers)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws the relative output error of each parameter: light before a refit, dark after it.

        Args:
          ax: matplotlib axes to draw on; new ones by default.

        Returns:
          The matplotlib axes.
        """
        ax = pick_axes(ax, len(self))
        rows, position = list(self.values()), np.arange(len(self))
        is_refitted = any(row.error != row.unrefitted for row in rows)
        if is_refitted:
            before = [100 * row.unrefitted for row in rows]
            ax.barh(position, before, color=LIGHT, label="pruned")
        after = [100 * row.error for row in rows]
        ax.barh(position, after, color=DARK, label="refitted" if is_refitted else "pruned")
        texts = [f"{row.sparsity:.1%} pruned" for row in rows]
        label_rows(ax, [trees.join_names(path) for path in self], texts)
        ax.set_xlabel("relative output error in percent")
        if is_refitted:
            add_legend(ax)
        return ax

    def sensitivity(
        self,
        pruner: BaseUpdater,
        fn: Callable[[PyTree, PyTree], PyTree],
        params: Params,
        batches: Iterable[PyTree],
        rates: Sequence[float] = (0.25, 0.5, 0.65, 0.75, 0.85, 0.95),
    ) -> Sensitivity:
        """Prunes the parameters of the report one at a time, and measures the error of the model.

        Args:
          pruner: any updater that prunes at once.
          fn: the model, `fn(params, batch)`.
          params: its dense parameters.
          batches: second arguments of `fn`; their outputs are kept.
          rates: the sparsities that each parameter is pruned at, above 0.

        Returns:
          A dictionary from paths to rates to the relative squared error of the model's outputs. Its
          `distribution(params, sparsity)` distributes a sparsity with the smallest errors.
        """
        check_pruner_and_refit(pruner)
        check_iterable("rates", rates)
        rates = tuple(rates)
        if not rates:
            raise ValueError(
                "rates has no rate: give the sparsities to measure, as (0.25, 0.5, 0.75)."
            )
        for rate in rates:
            check_fraction("rates", rate)
            if rate == 0:
                raise ValueError(
                    "rates must be above 0, at which nothing is lost, got a rate of 0."
                )
        batch_list = list(batches)
        kind = read_kind(pruner)
        statistics = calibrate(fn, params, batch_list, kind, lambda path, _: path in self)
        dense = [_list_outputs(fn, params, batch) for batch in batch_list]
        norm = sum(float(sum_losses(y, y, [None] * len(y))[1]) for y in dense)
        sensitivity = Sensitivity({path: {} for path in self})
        for path in self:
            for rate in rates:
                single_pruner = dataclasses.replace(
                    pruner, sparsity_distribution_fn=Rates({path: rate})
                )
                pruned = prune(single_pruner, params, statistics)[0]
                lost = sum(
                    float(sum_losses(_list_outputs(fn, pruned, batch), y, [None] * len(y))[0])
                    for y, batch in zip(dense, batch_list, strict=True)
                )
                sensitivity[path][rate] = lost / norm if norm else 0.0
        return sensitivity


def _list_outputs(
    fn: Callable[[PyTree, PyTree], PyTree], params: Params, batch: PyTree
) -> list[jax.Array]:
    """Returns the outputs of a model that have fractions."""
    arrays, rebuild = trees.split_arrays((params, batch))
    outputs = jax.jit(lambda arrays: trees.only_arrays(fn(*rebuild(arrays))))(arrays)
    return [y for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.inexact)]
