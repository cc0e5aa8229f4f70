"""Events for TensorBoard: `tensorboard --logdir RUN_DIR` shows them during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.mnist.moves import Moves
from examples.mnist.network import Network, TrainState

try:
    from tensorboardX import SummaryWriter
except ImportError as error:
    raise ImportError("--tensorboard needs: pip install 'jax-sparsity[tensorboard]'") from error


class Board:
    """Writes events to a folder.

    Args:
      folder: where; it is made if need be.
      step: events of later steps, which a stopped run has left, are hidden.
    """

    def __init__(self, folder: Path, step: int):
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write_evaluation(
        self, row: dict[str, Any], networks: dict[str, Network], trained: dict[str, TrainState]
    ) -> None:
        """Writes loss, accuracy, sparsity in total and by layer, and histograms of the weights."""
        for role, network in networks.items():
            values = row[role]
            for name in ("loss", "accuracy", "sparsity"):
                self._writer.add_scalar(f"{name}/{role}", values[name], row["step"])
            if role == "sparse":
                for layer, value in values["layers"].items():
                    self._writer.add_scalar(f"sparsity_by_layer/{layer}", value, row["step"])
            leaves = jax.tree.leaves_with_path(network.used_params(trained[role]))
            for path, leaf in leaves:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                weights = np.asarray(leaf)[np.asarray(leaf) != 0]
                if weights.size:
                    self._writer.add_histogram(f"{role}_nonzeros/{name}", weights, row["step"])
        self._writer.flush()

    def write_mask_update(self, row: dict[str, Any], moves: Moves) -> None:
        """Writes churn and shares of active weights by layer and in total, and the masks."""
        for kind in ("churn", "active", "ever_active"):
            for layer, value in row[kind].items():
                self._writer.add_scalar(f"{kind}/{layer}", value, row["step"])
        for path, mask in jax.tree.leaves_with_path(moves.active):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            image = 255 * np.asarray(mask).reshape(-1, mask.shape[-1])[:512, :512]
            self._writer.add_image(f"masks/{name}", image, row["step"], dataformats="HW")
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
