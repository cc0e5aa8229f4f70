"""Finished layers of a one-shot run, in a folder from which an interrupted run continues."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from sparsity.calibration.run.fingerprint import fingerprint
from sparsity.calibration.run.report import LayerReport
from sparsity.calibration.run.task import PruningTask
from sparsity.core import extras, trees
from sparsity.core.extras import reading, writing
from sparsity.core.trees import Params, PyTree
from sparsity.graph import trace


class StoredLayer(NamedTuple):
    """Pruned parameter or layer: its weights, their mask, the report, and the bias if it moved."""

    weights: jax.Array
    mask: jax.Array
    report: LayerReport
    bias: jax.Array | None = None


class LayerStore:
    """Layers that a run has finished, by their index in its order.

    Args:
      folder: created if missing. The first finished layer makes it the folder of this run.
      identity: fingerprints of all that the results depend on, by name.

    Raises:
      ValueError: the folder holds another run or other files, or there are several processes.
    """

    def __init__(self, folder: str | os.PathLike[str], identity: Mapping[str, str]) -> None:
        self._folder = pathlib.Path(folder).absolute()
        self._checkpoints = extras.load("orbax.checkpoint", "resume")
        if jax.process_count() > 1:
            raise ValueError(f"folder = {folder} serves one process, and there are several.")
        self._identity_file = self._folder / "run.json"
        self._new_identity_file = self._folder / "run.new"
        if not self._identity_file.exists():
            if self._folder.exists() and not self._folder.is_dir():
                raise ValueError(f"folder = {folder} is a file. Give a new or empty folder.")
            if self._folder.exists() and any(
                x != self._new_identity_file for x in self._folder.iterdir()
            ):
                raise ValueError(f"folder = {folder} holds other files. Give a new or empty one.")
            with writing(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                self._new_identity_file.write_text(json.dumps(identity, indent=2), encoding="utf-8")
            return
        with reading(self._identity_file, "delete the folder to start afresh"):
            old_identity: dict[str, str] = dict(
                json.loads(self._identity_file.read_text(encoding="utf-8"))
            )
        names = {**old_identity, **identity}
        if differing := [name for name in names if old_identity.get(name) != identity.get(name)]:
            raise ValueError(
                f"folder = {folder} holds another run: its {trees.listed(differing)} differ. Give "
                "another folder, or delete this one to start afresh."
            )

    def read(
        self, index: int, like: jax.Array, bias: jax.Array | None = None
    ) -> StoredLayer | None:
        """Returns a layer placed as `like` and `bias`, or `None` if the layer is not finished."""
        path = self._folder / str(index)
        if not path.exists():
            return None
        report = LayerReport(0.0, 0.0, 0.0, 0, 0.0, 0.0)
        shape = _make_tree(StoredLayer(like, like.astype(np.uint8), report, bias))
        restore_args = self._checkpoints.checkpoint_utils.construct_restore_args(shape)
        with (
            reading(path, "delete it and run again"),
            self._checkpoints.PyTreeCheckpointer() as checkpointer,
        ):
            restored = checkpointer.restore(path, item=shape, restore_args=restore_args)
            return StoredLayer(**restored | {"report": LayerReport(**restored["report"])})

    def write(self, index: int, layer: StoredLayer) -> None:
        """Saves a layer atomically: a kill leaves all of it or nothing."""
        path = self._folder / str(index)
        with writing(path), self._checkpoints.PyTreeCheckpointer() as checkpointer:
            # A run that is refused before this leaves the folder free.
            if not self._identity_file.exists():
                self._new_identity_file.replace(self._identity_file)  # atomic
            checkpointer.save(path, _make_tree(layer))


def _make_tree(layer: StoredLayer) -> dict[str, PyTree]:
    arrays = {name: value for name, value in layer._asdict().items() if value is not None}
    return arrays | {"report": dataclasses.asdict(layer.report)}


def identify(
    task: PruningTask,
    fn: Callable[[PyTree, PyTree], PyTree],
    params: Params,
    batches: Sequence[PyTree],
    **others: object,
) -> dict[str, str]:
    """Returns fingerprints of all that the results of a run depend on, by name.

    Args:
      task: the pruner, the refit, and the sparsities, patterns and batch axes of the params.
      fn: the model; its programs count, one for each shape of a batch.
      params: tree of parameters, whose arrays count.
      batches: the data, whose arrays count.
      **others: more values.

    Raises:
      ValueError: one of these has no description that another process would share.
    """
    fields = dict(vars(task.pruner))
    for name in ("sparsity_distribution_fn", "sparsity_type", "batch_axes", "use_packed_masks"):
        fields.pop(name, None)
    shapes = {fingerprint([(x.shape, str(x.dtype)) for x in _list_arrays(b)]): b for b in batches}
    sparsities = [
        (path, site.pattern, site.batch_axes, float(task.targets[path]))
        for path, site in task.sites.items()
    ]
    values: dict[str, object] = {
        "pruner": (type(task.pruner), fields),
        "refit": task.refit,
        "sparsities": sparsities,
        **others,
        "params": _list_arrays(params),
        "batches": [_list_arrays(batch) for batch in batches],
        "jax": jax.__version__,
        "fn": [trace(fn, params, batch).model.program for batch in shapes.values()],
    }
    identity = {}
    for name, value in values.items():
        try:
            identity[name] = fingerprint(value)
        except ValueError as error:
            raise ValueError(
                f"With a folder, a later call must be known to be the same, and {name} cannot be "
                f"told: {error} Or run without a folder."
            ) from error
    return identity


def _list_arrays(tree: PyTree) -> list[jax.Array]:
    """Returns the arrays of a tree: a traced program has all else."""
    return trees.split_arrays(tree)[0]
