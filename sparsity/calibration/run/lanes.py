"""Lanes of a run: batches of one shape, with the program and the row weights of that shape."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from sparsity.calibration.run.frames import Frame, Lane, Values
from sparsity.calibration.run.task import PruningTask
from sparsity.calibration.run.weights import ReadFn
from sparsity.calibration.statistics.capture import check_structure
from sparsity.calibration.statistics.row_axes import (
    RowWeights,
    check_any_counts,
    find_row_axes,
    read_row_weights,
)
from sparsity.core import trees
from sparsity.core.trees import Params, PyTree
from sparsity.programs.program import Program


def make_lanes(
    task: PruningTask,
    params: Params,
    batches: Sequence[PyTree],
    row_weights: RowWeights | None,
    is_counted: bool = True,
) -> list[tuple[Lane, list[Values]]]:
    """Returns the lanes of batches, and the inputs of each batch.

    Raises:
      ValueError: batches differ in structure, lead to other programs, or have other row weights.
    """
    groups: dict[object, list[int]] = {}
    for index, batch in enumerate(batches):
        check_structure(batch, batches[0], index)
        arrays = trees.split_arrays(batch)[0]
        groups.setdefault(tuple((x.shape, jnp.result_type(x)) for x in arrays), []).append(index)
    lanes = []
    for indices in groups.values():
        first = batches[indices[0]]
        graph = task.graph.retrace(params, first)
        if list_equations(graph.model.program) != list_equations(task.graph.model.program):
            raise ValueError(
                f"Batch {indices[0]} makes the model run another program than batch 0, not only "
                "other shapes. Give batches that take the same way through the model, or "
                "sequential=False."
            )
        weights = [read_row_weights(row_weights, batches[i], i) for i in indices]
        axes = None if weights[0] is None else find_row_axes(graph, np.shape(weights[0]))
        lane = Lane(task.make_calibration(graph), indices, weights, axes, is_counted)
        inputs = graph.model.program.inputs[len(graph.parameters) :]
        arrays = [trees.split_arrays(batches[i])[0] for i in indices]
        lanes.append((lane, [dict(zip(inputs, x, strict=True)) for x in arrays]))
    if lanes:
        check_any_counts(weights for lane, _ in lanes for weights in lane.row_weights)
    return lanes


def make_frame(lane: Lane, data: list[Values], read: ReadFn) -> Frame:
    """Returns the frame of the model for a lane."""
    model = lane.calibration.graph.model
    paths = {value: parameter.path for value, parameter in model.parameter_inputs.items()}
    return Frame(lane, model.program, read, [{**values} for values in data], paths)


def list_equations(program: Program) -> list[PyTree]:
    """Returns the names of all equations in order, with those of loops and branches."""
    return [
        (equation.name, *map(list_equations, equation.inner_programs))
        for equation in program.flat_equations()
    ]
