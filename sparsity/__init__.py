"""Pruning and sparse training for any optax optimizer.

Two lines of a training program change:

  pruner = sparsity.create_updater_from_config({"algorithm": "magnitude", "sparsity": 0.9, ...})
  tx = pruner.wrap_optax(tx)  # masks live in the state of the optimizer

`tx.update` puts pruned weights at zero; `post_gradient_update` at the end of a step does so, too,
for values that other code changes. Straight-through methods add `pre_forward_update` before the
model.
"""

# Subpackages and modules: not in `__all__`, but reachable as `sparsity.masks` and so on.
from sparsity import (
    activations as activations,
    algorithms as algorithms,
    base_updater as base_updater,
    calibration as calibration,
    compacting as compacting,
    compat as compat,
    finetuning as finetuning,
    graph as graph,
    masks as masks,
    patterns as patterns,
    reports as reports,
    selection as selection,
    shrinking as shrinking,
    sparsity_distributions as sparsity_distributions,
    sparsity_schedules as sparsity_schedules,
    sparsity_types as sparsity_types,
)
from sparsity.activations import prune_act_struct, prune_act_unstruct, sparsify_linen, sparsify_nnx
from sparsity.algorithms import (
    ACDC,
    SET,
    SRSTE,
    ADMMPruning,
    GlobalMagnitudePruning,
    GlobalRigL,
    GlobalSaliencyPruning,
    LampPruning,
    MagnitudePruning,
    MovementPruning,
    NoPruning,
    RandomPruning,
    RigL,
    SaliencyPruning,
    SnipPruning,
    SRigL,
    StaticRandomSparse,
    SteMagnitudePruning,
    SteRandomPruning,
    TopKast,
    lottery_ticket,
    prune_at_init,
    snip_scores,
)
from sparsity.api import (
    all_algorithm_names,
    create_updater_from_config,
    register_algorithm,
    register_distribution,
    register_schedule,
    register_scope,
)
from sparsity.calibration import (
    ADMM,
    BlockRefit,
    FLAPPruning,
    LeastSquares,
    OSSCARPruning,
    RIAPruning,
    SparseGPTPruning,
    Statistic,
    WandaPruning,
    calibrate,
    oneshot,
    owl,
)
from sparsity.compacting import compact

# Names of jaxpruner and jax_pruning: not in `__all__` either.
from sparsity.compat.jax_pruning import (
    pruning_act_struct as pruning_act_struct,
    pruning_act_unstruct as pruning_act_unstruct,
)
from sparsity.compat.jaxpruner import (
    apply_mask as apply_mask,
    summarize_intersection as summarize_intersection,
)
from sparsity.epochs import EpochStrategy, pruning, pruning_apply
from sparsity.finetuning.delta import Delta
from sparsity.finetuning.train_only import train_only
from sparsity.graph import Coupled, Graph, budget, trace
from sparsity.lora import merge_lora
from sparsity.masks import Global, Layerwise, Scope, unpack_masks
from sparsity.masks.distributions import ERK, Distribution, Uniform
from sparsity.patterns import Block, Channel, FanIn, NByM, SparsityType, Unstructured
from sparsity.ranking import rank_groups
from sparsity.reports import active_masks, check, sparsity_table, summarize_sparsity
from sparsity.shrinking import Plan, shrink
from sparsity.sparsity_schedules import (
    NoUpdateSchedule,
    OneShotSchedule,
    PeriodicSchedule,
    PolynomialSchedule,
    Schedule,
)
from sparsity.training.base_updater import ALGORITHM_REGISTRY, BaseUpdater
from sparsity.training.hooks import elementwise
from sparsity.training.state import SparseState, get_sparse_state, set_sparse_state, sharding_like
from sparsity.version import __version__ as __version__

# Modules of jaxpruner.
utils = mask_calculator = compat.jaxpruner

__all__ = [
    "ACDC",
    "ADMM",
    "ALGORITHM_REGISTRY",
    "ERK",
    "SET",
    "SRSTE",
    "ADMMPruning",
    "BaseUpdater",
    "Block",
    "BlockRefit",
    "Channel",
    "Coupled",
    "Delta",
    "Distribution",
    "EpochStrategy",
    "FLAPPruning",
    "FanIn",
    "Global",
    "GlobalMagnitudePruning",
    "GlobalRigL",
    "GlobalSaliencyPruning",
    "Graph",
    "LampPruning",
    "Layerwise",
    "LeastSquares",
    "MagnitudePruning",
    "MovementPruning",
    "NByM",
    "NoPruning",
    "NoUpdateSchedule",
    "OSSCARPruning",
    "OneShotSchedule",
    "PeriodicSchedule",
    "Plan",
    "PolynomialSchedule",
    "RIAPruning",
    "RandomPruning",
    "RigL",
    "SRigL",
    "SaliencyPruning",
    "Schedule",
    "Scope",
    "SnipPruning",
    "SparseGPTPruning",
    "SparseState",
    "SparsityType",
    "StaticRandomSparse",
    "Statistic",
    "SteMagnitudePruning",
    "SteRandomPruning",
    "TopKast",
    "Uniform",
    "Unstructured",
    "WandaPruning",
    "active_masks",
    "all_algorithm_names",
    "budget",
    "calibrate",
    "check",
    "compact",
    "create_updater_from_config",
    "elementwise",
    "get_sparse_state",
    "lottery_ticket",
    "merge_lora",
    "oneshot",
    "owl",
    "prune_act_struct",
    "prune_act_unstruct",
    "prune_at_init",
    "pruning",
    "pruning_apply",
    "rank_groups",
    "register_algorithm",
    "register_distribution",
    "register_schedule",
    "register_scope",
    "set_sparse_state",
    "sharding_like",
    "shrink",
    "snip_scores",
    "sparsify_linen",
    "sparsify_nnx",
    "sparsity_table",
    "summarize_sparsity",
    "trace",
    "train_only",
    "unpack_masks",
]
