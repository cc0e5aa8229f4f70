"""Runs programs of tests/scripts on eight virtual devices, in a process that sees them."""

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading

import pytest

from tests.helpers import ROOT

LIMIT = 900  # seconds: what takes as long hangs
KINDS = pytest.mark.parametrize("kind", ["Auto", "Explicit"])


def run(program, kind):
    """Runs all cases of a program on axes of that kind, and fails for those that fail.

    The process keeps what one device computes for the other kind.
    """
    process, log = _start()
    limit = threading.Timer(LIMIT, process.kill)
    limit.start()
    print(program, kind, file=process.stdin, flush=True)
    answer = process.stdout.readline()
    limit.cancel()
    if not answer:
        _start.cache_clear()
        process.wait()
        log.seek(0)
        pytest.fail(log.read()[-12_000:], pytrace=False)
    if failures := json.loads(answer):
        pytest.fail(failures[-12_000:], pytrace=False)


@functools.cache
def _start():
    """Starts the process, and returns it with its log; programs share imports and compilations."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.scripts"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    atexit.register(log.close)
    atexit.register(process.communicate)  # ends its input, and so the process
    return process, log
