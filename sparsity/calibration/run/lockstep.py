"""Runs of a model on all batches in lockstep, while its weights are pruned on the way.

Each equation runs once on every batch, after the weights that it reads have been pruned. A scan
over layers runs one layer at a time. Some loops read the same weight in every step. Such a loop
runs from its start for each of these weights, to sum the inputs of the weight, and once more for
its outputs when all of its weights have been pruned.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sparsity.calibration.run.frames import Frame, ScanLayers
from sparsity.calibration.run.reached import ReachedWeight
from sparsity.calibration.run.reuse import compile_at_call
from sparsity.calibration.run.weights import LayerIndex
from sparsity.calibration.statistics.capture import Calibration, check_structure, have_equal_axes
from sparsity.core import trees
from sparsity.core.trees import Path, PyTree
from sparsity.graph import Use
from sparsity.programs.entrywise import ENTRYWISE
from sparsity.programs.layout import LAYOUTS
from sparsity.programs.program import Equation, Program, Value


@dataclasses.dataclass(frozen=True, eq=False)
class Lockstep:
    """Runs a model on all batches, and stops at each weight before its product runs.

    Attributes:
      calibration: the uses of the weights, and the sums of their inputs.
      batches: all of one shape.
      read: `read(path, *layers)` returns the current value of a parameter, or of its layer.
      is_done: `is_done(path, index)` returns whether a weight needs no stop.
      on_reached: `on_reached(path, index, reached)` is called at each stop, and may change
        parameters.
    """

    calibration: Calibration
    batches: Sequence[PyTree]
    read: Callable[..., jax.Array]
    is_done: Callable[[Path, LayerIndex], bool]
    on_reached: Callable[[Path, LayerIndex, ReachedWeight], None]
    _frames: list[Frame] = dataclasses.field(default_factory=list)  # the outermost first

    def run(self) -> None:
        """Runs the model from its inputs to its outputs.

        Raises:
          ValueError: the batches differ in shape or structure, or have inputs that are not finite.
        """
        graph = self.calibration.graph
        program, count = graph.model.program, len(graph.parameters)
        inputs = [trees.split_arrays(batch)[0] for batch in self.batches]
        for index, (batch, arrays) in enumerate(zip(self.batches, inputs, strict=True)):
            check_structure(batch, self.batches[0], index)
            if (shapes := _describe_shapes(arrays)) != (first := _describe_shapes(inputs[0])):
                raise ValueError(
                    f"Batch {index} has arrays {shapes}, batch 0 has {first}. All batches run in "
                    "lockstep and must be alike: leave out or fill up the one that is smaller, or "
                    "give sequential=False."
                )
        data = [dict(zip(program.inputs[count:], arrays, strict=True)) for arrays in inputs]
        param_inputs = {
            value: functools.partial(self.read, param.path)
            for value, param in graph.model.parameter_inputs.items()
        }
        self._run(Frame(program, param_inputs, data, {}))

    def _run(self, frame: Frame) -> None:
        self._frames.append(frame)
        for equations in self._split_into_stretches(frame):
            if len(equations) > 1:
                self._run_stretch(frame, equations)
            else:
                self._run_equation(frame, equations[0])
        self._frames.pop()

    def _split_into_stretches(self, frame: Frame) -> Iterator[list[Equation]]:
        """Yields the equations that read data: entrywise ones and layouts in a row together."""
        uses, from_data, stretch = self.calibration.uses, {*frame.data[0]}, list[Equation]()
        for equation in frame.program.flat_equations():
            # Values of parameters alone are computed when they are read: parameters still change.
            if from_data.isdisjoint(equation.inputs):
                continue
            from_data.update(equation.outputs)
            is_plain = equation.name in ENTRYWISE or equation.name in LAYOUTS
            if is_plain and not equation.inner_programs and not uses.find(equation):
                stretch.append(equation)
                continue
            yield from [stretch] if stretch else []
            yield [equation]
            stretch = []
        yield from [stretch] if stretch else []

    def _run_stretch(self, frame: Frame, equations: list[Equation]) -> None:
        """Runs equations in a row as one program, with the bits of one program each."""
        made_values = dict.fromkeys(value for equation in equations for value in equation.outputs)
        read_values = dict.fromkeys(value for equation in equations for value in equation.inputs)
        inputs, inside = [value for value in read_values if value not in made_values], {*equations}
        needed_values = [
            value for value in made_values if frame.last_uses.get(value, equations[0]) not in inside
        ]

        def run(arrays: list[jax.Array]) -> list[jax.Array]:
            values = dict(zip(inputs, arrays, strict=True))
            for equation in equations:
                outputs = equation.bind([values[x] for x in equation.inputs])
                # Fused, equations in bfloat16 would not round between each other.
                values.update(zip(equation.outputs, lax.optimization_barrier(outputs), strict=True))
            return [values[x] for x in needed_values]

        compiled = compile_at_call(run)
        for batch, values in enumerate(frame.data):
            arrays = [frame.read(batch, value) for value in inputs]
            values.update(zip(needed_values, compiled(arrays), strict=True))
            for equation in equations:
                frame.drop_unneeded(batch, equation)  # before the next batch needs memory

    def _run_equation(self, frame: Frame, equation: Equation) -> None:
        """Prunes the weights that an equation reads, and runs the equation."""
        for use_index in self.calibration.uses.find(equation):
            self._prune_weight(frame, equation, use_index, frame.layers)
        if self._must_run_by_layer(equation, frame.layers):
            self._run_scan(frame, equation)
            return
        for use_index, layers in self._walk_uses(equation.inner_programs, frame.layers):
            self._prune_weight(frame, equation, use_index, layers)
        # Each trace of a loop would leave a compiled program in the caches of jax.
        run = compile_at_call(equation.bind) if equation.inner_programs else equation.bind
        for batch in range(len(frame.data)):
            frame.write(batch, equation, run(frame.read_inputs(batch, equation)))

    def _walk_uses(
        self, inner_programs: Sequence[Program], layers: ScanLayers
    ) -> Iterator[tuple[int, ScanLayers]]:
        """Yields the uses in loops and branches, with their layers, in the order of execution."""
        uses = self.calibration.uses
        for equation in (equation for body in inner_programs for equation in body.flat_equations()):
            for use_index in uses.find(equation):
                yield use_index, layers
            for layer in _list_layers(equation) if uses.reads_layers(equation) else [None]:
                inner_layers = layers if layer is None else {**layers, equation: layer}
                yield from self._walk_uses(equation.inner_programs, inner_layers)

    def _must_run_by_layer(self, equation: Equation, layers: ScanLayers) -> bool:
        """Returns whether a scan takes weights apart that are still to be pruned."""
        return equation.name == "scan" and any(
            equation in (use := self.calibration.uses[use_index]).view.scans
            and not self.is_done(use.path, _read_layer_index(use, inner_layers))
            for layer in _list_layers(equation)
            for use_index, inner_layers in self._walk_uses(
                equation.inner_programs, {**layers, equation: layer}
            )
        )

    def _run_scan(self, frame: Frame, equation: Equation) -> None:
        """Runs a scan layer by layer."""
        (body,) = equation.list_bodies()
        constants, carried, stacks = body.split(body.inputs)
        inner_constants, inner_carried, inner_stacks = body.split(body.program.inputs)
        batches, count = range(len(frame.data)), len(carried)
        carry = [[frame.read(b, value) for value in carried] for b in batches]
        stacked: list[list[list[jax.Array]]] = [[] for _ in batches]
        for layer in _list_layers(equation):
            param_inputs: dict[Value, Callable[..., jax.Array]] = {}
            # A carry depends on the data from the first step on.
            data = [dict(zip(inner_carried, arrays, strict=True)) for arrays in carry]
            inputs = zip((*constants, *stacks), (*inner_constants, *inner_stacks), strict=True)
            for input_index, (value, inner) in enumerate(inputs):
                index = (layer,) if input_index >= len(constants) else ()
                if value not in frame.data[0]:
                    param_inputs[inner] = functools.partial(frame.read_from_params, value, *index)
                    continue
                for batch in batches:
                    array = frame.read(batch, value)
                    data[batch][inner] = array[index] if index else array
            inner_frame = Frame(body.program, param_inputs, data, {**frame.layers, equation: layer})
            self._run(inner_frame)
            for batch in batches:
                outputs = [inner_frame.read(batch, value) for value in body.program.outputs]
                carry[batch] = outputs[:count]
                stacked[batch].append(outputs[count:])
        for batch in batches:
            layers = stacked[batch][::-1] if equation.params["reverse"] else stacked[batch]
            joined = [jnp.stack(x) for x in zip(*layers, strict=True)]
            frame.write(batch, equation, [*carry[batch], *joined])

    def _prune_weight(
        self, frame: Frame, equation: Equation, use_index: int, layers: ScanLayers
    ) -> None:
        """Prunes the weight of a use, unless done already, by its inputs in all steps of loops."""
        uses = self.calibration.uses
        use = uses[use_index]
        index = _read_layer_index(use, layers)
        if self.is_done(use.path, index):
            return
        # The outermost loop that reads the same weight in each step.
        for outer, loop in zip(self._frames, frame.layers, strict=False):
            if loop not in use.view.scans:
                frame, equation = outer, loop
                break
        use_indices = uses.list_inner(equation) if equation.inner_programs else [use_index]
        equal_uses = self._find_equal_uses(use_indices, use, index, frame)
        reached = ReachedWeight(self.calibration, frame, equation, equal_uses)
        self.on_reached(use.path, index, reached)
        for inner_frame in self._frames:
            inner_frame.forget_params()

    def _find_equal_uses(
        self, use_indices: Sequence[int], use: Use, index: LayerIndex, frame: Frame
    ) -> dict[int, ScanLayers]:
        """Returns the uses that read the same weight along the same axes as the first of them.

        Each has the layers of the scans inside the frame.
        """
        layers: dict[int, ScanLayers] = {}
        for use_index in use_indices:
            other, layer_by_axis = self.calibration.uses[use_index], dict(index)
            if other.path != use.path or {*other.view.stacked} != {*layer_by_axis}:
                continue
            pairs = zip(other.view.scans, other.view.stacked, strict=True)
            scan_layers = {scan: layer_by_axis[axis] for scan, axis in pairs}
            if all(frame.layers.get(scan, layer) == layer for scan, layer in scan_layers.items()):
                layers[use_index] = {s: n for s, n in scan_layers.items() if s not in frame.layers}
        alignments = self.calibration.alignments
        axes = alignments[min(layers)].axes
        return {n: x for n, x in layers.items() if have_equal_axes(alignments[n].axes, axes)}


def _list_layers(scan: Equation) -> Sequence[int]:
    """Returns the layers of a scan, in the order of execution."""
    order = range(scan.length)
    return order[::-1] if scan.params["reverse"] else order


def _read_layer_index(use: Use, layers: ScanLayers) -> LayerIndex:
    """Returns the axes that scans take apart, and the layer of each."""
    return tuple(
        (axis, layers[scan]) for axis, scan in zip(use.view.stacked, use.view.scans, strict=True)
    )


def _describe_shapes(arrays: Sequence[jax.Array]) -> str:
    return ", ".join(f"{jnp.result_type(x)}{list(x.shape)}" for x in arrays)
