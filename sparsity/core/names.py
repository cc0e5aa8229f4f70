"""Names that users write: keys for leaves of a tree, and registries by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias, TypeVar

from sparsity.core.trees import join_names

T = TypeVar("T")
_NUMBER = re.compile(r"(?:^|[/._])\d+(?=[/._]|$)")  # between marks of a path
Key: TypeAlias = str | tuple[str, ...] | re.Pattern[str]  # names leaves; see `matches`
# Values by key. A type checker rejects a dict of strings where a mapping of `Key` is meant.
Named: TypeAlias = (
    Mapping[str, T] | Mapping[tuple[str, ...], T] | Mapping[re.Pattern[str], T] | Mapping[Key, T]
)


def name_blocks(paths: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """Returns the name of the block of each parameter: its path up to a number.

    The number is the first in which the paths differ: names of the whole model may have numbers.

    Example:
      >>> names = [f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("up", "down")]
      >>> [*name_blocks((name,) for name in names).values()]
      ['model.layers.0', 'model.layers.0', 'model.layers.1', 'model.layers.1']
      >>> [*name_blocks([("Net_0", f"Layer_{i}", "kernel") for i in range(2)]).values()]
      ['Net_0/Layer_0', 'Net_0/Layer_1']
    """
    prefixes = {}
    for path in paths:
        name = join_names(path)
        ends = [match.end() for match in _NUMBER.finditer(name)]
        prefixes[path] = [name[:end] for end in ends] or [name]
    level, deepest = 0, max(map(len, prefixes.values()), default=1) - 1
    while level < deepest and len({x[min(level, len(x) - 1)] for x in prefixes.values()}) < 2:
        level += 1
    return {path: x[min(level, len(x) - 1)] for path, x in prefixes.items()}


def best_key(keys: Iterable[Key], name: str) -> Key | None:
    """Returns the key that names `name`: one that equals it, else the first that matches it.

    Example:
      >>> best_key(["conv.*", "conv1/kernel"], "conv1/kernel")
      'conv1/kernel'
    """
    matching = [key for key in keys if matches(key, name)]
    exact = (
        key for key in matching if not isinstance(key, re.Pattern) and _format_key(key) == name
    )
    return next(exact, matching[0] if matching else None)


def matches(key: Key, name: str) -> bool:
    """Returns whether a key names a path.

    Args:
      key: a path as a tuple, the path joined by '/', a regular expression that matches the whole
        joined path, or a compiled pattern, which is searched in it.
      name: the path, joined by '/'.
    """
    if isinstance(key, re.Pattern):
        return isinstance(key.pattern, str) and key.search(name) is not None
    return _format_key(key) == name or (isinstance(key, str) and _fullmatch(key, name))


def explain_syntax(key: object) -> str:
    """Returns a sentence that says why a text is no regular expression, "" for any other key.

    Example:
      >>> explain_syntax("*/kernel")
      'It is no regular expression: nothing to repeat at position 0. '
    """
    if not isinstance(key, str):
        return ""
    try:
        re.compile(key)
    except (re.error, OverflowError, RecursionError) as error:
        return f"It is no regular expression: {error}. "
    return ""


def suggest(key: object, names: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Returns the end of an error about an unknown name or key: the nearest name, and all names.

    Args:
      key: the unknown name, or a key without a match.
      names: the known names.
      cutoff: similarity of the nearest name, in [0, 1], from which on the text says the name.

    Example:
      >>> suggest("ridgl", ["magnitude", "rigl"])
      "Did you mean 'rigl'? Known: magnitude, rigl."
    """
    names = list(names)
    lower = {name.lower(): name for name in names}
    closest = difflib.get_close_matches(_format_key(key).lower(), lower, n=1, cutoff=cutoff)
    question = f"Did you mean {lower[closest[0]]!r}? " if closest else ""
    return question + (f"Known: {', '.join(names)}." if names else "There are none.")


class Registry(dict[str, T]):
    """Entries by name, in the order of registration.

    Example:
      >>> shapes = Registry("shape", {"circle": 1})
      >>> shapes.find("circel")
      Traceback (most recent call last):
      ValueError: shape: 'circel' is not known. Did you mean 'circle'? Known: circle.
    """

    def __init__(self, role: str, entries: dict[str, T] | None = None) -> None:
        super().__init__(entries or {})
        self.role = role

    def find(self, name: object) -> T:
        """Returns the entry of a name; a ValueError lists the names and the nearest one."""
        if not isinstance(name, str) or name not in self:
            raise ValueError(f"{self.role}: {name!r} is not known. {suggest(name, self)}")
        return self[name]

    def add(self, name: str, entry: T) -> None:
        """Registers `entry`; raises a ValueError unless the name is text of no other entry."""
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be text for the key {self.role}, got name = {name!r}.")
        if name in self and self[name] is not entry:
            registered = getattr(self[name], "__name__", repr(self[name]))
            raise ValueError(f"The name {name!r} is taken by {registered}.")
        self[name] = entry


def _format_key(key: object) -> str:
    """Returns the joined path, or the text of a pattern."""
    if isinstance(key, tuple):
        return "/".join(map(str, key)) or "params"
    return str(getattr(key, "pattern", key))


def _fullmatch(key: str, name: str) -> bool:
    try:
        return re.fullmatch(key, name) is not None
    except (re.error, OverflowError, RecursionError):  # a path that is no regular expression
        return False
