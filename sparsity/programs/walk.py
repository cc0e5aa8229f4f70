"""Walks through programs, their loops and branches.

A `Flow` follows facts about values, such as axes. A subclass derives the facts of the outputs of an
equation, and joins the facts of branches and steps. An `Interpreter` runs programs on arrays; a
subclass replaces the outputs of equations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sparsity.core.trees import PyTree
from sparsity.programs.program import CALLS, CONTROL, Body, Equation, Program, Value

Fact = TypeVar("Fact")
Array = TypeVar("Array")  # jax.Array, or a class that represents one


class Flow(Generic[Fact]):
    """Follows facts about the values of a program, in the order in which its equations run.

    Attributes:
      facts: {value: fact}.
    """

    def __init__(self) -> None:
        self.facts: dict[Value, Fact] = {}

    # Hooks of subclasses.

    def initial_fact(self, value: Value) -> Fact:
        """Returns the fact of a value that no equation has made."""
        raise NotImplementedError

    def visit(self, equation: Equation) -> None:
        """Sets the facts of the outputs of an equation whose bodies are not entered."""
        raise NotImplementedError

    def join(self, one: Fact, other: Fact, equation: Equation, target: Value) -> Fact:
        """Returns the fact that holds for two branches, or for two steps.

        Must return a fact equal to `one` if `other` adds nothing, so that loops end.

        Args:
          one: a fact.
          other: another fact.
          equation: the loop, or the branches.
          target: the value that has the facts.
        """
        raise NotImplementedError

    def take_layer(self, fact: Fact, scan: Equation) -> Fact:
        """Returns the fact of the layer that a step of a scan reads of an array."""
        return fact

    def stack_layers(self, fact: Fact, scan: Equation) -> Fact:
        """Returns the fact of the array that stacks the outputs of all steps of a scan."""
        return fact

    def take_shard(self, fact: Fact, value: Value, local: Value) -> Fact:
        """Returns the fact of the part of an array on one device of a `shard_map`."""
        return fact

    def leave_body(self, fact: Fact, equation: Equation) -> Fact:
        """Returns the fact of an output of an equation, from the fact of the value in its body."""
        return fact

    def enters(self, equation: Equation) -> bool:
        """Returns whether to follow the bodies of a loop, of branches or of a `shard_map`."""
        return True

    def list_bodies(self, equation: Equation) -> list[Body]:
        """Returns the bodies of an equation that may run, with the values that enter and leave."""
        return equation.list_bodies()

    # Shared by all subclasses.

    def fact(self, value: Value) -> Fact:
        """Returns the fact of a value."""
        if value not in self.facts:
            self.facts[value] = self.initial_fact(value)
        return self.facts[value]

    def run(self, program: Program) -> None:
        """Follows facts through a program; the equations of a call take its place."""
        for equation in program.flat_equations():
            if equation.inner_programs and self.enters(equation):
                self._follow_bodies(equation)
            else:
                self.visit(equation)

    def _follow_bodies(self, equation: Equation) -> None:
        # Branches of this visit join each other, not facts from an earlier pass of an outer loop.
        results: dict[Value, Fact] = {}
        for body in self.list_bodies(equation):
            self._pass_inputs(equation, body)
            self._follow_to_fixpoint(equation, body)
            for index, output in enumerate(body.outputs):
                if output is not None:
                    fact = self.leave_body(self._read_result(equation, body, index), equation)
                    if output in results:
                        fact = self.join(results[output], fact, equation, output)
                    results[output] = fact
        self.facts.update(results)

    def _pass_inputs(self, equation: Equation, body: Body) -> None:
        for index, (value, inner) in enumerate(zip(body.inputs, body.program.inputs, strict=True)):
            fact = self.fact(value)
            if index in body.layers:
                fact = self.take_layer(fact, equation)
            elif equation.name == "shard_map":
                fact = self.take_shard(fact, value, inner)
            self.facts[inner] = fact

    def _follow_to_fixpoint(self, equation: Equation, body: Body) -> None:
        """Follows a body until the facts of its carry hold before and after every step."""
        # Joins only weaken facts, a limited number of times, so that the loop ends.
        is_stable = False
        while not is_stable:
            is_stable = True
            self.run(body.program)
            for output_index, input_index in body.carries:
                value = body.program.inputs[input_index]
                fact = self.fact(body.program.outputs[output_index])
                joined = self.join(self.facts[value], fact, equation, value)
                is_stable = is_stable and joined == self.facts[value]
                self.facts[value] = joined

    def _read_result(self, equation: Equation, body: Body, index: int) -> Fact:
        inner, carries = body.program.outputs[index], dict(body.carries)
        if index in carries:
            # A loop without steps returns its first carry; the fact of the input holds for both.
            return self.facts[body.program.inputs[carries[index]]]
        if equation.name == "scan":
            return self.stack_layers(self.fact(inner), equation)
        return self.fact(inner)


class Interpreter(Generic[Array]):
    """Runs programs, equation by equation, on arrays.

    A subclass replaces the outputs of equations.
    """

    # Hooks of subclasses.

    def bind(self, equation: Equation, inputs: list[Array]) -> Sequence[Array]:
        """Returns the outputs of an equation whose bodies are not entered."""
        outputs: Sequence[PyTree] = equation.bind(inputs)  # of jax, or of another class
        return outputs

    def call(self, equation: Equation, inputs: list[Array]) -> Sequence[Array]:
        """Returns the outputs of a call."""
        return self.run(equation.inner_programs[0], inputs)

    def read(self, value: Value) -> Array:
        """Returns a constant of the program, or another value that no equation computes."""
        return value.constant

    def define(self, value: Value, array: Array) -> Array:
        """Returns the array that later equations read for the output of an equation."""
        return array

    def enters(self, equation: Equation) -> bool:
        """Returns whether to run the bodies of a loop or of branches equation by equation."""
        return equation.name in CONTROL

    def list_step_inputs(self, scan: Equation) -> PyTree:
        """Returns arrays [length, ...]; step i passes layer i to `enter_step` and `read_layer`."""
        return ()

    def enter_step(self, scan: Equation, step_inputs: PyTree) -> Self:
        """Returns the interpreter of a step of a scan."""
        return self

    def read_layer(self, array: Array, stack: Array, step_inputs: PyTree) -> Array:
        """Returns the layer that a step of a scan reads.

        Args:
          array: the layer, as an array whose axis 0 is gone.
          stack: the array of all layers.
          step_inputs: the arrays of the step, from those of `list_step_inputs`.
        """
        return array

    def scan(self, equation: Equation, inputs: list[Array]) -> Sequence[Array]:
        """Returns the outputs of a scan whose steps are entered."""
        (body,) = equation.list_bodies()
        constants, carry, stacks = body.split(inputs)

        def step(carry: list[Array], layers: PyTree) -> tuple[list[Array], list[Array]]:
            arrays, step_inputs = layers
            inner = self.enter_step(equation, step_inputs)
            read_layers = map(
                functools.partial(inner.read_layer, step_inputs=step_inputs), arrays, stacks
            )
            outputs = inner.run(body.program, [*constants, *carry, *read_layers])
            return outputs[: len(carry)], outputs[len(carry) :]

        carry, stacked = scan_like(equation, step, carry, (stacks, self.list_step_inputs(equation)))
        return [*carry, *stacked]

    def while_loop(self, equation: Equation, inputs: list[Array]) -> Sequence[Array]:
        """Returns the outputs of a `while` loop whose bodies are entered."""
        body, condition = equation.list_bodies()
        # Inputs are constants of the condition, constants of the body, then the carry.
        num_condition = len(condition.program.inputs) - len(body.carries)
        num_outside = len(inputs) - len(body.carries)
        return lax.while_loop(
            lambda carry: self.run(condition.program, [*inputs[:num_condition], *carry])[0],
            lambda carry: self.run(body.program, [*inputs[num_condition:num_outside], *carry]),
            inputs[num_outside:],
        )

    def cond(self, equation: Equation, inputs: list[Array]) -> Sequence[Array]:
        """Returns the outputs of a conditional whose branches are entered."""
        index, *operands = inputs
        branches = [lambda *x, body=body: self.run(body, x) for body in equation.inner_programs]
        return switch(index, branches, operands)

    # Shared by all subclasses.

    def run(self, program: Program, inputs: Sequence[Array]) -> list[Array]:
        """Returns the outputs of a program."""
        arrays: dict[Value, Array] = dict(zip(program.inputs, inputs, strict=True))

        def read(value: Value) -> Array:
            if value not in arrays:
                arrays[value] = self.read(value)
            return arrays[value]

        for equation in program.equations:
            outputs = self.evaluate(equation, [read(value) for value in equation.inputs])
            for value, output in zip(equation.outputs, outputs, strict=True):
                arrays[value] = self.define(value, output)
        return [read(value) for value in program.outputs]

    def evaluate(self, equation: Equation, inputs: list[Array]) -> Sequence[Array]:
        """Returns the outputs of an equation."""
        if equation.name in CALLS:
            return self.call(equation, inputs)
        if not equation.inner_programs or not self.enters(equation):
            return self.bind(equation, inputs)
        match equation.name:
            case "scan":
                return self.scan(equation, inputs)
            case "while":
                return self.while_loop(equation, inputs)
        return self.cond(equation, inputs)


def scan_like(
    scan: Equation, step: Callable[..., tuple[PyTree, PyTree]], carry: PyTree, layers: PyTree
) -> tuple[PyTree, PyTree]:
    """Runs a step in the order of a scan of a program, which may have lost some layers."""
    options = {key: scan.params[key] for key in ("reverse", "unroll")}
    length = next((x.shape[0] for x in jax.tree.leaves(layers)), scan.length)
    carry, stacked = lax.scan(step, carry, layers, length=length, **options)
    return carry, stacked


def switch(
    index: PyTree, branches: Sequence[Callable[..., PyTree]], operands: Sequence[PyTree]
) -> PyTree:
    """Returns the outputs of a branch, whose index may be a bool where there are two."""
    return lax.switch(jnp.asarray(index).astype(jnp.int32), branches, *operands)
