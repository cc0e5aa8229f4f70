"""Layer-adaptive magnitude pruning: one threshold for all layers, without tuning.

Source: Lee et al. 2021, "Layer-adaptive sparsity for the magnitude-based pruning", equation 4.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from sparsity.base_updater import BaseUpdater
from sparsity.core import sharding
from sparsity.core.trees import PyTree
from sparsity.masks import Global, Scope
from sparsity.training.state import SparseState


@dataclasses.dataclass(kw_only=True)
class LampPruning(BaseUpdater):
    """Keeps the weights with the largest squares, relative to the larger weights of their layer.

    The score of a weight is its square over the sum of the squares that rank no lower in its leaf,
    including the square itself. Of equal magnitudes the one with the lower index ranks higher. The
    largest weight of a leaf scores 1, so that no layer vanishes while at least as many weights are
    kept as there are layers. Scoring sorts a leaf, which gathers a sharded leaf.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"large": jnp.array([[100.0, 400.0]]), "small": jnp.array([[1.0, 4.0]])}
      >>> pruner = LampPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> {name: mask.tolist() for name, mask in pruner.instant_sparsify(params)[1].items()}
      {'large': [[0, 1]], 'small': [[0, 1]]}
    """

    regrows: ClassVar[bool | None] = False  # a pruned weight is 0, which scores lowest
    scope: Scope = Global(use_normalization=False)

    def calculate_scores(
        self, params: PyTree, sparse_state: SparseState | None = None, grads: PyTree | None = None
    ) -> PyTree:
        def score(param: jax.Array) -> jax.Array:
            scores = sharding.shard_like(param, lamp_scores, param)
            return sharding.place_like(param, scores)

        return jax.tree.map(score, params)


@jax.jit  # a scan over the ranks is hundreds of operations
def lamp_scores(weights: jax.Array) -> jax.Array:
    """Returns the square of each weight over the sum of the squares that rank no lower.

    Args:
      weights: array of any shape, real or complex.

    Returns:
      Scores in [0, 1] of the same shape, at least float32; the same bits on any mesh. A weight of 0
      scores 0, a NaN scores NaN.

    Example:
      >>> lamp_scores(jnp.array([1.0, -3.0, 2.0, 2.0]))
      Array([0.05555556, 1.        , 0.30769232, 0.23529412], dtype=float32)
    """
    sizes = jnp.abs(weights).reshape(-1)
    sizes = sizes.astype(jnp.promote_types(sizes.dtype, jnp.float32))
    # The scores do not depend on the scale of a layer, but their squares may leave the range.
    _, exponent = jnp.frexp(jnp.nanmax(sizes, initial=0))
    squares = jnp.square(jnp.ldexp(sizes, -exponent))
    order = jnp.argsort(-squares, stable=True)
    ranked = squares[order]
    # A sum by a fixed tree: a partitioned sum would round differently.
    totals = jax.lax.associative_scan(jnp.add, ranked)
    scores = jnp.where(ranked == 0, 0, ranked / jnp.where(totals == 0, 1, totals))
    result: jax.Array = jnp.zeros_like(squares).at[order].set(scores).reshape(weights.shape)
    return result
