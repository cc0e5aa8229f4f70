"""Prints tables for people and JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]  # an object of JSON


def print_json(report: object) -> None:
    """Prints a report as JSON, with null for infinities and NaN, which JSON does not have."""
    finite = json.loads(json.dumps(report), parse_constant=lambda name: None)
    json.dump(finite, sys.stdout, indent=2)
    print()


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    total: Sequence[str],
    *,
    num_text_columns: int,
) -> None:
    """Prints a table.

    Args:
      columns: headings.
      rows: a cell for each column.
      total: the last row, set off by a rule.
      num_text_columns: number of columns, from the first, that are aligned to the left.
    """
    lines = [[escape_controls(cell) for cell in row] for row in (columns, *rows, total)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    rule = ["-" * width for width in widths]
    for line in (lines[0], rule, *lines[1:-1], rule, lines[-1]):
        cells = zip(line, widths, strict=True)
        aligned = [
            cell.ljust(n) if i < num_text_columns else cell.rjust(n)
            for i, (cell, n) in enumerate(cells)
        ]
        print("  ".join(aligned).rstrip())


def escape_controls(cell: str) -> str:
    """Escapes the characters of a text that a terminal would obey.

    Example:
      >>> print(escape_controls("red \\x1b[31m"))
      red \\x1b[31m
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cell)


def format_bytes(count: int | None) -> str:
    """Returns a number of bytes as text for a table, '-' for an unknown one.

    Example:
      >>> format_bytes(999), format_bytes(2_500_000), format_bytes(None)
      ('999 B', '2.50 MB', '-')
    """
    if count is None:
        return "-"
    if count < 1000:
        return f"{count} B"
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.2f} {' kMGT'[power]}B"
