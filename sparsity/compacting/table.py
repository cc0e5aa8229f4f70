"""A compact model as a table and as a picture, and the times of its formats."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from sparsity.compacting.densifier import Densifier, MaybePending, densify_pending, kept_in
from sparsity.compacting.formats import is_kept
from sparsity.compacting.state import CompactModel
from sparsity.core import extras, sharding, trees
from sparsity.core.checks import check_kind
from sparsity.core.extras import draw_bars, pick_axes
from sparsity.core.trees import Path, PyTree
from sparsity.programs.products import PRODUCTS
from sparsity.programs.program import Equation
from sparsity.reports import time_in_turn

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Seconds: TypeAlias = Mapping[Path, Mapping[str, float]]

_NOISE = 1.02  # seconds that count as equally fast
_PREFERRED = "values", "grouped", "dense"  # of those, the first


class Read(NamedTuple):
    """An equation that reads masked parameters.

    Attributes:
      equation: the equation.
      inputs: its inputs, as shapes.
      is_dense: whether the parameters are made dense.
    """

    equation: Equation
    inputs: list[MaybePending]
    is_dense: bool


def list_reads(model: CompactModel, args: tuple[PyTree, ...]) -> list[Read]:
    """Returns the equations that read masked parameters, for inputs or their shapes."""
    reads, layouts = list[Read](), dict(model.layouts)

    def record(equation: Equation, inputs: Sequence[MaybePending], is_dense: bool) -> None:
        shapes = jax.tree.map(sharding.abstract, list(inputs))
        reads.append(Read(equation, shapes, is_dense))

    def describe(path: trees.KeyPath, leaf: PyTree) -> PyTree:
        layout = layouts.get(trees.path_names(path))
        return leaf if layout is None else sharding.resize_struct(leaf, layout.kept_shape)

    params = trees.map_matched(describe, model.graph.model.example[0])
    arrays, rebuild = trees.split_arrays(sharding.abstract((params, args)))

    def run(arrays: list[jax.Array]) -> PyTree:
        params, args = rebuild(arrays)
        return model._run(params, args, record)

    jax.eval_shape(run, arrays)
    return reads


def find_readers(model: CompactModel) -> dict[str, set[str]]:
    """Returns {name: operations that need a dense array, other than products of values}."""
    readers: dict[str, set[str]] = {}
    for equation, inputs, is_dense in list_reads(model, model.graph.model.example[1]):
        for kept in kept_in(inputs) if is_dense else ():
            if equation.name not in PRODUCTS or kept.layout.multiplies:
                where = f"{equation.name} {equation.source}".strip()
                readers.setdefault(kept.name, set()).add(where)
    return readers


def count_bytes(model: CompactModel) -> dict[Path, list[int]]:
    """Returns the bytes of the values, positions and frozen entries of each parameter."""
    layouts, nbytes = dict(model.layouts), {}
    positions, frozen = (trees.leaves_by_names(tree) for tree in (model.indices, model.frozen))
    for parameter in model.graph.parameters:
        path = parameter.path
        shape = layouts[path].kept_shape if path in layouts else parameter.shape
        stored = [tree[path].nbytes if path in tree else 0 for tree in (positions, frozen)]
        nbytes[path] = [math.prod(shape) * parameter.dtype.itemsize, *stored]
    return nbytes


def make_report(model: CompactModel, seconds: Seconds | None) -> str:
    """Returns `Compact.report`."""
    check_kind("seconds", seconds, Mapping | None, "the result of measure, or None")
    seconds, nbytes, layouts = seconds or {}, count_bytes(model), dict(model.layouts)
    columns = list(dict.fromkeys(name for times in seconds.values() for name in times))
    numbers = ["kept", "padding", "dense", "values", "positions", "frozen"]
    if not any(frozen for *_, frozen in nbytes.values()):
        numbers.pop()
    times = [f"ms {name}" for name in columns]
    table = extras.make_table(("parameter", "shape", "format"), [*numbers, *times])
    totals = [0] * len(numbers)
    for parameter in model.graph.parameters:
        path, layout = parameter.path, layouts.get(parameter.path)
        kept = (layout.num_kept, layout.padding) if layout else (parameter.size, 0)
        counts = [*kept, parameter.size * parameter.dtype.itemsize, *nbytes[path]][: len(numbers)]
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        about = trees.shape_text(parameter.shape), layout.format if layout else "no mask"
        measured = seconds.get(path, {})
        shown = [f"{1000 * measured[x]:.3g}" if x in measured else "" for x in columns]
        table.add_row(parameter.name, *about, *map("{:,}".format, counts), *shown)
    table.add_section()
    table.add_row("all", "", "", *map("{:,}".format, totals), *[""] * len(columns))
    notes = [f"Columns {', '.join(numbers[2:-1])} and {numbers[-1]} are bytes."]
    for name, operations in find_readers(model).items():
        notes += [f"{name} is made dense by {operation}." for operation in sorted(operations)]
    return "\n".join([extras.as_text(table), *notes])


def plot(model: CompactModel, ax: Axes | None) -> Axes:
    """Draws `Compact.plot`."""
    layouts, nbytes = dict(model.layouts), count_bytes(model)
    shown = [x for x in model.graph.parameters if x.path in layouts or len(x.shape) > 1]
    ax, before = pick_axes(ax, len(shown)), [x.size * x.dtype.itemsize for x in shown]
    names, after = [x.name for x in shown], [sum(nbytes[x.path]) for x in shown]
    draw_bars(ax, "bytes", names, before, after, sum(before))
    return ax


def measure(
    models: Mapping[str, CompactModel], args: tuple[PyTree, ...], rounds: int
) -> dict[Path, dict[str, float]]:
    """Returns the median seconds of the products of each parameter, forward and backward.

    Args:
      models: the model in each format, for parameters that can have the format.
      args: inputs of the model.
      rounds: number of measurements of each product.
    """
    runs: dict[Path, dict[str, Callable[[], object]]] = {}
    for name, model in models.items():
        reads = [(x, {kept.name for kept in kept_in(x.inputs)}) for x in list_reads(model, args)]
        for path, layout in model.layouts:
            each = [read for read, names in reads if trees.join_names(path) in names]
            if layout.format == name and each:
                runs.setdefault(path, {})[name] = _make_run(each, model)
    seconds = {path: time_in_turn(*each.values(), rounds=rounds) for path, each in runs.items()}
    return {path: dict(zip(runs[path], each, strict=True)) for path, each in seconds.items()}


def choose(seconds: Seconds) -> dict[Path, str]:
    """Returns for each parameter the fastest format, of equally fast ones the preferred."""
    chosen = {}
    for path, by_format in seconds.items():
        limit = _NOISE * min(by_format.values())
        chosen[path] = next(x for x in _PREFERRED if by_format.get(x, math.inf) <= limit)
    return chosen


def _make_run(reads: list[Read], model: CompactModel) -> Callable[[], object]:
    """Returns a function that runs products forward and backward, on ones."""
    positions = {trees.join_names(x): at for x, at in trees.leaves_by_names(model.indices).items()}
    interpreter = Densifier(lambda _: True, model.densifies_one_at_a_time)

    def fill(leaf: PyTree) -> PyTree:
        if not is_kept(leaf):
            return jnp.full(leaf.shape, trees.is_prunable(leaf), leaf.dtype)
        at, shape = positions[leaf.name], leaf.positions.shape
        while at.ndim > len(shape):  # a product within a scan gets the first layer
            at = at[0]
        ones = jnp.ones(leaf.values.shape, leaf.values.dtype)
        at = at[tuple(map(slice, shape))]
        return dataclasses.replace(leaf, values=ones, positions=at, frozen=None)

    inputs = [jax.tree.map(fill, read.inputs, is_leaf=is_kept) for read in reads]
    arrays, structure = jax.tree.flatten(inputs)
    floats = [array if trees.is_prunable(array) else None for array in arrays]

    def loss(floats: list[jax.Array | None], arrays: list[jax.Array]) -> jax.Array:
        pairs = zip(floats, arrays, strict=True)
        inputs = jax.tree.unflatten(structure, [y if x is None else x for x, y in pairs])
        outputs = [
            output
            for read, each in zip(reads, inputs, strict=True)
            for output in interpreter.bind(read.equation, each)
        ]
        dense = [densify_pending(y) for y in outputs if trees.is_prunable(y) or is_kept(y)]
        return sum((jnp.sum(jnp.abs(y) ** 2, dtype=jnp.float32) for y in dense), jnp.zeros(()))

    return functools.partial(jax.jit(jax.grad(loss)), floats, arrays)
