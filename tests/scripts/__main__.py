"""Runs the cases of a program, and prints the tracebacks of those that fail, by kind of mesh.

Without a program, runs those that the input names, one a line, and prints a line for each.
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


def find_failures(program, *names):
    failures = {}
    for kind, cases in importlib.import_module(f"tests.scripts.{program}").CASES.items():
        failures[kind] = ""
        for case in cases:
            if names and case.__name__ not in names:
                continue
            try:
                case(Devices(kind))
            except Exception:
                failures[kind] += f"\n{case.__name__}:\n{traceback.format_exc()[-3000:]}"
    return failures


def main(*arguments):
    assert jax.device_count() == 8
    share_contexts()
    programs = [arguments] if arguments else (line.split() for line in sys.stdin)
    for program in programs:
        with contextlib.redirect_stdout(sys.stderr):
            failures = find_failures(*program)
            free_programs(max_maps=8_000)
        print(json.dumps(failures), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
