"""A compact model as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparsity.compacting.formats import FORMAT_LAYOUTS
from sparsity.compacting.formats.base import FormatLayout
from sparsity.core import extras, trees
from sparsity.core.checks import check_kind, check_number
from sparsity.core.pictures import draw_bars, pick_axes
from sparsity.core.trees import Path
from sparsity.graph import Parameter

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class StoredBytes(NamedTuple):
    """Bytes of the values of a parameter, of their positions, and of frozen entries."""

    values: int
    positions: int = 0
    frozen: int = 0


class Row(NamedTuple):
    """A row of the table: one parameter.

    Attributes:
      parameter: the parameter.
      layout: layout of the kept values, `None` without a mask.
      stored: bytes that are stored.
      readers: operations other than products that read the parameter as a dense array.
    """

    parameter: Parameter
    layout: FormatLayout | None
    stored: StoredBytes
    readers: Sequence[str]

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter when dense."""
        return self.parameter.size * self.parameter.dtype.itemsize

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of kept values and of padding, bytes when dense, and `stored`."""
        layout, size = self.layout, self.parameter.size
        kept, padding = (layout.num_kept, layout.padding) if layout else (size, 0)
        return kept, padding, self.nbytes, *self.stored


def show_rows(rows: Sequence[Row], seconds: Mapping[Path, Mapping[str, float]] | None) -> str:
    """Returns `Compact.report`."""
    check_kind("seconds", seconds, Mapping | None, "the result of measure, or None")
    seconds = seconds or {}
    for path, times in seconds.items():
        check_kind(f"seconds[{path!r}]", times, Mapping, "a dict {format: seconds}")
        for name, time in times.items():
            check_number(f"seconds[{path!r}][{name!r}]", time)
    measured_formats = {name for times in seconds.values() for name in times}
    columns = [name for name in FORMAT_LAYOUTS if name in measured_formats]
    texts = "parameter", "shape", "format"
    numbers = ["kept", "padding", "dense", "values", "positions", "frozen"]
    if not any(row.stored.frozen for row in rows):
        numbers.pop()
    table = extras.make_table(texts, (*numbers, *(f"ms {name}" for name in columns)))
    counts = [row.numbers[: len(numbers)] for row in rows]
    for row, count in zip(rows, counts, strict=True):
        format_name = row.layout.format if row.layout else "no mask"
        about = row.parameter.name, trees.shape_text(row.parameter.shape), format_name
        measured = seconds.get(row.parameter.path, {})
        shown = [f"{1000 * measured[x]:.3g}" if x in measured else "" for x in columns]
        table.add_row(*about, *map("{:,}".format, count), *shown)
    totals = [sum(column) for column in zip(*counts, strict=True)]
    table.add_section()
    table.add_row("all", "", "", *map("{:,}".format, totals), *[""] * len(columns))
    notes = [f"Columns {', '.join(numbers[2:-1])} and {numbers[-1]} are bytes."]
    notes += [
        f"{row.parameter.name} is made dense by {reader}." for row in rows for reader in row.readers
    ]
    return "\n".join([extras.as_text(table), *notes])


def plot(rows: Sequence[Row], ax: Axes | None) -> Axes:
    """Draws `Compact.plot`."""
    shown = [row for row in rows if row.layout or len(row.parameter.shape) > 1]
    ax = pick_axes(ax, len(shown))
    names, before = [row.parameter.name for row in shown], [row.nbytes for row in shown]
    draw_bars(ax, "bytes", names, before, [sum(row.stored) for row in shown], sum(before))
    return ax
