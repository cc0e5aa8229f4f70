"""AC/DC: alternates sparse and dense phases of training, and ends with a sparse network.

Source: Peste et al. 2021, "AC/DC: alternating compressed/decompressed training of deep neural
networks", algorithm 1.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from sparsity.algorithms.pruners import MagnitudePruning
from sparsity.core.trees import Masks
from sparsity.masks import are_ones
from sparsity.sparsity_schedules import find_last_update
from sparsity.training.hooks import StepInputs
from sparsity.training.state import SparseState


@dataclasses.dataclass(kw_only=True)
class ACDC(MagnitudePruning):
    """Trains dense until the schedule starts; then each update ends a dense or a sparse phase.

    A sparse phase keeps the weights of the largest magnitude. The end step begins the last sparse
    phase: use a `PeriodicSchedule` with an end. In a dense phase the pruned weights restart at
    zero, with a fresh optimizer state. The source keeps the momentum of the optimizer, which here
    has seen no gradient of pruned weights.

    Source: Peste et al. 2021, "AC/DC", algorithm 1.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> schedule = sparsity.PeriodicSchedule(2, update_start_step=2, update_end_step=6)
      >>> pruner = ACDC(scheduler=schedule, sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> tx = pruner.wrap_optax(optax.sgd(0.1))
      >>> weights = jnp.arange(1.0, 11.0).reshape(2, 5)
      >>> state, kept = tx.init(weights), []
      >>> for step in range(8):
      ...     _, state = jax.jit(tx.update)(weights, state, weights)
      ...     kept.append(int(state.masks.sum()))
      >>> kept
      [10, 10, 5, 5, 10, 10, 5, 5]
    """

    is_sparse_gradients: bool = True

    regrows: ClassVar[bool] = True
    schedule_type: ClassVar[str] = "periodic"

    def new_masks(self, sparse_state: SparseState, inputs: StepInputs) -> Masks:
        end = find_last_update(self.scheduler)
        is_sparse = are_ones(sparse_state.masks)
        if end is not None:
            is_sparse |= sparse_state.count == end
        pruned = super().new_masks(sparse_state, inputs)
        is_dense = 1 - is_sparse.astype("uint8")
        return jax.tree.map(lambda mask: mask | is_dense, pruned)
