"""Alias of `sparsity.training.base_updater`: programs for jaxpruner import this path."""

from sparsity.algorithms import NoPruning
from sparsity.training.base_updater import ALGORITHM_REGISTRY, BaseUpdater

__all__ = ["ALGORITHM_REGISTRY", "BaseUpdater", "NoPruning"]
