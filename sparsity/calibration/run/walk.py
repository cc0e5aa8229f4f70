"""Runs of a model on all batches, block by block, while its weights are pruned on the way.

Within a block, each weight is pruned where the program reaches its product, so that its inputs come
from the pruned weights before it. When a block ends, its weights are refitted and written. Lanes of
batches run side by side, each with the pruned parameters and, for errors and refits of blocks, with
the dense ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

import jax

from sparsity.calibration.run.blocks import BlockPlan, Span
from sparsity.calibration.run.frames import Frame, Loop, ScanLayers, list_layers
from sparsity.calibration.run.reached import ReachedWeight, find_equal_uses
from sparsity.calibration.run.weights import LayerIndex, ReadFn
from sparsity.core.trees import Path
from sparsity.graph import Use
from sparsity.programs.program import Equation, Value

Arrays: TypeAlias = list[jax.Array]


class RunBlock(Protocol):
    """A part of a program that is pruned and refitted at once."""

    name: str

    def run(self, walk: Walk) -> None:
        """Runs the pruned lanes, which stop at weights that are not done, and the dense ones."""

    def restore(self) -> None:
        """Takes the pruned lanes back to the start of the block."""

    def list_inputs(self, lane: int, is_dense: bool) -> list[Arrays]:
        """Returns the values that enter the block, for each batch of a lane."""

    def list_outputs(self, lane: int, is_dense: bool) -> list[Arrays]:
        """Returns the values that leave the block, for each batch of a lane."""

    def list_values(self, lane: int) -> tuple[list[Value], list[Value]]:
        """Returns the values of the program that the inputs and the outputs are."""

    def call(self, lane: int, read: ReadFn, inputs: Arrays) -> Arrays:
        """Returns the values that leave the block, for one batch; may be traced."""


class Hooks(Protocol):
    """What a walk calls."""

    def is_done(self, path: Path, index: LayerIndex) -> bool:
        """Returns whether a weight needs no stop."""

    def on_weight(self, path: Path, index: LayerIndex, places: Sequence[ReachedWeight]) -> None:
        """Prunes a weight where the pruned lanes reach it."""

    def on_start(self, name: str) -> None:
        """Is called before each block."""

    def on_block(self, block: RunBlock) -> bool:
        """Finishes a block; returns whether its weights have changed since its run."""


@dataclasses.dataclass(eq=False)
class Walk:
    """A run of a model.

    Attributes:
      plan: the blocks, and the places of the weights.
      hooks: are called at weights and blocks.
      frames: the pruned lanes.
      dense: the same lanes with the dense parameters; empty if nothing needs them.
      saves: whether blocks keep the values before them, for a refit.
    """

    plan: BlockPlan
    hooks: Hooks
    frames: list[Frame]
    dense: list[Frame]
    saves: bool = False
    _stack: list[list[Frame]] = dataclasses.field(default_factory=list)  # the outermost first
    _tail: int = 0  # the first equation that no block needs

    def run(self) -> None:
        """Runs the model up to the last equation that a block needs."""
        self._run_program(self.frames, self.dense, "")

    def compare_outputs(
        self,
        is_counted: bool,
        compare: Callable[[Arrays, Arrays, list[jax.Array | None]], None],
    ) -> None:
        """Calls `compare(dense outputs, outputs of the pruned model, row weights of each)`.

        Args:
          is_counted: whether to compare batches that count in statistics, or the others.
          compare: is called for one batch after the other.
        """
        for frame, dense in zip(self.frames, self.dense, strict=True):
            lane, outputs = frame.lane, frame.program.outputs
            for batch, weights in enumerate(lane.row_weights):
                if lane.is_counted == is_counted:
                    spread = [lane.spread(value, weights) for value in outputs]
                    compare(self._run_tail(dense, batch), self._run_tail(frame, batch), spread)

    def _run_tail(self, frame: Frame, batch: int) -> Arrays:
        """Returns the outputs of the model for a batch, and drops all values."""
        frame.run(frame.equations[self._tail :], [batch])
        outputs = [frame.read_value(batch, x) for x in frame.program.outputs]
        frame.data[batch].clear()
        return outputs

    def _run_program(self, frames: list[Frame], dense: list[Frame], prefix: str) -> None:
        """Runs a program that has several blocks."""
        self._stack.append(frames)
        self._tail = self._tail if prefix else len(frames[0].equations)
        spans = self.plan.split(frames[0].program)
        for span in spans:
            name = _join(prefix, span.name)
            if span.is_scan:
                self._run_scan(frames, dense, span, name)
            elif span.name:
                self._run_block(_Rows(frames, dense, span, name, self.saves))
            elif span is spans[-1] and not prefix:
                self._tail = span.start
            else:
                for frame in (*frames, *dense):
                    frame.run(frame.equations[span.start : span.stop])
        self._stack.pop()

    def _run_scan(self, frames: list[Frame], dense: list[Frame], span: Span, name: str) -> None:
        """Runs a scan layer by layer, several layers a block, or several blocks a layer."""
        scan = frames[0].equations[span.start]
        loops = [[Loop(f, f.equations[span.start]) for f in each] for each in (frames, dense)]
        layers = list_layers(scan)
        if self.plan.is_nested(loops[0][0].body.program):
            for layer in layers:
                steps = [[loop.enter(layer) for loop in each] for each in loops]
                self._run_program(steps[0], steps[1], f"{name}[{layer}]")
                for loop, step in zip((*loops[0], *loops[1]), (*steps[0], *steps[1]), strict=True):
                    loop.leave(step)
        else:
            for start in range(0, len(layers), self.plan.window):
                chosen = layers[start : start + self.plan.window]
                label = f"{name}[{', '.join(map(str, chosen))}]"
                self._run_block(_Steps(loops[0], loops[1], chosen, label))
        for loop in (*loops[0], *loops[1]):
            loop.finish()

    def _run_block(self, block: RunBlock) -> None:
        self.hooks.on_start(block.name)
        block.run(self)
        if self.hooks.on_block(block):
            self._forget_params()
            block.restore()
            block.run(self)
        self._forget_params()

    def _forget_params(self) -> None:
        for frame in (*self.dense, *(frame for frames in self._stack for frame in frames)):
            frame.forget_params()

    def run_rows(self, frames: list[Frame], span: Span) -> None:
        """Runs equations of the pruned lanes, and prunes each weight before its product."""
        start = span.start
        for index in range(span.start, span.stop):
            if uses := self.plan.list_uses(frames[0].equations[index]):
                for frame in frames:
                    frame.run(frame.equations[start:index])
                start = index
                self._prune_at(frames, index, uses)
        for frame in frames:
            frame.run(frame.equations[start : span.stop])

    def run_step(self, loops: Sequence[Loop], layer: int) -> None:
        """Runs a step of a scan on the pruned lanes."""
        steps = [loop.enter(layer) for loop in loops]
        self._stack.append(steps)
        self.run_rows(steps, Span(0, len(steps[0].equations)))
        self._stack.pop()
        for loop, step in zip(loops, steps, strict=True):
            loop.leave(step)

    def _prune_at(self, frames: list[Frame], index: int, use_indices: Sequence[int]) -> None:
        """Prunes the weights that an equation reads, unless they are done."""
        equation, uses = frames[0].equations[index], frames[0].lane.calibration.uses
        direct = [(n, frames[0].layers) for n in uses.find(equation)]
        for use_index, layers in (*direct, *self._walk_uses(equation, frames[0].layers)):
            use = uses[use_index]
            layer_index = read_layer_index(use, layers)
            if not self.hooks.is_done(use.path, layer_index):
                places = self._find_places(frames, index, use_index, layer_index)
                self.hooks.on_weight(use.path, layer_index, places)
                self._forget_params()

    def _find_places(
        self, frames: list[Frame], index: int, use_index: int, layer_index: LayerIndex
    ) -> list[ReachedWeight]:
        """Returns the places of a weight in the lanes that count.

        A loop that reads the same weight in each step runs from its start, for the inputs of all
        steps.
        """
        places = []
        for lane, frame in enumerate(frames):
            if not frame.lane.is_counted:
                continue
            use, equation = frame.lane.calibration.uses[use_index], frame.equations[index]
            for outer, loop in zip(self._stack, frame.layers, strict=False):
                if loop not in use.view.scans:
                    frame, equation = outer[lane], loop
                    break
            inner = frame.lane.calibration.uses.list_inner(equation)
            use_indices = inner if equation.inner_programs else [use_index]
            layers = find_equal_uses(frame, use_indices, use, layer_index)
            places.append(ReachedWeight(frame, equation, layers))
        return places

    def _walk_uses(
        self, equation: Equation, layers: ScanLayers
    ) -> Iterator[tuple[int, ScanLayers]]:
        """Yields the uses in loops and branches, with their layers, in the order of execution."""
        uses = self.plan.calibration.uses
        for inner in (x for body in equation.inner_programs for x in body.flat_equations()):
            for use_index in uses.find(inner):
                yield use_index, layers
            for layer in list_layers(inner) if uses.reads_layers(inner) else [None]:
                inner_layers = layers if layer is None else {**layers, inner: layer}
                yield from self._walk_uses(inner, inner_layers)


class _Rows:
    """A block of equations in a row."""

    def __init__(
        self, frames: list[Frame], dense: list[Frame], span: Span, name: str, saves: bool
    ) -> None:
        self.name, self._span = name, span
        self._lanes = frames, dense
        self._before = [
            [[{**values} for values in f.data] for f in each] if saves else []
            for each in self._lanes
        ]

    def run(self, walk: Walk) -> None:
        frames, dense = self._lanes
        is_rerun = self._is_run
        walk.run_rows(frames, self._span)
        for frame in () if is_rerun else dense:
            frame.run(frame.equations[self._span.start : self._span.stop])
        self._is_run = True

    _is_run = False

    def restore(self) -> None:
        for frame, before in zip(self._lanes[0], self._before[0], strict=True):
            frame.data[:] = [{**values} for values in before]

    def list_inputs(self, lane: int, is_dense: bool) -> list[Arrays]:
        inputs, _ = self.list_values(lane)
        return [[values[x] for x in inputs] for values in self._before[is_dense][lane]]

    def list_outputs(self, lane: int, is_dense: bool) -> list[Arrays]:
        _, outputs = self.list_values(lane)
        return [[values[x] for x in outputs] for values in self._lanes[is_dense][lane].data]

    def call(self, lane: int, read: ReadFn, inputs: Arrays) -> Arrays:
        values, outputs = self.list_values(lane)
        frame = self._lanes[0][lane].rebind(read, [dict(zip(values, inputs, strict=True))])
        frame.run(frame.equations[self._span.start : self._span.stop])
        return [frame.read_value(0, value) for value in outputs]

    def list_values(self, lane: int) -> tuple[list[Value], list[Value]]:
        frame, before = self._lanes[0][lane], self._before[0][lane][0]
        equations = frame.equations[self._span.start : self._span.stop]
        inputs, outputs = frame.list_boundary(frame.find_active(equations, before))
        return [value for value in inputs if value in before], outputs


class _Steps:
    """A block of steps of a scan in a row."""

    def __init__(
        self, loops: list[Loop], dense: list[Loop], layers: Sequence[int], name: str
    ) -> None:
        self.name, self._layers, self._loops = name, layers, (loops, dense)
        self._before = [[[*loop.carry] for loop in each] for each in self._loops]
        self._num_stacked = len(loops[0].stacked[0])

    _is_run = False

    def run(self, walk: Walk) -> None:
        for layer in self._layers:
            walk.run_step(self._loops[0], layer)
            for loop in () if self._is_run else self._loops[1]:
                step = loop.enter(layer)
                step.run(step.equations)
                loop.leave(step)
        self._is_run = True

    def restore(self) -> None:
        for loop, before in zip(self._loops[0], self._before[0], strict=True):
            loop.carry = [*before]
            for steps in loop.stacked:
                del steps[self._num_stacked :]

    def list_inputs(self, lane: int, is_dense: bool) -> list[Arrays]:
        loop, carries = self._loops[is_dense][lane], self._before[is_dense][lane]
        values = self._list_values(lane)
        data = loop.frame.data
        return [[*carry, *(x[v] for v in values)] for carry, x in zip(carries, data, strict=True)]

    def list_outputs(self, lane: int, is_dense: bool) -> list[Arrays]:
        loop = self._loops[is_dense][lane]
        stacked = [steps[self._num_stacked :] for steps in loop.stacked]
        return [
            [*carry, *(x for step in steps for x in step)]
            for carry, steps in zip(loop.carry, stacked, strict=True)
        ]

    def list_values(self, lane: int) -> tuple[list[Value], list[Value]]:
        loop = self._loops[0][lane]
        outputs, count = loop.body.program.outputs, len(loop.carry[0])
        inputs = [*loop.body.split(loop.body.program.inputs)[1], *self._list_values(lane)]
        return inputs, [*outputs[:count], *outputs[count:] * len(self._layers)]

    def call(self, lane: int, read: ReadFn, inputs: Arrays) -> Arrays:
        original, values = self._loops[0][lane], self._list_values(lane)
        count = len(original.carry[0])
        data = dict(zip(values, inputs[count:], strict=True))
        frame = original.frame.rebind(read, [data])
        loop = Loop(frame, original.scan, [inputs[:count]])
        for layer in self._layers:
            step = loop.enter(layer)
            step.run(step.equations)
            loop.leave(step)
        return [*loop.carry[0], *(x for outputs in loop.stacked[0] for x in outputs)]

    def _list_values(self, lane: int) -> list[Value]:
        """Returns the values around the scan that its steps read besides the carry."""
        loop = self._loops[0][lane]
        constants, _, stacks = loop.body.split(loop.body.inputs)
        return [x for x in dict.fromkeys((*constants, *stacks)) if x in loop.frame.data[0]]


def read_layer_index(use: Use, layers: ScanLayers) -> LayerIndex:
    """Returns the axes that scans take apart, and the layer of each."""
    return tuple(
        (axis, layers[scan]) for axis, scan in zip(use.view.stacked, use.view.scans, strict=True)
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix} {name}" if prefix and name else name or prefix
