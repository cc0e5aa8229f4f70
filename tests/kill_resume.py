"""Kills a training run again and again, and compares how it ends with a run that was not killed.

    python -m tests.kill_resume [NUMBER OF KILLS] [SEED] [masked|shrunken|compact]

Each kill is a SIGKILL at a random moment: while the program starts, trains or writes a checkpoint
(the run writes one every few steps). Weights, masks, optimizer states and the history of the
metrics must have the same bits in the end.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from examples.mnist import config as config_lib, train
from tests.examples.runs import run_in, write_few_digits
from tests.helpers import start_module

OPTIONS = {"epochs": 1, "batch_size": 10, "eval_every": 4, "sparsity.update_freq": 3}
KINDS = {
    "masked": {"sparsity.algorithm": "rigl", "sparsity.use_packed_masks": True},
    "shrunken": {"shrink": True, "sparsity.scope": "coupled"},
    "compact": {"compact": True, "sparsity.algorithm": "rigl"},
}


def digits(run_dir: Path) -> str:
    """Returns the folder of the digits that all runs beside a run train with."""
    folder = run_dir.parent / "digits"
    return str(folder) if folder.exists() else write_few_digits(folder)


def start(run_dir: Path, kind: str) -> subprocess.Popen:
    """Starts the trainer; see `start_module`."""
    options = {"run_dir": run_dir, "data_dir": digits(run_dir)}
    options |= {f"config.{name}": value for name, value in (OPTIONS | KINDS[kind]).items()}
    flags = [f"--{name}={value}" for name, value in options.items()]
    return start_module("examples.mnist.train", *flags)


def kill(run_dir: Path, is_time: Callable[[], bool], kind: str = "masked") -> bool:
    """Starts the trainer and kills it when it is time; returns whether it was running then."""
    process = start(run_dir, kind)
    while not is_time():
        if process.poll() is not None:
            if process.returncode:
                raise RuntimeError(f"training failed:\n{process.stderr.read()}")
            return False
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return True


def unfinished_writes(run_dir: Path) -> list[str]:
    """Names of checkpoints that are being written."""
    return [path.name for path in run_dir.glob("checkpoints/*tmp*")]


def last_step(run_dir: Path) -> int:
    """Step of the newest checkpoint, 0 without one."""
    steps = [int(path.name) for path in run_dir.glob("checkpoints/*") if path.name.isdecimal()]
    return max(steps, default=0)


def run_here(run_dir: Path, kind: str = "masked") -> train.Checkpoint:
    """Goes on to the end of a run in this process; returns how it has ended."""
    config = config_lib.get_config()
    with config.unlocked():
        config.update_from_flattened_dict(OPTIONS | KINDS[kind])
    return run_in(run_dir, config, digits(run_dir))[1]


def differences(one: train.Checkpoint, other: train.Checkpoint) -> list[str]:
    """Returns the names of all that has not the same bits."""
    names = [] if one.history == other.history else ["history"]
    leaves = jax.tree.leaves_with_path(other.state)
    for leaf, (path, expected) in zip(jax.tree.leaves(one.state), leaves, strict=True):
        a, b = np.asarray(leaf), np.asarray(expected)
        if a.dtype != b.dtype or a.tobytes() != b.tobytes():
            names.append(jax.tree_util.keystr(path))
    return names


def main(kills: int = 10, seed: int | None = None, kind: str = "masked") -> None:
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        expected = run_here(Path(folder, "unbroken"), kind)
        runs, number = [Path(folder, "0")], 0
        begin = time.monotonic()
        assert kill(runs[0], lambda: last_step(runs[0]) == expected.step, kind)
        seconds = time.monotonic() - begin
        print(f"seed {seed}; a run of {seconds:.1f} s to step {expected.step}, then killed")
        while number < kills:
            if last_step(runs[-1]) == expected.step:
                runs.append(Path(folder, str(len(runs))))  # it has come to its end: kill a new one
            moment, begin = rng.uniform(0, seconds), time.monotonic()
            if kill(runs[-1], lambda end=begin + moment: time.monotonic() > end, kind):
                number += 1
                writes = "".join(f", writing {name}" for name in unfinished_writes(runs[-1]))
                print(
                    f"kill {number}: after {moment:5.2f} s, at step {last_step(runs[-1])}{writes}"
                )
        for run in runs:
            if wrong := differences(run_here(run, kind), expected):
                sys.exit(f"run {run.name} differs in {', '.join(wrong)}")
    print(f"{kills} kills in {len(runs)} runs: all ended with the bits of the unbroken one")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:])
