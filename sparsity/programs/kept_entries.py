"""Follows entries of parameters through a program, beside the program of the entries that remain.

Arrays whose shapes differ in the two programs hold the entries of a parameter, or one number for
all entries. An operation on such arrays must work entry by entry, or reduce all entries to a number
that the removed entries do not change. All other operations must be the same in both programs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import is_traced
from sparsity.core.trees import PyTree
from sparsity.programs.entrywise import (
    ENTRYWISE,
    REDUCTIONS,
    find_uniform_value,
    fold_constant,
    is_copy,
    is_same,
    multiply_constants,
    repeat_constant,
)
from sparsity.programs.program import Body, Equation, Program, Value
from sparsity.programs.walk import Flow

# Parameters of operations that follow from shapes.
_SHAPES = {"shape", "broadcast_dimensions", "axes", "sharding", "out_sharding"}
_DEPENDS = "depends on the number of axes of an array, or on their sizes"
# Results of comparisons with a lower number.
_ABOVE = {"eq": 0.0, "ge": 1.0, "gt": 1.0, "le": 0.0, "lt": 0.0, "ne": 1.0}
# The name of a function within a transformation, as optax writes them.
_UPDATE = re.compile(r"(?!chain\.|with_extra_args_support\.)(\w+)\.(<locals>\.)?\w*update")


class Fact(NamedTuple):
    """Certain properties of a value.

    Attributes:
      owner: index of the parameter whose entries an array holds, `None` for other values.
      constant: the value of the removed entries, or of all entries of a value without an owner;
        `None` if uncertain.
      least: a number that no entry is below.
      is_opaque: whether an array with an owner holds other numbers than one for each entry.
      error: why the value would be another one without the removed entries, "" if it would not.
    """

    owner: int | None = None
    constant: float | None = None
    least: float = -math.inf
    is_opaque: bool = False
    error: str = ""


class _Case(NamedTuple):
    """The fact of a value in one case of a selection.

    Attributes:
      condition: what selects, and the place of the operand that is selected.
      fact: the fact of the value where the condition holds.
    """

    condition: Hashable
    fact: Fact


class EntriesMeetError(Exception):
    """Entries that remain would be computed otherwise; the text says where and why."""


class EntryFlow(Flow[Fact]):
    """Flow through a program, and comparison with the program of what remains.

    Args:
      names: names of the parameters.
      twins: {program: program of what remains}; without twins nothing is removed.
    """

    def __init__(self, names: Sequence[str], twins: dict[Program, Program]) -> None:
        super().__init__()
        self._names, self._twins = names, twins
        self._partners: dict[Value, Value] = {}
        self._kept_shapes: dict[Value, tuple[int, ...]] = {}
        self._makers: dict[Value, Equation] = {}
        self._differences: dict[Equation, str] = {}
        self._unequal: set[Value] = set()
        self._cases: dict[Value, _Case | None] = {}

    def follow(self, program: Program, inputs: Sequence[Fact]) -> list[Fact]:
        """Returns the facts of the outputs of a program.

        Raises:
          EntriesMeetError: what remains would be computed otherwise.
        """
        self.facts.update(zip(program.inputs, inputs, strict=True))
        self.run(program)
        return [self.fact(output) for output in program.outputs]

    def join_steps(self, one: Fact, other: Fact) -> Fact:
        """Returns the fact that holds before and after a step, of facts before and after."""
        joined = self._join(one, other)
        # Three values at most: a number that falls from step to step must not fall forever.
        least = next(x for x in (one.least, 0.0, -math.inf) if joined.least >= x)
        return joined._replace(least=least)

    # Hooks of `Flow`.

    def run(self, program: Program) -> None:
        twin = self._twins.pop(program, None)
        if twin is not None:  # compared when it runs: some bodies never do
            self._pair(program, twin)
        super().run(program)
        for output in program.outputs:
            if error := self.fact(output).error:
                raise EntriesMeetError(error)

    def initial_fact(self, value: Value) -> Fact:
        return make_fact(find_constant(value.constant))

    def visit(self, equation: Equation) -> None:
        self._check_difference(equation)
        self._makers.update(dict.fromkeys(equation.outputs, equation))
        facts = self._read_inputs(equation)
        try:
            fact = self._apply(equation, facts)
        except EntriesMeetError as error:
            fact = Fact(error=str(error))
        case = self._find_case(equation, facts, fact)
        if fact.error and case is None:
            raise EntriesMeetError(fact.error)
        self.facts.update(dict.fromkeys(equation.outputs, fact))
        self._cases.update(dict.fromkeys(equation.outputs, case))

    def list_bodies(self, equation: Equation) -> list[Body]:
        self._check_difference(equation)
        bodies = equation.list_bodies()
        if equation.is_choice:
            index = self.fact(equation.inputs[0]).constant
            return bodies if index is None else [bodies[min(max(int(index), 0), len(bodies) - 1)]]
        if equation.name == "while":
            body, condition = bodies
            start = len(equation.inputs) - len(body.carries)
            first = [self.fact(value) for value in equation.inputs[start:]]
            constants = condition.inputs[: len(condition.inputs) - len(first)]
            if (
                self.follow(condition.program, [*map(self.fact, constants), *first])[0].constant
                == 0
            ):
                self.facts.update(zip(equation.outputs, first, strict=True))
                return []
        return bodies

    def join(self, one: Fact, other: Fact, equation: Equation, target: Value) -> Fact:
        return self._join(one, other) if equation.is_choice else self.join_steps(one, other)

    def take_layer(self, fact: Fact, scan: Equation) -> Fact:
        if fact.owner is not None:
            self._refuse(scan, "takes arrays apart")
        return fact

    def stack_layers(self, fact: Fact, scan: Equation) -> Fact:
        return self.take_layer(fact, scan)

    def take_shard(self, fact: Fact, value: Value, local: Value) -> Fact:
        if fact.owner is not None:
            raise EntriesMeetError("shard_map takes arrays apart")
        return fact

    # Rules.

    def _read_inputs(self, equation: Equation) -> list[Fact]:
        """Returns the facts of the inputs; those of a selection where the input is selected."""
        facts = [self.fact(value) for value in equation.inputs]
        if equation.name == "select_n":
            index, *operands = equation.inputs
            for place, value in enumerate(operands):
                case = self._cases.get(value)
                if case and case.condition == (self._describe(index), place):
                    facts[place + 1] = case.fact
        return facts

    def _find_case(self, equation: Equation, facts: Sequence[Fact], fact: Fact) -> _Case | None:
        """Returns what is certain of the result in a case that a selection distinguishes.

        `optax.safe_norm` selects x or ones, takes a norm, and selects the norm where it was that
        of x: only in this case removed entries do not change the norm.

        Args:
          equation: the equation.
          facts: facts of its inputs.
          fact: fact of its result in all cases.
        """
        if equation.name == "select_n" and fact.constant is None and facts[0].owner is None:
            for place, operand in enumerate(facts[1:]):
                if operand.owner is not None and operand.constant is not None:
                    return _Case((self._describe(equation.inputs[0]), place), operand)
        cases = [self._cases.get(value) for value in equation.inputs]
        condition = next((case.condition for case in cases if case), None)
        if condition is None:
            return None
        in_case = [
            case.fact if case and case.condition == condition else other
            for case, other in zip(cases, facts, strict=True)
        ]
        try:
            return _Case(condition, self._apply(equation, in_case))
        except EntriesMeetError:
            return None

    def _describe(self, value: Value) -> Hashable:
        """Returns a description that is equal for numbers that are computed in the same way."""
        value = find_origin(self._makers, value)
        maker = self._makers.get(value)
        if maker is None or maker.name not in _ABOVE:
            return value
        origins = [find_origin(self._makers, each) for each in maker.inputs]
        numbers = [find_constant(each.constant) for each in origins]
        pairs = zip(origins, numbers, strict=True)
        return maker.name, *(origin if number is None else number for origin, number in pairs)

    def _apply(self, equation: Equation, facts: Sequence[Fact]) -> Fact:
        """Returns the fact of the results of an equation; raises an error if entries meet."""
        name, (output, *others) = equation.name, equation.outputs
        is_short = [self._is_short(value) for value in equation.inputs]
        for fact in facts:
            if fact.error:
                raise EntriesMeetError(fact.error)
        if any(fact.is_opaque for fact in facts):
            self._refuse(equation, "reads an array that has no number for each entry")
        if is_view(equation):
            return facts[0]
        if name in REDUCTIONS:
            if is_short[0]:
                self._check_reduction(equation, facts[0])
            constant = facts[0].constant if facts[0].owner is None else None
            return make_fact(None if constant is None else repeat_constant(name, constant))
        if name in ENTRYWISE and not others:
            pairs = zip(equation.inputs, is_short, strict=True)
            if any(is_short) and not all(short or x.size == 1 for x, short in pairs):
                self._refuse(equation, "joins entries")
            return self._compute(equation, facts)
        if name == "dot_general" and all(is_short) and output.size == 1:
            self._check_inner_product(equation, facts)
        elif any(is_short) or any(map(self._is_short, equation.outputs)):
            self._refuse(equation, "joins entries, or depends on the shape of an array")
        return Fact()

    def _compute(self, equation: Equation, facts: Sequence[Fact]) -> Fact:
        """Returns the fact of the result of an entrywise operation."""
        rule, constants = ENTRYWISE[equation.name], [fact.constant for fact in facts]
        owner = self._join_owners(facts)
        is_power = equation.name == "integer_pow" and equation.params["y"] > 0
        is_zero = (rule.keeps_any_zero or is_power) and 0 in constants
        is_zero |= rule.keeps_zeros and not any(x != 0 for x in constants)
        constant = 0.0 if is_zero else fold_constant(equation, constants)
        if constant is None:
            constant = _compare(equation, facts)
        least = 0.0 if rule.is_nonnegative else _find_least(equation, facts)
        return make_fact(constant, least) if owner is None else Fact(owner, constant, least)

    def _check_reduction(self, equation: Equation, fact: Fact) -> None:
        """Raises an error for a reduction that removed entries change."""
        neutral = REDUCTIONS[equation.name].neutral
        if neutral is None or self._is_short(equation.outputs[0]):
            self._refuse(equation, "joins entries")
        is_norm = equation.name == "reduce_max" and fact.least >= 0 and fact.constant == 0
        if fact.constant != neutral(equation.inputs[0].dtype) and not is_norm:
            self._refuse(equation, "returns another number without the removed entries")

    def _check_inner_product(self, equation: Equation, facts: Sequence[Fact]) -> None:
        """Raises an error for a sum of products that removed entries change."""
        (one, other), _ = equation.params["dimension_numbers"]
        if tuple(one) != tuple(other):
            self._refuse(equation, "joins entries")
        self._join_owners(facts)
        if multiply_constants(*(fact.constant for fact in facts)) != 0:
            self._refuse(equation, "returns another number without the removed entries")

    def _join(self, one: Fact, other: Fact) -> Fact:
        return Fact(
            self._join_owners([one, other]),
            one.constant if is_same(one.constant, other.constant) else None,
            min(one.least, other.least),
            one.is_opaque or other.is_opaque,
            one.error or other.error,
        )

    def _join_owners(self, facts: Sequence[Fact]) -> int | None:
        owners = sorted({fact.owner for fact in facts if fact.owner is not None})
        if len(owners) > 1:
            names = " and ".join(repr(self._names[owner]) for owner in owners)
            raise EntriesMeetError(f"entries of {names} meet")
        return owners[0] if owners else None

    # Comparison.

    def _pair(self, program: Program, twin: Program) -> None:
        """Pairs the values of two programs, up to the first operation that differs."""
        programs = program, twin
        steps = [[x for x in each.flat_equations() if not is_view(x)] for each in programs]
        self._bind(program.inputs, twin.inputs)
        for one, other in zip(*steps, strict=False):
            if difference := self._pair_equations(programs, one, other):
                self._differences[one] = difference
                return
        outputs = zip(program.outputs, twin.outputs, strict=False)
        matches = [self._match(programs, *pair) for pair in outputs]
        is_equal = len(steps[0]) == len(steps[1]) and len(program.outputs) == len(twin.outputs)
        if not is_equal or not all(matches):
            raise EntriesMeetError(f"its update {_DEPENDS}")

    def _pair_equations(
        self, programs: tuple[Program, Program], one: Equation, other: Equation
    ) -> str:
        """Pairs the outputs of two equations; returns how the equations differ, or ""."""
        if one.name != other.name or len(one.inputs) != len(other.inputs):
            return _DEPENDS
        pairs = enumerate(zip(one.inputs, other.inputs, strict=True))
        unequal = [place for place, pair in pairs if not self._match(programs, *pair)]
        # Whether a body that runs reads other numbers shows when the body is compared.
        if not {*unequal} <= {*_list_read_in_bodies(one)}:
            return "reads a number that depends on the size of the array"
        self._bind(one.outputs, other.outputs)
        is_short = any(map(self._is_short, (*one.inputs, *one.outputs)))
        if _list_settings(one, is_short) != _list_settings(other, is_short):
            return _DEPENDS
        self._twins.update(zip(one.inner_programs, other.inner_programs, strict=True))
        outer = {one.inputs[place] for place in unequal}
        for body in one.list_bodies() if outer else []:
            values = zip(body.inputs, body.program.inputs, strict=True)
            self._unequal.update(inner for value, inner in values if value in outer)
        return ""

    def _bind(self, values: Sequence[Value], others: Sequence[Value]) -> None:
        if len(values) != len(others):
            raise EntriesMeetError(f"its update {_DEPENDS}")
        for one, other in zip(values, others, strict=True):
            self._kept_shapes[one] = other.shape
            if one not in self._unequal:
                self._partners[one] = other

    def _match(self, programs: tuple[Program, Program], one: Value, other: Value) -> bool:
        """Returns whether two values are the same apart from their shapes."""
        self._kept_shapes[one] = other.shape
        one, other = find_origin(programs[0].makers, one), find_origin(programs[1].makers, other)
        if one.constant is not None and other.constant is not None:
            return one.shape == other.shape and _are_equal(one.constant, other.constant)
        return self._partners.get(one) is other

    def _is_short(self, value: Value) -> bool:
        return are_of_other_shape(value.shape, self._kept_shapes.get(value, value.shape))

    # Errors.

    def _check_difference(self, equation: Equation) -> None:
        if equation in self._differences:
            self._refuse(equation, self._differences[equation])

    def _refuse(self, equation: Equation, text: str) -> NoReturn:
        """Raises an error that names the parameters whose entries an equation reads."""
        owners, values = set[int](), [*equation.inputs]
        for value in values:  # grows, up to arrays that have an owner
            owner = self.fact(value).owner
            if owner is not None:
                owners.add(owner)
            elif value in self._makers:
                values += [x for x in self._makers[value].inputs if x not in values]
        names = " and ".join(repr(self._names[owner]) for owner in sorted(owners)[:2])
        raise EntriesMeetError(
            f"{equation.name}{names and f' of {names}'}{_locate(equation)} {text}"
        )


def make_fact(constant: float | None, least: float = -math.inf) -> Fact:
    """Returns the fact of a value without an owner."""
    if constant is not None and not math.isnan(constant):
        least = max(least, constant)
    return Fact(None, constant, least)


def find_constant(array: PyTree) -> float | None:
    """Returns the one value of all entries of an array, `None` if they differ or are unknown.

    Complex entries are 0 or unknown.
    """
    if array is None or is_traced(array) or isinstance(array, jax.ShapeDtypeStruct):
        return None
    if jnp.issubdtype(jnp.result_type(array), jax.dtypes.extended):
        return None
    entries = np.asarray(array).reshape(-1)
    if np.iscomplexobj(entries):
        return None if entries.any() else 0.0
    return find_uniform_value(entries[:1]) if (entries == entries[:1]).all() else None


def are_of_other_shape(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether arrays differ in shape; a single number may have any number of axes."""
    return shape != other and not math.prod(shape) == math.prod(other) == 1


def is_view(equation: Equation) -> bool:
    """Returns whether an equation returns its input in order, or repeats a number."""
    if len(equation.inputs) != 1 or len(equation.outputs) != 1:
        return False
    (value,), (output,) = equation.inputs, equation.outputs
    if is_copy(equation):
        return bool(value.dtype == output.dtype)
    if equation.name == "broadcast_in_dim":
        return value.size in (1, output.size)
    return equation.name == "squeeze" or (
        equation.name == "reshape" and equation.params["dimensions"] is None
    )


def find_origin(makers: Mapping[Value, Equation], value: Value) -> Value:
    """Returns the value of which a value is a view."""
    while value in makers and is_view(makers[value]):
        value = makers[value].inputs[0]
    return value


def _compare(equation: Equation, facts: Sequence[Fact]) -> float | None:
    """Returns the result of a comparison of integers with a lower one, `None` if uncertain."""
    if equation.name not in _ABOVE or not jnp.issubdtype(equation.inputs[0].dtype, jnp.integer):
        return None
    least, limit = facts[0].least, facts[1].constant
    is_above = limit is not None and least > limit
    is_sure = is_above or (least == limit and equation.name in ("ge", "lt"))
    return _ABOVE[equation.name] if is_sure else None


def _find_least(equation: Equation, facts: Sequence[Fact]) -> float:
    """Returns a number that no entry of the result of an entrywise operation is below."""
    least = [fact.least for fact in facts]
    match equation.name:
        case "max":
            return max(least)
        case "add" if min(least) >= 0:  # rounded or not
            return max(least)
        case "mul" if min(least) >= 0:
            return 0.0
        case "min":
            return min(least)
        case "select_n":
            return min(least[1:])
    is_same_type = equation.inputs[0].dtype == equation.outputs[0].dtype
    return least[0] if is_copy(equation) and is_same_type else -math.inf


def _list_read_in_bodies(equation: Equation) -> range:
    """Returns the places of the inputs that only branches, or steps of a `while` loop, read."""
    if equation.name == "while":
        start = equation.params["cond_nconsts"]
        return range(start, start + equation.params["body_nconsts"])
    return range(1, len(equation.inputs) * equation.is_choice)


def _list_settings(equation: Equation, is_short: bool) -> PyTree:
    """Returns what must be equal in two equations, whose arrays may differ in shape."""
    if equation.inner_programs:
        bodies = equation.list_bodies()
        counts = [(len(x.inputs), [*x.carries], [*x.layers], x.trips) for x in bodies]
        return counts, equation.params.get("reverse")
    # As text, because `==` of arrays and programs gives no bool or compares identity.
    skipped = _SHAPES if is_short else ()
    return {key: repr(x) for key, x in equation.params.items() if key not in skipped}


def _are_equal(one: PyTree, other: PyTree) -> bool:
    """Returns whether two constants have one dtype and value; NaN equals NaN."""
    if one is other:  # numbers that a surrounding program computes have no value yet
        return True
    dtype = jnp.result_type(one)
    if dtype != jnp.result_type(other) or is_traced(one) or is_traced(other):
        return False
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    one = np.asarray(one)
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")


def _locate(equation: Equation) -> str:
    """Returns ' in NAME' for the transformation of optax that made an equation, '' if unknown."""
    frames = [frame for lines in equation.tracebacks if lines for frame in lines.frames]
    for frame in frames:
        if match := _UPDATE.match(frame.function_name):
            return f" in {match[1]}"
    return ""
