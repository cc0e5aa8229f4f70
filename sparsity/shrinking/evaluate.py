"""The same program with smaller arrays: every equation evaluated at the sizes that are left."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, reshard

from sparsity.core.sharding import fit
from sparsity.graph.coupling import Coupling
from sparsity.programs.axes import Axis, kept, kept_by_layer, size_of
from sparsity.programs.entrywise import SOURCES
from sparsity.programs.layout import LAYOUTS
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import Equation, Program, Value, is_differentiable
from sparsity.programs.walk import Interpreter

# Of variables that lose entries, the indices that stay; a row for each layer of a scan that has its
# own.
Plan = Mapping[Axis, np.ndarray]


class Smaller(Interpreter):
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
        super().__init__()
        self._coupling, self._plan, self._keeps_rules = coupling, dict(plan), keeps_rules
        self._layer = dict(layer or {})
        self._left = {variable: index.shape[-1] for variable, index in plan.items()}

    def shape(self, value: Value) -> tuple[int, ...]:
        """Returns the shape that is left of a value."""
        return tuple(size_of(dim, self._left) for dim in self._coupling.axes(value))

    def count_below(self, value: Value, axis: int, end: int) -> int:
        """Returns how many of the first `end` entries along an axis are left."""
        index = kept_by_layer(self._coupling.axes(value)[axis], self._plan)
        if index is None:
            return end
        index = index[0] if index.ndim == 2 else index  # layers keep equal numbers
        return int(np.count_nonzero(index < end))

    def cut(self, value: Value, array: Any) -> Any:
        """Returns what is left of an array."""
        for axis, dim in enumerate(self._coupling.axes(value)):
            index = kept_by_layer(dim, self._plan)
            if index is not None and index.ndim == 2 and self._layer:
                index = kept(dim, {**self._plan, **self._layer})  # type: ignore[dict-item]
            if index is not None:
                array = take(array, index, axis)
        return array

    def read(self, value: Value) -> Any:
        return self.cut(value, value.known) if value.shape else value.known

    def define(self, value: Value, array: Any) -> Any:
        return _placed(value, array)

    def bind(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        name = equation.name
        values = (*equation.inputs, *equation.outputs)
        if all(self.shape(value) == value.shape for value in values):
            return equation.bind(inputs)
        if name in SOURCES:  # full-size, so that what is kept does not change
            outputs = zip(equation.outputs, equation.bind(inputs), strict=True)
            return [self.cut(value, array) for value, array in outputs]
        if name in LAYOUTS and (resize := LAYOUTS[name].resize) is not None:
            return resize(equation, inputs, self)
        if name in PRODUCTS and read_product(equation).groups > 1:
            groups = size_of(self._coupling.feature_groups[equation], self._left)
            return equation.bind(inputs, feature_group_count=groups)
        return equation.bind(inputs, **_shardings(equation, self.shape(equation.outputs[0])))

    def call(self, equation: Equation, inputs: list[Any]) -> Sequence[Any]:
        """Returns the outputs of a call, whose rematerialisation and rules for derivatives stay."""
        function: Callable[..., Any] = functools.partial(self._apply, equation.bodies[0])
        if equation.name in ("remat2", "checkpoint"):
            how = {key: equation.params[key] for key in ("prevent_cse", "policy")}
            function = jax.checkpoint(function, **how)
        elif equation.derivative is not None and self._keeps_rules:
            function = self._with_rule(equation, function)
        elif equation.rule_error is not None:
            function = _forward_only(function, equation.rule_error)
        return list(function(*inputs))

    def rows(self, scan: Equation) -> list[jax.Array]:
        return [jnp.asarray(self._plan[variable]) for variable in self._layered(scan)]

    def at_step(self, scan: Equation, rows: Sequence[jax.Array]) -> Smaller:
        step = self.inside()
        step._layer = self._layer | dict(zip(self._layered(scan), rows, strict=True))
        return step

    def _layered(self, scan: Equation) -> list[Axis]:
        """The variables of which each layer of a scan keeps entries of its own."""
        length = scan.params["length"]
        return [v for v, index in self._plan.items() if index.ndim == 2 and len(index) == length]

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
