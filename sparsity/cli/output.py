"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence

from sparsity.core import extras

WIDTH = 200  # of tables that go to a file or to another program


def print_json(report: object) -> None:
    """Prints a report as JSON."""
    json.dump(report, sys.stdout, indent=2)
    print()


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], total: Sequence[str], *, text: int
) -> None:
    """Prints a table.

    Args:
      columns: what stands above them.
      rows: a cell for each column.
      total: the last row, set off.
      text: how many columns from the left are aligned to the left.
    """
    table = extras.load("rich.table", "cli").Table(box=extras.load("rich.box", "cli").SIMPLE)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*total, style="bold")
    width = None if sys.stdout.isatty() else WIDTH
    # Names of leaves are shown as they are: no markup, no emoji.
    console = extras.load("rich.console", "cli").Console(
        width=width, markup=False, emoji=False, highlight=False
    )
    console.print(table)


def shape_text(shape: Sequence[int]) -> str:
    """A shape for a table.

    Example:
      >>> shape_text((3, 4)), shape_text(())
      ('3x4', 'scalar')
    """
    return "x".join(map(str, shape)) or "scalar"


def bytes_text(count: int) -> str:
    """A number of bytes for a table.

    Example:
      >>> bytes_text(999), bytes_text(2_500_000)
      ('999 B', '2.50 MB')
    """
    if count < 1000:
        return f"{count} B"
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.2f} {' kMGT'[power]}B"
