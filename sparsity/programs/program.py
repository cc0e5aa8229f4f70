"""The programs that jax traces: evaluated again, with a say in what their variables become."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, Var

from sparsity.core import sharding

__all__ = [
    "CALLS",
    "ClosedJaxpr",
    "Equation",
    "Literal",
    "Program",
    "Value",
    "Var",
    "captured_arrays",
    "evaluate",
    "is_differentiable",
    "read_jaxpr",
    "values_read",
]


def evaluate(
    closed: ClosedJaxpr,
    arguments: Sequence[jax.Array],
    define: Callable[[Var, Any], Any] = lambda var, value: value,
) -> list[Any]:
    """Runs a program equation by equation.

    Args:
      closed: the program, as `jax.make_jaxpr` returns it.
      arguments: one for each of its inputs.
      define: `define(variable, value)` returns what the variable becomes where an equation defines
        it; all that is computed later reads that. Inputs and constants stay as they are.

    Returns:
      The values of its outputs.

    Example:
      >>> import jax.numpy as jnp
      >>> double = jax.make_jaxpr(lambda x: x * 2)(1.0)
      >>> evaluate(double, [jnp.float32(3.0)], lambda var, value: value + 1)
      [Array(7., dtype=float32)]
    """
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = map(read, equation.invars)
        outputs = _bind(equation.primitive, equation.params, equation.ctx, inputs)
        for var, value in zip(equation.outvars, outputs, strict=True):
            values[var] = define(var, value)
    return [read(var) for var in jaxpr.outvars]


def _bind(primitive: Any, params: dict[str, Any], context: Any, inputs: Iterable[Any]) -> list[Any]:
    """The outputs of a primitive, under jax's settings of another place."""
    bound = primitive.get_bind_params(params)
    functions, static = bound if isinstance(bound, tuple) else ((), bound)
    with context.manager:
        outputs = primitive.bind(*functions, *inputs, **static)
    return list(outputs) if primitive.multiple_results else [outputs]


@dataclasses.dataclass(eq=False)
class Value:
    """What an equation reads or writes.

    Attributes:
      shape: its shape.
      dtype: its dtype.
      known: its value, if that is known.
      sharding: on a mesh with Explicit axes, where it is a part of the type.
    """

    shape: tuple[int, ...]
    dtype: Any
    known: Any = None
    sharding: jax.sharding.NamedSharding | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def struct(self, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
        """Its type, or with another shape: sharded along the axes whose size still divides."""
        shape = self.shape if shape is None else shape
        own = self.sharding and sharding.fit(self.sharding, shape)
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=own)


@dataclasses.dataclass(eq=False)
class Equation:
    """One step of a program.

    Attributes:
      primitive: jax's primitive.
      params: its parameters.
      inputs: the values that it reads.
      outputs: the values that it writes.
      bodies: its programs. A call (jit, remat, custom derivatives) has one, whose inputs and
        outputs are those of the call itself; those of loops, branches and shard_map are their own.
      tracebacks: where the model's code made it, and the calls around it, from the innermost on.
      context: jax's settings where it was made.
    """

    primitive: Any
    params: dict[str, Any]
    inputs: list[Value]
    outputs: list[Value]
    bodies: tuple[Program, ...]
    tracebacks: tuple[Any, ...]
    context: Any

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.primitive.name)

    @property
    def source(self) -> str:
        """Where the model's code made it: 'file:line (function)', '' if that is not known."""
        for frame in (frame for each in self.tracebacks if each for frame in each.frames):
            if not _LIBRARIES.search(frame.file_name) and not frame.file_name.startswith(_PACKAGE):
                return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
        return ""

    @property
    def derivative(self) -> Program | None:
        """What a call's own rule for derivatives computes; `None` where there is none that works.

        Of a `custom_jvp_call` from inputs and tangents to outputs and tangents; of a
        `custom_vjp_call` from inputs and cotangents of outputs to cotangents of inputs. Tangents
        and cotangents are those of the values in `differentiated`.
        """
        return None if isinstance(self._rule, Exception) else self._rule

    @property
    def rule_error(self) -> Exception | None:
        """What a call's own rule for derivatives raises: the function has none."""
        return self._rule if isinstance(self._rule, Exception) else None

    @functools.cached_property
    def _rule(self) -> Program | Exception | None:
        if self.name not in ("custom_jvp_call", "custom_vjp_call"):
            return None
        structs = [
            [value.struct() for value in values] for values in (self.inputs, *self.differentiated)
        ]
        of_inputs = [is_differentiable(value) for value in self.inputs]

        def call(floating: list[Any], others: list[Any]) -> list[Any]:
            rest, given = iter(others), iter(floating)
            outputs = self.bind([next(given if use else rest) for use in of_inputs])
            return [x for x, v in zip(outputs, self.outputs, strict=True) if is_differentiable(v)]

        def parts(inputs: list[Any]) -> tuple[list[Any], list[Any]]:
            pairs = list(zip(inputs, of_inputs, strict=True))
            return [x for x, use in pairs if use], [x for x, use in pairs if not use]

        def forward(inputs: list[Any], tangents: list[Any]) -> Any:
            floating, others = parts(inputs)
            return jax.jvp(lambda *x: call(list(x), others), floating, tangents)

        def backward(inputs: list[Any], cotangents: list[Any]) -> Any:
            floating, others = parts(inputs)
            return jax.vjp(lambda *x: call(list(x), others), *floating)[1](cotangents)

        inputs, of_input, of_output = structs
        try:
            if self.name == "custom_jvp_call":
                return read_jaxpr(jax.make_jaxpr(forward)(inputs, of_input))
            return read_jaxpr(jax.make_jaxpr(backward)(inputs, of_output))
        except Exception as error:  # the rule is the user's code
            return error

    @property
    def differentiated(self) -> tuple[list[Value], list[Value]]:
        """The inputs and the outputs that have derivatives."""
        inputs = [value for value in self.inputs if is_differentiable(value)]
        return inputs, [value for value in self.outputs if is_differentiable(value)]

    @property
    def is_choice(self) -> bool:
        """Whether one of its bodies runs in a call."""
        return self.name == "cond"

    def within(self) -> list[Body]:
        """Its bodies with the values that enter and leave them."""
        params, inputs, outputs = self.params, self.inputs, self.outputs
        match self.name:
            case "scan":
                first, count = params["num_consts"], params["num_carry"]
                carries = [(i, first + i) for i in range(count)]
                layers = range(first + count, len(inputs))
                return [Body(self.bodies[0], inputs, [*outputs], carries, layers, params["length"])]
            case "while":
                first = params["cond_nconsts"]
                second = first + params["body_nconsts"]
                condition, body = self.bodies
                carries = [(i, second - first + i) for i in range(len(outputs))]
                carry = body.inputs[second - first :]  # before each step, and after the last one
                return [
                    Body(body, inputs[first:], [*outputs], carries, trips=None),
                    Body(condition, [*inputs[:first], *carry], [None], trips=None),
                ]
            case "cond":
                return [Body(body, inputs[1:], [*outputs]) for body in self.bodies]
            case "shard_map":
                return [Body(self.bodies[0], inputs, [*outputs], trips=_shards(params))]
        return [Body(body, inputs, [*outputs]) for body in self.bodies]

    def bind(self, inputs: Sequence[Any], **changed: Any) -> list[Any]:
        """Its outputs for other inputs, with some of its parameters changed."""
        return _bind(self.primitive, {**self.params, **changed}, self.context, inputs)


class Body(NamedTuple):
    """A program within an equation, and how its values are those of the equation.

    Attributes:
      program: the program.
      inputs: for each of its inputs the value outside.
      outputs: for each of its outputs the output of the equation, `None` for a condition.
      carries: (number of the output, number of the input) of what the next step reads.
      layers: numbers of the inputs of which each step of a scan reads a layer.
      trips: how often it runs in a call of the equation; `None` if that depends on data.
    """

    program: Program
    inputs: list[Value]
    outputs: list[Value | None]
    carries: Sequence[tuple[int, int]] = ()
    layers: range = range(0)
    trips: int | None = 1


@dataclasses.dataclass(eq=False)
class Program:
    """A function as jax traced it: equations in the order in which they run."""

    inputs: list[Value]
    equations: list[Equation]
    outputs: list[Value]

    def flat(self) -> Iterator[Equation]:
        """Its equations, with those of a call in the place of the call."""
        for equation in self.equations:
            if equation.name in CALLS:
                yield from equation.bodies[0].flat()
            else:
                yield equation

    def with_rules(self) -> Iterator[Equation]:
        """Its calls that have rules of their own for derivatives, those within calls, too."""
        for equation in self.equations:
            if equation.name in CALLS:
                yield from equation.bodies[0].with_rules()
            if equation.derivative is not None:
                yield equation


# Calls: their body reads and writes what they read and write.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "composite": "jaxpr",
}
_BODIES = {
    "scan": ["jaxpr"],
    "while": ["cond_jaxpr", "body_jaxpr"],
    "shard_map": ["jaxpr"],
}
_PACKAGE = str(pathlib.Path(__file__).parents[1]) + os.sep
_LIBRARIES = re.compile(
    r"[/\\](jax|jaxlib|flax|haiku|equinox|optax|chex)[/\\]|[/\\]contextlib\.py|<"
)


def _shards(params: dict[str, Any]) -> int:
    """In how many parts a `shard_map` cuts its inputs."""
    entries = [entry for spec in params["in_specs"] for entry in spec if entry]
    names = {n for entry in entries for n in ([entry] if isinstance(entry, str) else entry)}
    return math.prod([int(params["mesh"].shape[name]) for name in names])


def is_differentiable(value: Value) -> bool:
    """Whether a value is of a floating or complex dtype."""
    return value.dtype is not None and bool(jnp.issubdtype(value.dtype, jnp.inexact))


def read_jaxpr(closed: ClosedJaxpr) -> Program:
    """The program of a traced function.

    Example:
      >>> import jax.numpy as jnp
      >>> double = read_jaxpr(jax.make_jaxpr(jax.jit(lambda x: x * 2))(1.0))
      >>> [equation.name for equation in double.flat()]
      ['mul']
    """
    return _program(closed, [_value(var.aval) for var in closed.jaxpr.invars], ())


def values_read(program: Program) -> set[Value]:
    """The values that some equation reads, or that the program returns."""
    found = set(program.outputs)
    for equation in program.flat():
        found.update(equation.inputs)
        for body in equation.bodies:
            found |= values_read(body)
    return found


def captured_arrays(program: Program) -> list[Any]:
    """The arrays that the function held when it was traced."""
    return [value.known for value in values_read(program) if value.known is not None]


def _program(closed: Any, inputs: list[Value], calls: tuple[Any, ...]) -> Program:
    """The program of a closed or an open jaxpr on these inputs, within calls made there."""
    jaxpr, constants = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, constant in zip(jaxpr.constvars, constants, strict=True):
        values[var] = _value(var.aval, constant)

    def look_up(atom: Any) -> Value:
        return _value(atom.aval, atom.val) if isinstance(atom, Literal) else values[atom]

    equations = []
    for traced in jaxpr.eqns:
        equation = _equation(traced, [look_up(atom) for atom in traced.invars], calls)
        equations.append(equation)
        values.update(zip(traced.outvars, equation.outputs, strict=True))
    return Program(inputs, equations, [look_up(atom) for atom in jaxpr.outvars])


def _equation(traced: Any, inputs: list[Value], calls: tuple[Any, ...]) -> Equation:
    name, params = traced.primitive.name, traced.params
    calls = (traced.source_info.traceback, *calls)
    bodies: tuple[Program, ...] = ()
    if name in CALLS:
        bodies = (_program(params[CALLS[name]], inputs, calls),)
        outputs = bodies[0].outputs
    else:
        found = params["branches"] if name == "cond" else [params[x] for x in _BODIES.get(name, [])]
        bodies = tuple(_with_inputs(body, calls) for body in found)
        outputs = [_value(var.aval) for var in traced.outvars]
    return Equation(traced.primitive, params, inputs, outputs, bodies, calls, traced.ctx)


def _with_inputs(closed: Any, calls: tuple[Any, ...]) -> Program:
    jaxpr = getattr(closed, "jaxpr", closed)
    return _program(closed, [_value(var.aval) for var in jaxpr.invars], calls)


def _value(aval: Any, known: Any = None) -> Value:
    shape, dtype = tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)
    return Value(shape, dtype, known, sharding.explicit_sharding(aval))
