"""Biases: parameters that a model adds to the outputs of a weight, and to nothing else.

The running mean of a BatchNorm that follows is such a parameter: the model subtracts it. So is the
shift of the BatchNorm if the mean is no parameter, behind the scale.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsity.core.dtypes import promote
from sparsity.core.trees import Path
from sparsity.graph.readers.uses import Tracker, Use
from sparsity.graph.readers.views import Factor, View, follow_layout
from sparsity.graph.traced_model import Model
from sparsity.programs.entrywise import is_copy
from sparsity.programs.layout import LAYOUTS, is_move
from sparsity.programs.products import read_product
from sparsity.programs.program import Equation, Value


class Scale(NamedTuple):
    """Factor of the outputs of a weight, a function of parameters alone.

    Attributes:
      value: a value of the program.
      axes: for each axis of the value the axis of the bias, `None` for an axis of one entry.
      divides: whether the outputs are divided by the value.
    """

    value: Value
    axes: tuple[int | None, ...]
    divides: bool

    def expand(self, array: jax.Array, ndim: int) -> jax.Array:
        """Returns the value's array with the axes of the bias, or axes of one entry."""
        axes = [axis for axis in self.axes if axis is not None]
        squeezed = array.squeeze(tuple(i for i, axis in enumerate(self.axes) if axis is None))
        ordered = squeezed.transpose(sorted(range(len(axes)), key=axes.__getitem__))
        return jnp.expand_dims(ordered, [axis for axis in range(ndim) if axis not in axes])


@dataclasses.dataclass(frozen=True)
class Bias:
    """Parameter that shifts the outputs of a weight.

    Attributes:
      path: path of the parameter.
      is_subtracted: whether the model subtracts the parameter, such as the mean of a BatchNorm.
      scales: factors of the outputs between the product and the parameter.
    """

    path: Path
    is_subtracted: bool = False
    scales: tuple[Scale, ...] = ()

    def shift(self, bias: jax.Array, outputs: jax.Array, scales: Sequence[jax.Array]) -> jax.Array:
        """Returns the parameter that adds an array to the outputs of the weight.

        Args:
          bias: the parameter.
          outputs: the array, with as many entries as `bias`, in the same order.
          scales: the arrays of `scales`.
        """
        added = outputs.reshape(bias.shape)
        for scale, array in zip(self.scales, scales, strict=True):
            factor = scale.expand(array, bias.ndim)
            added = added / factor if scale.divides else added * factor
        wide = bias.astype(promote(bias.dtype, added.dtype))
        return (wide - added if self.is_subtracted else wide + added).astype(bias.dtype)


def find_biases(model: Model, tracker: Tracker) -> dict[Path, Bias]:
    """Returns the bias of each weight that has one, and a single product.

    A bias has an axis for each output axis of the weight, in the same order; in a stack of layers
    both are stacked. The bias nearest to the product counts.
    """
    search = _BiasSearch(model, tracker)
    return {use.path: bias for use in tracker.products if (bias := search.find(use)) is not None}


class _Factor(NamedTuple):
    """Value that scales the outputs of a use, and the view of the outputs at that place."""

    value: Value
    outputs: View
    divides: bool


class _BiasSearch:
    """Search for biases: the readers of each value, and the values that hold a bare parameter."""

    def __init__(self, model: Model, tracker: Tracker) -> None:
        self._program, self._tracker = model.program, tracker
        self._values = {x.path: value for value, x in model.parameter_inputs.items()}
        self._outside = {*model.parameter_inputs, *model.program.makers}  # of loops
        self._readers: dict[Value, list[Equation | None]] = {}  # `None`: the program returns it
        self._bare_values = set(model.parameter_inputs)  # and moved or cast copies of them
        self._num_reads: Counter[Path] = Counter()  # of parameters, where they meet data
        for body in model.program.nested_programs():
            for equation in body.flat_equations():
                self._note_reads(equation)
            for value in body.outputs:
                self._readers.setdefault(value, []).append(None)

    def find(self, use: Use) -> Bias | None:
        """Returns the bias behind a product, `None` if there is none.

        Follows the outputs to the first parameter that is added to or subtracted.
        """
        if (
            self._num_reads[use.path] != 1
            or use.equation.inputs[use.operand] not in self._bare_values
        ):
            return None
        value, view = use.equation.outputs[0], _view_result(use)
        factors: list[_Factor] = []
        while (equation := self._find_reader(value)) is not None:
            (output, *_) = equation.outputs
            if equation.name in (*_SUMS, *_SCALES):
                (other,) = [x for x in equation.inputs if x is not value]
                fact = self._tracker.fact(other)
                # b - outputs, or b / outputs: an addition to b does not add to the outputs.
                if equation.name in ("sub", "div") and equation.inputs[0] is not value:
                    return None
                is_bias = other in self._bare_values and len(other.shape) == len(output.shape)
                if equation.name in _SUMS and is_bias and len(fact.views) == 1:
                    return self._make_bias(
                        use, fact.views[0], view, equation.name == "sub", factors
                    )
                if value.shape != output.shape or (fact.is_data and equation.name in _SCALES):
                    return None
                if equation.name in _SCALES:
                    factors.append(_Factor(other, view, equation.name == "div"))
            elif is_move(equation):
                moved = follow_layout(view, equation, LAYOUTS[equation.name].relate(equation))
                if moved is None:
                    return None
                view = moved
            elif not is_copy(equation):
                return None
            value = output
        return None

    def _note_reads(self, equation: Equation) -> None:
        """Notes what an equation reads."""
        for value in equation.inputs:
            self._readers.setdefault(value, []).append(equation)
        if equation.inner_programs:
            self._bare_values |= _list_bare_inputs(equation, self._bare_values)
            return
        if (is_copy(equation) or is_move(equation)) and equation.inputs[0] in self._bare_values:
            self._bare_values.add(equation.outputs[0])
        facts = [self._tracker.fact(value) for value in equation.inputs]
        if any(fact.is_data for fact in facts):
            self._num_reads.update(view.path for fact in facts for view in fact.views)

    def _find_reader(self, value: Value) -> Equation | None:
        """Returns the only reader of a value, `None` for several and for outputs of the program."""
        readers = self._readers.get(value, [])
        return readers[0] if len(readers) == 1 else None

    def _make_bias(
        self, use: Use, bias: View, outputs: View, is_subtracted: bool, factors: Sequence[_Factor]
    ) -> Bias | None:
        """Returns the parameter that shifts the outputs of a use, `None` where others matter.

        Args:
          use: the use.
          bias: the parameter, where it meets the outputs.
          outputs: the outputs there.
          is_subtracted: whether the model subtracts the parameter.
          factors: factors of the outputs before.
        """
        axes = _match_axes(use, outputs, bias)
        readers = self._readers[self._values[bias.path]]
        if axes is None or self._num_reads[bias.path] > 1 or len(readers) > 1:
            return None
        candidates = [self._make_scale(factor, axes, self._values[use.path]) for factor in factors]
        scales = [scale for scale in candidates if scale is not None]
        if len(scales) < len(candidates):
            return None
        return Bias(bias.path, is_subtracted, tuple(scales))

    def _make_scale(self, factor: _Factor, axes: Mapping[int, int], weight: Value) -> Scale | None:
        """Returns a factor along the axes of the bias, `None` where other axes matter.

        Args:
          factor: the factor.
          axes: {axis of the weight: axis of the bias}.
          weight: the weight.
        """
        value, by_axis = factor.value, [*factor.outputs.factors]
        makers = self._program.makers
        # A scale is read before broadcasts, with axes of its own or of one entry.
        while value in makers and makers[value].name == "broadcast_in_dim":
            by_axis = [by_axis[i] for i in makers[value].params["broadcast_dimensions"]]
            value = makers[value].inputs[0]
        if value.constant is None and value not in self._outside:
            return None
        bias_axes: list[int | None] = []
        for size, factors in zip(value.shape, by_axis[: len(value.shape)], strict=True):
            longer = [factor for factor in factors if factor.size > 1]
            axis = longer[0].axis if len(longer) == 1 else None
            if size > 1 and (axis is None or weight.shape[axis] != size or longer[0].step != 1):
                return None
            bias_axes.append(None if size == 1 or axis is None else axes[axis])
        return Scale(value, tuple(bias_axes), factor.divides)


def _list_bare_inputs(equation: Equation, bare_values: Collection[Value]) -> set[Value]:
    """Returns the inputs of a scan's body that are parameters, or layers of one."""
    if equation.name != "scan":
        return set()
    (body,) = equation.list_bodies()
    carries = {index for _, index in body.carries}
    pairs = enumerate(zip(body.inputs, body.program.inputs, strict=True))
    return {inner for i, (value, inner) in pairs if value in bare_values and i not in carries}


def _view_result(use: Use) -> View:
    """Returns where the output axes of the parameter lie in the result of the product."""
    (result,), view = use.equation.outputs, use.view
    by_axis: list[tuple[Factor, ...]] = [(Factor(None, n),) for n in result.shape]
    for place, axis in read_product(use.equation).map_result_axes(use.operand).items():
        by_axis[place] = view.factors[axis]
    return view.with_factors(by_axis)


def _match_axes(use: Use, outputs: View, bias: View) -> dict[int, int] | None:
    """Returns {axis of the weight: axis of the bias}, `None` where order or layers differ."""
    if bias.has_other_entries or use.view.has_other_entries or bias.scans != use.view.scans:
        return None
    axes = dict(zip(use.view.stacked, bias.stacked, strict=True))
    for factors, other in zip(outputs.factors, bias.factors, strict=True):
        pairs = [
            [factor for factor in array_factors if factor.axis is not None and factor.size > 1]
            for array_factors in (factors, other)
        ]
        if [factor[1:] for factor in pairs[0]] != [factor[1:] for factor in pairs[1]]:
            return None
        for (axis, *_), (bias_axis, *_) in zip(*pairs, strict=True):
            if axes.setdefault(axis, bias_axis) != bias_axis:
                return None
    # `Bias.shift` reshapes outputs to the bias, so that axes must come in order, each once.
    order = [axes[axis] for axis in (*use.batch, *sorted(use.output)) if axis in axes]
    return axes if order == sorted(set(order)) else None


_SUMS = ("add", "add_any", "sub")
_SCALES = ("mul", "div")
