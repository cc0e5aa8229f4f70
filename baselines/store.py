"""Results of training, stored by task: a result belongs to the settings and code that made it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import sparsity
from baselines import channels
from baselines.training import Task

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"

Result = dict[str, Any]
Job = tuple[str, float]  # name of a row, sparsity
Recipe = tuple[str, dict[str, Any]]  # algorithm, options

# Rows beside those of the algorithms with their defaults.
VARIANTS: dict[str, Recipe] = {
    "global_magnitude (raw)": ("global_magnitude", {"use_normalization": False}),
    "global_saliency (raw)": ("global_saliency", {"use_normalization": False}),
    "grasp": ("static_sparse", {"masks_by": "grasp"}),
    "synflow": ("static_sparse", {"masks_by": "synflow"}),
    "lottery_ticket": ("static_sparse", {"masks_by": "lottery_ticket"}),
}


def row_names() -> tuple[str, ...]:
    """Every algorithm, each followed by its variants."""
    return tuple(
        name
        for algorithm in sparsity.all_algorithm_names()
        for name in (algorithm, *VARIANTS)
        if recipe(name)[0] == algorithm
    )


def rows_of(task: Task) -> tuple[str, ...]:
    """The rows of a task."""
    if isinstance(task, channels.ChannelTask):
        return channels.ROWS
    return tuple(name for name in row_names() if task.has_loss or "masks_by" not in recipe(name)[1])


def recipe(name: str) -> Recipe:
    """What a row is trained by."""
    return VARIANTS.get(name, (name, {}))


def fingerprint(task: Task) -> str:
    """Of the settings and of the code that trains."""
    digest = hashlib.sha256(json.dumps([task.settings, task.seeds]).encode())
    names = ["training", task.name]
    if isinstance(task, channels.ChannelTask):
        names = ["training", task.base.name, "channels"]
    for name in names:
        digest.update((FOLDER / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]


def load(task: Task) -> dict[Job, Result]:
    """Results that the present settings and recipes have made.

    The dense network of a task on channels is that of its base.
    """
    results = {}
    if isinstance(task, channels.ChannelTask):
        results = {job: row for job, row in load(task.base).items() if job[0] == "no_prune"}
    if not path_of(task).exists():
        return results
    found = json.loads(path_of(task).read_text(encoding="utf-8"))
    if found["fingerprint"] != fingerprint(task):
        return results
    names = {json.dumps(recipe(name)): name for name in row_names()}
    for row in found["runs"]:
        made_by = json.dumps([row.pop("algorithm"), row.pop("options", {})])
        if made_by in names:
            results[names[made_by], row.pop("target")] = row
    return results


def save(task: Task, results: dict[Job, Result]) -> None:
    """Stores all results of a task, so that a kill leaves the old file or the new one."""
    runs = []
    for name, target in sorted(results, key=lambda job: job[::-1]):
        algorithm, options = recipe(name)
        made_by = {"algorithm": algorithm} | ({"options": options} if options else {})
        runs.append(json.dumps(made_by | {"target": target} | results[name, target]))
    lines = ",\n".join(runs)
    head = f'"fingerprint": "{fingerprint(task)}",\n"settings": {json.dumps(task.settings)}'
    RESULTS.mkdir(exist_ok=True)
    new = path_of(task).with_suffix(".new")
    new.write_text(f'{{{head},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8")
    os.replace(new, path_of(task))


def path_of(task: Task) -> Path:
    return RESULTS / f"{task.name}.json"
