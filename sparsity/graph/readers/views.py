"""Views of parameters: arrays that hold entries of a parameter, along which of its axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from sparsity.core.trees import Path
from sparsity.programs.layout import Place, Relation
from sparsity.programs.program import Equation, Value


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
    factors: list[Factor] = []
    for place in relation.sources:
        factors += [Factor(None, place)] if isinstance(place, int) else view.factors[place.axis]
    return _split_factors([factor for factor in factors if factor.size != 1], sizes)


def _split_factors(factors: Sequence[Factor], sizes: Sequence[int]) -> list[list[Factor]] | None:
    """Splits factors in row-major order into axes; `None` where a cut falls within a factor."""
    queue, by_axis = [*factors], list[list[Factor]]()
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
