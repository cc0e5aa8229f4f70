"""Layer-adaptive magnitude pruning: one threshold for all layers, without tuning.

Source: Lee et al. 2021, "Layer-adaptive sparsity for the magnitude-based pruning", equation 4.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from sparsity.core import sharding
from sparsity.core.arrays import promote, scale_to_one
from sparsity.core.checks import is_traced
from sparsity.core.trees import Grads, Params, ScoreTree
from sparsity.masks import Global, Scope
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.state import SparseState


@dataclasses.dataclass(kw_only=True)
class LampPruning(BaseUpdater):
    """Keeps the weights with the largest squares, relative to the larger weights of their layer.

    The score of a weight is its square over the sum of the squares that rank no lower in its layer,
    including the square itself. Of equal magnitudes the one with the lower index ranks higher. The
    largest weight of a layer scores 1, so that no layer vanishes while at least as many weights are
    kept as there are layers. A mask update sorts each layer, and gathers a layer that is sharded.

    Source: Lee et al. 2021, "Layer-adaptive sparsity" (LAMP), equation 4.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"large": jnp.array([[100.0, 400.0]]), "small": jnp.array([[1.0, 4.0]])}
      >>> pruner = LampPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> {name: mask.tolist() for name, mask in pruner.instant_sparsify(params)[1].items()}
      {'large': [[0, 1]], 'small': [[0, 1]]}
    """

    regrows: ClassVar[bool] = False  # a pruned weight is 0, which scores lowest
    scope: Scope = Global(use_normalization=False)

    def calculate_scores(
        self, params: Params, sparse_state: SparseState | None = None, grads: Grads | None = None
    ) -> ScoreTree:
        params, treedef = jax.tree.flatten(params)
        scores = list[jax.Array]()
        for param in params:
            if scores and is_traced(param):  # a layer is sorted when the one before is done
                param, scores[-1] = lax.optimization_barrier((param, scores[-1]))
            score = sharding.shard_like(param, lamp_scores, param)
            scores.append(sharding.place_like(param, score))
        return jax.tree.unflatten(treedef, scores)


@jax.jit
def lamp_scores(weights: jax.Array) -> jax.Array:
    """Returns the square of each weight over the sum of the squares that rank no lower.

    Args:
      weights: array of any shape, real or complex.

    Returns:
      Scores in [0, 1] of the same shape, at least float32. A weight of 0 scores 0, a weight that is
      not finite scores NaN.

    Example:
      >>> lamp_scores(jnp.array([1.0, -3.0, 2.0, 2.0]))
      Array([0.05555556, 1.        , 0.30769232, 0.23529412], dtype=float32)
    """
    magnitudes = jnp.abs(weights)
    magnitudes = magnitudes.astype(promote(magnitudes.dtype, jnp.float32))
    if not weights.size:
        return magnitudes
    scaled = scale_to_one([magnitudes])[0][0].reshape(-1)
    finite = jnp.where(jnp.isfinite(scaled), scaled, jnp.nan)
    index = lax.iota(jnp.int32, len(scaled))
    falling, order = lax.sort((-finite, index), num_keys=1, is_stable=True)  # NaN last
    squares = jnp.square(falling)
    total = jnp.cumsum(jnp.where(jnp.isnan(squares), 0, squares))
    # Sums are rounded: a score may not exceed that of a larger weight.
    ranked = lax.cummin(squares / jnp.where(total == 0, 1, total))  # NaN from the first one on
    return jnp.zeros_like(ranked).at[order].set(ranked).reshape(weights.shape)
