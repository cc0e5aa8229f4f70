"""Entrywise affine functions of parameters that products read: c * w + d.

c and d depend on other parameters and on constants alone: a norm's scale folded in, a mask, a
low-rank change. Of other functions, such as a sigmoid, nothing is known here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import sharding
from sparsity.core.trees import PyTree
from sparsity.graph.traced_model import Model
from sparsity.graph.uses import Tracker, Use, View
from sparsity.programs.entrywise import is_copy
from sparsity.programs.layout import LAYOUTS
from sparsity.programs.program import Equation, Value, is_differentiable

FunctionKey: TypeAlias = tuple[object, ...]
_SUMS = ("add", "add_any", "sub")
_BY_LAYER = (*_SUMS, "convert_element_type", "div", "mul", "neg", "select_n")


class _Term(NamedTuple):
    """A value that a product reads.

    Attributes:
      key: equal for values that are computed alike from the same parameters and constants.
      is_affine: whether the value is an affine function of the parameter, or does not depend on it.
    """

    key: FunctionKey
    is_affine: bool


class AffineFunctions:
    """Entrywise affine functions of parameters in a model.

    Args:
      model: the model.
      tracker: its uses.
    """

    def __init__(self, model: Model, tracker: Tracker) -> None:
        self._model, self._tracker = model, tracker
        self._makers: dict[Value, Equation] = {}
        # {input of a body: (value around it, the scan that reads its layers)}, without carries
        self._outside: dict[Value, tuple[Value, Equation | None]] = {}
        for program in model.program.nested_programs():
            self._makers |= program.makers
            for equation in program.flat_equations():
                for body in equation.list_bodies() if equation.name in ("scan", "cond") else ():
                    carried = {index for _, index in body.carries}
                    pairs = zip(body.program.inputs, body.inputs, strict=True)
                    for index, (inner, value) in enumerate(pairs):
                        scan = equation if index in body.layers else None
                        self._outside |= {} if index in carried else {inner: (value, scan)}

    def describe(self, use: Use) -> FunctionKey | None:
        """Returns a key that uses of a parameter by one function share.

        `None` if the function is not affine, or differs between the entries that repeat one of the
        parameter.
        """
        factors = [factor for axis in use.view.factors for factor in axis]
        if any(factor.axis is None and factor.size > 1 for factor in factors):
            return None
        terms: dict[Value, _Term | None] = {}

        def read(value: Value) -> _Term | None:
            if value not in terms:
                terms[value] = self._describe_value(value, use, read)
            return terms[value]

        term = read(use.equation.inputs[use.operand])
        return term.key if term and term.is_affine else None

    def _describe_value(
        self, value: Value, use: Use, read: Callable[[Value], _Term | None]
    ) -> _Term | None:
        """Returns a value as a term; `None` if it reads data, a carry, or the parameter otherwise.

        Args:
          value: the value.
          use: the use of the parameter.
          read: describes other values.
        """
        if value.constant is not None:
            is_number = np.ndim(value.constant) == 0
            constant = np.asarray(value.constant).item() if is_number else id(value.constant)
            return _Term((str(value.dtype), constant), False)
        if self._tracker.is_data(value):
            return None
        if (parameter := self._model.parameter_inputs.get(value)) is not None:
            return _Term(parameter.path, parameter.path == use.path)
        if value in self._outside:
            outer, scan = self._outside[value]
            term = read(outer)
            # Other layers than those of the parameter differ from step to step.
            if term is None or scan not in (None, *use.view.scans):
                return None
            return _Term(("layer", term.key), term.is_affine) if scan else term
        if value not in self._makers:
            return None
        equation = self._makers[value]
        inputs = [term for x in equation.inputs if (term := read(x)) is not None]
        affine = [index for index, term in enumerate(inputs) if term.is_affine]
        if len(inputs) < len(equation.inputs) or len(affine) > 1:
            return None
        if affine and not _is_affine(equation, affine[0]):
            return None
        name = equation if equation.inner_programs else (equation.name, str(equation.params))
        output = equation.outputs.index(value)
        return _Term((name, output, *(term.key for term in inputs)), bool(affine))

    def evaluate(
        self,
        use: Use,
        read: Callable[..., jax.Array],
        layers: Mapping[Equation, int],
        shape: tuple[int, ...],
    ) -> list[jax.Array]:
        """Returns c and d in the order of the parameter, or of its layer.

        Args:
          use: a use that `describe` has a key for.
          read: `read(path, *layers)` returns a parameter, or one of its first layers.
          layers: the layer of each scan that takes the parameter apart.
          shape: the shape of the parameter, or of its layer.
        """

        def compute(number: jax.Array) -> jax.Array:
            values: dict[tuple[Value, tuple[int, ...]], jax.Array] = {}

            def read_value(value: Value, *index: int) -> jax.Array:
                if (value, index) not in values:
                    values[value, index] = compute_value(value, index)
                return values[value, index]

            def compute_value(value: Value, index: tuple[int, ...]) -> jax.Array:
                if value.constant is not None:
                    constant: PyTree = value.constant
                    return jnp.asarray(constant)[index] if index else constant
                if (parameter := self._model.parameter_inputs.get(value)) is not None:
                    array = read(parameter.path, *index)
                    is_used = parameter.path == use.path
                    zeros = sharding.zeros_like(array, array.dtype) if is_used else array
                    return zeros + number.astype(array.dtype) if is_used else array
                if value in self._outside:
                    outer, scan = self._outside[value]
                    return read_value(outer, *([layers[scan]] if scan else []), *index)
                equation = self._makers[value]
                if equation.name == "stop_gradient":  # its tangents are 0
                    return read_value(equation.inputs[0], *index)
                if index and equation.name in _BY_LAYER:  # of a stack: only the layer
                    operands = [read_value(x, *(index if x.shape else ())) for x in equation.inputs]
                    return equation.bind(operands)[0]
                outputs = equation.bind([read_value(x) for x in equation.inputs])
                array = outputs[equation.outputs.index(value)]
                return array[index] if index else array

            return read_value(use.equation.inputs[use.operand])

        # Of an affine function the value at 0 is d, and the tangent of ones is c.
        offset, multiplier = jax.jvp(compute, (jnp.float32(0),), (jnp.float32(1),))
        order = functools.partial(_order_as_parameter, use.view, shape)
        return [sharding.shard_like(x, order, x, shape=shape) for x in (multiplier, offset)]


def _is_affine(equation: Equation, index: int) -> bool:
    """Returns whether an equation is affine in an input, entry by entry, for other constants."""
    value, output = equation.inputs[index], equation.outputs[0]
    is_complex = [jnp.issubdtype(x.dtype, jnp.complexfloating) for x in (value, output)]
    if not is_differentiable(value) or not is_differentiable(output) or len({*is_complex}) > 1:
        return False
    if equation.name in ("div", "select_n"):
        return (index == 0) == (equation.name == "div")
    return equation.name in (*_SUMS, "mul", "neg", *LAYOUTS) or is_copy(equation)


def _order_as_parameter(view: View, shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Returns the entries of a view that holds each entry of a parameter once, in its order."""
    factors = [factor for axis in view.factors for factor in axis if factor.size != 1]
    x = x.reshape([factor.size for factor in factors])
    x = jnp.flip(x, [i for i, factor in enumerate(factors) if factor.step < 0])
    places = [(factor.axis or 0, -abs(factor.step)) for factor in factors]
    return x.transpose(sorted(range(len(factors)), key=places.__getitem__)).reshape(shape)
