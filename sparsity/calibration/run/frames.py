"""Lanes: batches of one shape, with the program of that shape and the values still needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.calibration.reuse import compile_at_call
from sparsity.calibration.run.task import PruningTask
from sparsity.calibration.run.weights import ReadFn
from sparsity.calibration.statistics.capture import Calibration, check_structure
from sparsity.calibration.statistics.row_axes import (
    RowAxes,
    RowWeights,
    check_any_counts,
    find_row_axes,
    read_row_weights,
)
from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.trees import Path, PyTree
from sparsity.programs.program import Body, Equation, Program, Value

ScanLayers: TypeAlias = Mapping[Equation, int]  # the layer of each scan, the outermost first
Values: TypeAlias = dict[Value, jax.Array]
_NARROW = (jnp.bfloat16, jnp.float16)
_MOVES = ("transpose", "reshape", "squeeze", "broadcast_in_dim")


@dataclasses.dataclass(frozen=True, eq=False)
class Lane:
    """Batches of one shape, which run through one program.

    Attributes:
      calibration: the uses of the weights to prune, and the sums of their inputs.
      batches: the indices of the batches among those of the user.
      row_weights: the weights of the rows of each batch, or `None`.
      row_axes: the axes of each value that are axes of the weights.
      is_counted: whether the batches count in statistics, or are held out.
      programs: compiled runs of equations, by the first and the last of them.
    """

    calibration: Calibration
    batches: Sequence[int]
    row_weights: Sequence[jax.Array | None]
    row_axes: RowAxes | None
    is_counted: bool
    programs: dict[tuple[Equation, Equation], Callable[..., list[jax.Array]]] = dataclasses.field(
        default_factory=dict
    )

    def spread(self, value: Value, weights: jax.Array | None) -> jax.Array | None:
        """Returns the weights of the rows of a value, broadcastable to it; `None` for all 1."""
        if weights is None or self.row_axes is None:
            return None
        return self.row_axes.spread(value, weights)


@dataclasses.dataclass(frozen=True, eq=False)
class Frame:
    """A program, the values of a lane, and the parameters that the program reads.

    Attributes:
      lane: the lane.
      program: the program.
      read: `read(path, *layers)` returns a parameter, or one of its first layers.
      data: the values of each batch that depend on data; arrays of one device lie on the host.
      paths: the parameters that inputs of the program are.
      parent: for the body of a scan, the frame around the scan; `None` for the model.
      layers: the layer of each scan around the program.
    """

    lane: Lane
    program: Program
    read: ReadFn
    data: list[Values]
    paths: Mapping[Value, Path] = dataclasses.field(default_factory=dict)
    parent: Frame | None = None
    outer: Mapping[Value, Value] = dataclasses.field(default_factory=dict)  # inputs of a scan
    layers: ScanLayers = dataclasses.field(default_factory=dict)
    _from_params: dict[tuple[Value, tuple[int, ...]], jax.Array] = dataclasses.field(
        default_factory=dict
    )

    @functools.cached_property
    def equations(self) -> list[Equation]:
        """The equations, in the order in which they run."""
        return [*self.program.flat_equations()]

    @functools.cached_property
    def last_uses(self) -> Mapping[Value, Equation | None]:
        """The last equation that needs each value, `None` for outputs."""
        last_uses: dict[Value, Equation | None] = {}
        for equation in self.equations:
            last_uses.update(dict.fromkeys(equation.inputs, equation))
        return last_uses | dict.fromkeys(self.program.outputs)

    def rebind(self, read: ReadFn, data: list[Values]) -> Frame:
        """Returns the frame with other parameters and values."""
        parent = self.parent.rebind(read, []) if self.parent else None
        return dataclasses.replace(self, read=read, data=data, parent=parent, _from_params={})

    def read_from_params(self, value: Value, *layers: int) -> jax.Array:
        """Returns a value that depends on parameters alone, or one of its layers."""
        if value in self.paths:
            return self.read(self.paths[value], *layers)
        if self.parent is not None and value in self.outer:
            scan = [*self.layers][-1]
            index = (self.layers[scan],) if value in _list_stacks(scan) else ()
            return self.parent.read_from_params(self.outer[value], *index, *layers)
        values = self._from_params
        if (value, ()) not in values and value in self.program.makers:
            equation = self.program.makers[value]
            if layers and equation.name == "convert_element_type":  # of a stack: only the layer
                return equation.bind([self.read_from_params(equation.inputs[0], *layers)])[0]
            outputs = equation.bind([self.read_from_params(x) for x in equation.inputs])
            values.update(zip([(x, ()) for x in equation.outputs], outputs, strict=True))
        result: jax.Array = values.get((value, ()), value.constant)
        return result[layers] if layers else result

    def forget_params(self) -> None:
        """Drops values computed from parameters, which have changed."""
        self._from_params.clear()

    def read_value(self, batch: int, value: Value) -> jax.Array:
        """Returns a value for a batch."""
        values = self.data[batch]
        return values[value] if value in values else self.read_from_params(value)

    def find_active(self, equations: Sequence[Equation], data: Values) -> list[Equation]:
        """Returns the equations that read data; others are computed when they are read."""
        from_data, active = {*data}, []
        for equation in equations:
            if not from_data.isdisjoint(equation.inputs):
                from_data.update(equation.outputs)
                active.append(equation)
        return active

    def run(self, equations: Sequence[Equation], batches: Sequence[int] | None = None) -> None:
        """Runs equations on each batch, as one program, and drops values that are not needed."""
        batches = range(len(self.data)) if batches is None else batches
        active = self.find_active(equations, self.data[batches[0]])
        if not active:
            return
        inputs, needed = self.list_boundary(active)
        moves = self._list_moves([x for x in inputs if x not in self.data[batches[0]]])
        inputs = self.list_boundary([*moves, *active])[0]
        key, inside = (active[0], active[-1]), {*active}
        run = _make_run([*moves, *active], inputs, needed)
        compiled = self.lane.programs.setdefault(key, compile_at_call(run))
        for batch in batches:
            values = self.data[batch]
            operands = [self.read_value(batch, value) for value in inputs]
            outputs = (run if any(map(is_traced, operands)) else compiled)(operands)
            for value in inputs:
                if self.last_uses.get(value) in inside:
                    values.pop(value, None)
            values.update(zip(needed, map(_put_on_host, outputs), strict=True))

    def _list_moves(self, from_params: Sequence[Value]) -> list[Equation]:
        """Returns the equations that move entries of parameters, which products need no copy of."""
        moves = dict[Equation, None]()
        for value in from_params:
            equation = self.program.makers.get(value)
            if equation is not None and equation.name in _MOVES:
                moves |= dict.fromkeys((*self._list_moves(equation.inputs), equation))
        return [*moves]

    def list_boundary(self, active: Sequence[Equation]) -> tuple[list[Value], list[Value]]:
        """Returns the values that equations read, and those that they make for others."""
        made = [*dict.fromkeys(value for equation in active for value in equation.outputs)]
        reads = dict.fromkeys(value for equation in active for value in equation.inputs)
        inputs, inside = [x for x in reads if x not in {*made} and not _is_literal(x)], {*active}
        needed = [x for x in made if x in self.last_uses and self.last_uses[x] not in inside]
        return inputs, needed


class Loop:
    """A scan that runs step by step.

    Args:
      frame: the frame around the scan.
      scan: the scan.
      carry: the carried values of each batch; by default those of the frame.
    """

    def __init__(
        self, frame: Frame, scan: Equation, carry: Sequence[list[jax.Array]] | None = None
    ) -> None:
        self.frame, self.scan = frame, scan
        self.body: Body = scan.list_bodies()[0]
        self._constants, carried, self._stacks = self.body.split(self.body.inputs)
        batches = range(len(frame.data))
        self.carry = (
            [*carry]
            if carry is not None
            else [[frame.read_value(b, x) for x in carried] for b in batches]
        )
        self.stacked: list[list[list[jax.Array]]] = [[] for _ in batches]

    def enter(self, layer: int) -> Frame:
        """Returns the frame of a step."""
        constants, carried, stacks = self.body.split(self.body.program.inputs)
        # A carry depends on the data from the first step on.
        data = [dict(zip(carried, arrays, strict=True)) for arrays in self.carry]
        pairs = dict(zip((*constants, *stacks), (*self._constants, *self._stacks), strict=True))
        from_data = {*self.frame.data[0]} if self.frame.data else set()
        for inner, value in pairs.items():
            if value in from_data:
                for batch, values in enumerate(data):
                    array = self.frame.read_value(batch, value)
                    values[inner] = array[layer] if inner in {*stacks} else array
        return Frame(
            self.frame.lane,
            self.body.program,
            self.frame.read,
            data,
            parent=self.frame,
            outer={inner: value for inner, value in pairs.items() if value not in from_data},
            layers={**self.frame.layers, self.scan: layer},
        )

    def leave(self, step: Frame) -> None:
        """Takes over the carry and the outputs of a step that has run."""
        for batch in range(len(self.carry)):
            outputs = [step.read_value(batch, value) for value in step.program.outputs]
            count = len(self.carry[batch])
            self.carry[batch] = outputs[:count]
            self.stacked[batch].append(outputs[count:])

    def finish(self) -> None:
        """Writes the outputs of the scan to the frame around it."""
        frame, scan = self.frame, self.scan
        for batch, values in enumerate(frame.data):
            steps = self.stacked[batch][::-1] if scan.params["reverse"] else self.stacked[batch]
            joined = [_put_on_host(jnp.stack(x)) for x in zip(*steps, strict=True)]
            values.update(zip(scan.outputs, [*self.carry[batch], *joined], strict=True))
            for value in {*scan.inputs, *scan.outputs}:
                if frame.last_uses.get(value, scan) is scan:
                    values.pop(value, None)


def list_layers(scan: Equation) -> Sequence[int]:
    """Returns the layers of a scan, in the order of execution."""
    order = range(scan.length)
    return order[::-1] if scan.params["reverse"] else order


def _list_stacks(scan: Equation) -> list[Value]:
    """Returns the inputs of the body of a scan that are layers of stacks."""
    (body,) = scan.list_bodies()
    return body.split(body.program.inputs)[2]


def _make_run(
    equations: Sequence[Equation], inputs: Sequence[Value], needed: Sequence[Value]
) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Returns a function from the inputs of equations to the values that others need."""

    def run(arrays: list[jax.Array]) -> list[jax.Array]:
        values = dict(zip(inputs, arrays, strict=True))
        for equation in equations:
            operands = [x.constant if _is_literal(x) else values[x] for x in equation.inputs]
            outputs = equation.bind(operands)
            if any(x.dtype in _NARROW for x in equation.outputs):
                # Fused equations would not round between each other.
                outputs = lax.optimization_barrier(outputs)
            values.update(zip(equation.outputs, outputs, strict=True))
        return [values[value] for value in needed]

    return run


def _is_literal(value: Value) -> bool:
    """Returns whether a value is a number of the program, which compiled programs hold."""
    return value.constant is not None and np.ndim(value.constant) == 0


def _put_on_host(array: PyTree) -> PyTree:
    """Returns an array in the memory of the host, unless several devices hold it."""
    is_plain = isinstance(array, jax.Array) and not is_traced(array) and len(array.devices()) == 1
    if not is_plain or jnp.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return np.asarray(array)


def make_lanes(
    task: PruningTask,
    batches: Sequence[PyTree],
    row_weights: RowWeights | None,
    is_counted: bool = True,
) -> list[tuple[Lane, list[Values]]]:
    """Returns the lanes of batches, and the inputs of each batch.

    Raises:
      ValueError: batches differ in structure, lead to other programs, or have other row weights.
    """
    label = "batches" if is_counted else "held"
    groups: dict[object, list[int]] = {}
    for index, batch in enumerate(batches):
        check_structure(batch, batches[0], index)
        arrays = trees.split_arrays(batch)[0]
        groups.setdefault(tuple((x.shape, jnp.result_type(x)) for x in arrays), []).append(index)
    lanes = []
    for indices in groups.values():
        first = batches[indices[0]]
        try:
            graph = task.graph.retrace(task.like, first)
        except Exception as error:
            error.add_note(f"This is {label}[{indices[0]}].")
            raise
        if list_equations(graph.model.program) != list_equations(task.graph.model.program):
            raise ValueError(
                f"{label}[{indices[0]}] makes the model run another program than batches[0], not "
                "only other shapes. Give batches that take the same way through the model, or "
                "sequential=False."
            )
        weights = [read_row_weights(row_weights, batches[i], i) for i in indices]
        axes = None if weights[0] is None else find_row_axes(graph, np.shape(weights[0]))
        lane = Lane(task.make_calibration(graph), indices, weights, axes, is_counted)
        inputs = graph.model.program.inputs[len(graph.parameters) :]
        arrays = [trees.split_arrays(batches[i])[0] for i in indices]
        lanes.append((lane, [dict(zip(inputs, x, strict=True)) for x in arrays]))
    if lanes:
        all_weights = (weights for lane, _ in lanes for weights in lane.row_weights)
        check_any_counts(all_weights, label)
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
