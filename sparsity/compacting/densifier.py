"""Programs on kept values: a masked parameter is dense only while an equation reads the parameter.

Casts and scalings apply to the kept values. Other entrywise equations and layouts of parameters are
deferred to the equation that reads the result, usually a product.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.compacting.deferred import Deferred, Lazy, densify, is_lazy, kept_in, make_token
from sparsity.compacting.formats.dtypes import is_quantized
from sparsity.compacting.formats.storage import Kept, Token
from sparsity.core import sharding
from sparsity.core.trees import PyTree
from sparsity.programs.entrywise import ENTRYWISE, constant_in, is_copy
from sparsity.programs.layout import LAYOUTS, is_lookup, reads_quantized
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import Equation, Program, Value, is_differentiable
from sparsity.programs.walk import Interpreter

Arrays = list[jax.Array]


class Densifier(Interpreter[Lazy]):
    """Interpreter of programs whose inputs may be kept values.

    Args:
      is_data: whether a value depends on more than parameters.
      in_turn: whether to let each dense parameter wait for the inputs of its product.
      record: called with each equation that reads a masked parameter, its inputs, and whether the
        parameter is made dense.
    """

    def __init__(
        self,
        is_data: Callable[[Value], bool],
        in_turn: bool,
        record: Callable[[Equation, Sequence[Lazy], bool], None] = lambda *_: None,
    ) -> None:
        self._is_data, self._in_turn, self._record = is_data, in_turn, record

    def run(self, program: Program, inputs: Sequence[Lazy]) -> list[Lazy]:
        return [densify(output) for output in super().run(program, inputs)]

    def evaluate(self, equation: Equation, inputs: list[Lazy]) -> Sequence[Lazy]:
        if not any(map(is_lazy, inputs)):
            return equation.bind(inputs)
        return super().evaluate(equation, inputs)

    def call(self, equation: Equation, inputs: list[Lazy]) -> Sequence[Lazy]:
        """Returns the outputs of a call; keeps rematerialisation and rules for derivatives."""
        body = equation.bodies[0]
        if equation.is_remat:
            outputs: Arrays = equation.checkpoint(functools.partial(self.run, body))(inputs)
            return outputs
        if equation.name in ("custom_jvp_call", "custom_vjp_call"):
            return self._read(equation, inputs)
        return super().run(body, inputs)

    def bind(self, equation: Equation, inputs: list[Lazy]) -> Sequence[Lazy]:
        _check_casts(equation, inputs)
        moved = _move_axes(equation, inputs) or _map_values(equation, inputs)
        if moved is not None:
            return [moved]
        dense = zip(equation.inputs, inputs, strict=True)
        has_data = any(self._is_data(value) for value, x in dense if not is_lazy(x))
        if not has_data and (equation.name in ENTRYWISE or equation.name in LAYOUTS):
            numbers = range(len(equation.outputs))
            return [Deferred(equation, number, tuple(inputs)) for number in numbers]
        if operands := _find_operands(equation, inputs):
            _, kept, _ = operands
            product = kept.storage.multiply(equation, *operands)
            if product is not None:
                self._record(equation, inputs, False)
                return [product]
        if not has_data or equation.name in PRODUCTS or is_lookup(equation):
            return self._read(equation, inputs)
        self._record(equation, inputs, True)
        return equation.bind([densify(x) for x in inputs])

    def rows(self, scan: Equation) -> PyTree:
        return jnp.arange(scan.length) if self._in_turn else None

    def read_layer(self, array: Lazy, stack: Lazy, rows: PyTree) -> Lazy:
        if isinstance(array, Kept) and isinstance(stack, Kept):
            return array.layer(stack, rows)
        return array

    def _scan(self, equation: Equation, inputs: list[Lazy]) -> Sequence[Lazy]:
        (body,) = equation.within()
        constants, carry, layers = body.split(inputs)
        stacks = [x if _is_stack(x) else self._densify(equation, x) for x in layers]
        # A layer of a scan outside is no stack that this scan can cut: its values are read first.
        stacks = [x.with_values(x.read_values()) if isinstance(x, Kept) else x for x in stacks]
        dense = [self._densify(equation, x) for x in carry]
        return super()._scan(equation, [*constants, *dense, *stacks])

    def _while(self, equation: Equation, inputs: list[Lazy]) -> Sequence[Lazy]:
        first = len(inputs) - len(equation.outputs)
        carry = [self._densify(equation, x) for x in inputs[first:]]
        return super()._while(equation, [*inputs[:first], *carry])

    def _cond(self, equation: Equation, inputs: list[Lazy]) -> Sequence[Lazy]:
        return super()._cond(equation, [densify(inputs[0]), *inputs[1:]])

    def _densify(self, equation: Equation, array: Lazy) -> jax.Array:
        if is_lazy(array):
            self._record(equation, [array], True)
        return densify(array)

    def _read(self, equation: Equation, inputs: list[Lazy]) -> Arrays:
        """Returns the outputs of an equation that reads lazy arrays as dense ones."""
        _check_casts(equation, inputs)
        self._record(equation, inputs, True)
        arrays, structure = jax.tree.flatten(inputs)
        return _DenseRead(equation, structure, self._in_turn).run(arrays)


@dataclasses.dataclass(frozen=True)
class _DenseRead:
    """Equation that reads lazy arrays as dense ones, with a rule for derivatives.

    One dense array of the size of a parameter exists at a time, and none between the passes: the
    forward pass stores the inputs as they are. The backward pass of a product first computes the
    gradient of the lazy operand. Its dense form is gone when the operand is made dense again for
    the gradient of the other one.

    Attributes:
      equation: the equation.
      structure: structure of the inputs, whose leaves are the arrays of the methods.
      in_turn: whether dense parameters wait for other arrays.
    """

    equation: Equation
    structure: jax.tree_util.PyTreeDef
    in_turn: bool

    def run(self, arrays: Sequence[jax.Array]) -> Arrays:
        """Returns the outputs of the equation."""
        read = jax.custom_vjp(self._forward)
        read.defvjp(lambda *arrays: (self._forward(*arrays), arrays), self._backward)
        return list(read(*sharding.vary_alike(arrays)))

    def _forward(self, *arrays: jax.Array) -> Arrays:
        dense = [x for x in self._inputs(arrays) if not isinstance(x, Kept | Deferred)]
        return self._run(arrays, dense)

    def _backward(self, arrays: Arrays, cotangents: Arrays) -> tuple[jax.Array | None, ...]:
        """Returns the gradients of the arrays, `None` for integers."""
        cotangents, inputs = self._floats(cotangents), self._inputs(arrays)
        kept, others = _number_floats(inputs)
        if self.equation.name in PRODUCTS and sum(map(is_lazy, inputs)) == 1:
            gradients = self._differentiate_kept(arrays, kept, others, cotangents)
        else:
            gradients, others = {}, kept + others
        if others:
            after = [*gradients.values()] or cotangents
            gradients |= self._differentiate(arrays, others, cotangents, after)
        return tuple(gradients.get(number) for number in range(len(arrays)))

    def _differentiate_kept(
        self, arrays: Arrays, kept: list[int], others: list[int], cotangents: Arrays
    ) -> dict[int, jax.Array]:
        """Returns the gradients of the arrays of the lazy operand of a product, by number."""
        operands = _find_operands(self.equation, self._inputs(arrays))
        relaid = cotangents
        if operands and kept and others:
            gradient = operands[1].storage.differentiate(self.equation, *operands, *cotangents)
            if gradient is not None:
                return {kept[0]: gradient}
            other, *relaid = _lay_rows_last(self.equation, *operands, *cotangents)
            arrays = [other if number == others[0] else x for number, x in enumerate(arrays)]
        return self._differentiate(arrays, kept, relaid, after=cotangents)

    def _differentiate(
        self, arrays: Arrays, numbers: list[int], cotangents: Arrays, after: Arrays
    ) -> dict[int, jax.Array]:
        """Returns the gradients of some arrays, by number; see `_run`."""

        def run(*chosen: jax.Array) -> Arrays:
            replaced = dict(zip(numbers, chosen, strict=True))
            each = [replaced.get(number, array) for number, array in enumerate(arrays)]
            return self._floats(self._run(each, after))

        pull_back = jax.vjp(run, *(arrays[number] for number in numbers))[1]
        return dict(zip(numbers, pull_back(cotangents), strict=True))

    def _run(self, arrays: Sequence[jax.Array], after: Arrays) -> Arrays:
        """Returns the outputs; dense parameters wait for the arrays `after`."""
        inputs = self._inputs(arrays)
        if not self.in_turn:
            return self.equation.bind([densify(x) for x in inputs])
        token = make_token(after)
        if _is_widened(self.equation, inputs):
            return _multiply_wide(self.equation, inputs, token)
        return self.equation.bind([densify(x, token) for x in inputs])

    def _inputs(self, arrays: Sequence[jax.Array]) -> list[Lazy]:
        inputs: list[Lazy] = jax.tree.unflatten(self.structure, arrays)
        return inputs

    def _floats(self, outputs: Arrays) -> Arrays:
        """Returns the outputs, or their gradients, that have derivatives."""
        pairs = zip(self.equation.outputs, outputs, strict=True)
        return [x for value, x in pairs if is_differentiable(value)]


def _find_operands(
    equation: Equation, inputs: Sequence[Lazy]
) -> tuple[int, Kept, jax.Array] | None:
    """Returns the operands of a product of kept values and a dense array.

    Returns:
      The number of the operand that is kept values, this operand, and the other one; `None` for
      other equations.
    """
    if equation.name not in PRODUCTS or len(inputs) != 2:
        return None
    at = 0 if is_lazy(inputs[0]) else 1
    kept, other = inputs[at], inputs[1 - at]
    if not isinstance(kept, Kept) or isinstance(other, Kept | Deferred):
        return None
    return at, kept, other


def _lay_rows_last(
    equation: Equation, at: int, kept: Kept, other: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the operands of the gradient of kept values, the left one with its rows last.

    XLA on CPUs multiplies faster along last axes. Copies of few rows cost less than this saves:
    steps through 8 scanned layers of 2048 x 2048 take 0.90 of the time at 4 rows, 0.92 at 16, and
    0.97 at 128. The bits stay.

    Args:
      equation: the product.
      at: number of the operand that is kept values.
      kept: this operand.
      other: the other operand.
      cotangent: gradient of the product.
    """
    is_small = 0 < other.size * 8 <= math.prod(kept.shape)
    if equation.name != "dot_general" or not is_small or jax.default_backend() != "cpu":
        return other, cotangent
    product = read_product(equation)
    roles, partner, places = product.operands[at], product.operands[1 - at], product.places(at)
    first = min((*roles.contracted, *roles.free), key=lambda axis: kept.axes[axis])
    if first in roles.contracted:
        return _lay_out(other, (*partner.batch, *partner.contracted, *partner.free)), cotangent
    rows = (axis for axis in range(cotangent.ndim) if axis not in places)
    return other, _lay_out(cotangent, (*places, *rows))


def _lay_out(array: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Returns an array that lies in memory in another order of its axes."""
    if order == tuple(range(array.ndim)):
        return array
    laid_out: jax.Array = lax.optimization_barrier(array.transpose(order))
    return laid_out.transpose(np.argsort(order))


def _is_widened(equation: Equation, inputs: Sequence[Lazy]) -> bool:
    """Returns whether XLA multiplies bfloat16 numbers of a product as float32.

    XLA on CPUs does, if the result is bfloat16, and rounds the result.
    """
    return (
        equation.name == "dot_general"
        and all(x.dtype == jnp.bfloat16 for x in (*equation.inputs, *equation.outputs))
        and equation.params["preferred_element_type"] in (None, jnp.bfloat16)
        and not any(isinstance(x, Deferred) for x in inputs)
        and all(_widens_exactly(x) for x in inputs if isinstance(x, Kept))
        and jax.default_backend() == "cpu"
    )


def _widens_exactly(kept: Kept) -> bool:
    """Returns whether float32 holds the entries as bfloat16 does: no cast rounds frozen ones."""
    dtype = kept.storage.base_dtype
    is_exact = kept.base is None or dtype is None or dtype == jnp.bfloat16 or dtype.itemsize == 1
    return is_exact and kept.observer is None


def _multiply_wide(equation: Equation, inputs: Sequence[Lazy], token: Token) -> Arrays:
    """Returns a product of bfloat16 numbers as XLA on CPUs computes the product, bit for bit.

    Values are written to a float32 slice. XLA would keep a slice of each width at once. All numbers
    and gradients are rounded as bfloat16, which XLA would leave out between two casts.
    """

    def widen(array: jax.Array) -> jax.Array:
        return lax.reduce_precision(array.astype(jnp.float32), 8, 7)

    wide = [
        densify(x.with_values(widen(x.read_values())), token)
        if isinstance(x, Kept)
        else widen(densify(x))
        for x in inputs
    ]
    (result,) = equation.bind(wide, preferred_element_type=np.dtype(np.float32))
    return [lax.reduce_precision(result, 8, 7).astype(jnp.bfloat16)]


def _number_floats(inputs: Sequence[Lazy]) -> tuple[list[int], list[int]]:
    """Returns the numbers of the leaves that are floats: those of lazy arrays, and all others."""
    lazy, dense, number = list[int](), list[int](), 0
    for each in inputs:
        for array in jax.tree.leaves(each):
            if jnp.issubdtype(array.dtype, jnp.inexact):
                (lazy if is_lazy(each) else dense).append(number)
            number += 1
    return lazy, dense


def _is_stack(array: Lazy) -> bool:
    """Returns whether a scan can take the layers of an array."""
    return not is_lazy(array) or (
        isinstance(array, Kept) and array.depth > 0 and array.axes[0] == 0
    )


def _check_casts(equation: Equation, inputs: Sequence[Lazy]) -> None:
    """Raises a ValueError if an equation reads quantized values, whose kept ones are floats.

    A cast to a wider float may read them, and equations of layout.
    """
    output = equation.outputs[0].dtype
    is_wide = jnp.issubdtype(output, jnp.floating) and not is_quantized(output)
    if reads_quantized(equation) or (equation.name == "convert_element_type" and is_wide):
        return
    # Loops have as many inputs as values: each body checks its equations.
    for value, array in zip(equation.inputs, inputs, strict=True):
        for kept in kept_in([array]) if is_quantized(value.dtype) else ():
            if kept.storage.is_quantized:
                raise ValueError(
                    f"{kept.name!r} is {kept.storage.base_dtype} and read by {equation.name} "
                    f"{equation.source}. Its trained entries are floats: cast the parameter to a "
                    "float of 16 bits or more first, or give it no mask: None."
                )


def _map_values(equation: Equation, inputs: Sequence[Lazy]) -> Kept | None:
    """Returns a cast or a positive multiple of kept values, `None` for other equations."""
    name, params = equation.name, equation.params
    kept = inputs[0] if isinstance(inputs[0], Kept) else inputs[-1]
    if not isinstance(kept, Kept) or params.get("sharding"):
        return None
    # A second cast would round the frozen entries once only.
    is_uncast = kept.storage.base_dtype == equation.inputs[0].dtype and kept.observer is None
    if name == "convert_element_type" and is_uncast:
        return kept.with_values(kept.read_values().astype(params["new_dtype"]))
    if not kept.is_plain:
        return None
    if name in ("mul", "div") and len(inputs) == 2:
        at = 0 if kept is inputs[0] else 1
        other = equation.inputs[1 - at]
        constant = constant_in(other.constant)
        is_factor = constant is not None and 0 < constant < math.inf
        if other.shape or not is_factor or (name == "div" and at == 1):
            return None
        pair = [kept.read_values(), inputs[1 - at]]
        (values,) = equation.bind(pair if at == 0 else pair[::-1])
        return kept.with_values(values)
    if is_copy(equation) and not ENTRYWISE[name].places:
        return kept.with_values(equation.bind([kept.read_values()])[0])
    return None


def _move_axes(equation: Equation, inputs: Sequence[Lazy]) -> Kept | None:
    """Returns a transpose, or layers of a stack, as kept values; `None` for other equations."""
    kept, params = inputs[0], equation.params
    if not isinstance(kept, Kept):
        return None
    if equation.name == "transpose":
        axes = tuple(kept.axes[axis] for axis in params["permutation"])
        return dataclasses.replace(kept, axes=axes)
    if not kept.depth or not kept.leads_with_stack:
        return None
    kept = kept.with_values(kept.read_values())
    depth, shape = kept.depth, equation.outputs[0].shape
    keeps_slices = shape[depth:] == kept.shape[depth:]
    if equation.name == "slice" and keeps_slices:
        keys = "start_indices", "limit_indices", "strides"
        bounds = zip(*(params[key] or (1,) * len(shape) for key in keys), strict=True)
        at = tuple(slice(*bound) for bound in [*bounds][:depth])
        layers: Kept = jax.tree.map(lambda x: x[at], kept)
        return layers
    if equation.name == "dynamic_slice" and keeps_slices:
        return _slice_stack(kept, [densify(x) for x in inputs[1 : depth + 1]], shape[:depth])
    if equation.name == "squeeze" and all(axis < depth for axis in params["dimensions"]):
        dropped = params["dimensions"]
        layers = jax.tree.map(functools.partial(lax.squeeze, dimensions=dropped), kept)
        axes = tuple(axis - len(dropped) for axis in kept.axes[len(dropped) :])
        return dataclasses.replace(layers, axes=axes)
    return None


def _slice_stack(kept: Kept, start: Arrays, sizes: tuple[int, ...]) -> Kept:
    """Returns some layers of a stack, from numbers that may be traced."""

    def take(array: jax.Array) -> jax.Array:
        slice_shape = array.shape[kept.depth :]
        return lax.dynamic_slice(array, [*start, *[0] * len(slice_shape)], [*sizes, *slice_shape])

    layers: Kept = jax.tree.map(take, kept)
    return layers
