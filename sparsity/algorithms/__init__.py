"""Pruning and sparse training algorithms, by family, with names for configurations."""

from sparsity.algorithms.acdc import ACDC as ACDC
from sparsity.algorithms.admm import ADMMPruning as ADMMPruning
from sparsity.algorithms.at_init import (
    SnipPruning as SnipPruning,
    grasp_scores as grasp_scores,
    prune_at_init as prune_at_init,
    snip_scores as snip_scores,
    synflow_scores as synflow_scores,
)
from sparsity.algorithms.global_pruners import (
    GlobalMagnitudePruning as GlobalMagnitudePruning,
    GlobalSaliencyPruning as GlobalSaliencyPruning,
)
from sparsity.algorithms.lamp import LampPruning as LampPruning
from sparsity.algorithms.movement import MovementPruning as MovementPruning
from sparsity.algorithms.no_pruning import NoPruning as NoPruning
from sparsity.algorithms.pruners import (
    MagnitudePruning as MagnitudePruning,
    RandomPruning as RandomPruning,
    SaliencyPruning as SaliencyPruning,
)
from sparsity.algorithms.sparse_trainers import (
    SET as SET,
    GlobalRigL as GlobalRigL,
    RigL as RigL,
    StaticRandomSparse as StaticRandomSparse,
)
from sparsity.algorithms.sr_ste import SRSTE as SRSTE
from sparsity.algorithms.srigl import SRigL as SRigL
from sparsity.algorithms.ste import (
    SteMagnitudePruning as SteMagnitudePruning,
    SteRandomPruning as SteRandomPruning,
)
from sparsity.algorithms.tickets import lottery_ticket as lottery_ticket
from sparsity.algorithms.top_kast import TopKast as TopKast
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
