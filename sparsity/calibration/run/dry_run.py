"""Bytes that a one-shot run holds, block by block, from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

from sparsity.calibration.refits.block import BlockRefit
from sparsity.calibration.run.blocks import BlockPlan, Span, count_bytes
from sparsity.calibration.run.task import PruningTask
from sparsity.core import extras
from sparsity.programs.program import Program, Value

_LAYER_COPIES = 5  # of a weight in float32: dense, scores, pruned, refitted, lost
_STATISTIC_COPIES = 2  # the sums so far and those of a batch; or the matrix and its factor
_TRAINING_COPIES = 5  # weights in float32, gradients, two moments, the best step


class BlockBytes(NamedTuple):
    """Bytes of a block.

    Attributes:
      name: its name; a scan stands for all its steps, which are alike.
      params: its parameters, each once.
      statistics: the Gram matrices or the sums of squares of its largest weight.
      work: solving its largest weight, or training all of them.
      activations: the values of all batches where most of them wait for a weight.
      resident: all that is held at once, besides activations.
    """

    name: str
    params: int
    statistics: int
    work: int
    activations: int
    resident: int


@dataclasses.dataclass(frozen=True)
class DryRun:
    """Bytes of a one-shot run that streams. Made by `oneshot(..., dry_run=True)`.

    They leave out values between two weights for one batch, and what XLA takes to compile.

    Attributes:
      model: bytes of all parameters, which a run holds if they are in memory.
      blocks: the bytes of each block.
    """

    model: int
    blocks: tuple[BlockBytes, ...]

    @property
    def resident(self) -> int:
        """Bytes besides activations of the block that holds most."""
        return max((block.resident for block in self.blocks), default=0)

    @property
    def activations(self) -> int:
        """Bytes of activations of the block that holds most."""
        return max((block.activations for block in self.blocks), default=0)

    def table(self) -> str:
        """Returns a table of the blocks in megabytes."""
        columns = ("params", "statistics", "work", "activations", "resident, MB")
        table = extras.make_table(("block",), columns)
        for block in self.blocks:
            table.add_row(block.name, *(f"{size / 1e6:,.1f}" for size in block[1:]))
        return extras.as_text(table)

    def __str__(self) -> str:
        return (
            f"{self.table()}\n\nmodel {self.model / 1e6:,.1f} MB; streamed "
            f"{self.resident / 1e6:,.1f} MB, and activations {self.activations / 1e6:,.1f} MB"
        )

    @staticmethod
    def measure(
        task: PruningTask, plan: BlockPlan, batches: int, refit: BlockRefit | None, copies: int = 2
    ) -> DryRun:
        """Returns the bytes of a run.

        Args:
          task: what the run prunes.
          plan: its blocks.
          batches: the number of batches.
          refit: trains blocks, or `None`.
          copies: the lanes of each batch, the pruned and the dense one.
        """
        meter = _Meter(task, plan, batches * copies, refit)
        meter.follow(task.graph.model.program, 0)
        model = sum(param.size * param.dtype.itemsize for param in task.graph.parameters)
        return DryRun(model, tuple(meter.blocks))


class _Meter:
    def __init__(
        self, task: PruningTask, plan: BlockPlan, copies: int, refit: BlockRefit | None
    ) -> None:
        self._task, self._plan, self._copies, self._refit = task, plan, copies, refit
        self.blocks: list[BlockBytes] = []

    def follow(self, program: Program, around: int) -> None:
        """Adds the blocks of a program; `around` are bytes of data that live meanwhile."""
        equations, live = [*program.flat_equations()], self._plan.measure_live(program)
        for span in self._plan.split(program):
            if not span.is_scan:
                self._add(span, program, around)
                continue
            body = equations[span.start].list_bodies()[0].program
            outside = around + max(live[span.start : span.stop + 1])
            if self._plan.is_nested(body):
                self.follow(body, outside)
            else:
                self._add(span._replace(start=0, stop=len([*body.flat_equations()])), body, outside)

    def _add(self, span: Span, program: Program, around: int) -> None:
        """Adds a block, which holds what it reads until a weight is pruned, and all that is new."""
        equations, live = [*program.flat_equations()], self._plan.measure_live(program)
        loaded, params = set[Value](), set[Value]()
        resident = statistics = work = parts = trained = 0
        stops = [span.start, span.stop]
        for index in range(span.start, span.stop):
            read = self._plan.list_params(program, equations[index].inputs)
            loaded, params = loaded | read, params | read
            for use_index in self._plan.list_uses(equations[index]):
                size, nbytes, sums = self._measure(use_index)
                solving = 4 * size * _LAYER_COPIES
                resident = max(resident, _sum_bytes(loaded) + parts + sums + solving)
                statistics, work = max(statistics, sums), max(work, solving)
                loaded, parts, trained = set(), parts + nbytes + size, trained + 4 * size
                stops.append(index)
        if self._refit:
            steps = 1 if program is self._task.graph.model.program else self._plan.window
            work = max(work, steps * trained * _TRAINING_COPIES)
        name, total = span.name or "(no weights)", _sum_bytes(params)
        resident = max(resident, total + parts + (work if self._refit else 0))
        activations = self._copies * (around + max(live[i] for i in stops))
        if not span.name and program is self._task.graph.model.program:
            # Outputs of the model are compared batch by batch.
            activations = self._copies * live[span.start] + 2 * live[span.stop]
        self.blocks.append(BlockBytes(name, total, statistics, work, activations, resident))

    def _measure(self, use_index: int) -> tuple[int, int, int]:
        """Returns the entries of a weight, its bytes, and the bytes of its statistics."""
        calibration, kind = self._plan.calibration, self._task.kind
        alignment, use = calibration.alignments[use_index], calibration.uses[use_index]
        size, inputs = math.prod(alignment.shape), max(use.num_inputs, 1)
        slices = math.prod(alignment.axes.read_batch_shape(alignment.shape))
        sums = 4 * slices * inputs * (inputs if kind == "gram" else 1) * _STATISTIC_COPIES
        (dtype,) = {x.dtype for x in self._task.graph.parameters if x.path == use.path}
        return size, size * dtype.itemsize, sums


def _sum_bytes(values: Iterable[Value]) -> int:
    return sum(map(count_bytes, values))
