"""Kills every command and function that writes files, at random moments, again and again.

    python -m tests.kill_writes [NUMBER OF KILLS] [SEED]

A process writes two contents in turn to each path, forever, and is killed. Then each path must hold
one of the two, complete, whatever was being written. A one-shot run with a folder is killed, too,
and must end with the bits of an unbroken one.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import sparsity
from sparsity.cli import main as command
from tests.cli.checkpoints import load, save
from tests.helpers import start_module

ENDINGS = (".safetensors", ".npz", ".msgpack", "")
LAYERS = 6


def weights(number: int) -> dict[str, np.ndarray]:
    """Returns the contents of a source."""
    draw = np.random.default_rng(number).normal
    return {name: draw(size=(200, 300)).astype(np.float32) for name in ("v", "w")}


def prepare(folder: Path) -> None:
    """Writes the sources: a base, two checkpoints in each format, and two deltas."""
    for ending in ENDINGS:
        for number in range(3):
            save(folder / f"source{number}{ending}", weights(number))
    for number in (1, 2):
        delta = sparsity.Delta.between(weights(0), weights(number))
        delta.save(folder / f"source_delta{number}.safetensors")


def write(folder: Path, ending: str, number: int) -> None:
    """Writes the targets of one format by all commands."""
    source, base = (str(folder / f"source{n}{ending}") for n in (number, 0))
    delta = str(folder / f"source_delta{number}.safetensors")
    saved = folder / f"diff{ending or '_folder'}.safetensors"
    saved.unlink(missing_ok=True)  # the command replaces no file
    if not ending:  # nor do others replace a folder
        for path in (folder / "pruned", folder / "applied"):
            shutil.rmtree(folder / "old", ignore_errors=True)
            if path.exists():  # a folder that is half removed has another name
                os.rename(path, folder / "old")
    for arguments in (
        ["prune", source, str(folder / f"pruned{ending}"), "--sparsity", "0.5", "--overwrite"],
        ["apply", base, delta, str(folder / f"applied{ending}"), "--overwrite"],
        ["diff", base, source, "--save", str(saved)],
    ):
        assert command(arguments) in (0, 1)
    sparsity.Delta.load(delta).save(folder / "saved.safetensors")


def read(path: Path) -> list[bytes]:
    """Returns the contents of a target, complete or an error."""
    if path.name.startswith(("diff", "saved")):
        tree = sparsity.Delta.load(path).apply(weights(0))
    else:
        tree = load(path)
    return [np.asarray(tree[name]).tobytes() for name in sorted(tree)]


def targets(folder: Path) -> list[Path]:
    """Returns what the commands wrote."""
    names = ("pruned", "applied", "diff", "saved")
    return [path for path in sorted(folder.iterdir()) if path.name.startswith(names)]


def check(folder: Path, expected: dict[str, list[list[bytes]]]) -> None:
    """Checks all targets after a kill, and removes what the kill left behind."""
    hidden = list(folder.glob(".sparsity-*"))
    for name, contents in expected.items():
        path = folder / name
        if path.exists() or (path.suffix and not name.startswith("diff")):
            assert read(path) in contents, name
    assert len(hidden) <= 1
    for one in hidden:
        shutil.rmtree(one)


def model(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for layer in params:
        x = jnp.tanh(x @ layer)
    return x


def prune_in_one_shot(folder: Path | None) -> list[bytes]:
    """Returns weights and masks of a one-shot run, which goes on in its folder."""
    draw = np.random.default_rng(0).normal
    params = [jnp.asarray(draw(size=(32, 32)), jnp.float32) for _ in range(LAYERS)]
    batches = [jnp.asarray(draw(size=(16, 32)), jnp.float32) for _ in range(2)]
    pruner = sparsity.SparseGPTPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    pruned, masks, _ = sparsity.oneshot(pruner, model, params, batches, out=folder)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((pruned, masks))]


def work(folder: Path, kind: str) -> None:
    """Writes until the process is killed."""
    turn = 0
    while kind == "commands":
        for ending in ENDINGS:
            write(folder, ending, 1 + turn % 2)
        turn += 1
        (folder / "ready").touch()
    (folder / "ready").touch()
    prune_in_one_shot(folder / "run")
    (folder / "finished").touch()
    time.sleep(1000)


def kill(folder: Path, kind: str, seconds: float) -> float:
    """Starts a process that writes, and kills it some time after its start, or when it is done.

    Returns:
      The seconds from its start to the kill.
    """
    for name in ("ready", "finished"):
        (folder / name).unlink(missing_ok=True)
    process = start_module("tests.kill_writes", kind, str(folder))
    begin = time.monotonic()
    while time.monotonic() < begin + seconds and not (folder / "finished").exists():
        if process.poll() is not None:
            raise RuntimeError(f"writing failed:\n{process.stderr.read()}")
        if not (folder / "ready").exists():
            begin = time.monotonic()
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return time.monotonic() - begin


def kill_commands(folder: Path, kills: int, rng: random.Random) -> None:
    """Kills all commands, and checks after each kill."""
    expected: dict[str, list[list[bytes]]] = {}
    prepare(folder)
    for number in (1, 2):
        with contextlib.redirect_stdout(None):
            for ending in ENDINGS:
                write(folder, ending, number)
        for path in targets(folder):
            expected.setdefault(path.name, []).append(read(path))
    sources = {path: path.read_bytes() for path in folder.glob("source*") if path.is_file()}
    for number in range(1, kills + 1):
        kill(folder, "commands", rng.uniform(0, 2))
        hidden = len([*folder.glob(".sparsity-*")])
        check(folder, expected)
        assert {path: path.read_bytes() for path in sources} == sources
        print(f"kill {number} of the commands{', within a write' * hidden}")


def kill_one_shot(folder: Path, kills: int, rng: random.Random) -> None:
    """Kills one-shot runs, and compares how they end with an unbroken one."""
    expected = prune_in_one_shot(None)
    seconds = kill(folder, "oneshot", 1000)
    for number in range(1, kills + 1):
        if (folder / "finished").exists():
            assert prune_in_one_shot(folder / "run") == expected
            shutil.rmtree(folder / "run")
        kill(folder, "oneshot", rng.uniform(0, seconds))
        journal = folder / "run" / "journal.jsonl"
        layers = len(journal.read_text().splitlines()) if journal.exists() else 0
        print(f"kill {number} of a one-shot run, after {layers} of {LAYERS} layers")
    assert prune_in_one_shot(folder / "run") == expected


def main(kills: int = 10, seed: int | None = None) -> None:
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    rng = random.Random(seed)
    for run in (kill_commands, kill_one_shot):
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), kills, rng)
    print(f"seed {seed}, {kills} kills of each kind: nothing was lost")


if __name__ == "__main__":
    if sys.argv[1:2] in (["commands"], ["oneshot"]):
        work(Path(sys.argv[2]), sys.argv[1])
    else:
        main(*map(int, sys.argv[1:]))
