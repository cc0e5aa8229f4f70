"""What reads each leaf: its products and lookups, along which of its axes, and what they cost.

A leaf is followed through casts, transposes, reshapes, masks and scaling, as long as what comes out
is a view of it: an array that depends on parameters alone and holds the leaf's entries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from sparsity.core.jaxprs import Equation, Program, Value
from sparsity.graph.primitives import ELEMENTWISE
from sparsity.graph.products import PRODUCTS, read_product

Path = tuple[str, ...]
Factor = tuple[int | None, int]  # an axis of the leaf or of none, how many of its entries


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


@dataclasses.dataclass(frozen=True)
class View:
    """An array that holds entries of a leaf.

    Attributes:
      leaf: number of the leaf.
      dims: of each axis, the leaf's axes that it runs over, the last one fastest.
      stacked: the leaf's axes that are indexed by layers, the outermost first.
      scans: the scans that took them apart; fewer than these where a layer is read by its number.
      share: the part of the array that belongs to the leaf, where it was joined with others.
      is_part: whether entries of the leaf are missing.
    """

    leaf: int
    dims: tuple[tuple[Factor, ...], ...]
    stacked: tuple[int, ...] = ()
    scans: tuple[Equation, ...] = ()
    share: float = 1.0
    is_part: bool = False

    @property
    def covered(self) -> int:
        """How many entries of the array differ: those along axes of the leaf."""
        return math.prod(size for dim in self.dims for axis, size in dim if axis is not None)

    def axes(self, dims: Iterable[int]) -> tuple[int, ...]:
        """The leaf's axes of these axes of the array."""
        found = [axis for i in dims for axis, _ in self.dims[i] if axis is not None]
        return tuple(dict.fromkeys(found))

    def of(self, dims: Iterable[Sequence[Factor]], **changes: bool | float) -> View:
        """With other axes."""
        return dataclasses.replace(self, dims=tuple(map(tuple, dims)), **changes)  # type: ignore[arg-type]


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
            dims = tuple(((axis, size),) for axis, size in enumerate(value.shape))
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
            return
        if name in PRODUCTS:
            for operand, of_operand in enumerate(views):
                for view in of_operand:
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

    def _elementwise(self, equation: Equation, views: list[list[View]]) -> None:
        """The leaf's entries, masked or scaled by what depends on parameters alone."""
        name, inputs = equation.name, equation.inputs
        if len(equation.outputs) > 1:
            self.views.update(zip(equation.outputs, views, strict=True))
            return
        (output,) = equation.outputs
        if any(value in self.data for value in inputs[name == "select_n" :]):  # a mask may be data
            return
        whole = [
            v
            for value, of in zip(inputs, views, strict=True)
            for v in of
            if value.shape == output.shape
        ]
        largest = max((view.covered for view in whole), default=0)
        # A scale that is broadcast to the shape of a leaf is not what the product reads.
        self.views[output] = [view for view in whole if view.covered == largest]
        self.data.discard(output)

    def _concatenate(self, equation: Equation, views: list[list[View]]) -> None:
        axis, (output,) = equation.params["dimension"], equation.outputs
        size = output.shape[axis]
        for value, of_value in zip(equation.inputs, views, strict=True):
            for view in of_value:
                dims = list(view.dims)
                dims[axis] = ((next(iter(view.axes([axis])), None), size),)
                share = view.share * value.shape[axis] / size
                self.views[output].append(view.of(dims, share=share, is_part=True))

    def _stack(self, equation: Equation, views: list[list[View]]) -> None:
        axis, (output,), count = equation.params["axis"], equation.outputs, len(views)
        for view in (view for of_value in views for view in of_value):
            dims = (*view.dims[:axis], ((None, count),), *view.dims[axis:])
            self.views[output].append(view.of(dims, share=view.share / count))

    def _use(self, equation: Equation, operand: int, view: View, trips: int | None) -> None:
        product = read_product(equation)
        axes = product.operands[operand]
        self.uses.append(
            Use(
                self.paths[view.leaf],
                equation.name,
                tuple(sorted(view.axes(axes.contracted))),
                view.axes(axes.free),
                (*view.stacked, *view.axes(axes.batch)),
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
            each = None if trips is None else trips * params["length"]
            self._repeat(body, body.inputs[fixed : fixed + carried], each)
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
    stacked, scans = (*view.stacked, *view.axes([0])), (*view.scans, scan)
    return dataclasses.replace(view, dims=view.dims[1:], stacked=stacked, scans=scans)


def _local(view: View, value: Value, inner: Value) -> View:
    """What a device has of a view."""
    dims = [
        dim if size == own else ((next(iter(view.axes([i])), None), own),)
        for i, (dim, size, own) in enumerate(zip(view.dims, value.shape, inner.shape, strict=True))
    ]
    return view.of(dims)


def _transpose(view: View, equation: Equation, _: Value) -> View:
    return view.of(view.dims[i] for i in equation.params["permutation"])


def _squeeze(view: View, equation: Equation, _: Value) -> View:
    gone = equation.params["dimensions"]
    return view.of(dim for i, dim in enumerate(view.dims) if i not in gone)


def _broadcast(view: View, equation: Equation, output: Value) -> View:
    shape = equation.inputs[0].shape
    dims: list[Sequence[Factor]] = [((None, size),) for size in output.shape]
    for i, axis in enumerate(equation.params["broadcast_dimensions"]):
        if shape[i] == output.shape[axis]:
            dims[axis] = view.dims[i]
    return view.of(dims)


def _reshape(view: View, equation: Equation, output: Value) -> View | None:
    """The leaf's axes in row-major order, cut anew; `None` where a cut falls within an axis."""
    if equation.params["dimensions"] is not None:
        return None
    factors = [factor for dim in view.dims for factor in dim if factor[1] != 1]
    dims: list[list[Factor]] = []
    for size in output.shape:
        dims.append([])
        while size > 1:
            if not factors:
                return None
            axis, left = factors.pop(0)
            if left % size == 0 and left > size:
                factors.insert(0, (axis, left // size))
                left = size
            elif size % left:
                return None
            dims[-1].append((axis, left))
            size //= left
    return view.of(dims)


def _part(view: View, equation: Equation, output: Value) -> View | None:
    """Some of the entries, in a row along the same axes."""
    if len(output.shape) != len(view.dims):
        return None
    found = _local(view, equation.inputs[0], output)
    return dataclasses.replace(found, is_part=equation.inputs[0].size > output.size or view.is_part)


def _indexed(view: View, equation: Equation, output: Value) -> View | None:
    """One entry of an axis, such as a layer of a stack, at a place that is no data."""
    spec = equation.params["dimension_numbers"]
    if len(spec.offset_dims) != len(output.shape):
        return None
    gone = spec.collapsed_slice_dims
    left = [i for i in range(len(view.dims)) if i not in gone]
    stacked = (*view.stacked, *view.axes(gone))
    found = view.of([view.dims[i] for i in left], is_part=True)
    whole = all(equation.inputs[0].shape[i] == equation.params["slice_sizes"][i] for i in left)
    return dataclasses.replace(found, stacked=stacked) if whole else None


def _unstack(view: View, equation: Equation, _: Value) -> View:
    axis = equation.params["axis"]
    found = view.of((*view.dims[:axis], *view.dims[axis + 1 :]), is_part=True)
    return dataclasses.replace(found, stacked=(*view.stacked, *view.axes([axis])))


_LOOKUPS = frozenset(("gather", "dynamic_slice"))
MOVES: dict[str, Callable[[View, Equation, Value], View | None]] = {
    "transpose": _transpose,
    "squeeze": _squeeze,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "gather": _indexed,
    "unstack": _unstack,
    **dict.fromkeys(("dynamic_slice", "pad", "rev", "slice", "split"), _part),
}
