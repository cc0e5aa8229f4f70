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

from sparsity.calibration.refits.base import Select, dot
from sparsity.calibration.statistics import Statistic
from sparsity.core import sharding
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
      >>> refit(dense, pruned, mask, seen, select=None)[0].round(3)  # 2 + 4 x 1 / 2
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
        like = (dense, dense, dense, statistic.real_grams())
        start = functools.partial(_start, self.rho, self.damping)
        weights, duals, products, inverse = sharding.shard_like(like, start, dense, statistic)
        step = functools.partial(_step, self.rho)
        for i in range(self.iterations):
            if i < self.gradual:
                share = 1 - (1 - (i + 1) / self.gradual) ** 3  # of the target sparsity
                mask = select(jnp.abs(weights + duals), share)
            state = (weights, duals, mask, products, inverse)
            weights, duals = sharding.shard_like((dense, dense), step, *state, statistic)
        end = sharding.shard_like(dense, _end, weights, duals, pruned, mask, statistic)
        return end, mask


@jax.jit
def _start(
    rho: float, damping: float, dense: jax.Array, statistic: Statistic
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns W, U, XY and inv(XX + rho I): the last [*batch, inputs, inputs], others as leaves."""
    norms, inverse_norms = _norms(statistic)
    gram = statistic.real_grams().astype(jnp.promote_types(dense.dtype, norms.dtype))
    gram *= inverse_norms[..., :, None] * inverse_norms[..., None, :]
    eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    gram += damping * eye  # XX
    weights = statistic.matrices(dense).astype(gram.dtype) * norms[..., None, :]
    inverse = jnp.linalg.inv(gram + rho * eye)
    shape = dense.shape
    start = statistic.leaf(weights, shape)
    return start, jnp.zeros_like(start), statistic.leaf(dot(weights, gram), shape), inverse


@jax.jit
def _step(
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
    pull = statistic.matrices(products + rho * (sparse - duals))
    return statistic.leaf(dot(pull, inverse), mask.shape), duals  # W = XXinv (XY + rho (Z - U))


@jax.jit
def _end(
    weights: jax.Array,
    duals: jax.Array,
    pruned: jax.Array,
    mask: jax.Array,
    statistic: Statistic,
) -> jax.Array:
    """Returns the weights on the support, in the scale of the leaf."""
    weights = weights + duals
    _, inverse_norms = _norms(statistic)
    scale = inverse_norms[..., None, :]
    live = jnp.where(scale > 0, statistic.matrices(weights) * scale, statistic.matrices(pruned))
    return jnp.where(mask > 0, statistic.leaf(live, mask.shape), 0).astype(pruned.dtype)


def _norms(statistic: Statistic) -> tuple[jax.Array, jax.Array]:
    """Returns norms of the inputs, and 1 / norm; 0 for inputs that were always 0."""
    norms = jnp.sqrt(jnp.diagonal(statistic.real_grams(), axis1=-2, axis2=-1))
    return norms, jnp.where(norms > 0, 1 / jnp.where(norms > 0, norms, 1), 0)
