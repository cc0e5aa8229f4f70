"""What channels are: hidden units, heads, a residual stream, experts.

A program tells by how its products use an axis. Products of activations with each other, as in
attention, run over heads and sum over the channels of a head. An axis is a stream if a function
that sums over the axis is added to values along the same axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from sparsity.graph.coupling import Coupling
from sparsity.graph.groups import GroupKind
from sparsity.graph.uses import Use
from sparsity.programs.axes import Variable, list_variables
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import Equation, Program, Value

_SUMS = ("add", "add_any", "sub")


class _Origin(NamedTuple):
    """Where a value comes from, within its program.

    Attributes:
      writers: the products, lookups, loops and inputs that it is a function of single entries of.
      contracted: the variables that products before it sum over.
    """

    writers: frozenset[Equation | Value] = frozenset()
    contracted: frozenset[Variable] = frozenset()


def find_kinds(
    program: Program, coupling: Coupling, products: Sequence[Use]
) -> Mapping[Variable, GroupKind]:
    """Returns the kinds of variables that are not 'hidden'.

    Args:
      program: the program of a model.
      coupling: the axes of its values.
      products: the products that read parameters.
    """
    by_kind: dict[GroupKind, set[Variable]] = {
        kind: set() for kind in ("experts", "stream", "heads", "head_channels", "channels")
    }
    readers, free = {use.equation: use for use in products}, Counter[Variable]()
    for body in program.nested_programs():
        origins = {value: _Origin(frozenset([value])) for value in body.inputs}
        for equation in body.flat_equations():
            inputs = [origins.get(value, _Origin()) for value in equation.inputs]
            writers = frozenset[Equation | Value]().union(*(x.writers for x in inputs))
            contracted = frozenset[Variable]().union(*(x.contracted for x in inputs))
            if equation.name in PRODUCTS and read_product(equation).refusal is None:
                has_data = all(x.writers for x in inputs[:2])  # else the product reads a constant
                reader = readers.get(equation)
                summed = _read_product(equation, coupling, reader, has_data, by_kind, free)
                writers, contracted = frozenset([equation]), contracted | summed
            elif equation.inner_programs:
                writers, contracted = frozenset([equation]), frozenset()
            elif equation.name == "gather":
                writers = frozenset([equation])
            elif equation.name in _SUMS:
                by_kind["stream"].update(_find_streams(equation, coupling, inputs))
            origins |= dict.fromkeys(equation.outputs, _Origin(writers, contracted))
    # Scores and mixed values both have the axis of queries that share keys.
    by_kind["heads"].update(variable for variable, count in free.items() if count > 1)
    by_kind["head_channels"].update(free)
    kinds: dict[Variable, GroupKind] = {}
    for kind, variables in by_kind.items():
        kinds = dict.fromkeys(variables, kind) | kinds  # the first kind stays
    return kinds


def _read_product(
    equation: Equation,
    coupling: Coupling,
    use: Use | None,
    multiplies_activations: bool,
    by_kind: Mapping[GroupKind, set[Variable]],
    free: Counter[Variable],
) -> set[Variable]:
    """Notes what the axes of a product are, and returns the variables that it sums over."""
    product, summed = read_product(equation), set[Variable]()
    axes = [coupling.axes(value) for value in equation.inputs[:2]]

    def list_axis_variables(operand: int, indices: Iterable[int]) -> set[Variable]:
        return {v for i in indices for v in list_variables(axes[operand][i])}

    for operand, roles in enumerate(product.operands):
        summed |= list_axis_variables(operand, roles.contracted)
        if product.kind == "convolution":
            channels = (axis for axis in range(len(axes[operand])) if axis not in roles.window)
            by_kind["channels"].update(list_axis_variables(operand, channels) if use else ())
        elif use is not None:
            by_kind["experts"].update(list_axis_variables(operand, (*roles.batch, *roles.experts)))
        elif multiplies_activations:
            by_kind["heads"].update(list_axis_variables(operand, roles.batch))
            by_kind["head_channels"].update(list_axis_variables(operand, roles.contracted))
            free.update(list_axis_variables(operand, roles.free))
    return summed


def _find_streams(
    equation: Equation, coupling: Coupling, inputs: Sequence[_Origin]
) -> set[Variable]:
    """Returns the variables along which a sum adds a function of the same axis."""
    one, other = inputs
    if not one.writers or not other.writers or one.writers == other.writers:
        return set()
    axes = coupling.axes(equation.outputs[0])
    variables = {variable for axis in axes for variable in list_variables(axis)}
    return variables & (one.contracted | other.contracted)
