"""Epoch strategies: pruning that follows a dictionary {epoch: method and densities}."""

from sparsity.epochs.updater import EpochStrategy, pruning, pruning_apply

__all__ = ["EpochStrategy", "pruning", "pruning_apply"]
