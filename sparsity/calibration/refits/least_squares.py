"""Least squares: the weights on the support whose outputs are nearest to the dense ones."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve
from jax.scipy.sparse.linalg import cg

from sparsity.calibration.refits.base import Select
from sparsity.calibration.statistics import Statistic, dot
from sparsity.core import sharding
from sparsity.core.checks import is_traced

_PROGRAMS = 4  # at most, for supports of any size of leaves of one shape
_BLOCK = 128  # LAPACK starts threads for larger factors: 44 times the CPU time on a busy machine
_AT_ONCE = 2**25  # bytes of the matrices that are factored together


@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """Weights on the support whose outputs are nearest to the dense ones: exact, per output.

    The costliest refit: each output is a linear system of its own. Conjugate gradients solve all
    outputs together; outputs that these do not solve within one step for eight inputs cost a
    Cholesky factor each, k^3 / 3 multiply-adds for k kept inputs. Where outputs keep the same
    inputs, as after the pruning of channels, one factor serves all. `ADMM` costs one inverse and
    comes close.

    Weights that the data leave free stay near the weights of the pruner. No output has a larger
    error than before.

    Example:
      >>> x = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> seen = Statistic(gram=x.T @ x, count=2, contracting=(0,), output=(1,))
      >>> mask = jnp.array([[1], [0]], jnp.uint8)
      >>> dense, pruned = jnp.array([[2.0], [4.0]]), jnp.array([[2.0], [0.0]])
      >>> LeastSquares()(dense, pruned, mask, seen, select=None)[0]  # 2 + 4 x 1 / 2
      Array([[4.],
             [0.]], dtype=float32)
    """

    gram_copies: ClassVar[tuple[int, int]] = (2, 2)  # by XLA, by numpy; see `StatisticsPruning`

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
        steps = _count_steps(statistic.inputs(dense.shape))
        refit = functools.partial(_least_squares, most, steps, is_shared)
        return sharding.shard_like(dense, refit, dense, pruned, mask, statistic), mask


def count_bytes(outputs: int, inputs: int) -> int:
    """Returns the bytes of the systems that are factored together, and of their factors."""
    return 3 * max(min(_AT_ONCE, outputs * inputs**2 * 4), inputs**2 * 4)


def _supports(masks: jax.Array) -> tuple[int, bool]:
    """Returns a bound on the inputs that an output keeps, and whether all non-empty supports agree.

    Args:
      masks: [*batch, outputs, inputs].
    """
    kept = jnp.sum(masks, axis=-1, dtype=jnp.int32)
    step = max(-(-masks.shape[-1] // _PROGRAMS), 1)
    most = -(-int(jnp.max(kept, initial=1)) // step) * step
    union = jnp.max(masks, axis=-2, keepdims=True, initial=0)
    is_shared = jnp.all((masks == union) | (kept == 0)[..., None])
    return min(most, masks.shape[-1]), bool(is_shared)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _least_squares(
    most: int,
    steps: int,
    is_shared: bool,
    dense: jax.Array,
    pruned: jax.Array,
    mask: jax.Array,
    statistic: Statistic,
) -> jax.Array:
    """Returns the refitted leaf.

    Args:
      most: bound on the inputs that an output keeps.
      steps: of conjugate gradients, before systems are factored.
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
        if is_shared:
            support = jnp.any(kept, axis=0)
            gain = _by_factor(gradient.T, support, gram, most, _cholesky).T
        else:
            gain = _by_output(gradient, kept, gram, most, steps, math.prod(lead))
        new = (pruned + gain).astype(dtype).astype(gram.dtype)
        difference = dense - new
        before, after = jnp.sum(outputs * lost, -1), jnp.sum(dot(difference, gram) * difference, -1)
        return jnp.where((after <= before)[:, None], new, pruned)

    refitted: jax.Array = statistic.solve(refit_matrix, dense, pruned, mask)
    return refitted.astype(dtype)


def _by_output(
    gradient: jax.Array, kept: jax.Array, gram: jax.Array, most: int, steps: int, matrices: int
) -> jax.Array:
    """Returns corrections on the support of each output, [outputs, inputs].

    Conjugate gradients solve all outputs at once, by products with the Gram. Outputs that these
    leave far from their solutions are solved by Cholesky factors, some at once.
    """
    gains, is_solved = _by_gradients(gradient, kept, gram, steps)
    outputs = len(gradient)
    at_once = max(1, min(_AT_ONCE // (most**2 * gram.dtype.itemsize * matrices), outputs))
    order = jnp.argsort(is_solved, stable=True)  # those to solve first
    order = jnp.pad(order, (0, -outputs % at_once), constant_values=outputs)
    solve_one = functools.partial(_by_factor, most=most, factorize=_cholesky_by_blocks)
    solve_all = jax.vmap(solve_one, in_axes=(0, 0, None))

    def solve(i: jax.Array, gains: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(order, i * at_once, at_once)
        return gains.at[rows].set(solve_all(gradient[rows], kept[rows], gram), mode="drop")

    count = jnp.sum(~is_solved, dtype=jnp.int32)
    solved: jax.Array = lax.fori_loop(0, (count + at_once - 1) // at_once, solve, gains)
    return solved


def _by_factor(
    gradient: jax.Array,
    kept: jax.Array,
    gram: jax.Array,
    most: int,
    factorize: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Returns corrections of outputs on a shared support, [inputs] or [inputs, outputs]."""
    diagonal = jnp.diagonal(gram)
    scale = jnp.where(diagonal > 0, lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1)), 0)
    places = jnp.argsort(~kept, stable=True)[:most]
    scales = jnp.where(kept, scale, 0)[places]
    system = gram[places[:, None], places] * scales[:, None] * scales
    # Rounding makes a matrix indefinite; the shift that prevents it is taken back below.
    shift = jnp.where(scales > 0, most * jnp.finfo(gram.dtype).eps, 1)
    factor = factorize(system + jnp.diag(shift)), True
    scales = scales.reshape(-1, *[1] * (gradient.ndim - 1))
    target = gradient[places] * scales
    gain = jnp.zeros_like(target)
    for _ in range(3):
        gain += cho_solve(factor, target - dot(system, gain))
    return jnp.zeros_like(gradient).at[places].set(gain * scales)


_cholesky = functools.partial(lax.linalg.cholesky, symmetrize_input=False)


def _cholesky_by_blocks(matrix: jax.Array) -> jax.Array:
    """Returns the lower factor of a matrix, by factors of small blocks and products."""
    factor = jnp.zeros((len(matrix), 0), matrix.dtype)
    for start in range(0, len(matrix), _BLOCK):
        before = factor[start:]
        panel = matrix[start:, start : start + _BLOCK]
        panel -= dot(before, before[: panel.shape[1]].T)
        corner = _cholesky(panel[: panel.shape[1]])
        eye = jnp.eye(len(corner), dtype=corner.dtype)
        inverse = lax.linalg.triangular_solve(corner, eye, left_side=True, lower=True)
        below = dot(panel[len(corner) :], inverse.T)
        above = jnp.zeros((start, len(corner)), corner.dtype)
        factor = jnp.concatenate([factor, jnp.concatenate([above, corner, below])], axis=1)
    return factor


def _by_gradients(
    gradient: jax.Array, kept: jax.Array, gram: jax.Array, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Returns corrections by conjugate gradients, and which outputs are solved."""
    diagonal = jnp.diagonal(gram)
    scale = jnp.where(diagonal > 0, 1 / jnp.where(diagonal > 0, diagonal, 1), 0)
    tolerance = float(jnp.finfo(gram.dtype).eps) ** 0.75

    def refit_output(gradient: jax.Array, kept: jax.Array) -> jax.Array:
        solution: jax.Array = cg(
            lambda x: jnp.where(kept, dot(gram, x), 0),
            gradient,
            tol=tolerance,
            maxiter=steps,
            M=lambda x: x * scale,
        )[0]
        return solution

    gains = jax.vmap(refit_output)(gradient, kept)
    residual = gradient - jnp.where(kept, dot(gains, gram), 0)
    norms = jnp.sqrt(jnp.sum(jnp.square(jnp.stack([residual, gradient])), axis=-1))
    return gains, norms[0] <= 4 * tolerance * norms[1]  # rounding moves the residual


def _count_steps(inputs: int) -> int:
    """Returns the steps of conjugate gradients that take as long as factors do, roughly."""
    return max(32, inputs // 8)
