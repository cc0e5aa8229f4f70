"""Two processes that train together, save together, lose one of them, and start again."""

import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.slow


FLAGS = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"
LIMIT = 600  # seconds: what takes as long hangs


def _start(folder, mode):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for process in (0, 1):
        with open(folder / f"{mode}{process}.log", "w", encoding="utf-8") as log:
            command = [sys.executable, "-m", "tests.scripts.two_processes"]
            env = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
            processes.append(
                subprocess.Popen(
                    [*command, str(process), port, str(folder), mode],
                    cwd=ROOT,
                    env=os.environ | env,
                    stdout=log,
                    stderr=log,
                )
            )
    return processes


def test_a_run_that_lost_a_process_ends_with_the_weights_of_an_unbroken_one(tmp_path):
    processes = []
    try:
        survivor, killed = processes = _start(tmp_path, "first")
        assert killed.wait(LIMIT) == -signal.SIGKILL, (tmp_path / "first1.log").read_text()[-3000:]
        survivor.kill()
        restarted = _start(tmp_path, "again")
        processes = [*processes, *restarted]
        for process in restarted:
            assert process.wait(LIMIT) == 0, (tmp_path / "again0.log").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    unbroken, restarted = (np.load(tmp_path / f"{run}.npz") for run in ("unbroken", "restarted"))
    assert len(unbroken.files) == 5  # three parameters, two masks
    for name in unbroken.files:
        np.testing.assert_array_equal(restarted[name], unbroken[name])
    assert np.unpackbits(unbroken["arr_3"]).sum() == 64  # half of 8 x 16
    assert np.count_nonzero(unbroken["arr_1"]) <= 64
