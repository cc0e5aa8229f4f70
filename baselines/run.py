"""Trains every algorithm on every task, over several seeds; writes RESULTS.md and the plots.

    python -m baselines.run [--tasks NAME ...] [--algorithms NAME ...] [--report]

A result is stored as soon as it is there, with the settings that it was made by. The same command
continues where it was stopped, and repeats the parts that other settings or another code of the
task made.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import sys
import time
from collections.abc import Iterator

import jax

from baselines import channels, store, training
from baselines.store import Job
from baselines.training import Task

TASKS = ("mnist1d_mlp", "cartpole_ppo", "digits_cnn", "topics_transformer")
EXTRAS = ("gymnax", "matplotlib", "mlxtend", "mnist1d", "tqdm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    known, all_tasks = store.row_names(), (*TASKS, *(task.name for task in channels.TASKS))
    parser.add_argument("--tasks", nargs="+", choices=all_tasks, default=all_tasks, metavar="NAME")
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
    tasks |= {task.name: task for task in channels.TASKS}
    try:
        if not options.report:
            train_all([tasks[name] for name in options.tasks], options.algorithms)
        report.write(list(tasks.values()))
    except KeyboardInterrupt:
        sys.exit("\nStopped; the same command continues from here.")


def train_all(tasks: list[Task], names: tuple[str, ...]) -> None:
    """Trains what is not stored yet, with a progress bar."""
    import tqdm

    marks = {task.name: store.fingerprint(task) for task in tasks}
    jobs = []
    for task in tasks:
        stored = store.load(task)
        if not stored and store.path_of(task).exists():
            print(f"{store.path_of(task)} was made by other settings or code: it is made anew.")
        jobs += [(task, job) for job in jobs_of(task, names) if job not in stored]
    bar = tqdm.tqdm(jobs, unit="run", disable=not jobs)
    for task, (name, target) in bar:
        bar.set_description(f"{task.name} {name} {target:g}")
        algorithm, options = store.recipe(name)
        start = time.perf_counter()
        metrics = training.run_seeds(task, algorithm, target, **options)
        made = {
            "seconds": round(time.perf_counter() - start, 1),
            "date": str(datetime.date.today()),
            "machine": f"{os.cpu_count()} CPU cores ({platform.machine()})",
            "versions": f"jax {jax.__version__}, Python {platform.python_version()}",
        }
        if store.fingerprint(task) != marks[task.name]:
            sys.exit(f"\nThe code of {task.name} has changed: start again to train with it.")
        store.save(task, store.load(task) | {(name, target): metrics | made})


def jobs_of(task: Task, names: tuple[str, ...]) -> Iterator[Job]:
    """Rows and sparsities to train a task with; the dense network once."""
    for name in [name for name in names if name in store.rows_of(task)]:
        for target in (0.0,) if name == "no_prune" else task.sparsities:
            yield name, target


if __name__ == "__main__":
    main()
