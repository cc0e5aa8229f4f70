"""Epoch strategies: pruning that follows a dictionary {epoch: method and densities}."""

from sparsity.epochs.updater import (
    EpochStrategy as EpochStrategy,
    pruning as pruning,
    pruning_apply as pruning_apply,
)
