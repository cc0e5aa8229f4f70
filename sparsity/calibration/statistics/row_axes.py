"""Axes of activations that are axes of the user's row weights, such as batch and position.

The axes are followed through the program: an axis keeps its name through functions of single
entries, moves and products that keep it, and loses the name where entries are joined, cut or
reordered. Nothing is concluded from sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import trees
from sparsity.core.checks import check_values
from sparsity.core.trees import PyTree
from sparsity.graph import Graph
from sparsity.graph.uses import Factor, View, follow_layout
from sparsity.programs.entrywise import ENTRYWISE
from sparsity.programs.layout import LAYOUTS, Place
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import Equation, Value
from sparsity.programs.walk import Flow

RowWeights: TypeAlias = Callable[[PyTree], PyTree] | jax.Array | np.ndarray
Axes: TypeAlias = tuple[tuple[Factor, ...], ...]  # for each axis its factors, as in a view

# They join entries along some axes, which they remove.
_REMOVING = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin",
                       "reduce_and", "reduce_or", "reduce_xor"))  # fmt: skip
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
        rows = tuple((Factor(axis, size),) for axis, size in enumerate(shape))
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
        pairs = zip(one, other, target.shape, strict=True)
        return tuple(a if a == b else (Factor(None, size),) for a, b, size in pairs)

    def take_layer(self, fact: Axes, scan: Equation) -> Axes:
        return fact[1:]

    def stack_layers(self, fact: Axes, scan: Equation) -> Axes:
        return ((Factor(None, scan.length),), *fact)

    def take_shard(self, fact: Axes, value: Value, local: Value) -> Axes:
        return _make_plain(local.shape)

    def leave_body(self, fact: Axes, equation: Equation) -> Axes:
        is_sharded = equation.name == "shard_map"
        return tuple((Factor(None, 1),) for _ in fact) if is_sharded else fact

    def visit(self, equation: Equation) -> None:
        for index, output in enumerate(equation.outputs):
            facts = [self.fact(value) for value in equation.inputs]
            axes = self._derive(equation, facts, index)
            self.facts[output] = _make_plain(output.shape) if axes is None else axes

    def _derive(self, equation: Equation, facts: list[Axes], index: int) -> Axes | None:
        name, output = equation.name, equation.outputs[index]
        if name in ENTRYWISE or name in _CUMULATIVE:
            same = [
                f for f, x in zip(facts, equation.inputs, strict=True) if x.shape == output.shape
            ]
            return _merge(same, output.shape)
        if name in _REMOVING:
            return tuple(x for i, x in enumerate(facts[0]) if i not in equation.params["axes"])
        if name in PRODUCTS:
            sources = read_product(equation).output
            pairs = zip(sources, output.shape, strict=True)
            return tuple(
                (Factor(None, size),) if source is None else facts[source[0]][source[1]]
                for source, size in pairs
            )
        if name == "gather":  # rows look up entries, such as those of an embedding
            offsets = equation.params["dimension_numbers"].offset_dims
            rows = iter(facts[1])
            return tuple(
                (Factor(None, size),) if i in offsets else next(rows)
                for i, size in enumerate(output.shape)
            )
        if name in LAYOUTS:
            return self._follow(equation, facts, index)
        return None

    def _follow(self, equation: Equation, facts: list[Axes], index: int) -> Axes | None:
        layout, output = LAYOUTS[equation.name], equation.outputs[index]
        relations = layout.relate(equation)
        moved = []
        for source in layout.sources(equation, index):
            if not equation.inputs[source].shape:
                continue
            view = View(("row_weights",), facts[source])
            result = follow_layout(view, equation, relations, source, index)
            if result is None:
                return None
            axes = list(result.factors)
            for relation in relations:
                if relation.kind == "product":
                    continue
                sizes = {equation.inputs[p.array].shape[p.axis] for p in relation.sources
                         if isinstance(p, Place)}  # fmt: skip
                for place in relation.targets:
                    if isinstance(place, Place) and place.array == index:
                        size = output.shape[place.axis]
                        if sizes != {size} or relation.kind != "sum":  # joined, cut or reordered
                            axes[place.axis] = (Factor(None, size),)
            moved.append(tuple(axes))
        return _merge(moved, output.shape)


def find_row_axes(graph: Graph, shape: tuple[int, ...]) -> RowAxes:
    """Returns the axes of all values of a graph that are axes of row weights of that shape."""
    count = len(graph.parameters)
    return RowAxes(graph, graph.model.program.inputs[count:], shape)


def _make_plain(shape: Sequence[int]) -> Axes:
    return tuple((Factor(None, size),) for size in shape)


def _has_rows(factors: tuple[Factor, ...]) -> bool:
    return any(factor.axis is not None for factor in factors)


def _merge(facts: Sequence[Axes], shape: Sequence[int]) -> Axes:
    """Returns the axes of an array of which each entry comes from the same entry of others."""
    merged = []
    for axis, size in enumerate(shape):
        named = {fact[axis] for fact in facts if _has_rows(fact[axis])}
        merged.append(named.pop() if len(named) == 1 else (Factor(None, size),))
    return tuple(merged)
