"""The graph of a model as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sparsity.core import extras
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
    shown = extras.load("rich.table", "summary").Table(
        "leaf", "shape", "read by", "contracts", box=extras.load("rich.box", "summary").SIMPLE
    )
    for column in ("MACs", *(["left"] if masks is not None else []), "share"):
        shown.add_column(column, justify="right")
    shown.add_column("axis: group")
    total = graph.macs()

    def add(name: str, texts: Sequence[str], dense: int, left: int, groups: str) -> None:
        costs = [f"{dense:,}", *([f"{left:,}"] if masks is not None else [])]
        shown.add_row(name, *texts, *costs, f"{dense / max(total, 1):.1%}", groups)

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
    return extras.as_text(shown)


def plot(graph: Graph, masks: PyTree | None, ax: Axes | None) -> Axes:
    """`Graph.plot`."""
    found = [row for row in rows(graph, masks) if row.dense]
    if ax is None:
        ax = extras.load("matplotlib.pyplot", "summary").subplots(
            figsize=(7, 1.2 + 0.32 * max(len(found), 1)), layout="constrained"
        )[1]
    position = np.arange(len(found))
    million = [(row.dense / 1e6, row.left / 1e6) for row in found]
    ax.barh(position, [dense for dense, _ in million], color="#A6CEE3", label="dense")
    if masks is not None:
        ax.barh(position, [left for _, left in million], color="#0072B2", label="left")
    total = max(graph.macs(), 1)
    for i, row in enumerate(found):
        share = f"{row.dense / total:.1%}"
        text = share if masks is None else f"{share} to {row.left / total:.1%}"
        ax.annotate(text, (1.01, i), xycoords=("axes fraction", "data"), va="center")
    ax.set_yticks(position, [row.leaf.name for row in found])
    ax.invert_yaxis()
    ax.set_xlabel("million multiply-adds")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    return ax


_SHORT = {"dot_general": "dot", "conv_general_dilated": "convolution", "gather": "lookup"}
