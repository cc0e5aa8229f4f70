"""Uses of parameters: products and lookups that read them, along which axes, and their costs.

A parameter is followed through casts, transposes, reshapes, masks and scaling, as long as the
result is a view: an array that depends on parameters alone and holds entries of the parameter.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence

from sparsity.core.trees import Path
from sparsity.graph.readers.views import (
    ArrayFacts,
    Factor,
    View,
    follow_layout,
    merge_shares,
    resize_axis,
)
from sparsity.graph.traced_model import Model
from sparsity.programs.entrywise import ENTRYWISE, find_uniform_value, fold_constant, is_copy
from sparsity.programs.layout import LAYOUTS, is_lookup
from sparsity.programs.products import PRODUCTS, Operand, ProductKind, read_product
from sparsity.programs.program import Equation, Program, Value, is_differentiable
from sparsity.programs.walk import Flow


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Use:
    """A product or a lookup that reads a parameter. Made by `sparsity.trace`.

    Attributes:
      path: path of the parameter.
      primitive: 'dot_general', 'ragged_dot_general', 'conv_general_dilated', or 'gather' for a
        lookup.
      contracting: axes of the parameter that a product sums over.
      output: axes of the parameter that become axes of the result.
      batch: axes of the parameter that index separate products, such as layers of a scan.
      groups: feature groups of a convolution, 1 for other products.
      macs: multiply-adds of all trips; in a `while`, of one trip.
      trips: number of runs in a call, `None` in a `while`.
      source: the line of the model.
      view: the array that the product reads, as a view of the parameter.
      equation: the product.
      operand: index of the input that is the view.
    """

    path: Path
    primitive: str
    contracting: tuple[int, ...]
    output: tuple[int, ...]
    batch: tuple[int, ...]
    groups: int
    macs: int
    trips: int | None
    source: str
    view: View = dataclasses.field(repr=False)
    equation: Equation = dataclasses.field(repr=False)
    operand: int = dataclasses.field(repr=False)

    @property
    def kind(self) -> ProductKind | None:
        """Kind of the product, `None` for a lookup."""
        return read_product(self.equation).kind if self.primitive in PRODUCTS else None

    @property
    def roles(self) -> Operand:
        """Roles of the axes of the array that the product reads."""
        return read_product(self.equation).operands[self.operand]

    @property
    def channels(self) -> tuple[int, ...]:
        """Contracted axes without windows: of a convolution the input channels."""
        return tuple(sorted(self.view.axes(self.roles.inputs))) or self.contracting

    @property
    def num_inputs(self) -> int:
        """Number of entries of the parameter's operand that a product sums for each output."""
        operand = self.equation.inputs[self.operand]
        return math.prod(operand.shape[axis] for axis in self.roles.contracted)

    def is_along(self, axis: int, m: int) -> bool:
        """Returns whether the product sums groups of m consecutive entries along an axis.

        Where the axis was split, parts may be outputs, or index layers.
        """
        contracted = self.roles.contracted
        free = [factors for i, factors in enumerate(self.view.factors) if i not in contracted]
        return all(
            factor.step % m == 0
            for factors in (*free, self.view.layers)
            for factor in factors
            if factor.axis == axis
        )


class Tracker(Flow[ArrayFacts]):
    """Views of parameters.

    Attributes:
      uses: the products and lookups that read parameters, in program order.
      products: the uses that are dots or convolutions.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.facts.update(dict.fromkeys(model.program.inputs, ArrayFacts(is_data=True)))
        for value, parameter in model.parameter_inputs.items():
            by_axis = tuple((Factor(axis, size),) for axis, size in enumerate(value.shape))
            self.facts[value] = ArrayFacts((View(parameter.path, by_axis),))
        self.run(model.program)
        self.uses: list[Use] = list(self._find_uses(model.program, 1))
        self.products: list[Use] = [use for use in self.uses if use.primitive in PRODUCTS]

    def find_products(self, path: Path) -> list[Use]:
        """Returns the dots and convolutions that read a parameter."""
        return [use for use in self.products if use.path == path]

    def find_scanned_axes(self) -> dict[Path, tuple[int, ...]]:
        """Returns {path: axes of the parameter that are layers of scans, the outermost first}."""
        axes: dict[Path, tuple[int, ...]] = {}
        for fact in self.facts.values():
            for view in fact.views:
                scanned = view.stacked[: len(view.scans)]
                if len(scanned) > len(axes.get(view.path, ())):
                    axes[view.path] = scanned
        return axes

    def is_data(self, value: Value) -> bool:
        """Returns whether a value of the program depends on more than parameters."""
        return self.fact(value).is_data

    # Hooks of the walk.

    def initial_fact(self, value: Value) -> ArrayFacts:
        return ArrayFacts(constant=find_uniform_value(value.constant))

    def join(
        self, one: ArrayFacts, other: ArrayFacts, equation: Equation, target: Value
    ) -> ArrayFacts:
        views = one.views
        if other.views != views:  # later steps, or another branch, read something else
            views = tuple(view.mark_changed(target) for view in views)
        constant = one.constant if one.constant == other.constant else None
        return ArrayFacts(views, one.is_data or other.is_data, constant)

    def take_layer(self, fact: ArrayFacts, scan: Equation) -> ArrayFacts:
        views = [
            dataclasses.replace(view.select_entry([0]), scans=(*view.scans, scan))
            for view in fact.views
        ]
        return dataclasses.replace(fact, views=tuple(views))

    def take_shard(self, fact: ArrayFacts, value: Value, local: Value) -> ArrayFacts:
        views = []
        for view in fact.views:
            sizes = zip(view.factors, value.shape, local.shape, strict=True)
            views.append(view.with_factors(resize_axis(*each) for each in sizes))
        return dataclasses.replace(fact, views=tuple(views))

    def leave_body(self, fact: ArrayFacts, equation: Equation) -> ArrayFacts:
        # Results of loops and branches are no views. A choice by data depends on data.
        is_chosen = equation.is_choice and self.fact(equation.inputs[0]).is_data
        return ArrayFacts(is_data=fact.is_data or is_chosen)

    def visit(self, equation: Equation) -> None:
        name, inputs = equation.name, [self.fact(value) for value in equation.inputs]
        is_data = any(fact.is_data for fact in inputs)
        self.facts.update(dict.fromkeys(equation.outputs, ArrayFacts(is_data=is_data)))
        # A lookup by data is a use; its result is no view.
        if is_lookup(equation) and is_data:
            return
        if name in ENTRYWISE:
            self._visit_entrywise(equation, inputs)
        elif name in LAYOUTS and any(fact.views or fact.constant is not None for fact in inputs):
            self._visit_layout(equation, inputs)

    def _visit_entrywise(self, equation: Equation, inputs: Sequence[ArrayFacts]) -> None:
        """Follows entries of parameters that other functions of parameters mask or scale."""
        name = equation.name
        if len(equation.outputs) > 1:
            self.facts.update(zip(equation.outputs, inputs, strict=True))
            return
        (output,) = equation.outputs
        if any(fact.is_data for fact in inputs[name == "select_n" :]):  # a mask may be data
            return
        pairs = zip(equation.inputs, inputs, strict=True)
        counts = [
            Counter(map(_identify, fact.views))
            for value, fact in pairs
            if value.shape == output.shape
        ]
        # Two views of one array, as in w + (q(w) - w), count as one.
        full: list[View] = [*functools.reduce(operator.or_, counts, Counter()).elements()]
        largest = max((view.num_covered for view in full), default=0)
        # A scale that is broadcast to the shape of a parameter is not an operand of the product.
        views = [
            dataclasses.replace(
                view,
                keeps_zeros=_keeps_zeros(equation, inputs, view),
                scale=_find_scale(equation, inputs, view),
            )
            for view in full
            if view.num_covered == largest
        ]
        if full:
            self.facts[output] = ArrayFacts(tuple(views))
        elif not inputs[0].is_data:
            constants = [fact.constant for fact in inputs]
            self.facts[output] = ArrayFacts(constant=fold_constant(equation, constants))

    def _visit_layout(self, equation: Equation, inputs: Sequence[ArrayFacts]) -> None:
        layout = LAYOUTS[equation.name]
        relations = layout.relate(equation)
        for index, output in enumerate(equation.outputs):
            sources = layout.sources(equation, index)
            is_data, is_joined = self.facts[output].is_data, len(sources) > 1
            if is_joined and is_data:
                continue
            views = []
            for source in sources:
                for view in inputs[source].views:
                    moved = follow_layout(view, equation, relations, source, index)
                    if moved is not None and not (
                        is_joined and moved.changed_at == view.changed_at
                    ):
                        views.append(moved)
            constants = {inputs[i].constant for i in sources}
            constant = constants.pop() if len(constants) == 1 and not is_joined else None
            if equation.name == "pad" and inputs[1].constant != 0:
                views = [dataclasses.replace(view, keeps_zeros=False) for view in views]
            self.facts[output] = ArrayFacts(tuple(views), is_data, constant)

    # Uses, once all facts are final.

    def _find_uses(self, program: Program, trips: int | None) -> Iterator[Use]:
        for equation in program.flat_equations():
            inputs = [self.fact(value) for value in equation.inputs]
            if equation.name in PRODUCTS:
                for operand, fact in enumerate(inputs[:2]):
                    for view in merge_shares(fact.views):
                        yield self._make_use(equation, operand, view, trips)
            elif is_lookup(equation) and any(fact.is_data for fact in inputs):
                for view in inputs[0].views:
                    yield self._make_use(equation, 0, view, trips)
            for body in equation.list_bodies():
                inner_trips = None if trips is None or body.trips is None else trips * body.trips
                yield from self._find_uses(body.program, inner_trips)

    def _make_use(self, equation: Equation, operand: int, view: View, trips: int | None) -> Use:
        """Returns the use of a view by a product or a lookup, with the axes of the parameter."""
        groups, macs = 1, 0
        if equation.name in PRODUCTS:
            product = read_product(equation)
            axes = product.operands[operand]
            groups = product.groups if operand else 1
            macs = round(product.macs * view.share) * (1 if trips is None else trips)
        else:
            sizes = zip(equation.params["slice_sizes"], equation.inputs[0].shape, strict=True)
            axes = Operand((), tuple(i for i, (size, full) in enumerate(sizes) if size == full))
        return Use(
            path=view.path,
            primitive=equation.name,
            contracting=tuple(sorted(view.axes(axes.contracted))),
            output=view.axes(axes.free),
            batch=(*view.stacked, *view.axes((*axes.batch, *axes.experts))),
            groups=groups,
            macs=macs,
            trips=trips,
            source=equation.source,
            view=view,
            equation=equation,
            operand=operand,
        )


def _identify(view: View) -> View:
    """Returns the view of the same entries that all functions of these entries share."""
    return dataclasses.replace(view, keeps_zeros=True, scale=1.0)


def _keeps_zeros(equation: Equation, inputs: Sequence[ArrayFacts], view: View) -> bool:
    """Returns whether an entrywise operation is 0 where the parameter of a view is 0."""
    numbers = [
        0.0 if any(x.keeps_zeros and _identify(x) == view for x in fact.views) else fact.constant
        for fact in inputs
    ]
    return fold_constant(equation, numbers) == 0


def _find_scale(equation: Equation, inputs: Sequence[ArrayFacts], view: View) -> float | None:
    """Returns the scale of a view behind an entrywise operation, `None` for other functions."""
    scales = [[x.scale for x in fact.views if _identify(x) == view] for fact in inputs]
    match equation.name, scales, [fact.constant for fact in inputs]:
        case "mul", ([float(scale)], []) | ([], [float(scale)]), (None, float(n)) | (
            float(n),
            None,
        ):
            return scale * n or None  # 0 times a weight reads nothing of it
        case "div", ([float(scale)], []), (_, float(n)) if n:
            return scale / n
        case "neg", ([float(scale)],), _:
            return -scale
        case _, ([float(scale)],), _ if is_copy(equation) and is_differentiable(
            equation.outputs[0]
        ):
            return scale
    return None
