"""The same program with smaller arrays: every equation evaluated at the sizes that are left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.jaxprs import CALLS, Equation, Program, Value
from sparsity.graph.coupling import SOURCES, Coupling
from sparsity.graph.dims import Dim, kept, size_kept

Plan = Mapping[Dim, np.ndarray]  # of variables that lose entries, the indices that stay


class Smaller:
    """Evaluates programs whose arrays have lost channels.

    Args:
      coupling: the axes of their values.
      plan: what stays of which variable.
    """

    def __init__(self, coupling: Coupling, plan: Plan) -> None:
        self._coupling, self._plan = coupling, dict(plan)

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape that is left of a value."""
        return tuple(size_kept(dim, self._plan) for dim in self._coupling.dims(value))

    def cut(self, value: Value, array: Any) -> Any:
        """What is left of an array."""
        for axis, dim in enumerate(self._coupling.dims(value)):
            if (index := kept(dim, self._plan)) is not None:
                array = jnp.take(array, index, axis=axis)
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
            arrays.update(zip(equation.outputs, found, strict=True))
        return [read(value) for value in program.outputs]

    def _evaluate(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        name = equation.name
        if name in CALLS:
            return self.run(equation.bodies[0], inputs)
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
        return equation.bind(inputs, **({"sharding": None} if _has_sharding(equation) else {}))

    def _scan(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        params, (body,) = equation.params, equation.bodies
        fixed = params["num_consts"]
        end = fixed + params["num_carry"]

        def step(carry: list[Any], layer: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = self.run(body, [*inputs[:fixed], *carry, *layer])
            return outputs[: end - fixed], outputs[end - fixed :]

        how = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, stacked = lax.scan(step, inputs[fixed:end], inputs[end:], **how)
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
        branches = [_branch(self, body) for body in equation.bodies]
        if index.dtype == jnp.bool_:
            index = index.astype(jnp.int32)
        found: list[Any] = lax.switch(index, branches, *operands)
        return found

    def _reshape(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        return [lax.reshape(inputs[0], self.shape(equation.outputs[0]))]

    def _broadcast(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        axes = equation.params["broadcast_dimensions"]
        return [lax.broadcast_in_dim(inputs[0], self.shape(equation.outputs[0]), axes)]

    def _split(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        axis = equation.params["axis"]
        sizes = [self.shape(value)[axis] for value in equation.outputs]
        return list(lax.split(inputs[0], sizes, axis))

    def _slice(self, equation: Equation, inputs: list[Any]) -> list[Any]:
        params, (value,) = equation.params, equation.inputs
        bounds = []
        for axis, dim in enumerate(self._coupling.dims(value)):
            index = kept(dim, self._plan)
            index = np.arange(value.shape[axis]) if index is None else index
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
            groups = size_kept(self._coupling.groups_of[equation], self._plan)
        return equation.bind(inputs, feature_group_count=groups)


def _has_sharding(equation: Equation) -> bool:
    return "sharding" in equation.params and equation.name != "convert_element_type"


def _branch(smaller: Smaller, body: Program) -> Callable[..., list[Any]]:
    return lambda *operands: smaller.run(body, operands)


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
