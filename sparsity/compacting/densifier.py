"""Programs on kept values: a masked parameter is dense only while an equation reads the parameter.

Casts and scalings apply to the kept values. Other entrywise equations and layouts of parameters are
deferred to the equation that reads the result, usually a product.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
from jax import lax

from sparsity.compacting.deferred import (
    Deferred,
    MaybePending,
    densify_pending,
    is_pending,
)
from sparsity.compacting.dense_read import Arrays, DenseRead, find_kept_product
from sparsity.compacting.formats.base import KeptArray
from sparsity.programs.entrywise import ENTRYWISE, find_uniform_value, is_copy
from sparsity.programs.layout import LAYOUTS, is_lookup
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import Equation, Program, Value
from sparsity.programs.walk import Interpreter

Record: TypeAlias = Callable[[Equation, Sequence[MaybePending], bool], None]


class Densifier(Interpreter[MaybePending]):
    """Interpreter of programs whose inputs may be kept values.

    Args:
      is_data: whether a value depends on more than parameters.
      one_at_a_time: whether to let each dense parameter wait for the inputs of its product.
      record: called with each equation that reads a masked parameter, its inputs, and whether the
        parameter is made dense.
    """

    def __init__(
        self,
        is_data: Callable[[Value], bool],
        one_at_a_time: bool,
        record: Record = lambda *_: None,
    ) -> None:
        self._is_data, self._one_at_a_time, self._record = is_data, one_at_a_time, record

    def run(self, program: Program, inputs: Sequence[MaybePending]) -> list[MaybePending]:
        return [densify_pending(output) for output in super().run(program, inputs)]

    def evaluate(self, equation: Equation, inputs: list[MaybePending]) -> Sequence[MaybePending]:
        if not any(map(is_pending, inputs)):
            return equation.bind(inputs)
        return super().evaluate(equation, inputs)

    def call(self, equation: Equation, inputs: list[MaybePending]) -> Sequence[MaybePending]:
        """Returns the outputs of a call; keeps rematerialisation and rules for derivatives."""
        body = equation.inner_programs[0]
        if equation.is_remat:
            return equation.checkpoint(functools.partial(self.run, body))(inputs)
        if equation.name in ("custom_jvp_call", "custom_vjp_call"):
            return self._read(equation, inputs)
        return super().run(body, inputs)

    def bind(self, equation: Equation, inputs: list[MaybePending]) -> Sequence[MaybePending]:
        """Returns the outputs of an equation; the first row that fits decides.

        | equation                                            | pending inputs    | outputs  |
        | --------------------------------------------------- | ----------------- | -------- |
        | without outputs, or a callback                      | are made dense    | dense    |
        | transpose, cast, positive multiple, layers of stack | stay kept values  | kept     |
        | entrywise or layout, of parameters alone            | stay pending      | deferred |
        | product that the format multiplies                  | stay kept values  | dense    |
        | product, lookup, or of parameters alone             | are dense in turn | dense    |
        | any other                                           | are made dense    | dense    |

        In turn: one parameter at a time, and again in the backward pass, see `DenseRead`.
        """
        if not equation.outputs or equation.name == "io_callback":  # no function of its inputs
            return equation.bind([self._densify(equation, x) for x in inputs])
        moved = _move_axes(equation, inputs) or _map_values(equation, inputs)
        if moved is not None:
            return [moved]
        dense = zip(equation.inputs, inputs, strict=True)
        has_data = any(self._is_data(value) for value, x in dense if not is_pending(x))
        if not has_data and (equation.name in ENTRYWISE or equation.name in LAYOUTS):
            indices = range(len(equation.outputs))
            return [Deferred(equation, index, tuple(inputs)) for index in indices]
        if product := find_kept_product(equation, inputs):
            result = product.kept.layout.multiply(product)
            if result is not None:
                self._record(equation, inputs, False)
                return [result]
        if not has_data or equation.name in PRODUCTS or is_lookup(equation):
            return self._read(equation, inputs)
        self._record(equation, inputs, True)
        return equation.bind([densify_pending(x) for x in inputs])

    def read_layer(
        self, array: MaybePending, stack: MaybePending, step_inputs: tuple[()]
    ) -> MaybePending:
        if isinstance(array, KeptArray):
            return dataclasses.replace(array, axes=tuple(axis - 1 for axis in array.axes[1:]))
        return array

    def scan(self, equation: Equation, inputs: list[MaybePending]) -> Sequence[MaybePending]:
        (body,) = equation.list_bodies()
        constants, carry, layers = body.split(inputs)
        stacks = [x if _is_stack(x) else self._densify(equation, x) for x in layers]
        dense = [self._densify(equation, x) for x in carry]
        return super().scan(equation, [*constants, *dense, *stacks])

    def while_loop(self, equation: Equation, inputs: list[MaybePending]) -> Sequence[MaybePending]:
        first = len(inputs) - len(equation.outputs)
        carry = [self._densify(equation, x) for x in inputs[first:]]
        return super().while_loop(equation, [*inputs[:first], *carry])

    def cond(self, equation: Equation, inputs: list[MaybePending]) -> Sequence[MaybePending]:
        return super().cond(equation, [densify_pending(inputs[0]), *inputs[1:]])

    def _densify(self, equation: Equation, array: MaybePending) -> jax.Array:
        if is_pending(array):
            self._record(equation, [array], True)
        return densify_pending(array)

    def _read(self, equation: Equation, inputs: list[MaybePending]) -> Arrays:
        """Returns the outputs of an equation that reads pending arrays as dense ones."""
        self._record(equation, inputs, True)
        arrays, structure = jax.tree.flatten(inputs)
        return DenseRead(equation, structure, self._one_at_a_time).bind(arrays)


def _is_stack(array: MaybePending) -> bool:
    """Returns whether a scan can take the layers of an array."""
    return not is_pending(array) or (
        isinstance(array, KeptArray) and array.depth > 0 and array.axes[0] == 0
    )


def _map_values(equation: Equation, inputs: Sequence[MaybePending]) -> KeptArray | None:
    """Returns a cast or a positive multiple of kept values, `None` for other equations."""
    name, params = equation.name, equation.params
    kept = inputs[0] if isinstance(inputs[0], KeptArray) else inputs[-1]
    if not isinstance(kept, KeptArray) or params.get("sharding"):
        return None
    # Frozen entries are cast once, from their own dtype; two casts of the values may round twice.
    is_uncast = kept.frozen is None or kept.frozen.dtype == kept.values.dtype
    if name == "convert_element_type" and is_uncast:
        return dataclasses.replace(kept, values=kept.values.astype(params["new_dtype"]))
    if kept.frozen is not None:
        return None
    if name in ("mul", "div") and len(inputs) == 2:
        at = 0 if kept is inputs[0] else 1
        other = equation.inputs[1 - at]
        constant = find_uniform_value(other.constant)
        is_factor = constant is not None and 0 < constant < math.inf
        if other.shape or not is_factor or (name == "div" and at == 1):
            return None
        pair = [kept.values, inputs[1 - at]]
        (values,) = equation.bind(pair if at == 0 else pair[::-1])
        return dataclasses.replace(kept, values=values)
    if is_copy(equation) and not ENTRYWISE[name].is_placement:
        return dataclasses.replace(kept, values=equation.bind([kept.values])[0])
    return None


def _move_axes(equation: Equation, inputs: Sequence[MaybePending]) -> KeptArray | None:
    """Returns a transpose, or layers of a stack, as kept values; `None` for other equations."""
    kept, params = inputs[0], equation.params
    if not isinstance(kept, KeptArray):
        return None
    if equation.name == "transpose":
        axes = tuple(kept.axes[axis] for axis in params["permutation"])
        return dataclasses.replace(kept, axes=axes)
    depth, shape = kept.depth, equation.outputs[0].shape
    if not depth or kept.axes[:depth] != tuple(range(depth)):
        return None
    keeps_slices = shape[depth:] == kept.shape[depth:]
    if equation.name == "slice" and keeps_slices:
        keys = "start_indices", "limit_indices", "strides"
        bounds = zip(*(params[key] or (1,) * len(shape) for key in keys), strict=True)
        at = tuple(slice(*bound) for bound in [*bounds][:depth])
        return jax.tree.map(lambda x: x[at], kept)
    if equation.name == "dynamic_slice" and keeps_slices:
        start = [densify_pending(x) for x in inputs[1 : depth + 1]]

        def take(array: jax.Array) -> jax.Array:
            sizes = *shape[:depth], *array.shape[depth:]
            return lax.dynamic_slice(array, [*start, *[0] * (array.ndim - depth)], sizes)

        return jax.tree.map(take, kept)
    if equation.name == "squeeze" and all(axis < depth for axis in params["dimensions"]):
        dropped = params["dimensions"]
        layers = jax.tree.map(functools.partial(lax.squeeze, dimensions=dropped), kept)
        axes = tuple(axis - len(dropped) for axis in kept.axes[len(dropped) :])
        return dataclasses.replace(layers, axes=axes)
    return None
