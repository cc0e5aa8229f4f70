"""Runs the cases of a program; each that fails is named with its traceback."""

import importlib
import sys
import traceback

import jax

from tests.lowering import share_contexts
from tests.scripts.devices import Devices


def main(program, kind, *names):
    assert jax.device_count() == 8
    share_contexts()
    failed = []
    for case in importlib.import_module(f"tests.scripts.{program}").CASES[kind]:
        if names and case.__name__ not in names:
            continue
        try:
            case(Devices(kind))
        except Exception:
            failed.append(case.__name__)
            print(f"\n{case.__name__}:\n{traceback.format_exc()[-3000:]}", file=sys.stderr)
    if failed:
        sys.exit(f"failed with axes of the kind {kind}: {', '.join(failed)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
