"""Optional packages, and what they write: tables, plots and files."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparsity.core.checks import find_missing_method

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
        file=io.StringIO(),
        width=1000,
        color_system=None,
        force_jupyter=False,
        markup=False,
        emoji=False,
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


if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIGHT, DARK = "#A6CEE3", "#0072B2"  # before, after


def pick_axes(ax: Axes | None, num_rows: int) -> Axes:
    """Returns the axes of a user, or new ones for `None`; raises a ValueError for others."""
    if ax is None:
        figsize, pyplot = (7.0, 1.2 + 0.32 * max(num_rows, 1)), load("matplotlib.pyplot", "summary")
        axes: Axes = pyplot.subplots(figsize=figsize, layout="constrained")[1]
        return axes
    if not _are_matplotlib_axes(ax):
        raise ValueError(f"ax must be matplotlib axes or None, got ax = {ax!r}.")
    return ax


def _are_matplotlib_axes(value: object) -> bool:
    """Returns whether a value has the methods that draw; `pyplot` lacks some of them."""
    return not find_missing_method(value, ("annotate", "barh", "set_xlabel", "set_yticks"))


def draw_bars(
    ax: Axes,
    quantity: str,
    names: Sequence[str],
    dense: Sequence[int],
    sparse: Sequence[int] | None,
    total: int,
) -> None:
    """Draws light bars for dense costs, dark bars for sparse costs, and the shares."""
    position = np.arange(len(names))
    ax.barh(position, np.divide(dense, 1e6), color=LIGHT, label="dense")
    shares = [f"{x / max(total, 1):.1%}" for x in dense]
    if sparse is not None:
        ax.barh(position, np.divide(sparse, 1e6), color=DARK, label="left")
        pairs = zip(shares, sparse, strict=True)
        shares = [f"{share} to {x / max(total, 1):.1%}" for share, x in pairs]
    label_rows(ax, names, shares)
    ax.set_xlabel(f"million {quantity}")
    ax.locator_params(axis="x", nbins=5)
    add_legend(ax)


def label_rows(ax: Axes, names: Sequence[str], texts: Sequence[str]) -> None:
    """Names the rows, from the first on top, and writes a text to the right of each."""
    for i, text in enumerate(texts):
        ax.annotate(text, (1.01, i), xycoords=("axes fraction", "data"), va="center")
    ax.set_yticks(range(len(names)), names)
    if not ax.yaxis_inverted():  # axes that share their rows turn together
        ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)


def add_legend(ax: Axes) -> None:
    """Adds a legend above the bars."""
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


@contextlib.contextmanager
def reading(path: Path, remedy: str = "save it again") -> Iterator[None]:
    """Turns any exception of a parser into a ValueError that names the file and a remedy."""
    try:
        yield
    except (ImportError, OSError):
        raise
    except Exception as error:  # damaged bytes reach any line of a parser
        # TensorStore appends its arguments, many lines.
        reason = str(error).partition(" [tensorstore_spec=")[0].rstrip(".") or type(error).__name__
        raise ValueError(f"{path} cannot be read: {reason}. If it is damaged, {remedy}.") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns any error of a writer, such as a full disk, into an OSError that names the file."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # libraries have errors of their own for a full disk
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise OSError(f"{path} cannot be written: {reason}. Nothing there has changed.") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to; moves the file there to `path` if the block raises nothing.

    Raises:
      OSError: nothing can be written there; the message names `path`.
    """
    with writing(path), temporary_folder(path) as folder:
        yield folder / "new"
        os.replace(folder / "new", path)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Yields a new hidden folder next to a path, and removes it."""
    with tempfile.TemporaryDirectory(prefix=".sparsity-", dir=path.absolute().parent) as folder:
        yield Path(folder)
