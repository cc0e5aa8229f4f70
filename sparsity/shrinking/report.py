"""What became smaller, as a table and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sparsity.core import extras, trees
from sparsity.core.pictures import new_axes
from sparsity.graph.report import bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sparsity.shrinking.shrink import Small

Pair = tuple[int, int]  # before and after


class Row(NamedTuple):
    """What is shown of a leaf, before and after.

    Attributes:
      name: its path.
      shapes: its shape.
      parameters: number of its entries.
      nbytes: bytes of its entries.
      macs: multiply-adds of its products.
    """

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    parameters: Pair
    nbytes: Pair
    macs: Pair


def rows(small: Small) -> list[Row]:
    """What is shown of each leaf, in tree order."""
    found = []
    for leaf in small.before.leaves:
        shape = small.plan.shape_left(leaf.path, leaf.shape)
        sizes = leaf.size, math.prod(shape)
        nbytes = sizes[0] * leaf.dtype.itemsize, sizes[1] * leaf.dtype.itemsize
        macs = small.before.macs_of(leaf.path), small.macs(leaf.path)
        found.append(Row(leaf.name, (leaf.shape, shape), sizes, nbytes, macs))
    return found


def table(small: Small, seconds: Mapping[str, Sequence[float]]) -> str:
    """`Small.report`."""
    leaves = extras.table(
        ("leaf", "shape", "smaller"), ("parameters", "left", "bytes", "left", "MACs", "left")
    )
    found = rows(small)
    for row in found:
        shapes = ["x".join(map(str, shape)) or "scalar" for shape in row.shapes]
        numbers = (*row.parameters, *row.nbytes, *row.macs)
        leaves.add_row(row.name, *shapes, *(f"{n:,}" for n in numbers))
    sums = np.sum([(*row.parameters, *row.nbytes) for row in found], axis=0, dtype=object)
    leaves.add_section()
    leaves.add_row("all", "", "", *(f"{n:,}" for n in (*sums, small.before.macs(), small.macs())))
    parts = [extras.as_text(leaves)]
    if small.replicated:
        names = [f"{'/'.join(path)}:{axis}" for path, axis in small.replicated]
        parts.append(
            f"{trees.listed(names)}: what is left does not divide among the devices of the mesh "
            "that held it, and lies on each of them. "
            f"Coupled(round_to={math.lcm(*small.replicated.values())}) keeps it sharded."
        )
    if small.update_error is not None:
        parts.append(
            "The optimizer goes on as on the masked model: the updates that were compared differ "
            f"by {small.update_error:.1g} of their largest entry at most."
        )
    elif small.opt_state is not None:
        parts.append(
            "Whether the optimizer goes on as on the masked model was not checked: shrink(..., "
            "opt_state, tx) compares updates."
        )
    if seconds:
        times = extras.table(("time",), ("before", "after", "ratio"))
        for name, (before, after) in seconds.items():
            shown = [f"{1000 * x:.3g} ms" for x in (before, after)]
            times.add_row(name, *shown, f"{after / before:.2f}")
        parts.append(extras.as_text(times))
    return "\n\n".join(parts)


def plot(small: Small, axes: Sequence[Axes] | None) -> Sequence[Axes]:
    """`Small.plot`."""
    found = rows(small)
    shown = [row for row in found if row.macs[0] or len(row.shapes[0]) > 1]
    names = [row.name for row in shown]
    axes = new_axes(len(shown), 2) if axes is None else axes
    columns = (
        ("multiply-adds", [row.macs for row in shown], small.before.macs()),
        ("parameters", [row.parameters for row in shown], sum(r.parameters[0] for r in found)),
    )
    for ax, (what, pairs, total) in zip(axes, columns, strict=True):
        bars(ax, what, names, [n for n, _ in pairs], [n for _, n in pairs], total)
    return axes
