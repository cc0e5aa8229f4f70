"""Errors of a pruned model's outputs, on batches that may differ from those of the pruning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.run.reuse import compile_at_call
from sparsity.calibration.statistics.capture import check_structure
from sparsity.core import trees
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


def compare_outputs(
    fn: Callable[[PyTree, PyTree], PyTree],
    dense: Params,
    pruned: Params,
    batches: Iterable[PyTree],
    metric: Callable[[PyTree], chex.Numeric] | None = None,
) -> OutputReport | None:
    """Runs a dense and a pruned model on batches, and sums up the differences of their outputs.

    Args:
      fn: the model, `fn(params, batch)`.
      dense: the parameters before pruning.
      pruned: the parameters after pruning.
      batches: second arguments of `fn`; one is held at a time.
      metric: `metric(params)` returns a number.

    Returns:
      The report, or `None` without batches and metric.
    """
    lost = total = 0.0
    count, first_batch, run = 0, None, None
    sums: dict[tuple[int, int], np.ndarray] = {}  # of outputs along their last axis, by output
    rows: dict[tuple[int, int], int] = {}
    for batch in batches:
        if run is None:
            first_batch, run = batch, make_output_fn(fn, dense, batch)
        check_structure(batch, first_batch, count)
        count += 1
        expected, returned = run(dense, batch), run(pruned, batch)
        *squares, axis_sums = jax.device_get(_sum_outputs(expected, returned))
        lost, total = lost + float(squares[0]), total + float(squares[1])
        for index, (y, axis_sum) in enumerate(zip(expected, axis_sums, strict=True)):
            key = index, axis_sum.size
            sums[key] = sums.get(key, 0) + axis_sum.astype(np.result_type(axis_sum, np.float64))
            rows[key] = rows.get(key, 0) + y.size // max(axis_sum.size, 1)
    if not count and metric is None:
        return None
    means = sum(float(np.sum(np.abs(x) ** 2)) / max(rows[key], 1) for key, x in sums.items())
    return OutputReport(
        error=_divide_losses(lost, total),
        unexplained=_divide_losses(lost, max(total - means, 0.0)),
        batches=count,
        dense_metric=None if metric is None else _read_metric(metric, dense),
        metric=None if metric is None else _read_metric(metric, pruned),
    )


def _read_metric(metric: Callable[[PyTree], chex.Numeric], params: Params) -> float:
    """Returns the number that a metric returns; raises a ValueError for anything else."""
    value = metric(params)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric must return a number, got metric(params) = {value!r}.") from error


def make_output_fn(
    fn: Callable[[PyTree, PyTree], PyTree], params: Params, batch: PyTree
) -> Callable[[PyTree, PyTree], list[jax.Array]]:
    """Returns a compiled function from parameters and a batch to the outputs with fractions.

    Args:
      fn: the model, `fn(params, batch)`.
      params: parameters; those of a call must be alike in all but the values of arrays.
      batch: a batch; those of a call must be alike in all but arrays.
    """
    rebuild, rebuild_batch = (trees.split_arrays(tree)[1] for tree in (params, batch))

    @jax.jit
    def compute_outputs(leaves: list[jax.Array], arrays: list[jax.Array]) -> list[jax.Array]:
        results = jax.tree.leaves(fn(rebuild(leaves), rebuild_batch(arrays)))
        inexact = [x for x in results if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
        return [jnp.asarray(x) for x in inexact]

    compiled = compile_at_call(compute_outputs)

    def run(params: Params, batch: PyTree) -> list[jax.Array]:
        inputs = [trees.split_arrays(x)[0] for x in (params, batch)]
        arrays = [x for x in jax.tree.leaves(inputs) if isinstance(x, jax.Array)]
        devices = {device for x in arrays for device in x.devices()}
        return (compute_outputs if len(devices) > 1 else compiled)(*inputs)

    return run


@jax.jit
def sum_squares(xs: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of |x|^2 over arrays."""
    parts = [jnp.abs(x).astype(jnp.float32) for x in xs]
    return sum((jnp.sum(jnp.square(part)) for part in parts), jnp.float32(0))


@jax.jit
def sum_lost_squares(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> jax.Array:
    """Returns the sum of |x - y|^2 over pairs of arrays."""
    return sum_squares([x - y for x, y in zip(xs, ys, strict=True)])


@jax.jit
def _sum_outputs(
    expected: list[jax.Array], returned: list[jax.Array]
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """Returns the sums of squares, lost and in total, and the sums of outputs by last axis."""
    wide = [x.astype(promote(x.dtype, jnp.float32)) for x in expected]
    sums = [
        jnp.atleast_1d(jnp.sum(x, axis=tuple(range(max(x.ndim - 1, 1))[: x.ndim]))) for x in wide
    ]
    return sum_lost_squares(expected, returned), sum_squares(expected), sums


def _divide_losses(lost: float, total: float) -> float:
    """Returns a quotient; nothing lost is 0, something of nothing is infinite."""
    if lost == 0:
        return 0.0
    return lost / total if total else float("inf")
