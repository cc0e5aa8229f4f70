"""Reads patterns from the strings of configurations."""

from __future__ import annotations

import re

from sparsity.core.names import suggest
from sparsity.patterns.base import SparsityType, Unstructured
from sparsity.patterns.blocks import Block, Channel
from sparsity.patterns.fan_in import FanIn
from sparsity.patterns.nm import COLON, NByM

_NUMBERS = r"\s*-?\d+\s*(,\s*-?\d+\s*)*"


def parse_sparsity_type(text: str) -> SparsityType:
    """Reads a pattern from a configuration string.

    Args:
      text: 'unstructured', 'nm_n,m', 'nm_n,m,axis', 'n:m', 'block_h,w', 'channel_axis',
        'fanin_group' or 'fanin_group,axis' with one or more axes.

    Raises:
      ValueError: the string is none of these, or its numbers are invalid for the pattern.

    Example:
      >>> parse_sparsity_type("nm_2,4,-2")
      NByM(n=2, m=4, axis=-2)
    """
    kind, _, options = text.strip().partition("_")
    if colon := COLON.fullmatch(text):
        kind, options = "nm", f"{colon[1]},{colon[2]}"
    numbers = [int(part) for part in options.split(",")] if re.fullmatch(_NUMBERS, options) else []
    match kind, numbers:
        case "unstructured", [] if not options:
            return Unstructured()
        case "nm", [n, m]:
            return NByM(n, m)
        case "nm", [n, m, axis]:
            return NByM(n, m, axis)
        case "block", [rows, columns]:
            return Block((rows, columns))
        case "channel", [axis]:
            return Channel(axis)
        case "fanin", [group]:
            return FanIn(group)
        case "fanin", [group, *axes]:
            return FanIn(group, tuple(axes))
    kinds = suggest(kind, ["unstructured", "nm", "block", "channel", "fanin"])
    raise ValueError(
        f"Sparsity type {text!r} is not known. {kinds} Use "
        "  'unstructured', 'nm_2,4', 'nm_2,4,-2' (with the axis), '2:4', 'block_4,4', "
        "'channel_-1', 'fanin_16' or 'fanin_16,-2' (with one or more axes)."
    )
