"""Movement pruning: removes the weights that training moves towards zero.

Source: Sanh et al. 2020, "Movement pruning: adaptive sparsity by fine-tuning", equation 2.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from sparsity.core import sharding, trees
from sparsity.core.arrays import promote
from sparsity.core.trees import Grads, Masks, Params, PyTree, ScoreTree
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.state import SparseState


@dataclasses.dataclass(kw_only=True)
class MovementPruning(BaseUpdater):
    """Keeps the weights with the largest sum of -weight * gradient over all steps so far.

    The sums are the `algorithm_state`, at least float32, and include the current step. Weights are
    taken under the masks. The sum of a pruned weight stays constant. The weight returns, at zero
    and with a fresh optimizer state, once enough sums of other weights have fallen below its sum.

    The published code trains the sums by a separate Adam, and pruned weights keep their values. Its
    soft variant, with a threshold in place of a rank, is not offered: the number of weights above
    the threshold depends on the rate of the separate Adam and on a penalty, so that no target would
    be met.

    Source: Sanh et al. 2020, "Movement pruning", equation 2.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> weights, grads = jnp.array([[2.0, 1.0]]), jnp.array([[1.0, -1.0]])
      >>> pruner = MovementPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> pruner.instant_sparsify(weights, grads)[0]  # descent enlarges the second
      Array([[0., 1.]], dtype=float32)
    """

    regrows: ClassVar[bool] = True

    def init_algorithm_state(self, params: Params, masks: Masks) -> PyTree:
        def make_zeros(
            _: trees.KeyPath, param: jax.Array, mask: jax.Array | None
        ) -> jax.Array | None:
            if mask is None:
                return None
            real = jnp.finfo(param.dtype).dtype  # of the parts of a complex weight
            return sharding.zeros_like(param, promote(real, jnp.float32))

        return trees.map_matched(make_zeros, params, masks)

    def accumulate(self, sparse_state: SparseState, params: Params, grads: Grads) -> SparseState:
        def add(
            _: trees.KeyPath, param: jax.Array, grad: PyTree, total: jax.Array | None
        ) -> jax.Array | None:
            return None if total is None else total + compute_movement(param, grad)

        sums = trees.map_matched(add, params, grads, sparse_state.algorithm_state)
        return sparse_state._replace(algorithm_state=sums)

    def calculate_scores(
        self, params: Params, sparse_state: SparseState | None = None, grads: Grads | None = None
    ) -> ScoreTree:
        if sparse_state is not None:
            return sparse_state.algorithm_state
        if grads is None:
            raise ValueError(
                f"{type(self).__name__} scores weights by their gradients, got grads = None. Pass "
                "those of a step, instant_sparsify(params, grads), or train with wrap_optax."
            )

        return trees.map_matched(lambda _, w, grad: compute_movement(w, grad), params, grads)


def compute_movement(param: jax.Array, grad: jax.Array) -> jax.Array:
    """Returns -param * grad, at least float32: the growth of |param| by a small descent step."""
    dtype = promote(param.dtype, jnp.float32)
    return -jnp.real(param.astype(dtype) * grad.astype(dtype))
