"""Least squares: the weights on the support whose outputs are nearest to the dense ones."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve

from sparsity.calibration.refits.base import Select
from sparsity.calibration.statistics.errors import dot
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.core import sharding
from sparsity.core.checks import is_traced

_PROGRAMS = 4  # at most, for supports of any size of parameters of one shape
_MAX_BYTES_AT_ONCE = 2**25  # bytes of the matrices that are factored together
_ROUNDS = 3  # solutions of residuals, as one factor in float32 leaves rounding


@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """Weights on the support whose outputs are nearest to the dense ones: exact, per output.

    The costliest refit: each output takes a Cholesky factor of its own, k^3 / 3 multiply-adds for k
    kept inputs. Where outputs keep the same inputs, as after the pruning of channels, one factor
    serves all. `ADMM` costs one inverse and comes close.

    Weights that the data leave free stay near the weights of the pruner. No output has a larger
    error than before.

    Example:
      >>> x = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> seen = Statistic(gram=x.T @ x, count=2, contracting=(0,), output=(1,))
      >>> mask = jnp.array([[1], [0]], jnp.uint8)
      >>> dense, pruned = jnp.array([[2.0], [4.0]]), jnp.array([[2.0], [0.0]])
      >>> LeastSquares()(dense, pruned, mask, seen)[0]  # 2 + 4 x 1 / 2
      Array([[4.],
             [0.]], dtype=float32)
    """

    def __call__(
        self,
        dense: jax.Array,
        pruned: jax.Array,
        mask: jax.Array,
        statistic: Statistic,
        select: Select | None = None,  # the mask stays
    ) -> tuple[jax.Array, jax.Array]:
        if not dense.size:
            return pruned, mask
        inputs = statistic.count_inputs(dense.shape)
        max_kept, is_shared = inputs, False
        if not is_traced(mask):
            with sharding.evaluate_now():
                max_kept, is_shared = _read_supports(statistic.to_matrices(mask))
        # Rounded up, so that supports of any size share a few programs.
        step = -(-inputs // _PROGRAMS)
        max_kept = min(-(-max_kept // step) * step, inputs)
        refit = functools.partial(_refit, max_kept, is_shared)
        return sharding.shard_like(dense, refit, dense, pruned, mask, statistic), mask


def _read_supports(masks: jax.Array) -> tuple[int, bool]:
    """Returns the most inputs that an output keeps, and whether all non-empty supports agree.

    Args:
      masks: [..., outputs, inputs].
    """
    num_kept = (masks > 0).sum(axis=-1)
    union = (masks > 0).any(axis=-2, keepdims=True)
    is_shared = (((masks > 0) == union) | (num_kept == 0)[..., None]).all()
    return max(int(num_kept.max()), 1), bool(is_shared)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _refit(
    max_kept: int,
    is_shared: bool,
    dense: jax.Array,
    pruned: jax.Array,
    mask: jax.Array,
    statistic: Statistic,
) -> jax.Array:
    """Returns the refitted parameter, from a bound on the inputs that an output keeps."""
    num_matrices = math.prod(statistic.read_batch_shape(dense.shape))

    def refit_matrix(
        dense: jax.Array, pruned: jax.Array, mask: jax.Array, gram: jax.Array
    ) -> jax.Array:
        """Returns a refitted matrix, [outputs, inputs]; outputs that would get worse stay."""
        lost_weights, kept = dense - pruned, mask > 0
        # (W0 - W) G: the right side of the systems, and a factor of the error before.
        outputs = dot(lost_weights, gram)
        gradient = jnp.where(kept, outputs, 0)
        if is_shared:
            gains = _solve(max_kept, gram, kept.any(axis=0), gradient)
        else:
            system_bytes = num_matrices * max_kept**2 * gram.dtype.itemsize
            gains = lax.map(
                lambda row: _solve(max_kept, gram, row[0], row[1][None])[0],
                (kept, gradient),
                batch_size=max(1, min(_MAX_BYTES_AT_ONCE // system_bytes, len(kept))),
            )
        # The error counts weights as the parameter stores them.
        corrected = (pruned + gains).astype(dtype).astype(gram.dtype)
        difference = dense - corrected
        error_before = (outputs * lost_weights).sum(axis=-1)
        error_after = (dot(difference, gram) * difference).sum(axis=-1)
        return jnp.where((error_after <= error_before)[:, None], corrected, pruned)

    dtype = dense.dtype
    return statistic.map_matrices(refit_matrix, dense, pruned, mask).astype(dtype)


def _solve(max_kept: int, gram: jax.Array, kept: jax.Array, gradient: jax.Array) -> jax.Array:
    """Returns corrections of outputs that share a support, [outputs, inputs].

    Args:
      max_kept: bound on the inputs of the support.
      gram: [inputs, inputs].
      kept: [inputs], the support.
      gradient: [outputs, inputs], 0 outside the support.
    """
    diagonal = gram.diagonal()
    scales = jnp.where(kept & (diagonal > 0), lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1)), 0)
    # Kept inputs come first; the others, up to `max_kept`, get scale 0.
    indices = jnp.argsort(~kept, stable=True)[:max_kept]
    scales = scales[indices].astype(gram.dtype)
    system = gram[indices[:, None], indices] * scales[:, None] * scales
    # Rounding can make a matrix indefinite. The refinement below takes back the shift against it.
    shift = jnp.where(scales > 0, max_kept * jnp.finfo(gram.dtype).eps, 1).astype(gram.dtype)
    factor = lax.linalg.cholesky(system + jnp.diag(shift), symmetrize_input=False), True
    gains = jnp.zeros_like(gradient)
    # Iterative refinement: each round solves for the residual of the unshifted system.
    for _ in range(_ROUNDS):
        residual = (gradient - dot(gains, gram))[:, indices] * scales
        gains = gains.at[:, indices].add(cho_solve(factor, residual.T).T * scales)
    return gains
