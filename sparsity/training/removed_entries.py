"""Follows removed entries, and their parameters, through the program of an optimizer.

The last step of `entrywise_proof`, which alone asks here.

Gradients and parameters are 0 where a mask removes them. A reduction without these entries returns
the same number only if they add nothing there: a sum of squares may leave them out, a minimum or a
sum of exponentials may not. Kept entries of two parameters lie at other places, even if the arrays
have one shape, and must never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import is_traced
from sparsity.programs.entrywise import (
    ENTRYWISE,
    REDUCTIONS,
    find_uniform_value,
    fold_constant,
    is_same,
)
from sparsity.programs.program import Equation, Program, Value
from sparsity.programs.walk import Flow


class Fact(NamedTuple):
    """Certain properties of a value.

    Attributes:
      owner: index of the parameter whose kept entries an array holds; `None` for other values.
      removed: value of removed entries, or of all entries of another value; `None` if uncertain.
      is_nonnegative: whether no entry is negative.
    """

    owner: int | None = None
    removed: float | None = None
    is_nonnegative: bool = False


class RemovedEntries(Flow[Fact]):
    """Flow through programs whose arrays `is_short` lack removed entries.

    Attributes:
      reason: the first operation that needs removed entries, or joins parameters; "" for none.
    """

    def __init__(self, is_short: Callable[[Value], bool]) -> None:
        super().__init__()
        self._is_short = is_short
        self.reason: str = ""

    def follow(self, program: Program, inputs: Sequence[Fact]) -> list[Fact]:
        """Returns the facts of the outputs of a program."""
        self.facts.update(zip(program.inputs, inputs, strict=True))
        self.run(program)
        return [self.fact(output) for output in program.outputs]

    def initial_fact(self, value: Value) -> Fact:
        array = value.constant
        if jnp.issubdtype(value.dtype, jnp.complexfloating) and not is_traced(array):
            return Fact(removed=None if array is None or np.any(array) else 0.0)
        return Fact(removed=find_uniform_value(array))

    def visit(self, equation: Equation) -> None:
        facts = [self.fact(value) for value in equation.inputs]
        self.facts.update(dict.fromkeys(equation.outputs, Fact()))
        if equation.name in REDUCTIONS and self._is_short(equation.inputs[0]):
            self._check_reduction(equation, facts[0])
        elif equation.name == "broadcast_in_dim":
            self.facts[equation.outputs[0]] = facts[0]
        elif equation.name in ENTRYWISE and len(equation.outputs) == 1:
            self.facts[equation.outputs[0]] = self._compute(equation, facts)

    def join(self, one: Fact, other: Fact, equation: Equation, target: Value) -> Fact:
        return self.join_facts(one, other, equation.name)

    def join_facts(self, one: Fact, other: Fact, name: str) -> Fact:
        """Returns the fact that follows from either of two, of branches or of steps of `name`."""
        removed = one.removed if is_same(one.removed, other.removed) else None
        owner = self._join_owners([one, other], name)
        return Fact(owner, removed, one.is_nonnegative and other.is_nonnegative)

    def refuse(self, reason: str) -> None:
        """Notes a reason, if it is the first."""
        self.reason = self.reason or reason

    def _check_reduction(self, equation: Equation, fact: Fact) -> None:
        neutral = REDUCTIONS[equation.name].neutral
        is_neutral = neutral and fact.removed == neutral(equation.inputs[0].dtype)
        is_norm = equation.name == "reduce_max" and fact.is_nonnegative and fact.removed == 0
        if not is_neutral and not is_norm:
            self.refuse(f"{equation.name} returns another number without the removed entries")

    def _compute(self, equation: Equation, facts: list[Fact]) -> Fact:
        rule, removed = ENTRYWISE[equation.name], [fact.removed for fact in facts]
        owner = self._join_owners(facts, equation.name)
        is_power = equation.name == "integer_pow" and equation.params["y"] > 0
        is_zero = (rule.keeps_any_zero or is_power) and 0 in removed
        is_zero |= rule.keeps_zeros and not any(x != 0 for x in removed)
        constant = 0.0 if is_zero else fold_constant(equation, removed)
        keeps_sign = rule.is_copy and facts[0].is_nonnegative
        return Fact(owner, constant, keeps_sign or rule.is_nonnegative)

    def _join_owners(self, facts: Sequence[Fact], name: str) -> int | None:
        owners = [fact.owner for fact in facts if fact.owner is not None]
        if len(set(owners)) > 1:
            self.refuse(f"{name} joins entries of two parameters")
        return owners[0] if owners else None
