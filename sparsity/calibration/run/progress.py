"""Progress bar of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sparsity.calibration.run.task import PruningTask
from sparsity.calibration.run.weights import LayerIndex
from sparsity.core import extras
from sparsity.core.trees import Path, PyTree


def show_progress(
    task: PruningTask, batches: Sequence[PyTree]
) -> Callable[[Path, LayerIndex], None]:
    """Shows a bar of the layers, and returns the function that advances it by a layer."""
    traced = task.graph.traced
    scanned, shapes = traced.tracker.find_scanned_axes(), traced.parameters.find_shape
    sizes = {
        path: math.prod(shapes(path)[axis] for axis in scanned.get(path, ())) for path in task.sites
    }
    tqdm = extras.load("tqdm.auto", "progress").tqdm
    bar = tqdm(total=sum(sizes.values()), desc="oneshot", unit="layer")

    def on_layer_done(path: Path, index: LayerIndex) -> None:
        bar.set_postfix_str(f"{task.sites[path].name}, {len(batches)} batches")
        bar.update(1 if index else sizes[path])
        if bar.n >= bar.total:
            bar.close()

    return on_layer_done
