"""Layout primitives: which axes of their inputs become which axes of their outputs.

Each primitive is one entry of `LAYOUTS`, a list of relations between axes. All else follows from
it: which axes lose entries together, how a weight lies in what is made of it, which constants stand
at removed places, and the smaller shape. What has no entry needs all entries of what it touches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from jax import lax

from sparsity.programs.entrywise import fill_of_gather
from sparsity.programs.program import Equation, Value

Kind: TypeAlias = Literal["product", "sum", "cut", "reversed", "index", "stack", "mixed"]


class Place(NamedTuple):
    """An axis of an input or an output of an equation, by their numbers."""

    array: int
    axis: int


class Relation(NamedTuple):
    """Axes of inputs that become axes of outputs.

    Attributes:
      kind: 'product': combinations of the entries of the sources, the last axis fastest, are those
        of the targets. 'sum': the sources one after the other are the targets one after the other.
        Along other axes all entries are needed. 'cut': the target holds some entries of the source
        in a row, or more around them. 'reversed': the target has them in reverse. 'index': one
        entry of the source is read. 'stack': each entry of the target is an array. 'mixed': entries
        depend on others along the axis.
      sources: axes of inputs, or numbers of repeated entries.
      targets: axes of outputs, or numbers of entries that no output has.
      text: what the primitive does, for errors.
    """

    kind: Kind
    sources: tuple[Place | int, ...]
    targets: tuple[Place | int, ...]
    text: str

    @property
    def may_lose_entries(self) -> bool:
        """Whether entries may be removed from the sources and the targets alike."""
        return self.kind in ("product", "sum")

    @property
    def pair(self) -> tuple[Place, Place] | None:
        """The source and the target if one axis becomes one axis, entry by entry."""
        if self.kind == "product" and len(self.sources) == len(self.targets) == 1:
            source, target = self.sources[0], self.targets[0]
            if isinstance(source, Place) and isinstance(target, Place):
                return source, target
        return None


class Sizes(Protocol):
    """What is left of the arrays of a program that has lost channels."""

    def shape(self, value: Value) -> tuple[int, ...]:
        """Returns the shape that is left of a value."""

    def count_below(self, value: Value, axis: int, end: int) -> int:
        """Returns how many of the first `end` entries along an axis are left."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout primitive.

    Attributes:
      relate: the relations between the axes of an equation. Inputs and outputs without any are
        indices and scalars.
      resize: `resize(equation, arrays, sizes)` returns the outputs for smaller inputs; `None` if
        the parameters of the equation hold no sizes.
      sources: `sources(equation, number)` returns the inputs, by number, whose entries an output
        has: the first one by default.
      joins: the reduction by which entries of the mixed axes are joined, `None` if they are not,
        'unknown' if nothing follows from constants.
      fill: the constant that may stand beside entries of the sources, `None` if there is none.
    """

    relate: Callable[[Equation], list[Relation]]
    resize: Callable[[Equation, Sequence[Any], Sizes], list[Any]] | None = None
    sources: Callable[[Equation, int], Sequence[int]] = lambda equation, number: (0,)
    joins: Callable[[Equation], str | None] = lambda equation: None
    fill: Callable[[Equation], float | None] = lambda equation: None


def same(source: tuple[int, int], target: tuple[int, int], text: str) -> Relation:
    """An axis of an output that is an axis of an input, entry by entry."""
    return Relation("product", (Place(*source),), (Place(*target),), text)


def _transpose(equation: Equation) -> list[Relation]:
    order = equation.params["permutation"]
    return [same((0, axis), (0, i), "a transposition") for i, axis in enumerate(order)]


def _squeeze(equation: Equation) -> list[Relation]:
    gone = equation.params["dimensions"]
    axes = [axis for axis in range(len(equation.inputs[0].shape)) if axis not in gone]
    return [same((0, axis), (0, i), "a squeeze") for i, axis in enumerate(axes)]


def _broadcast(equation: Equation) -> list[Relation]:
    shapes = equation.inputs[0].shape, equation.outputs[0].shape
    return [
        same((0, i), (0, axis), "a broadcast")
        for i, axis in enumerate(equation.params["broadcast_dimensions"])
        if shapes[0][i] == shapes[1][axis]
    ]


def _reshape(equation: Equation) -> list[Relation]:
    """The shortest runs of axes with the same number of entries are products of each other."""
    text = "a reshape that takes channels apart"
    (value, *_), (output,) = equation.inputs, equation.outputs
    order = equation.params["dimensions"] or range(len(value.shape))
    sources = [Place(0, axis) for axis in order if value.shape[axis] != 1]
    targets = [Place(0, axis) for axis, size in enumerate(output.shape) if size != 1]
    if not value.size:
        return [Relation("mixed", tuple(sources), tuple(targets), text)]
    relations = []
    while sources and targets:
        runs = [sources.pop(0)], [targets.pop(0)]
        sizes = [value.shape[runs[0][0].axis], output.shape[runs[1][0].axis]]
        while sizes[0] != sizes[1]:
            shorter = int(sizes[1] < sizes[0])
            place = (sources, targets)[shorter].pop(0)
            runs[shorter].append(place)
            sizes[shorter] *= (value, output)[shorter].shape[place.axis]
        relations.append(Relation("product", tuple(runs[0]), tuple(runs[1]), text))
    return relations


def _concatenate(equation: Equation) -> list[Relation]:
    axis, text, count = equation.params["dimension"], "a concatenation", len(equation.inputs)
    others = [i for i in range(len(equation.outputs[0].shape)) if i != axis]
    parts = tuple(Place(number, axis) for number in range(count))
    return [
        *(same((number, i), (0, i), text) for number in range(count) for i in others),
        Relation("sum", parts, (Place(0, axis),), text),
    ]


def _split(equation: Equation) -> list[Relation]:
    axis, text, count = equation.params["axis"], "a split", len(equation.outputs)
    others = [i for i in range(len(equation.inputs[0].shape)) if i != axis]
    parts = tuple(Place(number, axis) for number in range(count))
    return [
        *(same((0, i), (number, i), text) for number in range(count) for i in others),
        Relation("sum", (Place(0, axis),), parts, text),
    ]


def _stack(equation: Equation) -> list[Relation]:
    axis, text = equation.params["axis"], "a stack"
    others = [i for i in range(len(equation.outputs[0].shape)) if i != axis]
    return [
        Relation("stack", (), (Place(0, axis),), text),
        *(
            same((number, i), (0, to), text)
            for number in range(len(equation.inputs))
            for i, to in enumerate(others)
        ),
    ]


def _unstack(equation: Equation) -> list[Relation]:
    axis, text = equation.params["axis"], "a stack"
    others = [i for i in range(len(equation.inputs[0].shape)) if i != axis]
    return [
        Relation("index", (Place(0, axis),), (), text),
        *(
            same((0, i), (number, to), text)
            for number in range(len(equation.outputs))
            for to, i in enumerate(others)
        ),
    ]


def _tile(equation: Equation) -> list[Relation]:
    return [
        Relation("product", (times, Place(0, axis)), (Place(0, axis),), "a repetition")
        if times != 1
        else same((0, axis), (0, axis), "a repetition")
        for axis, times in enumerate(equation.params["reps"])
    ]


def _slice(equation: Equation) -> list[Relation]:
    params, shape = equation.params, equation.inputs[0].shape
    strides = params["strides"] or (1,) * len(shape)
    bounds = zip(params["start_indices"], params["limit_indices"], strides, shape, strict=True)
    relations = []
    for axis, (start, end, stride, size) in enumerate(bounds):
        place = Place(0, axis)
        if (start, end, stride) == (0, size, 1):
            relations.append(same(place, place, "a slice"))
        elif stride != 1:
            relations.append(Relation("cut", (place,), (place,), "a slice with a stride"))
        else:
            relations.append(Relation("sum", (place,), (start, place, size - end), "a slice"))
    return relations


_IN_ORDER = "an operation that needs all entries of the axis, in order"


def _along(kind: Kind, axes: Callable[[Equation], Sequence[int]]) -> Callable[..., list[Relation]]:
    """Relations of what works along some axes of the first input, and entry by entry elsewhere."""

    def relate(equation: Equation) -> list[Relation]:
        worked, shape = axes(equation), equation.inputs[0].shape
        return [
            same((0, axis), (number, axis), _IN_ORDER)
            if axis not in worked and output.shape[axis] == size
            else Relation(kind, (Place(0, axis),), (Place(number, axis),), _IN_ORDER)
            for number, output in enumerate(equation.outputs)
            for axis, size in enumerate(shape)
        ]

    return relate


def _padded(equation: Equation) -> list[int]:
    config = equation.params["padding_config"]
    return [axis for axis, each in enumerate(config) if tuple(each) != (0, 0, 0)]


def _windows(equation: Equation) -> list[int]:
    params = equation.params
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    return [
        axis
        for axis, pads in enumerate(params["padding"])
        if tuple(pads) != (0, 0) or any(params[name][axis] != 1 for name in names)
    ]


def _sort(equation: Equation) -> list[Relation]:
    """All inputs are sorted by some of them."""
    first = _along("mixed", lambda equation: [equation.params["dimension"]])(equation)
    each = [
        relation._replace(sources=tuple(Place(target.array, target.axis) for target in targets))
        for relation in first
        for targets in [[x for x in relation.targets if isinstance(x, Place)]]
    ]
    return [*each, *first]


def _update(equation: Equation) -> list[Relation]:
    shape, part = equation.inputs[0].shape, equation.inputs[1].shape
    computed = "an update at a place that is computed"
    return [
        *(same((0, axis), (0, axis), "an update") for axis in range(len(shape))),
        *(
            same((1, axis), (0, axis), computed)
            if shape[axis] == part[axis]
            else Relation("mixed", (Place(1, axis),), (Place(0, axis),), computed)
            for axis in range(len(shape))
        ),
    ]


def _gather(equation: Equation) -> list[Relation]:
    spec, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    (operand, indices), (output,) = equation.inputs, equation.outputs
    looked_up, of_indices = "an axis in which entries are looked up", "an axis of indices"
    gone = sorted({*spec.collapsed_slice_dims, *spec.operand_batching_dims})
    sliced = [axis for axis in range(len(operand.shape)) if axis not in gone]
    made = [i for i in range(len(output.shape)) if i not in spec.offset_dims]
    places = tuple(Place(1, i) for i in range(len(indices.shape)))
    return [
        Relation("index", tuple(Place(0, axis) for axis in gone), (), looked_up),
        *(
            same((0, axis), (0, to), looked_up)
            if sizes[axis] == operand.shape[axis] and axis not in spec.start_index_map
            else Relation("cut", (Place(0, axis),), (Place(0, to),), looked_up)
            for axis, to in zip(sliced, spec.offset_dims, strict=True)
        ),
        Relation("mixed", places, tuple(Place(0, i) for i in made), of_indices),
    ]


# Smaller shapes.


def _resize_reshape(equation: Equation, arrays: Sequence[Any], sizes: Sizes) -> list[Any]:
    (output,), shape = equation.outputs, sizes.shape(equation.outputs[0])
    order = equation.params["dimensions"]
    return [lax.reshape(arrays[0], shape, order, out_sharding=output.struct(shape).sharding)]


def _resize_broadcast(equation: Equation, arrays: Sequence[Any], sizes: Sizes) -> list[Any]:
    (output,), shape = equation.outputs, sizes.shape(equation.outputs[0])
    axes, sharding = equation.params["broadcast_dimensions"], output.struct(shape).sharding
    return [lax.broadcast_in_dim(arrays[0], shape, axes, out_sharding=sharding)]


def _resize_split(equation: Equation, arrays: Sequence[Any], sizes: Sizes) -> list[Any]:
    axis = equation.params["axis"]
    return list(lax.split(arrays[0], [sizes.shape(x)[axis] for x in equation.outputs], axis))


def _resize_slice(equation: Equation, arrays: Sequence[Any], sizes: Sizes) -> list[Any]:
    params, (value,) = equation.params, equation.inputs
    starts, limits = (
        [sizes.count_below(value, axis, end) for axis, end in enumerate(params[name])]
        for name in ("start_indices", "limit_indices")
    )
    return [lax.slice(arrays[0], starts, limits, params["strides"])]


def _resize_dynamic_slice(equation: Equation, arrays: Sequence[Any], sizes: Sizes) -> list[Any]:
    array, *starts = arrays
    return [lax.dynamic_slice(array, starts, sizes.shape(equation.outputs[0]))]


def _resize_gather(equation: Equation, arrays: Sequence[Any], sizes: Sizes) -> list[Any]:
    full = zip(equation.params["slice_sizes"], equation.inputs[0].shape, strict=True)
    slices = [
        smaller if size == before else size
        for (size, before), smaller in zip(full, arrays[0].shape, strict=True)
    ]
    return equation.bind(arrays, slice_sizes=tuple(slices))


def _all_inputs(equation: Equation, number: int) -> Sequence[int]:
    return range(len(equation.inputs))


def _may_be_empty(equation: Equation) -> bool:
    """Whether a window may hold none of the entries."""
    names = ("window_dimensions", "padding", "base_dilation", "window_dilation")
    return any(
        max(*pads, holes - 1) >= size or step > 1
        for size, pads, holes, step in zip(*(equation.params[name] for name in names), strict=True)
    )


def _reduction_of_window(equation: Equation) -> str:
    return "unknown" if _may_be_empty(equation) else equation.name.replace("window_", "")


def _cumulative(name: str, reduction: str) -> dict[str, Layout]:
    relate = _along("mixed", lambda equation: [equation.params["axis"]])
    return {name: Layout(relate, joins=lambda equation: reduction)}


LAYOUTS: dict[str, Layout] = {
    "transpose": Layout(_transpose),
    "squeeze": Layout(_squeeze),
    "broadcast_in_dim": Layout(_broadcast, _resize_broadcast),
    "reshape": Layout(_reshape, _resize_reshape),
    "concatenate": Layout(_concatenate, sources=_all_inputs),
    "split": Layout(_split, _resize_split),
    "stack": Layout(_stack, sources=_all_inputs),
    "unstack": Layout(_unstack),
    "tile": Layout(_tile),
    "slice": Layout(_slice, _resize_slice),
    "dynamic_slice": Layout(_along("cut", lambda equation: ()), _resize_dynamic_slice),
    "dynamic_update_slice": Layout(_update, sources=lambda equation, number: (0, 1)),
    "gather": Layout(_gather, _resize_gather, fill=fill_of_gather),
    "pad": Layout(_along("cut", _padded), sources=_all_inputs),
    "rev": Layout(_along("reversed", lambda equation: equation.params["dimensions"])),
    "sort": Layout(_sort, sources=lambda equation, number: (number,)),
    "top_k": Layout(
        _along("mixed", lambda equation: [len(equation.inputs[0].shape) - 1]),
        sources=lambda equation, number: () if number else (0,),  # the others are indices
    ),
    **_cumulative("cumsum", "reduce_sum"),
    **_cumulative("cumprod", "reduce_prod"),
    **_cumulative("cummax", "reduce_max"),
    **_cumulative("cummin", "reduce_min"),
    **_cumulative("cumlogsumexp", "unknown"),
    "reduce_window": Layout(_along("mixed", _windows), joins=lambda equation: "unknown"),
    **{
        f"reduce_window_{name}": Layout(_along("mixed", _windows), joins=_reduction_of_window)
        for name in ("max", "min", "sum")
    },
}
