"""The graph of a model as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sparsity.core import extras
from sparsity.core.pictures import DARK, LIGHT, add_legend, label_rows, new_axes
from sparsity.core.trees import PyTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sparsity.graph.channels import Leaf
    from sparsity.graph.graph import Graph


class Row(NamedTuple):
    """What the table shows of a leaf.

    Attributes:
      leaf: path, shape and dtype.
      primitives: what reads it.
      contracting: the axes that its products contract.
      dense: multiply-adds of its products.
      left: those that are left by the masks.
      groups: (axis, number) of the channel groups that it belongs to.
    """

    leaf: Leaf
    primitives: tuple[str, ...]
    contracting: tuple[int, ...]
    dense: int
    left: int
    groups: tuple[tuple[int, int], ...]


def rows(graph: Graph, masks: PyTree | None = None) -> list[Row]:
    """What the table shows, in tree order."""
    density = graph.densities(masks)
    found = []
    for leaf in graph.leaves:
        uses = [use for use in graph.uses if use.path == leaf.path]
        axes = {axis for use in uses for axis in use.contracting}
        groups = [
            (axis, number)
            for number, group in enumerate(graph.groups)
            for path, axis in group.members
            if path == leaf.path
        ]
        dense = graph.macs_of(leaf.path)
        left = round(dense * density.get(leaf.path, 1))
        names = tuple(dict.fromkeys(use.primitive for use in uses))
        found.append(Row(leaf, names, tuple(sorted(axes)), dense, left, tuple(sorted(groups))))
    return found


def table(graph: Graph, masks: PyTree | None) -> str:
    """`Graph.table`."""
    costs = ("MACs", *(["left"] if masks is not None else []), "share")
    shown = extras.table(("leaf", "shape", "read by", "contracts"), costs)
    shown.add_column("axis: group")
    total = graph.macs()

    def add(name: str, texts: Sequence[str], dense: int, left: int, groups: str) -> None:
        macs = [f"{dense:,}", *([f"{left:,}"] if masks is not None else [])]
        shown.add_row(name, *texts, *macs, f"{dense / max(total, 1):.1%}", groups)

    found = rows(graph, masks)
    for row in found:
        shape = "x".join(map(str, row.leaf.shape)) or "scalar"
        by = ", ".join(_SHORT.get(name, name) for name in row.primitives) or "no product"
        axes = ", ".join(map(str, row.contracting))
        groups = ", ".join(f"{axis}: {number}" for axis, number in row.groups)
        add(row.leaf.name, (shape, by, axes), row.dense, row.left, groups)
    shown.add_section()
    if (others := total - sum(row.dense for row in found)) > 0:
        add("products of activations", ("", "", ""), others, others, "")
    add("dots and convolutions", ("", "", ""), total, graph.macs(masks), "")
    text = extras.as_text(shown)
    if graph.uncounted:
        names = [f"{name} {source}".rstrip() for name, source in graph.uncounted.items()]
        text += f"\n\nNot counted: {', '.join(names)}."
    return text


def plot(graph: Graph, masks: PyTree | None, ax: Axes | None) -> Axes:
    """`Graph.plot`."""
    found = [row for row in rows(graph, masks) if row.dense]
    if ax is None:
        (ax,) = new_axes(len(found))
    names, dense = [row.leaf.name for row in found], [row.dense for row in found]
    left = None if masks is None else [row.left for row in found]
    bars(ax, "multiply-adds", names, dense, left, graph.macs())
    return ax


def bars(
    ax: Axes,
    what: str,
    names: Sequence[str],
    dense: Sequence[int],
    left: Sequence[int] | None,
    total: int,
) -> None:
    """Draws a light bar for what each leaf costs, a dark one for what is left, and the shares."""
    position = np.arange(len(names))
    ax.barh(position, np.divide(dense, 1e6), color=LIGHT, label="dense")
    shares = [f"{x / max(total, 1):.1%}" for x in dense]
    if left is not None:
        ax.barh(position, np.divide(left, 1e6), color=DARK, label="left")
        pairs = zip(shares, left, strict=True)
        shares = [f"{share} to {x / max(total, 1):.1%}" for share, x in pairs]
    label_rows(ax, names, shares)
    ax.set_xlabel(f"million {what}")
    ax.locator_params(axis="x", nbins=5)
    add_legend(ax)


_SHORT = {
    "dot_general": "dot",
    "conv_general_dilated": "convolution",
    "gather": "lookup",
    "ragged_dot_general": "ragged dot",
}
