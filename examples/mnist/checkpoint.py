"""Checkpoints of a run: written atomically, checked when they are read, the last few kept."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import gc
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp


class Checkpoint(NamedTuple):
    """The state from which a run resumes."""

    step: int  # steps taken so far; with the configuration's seed it gives the order of the data
    state: Any  # tree of arrays: weights, optimizer states with masks
    history: dict[str, list[Any]]  # what was measured so far


class Checkpoints:
    """The checkpoints in a run folder.

    Args:
      run_dir: the folder; it is made if need be and locked as long as this process lives.
      config: the configuration, a dictionary that JSON can hold.
      restart: forget the run that is there.

    Raises:
      ValueError: the folder cannot be written, or another process writes to it.
    """

    def __init__(self, run_dir: Path, config: dict[str, Any], restart: bool = False):
        self._run_dir, self._config = run_dir, config
        folder = run_dir.resolve() / "checkpoints"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            self._lock = os.open(run_dir / "lock", os.O_WRONLY | os.O_CREAT)
        except OSError as error:
            reason = error.strerror
            raise ValueError(f"--run_dir: {run_dir} cannot be written: {reason}.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ValueError(f"--run_dir: another run is writing to {run_dir}.") from error
        if restart:
            shutil.rmtree(folder)
        options = ocp.CheckpointManagerOptions(max_to_keep=3, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(folder, options=options)

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint in the background; a kill leaves it whole or not there at all."""
        # Copies: training continues to use the memory of the state and of the history.
        leaves = {name: np.array(leaf) for name, leaf in _by_name(checkpoint.state).items()}
        meta = copy.deepcopy({"config": self._config, "history": checkpoint.history})
        meta["digest"] = _digest(leaves, meta)
        items = {"state": ocp.args.StandardSave(leaves), "meta": ocp.args.JsonSave(meta)}
        self._manager.save(checkpoint.step, args=ocp.args.Composite(**items))

    def restore(
        self, like: Callable[[dict[str, list[Any]], dict[str, np.ndarray]], Any]
    ) -> Checkpoint | None:
        """Returns the newest checkpoint that is not damaged, or `None` where there is none.

        Args:
          like: from the history of a run, and its arrays by name, to a tree of the structure and
            shapes of its state.

        Raises:
          ValueError: the checkpoint is one of another configuration, or all are damaged.
        """
        damaged = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            restored = self._read(step)
            if isinstance(restored, tuple):
                break
            damaged.append(step)
            print(f"The checkpoint of step {step} is damaged ({restored}).", file=sys.stderr)
        else:
            if damaged:
                raise ValueError(
                    f"All checkpoints in {self._run_dir} are damaged; --restart starts afresh."
                )
            return None
        leaves, meta = restored
        self._check_config(meta["config"])
        state = like(meta["history"], leaves)
        names = _by_name(state)
        if {n: a.shape for n, a in leaves.items()} != {n: a.shape for n, a in names.items()}:
            raise ValueError(
                f"The run in {self._run_dir} is one of another model; --restart starts afresh."
            )
        for bad in damaged:
            print(f"Going on from the one of step {step}.", file=sys.stderr)
            self._manager.delete(bad)
        state = jax.tree.unflatten(jax.tree.structure(state), [leaves[name] for name in names])
        return Checkpoint(step, state, meta["history"])

    def close(self) -> None:
        """Waits until all is written, and unlocks the folder."""
        self._manager.close()
        os.close(self._lock)

    def _read(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]] | str:
        """Returns arrays and meta data, or why they cannot be read."""
        items = {"state": ocp.args.StandardRestore(), "meta": ocp.args.JsonRestore()}
        with _quiet():
            try:
                restored = self._manager.restore(step, args=ocp.args.Composite(**items))
                leaves, meta = restored["state"], restored["meta"]
                if meta.pop("digest") == _digest(leaves, meta):
                    return leaves, meta
                return "its contents are not those that were written"
            except Exception as error:  # the kind depends on which file is damaged, and how
                reason = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            time.sleep(0.2)  # until other reads, in threads, have failed, too
            gc.collect()
        return reason

    def _check_config(self, old: dict[str, Any]) -> None:
        before, now = _flat(old), _flat(self._config)
        names = [name for name in before | now if before.get(name) != now.get(name)]
        if names:
            changes = ", ".join(f"{n} was {before.get(n)!r}, is {now.get(n)!r}" for n in names)
            raise ValueError(
                f"The run in {self._run_dir} has another configuration: {changes}. Take another "
                "--run_dir, or start afresh with --restart."
            )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides what is logged, and what threads report, when many reads fail at once."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook


def _by_name(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def _digest(leaves: dict[str, np.ndarray], meta: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(leaves):
        array = np.asarray(leaves[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat
