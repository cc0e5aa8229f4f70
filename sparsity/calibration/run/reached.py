"""Sums over the inputs and outputs of a weight where a run reaches it."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from sparsity.calibration.reuse import compile_at_call
from sparsity.calibration.run.frames import Frame, ScanLayers
from sparsity.calibration.run.weights import LayerIndex
from sparsity.calibration.statistics.capture import have_equal_axes, merge_counts
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.sums import (
    Steps,
    SummingInterpreter,
    Uses,
    add,
    add_batch,
)
from sparsity.calibration.statistics.validation import is_finite, make_not_finite_error
from sparsity.core.trees import PyTree
from sparsity.graph import Use
from sparsity.programs.program import Equation


@dataclasses.dataclass(frozen=True)
class ReachedWeight:
    """Place where a program reaches a weight: a product, or the loop or branch around it.

    Attributes:
      frame: holds the inputs of the equation.
      equation: a product, a scan or a cond.
      layers: the layers of the scans within the equation that take the weight apart, by index of
        the use; all uses read the weight along the same axes.
    """

    frame: Frame
    equation: Equation
    layers: Mapping[int, ScanLayers]

    def sum_batches(self, sum_up: Callable[..., PyTree], *matrices: jax.Array) -> Iterator[PyTree]:
        """Yields (index of the batch, sums over all uses) of the batches that count.

        Args:
          sum_up: `sum_up(use_index, x, *matrices, row_weights=)` returns the sums of a use.
          *matrices: arguments of `sum_up`.
        """
        lane, equation = self.frame.lane, self.equation
        uses = Uses({n: lane.calibration.uses[n] for n in self.layers})
        # Indices are arguments, so that the layers of a stack share a compiled program.
        indices = {n: [*layers.values()] for n, layers in self.layers.items()}

        def run(inputs: PyTree, indices: PyTree, weights: PyTree, matrices: PyTree) -> PyTree:
            def sum_use(use_index: int, x: jax.Array, steps: Steps) -> PyTree:
                row_weights = lane.calibration.spread(use_index, lane.row_axes, weights)
                sums = sum_up(use_index, x, *matrices, row_weights=row_weights)
                for scan, layer in zip(self.layers[use_index], indices[use_index], strict=True):
                    is_layer = steps[scan] == layer
                    sums = jax.tree.map(lambda s, is_on=is_layer: jnp.where(is_on, s, 0), sums)
                return sums

            if not equation.inner_programs:
                return {n: sum_use(n, inputs[n], {}) for n in uses}
            interpreter = SummingInterpreter(uses, sum_use)
            interpreter.evaluate(equation, inputs)
            return interpreter.sums

        program = compile_at_call(run)
        for batch, weights in enumerate(lane.row_weights):
            read, values = functools.partial(self.frame.read_value, batch), equation.inputs
            inputs: PyTree = {n: read(values[1 - use.operand]) for n, use in uses.items()}
            if equation.inner_programs:
                inputs = [*map(read, values)]
            sums = program(inputs, indices, weights, matrices)
            yield lane.batches[batch], functools.reduce(add, [sums[n] for n in sorted(sums)])


def sum_statistic(places: Sequence[ReachedWeight], name: str) -> Statistic:
    """Returns the statistic of the inputs in all batches, and in all steps of loops.

    Raises:
      ValueError: inputs are not finite; the error names the batch.
    """
    total: Statistic | None = None
    for place in places:
        for batch, sums in place.sum_batches(place.frame.lane.calibration.sum_inputs):
            if not all(map(is_finite, jax.tree.leaves(sums))):
                raise make_not_finite_error(name, batch)
            total = add_batch(total, sums)
    assert total is not None
    return merge_counts(total)


def sum_losses(places: Sequence[ReachedWeight], *matrices: jax.Array) -> jax.Array:
    """Returns the sums of |y|^2 over the outputs y of each matrix."""
    return functools.reduce(
        operator.add,
        (
            sums
            for place in places
            for _, sums in place.sum_batches(place.frame.lane.calibration.sum_outputs, *matrices)
        ),
    )


def find_equal_uses(
    frame: Frame, use_indices: Sequence[int], use: Use, index: LayerIndex
) -> dict[int, ScanLayers]:
    """Returns the uses that read the same weight along the same axes as the first of them.

    Each has the layers of the scans inside the frame.
    """
    calibration, layers = frame.lane.calibration, dict[int, ScanLayers]()
    for use_index in use_indices:
        other, layer_by_axis = calibration.uses[use_index], dict(index)
        if other.path != use.path or {*other.view.stacked} != {*layer_by_axis}:
            continue
        pairs = zip(other.view.scans, other.view.stacked, strict=True)
        scan_layers = {scan: layer_by_axis[axis] for scan, axis in pairs}
        if all(frame.layers.get(scan, layer) == layer for scan, layer in scan_layers.items()):
            layers[use_index] = {s: n for s, n in scan_layers.items() if s not in frame.layers}
    axes = calibration.alignments[min(layers)].axes
    return {
        n: x for n, x in layers.items() if have_equal_axes(calibration.alignments[n].axes, axes)
    }
