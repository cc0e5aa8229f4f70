"""Least squares: the weights on the support whose outputs are nearest to the dense ones."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.calibration import host
from sparsity.calibration.inverses import factor_inverse, shift_diagonals
from sparsity.calibration.refits.base import Select
from sparsity.calibration.statistics.errors import dot
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.core import sharding
from sparsity.core.arrays import promote
from sparsity.core.checks import is_traced
from sparsity.core.trees import PyTree

_PROGRAMS = 4  # at most, for supports of any size of parameters of one shape
_MAX_BYTES_AT_ONCE = 2**22  # bytes of the matrices that are factored together


@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """Weights on the support whose outputs are nearest to the dense ones: exact, per output.

    The costliest refit: each output is a linear system of its own. Conjugate gradients solve all
    outputs together; outputs that these do not solve in as many steps as a factor costs take a
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
        return _refit(dense, pruned, mask, statistic), mask

    def count_bytes(self, outputs: int, inputs: int) -> int:
        """Returns the bytes of the systems that are factored together."""
        return max(min(_MAX_BYTES_AT_ONCE, outputs * inputs**2 * 4), inputs**2 * 4)


def _refit_on_host(dense: PyTree, pruned: PyTree, mask: PyTree, statistic: Statistic) -> PyTree:
    """Refits as `_refit` does, one matrix after the other."""
    grams = statistic.require_real_grams()
    dtype = promote(dense.dtype, grams.dtype)
    num_matrices = math.prod(statistic.read_batch_shape(dense.shape))
    matrices = [statistic.to_matrices(x) for x in (dense, pruned, mask)]
    matrices = [x.reshape(num_matrices, *x.shape[-2:]) for x in matrices]
    refitted: PyTree = np.empty(matrices[0].shape, dense.dtype)
    try:
        for i, gram in enumerate(grams.reshape(num_matrices, *grams.shape[-2:])):
            dense_matrix, pruned_matrix = (x[i].astype(dtype) for x in matrices[:2])
            support = matrices[2][i] > 0
            max_kept, is_shared = _read_supports(support)
            solve = _solve_shared if is_shared else functools.partial(_solve_on_host, max_kept)
            refitted[i] = _refit_matrix(
                solve, dense.dtype, dense_matrix, pruned_matrix, support, gram.astype(dtype)
            )
    except np.linalg.LinAlgError:  # XLA returns weights that are not finite
        return NotImplemented
    return statistic.from_matrices(refitted, dense.shape)


@host.instead(_refit_on_host)
def _refit(dense: jax.Array, pruned: jax.Array, mask: jax.Array, statistic: Statistic) -> jax.Array:
    """Returns the refitted parameter."""
    max_kept, is_shared = statistic.count_inputs(dense.shape), False
    if not is_traced(mask):
        with sharding.evaluate_now():
            max_kept, is_shared = _read_supports(statistic.to_matrices(mask))
    # Rounded up, so that supports of any size share a few programs.
    step = max(-(-statistic.count_inputs(dense.shape) // _PROGRAMS), 1)
    max_kept = min(-(-max_kept // step) * step, statistic.count_inputs(dense.shape))
    refit = functools.partial(_refit_by_xla, max_kept, is_shared)
    return sharding.shard_like(dense, refit, dense, pruned, mask, statistic)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _refit_by_xla(
    max_kept: int,
    is_shared: bool,
    dense: jax.Array,
    pruned: jax.Array,
    mask: jax.Array,
    statistic: Statistic,
) -> jax.Array:
    """Returns the refitted parameter, from a bound on the inputs that an output keeps."""
    matrices = math.prod(statistic.read_batch_shape(dense.shape))
    solve = _solve_shared if is_shared else functools.partial(_solve_by_xla, max_kept, matrices)

    def refit_matrix(*arrays: jax.Array) -> jax.Array:
        return _refit_matrix(solve, dense.dtype, *arrays)

    return statistic.map_matrices(refit_matrix, dense, pruned, mask).astype(dense.dtype)


def _read_supports(masks: jax.Array) -> tuple[int, bool]:
    """Returns the most inputs that an output keeps, and whether all non-empty supports agree.

    Args:
      masks: [..., outputs, inputs].
    """
    num_kept = (masks > 0).sum(axis=-1)
    union = (masks > 0).any(axis=-2, keepdims=True)
    is_shared = (((masks > 0) == union) | (num_kept == 0)[..., None]).all()
    return max(int(num_kept.max(initial=1)), 1), bool(is_shared)


def _refit_matrix(
    solve: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    dtype: np.dtype,
    dense: jax.Array,
    pruned: jax.Array,
    mask: jax.Array,
    gram: jax.Array,
) -> jax.Array:
    """Returns a refitted matrix, [outputs, inputs]; outputs that would get worse stay.

    Args:
      solve: from gradients, supports and the Gram matrix to corrections.
      dtype: to which weights are rounded.
      dense: the matrix before pruning.
      pruned: the matrix after pruning.
      mask: its mask.
      gram: [inputs, inputs].
    """
    xp, lost_weights = host.namespace([gram]), dense - pruned
    # (W0 - W) G: the right side of the systems, and a factor of the error before.
    outputs = dot(lost_weights, gram)
    gain = solve(xp.where(mask > 0, outputs, 0), mask > 0, gram)
    # The error counts weights as the parameter stores them.
    corrected = (pruned + gain).astype(dtype).astype(gram.dtype)
    difference = dense - corrected
    error_before = (outputs * lost_weights).sum(axis=-1)
    error_after = (dot(difference, gram) * difference).sum(axis=-1)
    return xp.where((error_after <= error_before)[:, None], corrected, pruned)


def _solve_shared(gradient: jax.Array, kept: jax.Array, gram: jax.Array) -> jax.Array:
    """Returns corrections of outputs that have one support, [outputs, inputs]."""
    return _solve_by_factor(gradient[None], kept.any(axis=0)[None], gram, kept.shape[-1])[0]


def _solve_on_host(max_kept: int, gradient: PyTree, kept: PyTree, gram: PyTree) -> PyTree:
    """Returns corrections on the support of each output, [outputs, inputs].

    Conjugate gradients solve all outputs at once, by products with the Gram matrix. Outputs that
    these leave far from their solutions are solved by Cholesky factors, some at once.
    """
    gains, is_solved = _solve_by_gradients(gradient, kept, gram, _count_steps(max_kept, len(gram)))
    counts = kept.sum(axis=-1)
    rows = np.flatnonzero(~is_solved)
    # By size, as a batch is padded to its largest support.
    rows = rows[np.argsort(counts[rows], kind="stable")]
    num_at_once = max(_MAX_BYTES_AT_ONCE // (max_kept**2 * gram.itemsize), 1)
    for start in range(0, len(rows), num_at_once):
        batch = rows[start : start + num_at_once]
        gains[batch] = _solve_by_factor(
            gradient[batch, None], kept[batch], gram, counts[batch[-1]]
        )[:, 0]
    return gains


def _solve_by_xla(
    max_kept: int, matrices: int, gradient: jax.Array, kept: jax.Array, gram: jax.Array
) -> jax.Array:
    """Solves as `_solve_on_host` does, for so many matrices at once."""
    gains, is_solved = _solve_by_gradients(gradient, kept, gram, _count_steps(max_kept, len(gram)))
    outputs = len(gradient)
    num_at_once = max(
        1, min(_MAX_BYTES_AT_ONCE // (max_kept**2 * gram.dtype.itemsize * matrices), outputs)
    )
    order = jnp.argsort(is_solved, stable=True)  # those to solve first
    # Rows beyond the outputs fill the last batch; `mode="drop"` ignores their results.
    order = jnp.append(order, outputs + jnp.arange(-outputs % num_at_once))

    def solve(i: jax.Array, gains: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(order, i * num_at_once, num_at_once)
        solved = _solve_by_factor(gradient[rows, None], kept[rows], gram, max_kept)[:, 0]
        return gains.at[rows].set(solved, mode="drop", unique_indices=True)

    count = jnp.sum(~is_solved, dtype=jnp.int32)
    return lax.fori_loop(0, (count + num_at_once - 1) // num_at_once, solve, gains)


def _solve_by_factor(
    gradient: jax.Array, kept: jax.Array, gram: jax.Array, max_kept: int
) -> jax.Array:
    """Returns corrections of outputs on supports of at most so many inputs.

    Args:
      gradient: [supports, outputs, inputs].
      kept: [supports, inputs].
      gram: [inputs, inputs].
      max_kept: bound on the inputs of a support.
    """
    xp, diagonal = host.namespace([gram]), gram.diagonal()
    scale = xp.where(diagonal > 0, 1 / xp.sqrt(xp.where(diagonal > 0, diagonal, 1)), 0)
    # Kept inputs come first; the others, up to `max_kept`, get scale 0.
    kept_inputs = xp.argsort(~kept, axis=-1, stable=True)[:, :max_kept]
    scales = xp.take_along_axis(xp.where(kept, scale, 0), kept_inputs, -1).astype(gram.dtype)
    factor = gram[kept_inputs[:, :, None], kept_inputs[:, None, :]]
    factor *= scales[:, :, None]
    factor *= scales[:, None, :]
    # Rounding can make a matrix indefinite. The refinement below takes back the shift against it.
    shift = xp.where(scales > 0, max_kept * xp.finfo(gram.dtype).eps, 1).astype(gram.dtype)
    factor = factor_inverse(shift_diagonals(factor, shift))
    kept_inputs, scales = kept_inputs[:, None], scales[:, None]
    gains: jax.Array = xp.zeros_like(gradient)
    # Iterative refinement: each round solves for the residual of the unshifted system.
    for _ in range(3):
        residual = xp.take_along_axis(gradient - dot(gains, gram), kept_inputs, -1) * scales
        part = dot(dot(residual, factor.swapaxes(-1, -2)), factor) * scales
        gains = gains + _scatter(part, kept_inputs, gradient.shape[-1])
    return gains


def _scatter(parts: jax.Array, indices: PyTree, inputs: int) -> PyTree:
    """Returns rows of so many inputs, with these entries in their places, and 0 elsewhere."""
    xp: PyTree = host.namespace([parts])
    rows = xp.zeros((*parts.shape[:-1], inputs), parts.dtype)
    indices = xp.broadcast_to(indices, parts.shape)
    if xp is np:
        np.put_along_axis(rows, indices, parts, -1)
        return rows
    return jnp.put_along_axis(rows, indices, parts, -1, inplace=False)


class _GradientState(NamedTuple):
    """State of conjugate gradients for A x = b, [outputs, inputs] or [outputs]."""

    gains: jax.Array  # x
    residual: jax.Array  # r
    direction: jax.Array  # p
    product: jax.Array  # r^T M r
    is_active: jax.Array  # whether r is larger than the tolerance


def _solve_by_gradients(
    gradient: jax.Array, kept: jax.Array, gram: jax.Array, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Returns corrections by conjugate gradients, and which outputs are solved.

    Source: Shewchuk 1994, "An Introduction to the Conjugate Gradient Method Without the Agonizing
    Pain", B3, with the diagonal as preconditioner M^-1.
    """
    xp, diagonal = host.namespace([gram]), gram.diagonal()
    scale = xp.where(diagonal > 0, 1 / xp.where(diagonal > 0, diagonal, 1), 0)
    # 6e-6 in float32: between eps, which rounding rarely reaches, and its root.
    tolerance = float(xp.finfo(gram.dtype).eps) ** 0.75
    threshold = xp.square(tolerance * _compute_row_norms(gradient))

    def is_above_tolerance(residual: jax.Array) -> jax.Array:
        return xp.square(_compute_row_norms(residual)) > threshold

    def step(state: _GradientState) -> _GradientState:
        x, r, p, product, is_active = state
        q = xp.where(kept, dot(p, gram), 0)
        # An output that is solved takes steps of 0 until all are.
        alpha = xp.where(is_active, product / (p * q).sum(axis=-1), 0)[:, None]
        x, r = x + alpha * p, r - alpha * q
        new_product = (r * r * scale).sum(axis=-1)
        beta = xp.where(is_active, new_product / product, 0)[:, None]
        return _GradientState(x, r, r * scale + beta * p, new_product, is_above_tolerance(r))

    product = (gradient**2 * scale).sum(-1)
    is_active, zeros = is_above_tolerance(gradient), xp.zeros_like(gradient)
    start = _GradientState(zeros, gradient, gradient * scale, product, is_active)
    end = _repeat_while_active(step, start, steps)
    residual = gradient - xp.where(kept, dot(end.gains, gram), 0)
    # The recurrence of r drifts by rounding: the exact residual decides.
    return end.gains, _compute_row_norms(residual) <= 4 * tolerance * _compute_row_norms(gradient)


def _compute_row_norms(rows: jax.Array) -> jax.Array:
    return host.namespace([rows]).sqrt((rows * rows).sum(axis=-1))


def _repeat_while_active(
    step: Callable[[_GradientState], _GradientState], state: _GradientState, max_steps: int
) -> _GradientState:
    """Repeats a step while an output is active, at most so many times."""
    if isinstance(state.gains, np.ndarray):
        for _ in range(max_steps):
            if not state.is_active.any():
                break
            state = step(state)
        return state

    def step_counted(counted: tuple[jax.Array, _GradientState]) -> tuple[jax.Array, _GradientState]:
        return counted[0] + 1, step(counted[1])

    def continues(counted: tuple[jax.Array, _GradientState]) -> jax.Array:
        return (counted[0] < max_steps) & counted[1].is_active.any()

    return lax.while_loop(continues, step_counted, (jnp.int32(0), state))[1]


def _count_steps(max_kept: int, inputs: int) -> int:
    """Returns the steps of conjugate gradients that take as long as factors do, roughly."""
    # A factor takes about max_kept^3 operations an output, a step inputs^2.
    return max(32, min(max_kept**3 // inputs**2, inputs // 8))
