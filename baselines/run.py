"""Trains every algorithm on every task, over several seeds; writes RESULTS.md and the plots.

    bash run.sh baselines [--tasks NAME ...] [--algorithms NAME ...] [--report]

A result is stored as soon as it is there, with the settings that it was made by. The same command
goes on where it was stopped, and makes anew what other settings have made.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sparsity

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
TASKS = ("mnist1d_mlp", "cartpole_ppo", "digits_cnn", "topics_transformer")

Result = dict[str, Any]
Job = tuple[str, float]  # algorithm, sparsity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = sparsity.all_algorithm_names()
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="NAME")
    parser.add_argument("--algorithms", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--report", action="store_true", help="write the report, train nothing")
    options = parser.parse_args()
    try:
        tasks = [importlib.import_module(f"baselines.{name}").TASK for name in options.tasks]
        if not options.report:
            train_all(tasks, options.algorithms)
        from baselines import report

        report.write([importlib.import_module(f"baselines.{name}").TASK for name in TASKS])
    except ImportError as error:
        sys.exit(f"{error.name} is missing: pip install 'sparsity[baselines]'")
    except KeyboardInterrupt:
        sys.exit("\nStopped; the same command goes on from here.")


def train_all(tasks: list[Any], algorithms: tuple[str, ...]) -> None:
    """Trains what is not stored yet, with a progress bar."""
    import tqdm

    from baselines import training

    stored = {task.name: load(task) for task in tasks}
    jobs = [
        (task, job)
        for task in tasks
        for job in jobs_of(task, algorithms)
        if job not in stored[task.name]
    ]
    bar = tqdm.tqdm(jobs, unit="run", disable=not jobs)
    for task, (algorithm, target) in bar:
        bar.set_description(f"{task.name} {algorithm} {target:g}")
        start = time.perf_counter()
        metrics = training.run_seeds(task, algorithm, target)
        seconds = time.perf_counter() - start
        stored[task.name][algorithm, target] = metrics | {"seconds": seconds}
        save(task, stored[task.name])


def jobs_of(task: Any, algorithms: tuple[str, ...]) -> Iterator[Job]:
    """Algorithms and sparsities to train a task with; the dense network once."""
    for algorithm in algorithms:
        for target in (0.0,) if algorithm == "no_prune" else task.sparsities:
            yield algorithm, target


def fingerprint(task: Any) -> str:
    """Differs whenever a result may: by the settings and by the code that trains."""
    digest = hashlib.sha256(json.dumps([task.settings, task.seeds]).encode())
    for name in ("training.py", f"{task.name}.py"):
        digest.update((FOLDER / name).read_bytes())
    return digest.hexdigest()[:16]


def load(task: Any) -> dict[Job, Result]:
    """Results that the present settings have made."""
    path = RESULTS / f"{task.name}.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["fingerprint"] != fingerprint(task):
        return {}
    return {(row.pop("algorithm"), row.pop("target")): row for row in found["runs"]}


def save(task: Any, results: dict[Job, Result]) -> None:
    """Stores all results of a task, so that a kill leaves the old file or the new one."""
    runs = [{"algorithm": name, "target": target} | row for (name, target), row in results.items()]
    lines = ",\n".join(
        map(json.dumps, sorted(runs, key=lambda row: (row["target"], row["algorithm"])))
    )
    head = f'"fingerprint": "{fingerprint(task)}",\n"settings": {json.dumps(task.settings)}'
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{task.name}.json"
    path.with_suffix(".new").write_text(f'{{{head},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8")
    os.replace(path.with_suffix(".new"), path)


if __name__ == "__main__":
    main()
