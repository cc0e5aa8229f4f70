"""Reports of one-shot pruning: the errors of each parameter, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.rates import Rates
from sparsity.calibration.refits.block import sum_losses
from sparsity.calibration.run.needs import read_needs
from sparsity.calibration.run.outputs import OutputReport
from sparsity.calibration.run.prune import check_pruner_and_refit, prune
from sparsity.calibration.run.sensitivity import Sensitivity
from sparsity.calibration.statistics.capture import calibrate
from sparsity.core import extras, trees
from sparsity.core.checks import check_fraction, check_iterable
from sparsity.core.extras import DARK, LIGHT, add_legend, label_rows, pick_axes
from sparsity.core.trees import Params, Path, PyTree
from sparsity.training.base_updater import BaseUpdater

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        kind = read_needs(pruner).statistics_kind
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
