"""Statements: class attributes that say what the hooks of a class do."""

from __future__ import annotations

from collections.abc import Iterable


def is_stated(cls: type, attribute: str, hooks: Iterable[str]) -> bool:
    """Returns whether an attribute of a class says what the hooks of the class do.

    A class states an attribute for the hooks that it has, a mixin for those of the class that it is
    mixed into. A statement does not hold for the override of a subclass, or of another base of a
    subclass.

    Args:
      cls: the class of an object.
      attribute: name of the class attribute.
      hooks: names of the methods that the attribute describes.

    Example:
      >>> class Pruner:
      ...     keeps_count = "exact"
      ...     def select(self): ...
      >>> class Child(Pruner):
      ...     def select(self): ...
      >>> [is_stated(x, "keeps_count", ["select"]) for x in (Pruner, Child)]
      [True, False]
    """
    stating = _find_definer(cls, attribute)
    if stating is None:
        return False
    for hook in hooks:
        definers = (_find_definer(x, hook) for x in reversed(cls.__mro__) if stating in x.__mro__)
        if next(filter(None, definers), None) is not _find_definer(cls, hook):
            return False
    return True


def _find_definer(cls: type, name: str) -> type | None:
    """Returns the class whose attribute of this name a class has, `None` for no class."""
    return next((base for base in cls.__mro__ if name in vars(base)), None)
