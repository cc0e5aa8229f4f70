"""Results of training, stored by task: a result belongs to the settings and code that made it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from baselines.training import Task

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"

Result = dict[str, Any]
Job = tuple[str, float]  # algorithm, sparsity


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
