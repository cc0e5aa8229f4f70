"""Trains every algorithm on every task, over several seeds; writes RESULTS.md and the plots.

    bash run.sh baselines [--tasks NAME ...] [--algorithms NAME ...] [--report]

A result is stored as soon as it is there, with the settings that it was made by. The same command
goes on where it was stopped, and makes anew what other settings or another code of the task made.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import sparsity
from baselines import training
from baselines.training import Task

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
TASKS = ("mnist1d_mlp", "cartpole_ppo", "digits_cnn", "topics_transformer")
EXTRAS = ("gymnax", "matplotlib", "mlxtend", "mnist1d", "tqdm")

Result = dict[str, Any]
Job = tuple[str, float]  # algorithm, sparsity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known = sparsity.all_algorithm_names()
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="NAME")
    parser.add_argument("--algorithms", nargs="+", choices=known, default=known, metavar="NAME")
    parser.add_argument("--report", action="store_true", help="write the report, train nothing")
    options = parser.parse_args()
    for name in EXTRAS:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            sys.exit(f"{error.name} is missing: pip install 'jax-sparsity[baselines]'")
    from baselines import report

    tasks = {name: importlib.import_module(f"baselines.{name}").TASK for name in TASKS}
    try:
        if not options.report:
            train_all([tasks[name] for name in options.tasks], options.algorithms)
        report.write(list(tasks.values()))
    except KeyboardInterrupt:
        sys.exit("\nStopped; the same command goes on from here.")


def train_all(tasks: list[Task], algorithms: tuple[str, ...]) -> None:
    """Trains what is not stored yet, with a progress bar."""
    import tqdm

    marks = {task.name: fingerprint(task) for task in tasks}
    jobs = []
    for task in tasks:
        stored = load(task)
        if not stored and path_of(task).exists():
            print(f"{path_of(task)} was made by other settings or code: it is made anew.")
        jobs += [(task, job) for job in jobs_of(task, algorithms) if job not in stored]
    bar = tqdm.tqdm(jobs, unit="run", disable=not jobs)
    for task, (algorithm, target) in bar:
        bar.set_description(f"{task.name} {algorithm} {target:g}")
        start = time.perf_counter()
        metrics = training.run_seeds(task, algorithm, target)
        made = {
            "seconds": round(time.perf_counter() - start, 1),
            "date": str(datetime.date.today()),
            "machine": f"{os.cpu_count()} CPU cores ({platform.machine()})",
            "versions": f"jax {jax.__version__}, Python {platform.python_version()}",
        }
        if fingerprint(task) != marks[task.name]:
            sys.exit(f"\nThe code of {task.name} has changed: start again to train with it.")
        save(task, load(task) | {(algorithm, target): metrics | made})


def jobs_of(task: Task, algorithms: tuple[str, ...]) -> Iterator[Job]:
    """Algorithms and sparsities to train a task with; the dense network once."""
    for algorithm in algorithms:
        for target in (0.0,) if algorithm == "no_prune" else task.sparsities:
            yield algorithm, target


def fingerprint(task: Task) -> str:
    """Of the settings and of the code that trains."""
    digest = hashlib.sha256(json.dumps([task.settings, task.seeds]).encode())
    for name in ("training.py", f"{task.name}.py"):
        digest.update((FOLDER / name).read_bytes())
    return digest.hexdigest()[:16]


def load(task: Task) -> dict[Job, Result]:
    """Results that the present settings have made."""
    if not path_of(task).exists():
        return {}
    found = json.loads(path_of(task).read_text(encoding="utf-8"))
    if found["fingerprint"] != fingerprint(task):
        return {}
    return {(row.pop("algorithm"), row.pop("target")): row for row in found["runs"]}


def save(task: Task, results: dict[Job, Result]) -> None:
    """Stores all results of a task, so that a kill leaves the old file or the new one."""
    runs = [{"algorithm": name, "target": target} | row for (name, target), row in results.items()]
    lines = ",\n".join(
        map(json.dumps, sorted(runs, key=lambda row: (row["target"], row["algorithm"])))
    )
    head = f'"fingerprint": "{fingerprint(task)}",\n"settings": {json.dumps(task.settings)}'
    RESULTS.mkdir(exist_ok=True)
    new = path_of(task).with_suffix(".new")
    new.write_text(f'{{{head},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8")
    os.replace(new, path_of(task))


def path_of(task: Task) -> Path:
    return RESULTS / f"{task.name}.json"


if __name__ == "__main__":
    main()
