"""Alias of `sparsity.training.base_updater`: programs for jaxpruner import this path."""

from sparsity.algorithms import NoPruning as NoPruning
from sparsity.training.base_updater import (
    ALGORITHM_REGISTRY as ALGORITHM_REGISTRY,
    BaseUpdater as BaseUpdater,
    WrappedOptimizer as WrappedOptimizer,
)
