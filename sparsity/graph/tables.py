"""The graph of a model as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparsity.core import extras, trees
from sparsity.core.pictures import bars, new_axes
from sparsity.graph.traced_model import Parameter

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class CostRow(NamedTuple):
    """A row of the table: a parameter.

    Attributes:
      parameter: path, shape and dtype.
      readers: kinds of the products, and primitives of the lookups, that read the parameter.
      contracting: the axes that products contract.
      dense: multiply-adds of the products.
      masked: multiply-adds that masks leave.
      groups: (axis, number) of channel groups.
    """

    parameter: Parameter
    readers: tuple[str, ...]
    contracting: tuple[int, ...]
    dense: int
    masked: int
    groups: tuple[tuple[int, int], ...]


def show_leaves(
    rows: Sequence[CostRow], total: int, masked: int | None, uncounted: Mapping[str, str]
) -> str:
    """Returns `Graph.table`.

    Args:
      rows: rows of the parameters, in tree order.
      total: multiply-adds of a call.
      masked: multiply-adds that masks leave, `None` without masks.
      uncounted: primitives that do not count, with a line of the model.
    """
    costs = ("MACs", *(["left"] if masked is not None else []), "share")
    shown = extras.make_table(("leaf", "shape", "read by", "contracts"), costs)
    shown.add_column("axis: group")

    def add(name: str, texts: Sequence[str], dense: int, sparse: int, groups: str) -> None:
        macs = [f"{dense:,}", *([f"{sparse:,}"] if masked is not None else [])]
        shown.add_row(name, *texts, *macs, f"{dense / max(total, 1):.1%}", groups)

    for row in rows:
        shape = trees.shape_text(row.parameter.shape)
        readers = ["lookup" if name == "gather" else name for name in row.readers]
        by = ", ".join(readers) or "no product"
        axes = ", ".join(map(str, row.contracting))
        groups = ", ".join(f"{axis}: {number}" for axis, number in row.groups)
        add(row.parameter.name, (shape, by, axes), row.dense, row.masked, groups)
    shown.add_section()
    if (others := total - sum(row.dense for row in rows)) > 0:
        add("products of activations", ("", "", ""), others, others, "")
    add("dots and convolutions", ("", "", ""), total, total if masked is None else masked, "")
    text = extras.as_text(shown)
    if uncounted:
        names = [f"{name} {source}".rstrip() for name, source in uncounted.items()]
        text += f"\n\nNot counted: {', '.join(names)}."
    return text


def plot(rows: Sequence[CostRow], total: int, has_masks: bool, ax: Axes | None) -> Axes:
    """Draws `Graph.plot`; the arguments are those of `table`."""
    shown = [row for row in rows if row.dense]
    if ax is None:
        (ax,) = new_axes(len(shown))
    names, dense = [row.parameter.name for row in shown], [row.dense for row in shown]
    masked = [row.masked for row in shown] if has_masks else None
    bars(ax, "multiply-adds", names, dense, masked, total)
    return ax
