"""Biases that a model adds to the outputs of weights, and patterns along inputs of products.

A bias is a parameter that a model adds to the outputs of a weight, and to nothing else. The running
mean of a BatchNorm that follows is such a parameter: the model subtracts it. So is the shift of the
BatchNorm if the mean is no parameter, behind the scale.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp

from sparsity.core import trees
from sparsity.core.arrays import promote
from sparsity.core.checks import check_int
from sparsity.core.trees import Path
from sparsity.graph.traced_model import Model, Parameters
from sparsity.graph.uses import Factor, Tracker, Use, View, follow_layout
from sparsity.patterns import FanIn, NByM, SparsityType, Unstructured
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
        is_bare = use.equation.inputs[use.operand] in self._bare_values
        if self._num_reads[use.path] != 1 or not is_bare:
            return None
        value, view = use.equation.outputs[0], _view_result(use)
        factors: list[tuple[Value, View, bool]] = []
        while len(readers := self._readers.get(value, [])) == 1 and (equation := readers[0]):
            (output, *_) = equation.outputs
            name, is_scale = equation.name, equation.name in ("mul", "div")
            if is_scale or name in ("add", "add_any", "sub"):
                (other,) = [x for x in equation.inputs if x is not value]
                fact = self._tracker.fact(other)
                # b - outputs, or b / outputs: an addition to b does not add to the outputs.
                if name in ("sub", "div") and equation.inputs[0] is not value:
                    return None
                is_bias = other in self._bare_values and len(other.shape) == len(output.shape)
                if is_bias and not is_scale and len(fact.views) == 1:
                    return self._make_bias(use, fact.views[0], view, name == "sub", factors)
                if value.shape != output.shape or (fact.is_data and is_scale):
                    return None
                factors += [(other, view, name == "div")] if is_scale else []
            elif is_move(equation):
                moved = follow_layout(view, equation, LAYOUTS[name].relate(equation))
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

    def _make_bias(
        self,
        use: Use,
        bias: View,
        outputs: View,
        is_subtracted: bool,
        factors: Sequence[tuple[Value, View, bool]],
    ) -> Bias | None:
        """Returns the parameter that shifts the outputs of a use, `None` where others matter.

        Args:
          use: the use.
          bias: the parameter, where it meets the outputs.
          outputs: the outputs there.
          is_subtracted: whether the model subtracts the parameter.
          factors: values that scale the outputs before, the outputs there, and whether they divide.
        """
        axes = _match_axes(use, outputs, bias)
        readers = self._readers[self._values[bias.path]]
        if axes is None or self._num_reads[bias.path] > 1 or len(readers) > 1:
            return None
        shape = self._values[use.path].shape
        scales = [self._make_scale(*factor, axes, shape) for factor in factors]
        complete = tuple(scale for scale in scales if scale is not None)
        return Bias(bias.path, is_subtracted, complete) if len(complete) == len(scales) else None

    def _make_scale(
        self,
        value: Value,
        outputs: View,
        divides: bool,
        axes: Mapping[int, int],
        shape: tuple[int, ...],
    ) -> Scale | None:
        """Returns a factor along the axes of the bias, `None` where other axes matter.

        Args:
          value: the factor.
          outputs: the outputs there.
          divides: whether the outputs are divided by the factor.
          axes: {axis of the weight: axis of the bias}.
          shape: the shape of the weight.
        """
        by_axis, makers = [*outputs.factors], self._program.makers
        # A scale is read before broadcasts, with axes of its own or of one entry.
        while value in makers and makers[value].name == "broadcast_in_dim":
            by_axis = [by_axis[i] for i in makers[value].params["broadcast_dimensions"]]
            value = makers[value].inputs[0]
        if value.constant is None and value not in self._outside:
            return None
        bias_axes: list[int | None] = []
        for size, factors in zip(value.shape, by_axis, strict=False):
            longer = [factor for factor in factors if factor.size > 1]
            axis = longer[0].axis if len(longer) == 1 else None
            if size > 1 and (axis is None or shape[axis] != size or longer[0].step != 1):
                return None
            bias_axes.append(None if size == 1 or axis is None else axes[axis])
        return Scale(value, tuple(bias_axes), divides)


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
    for factors in zip(outputs.factors, bias.factors, strict=True):
        one, other = ([x for x in each if x.axis is not None and x.size > 1] for each in factors)
        if [x[1:] for x in one] != [x[1:] for x in other]:
            return None
        for (axis, *_), (bias_axis, *_) in zip(one, other, strict=True):
            if axis is None or bias_axis is None or axes.setdefault(axis, bias_axis) != bias_axis:
                return None
    # `Bias.shift` reshapes outputs to the bias, so that axes must come in order, each once.
    order = [axes[axis] for axis in (*use.batch, *sorted(use.output)) if axis in axes]
    return axes if order == sorted(set(order)) else None


class _GraphQueries(Protocol):
    """The parts of a `Graph` that filters and patterns read."""

    parameters: Parameters
    tracker: Tracker


@dataclasses.dataclass(frozen=True)
class WeightFilter:
    """`filter_fn` that selects the weights with enough inputs. Made by `Graph.is_weight`.

    Attributes:
      graph: the graph of the model.
      min_inputs: smallest number of inputs of an output.
    """

    graph: _GraphQueries
    min_inputs: int

    def __post_init__(self) -> None:
        check_int("min_inputs", self.min_inputs, 1)

    def __call__(self, path: Path, param: chex.Array) -> bool:
        """Returns whether a product has enough inputs for each output, before the model was cut."""
        uses = _find_contractions(self.graph, path, param)
        return any(use.num_inputs >= self.min_inputs for use in uses)


@dataclasses.dataclass(frozen=True)
class PatternAlongInputs:
    """`sparsity_type` along the inputs of each parameter. Made by `Graph.nm` and `Graph.fan_in`.

    Attributes:
      graph: the graph of the model.
      pattern: the pattern, along any axis.
      otherwise: "dense" keeps parameters dense that cannot have the pattern.
    """

    graph: _GraphQueries
    pattern: NByM | FanIn
    otherwise: Literal["dense"] | None

    def __post_init__(self) -> None:
        if self.otherwise not in (None, "dense"):
            raise ValueError(
                f"otherwise must be None or 'dense', got otherwise = {self.otherwise!r}."
            )

    def __call__(self, path: Path, param: chex.Array) -> SparsityType | None:
        """Returns the pattern of a parameter, in this model or in a smaller one."""
        uses = _find_contractions(self.graph, path, param)
        name = f"{trees.join_names(uses[0].path if uses else path)!r} of shape {param.shape}"
        pattern = self._fit(uses, param.shape, name) if uses else Unstructured()
        if self.otherwise == "dense":
            return pattern if uses and not isinstance(pattern, str) else None
        if isinstance(pattern, str):
            raise ValueError(
                f"{pattern} Leave it out with filter_fn, or keep all such parameters dense: "
                "otherwise='dense'."
            )
        return pattern

    def _fit(self, uses: Sequence[Use], shape: tuple[int, ...], name: str) -> SparsityType | str:
        """Returns the pattern, or the reason why a parameter cannot have the pattern.

        Axes of patterns count from the end: they are the same in a slice, whatever the batch axes.
        """
        is_nm = isinstance(self.pattern, NByM)
        axes = {use.channels if is_nm else tuple(sorted(use.contracting)) for use in uses}
        if len(axes) > 1:
            return f"Products contract different axes {sorted(axes)} of {name}."
        (inputs,), full = axes, self.graph.parameters.find_shape(uses[0].path)
        if isinstance(self.pattern, FanIn):
            for axis in inputs:
                if not all(use.is_along(axis, full[axis]) for use in uses):
                    return f"Products contract a part of axis {axis} of {name}, behind a reshape."
            return dataclasses.replace(self.pattern, axis=tuple(i - len(shape) for i in inputs))
        m, sizes = self.pattern.m, ", ".join(f"axis {i} of size {shape[i]}" for i in inputs)
        divided = [axis for axis in inputs if shape[axis] % m == 0]
        fitting = [axis for axis in divided if all(use.is_along(axis, m) for use in uses)]
        if fitting:
            return dataclasses.replace(self.pattern, axis=fitting[-1] - len(shape))
        if divided:
            return f"Groups of {m} input channels of {name} ({sizes}) lie across a reshape."
        return (
            f"{m} divides none of the input channels of {name}: {sizes}. The window of a "
            "convolution holds no input channels."
        )


def _find_contractions(graph: _GraphQueries, path: Path, param: chex.Array) -> list[Use]:
    """Returns the products that contract a parameter of this model, or of a smaller one."""
    parameter = graph.parameters.find(path, param, may_be_smaller=True)
    return [use for use in graph.tracker.find_products(parameter.path) if use.contracting]
