"""Pruning and sparse training algorithms, by family, with names for configurations."""

from sparsity.algorithms.acdc import ACDC
from sparsity.algorithms.admm import ADMMPruning
from sparsity.algorithms.at_init import (
    SnipPruning,
    grasp_scores,
    prune_at_init,
    snip_scores,
    synflow_scores,
)
from sparsity.algorithms.global_pruners import GlobalMagnitudePruning, GlobalSaliencyPruning
from sparsity.algorithms.lamp import LampPruning
from sparsity.algorithms.movement import MovementPruning
from sparsity.algorithms.no_pruning import NoPruning
from sparsity.algorithms.pruners import MagnitudePruning, RandomPruning, SaliencyPruning
from sparsity.algorithms.sparse_trainers import SET, GlobalRigL, RigL, StaticRandomSparse
from sparsity.algorithms.sr_ste import SRSTE
from sparsity.algorithms.srigl import SRigL
from sparsity.algorithms.ste import SteMagnitudePruning, SteRandomPruning
from sparsity.algorithms.tickets import lottery_ticket
from sparsity.algorithms.top_kast import TopKast
from sparsity.training.base_updater import ALGORITHM_REGISTRY

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
        "lamp": LampPruning,
        "movement": MovementPruning,
        "snip": SnipPruning,
        "admm": ADMMPruning,
        "acdc": ACDC,
        "sr_ste": SRSTE,
        "top_kast": TopKast,
        "srigl": SRigL,
        "global_rigl": GlobalRigL,
    }
)

__all__ = [
    "ACDC",
    "SET",
    "SRSTE",
    "ADMMPruning",
    "GlobalMagnitudePruning",
    "GlobalRigL",
    "GlobalSaliencyPruning",
    "LampPruning",
    "MagnitudePruning",
    "MovementPruning",
    "NoPruning",
    "RandomPruning",
    "RigL",
    "SRigL",
    "SaliencyPruning",
    "SnipPruning",
    "StaticRandomSparse",
    "SteMagnitudePruning",
    "SteRandomPruning",
    "TopKast",
    "grasp_scores",
    "lottery_ticket",
    "prune_at_init",
    "snip_scores",
    "synflow_scores",
]
