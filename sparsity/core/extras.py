"""Packages that only some functions need, and tables of text."""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Sequence


def load(module: str, extra: str) -> types.ModuleType:
    """Imports a module of a package that an extra of this one installs.

    Args:
      module: name of the module, with dots.
      extra: name of the extra that installs its package.

    Returns:
      The module.

    Raises:
      ImportError: the module is missing; the message has the command that installs it. Errors from
        inside an installed package, such as a missing dependency, pass unchanged.

    Example:
      >>> load("json.decoder", "config").__name__
      'json.decoder'
      >>> load("no_package.of_this.name", "config")
      Traceback (most recent call last):
      ImportError: This needs no_package: pip install 'jax-sparsity[config]' (in a checkout: ...
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Another name is an import that fails inside an installed package.
        if not error.name or not f"{module}.".startswith(f"{error.name}."):
            raise
        package = module.partition(".")[0]
        command = f"pip install 'jax-sparsity[{extra}]' (in a checkout: '.[{extra}]')"
        message = f"This needs {package}: {command}"
        raise ImportError(message, name=error.name) from error


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text: columns of texts to the left, of numbers to the right."""

    columns: list[str]
    is_number: list[bool]
    rows: list[tuple[str, ...] | None] = dataclasses.field(default_factory=list)  # `None`: a rule

    def add_column(self, name: str) -> None:
        """Adds a column of texts."""
        self.columns.append(name)
        self.is_number.append(False)

    def add_row(self, *cells: str) -> None:
        """Adds a row, a cell for each column."""
        self.rows.append(cells)

    def add_section(self) -> None:
        """Sets off the rows that follow by a rule."""
        self.rows.append(None)


def make_table(text_columns: Sequence[str], number_columns: Sequence[str]) -> Table:
    """Returns an empty table: columns of texts, then columns of numbers."""
    is_number = [False] * len(text_columns) + [True] * len(number_columns)
    return Table([*text_columns, *number_columns], is_number)


def as_text(table: Table) -> str:
    """Renders a table as text of several lines, with the controls of a terminal escaped.

    Example:
      >>> table = make_table(["name"], ["size"])
      >>> table.add_row("kernel", "8")
      >>> print(as_text(table))
      name    size
      ------  ----
      kernel     8
    """
    rows = [
        [escape_controls(cell) for cell in row or ()] for row in (table.columns, None, *table.rows)
    ]
    widths = [max(map(len, cells)) for cells in zip(*filter(None, rows), strict=True)]
    lines = []
    for row in rows:
        cells = zip(row or ["-" * width for width in widths], widths, table.is_number, strict=True)
        aligned = [text.rjust(n) if is_number else text.ljust(n) for text, n, is_number in cells]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def escape_controls(text: str) -> str:
    """Escapes the characters of a text that a terminal would obey.

    Example:
      >>> print(escape_controls("red \\x1b[31m"))
      red \\x1b[31m
    """
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)
