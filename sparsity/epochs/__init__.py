"""Epoch strategies: pruning that follows a dictionary {epoch: what to prune, and how far}."""

from sparsity.epochs.updater import (
    EpochStrategy,
    pruning,
    pruning_apply,
)

__all__ = [
    "EpochStrategy",
    "pruning",
    "pruning_apply",
]
