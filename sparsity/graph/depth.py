"""Residual branches and blocks of a program: what may go as a whole, and what its removal changes.

A branch is a function that is added to the stream which it reads: x + f(x), where products of
parameters write f. Masks that remove these parameters leave x, and `sparsity.shrink` then cuts all
that computes f. A block is the branches in a row whose parameters have one name up to its number.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsity.core import trees
from sparsity.core.arrays import promote
from sparsity.core.names import name_blocks
from sparsity.core.trees import Path, PyTree
from sparsity.graph.readers import Bias
from sparsity.graph.traced_model import Model
from sparsity.graph.uses import Use
from sparsity.programs.program import Equation, Program, Value
from sparsity.programs.walk import Interpreter

_SUMS = ("add", "add_any")
_KEEP_ZERO = (
    *_SUMS, "sub", "mul", "div", "neg", "convert_element_type", "copy",
    "transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim",
)  # fmt: skip


class ResidualBranch(NamedTuple):
    """A function that is added to a stream.

    Attributes:
      name: the first parameter that writes the branch.
      paths: the parameters that write it, and their biases; without them the branch is 0.
      stream: the value that the branch is added to.
      output: the sum.
    """

    name: str
    paths: tuple[Path, ...]
    stream: Value
    output: Value


class ResidualBlock(NamedTuple):
    """Branches in a row, such as the attention and the feed-forward layer of a transformer.

    Attributes:
      name: what the names of their parameters have in common, up to the first number.
      branches: the branches.
    """

    name: str
    branches: tuple[ResidualBranch, ...]


def find_blocks(
    model: Model, uses: Sequence[Use], biases: Mapping[Path, Bias]
) -> list[ResidualBlock]:
    """Returns the blocks of a model in order, those outside of loops.

    Args:
      model: the model.
      uses: the products and lookups that read parameters.
      biases: the parameters that shift the outputs of others.
    """
    counts = Counter(use.path for use in uses)
    readers = {
        use.equation: use.path
        for use in uses
        # Others read or join the parameter, or the product reads a function of it.
        if counts[use.path] == 1 and use.view.scale is not None and not use.view.has_other_entries
    }
    streams: dict[Value, Value] = {}  # {sum of a stream and a branch: the stream before}
    branches = []
    for equation in model.program.flat_equations():
        if equation.name not in _SUMS or equation.inputs[0].shape != equation.inputs[1].shape:
            continue
        for stream, branch in itertools.permutations(equation.inputs):
            paths = _find_zeros(model, branch, readers, biases)
            if paths and not _list_streams(stream, streams).isdisjoint(
                _list_makers(model.program, branch)
            ):
                name = trees.join_names(paths[0])
                branches.append(ResidualBranch(name, tuple(paths), stream, equation.outputs[0]))
                streams[equation.outputs[0]] = stream
                break
    names = name_blocks(branch.paths[0] for branch in branches)
    grouped = itertools.groupby(branches, lambda branch: names[branch.paths[0]])
    return [ResidualBlock(name, tuple(members)) for name, members in grouped]


def _find_zeros(
    model: Model,
    value: Value,
    readers: Mapping[Equation, Path],
    biases: Mapping[Path, Bias],
) -> list[Path]:
    """Returns the parameters without which a value is 0: weights, then their biases.

    Empty if there are none, or if the value is not 0 then.
    """
    shifts = set[Path]()

    def find(value: Value) -> list[Path] | None:
        if (parameter := model.parameter_inputs.get(value)) is not None:
            shifts.add(parameter.path)
            return []
        equation = model.program.makers.get(value)
        if equation is None:
            return None  # a constant, or an input
        if equation in readers:
            return [readers[equation]]
        if equation.name not in _KEEP_ZERO:
            return None
        if equation.name in ("mul", "div"):  # a factor of 0 is enough, unless the other is infinite
            factors = equation.inputs[: 1 if equation.name == "div" else 2]
            for factor, other in zip(factors, equation.inputs[::-1], strict=False):
                makers, paths = _list_makers(model.program, other), find(factor) or []
                reads_factor = any(readers[x] in paths for x in readers if x.outputs[0] in makers)
                if paths and not reads_factor:
                    return paths
            return None
        parts = [find(x) for x in equation.inputs]
        return None if None in parts else [path for part in parts for path in part or ()]

    weights = list(dict.fromkeys(find(value) or ()))
    shifted = {biases[path].path for path in weights if path in biases}
    return [*weights, *sorted(shifts)] if weights and shifts <= shifted else []


def _list_streams(stream: Value, streams: Mapping[Value, Value]) -> set[Value]:
    """Returns a stream, and the streams before the branches that were added to it."""
    earlier = {stream}
    while stream in streams:
        stream = streams[stream]
        earlier.add(stream)
    return earlier


def _list_makers(program: Program, value: Value) -> set[Value]:
    """Returns a value, and all values that it is computed from."""
    pending, seen = [value], set[Value]()
    while pending:
        value = pending.pop()
        if value not in seen and value in program.makers:
            pending += program.makers[value].inputs
        seen.add(value)
    return seen


class _Recorder(Interpreter[jax.Array]):
    """Runs a program, and keeps some of its values."""

    def __init__(self, values: Iterable[Value]) -> None:
        self._values = {*values}
        self.arrays: dict[Value, jax.Array] = {}

    def define(self, value: Value, array: jax.Array) -> jax.Array:
        if value in self._values:
            self.arrays[value] = array
        return array

    def enters(self, equation: Equation) -> bool:
        return False


def compare_streams(
    model: Model, blocks: Sequence[ResidualBlock], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns 1 - the mean cosine of the streams before and after each block.

    Args:
      model: the model.
      blocks: its blocks.
      arrays: the leaves of its parameters and of its inputs.
    """
    ends = [(block.branches[0].stream, block.branches[-1].output) for block in blocks]
    recorder = _Recorder(itertools.chain(*ends))
    for value, array in zip(model.program.inputs, arrays, strict=True):
        recorder.define(value, array)
    model.run(recorder, arrays)

    def compare(values: Iterable[Value]) -> jax.Array:
        before, after = (
            recorder.arrays[value].astype(promote(value.dtype, jnp.float32)) for value in values
        )
        product = jnp.sum(before * after, axis=-1)
        norms = jnp.linalg.norm(before, axis=-1) * jnp.linalg.norm(after, axis=-1)
        return 1 - jnp.mean(product / jnp.maximum(norms, jnp.finfo(norms.dtype).tiny))

    return [compare(values) for values in ends]


def measure_loss(outputs: PyTree, expected: PyTree) -> jax.Array:
    """Returns the relative squared error of all outputs that have fractions."""
    lost = total = jnp.float32(0)
    for x, y in zip(jax.tree.leaves(outputs), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(jnp.result_type(y), jnp.inexact):
            wide = promote(jnp.result_type(y), jnp.float32)
            lost += jnp.sum(jnp.square(jnp.abs(x.astype(wide) - y.astype(wide))))
            total += jnp.sum(jnp.square(jnp.abs(y.astype(wide))))
    return lost / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
