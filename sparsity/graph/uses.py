"""Uses of parameters: products and lookups that read them, along which axes, and their costs.

A parameter is followed through casts, transposes, reshapes, masks and scaling, as long as the
result is a view: an array that depends on parameters alone and holds entries of the parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from sparsity.core.trees import Path
from sparsity.graph.traced_model import Model
from sparsity.programs.entrywise import ENTRYWISE, find_uniform_value, fold_constant, is_copy
from sparsity.programs.layout import LAYOUTS, Place, Relation, is_lookup
from sparsity.programs.products import PRODUCTS, Operand, ProductKind, read_product
from sparsity.programs.program import Equation, Program, Value, is_differentiable
from sparsity.programs.walk import Flow


class Factor(NamedTuple):
    """A part of an axis of an array: entries along an axis of a parameter.

    Attributes:
      axis: axis of the parameter, `None` for repeated entries and entries of other arrays.
      size: number of entries.
      step: distance of entries along the axis of the parameter, below 0 in reverse.
    """

    axis: int | None
    size: int
    step: int = 1


@dataclasses.dataclass(frozen=True)
class View:
    """An array that holds entries of a parameter.

    Attributes:
      path: path of the parameter.
      factors: for each axis its factors, the last one fastest.
      stacked: axes of the parameter that layers index, the outermost first.
      scans: the scans that index `stacked`; fewer where the model reads a layer by its index.
      layers: the indexed parts of the axes `stacked`.
      share: the fraction of the array that belongs to the parameter, below 1 in a join.
      changed_at: earlier arrays that miss entries of the parameter, join other entries, or have
        another order. Views changed at the same arrays hold the same entries at the same places.
      keeps_zeros: whether the array is 0 where the parameter is 0.
      scale: the number that the entries are multiplied by, `None` if they went through another
        function than a cast or a product with a number.
    """

    path: Path
    factors: tuple[tuple[Factor, ...], ...]
    stacked: tuple[int, ...] = ()
    scans: tuple[Equation, ...] = ()
    layers: tuple[Factor, ...] = ()
    share: Fraction = Fraction(1)
    changed_at: tuple[Value, ...] = ()
    keeps_zeros: bool = True
    scale: float | None = 1.0

    @property
    def has_other_entries(self) -> bool:
        """True if the array holds other entries than the parameter, or in another order."""
        return bool(self.changed_at)

    @property
    def num_covered(self) -> int:
        """Number of entries along axes of the parameter; all others repeat these entries."""
        return math.prod(
            factor.size for factors in self.factors for factor in factors if factor.axis is not None
        )

    def axes(self, array_axes: Iterable[int]) -> tuple[int, ...]:
        """Returns the axes of the parameter that lie along axes of the array."""
        factors = [factor for i in array_axes for factor in self.factors[i]]
        axes = [factor.axis for factor in factors if factor.axis is not None]
        return tuple(dict.fromkeys(axes))

    def with_factors(self, by_axis: Iterable[Sequence[Factor]]) -> View:
        """Returns the view with other factors of its axes."""
        return dataclasses.replace(self, factors=tuple(map(tuple, by_axis)))

    def select_entry(self, axes: Sequence[int]) -> View:
        """Returns the view of one entry along some axes, such as a layer of a stack."""
        return dataclasses.replace(
            self,
            factors=tuple(factors for i, factors in enumerate(self.factors) if i not in axes),
            stacked=(*self.stacked, *self.axes(axes)),
            layers=(*self.layers, *(factor for i in axes for factor in self.factors[i])),
        )

    def mark_changed(self, target: Value) -> View:
        """Returns the view of an array that holds other entries in later steps."""
        is_listed = target in self.changed_at
        changed_at = self.changed_at if is_listed else (*self.changed_at, target)
        return dataclasses.replace(self, changed_at=changed_at, keeps_zeros=False)


@dataclasses.dataclass(frozen=True)
class ArrayFacts:
    """Facts about an array.

    Attributes:
      views: the array as views of parameters.
      is_data: whether the array depends on more than parameters.
      constant: the number that all entries are, `None` if they differ.
    """

    views: tuple[View, ...] = ()
    is_data: bool = False
    constant: float | None = None


def follow_layout(
    view: View, equation: Equation, relations: Sequence[Relation], operand: int = 0, result: int = 0
) -> View | None:
    """Returns an output of a layout primitive as a view, `None` if it is not a view.

    Args:
      view: the view that the input `operand` is.
      equation: the equation.
      relations: the relations between the axes of the equation.
      operand: index of the input.
      result: index of the output.
    """
    value, output = equation.inputs[operand], equation.outputs[result]
    by_axis: list[Sequence[Factor]] = [(Factor(None, size),) for size in output.shape]
    share, indexed, layers = view.share, list[int](), list[Factor]()
    is_changed = False
    for relation in relations:
        sources = _list_axes(relation.sources, operand)
        targets = _list_axes(relation.targets, result)
        connects = bool(sources and targets)
        match relation.kind:
            case "mixed" if sources or targets:
                return None
            case "index":
                indexed += sources
            case "stack" if targets:
                # One of n stacked arrays fills 1 / n of the entries.
                share, is_changed = share / output.shape[targets[0]], True
            case "product" if connects:
                split = _split_product(view, relation, [output.shape[axis] for axis in targets])
                if split is None:
                    return None
                for axis, factors in zip(targets, split, strict=True):
                    by_axis[axis] = factors
            case "reversed" if connects:
                factors = view.factors[sources[0]]
                by_axis[targets[0]] = [factor._replace(step=-factor.step) for factor in factors]
            case "sum" | "cut" if connects:
                factors, is_changed = view.factors[sources[0]], True
                size, new_size = value.shape[sources[0]], output.shape[targets[0]]
                by_axis[targets[0]] = resize_axis(factors, size, new_size)
                if len(relation.sources) > 1:
                    # Several sources: the view is one part of a concatenation, or is padded.
                    share *= min(Fraction(size, new_size), Fraction(1))
                elif new_size == 1 < size:
                    # A slice of one entry reads a layer by its index.
                    layers += factors
    selected = view.select_entry(indexed)
    return dataclasses.replace(
        selected,
        factors=tuple(map(tuple, by_axis)),
        share=share,
        changed_at=(*view.changed_at, output) if is_changed or indexed else view.changed_at,
        layers=(*selected.layers, *layers),
    )


def _list_axes(places: Iterable[Place | int], array: int) -> list[int]:
    """Returns the axes of an array among the places of a relation."""
    return [place.axis for place in places if isinstance(place, Place) and place.array == array]


def _split_product(
    view: View, relation: Relation, sizes: Sequence[int]
) -> Sequence[Sequence[Factor]] | None:
    """Returns the factors of the targets of a product; `None` where a cut falls within a factor."""
    if relation.pair:
        return [view.factors[relation.pair[0].axis]]
    queue, by_axis = list[Factor](), list[list[Factor]]()
    for place in relation.sources:
        queue += [Factor(None, place)] if isinstance(place, int) else view.factors[place.axis]
    queue = [factor for factor in queue if factor.size != 1]
    for size in sizes:
        by_axis.append([])
        while size > 1:
            if not queue:
                return None
            factor = queue.pop(0)
            if factor.size % size == 0 and factor.size > size:
                # The outer part of the factor fills this axis; the inner part is for later axes.
                inner = factor._replace(size=factor.size // size)
                queue.insert(0, inner)
                factor = Factor(factor.axis, size, factor.step * inner.size)
            elif size % factor.size:
                return None
            by_axis[-1].append(factor)
            size //= factor.size
    return by_axis


def resize_axis(factors: Sequence[Factor], size: int, new_size: int) -> Sequence[Factor]:
    """Returns an axis with fewer or more entries."""
    if size == new_size:
        return factors
    axes = [factor.axis for factor in factors if factor.axis is not None]
    return (
        Factor(axes[0] if axes else None, new_size, factors[0].step if len(factors) == 1 else 1),
    )


def merge_shares(views: Iterable[View]) -> list[View]:
    """Merges the views of an operand that differ only in shares, which add up."""
    shares: dict[View, Fraction] = {}
    for view in views:
        unshared = dataclasses.replace(view, share=Fraction(1))
        shares[unshared] = min(shares.get(unshared, Fraction(0)) + view.share, Fraction(1))
    return [dataclasses.replace(unshared, share=share) for unshared, share in shares.items()]


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
        views = [
            view.with_factors(map(resize_axis, view.factors, value.shape, local.shape))
            for view in fact.views
        ]
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
        # Two views of one array, as in w + (q(w) - w), count as one. A scale that is broadcast to
        # the shape of a parameter is not an operand of the product.
        counts = Counter[View]()
        for value, fact in zip(equation.inputs, inputs, strict=True):
            counts |= Counter(map(_identify, fact.views if value.shape == output.shape else ()))
        largest = max((view.num_covered for view in counts), default=0)
        views = [
            dataclasses.replace(
                view,
                keeps_zeros=_keeps_zeros(equation, inputs, view),
                scale=_find_scale(equation, inputs, view),
            )
            for view in counts.elements()
            if view.num_covered == largest
        ]
        if views:
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
            for source, view in ((i, view) for i in sources for view in inputs[i].views):
                moved = follow_layout(view, equation, relations, source, index)
                if moved and not (is_joined and moved.changed_at == view.changed_at):
                    views.append(moved)
            constant = None if is_joined or not sources else inputs[sources[0]].constant
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
            sizes = equation.params["slice_sizes"], equation.inputs[0].shape
            axes = Operand(
                (), tuple(i for i, (n, m) in enumerate(zip(*sizes, strict=True)) if n == m)
            )
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

    def read(fact: ArrayFacts) -> float | None:
        is_zero = any(x.keeps_zeros and _identify(x) == view for x in fact.views)
        return 0.0 if is_zero else fact.constant

    return fold_constant(equation, [*map(read, inputs)]) == 0


def _find_scale(equation: Equation, inputs: Sequence[ArrayFacts], view: View) -> float | None:
    """Returns the scale of a view behind an entrywise operation, `None` for other functions."""
    scales = [x.scale for fact in inputs for x in fact.views if _identify(x) == view]
    numbers = [fact.constant for fact in inputs if fact.constant is not None]
    if len(scales) != 1 or scales[0] is None:
        return None
    if equation.name == "mul" and numbers:
        return scales[0] * numbers[0] or None  # 0 times a weight reads nothing of it
    if equation.name == "div" and inputs[0].views and inputs[-1].constant:
        return scales[0] / inputs[-1].constant
    if equation.name == "neg":
        return -scales[0]
    is_same = is_copy(equation) and is_differentiable(equation.outputs[0])
    return scales[0] if is_same else None
