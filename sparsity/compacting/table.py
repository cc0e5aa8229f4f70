"""A compact model as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sparsity.compacting.formats import STORAGES
from sparsity.compacting.formats.storage import Storage
from sparsity.core import extras, trees
from sparsity.core.checks import check_kind, check_number
from sparsity.core.pictures import draw_bars, pick_axes
from sparsity.core.trees import Path
from sparsity.graph import Parameter

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Row(NamedTuple):
    """A row of the table: one parameter.

    Attributes:
      parameter: the parameter.
      storage: storage of the kept values, `None` without a mask.
      stored: bytes of the values, of their positions, and of frozen entries.
      readers: operations other than products that read the parameter as a dense array.
    """

    parameter: Parameter
    storage: Storage | None
    stored: tuple[int, int, int]
    readers: Sequence[str]

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter when dense."""
        return self.parameter.size * self.parameter.dtype.itemsize

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of kept values and of padding, bytes when dense, and `stored`."""
        storage, size = self.storage, self.parameter.size
        kept, padding = (storage.num_kept, storage.padding) if storage else (size, 0)
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
    columns = [name for name in STORAGES if name in measured_formats]
    texts = "parameter", "shape", "format"
    numbers = ["kept", "padding", "dense", "values", "positions", "frozen"]
    if not any(row.stored[2] for row in rows):
        numbers.pop()
    table = extras.make_table(texts, (*numbers, *(f"ms {name}" for name in columns)))
    counts = [row.numbers[: len(numbers)] for row in rows]
    for row, count in zip(rows, counts, strict=True):
        storage_format = row.storage.format if row.storage else "no mask"
        about = row.parameter.name, trees.shape_text(row.parameter.shape), storage_format
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
    shown = [row for row in rows if row.storage or len(row.parameter.shape) > 1]
    ax = pick_axes(ax, len(shown))
    names, before = [row.parameter.name for row in shown], [row.nbytes for row in shown]
    draw_bars(ax, "bytes", names, before, [sum(row.stored) for row in shown], sum(before))
    return ax
