"""Shared parts of bar charts: a row for each leaf, named on the left, with a text on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sparsity.core import extras
from sparsity.core.checks import find_missing_method

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LIGHT, DARK = "#A6CEE3", "#0072B2"  # before, after


def new_axes(num_rows: int, num_columns: int = 1) -> list[Axes]:
    """Makes matplotlib axes side by side that share their rows."""
    figsize = (3.5 + 3.5 * num_columns, 1.2 + 0.32 * max(num_rows, 1))
    _, axes = extras.load("matplotlib.pyplot", "summary").subplots(
        1, num_columns, figsize=figsize, layout="constrained", sharey=True, squeeze=False
    )
    return list(axes[0])


def pick_axes(ax: Axes | None, num_rows: int) -> Axes:
    """Returns the axes of a user, or new ones for `None`; raises a ValueError for others."""
    if ax is None:
        return new_axes(num_rows)[0]
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
