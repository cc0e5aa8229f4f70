"""Cholesky factors of the inverses of damped Gram matrices."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import sharding


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
