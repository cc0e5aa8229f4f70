"""`BaseUpdater` by the import path of jaxpruner; see `sparsity.training.base_updater`."""

from sparsity.algorithms import NoPruning
from sparsity.training.base_updater import ALGORITHM_REGISTRY, BaseUpdater

__all__ = ["ALGORITHM_REGISTRY", "BaseUpdater", "NoPruning"]
