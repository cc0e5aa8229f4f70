"""Pruning and sparse training for any optax optimizer."""

from sparsity import (
    activations,
    algorithms,
    base_updater,
    masks,
    selection,
    sparsity_distributions,
    sparsity_schedules,
    sparsity_types,
)
from sparsity.activations import (
    prune_act_struct,
    prune_act_unstruct,
    pruning_act_struct,
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
    ALGORITHM_REGISTRY,
    all_algorithm_names,
    create_updater_from_config,
    register_algorithm,
)
from sparsity.base_updater import BaseUpdater, NoPruning
from sparsity.epochs import EpochStrategy, pruning, pruning_apply
from sparsity.reports import (
    active_masks,
    layer_summary,
    plot_sparsity,
    sparsity_table,
    summarize_intersection,
    summarize_sparsity,
)
from sparsity.sparsity_schedules import (
    NoUpdateSchedule,
    OneShotSchedule,
    PeriodicSchedule,
    PolynomialSchedule,
)
from sparsity.sparsity_types import Block, Channel, NByM, SparsityType, Unstructured
from sparsity.training.state import (
    SparseState,
    get_sparse_state,
    set_sparse_state,
    sharding_like,
)

__version__ = "0.1.0"
