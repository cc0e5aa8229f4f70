"""A smaller model as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sparsity.core import extras, trees
from sparsity.core.checks import check_kind
from sparsity.core.pictures import bars, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Pair = tuple[int, int]  # before and after


class SizeRow(NamedTuple):
    """A row of the table: a parameter before and after the cut.

    Attributes:
      name: the path.
      shapes: the shapes.
      parameters: numbers of entries.
      nbytes: bytes of the entries.
      macs: multiply-adds of the products.
      density: the part of the entries after the cut that masks keep, `None` without a mask.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    parameters: Pair
    nbytes: Pair
    macs: Pair
    density: float | None = None


def show_savings(
    rows: Sequence[SizeRow],
    macs: Pair,
    notes: Sequence[str],
    seconds: Mapping[str, Sequence[float]],
) -> str:
    """Returns `Small.report`.

    Args:
      rows: rows of the parameters, in tree order.
      macs: multiply-adds of a call, before and after.
      notes: lines below the table.
      seconds: {name: (seconds before, seconds after)}.
    """
    check_kind("seconds", seconds, Mapping, "a dict {name: (before, after)}")
    is_masked = any(row.density is not None for row in rows)
    columns = ("parameters", "left", "bytes", "left", "MACs", "left")
    last_columns = ("density",) if is_masked else ()
    leaves = extras.make_table(("leaf", "shape", "smaller"), (*columns, *last_columns))
    for row in rows:
        shapes = [trees.shape_text(shape) for shape in row.shapes]
        numbers = (*row.parameters, *row.nbytes, *row.macs)
        density = ["" if row.density is None else f"{row.density:.3g}"] if is_masked else []
        leaves.add_row(row.name, *shapes, *(f"{n:,}" for n in numbers), *density)
    sums = np.sum([(*row.parameters, *row.nbytes) for row in rows], axis=0, dtype=object)
    leaves.add_section()
    leaves.add_row("all", "", "", *(f"{n:,}" for n in (*sums, *macs)), *("" for _ in last_columns))
    parts = [extras.as_text(leaves), *notes]
    if seconds:
        times = extras.make_table(("time",), ("before", "after", "ratio"))
        for name, (before, after) in seconds.items():
            shown = [f"{1000 * x:.3g} ms" for x in (before, after)]
            times.add_row(name, *shown, f"{after / before:.2f}")
        parts.append(extras.as_text(times))
    return "\n\n".join(parts)


def plot(rows: Sequence[SizeRow], macs: int, axes: Sequence[Axes] | None) -> Sequence[Axes]:
    """Draws `Small.plot`; `macs` are the multiply-adds of the model before."""
    shown = [row for row in rows if row.macs[0] or len(row.shapes[0]) > 1]
    names = [row.name for row in shown]
    axes = new_axes(len(shown), 2) if axes is None else axes
    columns = (
        ("multiply-adds", [row.macs for row in shown], macs),
        ("parameters", [row.parameters for row in shown], sum(r.parameters[0] for r in rows)),
    )
    for ax, (quantity, pairs, total) in zip(axes, columns, strict=True):
        bars(ax, quantity, names, [n for n, _ in pairs], [n for _, n in pairs], total)
    return axes
