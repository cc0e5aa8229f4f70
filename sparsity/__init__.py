"""Pruning and sparse training for any optax optimizer."""

from sparsity import (
    activations,
    algorithms,
    base_updater,
    calibration,
    masks,
    selection,
    sparsity_distributions,
    sparsity_schedules,
    sparsity_types,
)
from sparsity import predecessors as mask_calculator
from sparsity import predecessors as utils
from sparsity.activations import (
    prune_act_struct,
    prune_act_unstruct,
    sparsify_linen,
    sparsify_nnx,
)
from sparsity.algorithms import (
    SET,
    GlobalMagnitudePruning,
    GlobalSaliencyPruning,
    MagnitudePruning,
    RandomPruning,
    RigL,
    SaliencyPruning,
    StaticRandomSparse,
    SteMagnitudePruning,
    SteRandomPruning,
)
from sparsity.api import (
    all_algorithm_names,
    create_updater_from_config,
    register_algorithm,
    register_distribution,
    register_schedule,
    register_scope,
)
from sparsity.base_updater import ALGORITHM_REGISTRY, BaseUpdater, NoPruning
from sparsity.calibration import (
    ADMM,
    LeastSquares,
    RIAPruning,
    SparseGPTPruning,
    Statistic,
    WandaPruning,
    calibrate,
    owl,
)
from sparsity.epochs import EpochStrategy, pruning, pruning_apply
from sparsity.graph import Coupled, Graph, budget, trace
from sparsity.lora import merge_lora
from sparsity.masks import Global, Layerwise, Scope, elementwise, pack_masks, unpack_masks
from sparsity.predecessors import apply_mask, pruning_act_struct, pruning_act_unstruct
from sparsity.reports import (
    LayerSummary,
    active_masks,
    layer_summary,
    plot_sparsity,
    sparsity_table,
    summarize_intersection,
    summarize_sparsity,
)
from sparsity.shrinking import Plan, Small, shrink
from sparsity.sparsity_distributions import ERK, Distribution, Uniform
from sparsity.sparsity_schedules import (
    NoUpdateSchedule,
    OneShotSchedule,
    PeriodicSchedule,
    PolynomialSchedule,
    Schedule,
)
from sparsity.sparsity_types import Block, Channel, NByM, SparsityType, Unstructured
from sparsity.training.state import (
    SparseState,
    get_sparse_state,
    set_sparse_state,
    sharding_like,
)

__version__ = "0.1.0"

__all__ = [
    "ADMM",
    "ALGORITHM_REGISTRY",
    "ERK",
    "SET",
    "BaseUpdater",
    "Block",
    "Channel",
    "Coupled",
    "Distribution",
    "EpochStrategy",
    "Global",
    "GlobalMagnitudePruning",
    "GlobalSaliencyPruning",
    "Graph",
    "LayerSummary",
    "Layerwise",
    "LeastSquares",
    "MagnitudePruning",
    "NByM",
    "NoPruning",
    "NoUpdateSchedule",
    "OneShotSchedule",
    "PeriodicSchedule",
    "Plan",
    "PolynomialSchedule",
    "RIAPruning",
    "RandomPruning",
    "RigL",
    "SaliencyPruning",
    "Schedule",
    "Scope",
    "Small",
    "SparseGPTPruning",
    "SparseState",
    "SparsityType",
    "StaticRandomSparse",
    "Statistic",
    "SteMagnitudePruning",
    "SteRandomPruning",
    "Uniform",
    "Unstructured",
    "WandaPruning",
    "__version__",
    "activations",
    "active_masks",
    "algorithms",
    "all_algorithm_names",
    "apply_mask",
    "base_updater",
    "budget",
    "calibrate",
    "calibration",
    "create_updater_from_config",
    "elementwise",
    "get_sparse_state",
    "layer_summary",
    "mask_calculator",
    "masks",
    "merge_lora",
    "owl",
    "pack_masks",
    "plot_sparsity",
    "prune_act_struct",
    "prune_act_unstruct",
    "pruning",
    "pruning_act_struct",
    "pruning_act_unstruct",
    "pruning_apply",
    "register_algorithm",
    "register_distribution",
    "register_schedule",
    "register_scope",
    "selection",
    "set_sparse_state",
    "sharding_like",
    "shrink",
    "sparsify_linen",
    "sparsify_nnx",
    "sparsity_distributions",
    "sparsity_schedules",
    "sparsity_table",
    "sparsity_types",
    "summarize_intersection",
    "summarize_sparsity",
    "trace",
    "unpack_masks",
    "utils",
]
