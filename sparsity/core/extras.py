"""Packages that only some functions need, and tables of text."""

from __future__ import annotations

import importlib
import io
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


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


def make_table(text_columns: Sequence[str], number_columns: Sequence[str]) -> Table:
    """Returns an empty table of rich: columns of texts, then columns of numbers."""
    table: Table = load("rich.table", "summary").Table(
        *text_columns, box=load("rich.box", "summary").SIMPLE
    )
    for column in number_columns:
        table.add_column(column, justify="right")
    return table


def as_text(table: object) -> str:
    """Renders a table of rich as text of several lines, without colours and controls."""
    console = load("rich.console", "summary").Console(
        file=io.StringIO(), width=1000, color_system=None, force_jupyter=False, markup=False
    )
    console.print(table)
    lines = console.file.getvalue().strip("\n").splitlines()
    return "\n".join(escape_controls(line.rstrip()) for line in lines)


def escape_controls(text: str) -> str:
    """Escapes the characters of a text that a terminal would obey.

    Example:
      >>> print(escape_controls("red \\x1b[31m"))
      red \\x1b[31m
    """
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)
