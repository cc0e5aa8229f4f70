"""What the benchmarks share: flags, a table, the machine in words, and the file of results."""

import argparse
import datetime
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

import jax

RESULTS = Path(__file__).with_name("RESULTS.md")


class Parser(argparse.ArgumentParser):
    """A parser of the flags --quick and --write.

    Args:
      doc: docstring of the benchmark, whose first line is the description.
      quick: help of --quick.
    """

    def __init__(self, doc: str, quick: str) -> None:
        super().__init__(description=doc.partition("\n")[0])
        self.add_argument("--quick", action="store_true", help=quick)
        self.add_argument("--write", action="store_true", help="renew the section of RESULTS.md")

    def read(self) -> argparse.Namespace:
        """Returns the flags of the command line; --quick and --write exclude each other."""
        options = self.parse_args()
        if options.quick and options.write:
            self.error("--write needs the full measurement, without --quick.")
        return options


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; all but the first column are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    cells = [
        [line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]
        for line in (head, rule, *rows)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def measured_on() -> str:
    """The date and the machine, in words."""
    device = jax.devices()[0]
    kind = platform.machine() if device.platform == "cpu" else device.device_kind
    return (
        f"{datetime.date.today()}, {os.cpu_count()} CPU cores, {device.platform} ({kind}), "
        f"jax {jax.__version__}."
    )


def write_section(text: str) -> None:
    """Replaces the section of RESULTS.md that has the heading of the text, or adds it."""
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Results\n"
    heading = re.escape(text.splitlines()[0])
    others = re.sub(rf"(?ms)^{heading}$.*?(?=^## |\Z)", "", old)
    RESULTS.write_text(f"{others.rstrip()}\n\n{text}\n", encoding="utf-8")
