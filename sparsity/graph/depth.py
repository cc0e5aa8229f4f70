"""Residual branches and blocks of a program: what may go as a whole, and what its removal changes.

A branch is a function that is added to the stream which it reads: x + f(x), where products of
parameters write f. Masks that remove these parameters leave x, and `sparsity.shrink` then cuts all
that computes f. A block is the branches in a row whose parameters have one name up to its number,
or those of one layer of a scan.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsity.core import trees
from sparsity.core.arrays import promote
from sparsity.core.names import name_blocks
from sparsity.core.trees import Path, PyTree
from sparsity.graph.coupling import Coupling
from sparsity.graph.traced_model import Model
from sparsity.graph.uses import Use
from sparsity.programs.axes import Variable, list_variables
from sparsity.programs.entrywise import (
    ENTRYWISE,
    REDUCTIONS,
    find_uniform_value,
    fold_constant,
    is_same,
    repeat_constant,
)
from sparsity.programs.layout import LAYOUTS
from sparsity.programs.program import CALLS, Equation, Program, Value
from sparsity.programs.walk import Interpreter, scan_like

_SUMS = ("add", "add_any", "sub")


class ResidualBranch(NamedTuple):
    """A function that is added to a stream.

    Attributes:
      name: the first parameter that writes the branch, with the number of its layer in a scan.
      paths: the parameters that write it, and their biases; without them the branch is 0.
      stream: the value that the branch is added to.
      output: the sum.
      layer: the layer of a scan, whose parts of the parameters write the branch; or `None`.
    """

    name: str
    paths: tuple[Path, ...]
    stream: Value
    output: Value
    layer: int | None = None


class ResidualBlock(NamedTuple):
    """Branches in a row, such as the attention and the feed-forward layer of a transformer.

    Attributes:
      name: what the names of their parameters have in common, up to the first number.
      branches: the branches.
    """

    name: str
    branches: tuple[ResidualBranch, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class LayerStack:
    """Layers of a scan that return what they read where all of their branches are 0.

    Attributes:
      variable: the axis of the layers.
      scan: the scan.
      name: what the names of the parameters that write the branches begin with.
      branches: the branches of every layer.
    """

    variable: Variable
    scan: Equation
    name: str
    branches: tuple[ResidualBranch, ...]

    @property
    def paths(self) -> list[Path]:
        """The parameters without whose part of a layer the layer returns what it reads."""
        return [path for branch in self.branches for path in branch.paths]

    @property
    def blocks(self) -> list[ResidualBlock]:
        """The layers as blocks."""
        return [
            ResidualBlock(
                f"{self.name}/{i}",
                tuple(x._replace(name=f"{x.name}/{i}", layer=i) for x in self.branches),
            )
            for i in range(self.scan.length)
        ]


class _Search:
    """Search for branches in the program of a model, or in the body of a scan.

    Args:
      program: the program, or the body.
      parameters: {input: the parameter that it is, or a layer of the parameter}.
      uses: the products and lookups that read parameters.
      is_layer: whether the program is a layer of a scan: all that it adds must be 0, biases
        that are added to the stream too, and no custom rule may pass gradients by.
    """

    def __init__(
        self,
        program: Program,
        parameters: Mapping[Value, Path],
        uses: Sequence[Use],
        is_layer: bool = False,
    ) -> None:
        self._program, self._parameters, self._is_layer = program, parameters, is_layer
        self._ruled = {*_list_ruled(program)} if is_layer else set[Equation]()
        counts = Counter(use.path for use in uses)
        self._writers = {
            use.equation: use.path
            for use in uses
            # Others read or join the parameter, or the product reads a function of it.
            if counts[use.path] == 1
            and use.view.scale is not None
            and not use.view.has_other_entries
        }
        self._num_reads = Counter(x for y in program.flat_equations() for x in y.inputs)
        self._makers: dict[Value, set[Value]] = {}

    def find_branches(self) -> list[ResidualBranch]:
        """Returns the branches in the order of the program."""
        streams: dict[Value, set[Value]] = {}  # {sum: the streams before, and itself}
        branches = []
        for equation in self._program.flat_equations():
            pairs = [*itertools.permutations(equation.inputs)] if equation.name in _SUMS else []
            for stream, branch in pairs[:1] if equation.name == "sub" else pairs:
                if stream.shape != equation.outputs[0].shape:
                    continue
                earlier = streams.get(stream) or {*_list_casts(self._program, stream)}
                is_read = self._is_layer or self._reads(branch, earlier)
                if is_read and (paths := self._find_zeros(branch, earlier)):
                    (output,) = equation.outputs
                    name = trees.join_names(paths[0])
                    branches.append(ResidualBranch(name, tuple(paths), stream, output))
                    streams[output] = earlier | {output}
                    break
        return branches

    def _reads(self, value: Value, streams: set[Value]) -> bool:
        pending, seen = [value], set[Value]()
        while pending:
            value = pending.pop()
            if value in streams:
                return True
            if value not in seen and value in self._program.makers:
                pending += self._program.makers[value].inputs
            seen.add(value)
        return False

    def _find_zeros(self, branch: Value, streams: set[Value]) -> list[Path]:
        """Returns the fewest parameters without which a branch is 0: weights, then others.

        Empty if there are none, or if the branch is not 0 then.
        """
        weights, others = dict[Value, Path](), dict[Value, Path]()
        pending, seen = [branch], {*streams}
        while pending:
            value = pending.pop()
            maker = None if value in seen else self._program.makers.get(value)
            if maker in self._ruled:
                return []
            if maker in self._writers:
                weights[value] = self._writers[maker]
            elif maker is not None:
                pending += maker.inputs[::-1]
            elif value in self._parameters and self._num_reads[value] == 1:
                others[value] = self._parameters[value]  # scales and shifts
            seen.add(value)
        zeros = {**weights, **others}
        is_written = weights or (others and self._is_layer)
        if not is_written or not self._is_zero(branch, zeros.keys(), streams):
            return []
        for value in [*others, *reversed(weights)]:
            is_last = zeros.keys() & weights.keys() == {value}
            if not is_last and self._is_zero(branch, zeros.keys() - {value}, streams):
                del zeros[value]
        return [*zeros.values()]

    def _is_zero(self, branch: Value, zeros: Iterable[Value], streams: set[Value]) -> bool:
        """Returns whether a value is 0 where others are, and streams are unknown."""
        constants: dict[Value, float | None] = {
            **dict.fromkeys(streams),
            **dict.fromkeys(zeros, 0.0),
        }

        def fold(value: Value) -> float | None:
            if value not in constants:
                constants[value] = fold_maker(value)
            return constants[value]

        def fold_maker(value: Value) -> float | None:
            maker = self._program.makers.get(value)
            if maker is None:
                return find_uniform_value(value.constant)
            if len(maker.outputs) > 1:
                return None
            if maker.name in ENTRYWISE:
                return fold_constant(maker, tuple(map(fold, maker.inputs)))
            if maker.name in REDUCTIONS and value.size:
                constant = fold(maker.inputs[0])
                return None if constant is None else repeat_constant(maker.name, constant)
            if (rule := LAYOUTS.get(maker.name)) is None or rule.find_reduction(maker):
                return None
            sources = [fold(maker.inputs[i]) for i in rule.sources(maker, 0)]
            sources += [x for x in [rule.fill(maker)] if x is not None]
            return sources[0] if all(is_same(x, sources[0]) for x in sources) else None

        return fold(branch) == 0


def _list_ruled(program: Program) -> Iterator[Equation]:
    """Yields the equations of a program within calls that have a custom rule for derivatives."""
    for equation in program.equations:
        if equation.name in CALLS:
            inner = equation.inner_programs[0]
            yield from _list_ruled(inner) if equation.rule is None else inner.flat_equations()


def _list_casts(program: Program, value: Value) -> Iterator[Value]:
    """Yields a value, and the values that it was cast from."""
    yield value
    while (maker := program.makers.get(value)) and maker.name == "convert_element_type":
        (value,) = maker.inputs
        yield value


def find_blocks(model: Model, uses: Sequence[Use]) -> list[ResidualBlock]:
    """Returns the blocks of a model in order, those outside of loops."""
    parameters = {value: x.path for value, x in model.parameter_inputs.items()}
    branches = _Search(model.program, parameters, uses).find_branches()
    names = name_blocks(branch.paths[0] for branch in branches)
    grouped = itertools.groupby(branches, lambda branch: names[branch.paths[0]])
    return [ResidualBlock(name, tuple(members)) for name, members in grouped]


def find_stacks(model: Model, uses: Sequence[Use], coupling: Coupling) -> list[LayerStack]:
    """Returns the scans of a model, outside of other loops, whose layers can go one by one."""
    names, stacks = Counter[str](), list[LayerStack]()
    step_axes = {scan: list_variables(axis) for scan, axis in coupling.step_axes.items()}
    num_scans = Counter(variable for steps in step_axes.values() for variable in steps)
    for scan in model.program.flat_equations():
        steps = step_axes.get(scan, [])
        if len(steps) == 1 and steps[0].pin is None and num_scans[steps[0]] == 1:
            branches = _find_layer_branches(model, scan, uses, coupling, steps[0])
            if branches:
                paths = [path[:-1] for branch in branches for path in branch.paths]
                shared = functools.reduce(_find_common_start, paths)
                name = trees.join_names(shared) if shared else "layers"
                names[name] += 1
                name = name if names[name] == 1 else f"{name}.{names[name]}"
                stacks.append(LayerStack(steps[0], scan, name, tuple(branches)))
    return stacks


def _find_layer_branches(
    model: Model, scan: Equation, uses: Sequence[Use], coupling: Coupling, layers: Variable
) -> list[ResidualBranch]:
    """Returns the branches of a layer of a scan; none if it does more than to add to its carry."""
    (body,) = scan.list_bodies()
    parameters = {
        inner: model.parameter_inputs[value].path
        for i, (value, inner) in enumerate(zip(body.inputs, body.program.inputs, strict=True))
        if i in body.layers and value in model.parameter_inputs
    }
    branches = _Search(body.program, parameters, uses, is_layer=True).find_branches()
    by_output, chain = {branch.output: branch for branch in branches}, list[ResidualBranch]()
    for output_index, input_index in body.carries:
        value, part = body.program.outputs[output_index], list[ResidualBranch]()
        carry, values = body.program.inputs[input_index], list[Value]()
        while True:
            casts = [*_list_casts(body.program, value)]
            values += casts
            if carry in casts or casts[-1] not in by_output:
                break
            part.append(by_output[casts[-1]])
            value = part[-1].stream
        # A carry that is cast to a dtype without some of its numbers, and back, changes.
        if carry not in casts or any(promote(x.dtype, carry.dtype) != x.dtype for x in values):
            return []
        chain += reversed(part)
    inputs = model.parameter_inputs.items()
    stacked = {x.path for value, x in inputs if x.shape and coupling.axes(value)[0].root is layers}
    return chain if stacked.issuperset(path for x in chain for path in x.paths) else []


def _find_common_start(one: Path, other: Path) -> Path:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(name for name, _ in pairs)


class _Comparer(Interpreter[jax.Array]):
    """Runs a program, and compares the streams before and after some blocks.

    Attributes:
      arrays: {value at the start or the end of a block: array}.
      distances: {scan: numbers [layers]}.
    """

    def __init__(self, blocks: Iterable[ResidualBlock], scans: Mapping[Equation, ResidualBlock]):
        self._scans = scans
        self._values = {x for block in [*blocks, *scans.values()] for x in _list_ends(block)}
        self.arrays: dict[Value, jax.Array] = {}
        self.distances: dict[Equation, jax.Array] = {}

    def define(self, value: Value, array: jax.Array) -> jax.Array:
        if value in self._values:
            self.arrays[value] = array
        return array

    def run(self, program: Program, inputs: Sequence[jax.Array]) -> list[jax.Array]:
        for value, array in zip(program.inputs, inputs, strict=True):
            self.define(value, array)
        return super().run(program, inputs)

    def enters(self, equation: Equation) -> bool:
        return equation in self._scans

    def scan(self, equation: Equation, inputs: list[jax.Array]) -> Sequence[jax.Array]:
        (body,) = equation.list_bodies()
        constants, carry, stacks = body.split(inputs)

        def step(carry: list[jax.Array], layers: list[jax.Array]) -> tuple[PyTree, PyTree]:
            outputs = self.run(body.program, [*constants, *carry, *layers])
            distance = self.measure(self._scans[equation])
            return outputs[: len(carry)], (outputs[len(carry) :], distance)

        carry, (stacked, distances) = scan_like(equation, step, carry, stacks)
        self.distances[equation] = distances
        return [*carry, *stacked]

    def measure(self, block: ResidualBlock) -> jax.Array:
        """Returns 1 - the mean cosine of the streams before and after a block."""
        before, after = (
            self.arrays[value].astype(promote(value.dtype, jnp.float32))
            for value in _list_ends(block)
        )
        product = jnp.sum(before * after, axis=-1)
        norms = jnp.linalg.norm(before, axis=-1) * jnp.linalg.norm(after, axis=-1)
        return 1 - jnp.mean(product / jnp.maximum(norms, jnp.finfo(norms.dtype).tiny))


def _list_ends(block: ResidualBlock) -> tuple[Value, Value]:
    return block.branches[0].stream, block.branches[-1].output


def compare_streams(
    model: Model,
    blocks: Sequence[ResidualBlock],
    stacks: Sequence[LayerStack],
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """Returns 1 - the mean cosine of the streams before and after each block.

    Args:
      model: the model.
      blocks: its blocks outside of loops.
      stacks: its layers in scans, whose numbers follow those of the blocks.
      arrays: the leaves of its parameters and of its inputs.
    """
    comparer = _Comparer(blocks, {stack.scan: stack.blocks[0] for stack in stacks})
    model.run(comparer, arrays)
    distances = [comparer.measure(block) for block in blocks]
    return [*distances, *(x for stack in stacks for x in comparer.distances[stack.scan])]
