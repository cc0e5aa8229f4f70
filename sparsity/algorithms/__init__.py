"""Pruning and sparse training algorithms, one family a file; their names in configurations."""

from sparsity.algorithms.global_pruners import GlobalMagnitudePruning, GlobalSaliencyPruning
from sparsity.algorithms.pruners import MagnitudePruning, RandomPruning, SaliencyPruning
from sparsity.algorithms.sparse_trainers import SET, RigL, StaticRandomSparse
from sparsity.algorithms.ste import SteMagnitudePruning, SteRandomPruning
from sparsity.base_updater import ALGORITHM_REGISTRY, NoPruning

ALGORITHM_REGISTRY.update(
    {
        "no_prune": NoPruning,
        "magnitude": MagnitudePruning,
        "random": RandomPruning,
        "saliency": SaliencyPruning,
        "magnitude_ste": SteMagnitudePruning,
        "random_ste": SteRandomPruning,
        "global_magnitude": GlobalMagnitudePruning,
        "global_saliency": GlobalSaliencyPruning,
        "static_sparse": StaticRandomSparse,
        "set": SET,
        "rigl": RigL,
    }
)

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
