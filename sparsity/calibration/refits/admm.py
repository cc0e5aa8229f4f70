"""ADMM as a refit: steps for the outputs of a layer alternate with steps for its support.

Source: Boza 2024, arXiv 2401.02938, algorithms 1 and 2. Comments carry the symbols of the paper and
its code: W weights, Z weights on the support, U scaled duals, XX the damped Gram matrix of inputs
of unit norm, XY = XX W.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve

from sparsity.calibration.refits.base import Select
from sparsity.calibration.statistics.errors import dot
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.core import sharding
from sparsity.core.arrays import promote
from sparsity.core.checks import check_int, check_number


@dataclasses.dataclass(frozen=True)
class ADMM:
    """Alternates between the outputs and the support, by the alternating direction of multipliers.

    This refit, for `refit=` of `oneshot` and `prune`, solves the layers of a trained model without
    training; the algorithm `sparsity.ADMMPruning` uses the same method while a network trains.

    Inputs are scaled to unit norm, so that weights compare as Wanda's do. With `gradual`, the
    pruner gives sparsity, pattern and batch axes, and its mask does not matter: the first
    iterations choose one in its place. Iteration i keeps the highest |W + U| of the layer at
    sparsity s (1 - (1 - (i + 1) / gradual)^3), or n of m.

    Attributes:
      iterations: number of iterations; each costs one product with the inverse Gram matrix.
      gradual: iterations that choose a mask; 0 keeps the pruner's.
      rho: weight of the support against the outputs.
      damping: added to the diagonal, which is 1.

    Source: Boza 2024, "Fast and Effective Weight Update for Pruned Large Language Models",
    algorithms 1 and 2. A version of its code starts at the full sparsity and lets N:M ramp.
    Inputs that were always 0 keep the pruner's weights.

    Example:
      >>> x = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> seen = Statistic(gram=x.T @ x, count=2, contracting=(0,), output=(1,))
      >>> mask = jnp.array([[1], [0]], jnp.uint8)
      >>> dense, pruned = jnp.array([[2.0], [4.0]]), jnp.array([[2.0], [0.0]])
      >>> refit = ADMM(iterations=50, damping=0.0)
      >>> refit(dense, pruned, mask, seen, select=lambda *_: mask)[0].round(3)  # 2 + 4 x 1 / 2
      Array([[4.],
             [0.]], dtype=float32)
    """

    iterations: int = 20
    gradual: int = 0
    rho: float = 1.0
    damping: float = 0.1

    def __post_init__(self) -> None:
        check_int("iterations", self.iterations, 1)
        check_int("gradual", self.gradual, 0, self.iterations)
        for name in ("rho", "damping"):
            check_number(name, getattr(self, name), 0)
        if not self.rho:
            raise ValueError("rho must be above 0, got rho = 0.")

    def __call__(
        self,
        dense: jax.Array,
        pruned: jax.Array,
        mask: jax.Array,
        statistic: Statistic,
        select: Select,
    ) -> tuple[jax.Array, jax.Array]:
        grams = statistic.require_real_grams()
        start = functools.partial(_initialize, self.rho, self.damping)
        state = sharding.shard_like((dense, dense, grams), start, dense, statistic)
        (weights, products, inverse), duals = state, jnp.zeros_like(state[0])
        step = functools.partial(_iterate, self.rho)
        for i in range(self.iterations):
            if i < self.gradual:
                share = 1 - (1 - (i + 1) / self.gradual) ** 3  # of the target sparsity
                mask = select(jnp.abs(weights + duals), share)
            weights, duals = sharding.shard_like(
                (dense, dense), step, weights, duals, mask, products, inverse, statistic
            )
        total = weights + duals  # Z = (W + U) M
        return sharding.shard_like(dense, _unscale_weights, total, pruned, mask, statistic), mask


@jax.jit
def _initialize(
    rho: float, damping: float, dense: jax.Array, statistic: Statistic
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns W and XY as parameters, and inv(XX + rho I)."""
    norms, inverse_norms = _compute_input_norms(statistic)
    gram = statistic.require_real_grams().astype(promote(dense.dtype, norms.dtype))
    eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    gram = gram * inverse_norms[..., :, None] * inverse_norms[..., None, :] + damping * eye  # XX
    # W of inputs of unit norm: W_ij ||X_j||, so that outputs stay
    weights = statistic.to_matrices(dense).astype(gram.dtype) * norms[..., None, :]
    factor = lax.linalg.cholesky(gram + rho * eye, symmetrize_input=False), True
    inverse = cho_solve(factor, jnp.broadcast_to(eye, gram.shape))
    products = statistic.from_matrices(dot(weights, gram), dense.shape)
    return statistic.from_matrices(weights, dense.shape), products, inverse


@jax.jit
def _iterate(
    rho: float,
    weights: jax.Array,
    duals: jax.Array,
    mask: jax.Array,
    products: jax.Array,
    inverse: jax.Array,
    statistic: Statistic,
) -> tuple[jax.Array, jax.Array]:
    """Returns W and U after one iteration."""
    sparse = jnp.where(mask > 0, weights + duals, 0)  # Z = (W + U) M
    duals = duals + weights - sparse  # U = U + W - Z
    right_side = statistic.to_matrices(products + rho * (sparse - duals))
    # W = XXinv (XY + rho (Z - U))
    return statistic.from_matrices(dot(right_side, inverse), mask.shape), duals


@jax.jit
def _unscale_weights(
    weights: jax.Array, pruned: jax.Array, mask: jax.Array, statistic: Statistic
) -> jax.Array:
    """Returns the weights on the support, in the scale of the parameter."""
    scale = _compute_input_norms(statistic)[1][..., None, :]
    kept = statistic.to_matrices(pruned).astype(weights.dtype)  # jax promotes no float8
    unscaled = jnp.where(scale > 0, statistic.to_matrices(weights) * scale, kept)
    solution = jnp.where(mask > 0, statistic.from_matrices(unscaled, mask.shape), 0)
    return solution.astype(pruned.dtype)


def _compute_input_norms(statistic: Statistic) -> tuple[jax.Array, jax.Array]:
    """Returns norms of the inputs, and 1 / norm; 0 for inputs that were always 0."""
    norms = jnp.sqrt(jnp.diagonal(statistic.require_real_grams(), axis1=-2, axis2=-1))
    return norms, jnp.where(norms > 0, 1 / jnp.where(norms > 0, norms, 1), 0)
