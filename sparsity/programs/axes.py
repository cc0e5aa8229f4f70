"""Axes that are bound together: unification of axes that reshapes, splits and joins take apart.

Every axis of every array in a program is an `Axis`. An operation that runs along two axes in step
makes the axes one (`unify`). By a reshape an axis is a product of others, by a concatenation a sum;
a split or a slice takes an axis apart in the same way. A variable is an axis that no operation
takes apart: an index set of channels that are removed together. An operation that depends on all
entries of a variable, or on their order, pins the variable, with a reason.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import is_traced
from sparsity.core.trees import PyTree
from sparsity.programs.program import Equation

Join: TypeAlias = Literal["product", "sum"]
_MOST_SHIFTS = 64  # parts into which an axis that meets itself shifted is cut, before it is pinned


class Reason(NamedTuple):
    """A reason why an axis cannot lose entries.

    Attributes:
      equation: the equation that needs all entries, `None` if no equation does.
      text: the reason in words.
      kind: without an equation: 'input', 'output', 'state', 'unread', or 'axis' for entries that
        cannot be told apart; with an equation 'space' for the axes of a window, else ''.
    """

    equation: Equation | None
    text: str
    kind: str = ""

    def with_detail(self, detail: str) -> Reason:
        """Returns the reason with more words."""
        return self._replace(text=f"{self.text}: {detail}")


@dataclasses.dataclass(eq=False, slots=True)
class Axis:
    """An axis: a variable, a product of axes (row-major), or a sum of them (one after the other).

    Attributes:
      size: number of entries.
      join: the relation of the axis to its parts; `None` for a variable.
      parts: the axes that make up this axis.
      pin: why a variable cannot lose entries, `None` if it can.
    """

    size: int
    join: Join | None = None
    parts: Sequence[Axis] = ()
    pin: Reason | None = None
    # Union-find: the axis that this one was merged into
    _same: Axis | None = dataclasses.field(default=None, init=False)

    @property
    def root(self) -> Axis:
        """Representative of all axes that were unified with this axis."""
        axis = self
        while axis._same is not None:
            # Path halving keeps chains of merged axes short.
            if axis._same._same is not None:
                axis._same = axis._same._same
            axis = axis._same
        return axis

    def merge_into(self, other: Axis) -> None:
        """Merges this root into another root, with which it is unified."""
        if self is not other:
            self._same = other

    def split_variable(self, join: Join, sizes: Iterable[int]) -> list[Variable]:
        """Splits a variable into new variables, which inherit its pin, and returns them."""
        parts = [Axis(size, pin=self.pin) for size in sizes]
        self.join, self.parts, self.pin = join, parts, None
        return parts


Variable: TypeAlias = Axis  # an axis whose root has no parts
AxisIndex: TypeAlias = int  # the place of an axis among those of an array

# {variable: indices that stay}, with a row for each layer of a scan if layers keep different ones.
KeptIndices: TypeAlias = Mapping[Variable, np.ndarray]


def list_variables(axis: Axis) -> list[Variable]:
    """Returns the variables that make up an axis, in order."""
    root = axis.root
    if root.join is None:
        return [root]
    return [variable for part in root.parts for variable in list_variables(part)]


def pin(axis: Axis, reason: Reason) -> None:
    """Pins the variables of an axis for a reason; earlier reasons stay."""
    for variable in list_variables(axis):
        if variable.pin is None:
            variable.pin = reason


def join_axes(join: Join, axes: Iterable[Axis]) -> Axis:
    """Returns the product of axes, all combinations of their entries, or the sum, one by one."""
    parts = [part for axis in axes for part in _list_parts(join, axis)]
    if len(parts) == 1:
        return parts[0]
    size = (math.prod if join == "product" else sum)(part.size for part in parts)
    return Axis(size, join, parts)


def unify(one: Axis, other: Axis, reason: Reason) -> None:
    """Unifies two axes, or pins both with the reason where their parts do not fit.

    An axis of size 1 that is broadcast along a longer axis is ignored.
    """
    a, b = one.root, other.root
    if a is b or 1 in (a.size, b.size):
        return
    if a.size == b.size and None in (a.join, b.join):
        _bind_variable(*((b, a) if a.join else (a, b)), reason)
    elif a.size == b.size and _unify_parts(a, b, reason):
        a.root.merge_into(b.root)
    else:
        for axis in (a, b):
            pin(axis, reason.with_detail("a ragged reshape or join"))


def label_entries(
    axis: Axis, variable: Variable, sizes: Mapping[Variable, int] = types.MappingProxyType({})
) -> np.ndarray | None:
    """Returns int[size]: for each entry of an axis the entry of a variable, -1 if there is none.

    Returns `None` where the axis runs over pairs of entries of the variable. `sizes` are sizes of
    variables in a smaller model.
    """
    root = axis.root
    size = sizes.get(root, root.size)
    if root is variable:
        return np.arange(size)
    if root.join is None:
        return np.full(size, -1)
    labels = [label_entries(part, variable, sizes) for part in root.parts]
    if any(x is None for x in labels):
        return None
    parts = [x for x in labels if x is not None]
    if root.join == "sum":
        return np.concatenate(parts)
    involved = [i for i, x in enumerate(parts) if (x >= 0).any()]
    if len(involved) > 1:
        return None
    index, lengths = involved[0] if involved else 0, [len(x) for x in parts]
    outer_size, inner_size = math.prod(lengths[:index]), math.prod(lengths[index + 1 :])
    # Row-major: each label repeats for all inner entries, and the sequence for all outer ones.
    return np.tile(np.repeat(parts[index], inner_size), outer_size)


def find_kept_indices(axis: Axis, kept_indices: KeptIndices) -> np.ndarray | None:
    """Returns the entries of an axis that stay, in order, `None` for all.

    [layers, entries] where the indices of a variable have a row for each layer.
    """
    root = axis.root
    if root.join is None:
        return kept_indices.get(root)
    parts = [find_kept_indices(part, kept_indices) for part in root.parts]
    if all(part is None for part in parts):
        return None
    sizes = [part.root.size for part in root.parts]
    indices = [np.arange(n) if x is None else x for x, n in zip(parts, sizes, strict=True)]
    layers = max((x.shape[:-1] for x in indices), key=len)
    indices = [
        x if x.shape[:-1] == layers else np.broadcast_to(x, (*layers, len(x))) for x in indices
    ]
    if root.join == "sum":
        starts = np.cumsum([0, *sizes[:-1]])
        shifted = [x + start for x, start in zip(indices, starts, strict=True)]
        # Inside a scan that runs, the row of its layer is traced.
        return (jnp if any(map(is_traced, indices)) else np).concatenate(shifted, axis=-1)
    # Row-major indices of all combinations of kept entries, factor by factor
    index = np.zeros((*layers, 1), int)
    for x, n in zip(indices, sizes, strict=True):
        index = (index[..., None] * n + x[..., None, :]).reshape(*layers, -1)
    return index


def count_entries(axis: Axis, sizes: Mapping[Variable, PyTree]) -> PyTree:
    """Counts the entries of an axis, at smaller sizes of some variables."""
    root = axis.root
    if not root.parts:
        return sizes.get(root, root.size)
    combine = operator.add if root.join == "sum" else operator.mul
    return functools.reduce(combine, [count_entries(part, sizes) for part in root.parts])


def _list_parts(join: Join, axis: Axis) -> list[Axis]:
    """Returns the factors of an axis that are longer than 1, or the terms that are not empty."""
    root = axis.root
    if root.join == join:
        return [x for part in root.parts for x in _list_parts(join, part)]
    # A factor of 1 and a term of 0 entries change nothing.
    return [root] if root.size != (join == "product") else []


def _bind_variable(variable: Variable, axis: Axis, reason: Reason) -> None:
    """Unifies a variable with another axis."""
    if axis.join and any(x is variable for x in list_variables(axis)):
        pin(axis, reason.with_detail("an axis that is a part of itself"))
        return
    # Pins of a merged axis are not read any more: the axis takes over the pin.
    pinned = variable.pin
    variable.merge_into(axis)
    if pinned is not None:
        pin(axis, pinned)


def _unify_parts(one: Axis, other: Axis, reason: Reason) -> bool:
    """Unifies the parts of two axes of one size; returns whether the parts fit."""
    if one.join == other.join:
        return one.join is not None and _unify_like_parts(one.join, one, other, reason)
    return _unify_mixed_parts(*((one, other) if one.join == "sum" else (other, one)), reason)


def _unify_like_parts(join: Join, one: Axis, other: Axis, reason: Reason) -> bool:
    """Unifies parts of axes of one join, from the first on; cuts the larger where sizes differ."""
    parts, other_parts = (deque(_list_parts(join, axis)) for axis in (one, other))
    # Each cut ends at an end of a part, unless an axis meets itself shifted: cuts lead to cuts.
    num_cuts, most_cuts = 0, len(parts) + len(other_parts) + _MOST_SHIFTS
    while parts and other_parts:
        a, b = parts.popleft().root, other_parts.popleft().root
        if join in (a.join, b.join):  # taken apart meanwhile
            parts.extendleft(reversed(_list_parts(join, a)))
            other_parts.extendleft(reversed(_list_parts(join, b)))
        elif a.size == b.size:
            unify(a, b, reason)
        else:
            queues = (parts, other_parts) if a.size > b.size else (other_parts, parts)
            large, small = (a, b) if a.size > b.size else (b, a)
            pieces = _split_off(join, large, small.size, reason)
            num_cuts += 1
            if pieces is None or num_cuts > most_cuts:
                return False
            queues[0].extendleft(reversed(pieces))
            # The first piece has its size: both meet in the next round.
            queues[1].appendleft(small)
    return not parts and not other_parts


def _split_off(join: Join, large: Axis, size: int, reason: Reason) -> list[Axis] | None:
    """Returns a first part of this size, and the remainder; `None` if there is no such cut."""
    if large.join is None and join == "sum":
        return large.split_variable(join, (size, large.size - size))
    if join == "product":
        if large.join or not size or large.size % size:
            return None
        return large.split_variable(join, (size, large.size // size))
    return _cut_product(large, (size, large.size - size), reason)


def _unify_mixed_parts(terms: Axis, factors: Axis, reason: Reason) -> bool:
    """Unifies a stack with parts in a row, (3, D) with D + D + D, which lose equal entries."""
    rows = _list_parts("sum", terms)
    pieces = _cut_product(factors, [row.size for row in rows], reason)
    for row, piece in zip(rows, pieces or (), strict=False):
        unify(row, piece, reason)
    return pieces is not None


def _cut_product(axis: Axis, sizes: Sequence[int], reason: Reason) -> list[Axis] | None:
    """Returns the parts of a product that follow one another, cut along the slowest factor.

    `None` if a cut is within an entry of that factor.
    """
    slowest, *faster = _list_parts("product", axis)
    inner = join_axes("product", faster)
    if any(size % inner.size for size in sizes):
        return None
    pieces = [Axis(size // inner.size) for size in sizes]
    unify(slowest, join_axes("sum", pieces), reason)
    return [join_axes("product", (piece, inner)) for piece in pieces]
