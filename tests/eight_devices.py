"""Runs a program of tests/scripts on eight virtual devices, in a process of its own."""

import functools
import json
import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

LIMIT = 900  # seconds: what takes as long hangs
KINDS = pytest.mark.parametrize("kind", ["Auto", "Explicit"])


def run(program, kind):
    """Runs all cases of a program, and fails for those that fail on axes of that kind."""
    if failures := _failures(program)[kind]:
        pytest.fail(failures[-12_000:], pytrace=False)


@functools.cache
def _failures(program):
    """Texts by kind; one process runs both kinds, which share what one device computes."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "tests.scripts", program],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        pytest.fail(done.stderr[-12_000:], pytrace=False)
    return json.loads(done.stdout.splitlines()[-1])
