"""Least squares: the weights on the support whose outputs are nearest to the dense ones."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve
from jax.scipy.sparse.linalg import cg

from sparsity.calibration.refits.base import Select, dot
from sparsity.calibration.statistics import Statistic
from sparsity.core import sharding
from sparsity.core.checks import is_traced

_MOST_DIRECT = 1024  # inputs, above which least squares are solved by conjugate gradients
_PROGRAMS = 16  # at most, for supports of any size of leaves of one shape
_AT_ONCE = 2**28  # bytes of the matrices that are factored together


@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """Weights on the support whose outputs are nearest to the dense ones: exact, per output.

    Each output is a linear system. Systems of few inputs are solved by Cholesky factors, others by
    conjugate gradients. Outputs that keep the same inputs share one factor, as after the pruning of
    channels. Weights that the data leave free stay near the weights of the pruner. No output has a
    larger error than before.

    Example:
      >>> x = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> seen = Statistic(gram=x.T @ x, count=2, contracting=(0,), output=(1,))
      >>> mask = jnp.array([[1], [0]], jnp.uint8)
      >>> dense, pruned = jnp.array([[2.0], [4.0]]), jnp.array([[2.0], [0.0]])
      >>> LeastSquares()(dense, pruned, mask, seen, select=None)[0]  # 2 + 4 x 1 / 2
      Array([[4.],
             [0.]], dtype=float32)
    """

    def __call__(
        self,
        dense: jax.Array,
        pruned: jax.Array,
        mask: jax.Array,
        statistic: Statistic,
        select: Select | None,
    ) -> tuple[jax.Array, jax.Array]:
        most, is_shared = statistic.inputs(dense.shape), False
        if not is_traced(mask):
            with jax.ensure_compile_time_eval():
                most, is_shared = _supports(statistic.matrices(mask))
        is_direct = is_shared or statistic.inputs(dense.shape) <= _MOST_DIRECT
        refit = functools.partial(_least_squares, most if is_direct else None, is_shared)
        return sharding.shard_like(dense, refit, dense, pruned, mask, statistic), mask


def _supports(masks: jax.Array) -> tuple[int, bool]:
    """Returns a bound on the inputs that an output keeps, and whether all non-empty supports agree.

    Args:
      masks: [*batch, outputs, inputs].
    """
    kept = jnp.sum(masks, axis=-1, dtype=jnp.int32)
    step = -(-masks.shape[-1] // _PROGRAMS)
    most = -(-int(jnp.max(kept, initial=1)) // step) * step
    union = jnp.max(masks, axis=-2, keepdims=True, initial=0)
    is_shared = jnp.all((masks == union) | (kept == 0)[..., None])
    return min(most, masks.shape[-1]), bool(is_shared)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _least_squares(
    most: int | None,
    is_shared: bool,
    dense: jax.Array,
    pruned: jax.Array,
    mask: jax.Array,
    statistic: Statistic,
) -> jax.Array:
    """Returns the refitted leaf.

    Args:
      most: bound on the inputs that an output keeps; `None`: conjugate gradients solve.
      is_shared: all non-empty supports agree.
      dense: the leaf before pruning.
      pruned: the leaf after pruning.
      mask: its mask.
      statistic: with a Gram matrix.
    """
    lead, dtype = statistic.lead(dense.shape), dense.dtype

    def refit_matrix(
        dense: jax.Array, pruned: jax.Array, mask: jax.Array, gram: jax.Array
    ) -> jax.Array:
        kept, lost = mask > 0, dense - pruned
        outputs = dot(lost, gram)
        gradient = jnp.where(kept, outputs, 0)
        if most is None:
            gain = _by_gradients(gradient, kept, gram)
        elif is_shared:
            gain = _by_factor(gradient.T, jnp.any(kept, axis=0), gram, most).T
        else:
            gain = _by_factors(gradient, kept, gram, most, math.prod(lead))
        new = (pruned + gain).astype(dtype).astype(gram.dtype)
        difference = dense - new
        before, after = jnp.sum(outputs * lost, -1), jnp.sum(dot(difference, gram) * difference, -1)
        return jnp.where((after <= before)[:, None], new, pruned)

    refitted: jax.Array = statistic.solve(refit_matrix, dense, pruned, mask)
    return refitted.astype(dtype)


def _by_factors(
    gradient: jax.Array, kept: jax.Array, gram: jax.Array, most: int, matrices: int
) -> jax.Array:
    """Returns corrections on the support of each output, [outputs, inputs], by Cholesky factors."""
    at_once = max(1, _AT_ONCE // (most**2 * gram.dtype.itemsize * matrices))
    gains: jax.Array = lax.map(
        lambda x: _by_factor(x[0], x[1], gram, most),
        (gradient, kept),
        batch_size=min(at_once, len(gradient)),
    )
    return gains


def _by_factor(gradient: jax.Array, kept: jax.Array, gram: jax.Array, most: int) -> jax.Array:
    """Returns corrections of outputs on a shared support, [inputs] or [inputs, outputs]."""
    diagonal = jnp.diagonal(gram)
    scale = jnp.where(diagonal > 0, lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1)), 0)
    places = jnp.argsort(~kept, stable=True)[:most]
    scales = jnp.where(kept, scale, 0)[places]
    system = gram[places[:, None], places] * scales[:, None] * scales
    # Rounding makes a matrix indefinite; the shift that prevents it is taken back below.
    shift = jnp.where(scales > 0, most * jnp.finfo(gram.dtype).eps, 1)
    factor = lax.linalg.cholesky(system + jnp.diag(shift), symmetrize_input=False), True
    scales = scales.reshape(-1, *[1] * (gradient.ndim - 1))
    target = gradient[places] * scales
    gain = jnp.zeros_like(target)
    for _ in range(3):
        gain += cho_solve(factor, target - dot(system, gain))
    return jnp.zeros_like(gradient).at[places].set(gain * scales)


def _by_gradients(gradient: jax.Array, kept: jax.Array, gram: jax.Array) -> jax.Array:
    """Does what `_by_factors` does, by conjugate gradients that share products with the Gram."""
    diagonal = jnp.diagonal(gram)
    scale = jnp.where(diagonal > 0, 1 / jnp.where(diagonal > 0, diagonal, 1), 0)

    def refit_output(gradient: jax.Array, kept: jax.Array) -> jax.Array:
        solution: jax.Array = cg(
            lambda x: jnp.where(kept, dot(gram, x), 0),
            gradient,
            tol=float(jnp.finfo(gram.dtype).eps) ** 0.75,
            maxiter=len(gram),
            M=lambda x: x * scale,
        )[0]
        return solution

    gains: jax.Array = jax.vmap(refit_output)(gradient, kept)
    return gains
