"""Pruning and sparse training algorithms, one family a file."""

from sparsity.algorithms.global_pruners import GlobalMagnitudePruning, GlobalSaliencyPruning
from sparsity.algorithms.pruners import MagnitudePruning, RandomPruning, SaliencyPruning
from sparsity.algorithms.sparse_trainers import SET, RigL, StaticRandomSparse
from sparsity.algorithms.ste import SteMagnitudePruning, SteRandomPruning

__all__ = [
    "SET",
    "GlobalMagnitudePruning",
    "GlobalSaliencyPruning",
    "MagnitudePruning",
    "RandomPruning",
    "RigL",
    "SaliencyPruning",
    "StaticRandomSparse",
    "SteMagnitudePruning",
    "SteRandomPruning",
]
