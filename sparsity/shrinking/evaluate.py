"""The same program with smaller arrays: every equation evaluated at the sizes that are left."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, reshard

from sparsity.core.sharding import fit
from sparsity.graph.coupling import Coupling
from sparsity.programs.axes import Axis, kept, kept_by_layer, size_of
from sparsity.programs.primitives import SOURCES
from sparsity.programs.program import CALLS, Equation, Program, Value, is_differentiable

# Of variables that lose entries, the indices that stay; a row for each layer of a scan that has its
# own.
Plan = Mapping[Axis, np.ndarray]


class Smaller:
    """Evaluates programs whose arrays have lost channels.

    Args:
      coupling: the axes of their values.
      plan: what stays of which variable.
      keeps_rules: whether calls keep their own rules for derivatives.
      layer: the rows of the plan of the layer that runs.
    """

    def __init__(
        self,
        coupling: Coupling,
        plan: Plan,
        keeps_rules: bool = True,
        layer: Mapping[Axis, jax.Array] | None = None,
    ) -> None:
        self._coupling, self._plan, self._keeps_rules = coupling, dict(plan), keeps_rules
        self._layer = dict(layer or {})
        self._left = {variable: index.shape[-1] for variable, index in plan.items()}

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape that is left of a value."""
        return tuple(size_of(dim, self._left) for dim in self._coupling.axes(value))

    def cut(self, value: Value, array: Any) -> Any:
        """What is left of an array."""
        for axis, dim in enumerate(self._coupling.axes(value)):
            index = kept_by_layer(dim, self._plan)
            if index is not None and index.ndim == 2 and self._layer:
                index = kept(dim, {**self._plan, **self._layer})  # type: ignore[dict-item]
            if index is not None:
                array = take(array, index, axis)
        return array

    def run(self, program: Program, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of a program for inputs that have lost their channels already."""
        arrays: dict[Value, Any] = dict(zip(program.inputs, inputs, strict=True))

        def read(value: Value) -> Any:
            if value not in arrays:
                arrays[value] = self.cut(value, value.known) if value.shape else value.known
            return arrays[value]

        for equation in program.equations:
            found = self._evaluate(equation, [read(value) for value in equation.inputs])
            arrays.update(zip(equation.outputs, map(_placed, equation.outputs, found), strict=True))
        return [read(value) for value in program.outputs]

    def _evaluate(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        name = equation.name
        if name in CALLS:
            return self._call(equation, inputs)
        if name in _LOOPS:
            return _LOOPS[name](self, equation, inputs)
        values = (*equation.inputs, *equation.outputs)
        if all(self.shape(value) == value.shape for value in values):
            return equation.bind(inputs)
        if name in SOURCES:  # full-size, so that what is kept does not change
            return [
                self.cut(value, array)
                for value, array in zip(equation.outputs, equation.bind(inputs), strict=True)
            ]
        if name in _RESIZED:
            return _RESIZED[name](self, equation, inputs)
        return equation.bind(inputs, **_shardings(equation, self.shape(equation.outputs[0])))

    def _call(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        """A call; rematerialisation and rules for derivatives stay what they are."""
        (body,) = equation.bodies
        function: Callable[..., Any] = functools.partial(self._apply, body)
        if equation.name in ("remat2", "checkpoint"):
            how = {key: equation.params[key] for key in ("prevent_cse", "policy")}
            function = jax.checkpoint(function, **how)
        elif equation.derivative is not None and self._keeps_rules:
            function = self._with_rule(equation, function)
        elif equation.rule_error is not None:
            function = _forward_only(function, equation.rule_error)
        return list(function(*inputs))

    def _apply(self, body: Program, *inputs: Any) -> tuple[Any, ...]:
        return tuple(self.run(body, inputs))

    def _with_rule(self, equation: Equation, function: Any) -> Any:
        """A call with its own rule for derivatives, at the sizes that are left."""
        rule, (of_inputs, _) = equation.derivative, equation.differentiated
        assert rule is not None  # asked before
        plain = Smaller(self._coupling, self._plan, keeps_rules=False, layer=self._layer)
        has = [value in of_inputs for value in equation.inputs]

        if equation.name == "custom_jvp_call":

            def forward(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
                given = [x for x, use in zip(tangents, has, strict=True) if use]
                found = plain.run(rule, [*primals, *given])
                half = len(found) // 2
                return _filled(found[:half], equation.outputs, function(*primals)), _filled(
                    found[half:], equation.outputs, None
                )

            with_jvp = jax.custom_jvp(function)
            with_jvp.defjvp(forward)
            return with_jvp

        def backward(inputs: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            of_outputs = zip(cotangents, equation.outputs, strict=True)
            given = [x for x, value in of_outputs if is_differentiable(value)]
            found = iter(plain.run(rule, [*inputs, *given]))
            none = jax.dtypes.float0
            pairs = zip(inputs, has, strict=True)
            return tuple(next(found) if use else np.zeros(np.shape(x), none) for x, use in pairs)

        with_vjp = jax.custom_vjp(function)
        with_vjp.defvjp(lambda *inputs: (function(*inputs), inputs), backward)
        return with_vjp

    def _scan(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        params, (body,) = equation.params, equation.bodies
        fixed = params["num_consts"]
        end = fixed + params["num_carry"]

        own = {
            variable: jnp.asarray(index)
            for variable, index in self._plan.items()
            if index.ndim == 2 and len(index) == params["length"]
        }

        def step(carry: list[Any], layer: Any) -> tuple[list[Any], list[Any]]:
            arrays, rows = layer
            known = {**self._layer, **dict(zip(own, rows, strict=True))}
            inside = Smaller(self._coupling, self._plan, self._keeps_rules, known)
            outputs = inside.run(body, [*inputs[:fixed], *carry, *arrays])
            return outputs[: end - fixed], outputs[end - fixed :]

        how = {key: params[key] for key in ("length", "reverse", "unroll")}
        layers = inputs[end:], list(own.values())
        carry, stacked = lax.scan(step, inputs[fixed:end], layers, **how)
        return [*carry, *stacked]

    def _while(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        condition, body = equation.bodies
        first = equation.params["cond_nconsts"]
        second = first + equation.params["body_nconsts"]
        found: list[Any] = lax.while_loop(
            lambda carry: self.run(condition, [*inputs[:first], *carry])[0],
            lambda carry: self.run(body, [*inputs[first:second], *carry]),
            inputs[second:],
        )
        return found

    def _cond(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        index, *operands = inputs
        branches = [functools.partial(self._apply, body) for body in equation.bodies]
        return list(lax.switch(index, branches, *operands))

    def _reshape(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        shape = self.shape(equation.outputs[0])
        own = equation.outputs[0].struct(shape).sharding
        return [lax.reshape(inputs[0], shape, out_sharding=own)]

    def _broadcast(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        axes = equation.params["broadcast_dimensions"]
        shape = self.shape(equation.outputs[0])
        own = equation.outputs[0].struct(shape).sharding
        return [lax.broadcast_in_dim(inputs[0], shape, axes, out_sharding=own)]

    def _split(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        axis = equation.params["axis"]
        sizes = [self.shape(value)[axis] for value in equation.outputs]
        return list(lax.split(inputs[0], sizes, axis))

    def _slice(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        params, (value,) = equation.params, equation.inputs
        bounds = []
        for axis, dim in enumerate(self._coupling.axes(value)):
            index = kept_by_layer(dim, self._plan)
            index = np.arange(value.shape[axis]) if index is None else index
            index = index[0] if index.ndim == 2 else index  # layers keep equal numbers
            ends = params["start_indices"][axis], params["limit_indices"][axis]
            bounds.append([int(np.count_nonzero(index < end)) for end in ends])
        starts, limits = zip(*bounds, strict=True)
        return [lax.slice(inputs[0], starts, limits, params["strides"])]

    def _dynamic_slice(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        array, *starts = inputs
        return [lax.dynamic_slice(array, starts, self.shape(equation.outputs[0]))]

    def _gather(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        whole = zip(equation.params["slice_sizes"], equation.inputs[0].shape, strict=True)
        sizes = [
            left if size == full else size
            for (size, full), left in zip(whole, inputs[0].shape, strict=True)
        ]
        return equation.bind(inputs, slice_sizes=tuple(sizes))

    def _convolution(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        groups = equation.params["feature_group_count"]
        if groups > 1:
            groups = size_of(self._coupling.groups_of[equation], self._left)
        return equation.bind(inputs, feature_group_count=groups)


def _forward_only(function: Callable[..., Any], error: Exception) -> Any:
    """A function whose derivatives raise what the rule of the model raises."""

    def forward(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        raise error

    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(forward)
    return wrapped


def _filled(found: Sequence[Any], values: Sequence[Value], others: Sequence[Any] | None) -> Any:
    """What a rule computes, with something in the places of values without derivatives."""
    computed = iter(found)
    return tuple(
        next(computed)
        if is_differentiable(value)
        else np.zeros(value.shape, jax.dtypes.float0)
        if others is None
        else others[i]
        for i, value in enumerate(values)
    )


def take(array: Any, index: np.ndarray | jax.Array, axis: int) -> jax.Array:
    """Entries along an axis; indices of [layers, entries] are those of each layer of a stack."""
    if index.ndim == 1:
        return jnp.take(array, index, axis=axis)
    shape = [1] * array.ndim
    shape[0], shape[axis] = index.shape
    return jnp.take_along_axis(jnp.asarray(array), jnp.asarray(index).reshape(shape), axis=axis)


def _shardings(equation: Equation, shape: tuple[int, ...]) -> dict[str, Any]:
    """The shardings that an equation asks for, without the axes that do not divide the new size."""
    given = {key: equation.params.get(key) for key in ("sharding", "out_sharding")}
    return {key: fit(own, shape) for key, own in given.items() if isinstance(own, NamedSharding)}


def _placed(value: Value, array: Any) -> Any:
    """On Explicit axes an array sharded as the value was, where the axes divide what is left."""
    if value.sharding is None:
        return array
    own = value.struct(jnp.shape(array)).sharding
    return array if jax.typeof(array).sharding == own else reshard(array, own)


_LOOPS: dict[str, Callable[[Smaller, Equation, list[Any]], list[Any]]] = {
    "scan": Smaller._scan,
    "while": Smaller._while,
    "cond": Smaller._cond,
}
_RESIZED: dict[str, Callable[[Smaller, Equation, list[Any]], list[Any]]] = {
    "reshape": Smaller._reshape,
    "broadcast_in_dim": Smaller._broadcast,
    "split": Smaller._split,
    "slice": Smaller._slice,
    "dynamic_slice": Smaller._dynamic_slice,
    "gather": Smaller._gather,
    "conv_general_dilated": Smaller._convolution,
}
