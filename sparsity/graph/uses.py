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
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from sparsity.core.trees import Path
from sparsity.programs.entrywise import ENTRYWISE, constant_in, fold_constant
from sparsity.programs.layout import LAYOUTS, Place, Relation
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import Equation, Program, Value
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


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Use:
    """A product or a lookup that reads a parameter.

    Attributes:
      path: path of the parameter.
      primitive: 'dot_general', 'conv_general_dilated', or 'gather' for a lookup.
      contracting: axes of the parameter that a product sums over.
      output: axes of the parameter that become axes of the result.
      batch: axes of the parameter that index separate products, such as layers of a scan.
      groups: feature groups of a convolution, else 1.
      macs: multiply-adds of all trips together; of one trip in a `while`.
      trips: number of runs in a call, `None` in a `while`.
      source: the line of the model.
      view: the array that the product reads, as a view of the parameter.
      equation: the product.
      operand: number of the input that is the view.
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
    def channels(self) -> tuple[int, ...]:
        """Contracted axes without windows: of a convolution the input channels."""
        if self.primitive != "conv_general_dilated":
            return self.contracting
        axis = read_product(self.equation).operands[self.operand].contracted[0]
        return tuple(sorted(self.view.axes([axis]))) or self.contracting

    @property
    def num_inputs(self) -> int:
        """Number of entries of the parameter's operand that a product sums for each output."""
        operand = self.equation.inputs[self.operand]
        axes = read_product(self.equation).operands[self.operand].contracted
        return math.prod(operand.shape[axis] for axis in axes)

    def is_along(self, axis: int, m: int) -> bool:
        """Returns whether the product sums groups of m consecutive entries along an axis.

        Where the axis was split, parts may be outputs, or index layers.
        """
        contracted = read_product(self.equation).operands[self.operand].contracted
        dims = [dim for i, dim in enumerate(self.view.dims) if i not in contracted]
        others = [part for dim in (*dims, self.view.layers) for part in dim if part.axis == axis]
        return all(part.step % m == 0 for part in others)


@dataclasses.dataclass(frozen=True)
class View:
    """An array that holds entries of a parameter.

    Attributes:
      leaf: number of the parameter.
      dims: for each axis the axes of the parameter, the last one fastest.
      stacked: axes of the parameter that layers index, the outermost first.
      scans: the scans that index `stacked`; fewer where the model reads a layer by its number.
      layers: the indexed parts of the axes `stacked`.
      share: the part of the array that belongs to the parameter, below 1 in a join.
      parts: earlier arrays that miss entries of the parameter, join other entries, or have another
        order. Views with equal parts hold the same entries at the same places.
      keeps_zeros: whether the array is 0 where the parameter is 0.
      is_conjugate: whether the array holds the complex conjugates of the entries.
    """

    leaf: int
    dims: tuple[tuple[Factor, ...], ...]
    stacked: tuple[int, ...] = ()
    scans: tuple[Equation, ...] = ()
    layers: tuple[Factor, ...] = ()
    share: Fraction = Fraction(1)
    parts: tuple[Value, ...] = ()
    keeps_zeros: bool = True
    is_conjugate: bool = False

    @property
    def is_part(self) -> bool:
        """True if the array holds other entries than the parameter, or in another order."""
        return bool(self.parts)

    @property
    def covered(self) -> int:
        """Number of entries along axes of the parameter; all others repeat these entries."""
        return math.prod(part.size for dim in self.dims for part in dim if part.axis is not None)

    def axes(self, dims: Iterable[int]) -> tuple[int, ...]:
        """Returns the axes of the parameter that lie along axes of the array."""
        axes = [part.axis for i in dims for part in self.dims[i] if part.axis is not None]
        return tuple(dict.fromkeys(axes))

    def with_dims(self, dims: Iterable[Sequence[Factor]]) -> View:
        """Returns the view with other axes."""
        return dataclasses.replace(self, dims=tuple(map(tuple, dims)))


@dataclasses.dataclass(frozen=True)
class Views:
    """Facts about an array.

    Attributes:
      views: the array as views of parameters.
      is_data: whether the array depends on more than parameters.
      constant: the number that all entries are, `None` if they differ.
    """

    views: tuple[View, ...] = ()
    is_data: bool = False
    constant: float | None = None


class Tracker(Flow[Views]):
    """Views of parameters, and uses in program order.

    Args:
      program: the program.
      leaves: {input of the program: number of the parameter}.
      paths: paths of the parameters, by number.
    """

    def __init__(
        self, program: Program, leaves: Mapping[Value, int], paths: Sequence[Path]
    ) -> None:
        super().__init__()
        self.paths = paths
        self.uses: list[Use] = []
        for value in program.inputs:
            if value in leaves:
                dims = tuple((Factor(axis, size),) for axis, size in enumerate(value.shape))
                self.facts[value] = Views((View(leaves[value], dims),))
            else:
                self.facts[value] = Views(is_data=True)
        self.run(program)

    def start(self, value: Value) -> Views:
        return Views(constant=constant_in(value.constant))

    def join(self, one: Views, other: Views, equation: Equation, target: Value) -> Views:
        views = one.views
        if other.views != views:  # later steps, or another branch, read something else
            views = tuple(_change(view, target) for view in views)
        constant = one.constant if one.constant == other.constant else None
        return Views(views, one.is_data or other.is_data, constant)

    def layer(self, fact: Views, scan: Equation) -> Views:
        views = [
            dataclasses.replace(_index(view, [0]), scans=(*view.scans, scan)) for view in fact.views
        ]
        return dataclasses.replace(fact, views=tuple(views))

    def stack(self, fact: Views, scan: Equation) -> Views:
        return fact

    def shard(self, fact: Views, value: Value, local: Value) -> Views:
        views = []
        for view in fact.views:
            sizes = zip(view.dims, value.shape, local.shape, strict=True)
            views.append(view.with_dims(_resize(dim, size, new) for dim, size, new in sizes))
        return dataclasses.replace(fact, views=tuple(views))

    def leave(self, fact: Views, equation: Equation) -> Views:
        is_chosen = equation.is_choice and self.fact(equation.inputs[0]).is_data
        return Views(is_data=fact.is_data or is_chosen)

    def mark(self) -> int:
        return len(self.uses)

    def rewind(self, mark: int) -> None:
        del self.uses[mark:]

    def visit(self, equation: Equation) -> None:
        name, inputs = equation.name, [self.fact(value) for value in equation.inputs]
        is_data = any(x.is_data for x in inputs)
        self.facts.update(dict.fromkeys(equation.outputs, Views(is_data=is_data)))
        if name in PRODUCTS:
            for operand, x in enumerate(inputs[:2]):
                for view in _merge(x.views):
                    self._use(equation, operand, view)
        elif name in LOOKUPS and is_data:
            for view in inputs[0].views:
                self._look_up(equation, view)
        elif name in ENTRYWISE:
            self._entrywise(equation, inputs)
        elif name in LAYOUTS and any(x.views or x.constant is not None for x in inputs):
            self._layout(equation, inputs)

    def _entrywise(self, equation: Equation, inputs: Sequence[Views]) -> None:
        """Follows entries of parameters that other functions of parameters mask or scale."""
        name = equation.name
        if len(equation.outputs) > 1:
            self.facts.update(zip(equation.outputs, inputs, strict=True))
            return
        (output,) = equation.outputs
        if any(x.is_data for x in inputs[name == "select_n" :]):  # a mask may be data
            return
        shaped = zip(equation.inputs, inputs, strict=True)
        counts = [
            Counter(dataclasses.replace(view, keeps_zeros=True) for view in x.views)
            for value, x in shaped
            if value.shape == output.shape
        ]
        # Two views of one array, as in w + (q(w) - w), count as one.
        full: list[View] = [*functools.reduce(operator.or_, counts, Counter()).elements()]
        largest = max((view.covered for view in full), default=0)
        # A scale that is broadcast to the shape of a parameter is no operand of the product.
        views = [
            dataclasses.replace(
                view,
                keeps_zeros=_keeps_zeros(equation, inputs, view),
                is_conjugate=view.is_conjugate ^ (name == "conj"),
            )
            for view in full
            if view.covered == largest
        ]
        is_data = inputs[0].is_data and not full
        constant = (
            None if full or is_data else fold_constant(equation, [x.constant for x in inputs])
        )
        self.facts[output] = Views(tuple(views), is_data, constant)

    def _layout(self, equation: Equation, inputs: Sequence[Views]) -> None:
        layout = LAYOUTS[equation.name]
        relations = layout.relate(equation)
        for number, output in enumerate(equation.outputs):
            sources = layout.sources(equation, number)
            is_data, is_joined = self.facts[output].is_data, len(sources) > 1
            if is_joined and is_data:
                continue
            views = []
            for i in sources:
                for view in inputs[i].views:
                    moved = follow(view, equation, relations, i, number)
                    if moved is not None and not (is_joined and moved.parts == view.parts):
                        views.append(moved)
            constants = {inputs[i].constant for i in sources}
            constant = constants.pop() if len(constants) == 1 and not is_joined else None
            if equation.name == "pad" and inputs[1].constant != 0:
                views = [dataclasses.replace(view, keeps_zeros=False) for view in views]
            self.facts[output] = Views(tuple(views), is_data, constant)

    def _use(self, equation: Equation, operand: int, view: View) -> None:
        product, trips = read_product(equation), self.trips
        axes = product.operands[operand]
        self.uses.append(
            Use(
                path=self.paths[view.leaf],
                primitive=equation.name,
                contracting=tuple(sorted(view.axes(axes.contracted))),
                output=view.axes(axes.free),
                batch=(*view.stacked, *view.axes((*axes.batch, *axes.experts))),
                groups=product.groups if operand else 1,
                macs=round(product.macs * view.share) * (1 if trips is None else trips),
                trips=trips,
                source=equation.source,
                view=view,
                equation=equation,
                operand=operand,
            )
        )

    def _look_up(self, equation: Equation, view: View) -> None:
        shape, slices = equation.inputs[0].shape, equation.params["slice_sizes"]
        full = [i for i, size in enumerate(slices) if size == shape[i]]
        self.uses.append(
            Use(
                path=self.paths[view.leaf],
                primitive=equation.name,
                contracting=(),
                output=view.axes(full),
                batch=view.stacked,
                groups=1,
                macs=0,
                trips=self.trips,
                source=equation.source,
                view=view,
                equation=equation,
                operand=0,
            )
        )


def follow(
    view: View,
    equation: Equation,
    relations: Sequence[Relation],
    operand: int = 0,
    number: int = 0,
) -> View | None:
    """Returns an output of a layout primitive as a view, `None` if it is no view.

    Args:
      view: the view that the input `operand` is.
      equation: the equation.
      relations: the relations between the axes of the equation.
      operand: number of the input.
      number: number of the output.
    """
    value, output = equation.inputs[operand], equation.outputs[number]
    dims: list[Sequence[Factor]] = [(Factor(None, size),) for size in output.shape]
    share, indexed, layers = Fraction(1), list[int](), list[Factor]()
    is_part = False
    for relation in relations:
        sources = [x for x in relation.sources if isinstance(x, Place) and x.array == operand]
        targets = [x for x in relation.targets if isinstance(x, Place) and x.array == number]
        kind, is_here = relation.kind, bool(sources and targets)
        if kind == "mixed" and (targets or sources):
            return None
        if kind == "index" and sources:
            indexed += [place.axis for place in sources]
        elif kind == "stack" and targets:
            share, is_part = share / output.shape[targets[0].axis], True
        elif relation.pair and is_here:
            dims[targets[0].axis] = view.dims[sources[0].axis]
        elif kind == "product" and is_here:
            factors = _factors(view, relation)
            cut = _split_factors(factors, [output.shape[place.axis] for place in targets])
            if cut is None:
                return None
            for place, dim in zip(targets, cut, strict=True):
                dims[place.axis] = dim
        elif kind == "reversed" and is_here:
            source = view.dims[sources[0].axis]
            dims[targets[0].axis] = [part._replace(step=-part.step) for part in source]
        elif is_here:  # a sum, or a cut
            ((_, axis),), ((_, to),), is_part = sources, targets, True
            size, new = value.shape[axis], output.shape[to]
            dims[to] = _resize(view.dims[axis], size, new)
            if len(relation.sources) > 1:
                share *= Fraction(size, new)
            elif new == 1 < size:
                layers += view.dims[axis]
    moved = dataclasses.replace(
        _index(view, indexed),
        dims=tuple(map(tuple, dims)),
        share=view.share * share,
        parts=(*view.parts, output) if is_part or indexed else view.parts,
    )
    return dataclasses.replace(moved, layers=(*moved.layers, *layers))


def _factors(view: View, relation: Relation) -> list[Factor]:
    """Returns the factors of the sources of a product, without factors of one entry."""
    factors: list[Factor] = []
    for place in relation.sources:
        dim = [Factor(None, place)] if isinstance(place, int) else view.dims[place.axis]
        factors += [factor for factor in dim if factor.size != 1]
    return factors


def _split_factors(factors: Sequence[Factor], sizes: Sequence[int]) -> list[list[Factor]] | None:
    """Splits factors in row-major order into axes; `None` where a cut falls within a factor."""
    queue, dims = [*factors], list[list[Factor]]()
    for size in sizes:
        dims.append([])
        while size > 1:
            if not queue:
                return None
            factor = queue.pop(0)
            if factor.size % size == 0 and factor.size > size:
                inner = factor._replace(size=factor.size // size)
                queue.insert(0, inner)
                factor = Factor(factor.axis, size, factor.step * inner.size)
            elif size % factor.size:
                return None
            dims[-1].append(factor)
            size //= factor.size
    return dims


def _resize(dim: Sequence[Factor], size: int, new: int) -> Sequence[Factor]:
    """Returns an axis with fewer or more entries."""
    if size == new:
        return dim
    axes = [factor.axis for factor in dim if factor.axis is not None]
    return (Factor(axes[0] if axes else None, new, dim[0].step if len(dim) == 1 else 1),)


def _index(view: View, axes: Sequence[int]) -> View:
    """Returns the view of one entry along some axes, such as a layer of a stack."""
    return dataclasses.replace(
        view,
        dims=tuple(dim for i, dim in enumerate(view.dims) if i not in axes),
        stacked=(*view.stacked, *view.axes(axes)),
        layers=(*view.layers, *(part for i in axes for part in view.dims[i])),
    )


def _change(view: View, target: Value) -> View:
    """Returns the view of an array that holds other entries in later steps."""
    parts = view.parts if target in view.parts else (*view.parts, target)
    return dataclasses.replace(view, parts=parts, keeps_zeros=False)


def _keeps_zeros(equation: Equation, inputs: Sequence[Views], view: View) -> bool:
    """Returns whether an entrywise operation is 0 where the parameter of a view is 0."""
    numbers = [0.0 if view in x.views else x.constant for x in inputs]
    return fold_constant(equation, numbers) == 0


def _merge(views: Iterable[View]) -> list[View]:
    """Merges the views of an operand that differ only in shares, which add up."""
    shares: dict[View, Fraction] = {}
    for view in views:
        kind = dataclasses.replace(view, share=Fraction(1))
        shares[kind] = min(shares.get(kind, Fraction(0)) + view.share, Fraction(1))
    return [dataclasses.replace(kind, share=share) for kind, share in shares.items()]


LOOKUPS = frozenset(("gather", "dynamic_slice"))
