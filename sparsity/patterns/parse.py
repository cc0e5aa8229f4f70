"""Patterns as strings of configurations: a name, then the numbers that its function takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import NamedTuple

from sparsity.core.checks import check_function, check_kind
from sparsity.core.names import suggest
from sparsity.patterns.base import SparsityType, Unstructured
from sparsity.patterns.blocks import Block, Channel, FanIn
from sparsity.patterns.nm import N_COLON_M, NByM

_STRING = re.compile(r"(.*?)(?:_(\s*-?\d{1,18}\s*(?:,\s*-?\d{1,18}\s*)*)?)?", re.DOTALL)


class _Form(NamedTuple):
    """Function from the numbers of a string to the pattern, and examples of strings."""

    make: Callable[..., SparsityType]
    examples: str


_FORMS = {
    "unstructured": _Form(Unstructured, "'unstructured'"),
    "nm": _Form(NByM, "'nm_2,4', 'nm_2,4,-2' (with the axis), '2:4'"),
    "block": _Form(lambda rows, columns: Block((rows, columns)), "'block_4,4'"),
    "channel": _Form(lambda axis: Channel(axis), "'channel_-1'"),
    "fanin": _Form(
        lambda group, *axes: FanIn(group, axes) if axes else FanIn(group),
        "'fanin_16' or 'fanin_16,-2' (with one or more axes)",
    ),
}


def register_pattern(name: str, pattern: Callable[..., SparsityType]) -> None:
    """Registers a pattern for strings such as `name_1,2`, by which configurations name it.

    Args:
      name: the word before the numbers.
      pattern: the class of the pattern, or a function; called with the numbers of the string.

    Raises:
      ValueError: another pattern has the name, or no string could have it.

    Example:
      >>> register_pattern("rectangle", lambda rows, columns: Block((rows, columns)))
      >>> parse_sparsity_type("rectangle_2,8")
      Block(block_shape=(2, 8), use_avg_pooling=True)
    """
    check_function("pattern", pattern, "the numbers of a string, such as the class of a pattern,")
    if not isinstance(name, str) or not name or _split_name(name) != (name, []):
        raise ValueError(f"name must be text that does not end in numbers, got name = {name!r}.")
    arguments = ",".join(inspect.signature(pattern).parameters)
    form = _Form(pattern, repr(f"{name}_{arguments}" if arguments else name))
    if _FORMS.get(name, form) != form:
        raise ValueError(f"The name {name!r} is taken by {_FORMS[name].make!r}; choose another.")
    _FORMS[name] = form


def parse_sparsity_type(text: str) -> SparsityType:
    """Reads a pattern from a configuration string.

    Args:
      text: 'unstructured', 'nm_n,m', 'nm_n,m,axis', 'n:m', 'block_h,w', 'channel_axis',
        'fanin_group' or 'fanin_group,axis' with one or more axes, or a string with a name of
        `register_pattern`.

    Raises:
      ValueError: `text` is no string or none of these, or its numbers are invalid for the pattern.

    Example:
      >>> parse_sparsity_type("nm_2,4,-2")
      NByM(n=2, m=4, axis=-2)
    """
    check_kind("text", text, str, "text such as '2:4'")
    name, numbers = _split_name(text)
    if name in _FORMS:
        make = _FORMS[name].make
        try:
            inspect.signature(make).bind(*numbers)
        except TypeError:
            problem = "has too many numbers or too few."
        else:
            pattern = make(*numbers)
            label = f"the pattern {name!r} of register_pattern"
            check_kind(label, pattern, SparsityType, "a pattern")
            return pattern
    else:
        problem = f"is not known. {suggest(name, _FORMS)}"
    *examples, last = (form.examples for form in _FORMS.values())
    raise ValueError(f"Sparsity type {text!r} {problem} Use {', '.join(examples)}, {last}.")


def _split_name(text: str) -> tuple[str, list[int]]:
    """Returns the name in a string and its numbers."""
    if colon_match := N_COLON_M.fullmatch(text):
        return "nm", [int(colon_match[1]), int(colon_match[2])]
    match = _STRING.fullmatch(text.strip())
    assert match is not None  # its first group takes any text
    return match[1], [int(number) for number in (match[2] or "").split(",") if number]
