"""The programs that jax traces, as equations between values, and compiled ones that are reused."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import (
    ClosedJaxpr as ClosedJaxpr,
    Jaxpr as Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    jaxpr_as_fun as jaxpr_as_fun,
)
from jax.typing import ArrayLike

from sparsity.core import sharding
from sparsity.core.trees import PyTree

T = TypeVar("T")
Arrays: TypeAlias = list[jax.Array]
Tracebacks: TypeAlias = tuple[Any, ...]  # of jax, the innermost first


@dataclasses.dataclass(eq=False)
class Value:
    """A value that equations read or write.

    Attributes:
      shape: the shape.
      dtype: the dtype.
      constant: the array itself if the program holds it, else `None`.
      sharding: the sharding on a mesh with Explicit axes, where it is a part of the type.
    """

    shape: tuple[int, ...]
    dtype: Any
    constant: Any = None
    sharding: jax.sharding.NamedSharding | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def struct(self, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
        """Returns the type, or that of another shape, sharded along axes that still divide."""
        shape = self.shape if shape is None else shape
        fitted = self.sharding and sharding.fit(self.sharding, shape)
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=fitted)


@dataclasses.dataclass(eq=False)
class Equation:
    """One step of a program.

    Attributes:
      primitive: the primitive of jax.
      params: the parameters of the primitive.
      inputs: the values that the equation reads.
      outputs: the values that the equation writes.
      inner_programs: the programs inside. A call (jit, remat, custom derivatives) has one and
        shares its inputs and outputs; loops, branches and shard_map share no values with their
        bodies.
      tracebacks: lines of the model that made the equation and the calls around it, the innermost
        first.
      context: the settings of jax where the equation was made.
    """

    primitive: Primitive
    params: dict[str, Any]
    inputs: list[Value]
    outputs: list[Value]
    inner_programs: tuple[Program, ...]
    tracebacks: Tracebacks
    context: Any

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return str(self.primitive.name)

    @property
    def source(self) -> str:
        """Line of the model that made the equation: 'file:line (function)', '' if unknown."""
        for frame in (frame for lines in self.tracebacks if lines for frame in lines.frames):
            if not _LIBRARIES.search(frame.file_name) and not frame.file_name.startswith(_PACKAGE):
                return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
        return ""

    @functools.cached_property
    def rule(self) -> Program | Exception | None:
        """Program of the custom rule for derivatives of a call, or the error that the rule raises.

        The rule of a `custom_jvp_call` maps inputs and tangents to outputs and tangents; that of a
        `custom_vjp_call` maps inputs and cotangents of outputs to cotangents of inputs. Only
        values in `differentiated` have tangents and cotangents. Other equations have none.
        """
        if self.name not in ("custom_jvp_call", "custom_vjp_call"):
            return None
        try:
            return _trace_rule(self)
        except Exception as error:  # the rule is the user's code
            return error

    @property
    def maps_tangents(self) -> bool:
        """True if the rule for derivatives of a call maps tangents, False if cotangents."""
        return self.name == "custom_jvp_call"

    @property
    def differentiated(self) -> tuple[list[Value], list[Value]]:
        """Inputs and outputs that have derivatives."""
        inputs = [value for value in self.inputs if is_differentiable(value)]
        return inputs, [value for value in self.outputs if is_differentiable(value)]

    @property
    def is_choice(self) -> bool:
        """True if a call runs one of the bodies."""
        return self.name == "cond"

    @property
    def is_remat(self) -> bool:
        """True if a call computes its values again in the backward pass."""
        return self.name in ("remat2", "checkpoint")

    @property
    def is_inline(self) -> bool:
        """True for a call whose values are those of the program around the call."""
        return self.name in CALLS and not (self.is_remat or self.name.startswith("custom_"))

    def checkpoint(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Returns a function under the rematerialisation of this call."""
        options = {key: self.params[key] for key in ("prevent_cse", "policy")}
        return jax.checkpoint(function, **options)

    def list_bodies(self) -> list[Body]:
        """Returns the bodies with the values that enter and leave each."""
        params, inputs, outputs = self.params, self.inputs, self.outputs
        match self.name:
            case "scan":
                num_constants, num_carried = self._count_scan_values()
                carries = [(i, num_constants + i) for i in range(num_carried)]
                layers = range(num_constants + num_carried, len(inputs))
                (body,) = self.inner_programs
                return [Body(body, inputs, [*outputs], carries, layers, self.length)]
            case "while":
                num_condition, num_body = params["cond_nconsts"], params["body_nconsts"]
                condition, body = self.inner_programs
                carries = [(i, num_body + i) for i in range(len(outputs))]
                carry = body.inputs[num_body:]  # before each step, and after the last
                return [
                    Body(body, inputs[num_condition:], [*outputs], carries, trips=None),
                    Body(condition, [*inputs[:num_condition], *carry], [None], trips=None),
                ]
            case "cond":
                return [Body(body, inputs[1:], [*outputs]) for body in self.inner_programs]
        trips = _count_shards(params) if self.name == "shard_map" else 1
        return [Body(body, inputs, [*outputs], trips=trips) for body in self.inner_programs]

    @property
    def length(self) -> int:
        """Number of steps of a scan."""
        return self.params["length"]

    def _count_scan_values(self) -> tuple[int, int]:
        """Counts the constants and the carried values of a scan."""
        if "ft_in" in self.params:  # since jax 0.11
            constants, carry, _ = self.params["ft_in"].unpack()
            return len(constants), len(carry)
        return self.params["num_consts"], self.params["num_carry"]

    def bind(self, inputs: Sequence[PyTree], **changed: object) -> Arrays:
        """Returns the outputs for other inputs, with some parameters changed."""
        bound = self.primitive.get_bind_params({**self.params, **changed})
        functions, static = bound if isinstance(bound, tuple) else ((), bound)
        with self.context.manager:  # the jax settings of the equation
            outputs = self.primitive.bind(*functions, *inputs, **static)
        return list(outputs) if self.primitive.multiple_results else [outputs]


class Body(NamedTuple):
    """A program within an equation, and the values of the equation that enter and leave.

    Attributes:
      program: the program.
      inputs: for each input of the program the value outside.
      outputs: for each output of the program the output of the equation, `None` for a condition.
      carries: (index of the output, index of the input) of values that the next step reads.
      layers: indices of the stacked inputs; each step of a scan reads one layer of them.
      trips: number of runs in a call of the equation; `None` if it depends on data.
    """

    program: Program
    inputs: list[Value]
    outputs: list[Value | None]
    carries: Sequence[tuple[int, int]] = ()
    layers: range = range(0)
    trips: int | None = 1

    def split(self, inputs: list[T]) -> tuple[list[T], list[T], list[T]]:
        """Splits the inputs of a scan into constants, carried values and stacks of layers."""
        end = self.layers.start
        num_constants = end - len(self.carries)
        return inputs[:num_constants], inputs[num_constants:end], inputs[end:]


@dataclasses.dataclass(eq=False)
class Program:
    """A function as jax traced it: equations in the order in which they run."""

    inputs: list[Value]
    equations: list[Equation]
    outputs: list[Value]

    def flat_equations(self) -> Iterator[Equation]:
        """Yields all equations, those of a call in the place of the call."""
        for equation in self.equations:
            if equation.name in CALLS:
                yield from equation.inner_programs[0].flat_equations()
            else:
                yield equation

    def nested_programs(self) -> Iterator[Program]:
        """Yields the program, and all programs in its loops, branches and shards."""
        yield self
        for equation in self.flat_equations():
            for body in equation.inner_programs:
                yield from body.nested_programs()

    @functools.cached_property
    def makers(self) -> dict[Value, Equation]:
        """{value: equation that computes the value}, outside of loops and branches."""
        return {value: equation for equation in self.flat_equations() for value in equation.outputs}

    def calls_with_rules(self) -> Iterator[tuple[Equation, Program]]:
        """Yields all calls with a custom rule for derivatives, also within calls, and the rules."""
        for equation in self.equations:
            if equation.name in CALLS:
                yield from equation.inner_programs[0].calls_with_rules()
            if isinstance(equation.rule, Program):
                yield equation, equation.rule


# Calls: their bodies share their inputs and outputs.
CALLS = frozenset((
    "jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call", "composite", "eval_jaxpr",
))  # fmt: skip
# Along an axis that `vmap` names, jax writes the index of the axis in place of the name.
_COLLECTIVES = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}
_BODIES = {"scan": ["jaxpr"], "while": ["cond_jaxpr", "body_jaxpr"], "shard_map": ["jaxpr"]}
# Their bodies run in loops or as branches.
CONTROL = frozenset(("scan", "while", "cond"))
_PACKAGE = str(pathlib.Path(__file__).parents[1]) + os.sep
_LIBRARIES = re.compile(
    r"[/\\](jax|jaxlib|flax|haiku|equinox|optax|chex)[/\\]|[/\\]contextlib\.py|<"
)


def _count_shards(params: dict[str, Any]) -> int:
    """Counts the parts into which a `shard_map` cuts its inputs."""
    entries = [entry for spec in params["in_specs"] for entry in spec if entry]
    names = {n for entry in entries for n in ([entry] if isinstance(entry, str) else entry)}
    return math.prod([int(params["mesh"].shape[name]) for name in names])


def _trace_rule(call: Equation) -> Program:
    """Returns the program of the rule for derivatives of a call: see `Equation.rule`.

    Raises:
      Exception: whatever the rule raises, which is the user's code.
    """

    def map_derivatives(arrays: Arrays, derivatives: Arrays) -> PyTree:
        def differentiable(*inputs: jax.Array) -> Arrays:
            replaced = iter(inputs)
            outputs = call.bind([next(replaced) if is_differentiable(x) else x for x in arrays])
            return [x for x in outputs if is_differentiable(x)]

        inputs = [x for x in arrays if is_differentiable(x)]
        if call.maps_tangents:
            return jax.jvp(differentiable, inputs, derivatives)
        _, pull_back = jax.vjp(differentiable, *inputs)
        return pull_back(derivatives)

    inputs, outputs = call.differentiated
    arguments = call.inputs, inputs if call.maps_tangents else outputs
    structs = ([value.struct() for value in each] for each in arguments)
    return read_jaxpr(jax.make_jaxpr(map_derivatives)(*structs))


def is_differentiable(value: Value | jax.Array) -> bool:
    """Returns whether a value has a floating or complex dtype."""
    return value.dtype is not None and bool(jnp.issubdtype(value.dtype, jnp.inexact))


def read_jaxpr(closed: ClosedJaxpr | Jaxpr, calls: Tracebacks = ()) -> Program:
    """Returns the program of a traced function.

    Args:
      closed: the jaxpr of the function; one without constants may be open.
      calls: lines of the calls around the function, the innermost first.

    Example:
      >>> double = read_jaxpr(jax.make_jaxpr(jax.jit(lambda x: x * 2))(1.0))
      >>> [equation.name for equation in double.flat_equations()]
      ['mul']
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    return _read_program(closed, [_read_value(var.aval) for var in jaxpr.invars], calls)


def find_read_values(program: Program) -> set[Value]:
    """Returns the values that some equation reads, or that the program returns."""
    values = set[Value]()
    for body in program.nested_programs():
        values.update(body.outputs, *(equation.inputs for equation in body.flat_equations()))
    return values


def _read_program(closed: ClosedJaxpr | Jaxpr, inputs: list[Value], calls: Tracebacks) -> Program:
    """Returns the program of a closed or an open jaxpr on these inputs, within these calls."""
    jaxpr, constants = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
    values: dict[Var, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, constant in zip(jaxpr.constvars, constants, strict=True):
        values[var] = _read_value(var.aval, constant)

    def look_up(atom: Var | Literal) -> Value:
        return _read_value(atom.aval, atom.val) if isinstance(atom, Literal) else values[atom]

    equations = []
    for traced in jaxpr.eqns:
        equation = _read_equation(traced, [look_up(atom) for atom in traced.invars], calls)
        equations += _list_reductions(equation) or [equation]
        values.update(zip(traced.outvars, equation.outputs, strict=True))
    return Program(inputs, equations, [look_up(atom) for atom in jaxpr.outvars])


def _read_equation(traced: JaxprEqn, inputs: list[Value], calls: Tracebacks) -> Equation:
    name, params = traced.primitive.name, traced.params
    calls = (traced.source_info.traceback, *calls)
    inner_programs: tuple[Program, ...] = ()
    if name in CALLS:
        body = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
        inner_programs = (_read_program(body, inputs, calls),)
        outputs = inner_programs[0].outputs
    else:
        names = _BODIES.get(name, [])
        bodies = params["branches"] if name == "cond" else [params[x] for x in names]
        inner_programs = tuple(read_jaxpr(body, calls) for body in bodies)
        outputs = [_read_value(var.aval) for var in traced.outvars]
    return Equation(traced.primitive, params, inputs, outputs, inner_programs, calls, traced.ctx)


def _list_reductions(collective: Equation) -> list[Equation]:
    """Returns the reductions that a collective along axes of its inputs is, one for each input.

    An empty list for a collective along the axes of a mesh, and for other equations.
    """
    reduce, axes = _COLLECTIVES.get(collective.name), collective.params.get("axes", ())
    if reduce is None or not all(isinstance(axis, int | np.integer) for axis in axes):
        return []
    reductions = []
    for value, output in zip(collective.inputs, collective.outputs, strict=True):
        traced = jax.make_jaxpr(functools.partial(reduce, axes=axes))(value.struct()).eqns[0]
        changed = {"primitive": traced.primitive, "params": traced.params}
        reductions.append(
            dataclasses.replace(collective, **changed, inputs=[value], outputs=[output])
        )
    return reductions


def _read_value(aval: jax.core.AbstractValue, constant: ArrayLike | None = None) -> Value:
    shape, dtype = tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None)
    return Value(shape, dtype, constant, sharding.explicit_sharding(aval))
