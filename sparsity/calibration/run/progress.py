"""Progress bar of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

from sparsity.calibration.run.task import Task
from sparsity.calibration.run.weights import LayerIndex
from sparsity.core import extras
from sparsity.core.trees import Path


def show_progress(task: Task, batches: int) -> Callable[[Path, LayerIndex], None]:
    """Shows a bar of the layers, and returns the function that advances it by a layer."""
    scanned, shapes = (
        task.graph.traced.tracker.find_scanned_axes(),
        task.graph.traced.parameters.find_shape,
    )
    sizes = {
        path: math.prod(shapes(path)[axis] for axis in scanned.get(path, ())) for path in task.sites
    }
    tqdm = extras.load("tqdm.auto", "progress").tqdm
    bar = tqdm(total=sum(sizes.values()), desc="oneshot", unit="layer")

    def advance(path: Path, index: LayerIndex) -> None:
        bar.set_postfix_str(f"{task.sites[path].name}, {batches} batches")
        bar.update(1 if index else sizes[path])
        if bar.n >= bar.total:
            bar.close()

    return advance
