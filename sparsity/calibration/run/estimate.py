"""Bytes that a one-shot run needs, from shapes alone.

The walk over the program is that of `lockstep`: values live from the equation that makes them to
the last one that reads them, for all batches at once; each weight stops the run for its sums and
its solution. Temporary values within a product, a loop that runs as a whole, or a solution of a
layer count for one batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsity.calibration.run.frames import find_last_uses
from sparsity.calibration.run.task import PruningTask
from sparsity.core import trees
from sparsity.core.trees import Path, PyTree
from sparsity.graph import Use
from sparsity.programs.program import Equation, Program, Value

_WEIGHTS = 6  # arrays of the size of a layer: dense, scores, pruned, refitted, their differences


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes of a one-shot run. Made by `oneshot(..., estimate=True)`.

    They leave out what XLA takes to compile.

    Attributes:
      model: the params, and the pruned parameters and masks when the run ends.
      activations: the batches and the values of all batches that live at the peak.
      gram: the Gram matrix of the largest layer, 0 where sums of squares are enough.
      peak: all that lives at once at most.
      parameter: the parameter whose sums and solution set the peak; empty where the values between
        products need more.
    """

    model: int
    activations: int
    gram: int
    peak: int
    parameter: str

    def __repr__(self) -> str:
        sizes = {"model": self.model, "activations": self.activations, "gram": self.gram}
        parts = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
        place = f"at {self.parameter!r}" if self.parameter else "between products"
        return f"Estimate({parts}; peak {self.peak / 1e6:.1f} MB {place})"


class _Peak(NamedTuple):
    """The point of a run at which most bytes live, as in `Estimate`."""

    total_bytes: int = 0
    activations: int = 0
    parameter: str = ""


class MemoryMeter:
    """Follows the bytes of a run.

    Args:
      task: what the run prunes.
      batches: the batches, arrays or shapes.
    """

    def __init__(self, task: PruningTask, batches: Sequence[PyTree]) -> None:
        calibration = task.make_calibration()
        self._graph, self._uses, self._needs = task.graph, calibration.uses, task.needs
        self._batches = len(batches)
        self._batch_bytes = sum(_count_bytes(x) for x in trees.split_arrays(list(batches))[0])
        grams = calibration.list_gram_shapes(one_layer=True)
        self._grams = {name: _count_bytes(gram) for name, gram in grams.items()}
        self._params = sum(param.size * param.dtype.itemsize for param in task.graph.parameters)
        self._pruned: dict[Path, int] = {}
        self._peak = _Peak()

    def estimate(self) -> Estimate:
        """Returns the bytes of the run."""
        program = self._graph.model.program
        # The batches themselves stay with the caller.
        self._follow_program(program, self._batch_bytes, shared={*program.inputs})
        gram = max(self._grams.values(), default=0) if self._needs.has_grams else 0
        model = self._params + sum(self._pruned.values())
        peak = self._peak
        return Estimate(model, peak.activations, gram, peak.total_bytes, peak.parameter)

    def _follow_program(self, program: Program, live_bytes: int, shared: set[Value]) -> None:
        """Follows a program.

        Args:
          program: the program.
          live_bytes: bytes of activations around it.
          shared: inputs of the program that share memory with values around it.
        """
        last_uses, live = find_last_uses(program), dict[Value, int]()
        for value in program.inputs:
            if self._graph.tracker.is_data(value) and value not in shared:
                live[value] = self._batches * _count_bytes(value)
        for equation in program.flat_equations():
            dead = {x for x in equation.inputs if last_uses.get(x) is equation}
            if any(map(self._graph.tracker.is_data, equation.inputs)):
                freed_bytes = sum(live.get(value, 0) for value in dead) // self._batches
                self._follow_equation(equation, live_bytes + sum(live.values()), freed_bytes)
                for value in equation.outputs:
                    live[value] = self._batches * _count_bytes(value)
            for value in {*dead, *equation.outputs} & live.keys():
                if last_uses.get(value, equation) is equation:
                    del live[value]

    def _follow_equation(self, equation: Equation, live_bytes: int, freed_bytes: int) -> None:
        """Follows an equation and the weights that it stops at.

        Args:
          equation: the equation.
          live_bytes: bytes that live before it.
          freed_bytes: bytes of a batch that the equation is the last to read.
        """
        for use_index in self._uses.find(equation):
            self._follow_weight(self._uses[use_index], live_bytes)
        if self._uses.reads_layers(equation):
            (body,) = equation.list_bodies()
            constants, _, _ = body.split(body.program.inputs)
            stacked = self._batches * sum(map(_count_bytes, equation.outputs))
            for _ in range(2):  # a first layer copies parameters, and all others find the copies
                self._follow_program(body.program, live_bytes + stacked, {*constants})
            return
        for use_index in self._uses.list_inner(equation):
            self._follow_weight(self._uses[use_index], live_bytes)
        inner = [e for body in equation.inner_programs for e in body.flat_equations()]
        inside_bytes = sum(_count_bytes(value) for e in inner for value in e.outputs)
        output_bytes = sum(map(_count_bytes, equation.outputs))
        # Outputs less freed inputs add up batch by batch.
        live_bytes += (self._batches - 1) * max(output_bytes - freed_bytes, 0)
        self._note(live_bytes + output_bytes + inside_bytes, live_bytes, "")

    def _follow_weight(self, use: Use, live_bytes: int) -> None:
        """Follows the sums and the solution of a weight."""
        param = next(x for x in self._graph.parameters if x.path == use.path)
        self._pruned.setdefault(use.path, param.size * (param.dtype.itemsize + 1))
        layers = math.prod(param.shape[axis] for axis in use.view.stacked)
        layer_bytes = 4 * param.size // max(layers, 1)
        input_bytes = _count_wide_bytes(use.equation.inputs[1 - use.operand])
        output_bytes = _count_wide_bytes(use.equation.outputs[0])
        if self._needs.has_grams:
            gram, inputs = self._grams[param.name], max(use.num_inputs, 1)
            outputs = layer_bytes // 4 // inputs
            row_bytes = input_bytes
            if use.kind == "convolution":  # patches
                row_bytes = output_bytes // max(outputs, 1) * inputs * use.groups
            counted = gram + self._needs.count_bytes(outputs, inputs)
            solution = max(self._needs.gram_copies * gram, counted)
            work = max(row_bytes + 2 * gram, solution + _WEIGHTS * layer_bytes)
        else:
            sum_bytes = max(2 * input_bytes, input_bytes + 2 * output_bytes)
            work = sum_bytes + _WEIGHTS * layer_bytes
        self._note(live_bytes + work, live_bytes, param.name)

    def _note(self, added_bytes: int, activations: int, param: str) -> None:
        """Notes the bytes besides the model at a point of the run."""
        total_bytes = self._params + sum(self._pruned.values()) + added_bytes
        if total_bytes > self._peak.total_bytes:
            self._peak = _Peak(total_bytes, activations, param)


def _count_bytes(x: Value | jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of an array of that type."""
    return math.prod(x.shape) * int(jnp.dtype(x.dtype).itemsize)


def _count_wide_bytes(value: Value) -> int:
    """Returns the bytes of a value in the dtype of sums, at least four each."""
    return value.size * max(int(jnp.dtype(value.dtype).itemsize), 4)
