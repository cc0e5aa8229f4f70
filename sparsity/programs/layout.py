"""Layout primitives: relations between the axes of inputs and of outputs.

Each primitive is one entry of `LAYOUTS`, a list of relations between axes. Every analysis follows
from the relations: axes that lose entries together, views of weights, constants at removed places,
and smaller shapes. A primitive without an entry needs all entries of its inputs and outputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from sparsity.programs.entrywise import read_gather_fill
from sparsity.programs.program import Equation, Value

RelationKind: TypeAlias = Literal["product", "sum", "cut", "reversed", "index", "stack", "mixed"]
EquationParams: TypeAlias = dict[str, object]


class Place(NamedTuple):
    """An axis of an input or an output of an equation, by their indices."""

    array: int
    axis: int


class Relation(NamedTuple):
    """Axes of inputs that become axes of outputs.

    Attributes:
      kind: two kinds may lose entries:

        - 'product', as in reshape: combinations of entries of the sources, the last axis fastest,
          are the combinations of entries of the targets.
        - 'sum', as in concatenate: the sources in a row are the targets in a row.

        The others need all entries:

        - 'cut', as in a slice with a stride: the target holds some entries of the
          source, or others between them.
        - 'reversed', as in rev: the target reverses the source.
        - 'index', as in gather: one entry of the source is read.
        - 'stack', as in stack: each entry of the target is an array.
        - 'mixed', as in sort: entries depend on others along the axis.

      sources: axes of inputs, or numbers of entries: repetitions in a product, a constant in a sum.
      targets: axes of outputs, or numbers of entries that no output has.
      text: the operation, for errors.
    """

    kind: RelationKind
    sources: tuple[Place | int, ...]
    targets: tuple[Place | int, ...]
    text: str

    @property
    def may_lose_entries(self) -> bool:
        """True if entries may be removed from the sources and the targets alike."""
        return self.kind in ("product", "sum")

    @property
    def pair(self) -> tuple[Place, Place] | None:
        """Source and target if one axis becomes one axis, entry by entry."""
        if self.kind == "product" and len(self.sources) == len(self.targets) == 1:
            source, target = self.sources[0], self.targets[0]
            if isinstance(source, Place) and isinstance(target, Place):
                return source, target
        return None


class Sizes(Protocol):
    """The sizes of arrays of a program that has lost channels."""

    def shape(self, value: Value) -> tuple[int, ...]:
        """Returns the smaller shape of a value."""

    def count_below(self, value: Value, axis: int, end: int) -> int:
        """Counts the remaining entries among the first `end` along an axis."""


@dataclasses.dataclass(frozen=True)
class AxisRule:
    """Relates the axes of the inputs of a layout primitive to those of its outputs.

    Attributes:
      relate: returns the relations between the axes of an equation. Inputs and outputs without
        relations are indices and scalars.
      resize: `resize(equation, sizes)` returns the parameters of the equation that differ at
        smaller sizes; `None` if no parameter holds sizes.
      sources: `sources(equation, index)` returns the indices of the inputs whose entries an
        output holds; by default that of the first input.
      find_reduction: the name of the reduction that joins entries of mixed axes, `None` if there is
        none, 'unknown' if nothing follows from constants.
      fill: the constant that may take the place of entries of the sources, `None` if there is none.
      is_lookup: whether indices choose entries, as in an embedding.
      moves_window: whether the mixed axes are those of a window, as in an image.
    """

    relate: Callable[[Equation], list[Relation]]
    resize: Callable[[Equation, Sizes], EquationParams] | None = None
    sources: Callable[[Equation, int], Sequence[int]] = lambda equation, index: (0,)
    find_reduction: Callable[[Equation], str | None] = lambda equation: None
    fill: Callable[[Equation], float | None] = lambda equation: None
    is_lookup: bool = False
    moves_window: bool = False


def relate_same(source: tuple[int, int], target: tuple[int, int], text: str) -> Relation:
    """Returns the relation of an axis of an output that is an axis of an input."""
    return Relation("product", (Place(*source),), (Place(*target),), text)


def _transpose(equation: Equation) -> list[Relation]:
    order = equation.params["permutation"]
    return [relate_same((0, axis), (0, i), "a transposition") for i, axis in enumerate(order)]


def _squeeze(equation: Equation) -> list[Relation]:
    squeezed = equation.params["dimensions"]
    axes = [axis for axis in range(len(equation.inputs[0].shape)) if axis not in squeezed]
    return [relate_same((0, axis), (0, i), "a squeeze") for i, axis in enumerate(axes)]


def _broadcast(equation: Equation) -> list[Relation]:
    shapes = equation.inputs[0].shape, equation.outputs[0].shape
    return [
        relate_same((0, i), (0, axis), "a broadcast")
        for i, axis in enumerate(equation.params["broadcast_dimensions"])
        # An axis of one entry that is repeated is related to nothing.
        if shapes[0][i] == shapes[1][axis]
    ]


def _reshape(equation: Equation) -> list[Relation]:
    """Relates the shortest runs of axes with equal numbers of entries."""
    text = "a reshape that takes channels apart"
    (value, *_), (output,) = equation.inputs, equation.outputs
    order = equation.params["dimensions"] or range(len(value.shape))
    sources = [Place(0, axis) for axis in order if value.shape[axis] != 1]
    targets = [Place(0, axis) for axis, size in enumerate(output.shape) if size != 1]
    # Any runs of axes have equal numbers of entries, 0, so that the relation is open.
    if not value.size:
        return [Relation("mixed", tuple(sources), tuple(targets), text)]
    relations: list[Relation] = []
    queues, arrays = (sources, targets), (value, output)
    while sources and targets:
        runs: tuple[list[Place], list[Place]] = ([], [])
        sizes = [1, 1]
        while not runs[1] or sizes[0] != sizes[1]:
            shorter = int(sizes[1] < sizes[0])
            place = queues[shorter].pop(0)
            runs[shorter].append(place)
            sizes[shorter] *= arrays[shorter].shape[place.axis]
        relations.append(Relation("product", tuple(runs[0]), tuple(runs[1]), text))
    return relations


def _relate_parts(axis: int, joined: Value, parts: Sequence[Value], text: str) -> list[Relation]:
    """Returns the relations of parts of one array: a row along an axis, or layers of a stack."""
    parallel = [i for i in range(len(joined.shape)) if i != axis]
    relation, part_axes = Relation("stack", (), (Place(0, axis),), text), [*range(len(parallel))]
    if len(parts[0].shape) == len(joined.shape):
        places = tuple(Place(index, axis) for index in range(len(parts)))
        relation, part_axes = relation._replace(kind="sum", sources=places), parallel
    return [
        relation,
        *(
            relate_same((index, i), (0, target), text)
            for index in range(len(parts))
            for i, target in zip(part_axes, parallel, strict=True)
        ),
    ]


def _invert_relations(relations: Sequence[Relation]) -> list[Relation]:
    """Returns the relations of the inverse primitive: outputs become inputs."""
    kinds: dict[RelationKind, RelationKind] = {"stack": "index"}
    return [Relation(kinds.get(x.kind, x.kind), x.targets, x.sources, x.text) for x in relations]


def _join(name: str, text: str, equation: Equation) -> list[Relation]:
    """Relates the inputs, parts of the output along the axis that the parameter of a name gives."""
    (output,) = equation.outputs
    return _relate_parts(equation.params[name], output, equation.inputs, text)


def _take_apart(text: str, equation: Equation) -> list[Relation]:
    """Relates the outputs, parts of the input along an axis."""
    (value,), axis = equation.inputs, equation.params["axis"]
    return _invert_relations(_relate_parts(axis, value, equation.outputs, text))


def _tile(equation: Equation) -> list[Relation]:
    return [
        Relation("product", (times, Place(0, axis)), (Place(0, axis),), "a repetition")
        if times != 1
        else relate_same((0, axis), (0, axis), "a repetition")
        for axis, times in enumerate(equation.params["reps"])
    ]


def _slice(equation: Equation) -> list[Relation]:
    params, shape = equation.params, equation.inputs[0].shape
    strides = params["strides"] or (1,) * len(shape)
    bounds = zip(params["start_indices"], params["limit_indices"], strides, shape, strict=True)

    def relate(place: Place, start: int, end: int, stride: int, size: int) -> Relation:
        if stride != 1:
            return Relation("cut", (place,), (place,), "a slice with a stride")
        # The source is a row of three parts; the output is the middle one.
        parts = (start, place, size - end) if (start, end) != (0, size) else (place,)
        return Relation("sum" if len(parts) > 1 else "product", (place,), parts, "a slice")

    return [relate(Place(0, axis), *each) for axis, each in enumerate(bounds)]


_IN_ORDER = "an operation that needs all entries of the axis, in order"


def _relate_along(
    kind: RelationKind, axes: Callable[[Equation], Sequence[int]]
) -> Callable[..., list[Relation]]:
    """Returns the `relate` of a primitive that works along some axes of all inputs but scalars."""

    def relate(equation: Equation) -> list[Relation]:
        selected = axes(equation)
        return [
            relate_same((source, axis), (target, axis), _IN_ORDER)
            if axis not in selected and output.shape[axis] == size
            else Relation(kind, (Place(source, axis),), (Place(target, axis),), _IN_ORDER)
            for target, output in enumerate(equation.outputs)
            for source, value in enumerate(equation.inputs)
            for axis, size in enumerate(value.shape)
        ]

    return relate


def _pad(equation: Equation) -> list[Relation]:
    relations = []
    for axis, pads in enumerate(equation.params["padding_config"]):
        place, (low, high, interior) = Place(0, axis), map(int, pads)  # some are numpy's
        if (low, high, interior) == (0, 0, 0):
            relations.append(relate_same(place, place, "a pad"))
        elif interior:
            relations.append(Relation("cut", (place,), (place,), "a pad between entries"))
        else:
            # Negative pads remove entries of the row that the source and the pads make.
            row: tuple[Place | int, ...] = (max(low, 0), place, max(high, 0))
            parts: tuple[Place | int, ...] = (max(-low, 0), place, max(-high, 0))
            relations.append(Relation("sum", row, parts, "a pad"))
    return relations


def _list_windows(equation: Equation) -> list[int]:
    params = equation.params
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    return [
        axis
        for axis, pads in enumerate(params["padding"])
        if tuple(pads) != (0, 0) or any(params[name][axis] != 1 for name in names)
    ]


def _relate_update(
    equation: Equation, update_index: int, update_axes: Mapping[int, int]
) -> list[Relation]:
    """Returns the relations of an update, which replaces entries of the first input.

    Args:
      equation: the equation.
      update_index: index of the input that is the update.
      update_axes: {axis of the first input: axis of the update}, of axes that are covered if sizes
        are equal.
    """
    relations, update = [], equation.inputs[update_index]
    for axis, size in enumerate(equation.inputs[0].shape):
        place = Place(0, axis)
        text = f"an update of some entries along {_name_axis(equation, axis)}"
        sources = [Place(update_index, update_axes[axis])] if axis in update_axes else []
        is_covered = any(update.shape[source.axis] == size for source in sources)
        kind: RelationKind = "product" if is_covered else "mixed"
        relations += [
            relate_same(place, place, text),
            Relation(kind, tuple(sources), (place,), text),
        ]
    return relations


def _name_axis(equation: Equation, axis: int) -> str:
    return f"axis {axis} of an array of shape {equation.inputs[0].shape}"


_INDICES = "an axis of the indices of a lookup or an update"


def _relate_lookup(equation: Equation, source: int, target: int) -> Relation:
    """Relates an axis along which a slice is read at an index that is computed.

    A slice of all entries fits at index 0 alone, in a smaller model, too.
    """
    if equation.outputs[0].shape[target] == equation.inputs[0].shape[source]:
        return relate_same((0, source), (0, target), "a lookup")
    text = f"a lookup of some entries along {_name_axis(equation, source)}"
    return Relation("cut", (Place(0, source),), (Place(0, target),), text)


def _gather(equation: Equation) -> list[Relation]:
    spec = equation.params["dimension_numbers"]
    (operand, indices), (output,) = equation.inputs, equation.outputs
    removed = sorted({*spec.collapsed_slice_dims, *spec.operand_batching_dims})
    sliced = [axis for axis in range(len(operand.shape)) if axis not in removed]
    index_axes = [i for i in range(len(output.shape)) if i not in spec.offset_dims]
    places = tuple(Place(1, i) for i in range(len(indices.shape)))
    return [
        *(
            Relation("index", (Place(0, i),), (), f"a lookup along {_name_axis(equation, i)}")
            for i in removed
        ),
        *(_relate_lookup(equation, *pair) for pair in zip(sliced, spec.offset_dims, strict=True)),
        Relation("mixed", places, tuple(Place(0, i) for i in index_axes), _INDICES),
    ]


def _scatter(equation: Equation) -> list[Relation]:
    spec, (operand, indices, updates) = equation.params["dimension_numbers"], equation.inputs
    removed = {*spec.inserted_window_dims, *spec.operand_batching_dims}
    window_axes = [axis for axis in range(len(operand.shape)) if axis not in removed]
    # A window of all entries of an axis fits at index 0 alone, as a slice of a lookup does.
    update_axes = dict(zip(window_axes, spec.update_window_dims, strict=True))
    places = [Place(1, i) for i in range(len(indices.shape))]
    places += [Place(2, i) for i in range(len(updates.shape)) if i not in update_axes.values()]
    return [
        Relation("mixed", tuple(places), (), _INDICES),
        *_relate_update(equation, 2, update_axes),
    ]


# Parameters at smaller sizes.


def _resize_output(name: str, equation: Equation, sizes: Sizes) -> EquationParams:
    """Returns the shape of the output as the parameter of this name, and its sharding."""
    (output,), shape = equation.outputs, sizes.shape(equation.outputs[0])
    return {name: shape, "sharding": output.struct(shape).sharding}


def _resize_slice(equation: Equation, sizes: Sizes) -> EquationParams:
    (value,), params = equation.inputs, equation.params
    return {
        name: tuple(sizes.count_below(value, axis, end) for axis, end in enumerate(params[name]))
        for name in ("start_indices", "limit_indices")
    }


def _resize_pad(equation: Equation, sizes: Sizes) -> EquationParams:
    value, (output,) = equation.inputs[0], equation.outputs
    config = []
    for axis, (low, high, interior) in enumerate(equation.params["padding_config"]):
        small_low = sizes.count_below(output, axis, max(low, 0))
        small_low -= sizes.count_below(value, axis, max(-low, 0))
        high += sizes.shape(output)[axis] - output.shape[axis] - (small_low - low)
        high -= sizes.shape(value)[axis] - value.shape[axis]
        config.append((small_low, high, interior))
    return {"padding_config": tuple(config)}


def _resize_gather(equation: Equation, sizes: Sizes) -> EquationParams:
    shapes = equation.inputs[0].shape, sizes.shape(equation.inputs[0])
    sliced = zip(equation.params["slice_sizes"], *shapes, strict=True)
    return {"slice_sizes": tuple(small if size == full else size for size, full, small in sliced)}


def _may_be_empty(equation: Equation) -> bool:
    """Returns whether a window may hold none of the entries."""
    names = ("window_dimensions", "padding", "base_dilation", "window_dilation")
    return any(
        max(*pads, holes - 1) >= size or step > 1
        for size, pads, holes, step in zip(*(equation.params[name] for name in names), strict=True)
    )


# of the first input and the updates
_SCATTER_REDUCTIONS = {
    "scatter-add": "reduce_sum",
    "scatter-max": "reduce_max",
    "scatter-min": "reduce_min",
    "scatter-mul": "reduce_prod",
    "scatter-sub": "reduce_sum",
}


def _name_scatter_reduction(equation: Equation) -> str | None:
    if equation.name in _SCATTER_REDUCTIONS:
        return _SCATTER_REDUCTIONS[equation.name]
    # `.at[].apply` replaces entries by a function of these entries.
    return None if equation.params["update_jaxpr"] is None else "unknown"


_relate_along_axis = _relate_along("mixed", lambda x: [x.params["axis"]])
_relate_along_windows = _relate_along("mixed", _list_windows)
_CUMULATIVE = AxisRule(  # `cumlogsumexp` has no reduction
    _relate_along_axis, find_reduction=lambda x: x.name.replace("cum", "reduce_")
)
_SCATTERED = AxisRule(
    _scatter, sources=lambda equation, index: (0, 2), find_reduction=_name_scatter_reduction
)
_WINDOWED = AxisRule(
    _relate_along_windows,
    find_reduction=lambda x: "unknown" if _may_be_empty(x) else x.name.replace("window_", ""),
    moves_window=True,
)

LAYOUTS: dict[str, AxisRule] = {
    "transpose": AxisRule(_transpose),
    "squeeze": AxisRule(_squeeze),
    "broadcast_in_dim": AxisRule(_broadcast, functools.partial(_resize_output, "shape")),
    "reshape": AxisRule(_reshape, functools.partial(_resize_output, "new_sizes")),
    "concatenate": AxisRule(
        functools.partial(_join, "dimension", "a concatenation"),
        sources=lambda equation, index: range(len(equation.inputs)),
    ),
    "split": AxisRule(
        functools.partial(_take_apart, "a split"),
        lambda x, sizes: {"sizes": tuple(sizes.shape(y)[x.params["axis"]] for y in x.outputs)},
    ),
    "stack": AxisRule(
        functools.partial(_join, "axis", "a stack"),
        sources=lambda equation, index: range(len(equation.inputs)),
    ),
    "unstack": AxisRule(functools.partial(_take_apart, "a stack")),
    "tile": AxisRule(_tile),
    "slice": AxisRule(_slice, _resize_slice),
    "dynamic_slice": AxisRule(
        lambda x: [_relate_lookup(x, i, i) for i in range(len(x.inputs[0].shape))],
        lambda x, sizes: {"slice_sizes": sizes.shape(x.outputs[0])},
        is_lookup=True,
    ),
    "dynamic_update_slice": AxisRule(
        lambda x: _relate_update(x, 1, {i: i for i in range(len(x.inputs[0].shape))}),
        sources=lambda equation, index: (0, 1),
    ),
    "gather": AxisRule(_gather, _resize_gather, fill=read_gather_fill, is_lookup=True),
    "pad": AxisRule(_pad, _resize_pad, sources=lambda equation, index: range(len(equation.inputs))),
    "rev": AxisRule(_relate_along("reversed", lambda equation: equation.params["dimensions"])),
    **dict.fromkeys(("scatter", *_SCATTER_REDUCTIONS), _SCATTERED),
    "sort": AxisRule(
        _relate_along("mixed", lambda equation: [equation.params["dimension"]]),
        sources=lambda equation, index: (index,),
    ),
    "top_k": AxisRule(
        _relate_along_axis,
        sources=lambda equation, index: () if index else (0,),  # the others are indices
    ),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _CUMULATIVE),
    "reduce_window": AxisRule(  # by any function
        _relate_along_windows, sources=lambda equation, index: (), moves_window=True
    ),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _WINDOWED),
}


def is_lookup(equation: Equation) -> bool:
    """Returns whether an equation reads the entries of an array that indices choose."""
    return equation.name in LAYOUTS and LAYOUTS[equation.name].is_lookup


def is_move(equation: Equation) -> bool:
    """Returns whether an equation moves or repeats all entries of its only input."""
    if equation.name not in LAYOUTS or len(equation.inputs) != 1 or len(equation.outputs) != 1:
        return False
    return all(relation.kind == "product" for relation in LAYOUTS[equation.name].relate(equation))
