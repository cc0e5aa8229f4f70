"""Biases: leaves that a model adds to the outputs of a weight, and to nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from sparsity.core.trees import Path
from sparsity.graph.uses import Factor, Tracker, Use, View, follow
from sparsity.programs.layout import LAYOUTS
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import Equation, Program, Value


def find_biases(program: Program, leaves: Collection[Value], tracker: Tracker) -> dict[Path, Path]:
    """Returns the bias of each weight that has one, and a single product.

    A bias has an axis for each output axis of the weight, in the same order; in a stack of layers
    both are stacked.

    Args:
      program: the program.
      leaves: the inputs of the program that are parameters.
      tracker: the views of these parameters.
    """
    readers: dict[Value, list[Equation | None]] = {}  # `None`: the program returns the value
    plain = set(leaves)  # and moved or cast copies of them
    reads: Counter[int] = Counter()  # of leaves, where they meet data
    for body in _bodies(program):
        for equation in body.flat():
            for value in equation.inputs:
                readers.setdefault(value, []).append(equation)
            if equation.bodies:
                plain |= _plain_inputs(equation, plain)
                continue
            if equation.name in (*_MOVES, *_COPIES) and equation.inputs[0] in plain:
                plain.add(equation.outputs[0])
            facts = [tracker.fact(value) for value in equation.inputs]
            if any(x.is_data for x in facts):
                reads.update(view.leaf for x in facts for view in x.views)
        for value in body.outputs:
            readers.setdefault(value, []).append(None)
    biases = {}
    for use in tracker.uses:
        is_plain = use.equation.inputs[use.operand] in plain
        if use.primitive in PRODUCTS and reads[use.view.leaf] == 1 and is_plain:
            bias = _find_added(use, readers, plain, tracker)
            if bias is not None and reads[bias.leaf] == 1:
                biases[use.path] = tracker.paths[bias.leaf]
    return biases


def _plain_inputs(equation: Equation, plain: Collection[Value]) -> set[Value]:
    """Returns the inputs of a scan's body that are parameters, or layers of one."""
    if equation.name != "scan":
        return set()
    (body,) = equation.within()
    carries = {number for _, number in body.carries}
    pairs = enumerate(zip(body.inputs, body.program.inputs, strict=True))
    return {inner for i, (value, inner) in pairs if value in plain and i not in carries}


def _bodies(program: Program) -> Iterator[Program]:
    yield program
    for equation in program.flat():
        for body in equation.bodies:
            yield from _bodies(body)


def _find_added(
    use: Use,
    readers: Mapping[Value, list[Equation | None]],
    plain: Collection[Value],
    tracker: Tracker,
) -> View | None:
    """Returns the view that is added to the outputs of a use, axis by axis."""
    value, view = use.equation.outputs[0], _view_output(use)
    while len(reader := readers.get(value, [])) == 1 and (equation := reader[0]) is not None:
        (output, *_) = equation.outputs
        if equation.name in ("add", "add_any"):
            (other,) = [x for x in equation.inputs if x is not value]
            biases = tracker.fact(other).views
            if len(biases) == 1 and other in plain and len(other.shape) == len(output.shape):
                return biases[0] if _fits(use, view, biases[0]) else None
            if not tracker.fact(other).is_data or value.shape != output.shape:
                return None
        elif equation.name in _MOVES:
            moved = follow(view, equation, LAYOUTS[equation.name].relate(equation))
            if moved is None:
                return None
            view = moved
        elif equation.name not in _COPIES:
            return None
        value = output
    return None


def _view_output(use: Use) -> View:
    """Returns where the output axes of the parameter lie in the result of the product."""
    (result,), view = use.equation.outputs, use.view
    product = read_product(use.equation)
    dims: list[tuple[Factor, ...]] = [(Factor(None, n),) for n in result.shape]
    batch = dict(zip(product.lhs.batch, product.operands[use.operand].batch, strict=True))
    for place, source in enumerate(product.output):
        if source and source[0] == use.operand:
            dims[place] = view.dims[source[1]]
        elif source and source[0] == 0 and source[1] in batch:
            dims[place] = view.dims[batch[source[1]]]
    return view.with_dims(dims)


def _fits(use: Use, outputs: View, bias: View) -> bool:
    """Returns whether a bias has the axes of the outputs in the weight's order, by layer."""
    if bias.is_part or use.view.is_part or bias.scans != use.view.scans:
        return False
    axes = dict(zip(use.view.stacked, bias.stacked, strict=True))
    for dim, other in zip(outputs.dims, bias.dims, strict=True):
        pairs = [
            [part for part in parts if part.axis is not None and part.size > 1]
            for parts in (dim, other)
        ]
        if [part[1:] for part in pairs[0]] != [part[1:] for part in pairs[1]]:
            return False
        for (axis, *_), (bias_axis, *_) in zip(*pairs, strict=True):
            if axes.setdefault(axis, bias_axis) != bias_axis:
                return False
    order = [axes[axis] for axis in (*use.batch, *sorted(use.output)) if axis in axes]
    return order == sorted(set(order))


_MOVES = ("transpose", "reshape", "squeeze", "broadcast_in_dim")
_COPIES = ("convert_element_type", "copy", "sharding_constraint")
