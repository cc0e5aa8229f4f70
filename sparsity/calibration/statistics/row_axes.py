"""Axes of activations that are axes of the user's row weights, such as batch and position.

The axes are followed through the program: an axis keeps its name through functions of single
entries, moves and products that keep it, and its entries are mixed where they are joined, cut or
reordered. An array with mixed entries has no weights, also after rows are added to it, and nothing
is concluded from sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import trees
from sparsity.core.checks import check_values
from sparsity.core.trees import PyTree
from sparsity.graph import Graph, View
from sparsity.graph.uses import Factor, follow_layout
from sparsity.programs.entrywise import ENTRYWISE, REDUCTIONS
from sparsity.programs.layout import LAYOUTS, Place
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import CONTROL, Equation, Value
from sparsity.programs.walk import Flow

RowWeights: TypeAlias = Callable[[PyTree], PyTree] | jax.Array | np.ndarray
Axes: TypeAlias = tuple[tuple[Factor, ...], ...]  # for each axis its factors, as in a view

_MIXED = -1  # stands for the axis of entries that rows of the weights were joined or reordered to
_CUMULATIVE = frozenset(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"))


def read_row_weights(row_weights: RowWeights | None, batch: PyTree, index: int) -> PyTree:
    """Returns the weights of the rows of a batch, or `None` for all 1.

    Raises:
      ValueError: the weights are no array of finite numbers of at least 0.
    """
    if row_weights is None:
        return None
    weights = row_weights(batch) if callable(row_weights) else row_weights
    name = f"row_weights of batch {index}"
    if not trees.is_numeric(weights) or not np.ndim(weights):
        raise ValueError(f"{name} must be an array of leading axes of the batch, got {weights!r}.")
    check_values(name, weights, "Give arrays with values.")
    array = np.asarray(weights, np.float32)
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{name} must be finite and at least 0, got {array}.")
    return array


def check_any_counts(weights: Iterable[PyTree], label: str = "batches") -> None:
    """Raises a ValueError if the row weights of all batches are 0."""
    if not any(x is None or np.any(x) for x in weights):
        raise ValueError(f"row_weights are 0 for all rows of all {label}: give rows that count.")


class RowAxes(Flow[Axes]):
    """For each value of a program, the axes that are axes of the row weights.

    Args:
      graph: the graph of the model.
      inputs: the values of the program that are arrays of the batch.
      shape: the shape of the weights.

    Raises:
      ValueError: no array of the batch begins with that shape.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Value], shape: tuple[int, ...]) -> None:
        super().__init__()
        self._shape = shape
        # An axis of one row needs no name.
        rows = tuple((Factor(axis if size > 1 else None, size),) for axis, size in enumerate(shape))
        starts = [x for x in inputs if x.shape[: len(shape)] == shape]
        if not starts:
            shapes = ", ".join(trees.shape_text(x.shape) for x in inputs)
            raise ValueError(
                f"row_weights have shape {shape}, with which no array of the batch begins: "
                f"{shapes}."
            )
        for value in starts:
            self.facts[value] = rows + _make_plain(value.shape[len(shape) :])
        self.run(graph.model.program)

    def spread(self, value: Value, weights: jax.Array) -> jax.Array | None:
        """Returns weights that broadcast to a value, `None` if it lacks one of their axes."""
        axes = self.fact(value)
        if any(factor.axis == _MIXED for factors in axes for factor in factors):
            return None
        pieces = {axis: [f for factors in axes for f in factors if f.axis == axis]
                  for axis in range(len(self._shape))}  # fmt: skip
        for axis, factors in pieces.items():
            ordered = sorted(factors, key=lambda factor: -factor.step)
            steps = [math.prod(f.size for f in ordered[i + 1 :]) for i in range(len(ordered))]
            is_complete = math.prod(f.size for f in factors) == self._shape[axis]
            if not is_complete or [f.step for f in ordered] != steps:
                return None
            pieces[axis] = ordered
        source = [factor for factors in pieces.values() for factor in factors]
        target = [factor for factors in axes for factor in factors if factor.axis is not None]
        array = jnp.asarray(weights).reshape([factor.size for factor in source])
        array = array.transpose([source.index(factor) for factor in target])
        sizes = [(f.size, f.axis is not None, _has_rows(x)) for x in axes for f in x]
        array = array.reshape([size if is_row else 1 for size, is_row, _ in sizes])
        array = jnp.broadcast_to(array, [size if has_rows else 1 for size, _, has_rows in sizes])
        return array.reshape(
            [math.prod(f.size for f in factors) if _has_rows(factors) else 1 for factors in axes]
        )

    # Hooks of the walk.

    def initial_fact(self, value: Value) -> Axes:
        return _make_plain(value.shape)

    def join(self, one: Axes, other: Axes, equation: Equation, target: Value) -> Axes:
        return _merge([one, other], target.shape)  # a carry often starts from zeros

    def take_layer(self, fact: Axes, scan: Equation) -> Axes:
        return fact[1:]

    def stack_layers(self, fact: Axes, scan: Equation) -> Axes:
        return ((Factor(None, scan.length),), *fact)

    def enters(self, equation: Equation) -> bool:
        return equation.name in CONTROL

    def visit(self, equation: Equation) -> None:
        facts = [self.fact(value) for value in equation.inputs]
        has_rows = any(_has_rows(factors) for fact in facts for factors in fact)
        for index, output in enumerate(equation.outputs):
            axes = self._derive(equation, facts, index) if has_rows else _make_plain(output.shape)
            self.facts[output] = axes

    def _derive(self, equation: Equation, facts: list[Axes], index: int) -> Axes:
        name, output = equation.name, equation.outputs[index]
        if name in ENTRYWISE or name in _CUMULATIVE:
            if len(equation.outputs) > 1:  # a barrier returns its inputs
                return facts[index]
            return _merge([fact for fact in facts if len(fact) == len(output.shape)], output.shape)
        if name in REDUCTIONS:
            return tuple(x for i, x in enumerate(facts[0]) if i not in equation.params["axes"])
        if name in PRODUCTS and read_product(equation).refusal is None:
            return _multiply(equation, facts)
        if name == "gather":
            return _look_up(equation, facts)
        return _move(equation, facts, index) if name in LAYOUTS else _mix(output.shape)


def find_row_axes(graph: Graph, shape: tuple[int, ...]) -> RowAxes:
    """Returns the axes of all values of a graph that are axes of row weights of that shape."""
    count = len(graph.parameters)
    return RowAxes(graph, graph.model.program.inputs[count:], shape)


def _make_plain(shape: Sequence[int]) -> Axes:
    return tuple((Factor(None, size),) for size in shape)


def _mix(shape: Sequence[int]) -> Axes:
    return tuple((Factor(_MIXED, size),) for size in shape)


def _has_rows(factors: tuple[Factor, ...]) -> bool:
    return any(factor.axis is not None for factor in factors)


def _merge(facts: Sequence[Axes], shape: Sequence[int]) -> Axes:
    """Returns the axes of an array of which each entry comes from the same entry of others."""
    merged = []
    for axis, size in enumerate(shape):
        named = {fact[axis] for fact in facts if _has_rows(fact[axis])}
        default = Factor(_MIXED if named else None, size)
        merged.append(named.pop() if len(named) == 1 else (default,))
    return tuple(merged)


def _multiply(equation: Equation, facts: list[Axes]) -> Axes:
    """Returns the axes of a product: those that it keeps, and mixed ones of windows over rows."""
    product, shape = read_product(equation), equation.outputs[0].shape
    # Axes of the result that no axis of an input is: those of space.
    is_mixed = any(_has_rows(facts[0][axis]) for axis in product.lhs.window)
    start = _mix(shape) if is_mixed else _make_plain(shape)
    kept = []
    for operand, fact in enumerate(facts[:2]):
        places, default = product.map_result_axes(operand), _make_plain(shape)
        axes = [fact[places[i]] if i in places else default[i] for i in range(len(shape))]
        kept.append(tuple(start[i] if x is None else axes[i] for i, x in enumerate(product.output)))
    return _merge(kept, shape)


def _look_up(equation: Equation, facts: list[Axes]) -> Axes:
    """Returns the axes of a lookup, by the rows of indices, of entries such as an embedding's."""
    spec, (output,) = equation.params["dimension_numbers"], equation.outputs
    removed = (*spec.collapsed_slice_dims, *spec.operand_batching_dims)
    reads_rows = any(_has_rows(facts[0][axis]) for axis in removed)
    rows, axes = iter(facts[1]), [*_move(equation, facts[:1], 0)]  # of slices
    for i, size in enumerate(output.shape):
        if i not in spec.offset_dims:
            factors = next(rows)
            is_mixed = reads_rows and not _has_rows(factors)
            axes[i] = (Factor(_MIXED, size),) if is_mixed else factors
    return tuple(axes)


def _move(equation: Equation, facts: list[Axes], index: int) -> Axes:
    """Returns the axes of an output of a layout primitive: those that it keeps, and mixed ones."""
    shape, relations = equation.outputs[index].shape, LAYOUTS[equation.name].relate(equation)
    moves = [relation for relation in relations if relation.kind == "product"]
    moved = []
    for source, fact in enumerate(facts):
        view = follow_layout(View((), fact), equation, moves, source, index)
        if view is None and any(map(_has_rows, fact)):
            return _mix(shape)  # a reshape cuts through an axis
        moved.append(_make_plain(shape) if view is None else view.factors)
    axes = list(_merge(moved, shape))
    for relation in relations:
        places = [x for x in relation.sources if isinstance(x, Place) and x.array < len(facts)]
        joins_rows = any(_has_rows(facts[array][axis]) for array, axis in places)
        # Rows may choose the place of an update, which no axis of an input is.
        joins_rows |= relation.kind == "mixed" and not relation.sources
        for target in relation.targets if relation.kind != "product" and joins_rows else ():
            if isinstance(target, Place) and target.array == index:
                size, is_kept = shape[target.axis], _has_rows(axes[target.axis])
                axes[target.axis] = axes[target.axis] if is_kept else (Factor(_MIXED, size),)
    return tuple(axes)
