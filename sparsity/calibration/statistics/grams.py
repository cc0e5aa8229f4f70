"""Numbers from Gram matrices: the errors of outputs, and factors of damped inverses."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.calibration.statistics.statistic import Statistic
from sparsity.core import sharding
from sparsity.core.arrays import promote


def relative_error(statistic: Statistic, dense: jax.Array, pruned: jax.Array) -> jax.Array:
    """Returns tr(D^H G D) / tr(W^H G W), D = W - pruned: the lost share of the outputs.

    Of a product that reads c * parameter + d, these are the weights.

    Example:
      >>> kernel = Statistic(gram=jnp.diag(jnp.array([4.0, 1.0])), count=9, contracting=(0,),
      ...                    output=(1,))
      >>> relative_error(kernel, jnp.array([[2.0], [3.0]]), jnp.array([[2.0], [0.0]]))
      Array(0.36, dtype=float32)
    """
    if np.shape(dense) != np.shape(pruned):
        raise ValueError(f"pruned must have the shape {np.shape(dense)}, got {np.shape(pruned)}.")

    def sum_errors(statistic: Statistic, *leaves: jax.Array) -> list[jax.Array]:
        lost, weights = statistic.scale_weights(leaves[0]), statistic.read_weights(leaves[1])
        scaled = statistic.for_scaled_weights()
        return [jnp.sum(output_error(scaled, x)) for x in (lost, weights)]

    return ratio(*sharding.call_replicated(sum_errors, statistic, dense - pruned, dense))


def output_error(statistic: Statistic, difference: jax.Array) -> jax.Array:
    """Returns sum(|X d|^2) over the rows, for the weights d of each output: [*batch, outputs].

    Args:
      statistic: with a Gram matrix.
      difference: the difference of two parameters; or a parameter, for the norm of its outputs.
    """
    difference, statistic = statistic.scale_weights(difference), statistic.for_scaled_weights()
    grams = statistic.require_grams()
    _check_shape(statistic, difference)
    rows = statistic.to_matrices(difference)
    rows = rows.astype(promote(rows.dtype, grams.dtype))
    outputs = dot(rows.conj(), grams)
    return (outputs * rows).sum(axis=-1).real


def _check_shape(statistic: Statistic, param: jax.Array) -> None:
    """Raises a ValueError unless the Gram matrices of a statistic fit a parameter."""
    shape, axes = np.shape(param), (*statistic.batch, *statistic.output, *statistic.contracting)
    fits = sorted(axes) == [*range(len(shape))]
    if not fits or statistic.require_grams().shape[-1] != statistic.count_inputs(shape):
        raise ValueError(
            f"The Gram matrices of the statistic, shape {statistic.require_grams().shape}, "
            f"contracting = {statistic.contracting}, do not fit a parameter of shape {shape}."
        )


def squared_means(statistic: Statistic, param: jax.Array) -> jax.Array:
    """Returns |sum(X d)|^2 / n over n rows: the part of `output_error` that means make.

    Args:
      statistic: with `sums`.
      param: the weights d of each output.

    Returns:
      [*batch, outputs].
    """
    sums, rows = jnp.asarray(statistic.sums), statistic.to_matrices(param)
    rows = rows.astype(promote(rows.dtype, sums.dtype))
    totals = dot(rows, sums[..., None])[..., 0]
    return jnp.square(jnp.abs(totals)) / broadcast_num_rows(statistic, sums.ndim)


def mean_outputs(statistic: Statistic, param: jax.Array) -> jax.Array:
    """Returns the means of the outputs over the rows, [*batch, outputs].

    Args:
      statistic: with `sums`.
      param: the weights of each output.
    """
    sums = jnp.asarray(statistic.sums)
    means = sums / broadcast_num_rows(statistic, sums.ndim)
    rows = statistic.to_matrices(param).astype(promote(param.dtype, means.dtype))
    return jnp.sum(rows * means[..., None, :], axis=-1)


def ratio(part: jax.Array, total: jax.Array) -> jax.Array:
    """Returns part / total, 0 where the total is 0."""
    return jnp.where(total > 0, part / jnp.where(total > 0, total, 1), 0)


def broadcast_num_rows(statistic: Statistic, ndim: int) -> jax.Array:
    """Returns the numbers of rows, above 0, with axes that broadcast to [*batch, ...]."""
    count = jnp.asarray(statistic.count, jnp.float32)
    return jnp.maximum(
        count.reshape(*count.shape, *[1] * (ndim - count.ndim)), jnp.finfo(jnp.float32).tiny
    )


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product of matrices in their own precision."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def factor_damped_inverse(
    grams: jax.Array,
    damping: chex.Numeric,
    dtype: np.dtype,
    multiple: int = 1,
    permutation: np.ndarray | None = None,
) -> jax.Array:
    """Returns upper triangular U with U^T U = (gram + damping)^-1, the H^-1 of SparseGPT.

    U is NaN where a matrix is not positive definite.

    Args:
      grams: [..., inputs, inputs]; only real parts count.
      damping: added to the diagonals, in units of their means over live inputs.
      dtype: of the result.
      multiple: divides the size of U, which the identity matrix fills up.
      permutation: int[inputs], the places of the inputs of U among those of the Gram matrices.
    """
    factor = functools.partial(_factor_compiled, np.dtype(dtype), multiple, permutation, damping)
    return sharding.call_replicated(factor, grams)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _factor_compiled(
    dtype: np.dtype,
    multiple: int,
    permutation: np.ndarray | None,
    damping: chex.Numeric,
    grams: jax.Array,
) -> jax.Array:
    grams = grams.real.astype(dtype)
    if permutation is not None:
        grams = grams[..., permutation[:, None], permutation]
    size, padding = grams.shape[-1], -grams.shape[-1] % multiple
    eye = jnp.eye(size, dtype=dtype)
    damped = grams + compute_damping_shifts(grams, damping)[..., None] * eye
    # Reversed rows and columns turn the lower factor into R, upper with R R^T = matrix; U = R^-1.
    lower = lax.linalg.cholesky(damped[..., ::-1, ::-1], symmetrize_input=False)
    inverse = lax.linalg.triangular_solve(
        lower, jnp.broadcast_to(eye, lower.shape), left_side=True, lower=True
    )
    wide = [(0, 0)] * (grams.ndim - 2) + [(0, padding)] * 2
    is_padding = jnp.arange(size + padding) >= size
    return jnp.pad(inverse[..., ::-1, ::-1], wide) + jnp.diag(is_padding.astype(dtype))


def compute_damping_shifts(matrices: jax.Array, damping: chex.Numeric) -> jax.Array:
    """Returns the numbers that damping adds to the diagonals of Gram matrices, [..., n].

    Args:
      matrices: [..., n, n].
      damping: in units of the mean of a diagonal over live inputs; inputs that are always 0 get 1
        more.
    """
    diagonals = jnp.diagonal(matrices, axis1=-2, axis2=-1)
    is_live = diagonals > 0
    count = jnp.maximum(is_live.sum(axis=-1, keepdims=True), 1).astype(matrices.dtype)
    mean = diagonals.sum(axis=-1, keepdims=True) / count
    return (damping * mean + jnp.where(is_live, 0, 1)).astype(matrices.dtype)
