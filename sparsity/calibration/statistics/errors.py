"""Outputs that changed weights lose, from the statistic of the inputs."""

from __future__ import annotations

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
