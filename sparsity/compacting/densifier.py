"""Programs on kept values: a masked parameter is dense only while an equation reads the parameter.

Casts apply to the kept values. Other entrywise equations and layouts of parameters are
deferred to the equation that reads the result, usually a product: a `DenseRead`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from sparsity.compacting.formats import KeptArray, KeptProduct, Token, is_kept
from sparsity.core import sharding
from sparsity.programs.entrywise import ENTRYWISE, is_copy
from sparsity.programs.layout import LAYOUTS, is_lookup
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import Equation, Program, Value, is_differentiable
from sparsity.programs.walk import Interpreter

Arrays: TypeAlias = list[jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """An output of an equation that is computed again by each product that reads the output.

    Attributes:
      equation: an entrywise equation, or one of layout.
      output_index: index of the output.
      inputs: arrays; some are kept values, or deferred.
    """

    equation: Equation
    output_index: int
    inputs: tuple[MaybePending, ...]


# Kept values and deferred outputs are pending: no dense array holds them yet.
MaybePending: TypeAlias = jax.Array | KeptArray | Deferred

jax.tree_util.register_dataclass(Deferred, ["inputs"], ["equation", "output_index"])

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
        | transpose, cast, copy, layers of a stack            | stay kept values  | kept     |
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
    """Returns a cast or a copy of kept values, `None` for other equations."""
    (kept, *others), params = inputs, equation.params
    if others or not isinstance(kept, KeptArray) or params.get("sharding"):
        return None
    # Frozen entries are cast once, from their own dtype; two casts of the values may round twice.
    is_uncast = kept.frozen is None or kept.frozen.dtype == kept.values.dtype
    if equation.name == "convert_element_type" and is_uncast:
        return dataclasses.replace(kept, values=kept.values.astype(params["new_dtype"]))
    if kept.frozen is None and is_copy(equation) and not ENTRYWISE[equation.name].is_placement:
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


@dataclasses.dataclass(frozen=True)
class DenseRead:
    """Equation that reads pending arrays as dense ones, with a rule for derivatives.

    One dense array of the size of a parameter exists at a time, and none between the passes: the
    forward pass stores the inputs as they are. The backward pass of a product first computes the
    gradient of the pending operand. Its dense form is gone when the operand is made dense again for
    the gradient of the other one.

    Attributes:
      equation: the equation.
      structure: structure of the inputs, whose leaves are the arrays of the methods.
      one_at_a_time: whether dense parameters wait for other arrays.
    """

    equation: Equation
    structure: jax.tree_util.PyTreeDef
    one_at_a_time: bool

    def bind(self, arrays: Sequence[jax.Array]) -> Arrays:
        """Returns the outputs of the equation, with the rule for derivatives."""
        bind = jax.custom_vjp(self._forward)
        bind.defvjp(self._save, self._backward)
        return list(bind(*sharding.vary_alike(arrays)))

    def _forward(self, *arrays: jax.Array) -> Arrays:
        """Returns the outputs; dense parameters wait for the inputs that are dense already."""
        dense = [x for x in self._inputs(arrays) if not isinstance(x, KeptArray | Deferred)]
        return self._bind_dense(arrays, dense)

    def _bind_dense(self, arrays: Sequence[jax.Array], after: Arrays) -> Arrays:
        """Makes pending inputs dense, and binds the equation; has jax's own derivatives.

        Args:
          arrays: the leaves of the inputs.
          after: arrays for which the dense parameters wait if `one_at_a_time`.
        """
        inputs, token = self._inputs(arrays), make_token(after) if self.one_at_a_time else 0
        return self.equation.bind([densify_pending(x, token) for x in inputs])

    def _save(self, *arrays: jax.Array) -> tuple[Arrays, Sequence[jax.Array]]:
        """Returns the outputs, and the arrays for `_backward`.

        `jax.vjp` replaces a call with its own rule for reverse derivatives by the forward pass of
        this rule, which has forward derivatives. The call has none: with `_forward`, forward
        derivatives of gradients, as in a Hessian, would be an error of jax.
        """
        if self.equation.name == "custom_vjp_call":
            return jax.vjp(self._forward, *arrays)[0], arrays
        return self._forward(*arrays), arrays

    def _backward(self, arrays: Arrays, cotangents: Arrays) -> tuple[jax.Array | None, ...]:
        """Returns the gradients of the arrays, `None` for integers.

        Of a product, the gradient of the pending operand comes first: the other gradient waits.
        """
        cotangents, inputs = self._floats(cotangents), self._inputs(arrays)
        pending, dense = _split_float_leaves(inputs)
        if self.equation.name in PRODUCTS and sum(map(is_pending, inputs)) == 1:
            gradients = self._differentiate(arrays, pending, cotangents, after=cotangents)
            # The second dense array is not made before the gradient by the first is computed.
            after = [*gradients.values()] or cotangents
            gradients |= self._differentiate(arrays, dense, cotangents, after)
        else:
            gradients = self._differentiate(arrays, pending + dense, cotangents, after=cotangents)
        return tuple(gradients.get(index) for index in range(len(arrays)))

    def _differentiate(
        self, arrays: Arrays, indices: list[int], cotangents: Arrays, after: Arrays
    ) -> dict[int, jax.Array]:
        """Returns the gradients of the arrays at these indices, by index; see `_bind_dense`."""

        def bind_replaced(*chosen: jax.Array) -> Arrays:
            replaced = dict(zip(indices, chosen, strict=True))
            replaced_arrays = [replaced.get(index, array) for index, array in enumerate(arrays)]
            return self._floats(self._bind_dense(replaced_arrays, after))

        if not indices:
            return {}
        pull_back = jax.vjp(bind_replaced, *(arrays[index] for index in indices))[1]
        return dict(zip(indices, pull_back(cotangents), strict=True))

    def _inputs(self, arrays: Sequence[jax.Array]) -> list[MaybePending]:
        """Returns the inputs of the equation, whose leaves are the arrays."""
        return jax.tree.unflatten(self.structure, arrays)

    def _floats(self, outputs: Arrays) -> Arrays:
        """Returns the outputs, or their gradients, that have derivatives."""
        pairs = zip(self.equation.outputs, outputs, strict=True)
        return [x for value, x in pairs if is_differentiable(value)]


def find_kept_product(equation: Equation, inputs: Sequence[MaybePending]) -> KeptProduct | None:
    """Returns a product of kept values and a dense array, `None` for other equations."""
    if equation.name not in PRODUCTS or len(inputs) != 2:
        return None
    at = 0 if is_pending(inputs[0]) else 1
    kept, other = inputs[at], inputs[1 - at]
    if not isinstance(kept, KeptArray) or isinstance(other, KeptArray | Deferred):
        return None
    return KeptProduct(equation, at, kept, other)


def _split_float_leaves(inputs: Sequence[MaybePending]) -> tuple[list[int], list[int]]:
    """Returns the indices of the leaves that are floats: of pending arrays, and of dense ones."""
    arrays = [(array, is_pending(each)) for each in inputs for array in jax.tree.leaves(each)]
    floats = [(i, x) for i, (y, x) in enumerate(arrays) if jnp.issubdtype(y.dtype, jnp.inexact)]
    return [i for i, x in floats if x], [i for i, x in floats if not x]


def is_pending(array: MaybePending) -> bool:
    """Returns whether an array is kept values, or deferred."""
    return isinstance(array, KeptArray | Deferred)


def densify_pending(array: MaybePending, token: Token = 0) -> jax.Array:
    """Returns an array as a dense one, for an equation of the model; `token` as in `KeptArray`."""
    if isinstance(array, KeptArray):
        dense = array.layout.find_dense(array)
        return array.densify(token) if dense is None else dense
    if isinstance(array, Deferred):
        inputs = [densify_pending(each, token) for each in array.inputs]
        return array.equation.bind(inputs)[array.output_index]
    return array


def kept_in(arrays: Sequence[MaybePending]) -> list[KeptArray]:
    """Returns the kept values from which arrays are computed."""
    return list(filter(is_kept, jax.tree.leaves(list(arrays), is_leaf=is_kept)))


def make_token(arrays: Sequence[jax.Array]) -> Token:
    """Returns an int32 0 that depends on the floating `arrays`.

    A buffer of zeros made from this 0 is not allocated before the arrays. The schedule of XLA on
    CPUs begins with all buffers of zeros, of all layers at once. A dependence on the input of a
    layer keeps one dense parameter at a time; a barrier does not, because XLA removes barriers
    before scheduling.
    """
    token: Token = 0
    for array in arrays:
        if jnp.issubdtype(jnp.result_type(array), jnp.inexact) and np.size(array):
            token = token + _exceeds_infinity(lax.stop_gradient(array))
    return token


@custom_vmap
def _exceeds_infinity(array: jax.Array) -> jax.Array:
    first = lax.slice(array, [0] * array.ndim, [1] * array.ndim).reshape(())
    # False for all numbers and NaN; XLA does not infer this, and keeps the dependence.
    return (first.real.astype(jnp.float32) > jnp.inf).astype(jnp.int32)


@_exceeds_infinity.def_vmap
def _exceeds_infinity_once(_: int, __: object, array: jax.Array) -> tuple[jax.Array, bool]:
    """Keeps one dense parameter for all rows of a `vmap`."""
    return _exceeds_infinity(array[0]), False
