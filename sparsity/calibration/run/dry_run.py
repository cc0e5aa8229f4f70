"""Bytes that a one-shot run holds, block by block, from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from sparsity.calibration.refits.block import BlockRefit
from sparsity.calibration.run.blocks import Plan
from sparsity.calibration.run.task import PruningTask
from sparsity.core import extras
from sparsity.programs.program import Equation, Program, Value

_LAYER_COPIES = 5  # dense, effective, pruned and refitted weights, and scores, in float32
_GRAM_COPIES = 2  # the sums so far and those of a batch; or the matrix and its factor
_TRAINING_COPIES = 5  # weights in float32, gradients, two moments, the best step


class BlockBytes(NamedTuple):
    """Bytes of a block.

    Attributes:
      name: its name; of a scan that of all its steps, which are alike.
      params: its parameters, each once.
      activations: the values of all batches that enter the block and leave it.
      statistics: the Gram matrix or the sums of squares of its largest weight.
      work: solving its largest weight, or training all of them.
    """

    name: str
    params: int
    activations: int
    statistics: int
    work: int

    @property
    def resident(self) -> int:
        """Bytes besides activations, with the parameters of the block before."""
        return 2 * self.params + self.statistics + self.work


@dataclasses.dataclass(frozen=True)
class DryRun:
    """Bytes of a one-shot run that streams. Made by `oneshot(..., dry_run=True)`.

    They leave out values within a block for one batch, and what XLA takes to compile.

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
            sizes = (
                block.params, block.statistics, block.work, block.activations, block.resident
            )  # fmt: skip
            table.add_row(block.name, *(f"{size / 1e6:,.1f}" for size in sizes))
        return extras.as_text(table)

    def __str__(self) -> str:
        return (
            f"{self.table()}\n\nmodel {self.model / 1e6:,.1f} MB; streamed "
            f"{self.resident / 1e6:,.1f} MB, and activations {self.activations / 1e6:,.1f} MB"
        )

    @staticmethod
    def measure(
        task: PruningTask, plan: Plan, batches: int, refit: BlockRefit | None, copies: int = 2
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
        meter.follow(task.graph.model.program, [])
        model = sum(param.size * param.dtype.itemsize for param in task.graph.parameters)
        return DryRun(model, tuple(meter.blocks))


class _Meter:
    def __init__(
        self, task: PruningTask, plan: Plan, copies: int, refit: BlockRefit | None
    ) -> None:
        self._task, self._plan, self._copies, self._refit = task, plan, copies, refit
        self._is_data = task.graph.tracker.is_data
        self.blocks: list[BlockBytes] = []

    def follow(self, program: Program, around: Sequence[Value]) -> None:
        """Adds the blocks of a program; `around` are values that live meanwhile."""
        equations = [*program.flat_equations()]
        for span in self._plan.split(program):
            inside = equations[span.start : span.stop]
            if span.is_scan and self._plan.is_nested(body := inside[0].list_bodies()[0].program):
                self.follow(body, [*around, *inside[0].inputs, *inside[0].outputs])
                continue
            reads = [x for equation in inside for x in equation.inputs]
            if span.is_scan:
                body = inside[0].list_bodies()[0].program
                around_scan = [*around, *inside[0].inputs, *inside[0].outputs]
                self._add(span.name, body, [*body.flat_equations()], around_scan)
            else:
                self._add(span.name or "(no weights)", program, inside, [*around, *reads])

    def _add(
        self, name: str, program: Program, equations: Sequence[Equation], live: Iterable[Value]
    ) -> None:
        params = {x for equation in equations for x in self._list_params(program, equation)}
        outputs = [x for equation in equations[-1:] for x in equation.outputs]
        values = {x for x in (*live, *outputs) if self._is_data(x)}
        statistics = work = trained = 0
        needs, uses = self._task.needs, self._plan.calibration.uses
        for equation in equations:
            for use in (uses[n] for n in self._plan.list_uses(equation)):
                alignment = self._plan.calibration.alignments[
                    next(n for n, other in uses.items() if other is use)
                ]
                size, inputs = math.prod(alignment.shape), max(use.num_inputs, 1)
                trained += 4 * size
                slices = math.prod(alignment.axes.read_batch_shape(alignment.shape))
                gram = 4 * inputs * slices * (inputs if needs.has_grams else 1)
                statistics = max(statistics, gram * (_GRAM_COPIES if needs.has_grams else 2))
                work = max(work, 4 * size * _LAYER_COPIES)
        if self._refit:
            work = max(work, self._refit.window * trained * _TRAINING_COPIES)
        size = self._copies * sum(map(_count_bytes, values))
        self.blocks.append(BlockBytes(name, sum(map(_count_bytes, params)), size, statistics, work))

    def _list_params(self, program: Program, equation: Equation) -> set[Value]:
        """Returns the inputs of a program of parameters alone that an equation needs."""
        pending, params = [*equation.inputs], set[Value]()
        while pending:
            value = pending.pop()
            if self._is_data(value):
                continue
            if value in program.makers:
                pending += program.makers[value].inputs
            elif value in program.inputs:
                params.add(value)
        return params


def _count_bytes(value: Value) -> int:
    return math.prod(value.shape) * int(jnp.dtype(value.dtype).itemsize)
