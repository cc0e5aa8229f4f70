"""Layer-adaptive magnitude pruning: the algorithm, its scores, and a search for the highest."""

from sparsity.algorithms.lamp.pruning import LampPruning as LampPruning
