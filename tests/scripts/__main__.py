"""Runs the cases of a program on axes of a kind, and prints the tracebacks of those that fail.

Without a program, runs those that the input names with their kinds, and prints a line for each.
"""

import contextlib
import importlib
import json
import sys
import traceback

import jax

from tests.lowering import share_contexts
from tests.memory import free_programs
from tests.scripts.devices import Devices


def find_failures(program, kind, *names):
    """Returns the tracebacks of the cases that fail on axes of a kind."""
    failures = ""
    for case in importlib.import_module(f"tests.scripts.{program}").CASES[kind]:
        if names and case.__name__ not in names:
            continue
        try:
            case(Devices(kind))
        except Exception:
            failures += f"\n{case.__name__}:\n{traceback.format_exc()[-3000:]}"
    return failures


def main(*arguments):
    assert jax.device_count() == 8
    share_contexts()
    runs = [arguments] if arguments else (line.split() for line in sys.stdin)
    last_program = None
    for program, kind, *names in runs:
        with contextlib.redirect_stdout(sys.stderr):
            if program != last_program:  # axes of both kinds share what one device computes
                free_programs(max_maps=8_000)
            failures = find_failures(program, kind, *names)
        last_program = program
        print(json.dumps(failures), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
