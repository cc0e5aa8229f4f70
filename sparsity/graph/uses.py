"""What reads each leaf: its products and lookups, along which of its axes, and what they cost.

A leaf is followed through casts, transposes, reshapes, masks and scaling, as long as what comes out
is a view of it: an array that depends on parameters alone and holds the leaf's entries.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from sparsity.programs import constants
from sparsity.programs.primitives import ELEMENTWISE
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import Equation, Program, Value

Path = tuple[str, ...]


class Factor(NamedTuple):
    """A part of an axis of an array: entries of a leaf along one of the leaf's axes.

    Attributes:
      axis: of the leaf, `None` where the array repeats entries or has those of others.
      size: how many entries.
      step: how far apart they lie along the leaf's axis, below 0 if they are reversed.
    """

    axis: int | None
    size: int
    step: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """A product or a lookup that reads a leaf.

    Attributes:
      path: of the leaf.
      primitive: 'dot_general', 'conv_general_dilated', or 'gather' for a lookup.
      contracting: the leaf's axes that a product sums over.
      output: those that become axes of the result.
      batch: those that index separate products, layers of a scan among them.
      groups: feature groups of a convolution, else 1.
      macs: multiply-adds of all trips together; of one trip where their number is not known.
      trips: how often it runs, `None` in a `while`.
      source: the line of the model.
      view: how what the product reads lies in the leaf.
      equation: the product.
      operand: which of its inputs is the leaf.
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
        """The contracted axes that are no window: of a convolution the input channels."""
        if self.primitive != "conv_general_dilated":
            return self.contracting
        axis = read_product(self.equation).operands[self.operand].contracted[0]
        return tuple(sorted(self.view.axes([axis]))) or self.contracting

    def is_along(self, axis: int, m: int) -> bool:
        """Whether groups of m consecutive entries along an axis of the leaf are summed together.

        Where the axis was taken apart, parts of it may be outputs, or index layers.
        """
        contracted = read_product(self.equation).operands[self.operand].contracted
        dims = [dim for i, dim in enumerate(self.view.dims) if i not in contracted]
        others = [part for dim in (*dims, self.view.layers) for part in dim if part.axis == axis]
        return all(part.step % m == 0 for part in others)


@dataclasses.dataclass(frozen=True)
class View:
    """An array that holds entries of a leaf.

    Attributes:
      leaf: number of the leaf.
      dims: of each axis, the leaf's axes that it runs over, the last one fastest.
      stacked: the leaf's axes that are indexed by layers, the outermost first.
      scans: the scans that took them apart; fewer than these where a layer is read by its number.
      layers: the parts of these axes that are indexed.
      share: the part of the array that belongs to the leaf, where it was joined with others.
      parts: the arrays on the way in which entries of the leaf are missing, joined with others, or
        in another order. Views with the same ones hold the same entries at the same places.
      keeps_zeros: whether the array is 0 where the leaf is.
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
        """Whether it holds other entries than the leaf, or in another order."""
        return bool(self.parts)

    @property
    def covered(self) -> int:
        """How many entries of the array differ: those along axes of the leaf."""
        return math.prod(part.size for dim in self.dims for part in dim if part.axis is not None)

    def axes(self, dims: Iterable[int]) -> tuple[int, ...]:
        """The leaf's axes of these axes of the array."""
        axes = [part.axis for i in dims for part in self.dims[i] if part.axis is not None]
        return tuple(dict.fromkeys(axes))

    def of(self, dims: Iterable[Sequence[Factor]]) -> View:
        """With other axes."""
        return dataclasses.replace(self, dims=tuple(map(tuple, dims)))

    def layer(self, axes: Collection[int]) -> View:
        """One entry of some axes of the array, such as a layer of a stack."""
        return dataclasses.replace(
            self,
            dims=tuple(dim for i, dim in enumerate(self.dims) if i not in axes),
            stacked=(*self.stacked, *self.axes(axes)),
            layers=(*self.layers, *(part for i in axes for part in self.dims[i])),
        )

    def part(self, output: Value, share: Fraction = Fraction(1)) -> View:
        """The view in an array that has other entries, or in another order, in a share of it."""
        return dataclasses.replace(self, parts=(*self.parts, output), share=self.share * share)


def track(program: Program, leaves: Mapping[Value, int], paths: Sequence[Path]) -> Tracker:
    """Follows the leaves through the program.

    Args:
      program: the program.
      leaves: its inputs that are leaves, and their numbers.
      paths: of the leaves, by number.
    """
    tracker = Tracker(paths)
    for value in program.inputs:
        if value in leaves:
            dims = tuple((Factor(axis, size),) for axis, size in enumerate(value.shape))
            tracker.views[value] = [View(leaves[value], dims)]
        else:
            tracker.data.add(value)
    tracker.run(program, 1)
    return tracker


class Tracker:
    """The views of leaves, what depends on more than them, and their uses in program order."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.views: dict[Value, list[View]] = {}
        self.data: set[Value] = set()  # depends on more than parameters
        self.uses: list[Use] = []
        self._constants: dict[Value, float | None] = {}  # the number that all entries are

    def run(self, program: Program, trips: int | None) -> None:
        """Follows the leaves through a program that runs so often."""
        for equation in program.flat():
            self._visit(equation, trips)

    def _visit(self, equation: Equation, trips: int | None) -> None:
        name = equation.name
        if equation.bodies:
            self._enter(equation, trips)
            return
        is_data = any(value in self.data for value in equation.inputs)
        if is_data:
            self.data.update(equation.outputs)
        views = [self.views.get(value, []) for value in equation.inputs]
        for output in equation.outputs:
            self.views[output] = []
        if not any(views):
            if not is_data:
                self._follow_constants(equation)
            return
        if name in PRODUCTS:
            for operand, of_operand in enumerate(views[:2]):
                for view in _merged(of_operand):
                    self._use(equation, operand, view, trips)
        elif name in _LOOKUPS and is_data:
            for view in views[0]:
                self._look_up(equation, view, trips)
        elif name in ELEMENTWISE:
            self._elementwise(equation, views)
        elif name == "concatenate" and not is_data:
            self._concatenate(equation, views)
        elif name == "stack" and not is_data:
            self._stack(equation, views)
        elif name in MOVES:
            for output in equation.outputs:
                moved = [MOVES[name](view, equation, output) for view in views[0]]
                self.views[output] = [view for view in moved if view is not None]

    def _constant(self, value: Value) -> float | None:
        if value not in self._constants:
            self._constants[value] = constants.value(value.known)
        return self._constants[value]

    def _follow_constants(self, equation: Equation) -> None:
        numbers = [self._constant(value) for value in equation.inputs]
        if equation.name in ELEMENTWISE and len(equation.outputs) == 1:
            self._constants[equation.outputs[0]] = constants.result(equation, numbers)
        elif equation.name in ("broadcast_in_dim", "reshape"):
            self._constants[equation.outputs[0]] = numbers[0]

    def _keeps_zeros(self, equation: Equation, views: Sequence[Sequence[View]], view: View) -> bool:
        """Whether an entry-by-entry operation gives 0 where the leaf of one of its views is 0."""
        inputs = zip(equation.inputs, views, strict=True)
        numbers = [0.0 if view in x else self._constant(value) for value, x in inputs]
        return constants.result(equation, numbers) == 0

    def _elementwise(self, equation: Equation, views: list[list[View]]) -> None:
        """The leaf's entries, masked or scaled by what depends on parameters alone."""
        name, inputs = equation.name, equation.inputs
        if len(equation.outputs) > 1:
            self.views.update(zip(equation.outputs, views, strict=True))
            return
        (output,) = equation.outputs
        if any(value in self.data for value in inputs[name == "select_n" :]):  # a mask may be data
            return
        counts = [
            Counter(dataclasses.replace(view, keeps_zeros=True) for view in x)
            for value, x in zip(inputs, views, strict=True)
            if value.shape == output.shape
        ]
        # What is computed from an array twice, as w + (q(w) - w), is one view.
        full: list[View] = [*functools.reduce(operator.or_, counts, Counter()).elements()]
        largest = max((view.covered for view in full), default=0)
        # A scale that is broadcast to the shape of a leaf is not what the product reads.
        self.views[output] = [
            dataclasses.replace(
                view,
                keeps_zeros=self._keeps_zeros(equation, views, view),
                is_conjugate=view.is_conjugate ^ (name == "conj"),
            )
            for view in full
            if view.covered == largest
        ]
        self.data.discard(output)

    def _concatenate(self, equation: Equation, views: list[list[View]]) -> None:
        axis, (output,) = equation.params["dimension"], equation.outputs
        size = output.shape[axis]
        for value, of_value in zip(equation.inputs, views, strict=True):
            for view in of_value:
                dims = list(view.dims)
                dims[axis] = (Factor(next(iter(view.axes([axis])), None), size),)
                share = Fraction(value.shape[axis], size)
                self.views[output].append(view.of(dims).part(output, share))

    def _stack(self, equation: Equation, views: list[list[View]]) -> None:
        axis, (output,), count = equation.params["axis"], equation.outputs, len(views)
        for view in (view for of_value in views for view in of_value):
            dims = (*view.dims[:axis], (Factor(None, count),), *view.dims[axis:])
            self.views[output].append(view.of(dims).part(output, Fraction(1, count)))

    def _use(self, equation: Equation, operand: int, view: View, trips: int | None) -> None:
        product = read_product(equation)
        axes = product.operands[operand]
        self.uses.append(
            Use(
                self.paths[view.leaf],
                equation.name,
                tuple(sorted(view.axes(axes.contracted))),
                view.axes(axes.free),
                (*view.stacked, *view.axes((*axes.batch, *axes.experts))),
                product.groups if operand else 1,
                round(product.macs * view.share) * (1 if trips is None else trips),
                trips,
                equation.source,
                view,
                equation,
                operand,
            )
        )

    def _look_up(self, equation: Equation, view: View, trips: int | None) -> None:
        value, params = equation.inputs[0], equation.params
        whole = [i for i, n in enumerate(params["slice_sizes"]) if n == value.shape[i]]
        source, path, name = equation.source, self.paths[view.leaf], equation.name
        batch, output = view.stacked, view.axes(whole)
        use = Use(path, name, (), output, batch, 1, 0, trips, source, view, equation, 0)
        self.uses.append(use)

    def _enter(self, equation: Equation, trips: int | None) -> None:
        name, params, inputs = equation.name, equation.params, equation.inputs
        if name == "scan":
            fixed, carried = params["num_consts"], params["num_carry"]
            (body,) = equation.bodies
            self._bind(inputs, body.inputs)
            for inner in body.inputs[fixed + carried :]:
                self.views[inner] = [_layer(view, equation) for view in self.views[inner]]
            carry = body.inputs[fixed : fixed + carried]
            for inner, output in zip(carry, body.outputs, strict=False):
                if output is not inner:  # later steps read something else
                    self.views[inner] = [
                        dataclasses.replace(view.part(inner), keeps_zeros=False)
                        for view in self.views[inner]
                    ]
            each = None if trips is None else trips * params["length"]
            self._repeat(body, carry, each)
            outputs = body.outputs
        elif name == "while":
            condition, body = equation.bodies
            first = params["cond_nconsts"]
            carry = params["body_nconsts"]
            self._bind(inputs[first:], body.inputs)
            self._bind([*inputs[:first], *inputs[first + carry :]], condition.inputs)
            self._repeat(body, body.inputs[carry:], None)
            self.run(condition, None)
            outputs = body.outputs
        elif name == "cond":
            for body in equation.bodies:
                self._bind(inputs[1:], body.inputs)
                self.run(body, trips)
            outputs = [inputs[0], *(o for body in equation.bodies for o in body.outputs)]
        else:  # shard_map: each device runs it on its part
            (body,) = equation.bodies
            self._bind(inputs, body.inputs)
            for value, inner in zip(inputs, body.inputs, strict=True):
                self.views[inner] = [_local(v, value, inner) for v in self.views[inner]]
            self.run(body, None if trips is None else trips * shards(equation))
            outputs = body.outputs
        if any(value in self.data for value in outputs):
            self.data.update(equation.outputs)

    def _bind(self, values: Sequence[Value], inner: Sequence[Value]) -> None:
        for value, inside in zip(values, inner, strict=True):
            self.views[inside] = self.views.get(value, [])
            if value in self.data:
                self.data.add(inside)

    def _repeat(self, body: Program, carry: Sequence[Value], trips: int | None) -> None:
        """Runs a loop's body until it is known which parts of the carry depend on data."""
        while True:
            uses, known = len(self.uses), len(self.data.intersection(carry))
            self.run(body, trips)
            after = zip(body.outputs, carry, strict=False)
            self.data.update(value for output, value in after if output in self.data)
            if len(self.data.intersection(carry)) == known:
                return
            del self.uses[uses:]


def shards(equation: Equation) -> int:
    """In how many parts a `shard_map` cuts its inputs."""
    entries = [entry for spec in equation.params["in_specs"] for entry in spec if entry]
    names = {n for entry in entries for n in ([entry] if isinstance(entry, str) else entry)}
    return math.prod([int(equation.params["mesh"].shape[name]) for name in names])


def _layer(view: View, scan: Equation) -> View:
    """One step of a scan over the first axis of a view."""
    return dataclasses.replace(view.layer([0]), scans=(*view.scans, scan))


def _local(view: View, value: Value, inner: Value) -> View:
    """The view in an array with fewer or more entries along some axes, as each device has."""
    dims = []
    for dim, size, new in zip(view.dims, value.shape, inner.shape, strict=True):
        if size != new:
            step = dim[0].step if len(dim) == 1 else 1
            axes = [factor.axis for factor in dim if factor.axis is not None]
            dim = (Factor(axes[0] if axes else None, new, step),)
        dims.append(dim)
    return view.of(dims)


def _transpose(view: View, equation: Equation, _: Value) -> View:
    return view.of(view.dims[i] for i in equation.params["permutation"])


def _squeeze(view: View, equation: Equation, _: Value) -> View:
    gone = equation.params["dimensions"]
    return view.of(dim for i, dim in enumerate(view.dims) if i not in gone)


def _broadcast(view: View, equation: Equation, output: Value) -> View:
    shape = equation.inputs[0].shape
    dims: list[Sequence[Factor]] = [(Factor(None, size),) for size in output.shape]
    for i, axis in enumerate(equation.params["broadcast_dimensions"]):
        if shape[i] == output.shape[axis]:
            dims[axis] = view.dims[i]
    return view.of(dims)


def _reshape(view: View, equation: Equation, output: Value) -> View | None:
    """The leaf's axes in row-major order, cut anew; `None` where a cut falls within an axis."""
    order = equation.params["dimensions"]  # that of the axes before the cut
    moved = view.dims if order is None else [view.dims[i] for i in order]
    factors = [factor for dim in moved for factor in dim if factor.size != 1]
    dims: list[list[Factor]] = []
    for size in output.shape:
        dims.append([])
        while size > 1:
            if not factors:
                return None
            factor = factors.pop(0)
            if factor.size % size == 0 and factor.size > size:
                inner = factor._replace(size=factor.size // size)
                factors.insert(0, inner)
                factor = Factor(factor.axis, size, factor.step * inner.size)
            elif size % factor.size:
                return None
            dims[-1].append(factor)
            size //= factor.size
    return view.of(dims)


def _part(view: View, equation: Equation, output: Value) -> View | None:
    """Some of the entries, in a row along the same axes; one of them, as by an index."""
    if len(output.shape) != len(view.dims):
        return None
    (value, *_) = equation.inputs
    sizes = zip(view.dims, value.shape, output.shape, strict=True)
    indexed = [factor for dim, size, new in sizes if new == 1 < size for factor in dim]
    part = _local(view, value, output).part(output)
    return dataclasses.replace(part, layers=(*view.layers, *indexed))


def _pad(view: View, equation: Equation, output: Value) -> View | None:
    keeps_zeros = view.keeps_zeros and constants.value(equation.inputs[1].known) == 0
    part = _part(view, equation, output)
    return part and dataclasses.replace(part, keeps_zeros=keeps_zeros)


def _indexed(view: View, equation: Equation, output: Value) -> View | None:
    """One entry of an axis, such as a layer of a stack, at a place that is no data."""
    spec = equation.params["dimension_numbers"]
    if len(spec.offset_dims) != len(output.shape):
        return None
    gone, sizes = spec.collapsed_slice_dims, equation.params["slice_sizes"]
    shape = equation.inputs[0].shape
    is_layer = all(size == sizes[i] for i, size in enumerate(shape) if i not in gone)
    return view.layer(gone).part(output) if is_layer else None


def _unstack(view: View, equation: Equation, output: Value) -> View:
    return view.layer([equation.params["axis"]]).part(output)


def _reversed(view: View, equation: Equation, _: Value) -> View:
    turned = equation.params["dimensions"]
    return view.of(
        [part._replace(step=-part.step) for part in dim] if i in turned else dim
        for i, dim in enumerate(view.dims)
    )


def _merged(views: Iterable[View]) -> list[View]:
    """The views of an operand, one of each kind: the shares of parts that were joined add up."""
    shares: dict[View, Fraction] = {}
    for view in views:
        kind = dataclasses.replace(view, share=Fraction(1))
        shares[kind] = min(shares.get(kind, Fraction(0)) + view.share, Fraction(1))
    return [dataclasses.replace(kind, share=share) for kind, share in shares.items()]


_LOOKUPS = frozenset(("gather", "dynamic_slice"))
MOVES: dict[str, Callable[[View, Equation, Value], View | None]] = {
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "gather": _indexed,
    "unstack": _unstack,
    "pad": _pad,
    "rev": _reversed,
    **dict.fromkeys(("dynamic_slice", "slice", "split"), _part),
}
