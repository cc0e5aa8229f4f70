"""Runs the cases of a program, and prints the tracebacks of those that fail, by kind of mesh."""

import importlib
import json
import sys
import traceback

import jax

from tests.lowering import share_contexts
from tests.scripts.devices import Devices


def main(program, *names):
    assert jax.device_count() == 8
    share_contexts()
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
    print(json.dumps(failures))


if __name__ == "__main__":
    main(*sys.argv[1:])
