"""Draws the cases that the marker `drawn` asks for, and keeps count in `properties/RESULTS.md`.

    python -m tests.long_profile [CPU SECONDS] [TEXT IN THE NAMES OF TESTS]

Each test runs in processes of its own, for about two minutes each, the cheapest test first, until
the time is up. The next run draws other cases: the number of the first is the seed of a process.
"""

import os
import re
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import ROOT

TABLE = Path(__file__).with_name("properties") / "RESULTS.md"
HEAD = """\
# Cases of the long profile

Written by `python -m tests.long_profile`. Seconds are CPU time, the start of processes included.
To start again, delete the rows.

| test | goal | cases | failed | seconds a case |
| --- | --: | --: | --: | --: |
"""
ROW = "| {0.test} | {0.goal:,} | {0.cases:,} | {0.failed:,} | {0.seconds:.3f} |\n"
START = 60  # cases, to measure one; fewer files need not have a valid one among them
SECONDS = 120.0  # of a process


@dataclass
class Row:
    """Counts of a test, whose parameters are in brackets."""

    test: str
    goal: int
    cases: int = 0
    failed: int = 0
    seconds: float = 0.0


class Collected:
    """Plugin of pytest that keeps a row of each test with the marker."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if marker := item.get_closest_marker("drawn"):
                # A number is that of a case.
                test = re.sub(r"\[\d+\]$", "", item.nodeid)
                self.rows[test] = Row(test, *marker.args)


def read_rows() -> dict[str, Row]:
    """Returns the rows of the tests, with the counts of earlier runs."""
    plugin = Collected()
    options = ["--collect-only", "-qq", "-m", "drawn", "-W", "ignore:Module already imported"]
    pytest.main([*options, str(ROOT / "tests")], [plugin])
    for line in TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else ():
        test, *numbers = line.strip("| ").replace(",", "").split(" | ")
        if test in plugin.rows:
            _, cases, failed, seconds = numbers
            plugin.rows[test] = Row(
                test, plugin.rows[test].goal, int(cases), int(failed), float(seconds)
            )
    return plugin.rows


def draw_cases(row: Row) -> float:
    """Runs more cases of a test; returns the seconds that they took."""
    number = round(SECONDS / row.seconds) if row.cases else START
    number = min(max(number, 1), row.goal - row.cases)
    options = {"SPARSITY_FIRST": row.cases, "SPARSITY_EXAMPLES": number}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timeout=0", "-p", "no:cacheprovider", row.test],
        env=os.environ | {name: str(value) for name, value in options.items()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode:
        failures = re.search(r"(\d+) (failed|error)", done.stdout)
        row.failed += int(failures[1]) if failures else 1
        print(options, done.stdout[-20_000:], done.stderr[-4_000:], sep="\n", flush=True)
    row.seconds = (row.seconds * row.cases + seconds) / (row.cases + number)
    row.cases += number
    return seconds


def main(seconds: float = 600.0, text: str = "") -> None:
    rows = read_rows()
    while seconds > 0:
        short = [row for row in rows.values() if row.cases < row.goal and text in row.test]
        if not short:
            break
        row = min(short, key=lambda row: row.seconds * (row.goal - row.cases))
        seconds -= draw_cases(row)
        print(ROW.format(row), end="", flush=True)
        lines = [ROW.format(rows[test]) for test in sorted(rows)]
        TABLE.write_text(HEAD + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]), *sys.argv[2:3])
