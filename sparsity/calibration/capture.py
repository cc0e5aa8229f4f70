"""`sparsity.calibrate`: statistics of what each weight is multiplied with, as the model runs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.calibration.rows import KINDS, Kind, sum_up
from sparsity.calibration.statistics import Path, Statistic, check_memory, not_finite
from sparsity.core import extras, sharding, trees
from sparsity.core.jaxprs import Equation, Program, Value
from sparsity.core.trees import PyTree
from sparsity.graph import Graph, Leaf, Use, trace
from sparsity.graph.products import PRODUCTS

Sums = dict[int, tuple[jax.Array, jax.Array]]  # by number of the use: sums, and how many rows


def calibrate(
    fn: Callable[..., PyTree],
    params: PyTree,
    batches: Iterable[PyTree],
    kind: Kind = "squares",
    filter_fn: Callable[[Path, Leaf], bool] | None = None,
    progress: bool = False,
) -> dict[Path, Statistic]:
    """Runs a model on batches and sums up the inputs of each product that reads a weight.

    The program that `sparsity.trace` reads is run with the sums beside it: no hook, no subclass,
    any framework. A weight with several uses sums over all of them.

    Args:
      fn: the model, `fn(params, batch)`.
      params: its parameters.
      batches: what `fn` takes as its second argument, any trees; a generator is read once.
      kind: 'squares' sums x^2 for each input, 'moments' sums x^2 and x, 'gram' sums X^T X.
      filter_fn: `filter_fn(path, leaf)` chooses leaves, by their shape and dtype; by default all
        that products contract.
      progress: show a progress bar.

    Returns:
      {path: Statistic}: sums in promote_types(dtype, float32) over all rows of all batches, with
      leading axes for scanned layers and experts. Weights that are read in a `while`, by slices, or
      within `shard_map` have no entry.

    Raises:
      ValueError: there are no batches, the sums of one are not finite, or a Gram matrix does not
        fit into memory; leaf and batch are named.

    Example:
      >>> params = {"kernel": jnp.ones((2, 3))}
      >>> found = calibrate(lambda p, x: x @ p["kernel"], params, [jnp.array([[1.0, 2.0]])] * 2)
      >>> found[("kernel",)].squares, int(found[("kernel",)].count)
      (Array([2., 8.], dtype=float32), 2)
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got kind = {kind!r}.")
    graph: Graph | None = None
    first: PyTree = None
    captures: dict[Graph, Capture] = {}  # by shapes of the batch: each is compiled once
    total: Sums = {}
    shown = extras.load("tqdm.auto", "progress").tqdm(batches) if progress else batches
    for number, batch in enumerate(shown):
        if graph is None:
            graph, first = trace(fn, params, batch), batch
        check_structure(batch, first, number)
        inputs = trees.split_arrays(batch)[0]
        now = graph.retraced(params, batch)
        if now not in captures:
            captures[now] = Capture(now, kind, filter_fn)
            if kind == "gram":
                check_memory(captures[now].grams())
        capture = captures[now]
        sums, finite = capture.jitted(trees.split_arrays(params)[0], inputs)
        for use, is_finite in jax.device_get(finite).items():
            if not is_finite:
                raise not_finite("/".join(capture.uses[use].path), number)
        total = jax.tree.map(jnp.add, total, sums) if total else sums
    if graph is None:
        raise ValueError("batches has no batch: give at least one.")
    return capture.statistics(total)


def check_structure(batch: PyTree, first: PyTree, number: int) -> None:
    """Raises a ValueError for a batch that differs from the first one in more than arrays."""
    if _without_arrays(batch) != _without_arrays(first):
        raise ValueError(
            f"Batch {number} differs from batch 0 in more than arrays: {_without_arrays(batch)}, "
            f"{_without_arrays(first)}. All must be of one structure; numbers that differ must be "
            "arrays."
        )


def _without_arrays(tree: PyTree) -> tuple[Any, list[Any]]:
    """The structure of a tree, and those of its leaves that are no arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, ["array" if trees.is_array(leaf) else leaf for leaf in leaves]


class Capture:
    """Runs a graph's program with the sums of some uses beside it.

    Args:
      graph: the graph.
      kind: what is summed.
      filter_fn: which leaves; by default all whose inputs can be told.
    """

    def __init__(
        self, graph: Graph, kind: Kind, filter_fn: Callable[[Path, Leaf], bool] | None = None
    ) -> None:
        self.graph, self.kind = graph, kind
        leaves = {leaf.path: leaf for leaf in graph.leaves}
        self.uses = {
            number: use
            for number, use in enumerate(graph.uses)
            if _is_told(use, graph) and (filter_fn is None or filter_fn(use.path, leaves[use.path]))
        }
        self._of: dict[Equation, list[int]] = {}
        for number, use in self.uses.items():
            self._of.setdefault(use.equation, []).append(number)
        self.jitted = jax.jit(self._run)

    def grams(self, of_layer: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
        """The Gram matrices of all leaves, by name; of one layer of each stack, if asked for."""
        found = {}
        for use in self.uses.values():
            layout, shape = _layout(use, self.graph, of_layer), _shape(use, self.graph, of_layer)
            own = (*layout.lead(shape), *(2 * [layout.inputs(shape)]))
            found["/".join(use.path)] = jax.ShapeDtypeStruct(own, jnp.float32)
        return found

    def _run(
        self, leaves: Sequence[Any], inputs: Sequence[Any]
    ) -> tuple[Sums, dict[int, jax.Array]]:
        """The sums of a call, and which of them are finite."""
        sums = self.evaluate(self.graph.program, [*leaves, *inputs])[1]
        return sums, {use: jnp.all(jnp.isfinite(found)) for use, (found, _) in sums.items()}

    def evaluate(self, program: Program, inputs: Sequence[Any]) -> tuple[list[Any], Sums]:
        """The outputs of a program or a part of it, and its sums."""
        arrays: dict[Value, Any] = dict(zip(program.inputs, inputs, strict=True))
        sums: Sums = {}

        def read(value: Value) -> Any:
            return arrays.get(value, value.known)

        for equation in program.flat():
            found = [read(value) for value in equation.inputs]
            for number in self.at(equation):
                sums[number] = self.sums(number, found[1 - self.uses[number].operand])
            if equation.name in _BODIES and self.is_within(equation):
                outputs, more = _BODIES[equation.name](self, equation, found)
                sums |= more
            else:
                outputs = equation.bind(found)
            arrays.update(zip(equation.outputs, outputs, strict=True))
        return [read(value) for value in program.outputs], sums

    def at(self, equation: Equation) -> Sequence[int]:
        """The uses, by number, that a product is."""
        return self._of.get(equation, ())

    def is_within(self, equation: Equation) -> bool:
        """Whether a loop or a branch has uses."""
        return any(
            inner in self._of or self.is_within(inner)
            for body in equation.bodies
            for inner in body.flat()
        )

    def sums(self, number: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sums of a use over the rows of its inputs, and how many rows these are."""
        use = self.uses[number]
        return sharding.replicated(functools.partial(sum_up, use, self.kind), x)

    def _scan(self, equation: Equation, inputs: list[Any]) -> tuple[list[Any], Sums]:
        params, (body,) = equation.params, equation.bodies
        fixed = params["num_consts"]
        end = fixed + params["num_carry"]

        def step(carry: list[Any], layer: list[Any]) -> Any:
            outputs, sums = self.evaluate(body, [*inputs[:fixed], *carry, *layer])
            return outputs[: end - fixed], (outputs[end - fixed :], sums)

        how = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, (stacked, sums) = lax.scan(step, inputs[fixed:end], inputs[end:], **how)
        merged = {
            number: (found, jnp.sum(rows) // rows.size)
            if equation in self.uses[number].view.scans
            else (jnp.sum(found, axis=0), jnp.sum(rows))
            for number, (found, rows) in sums.items()
        }
        return [*carry, *stacked], merged

    def _cond(self, equation: Equation, inputs: list[Any]) -> tuple[list[Any], Sums]:
        index, *operands = inputs
        branches = [_branch(self, body) for body in equation.bodies]
        shapes: Sums = {}
        for branch in branches:
            shapes |= jax.eval_shape(branch, *operands)[1]
        if index.dtype == jnp.bool_:
            index = index.astype(jnp.int32)
        whole = [_with_zeros(branch, shapes) for branch in branches]
        found: tuple[list[Any], Sums] = lax.switch(index, whole, *operands)
        return found

    def statistics(self, total: Sums) -> dict[Path, Statistic]:
        """The statistics of leaves from the sums of their uses."""
        found: dict[Path, Statistic] = {}
        for number, (sums, rows) in total.items():
            use = self.uses[number]
            own = statistic_of_use(use, self.graph, self.kind, sums, rows)
            before = found.setdefault(use.path, own)
            layouts: list[Any] = [jax.tree.structure(statistic) for statistic in (before, own)]
            if layouts[0] != layouts[1]:
                raise ValueError(
                    f"{'/'.join(use.path)!r} is read along other axes by the {use.primitive} at "
                    f"{use.source} than by a product before it, so that their inputs cannot be "
                    "added up. Give each a leaf of its own, or leave it out: filter_fn."
                )
            if before is not own:
                found[use.path] = jax.tree.map(jnp.add, before, own)
        return found


def _branch(capture: Capture, body: Program) -> Callable[..., tuple[list[Any], Sums]]:
    return lambda *operands: capture.evaluate(body, operands)


def _with_zeros(branch: Callable[..., Any], shapes: Sums) -> Callable[..., Any]:
    """A branch that sums nothing for the uses of others."""

    def run(*operands: Any) -> Any:
        outputs, sums = branch(*operands)
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
        return outputs, zeros | sums

    return run


_BODIES: dict[str, Callable[..., tuple[list[Any], Sums]]] = {
    "scan": Capture._scan,
    "cond": Capture._cond,
}


# How what a product reads lies in its leaf.


def _contracted(use: Use) -> tuple[int, ...]:
    """The axes of the operand that are summed over."""
    numbers = use.equation.params["dimension_numbers"]
    if use.primitive == "dot_general":
        axes: tuple[int, ...] = numbers[0][use.operand]
        return axes
    return tuple(numbers.rhs_spec[1:])


def _output(use: Use, graph: Graph) -> tuple[int, ...]:
    """The axes that are outputs, and those of length 1 that were taken out before the product."""
    roles = {*use.contracting, *use.output, *use.batch}
    lost = [a for a, n in enumerate(graph.shape_of(use.path)) if n == 1 and a not in roles]
    return (*sorted(use.output), *lost)


def _is_told(use: Use, graph: Graph) -> bool:
    """Whether the leaf's inputs are known entry by entry."""
    view, shape = use.view, graph.shape_of(use.path)
    is_product = use.primitive in PRODUCTS and bool(use.contracting) and use.trips is not None
    if not is_product or len(view.scans) != len(view.stacked) or view.is_part:
        return False
    if use.primitive == "ragged_dot_general":
        return False
    if use.primitive == "conv_general_dilated" and (
        use.operand == 0 or use.equation.params["batch_group_count"] != 1
    ):
        return False
    roles = [*use.contracting, *_output(use, graph), *use.batch]
    factors = [factor for i in _contracted(use) for factor in view.dims[i]]
    sizes = {x.axis: math.prod(y.size for y in factors if y.axis == x.axis) for x in factors}
    whole = all(axis is not None and shape[axis] == n for axis, n in sizes.items())
    return whole and sorted(roles) == [*range(len(shape))]


def _places(use: Use) -> np.ndarray:
    """Where the inputs lie among those of the operand, in the leaf's own order."""
    factors = [factor for i in _contracted(use) for factor in use.view.dims[i]]
    order = sorted(range(len(factors)), key=lambda i: (factors[i].axis or 0, -factors[i].step))
    sizes = [factor.size for factor in factors]
    return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).ravel()


def _groups(use: Use) -> tuple[tuple[int, ...], int]:
    """The leaf's axes that are groups of a convolution, and how many groups are left beside."""
    if use.groups == 1 or use.primitive == "dot_general":
        return (), use.groups
    outputs = use.view.dims[use.equation.params["dimension_numbers"].rhs_spec[0]]
    axes: list[int] = []
    left = use.groups
    for axis, size, _ in outputs:
        if axis is None or left % size or left == 1 or (left == use.groups and size != left):
            break
        if len(outputs) == 1:
            break
        axes.append(axis)
        left //= size
    return tuple(axes), left


def _layout(use: Use, graph: Graph, of_layer: bool = False) -> Statistic:
    """How the axes of a leaf, or of one layer of it, are inputs and outputs; without sums."""
    gone = use.view.stacked if of_layer else ()
    axes, groups = _groups(use)

    def left(names: Iterable[int]) -> tuple[int, ...]:
        return tuple(axis - sum(x < axis for x in gone) for axis in names if axis not in gone)

    return Statistic(
        count=0,
        contracting=left(use.contracting),
        output=left(axis for axis in _output(use, graph) if axis not in axes),
        batch=left((*use.batch, *axes)),
        groups=groups,
    )


def _shape(use: Use, graph: Graph, of_layer: bool) -> tuple[int, ...]:
    """The shape of a leaf, or of one layer of it."""
    gone = use.view.stacked if of_layer else ()
    return tuple(n for axis, n in enumerate(graph.shape_of(use.path)) if axis not in gone)


def statistic_of_use(
    use: Use, graph: Graph, kind: Kind, sums: jax.Array, rows: jax.Array, of_layer: bool = False
) -> Statistic:
    """The statistic of a use from its sums.

    Args:
      use: the product.
      graph: of the model.
      kind: what was summed.
      sums: [*batch, inputs...] in the order of the operand.
      rows: how many.
      of_layer: the sums are those of one layer of a stack, without the axes that scans took apart.
    """
    layout, places = _layout(use, graph, of_layer), _places(use)
    found = sums[..., places[:, None], places] if kind == "gram" else sums[..., places]
    shape = _shape(use, graph, of_layer)
    lead, size = layout.lead(shape), len(places)
    given: dict[str, Any] = {}
    if kind == "moments":
        given["squares"], given["sums"] = jnp.moveaxis(found.reshape(*lead, 2, size), -2, 0)
    else:
        given[kind] = found.reshape(*lead, *([size] if kind == "squares" else [size, size]))
    return dataclasses.replace(layout, count=rows, **given)
