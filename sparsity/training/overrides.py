"""Overrides of hooks, and the class attribute that they decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

_PACKAGE = __name__.partition(".")[0]
KeepsCount: TypeAlias = Literal["exact", "at most", "any"]


def check_overrides(cls: type) -> None:
    """Raises a TypeError for an override that a base class never calls, and names another hook.

    A class that also overrides one of the other hooks may call the unused one there. Classes of the
    library that derive from the base class may override the hook.
    """
    for index, base in enumerate(cls.__mro__):
        unused: Mapping[str, tuple[str, ...]] = vars(base).get("unused_hooks", {})
        ahead = [
            x
            for x in cls.__mro__[:index]
            if not (x.__module__.partition(".")[0] == _PACKAGE and issubclass(x, base))
        ]
        overrides = set().union(*map(vars, ahead))
        for hook in overrides & unused.keys():
            if overrides.isdisjoint(unused[hook]):
                raise TypeError(
                    f"{cls.__name__} overrides {hook}, which {base.__name__} never calls: override "
                    f"{' or '.join(unused[hook])}."
                )
