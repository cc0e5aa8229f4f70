"""The constants that arrays hold, where channels are removed and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from sparsity.programs.axes import AxisIndex, Variable
from sparsity.programs.entrywise import is_same

# An axis, and the variable that loses entries.
RemovedEntry: TypeAlias = tuple[AxisIndex, Variable]


class Constants:
    """The constants that an array holds.

    Attributes:
      at: constants at removed entries, by place.
      everywhere: the constant that all entries are, `None` if they differ.
      may_be_nan: entries may be NaN in place of the constants, as where a lookup is out of range.
    """

    def __init__(
        self,
        at: Mapping[RemovedEntry, float | None] | None = None,
        everywhere: float | None = None,
        may_be_nan: bool = False,
    ):
        self.at = {entry: c for entry, c in (at or {}).items() if c is not None}
        self.everywhere, self.may_be_nan = everywhere, may_be_nan

    def __getitem__(self, entry: RemovedEntry) -> float | None:
        return self.at.get(entry, self.everywhere)

    def renumber_axes(self, renumber: Callable[[int], int | None]) -> Constants:
        """Returns the constants with other indices of axes, `None` for an axis that is gone."""
        renumbered = ((renumber(i), v, c) for (i, v), c in self.at.items())
        at = {(i, v): c for i, v, c in renumbered if i is not None}
        return Constants(at, self.everywhere, self.may_be_nan)

    def meet(self, other: Constants) -> Constants:
        """Returns the constants that both have."""
        # Either side may state an entry that the other has only by `everywhere`.
        at = {entry: c for entry, c in self.at.items() if is_same(other[entry], c)}
        at |= {entry: c for entry, c in other.at.items() if is_same(self[entry], c)}
        everywhere = self.everywhere if is_same(self.everywhere, other.everywhere) else None
        return Constants(at, everywhere, self.may_be_nan or other.may_be_nan)

    def with_nan(self) -> Constants:
        """Returns the constants of an array that may be NaN in their place."""
        return Constants(self.at, self.everywhere, may_be_nan=True)

    # A loop ends once its facts stay equal. Texts are compared because `nan == nan` is False. Facts
    # are values of dicts, never keys, and need no hash.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and repr(self._key()) == repr(other._key())

    def _key(self) -> tuple[object, ...]:
        at = sorted((i, id(v), c) for (i, v), c in self.at.items())
        return self.everywhere, self.may_be_nan, at
