"""Programs that also compute sums, in loops and branches, too."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.statistics.statistic import Statistic
from sparsity.core.trees import PyTree
from sparsity.graph import Use
from sparsity.programs.program import Equation, Program
from sparsity.programs.walk import Interpreter, scan_like, switch

Steps: TypeAlias = Mapping[Equation, jax.Array]  # the step of each scan around a product
Sums: TypeAlias = dict[int, PyTree]  # by index of the use: arrays that add up
SumFn: TypeAlias = Callable[[int, jax.Array, Steps], PyTree]


def add(one: PyTree, other: PyTree) -> PyTree:
    """Adds trees of arrays."""
    return jax.tree.map(operator.add, one, other)


_add_in_place: Callable[[PyTree, PyTree], PyTree] = jax.jit(add, donate_argnums=0)


def add_batch(total: PyTree | None, sums: PyTree) -> PyTree:
    """Adds the sums of a batch to those before, in place; counts add up on the host.

    There integers have 64 bits, and so never become negative.
    """
    counts, arrays = _split_counts(sums)
    if total is not None:
        counts_before, arrays_before = _split_counts(total)
        counts = [one + other for one, other in zip(counts_before, counts, strict=True)]
        arrays = _add_in_place(arrays_before, arrays)
    rows = iter(counts)
    return jax.tree.map(
        lambda x: dataclasses.replace(x, count=next(rows)) if isinstance(x, Statistic) else x,
        arrays,
        is_leaf=_is_statistic,
    )


def _split_counts(sums: PyTree) -> tuple[list[np.ndarray], PyTree]:
    """Returns the counts of statistics on the host, and the statistics without counts."""
    leaves = jax.tree.leaves(sums, is_leaf=_is_statistic)
    counts = [np.asarray(x.count) for x in leaves if isinstance(x, Statistic)]
    wide = [x.astype(np.float64 if x.dtype.kind == "f" else np.int64) for x in counts]
    return wide, jax.tree.map(
        lambda x: dataclasses.replace(x, count=0) if isinstance(x, Statistic) else x,
        sums,
        is_leaf=_is_statistic,
    )


def _is_statistic(x: object) -> bool:
    return isinstance(x, Statistic)


class Uses(dict[int, Use]):
    """Uses by index, and by the equations that they are or lie in."""

    def __init__(self, uses: Mapping[int, Use]) -> None:
        super().__init__(uses)
        self._at: dict[Equation, list[int]] = {}
        for use_index, use in uses.items():
            self._at.setdefault(use.equation, []).append(use_index)

    def find(self, equation: Equation) -> Sequence[int]:
        """Returns the indices of the uses that are this product."""
        return self._at.get(equation, ())

    def list_inner(self, equation: Equation) -> list[int]:
        """Returns the uses in the body of a loop or in a branch, in program order."""
        return [
            use_index
            for body in equation.inner_programs
            for inner in body.flat_equations()
            for use_index in (*self.find(inner), *self.list_inner(inner))
        ]

    def reads_layers(self, equation: Equation) -> bool:
        """Returns whether an equation is a scan whose steps read layers of a weight."""
        return any(equation in self[n].view.scans for n in self.list_inner(equation))


class SummingInterpreter(Interpreter[jax.Array]):
    """Runs a program and sums the inputs of chosen uses on the way.

    Args:
      uses: the uses by index.
      sum_up: `sum_up(use_index, x, steps)` returns the sums of a use, a tree of arrays.
      stacks: keep the sums of each layer of a stacked weight apart, in leading axes.

    Attributes:
      sums: the sums of what has run so far.
    """

    def __init__(self, uses: Uses, sum_up: SumFn, stacks: bool = False) -> None:
        self.sums: Sums = {}
        self._uses, self._sum_up, self._stacks = uses, sum_up, stacks
        self._steps: Steps = {}

    def bind(self, equation: Equation, inputs: list[jax.Array]) -> list[jax.Array]:
        for use_index in self._uses.find(equation):
            x = inputs[1 - self._uses[use_index].operand]
            self.sums[use_index] = self._sum_up(use_index, x, self._steps)
        return equation.bind(inputs)

    def enters(self, equation: Equation) -> bool:
        return equation.name in ("scan", "cond") and bool(self._uses.list_inner(equation))

    def _copy_without_sums(self) -> SummingInterpreter:
        """Returns the interpreter of the body of a loop or of a branch."""
        inner = copy.copy(self)
        inner.sums = {}
        return inner

    def scan(self, equation: Equation, inputs: list[jax.Array]) -> Sequence[jax.Array]:
        """Runs a scan.

        Sums of a weight that all steps read add up. A weight that the scan takes apart, so that
        each step reads a layer, has sums of each step: outputs of the scan, stacked like others.
        """
        (body,) = equation.list_bodies()
        constants, carry, stacks = body.split(inputs)
        layers = stacks, jnp.arange(equation.length, dtype=jnp.int32)

        def run(carry: PyTree, layer: PyTree) -> tuple[PyTree, PyTree, Sums, Sums]:
            """Returns the carry, the outputs, and the sums of one step: to add up, to stack."""
            arrays, step_index = layer
            inner = self._copy_without_sums()
            inner._steps = {**self._steps, equation: step_index}
            outputs = inner.run(body.program, [*constants, *carry, *arrays])
            taken_apart = [n for n in inner.sums if equation in self._uses[n].view.scans]
            stacked = {n: inner.sums.pop(n) for n in taken_apart if self._stacks}
            return outputs[: len(carry)], outputs[len(carry) :], inner.sums, stacked

        def step(state: PyTree, layer: PyTree) -> tuple[PyTree, PyTree]:
            carry, total = state
            carry, outputs, sums, stacked = run(carry, layer)
            return (carry, add(total, sums)), (outputs, stacked)

        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), layers)
        total = _make_zeros(jax.eval_shape(run, carry, layer)[2])
        (carry, total), (outputs, stacked) = scan_like(equation, step, (carry, total), layers)
        self.sums |= total | stacked
        return [*carry, *outputs]

    def cond(self, equation: Equation, inputs: list[jax.Array]) -> Sequence[jax.Array]:
        """Runs a branch; the sums of the other branches are 0."""
        index, *operands = inputs
        zeros: Sums = {}

        def run_branch(program: Program, *operands: jax.Array) -> tuple[list[jax.Array], Sums]:
            inner = self._copy_without_sums()
            outputs = inner.run(program, operands)
            return outputs, _make_zeros(zeros) | inner.sums

        branches = [functools.partial(run_branch, body) for body in equation.inner_programs]
        for branch in branches:
            # All branches must return the same sums: zeros stand for those of the other branches.
            zeros |= jax.eval_shape(branch, *operands)[1]
        outputs: list[jax.Array]
        outputs, sums = switch(index, branches, operands)
        self.sums |= sums
        return outputs


def _make_zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
