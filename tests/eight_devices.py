"""Runs a program of tests/scripts on eight virtual devices, in a process of its own."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

LIMIT = 600  # seconds: what takes as long hangs
KINDS = pytest.mark.parametrize("kind", ["Auto", "Explicit"])


def run(program, kind):
    """Runs all cases of a program, on a mesh whose axes have that kind."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "tests.scripts", program, kind],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        pytest.fail(done.stderr[-12_000:], pytrace=False)
