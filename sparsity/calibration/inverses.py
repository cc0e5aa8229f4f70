"""Inverses of positive definite matrices.

Matrices change block by block: only a row and a column of blocks take more memory. numpy changes an
array in place, XLA the value that a loop carries. `invert` takes one more matrix in XLA.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.calibration import host
from sparsity.calibration.statistics.errors import dot
from sparsity.core import sharding
from sparsity.core.trees import PyTree

_BLOCK = 128  # fewer rows make slow products, and for more LAPACK starts threads


def invert(matrices: jax.Array) -> jax.Array:
    """Inverts matrices; those of numpy in place, by Gauss and Jordan's elimination of blocks.

    Args:
      matrices: [..., n, n], positive definite.

    Raises:
      numpy.linalg.LinAlgError: a block of an array of numpy is singular. XLA returns NaN.
    """
    if not isinstance(matrices, np.ndarray):
        return jnp.linalg.inv(matrices)
    for matrix in matrices.reshape(math.prod(matrices.shape[:-2]), *matrices.shape[-2:]):
        _invert_in_place(matrix)
    return matrices


def factor_inverse(matrices: jax.Array) -> jax.Array:
    """Returns upper triangular U with U^T U = matrix^-1; for numpy, in place.

    Args:
      matrices: [..., n, n], positive definite; XLA needs no copy of those that `pad_with_identity`
        returns.

    Raises:
      numpy.linalg.LinAlgError: an array of numpy has a matrix that is not positive definite. XLA
        returns NaN.
    """
    if isinstance(matrices, np.ndarray):
        _factor_in_place(matrices)
        return matrices
    return _call_on_blocks(
        matrices,
        lambda x: _loop_over_blocks(_loop_over_blocks(x, _factor_block, True), _invert_block),
    )


def _factor_damped_on_host(
    grams: np.ndarray,
    damping: chex.Numeric,
    dtype: np.dtype,
    multiple: int = 1,
    permutation: np.ndarray | None = None,
) -> np.ndarray:
    size = grams.shape[-1]
    padded = size + -size % multiple
    factors = host.empty((*grams.shape[:-2], padded, padded), dtype)
    factors[..., size:, :], factors[..., :, size:] = 0, 0
    # This einsum returns a view of the diagonals, which can be written to.
    np.einsum("...ii->...i", factors)[..., size:] = 1
    inner: PyTree = factors[..., :size, :size]
    if permutation is None:
        inner[...] = grams.real
    else:
        for row, index in enumerate(permutation):  # all rows at once would be one more matrix
            inner[..., row, :] = grams.real[..., index, permutation]
    shift_diagonals(inner, compute_damping_shifts(inner, damping))
    try:
        factor_inverse(inner)
    except np.linalg.LinAlgError:
        factors[...] = np.nan  # as XLA returns them
    return factors


@host.instead(_factor_damped_on_host)
def factor_damped_inverse(
    grams: jax.Array,
    damping: chex.Numeric,
    dtype: np.dtype,
    multiple: int = 1,
    permutation: np.ndarray | None = None,
) -> jax.Array:
    """Returns upper triangular U with U^T U = (gram + damping)^-1, the H^-1 of SparseGPT.

    U takes all of the memory that this function needs besides the Gram matrices.

    Args:
      grams: [..., inputs, inputs]; only real parts count.
      damping: added to the diagonals, in units of their means over live inputs.
      dtype: of the result.
      multiple: divides the size of U, which the identity matrix fills up.
      permutation: int[inputs], the places of the inputs of U among those of the Gram matrices.
    """
    factor = functools.partial(_factor_damped_compiled, dtype, multiple, permutation, damping)
    return sharding.call_replicated(factor, grams)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _factor_damped_compiled(
    dtype: np.dtype,
    multiple: int,
    permutation: np.ndarray | None,
    damping: chex.Numeric,
    grams: jax.Array,
) -> jax.Array:
    grams = grams.real.astype(dtype)
    if permutation is not None:
        grams = grams[..., permutation[:, None], permutation]
    return factor_inverse(
        pad_with_identity(shift_diagonals(grams, compute_damping_shifts(grams, damping)), multiple)
    )


def pad_with_identity(matrices: jax.Array, multiple: int | None = None) -> jax.Array:
    """Appends rows and columns of the identity matrix.

    Args:
      matrices: [..., n, n].
      multiple: divides the new size; by default that of the blocks of this file, if n is larger.
    """
    size = matrices.shape[-1]
    padding = -size % (multiple or max(min(size, _BLOCK), 1))
    if not padding:
        return matrices
    wide = jnp.pad(matrices, [*[(0, 0)] * (matrices.ndim - 2), (0, padding), (0, padding)])
    return wide + jnp.diag(jnp.arange(size + padding) >= size).astype(matrices.dtype)


def compute_damping_shifts(matrices: chex.Array, damping: chex.Numeric) -> jax.Array:
    """Returns the numbers that damping adds to the diagonals of Gram matrices, [..., n].

    Args:
      matrices: [..., n, n].
      damping: in units of the mean of a diagonal over live inputs; inputs that are always 0 get 1
        more.
    """
    xp = host.namespace([matrices])
    diagonals = xp.diagonal(matrices, axis1=-2, axis2=-1)
    is_live = diagonals > 0
    count = xp.maximum(is_live.sum(axis=-1, keepdims=True), 1).astype(matrices.dtype)
    mean = diagonals.sum(axis=-1, keepdims=True) / count
    return (damping * mean + xp.where(is_live, 0, 1)).astype(matrices.dtype)


def shift_diagonals(matrices: jax.Array, shift: chex.Numeric) -> jax.Array:
    """Returns matrices with numbers added to their diagonals; numpy adds in place.

    Args:
      matrices: [..., n, n].
      shift: a scalar, or [..., n].
    """
    if isinstance(matrices, np.ndarray):
        # This einsum returns a view of the diagonals.
        np.einsum("...ii->...i", matrices)[...] += np.asarray(shift, matrices.dtype)
        return matrices
    rows = jnp.asarray(shift)[..., None] if np.ndim(shift) else shift
    return matrices + rows * jnp.eye(matrices.shape[-1], dtype=matrices.dtype)


def _call_on_blocks(matrices: jax.Array, fn: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Calls a function of matrices of entire blocks."""
    size = matrices.shape[-1]
    for _ in matrices.shape[:-2]:
        fn = jax.vmap(fn)
    return fn(pad_with_identity(matrices))[..., :size, :size]


def _loop_over_blocks(
    matrix: jax.Array, step: Callable[[jax.Array, int, jax.Array], jax.Array], reverse: bool = False
) -> jax.Array:
    """Calls a step with the first row of each block, its number of rows, and the matrix."""
    width = min(len(matrix), _BLOCK)
    count = len(matrix) // max(width, 1)

    def step_block(i: jax.Array, matrix: jax.Array) -> jax.Array:
        return step(width * (count - 1 - i if reverse else i), width, matrix)

    return lax.fori_loop(0, count, step_block, matrix)


def _invert_in_place(matrix: np.ndarray) -> None:
    for start in range(0, len(matrix), _BLOCK):
        block = slice(start, start + _BLOCK)
        # P = A_pp^-1; A_pj <- P A_pj, A_ij <- A_ij - A_ip P A_pj, A_ip <- -A_ip P, A_pp <- P
        pivot, column = np.linalg.inv(matrix[block, block]), matrix[:, block].copy()
        row = pivot @ matrix[block]
        row[:, block] = pivot
        # The subtraction below then leaves -A_ip P in these columns.
        matrix[:, block] = 0
        # Block by block: the product with all rows at once would be one more matrix.
        for i in range(0, len(matrix), _BLOCK):
            matrix[i : i + _BLOCK] -= column[i : i + _BLOCK] @ row
        matrix[block] = row


def _factor_in_place(matrices: np.ndarray) -> None:
    blocks = [slice(start, start + _BLOCK) for start in range(0, matrices.shape[-1], _BLOCK)]
    for block in reversed(blocks):  # matrix = R R^T; the diagonal blocks of R are inverted
        preceding = slice(0, block.start)
        # Reversed rows and columns turn a lower factor into an upper one.
        corner = np.linalg.cholesky(matrices[..., block, block][..., ::-1, ::-1])[..., ::-1, ::-1]
        # `inv` leaves rounding below the diagonal; `triu` clears it.
        matrices[..., block, block] = inverse = np.triu(np.linalg.inv(corner))
        # R_ib = A_ib R_bb^-T, then A_ij <- A_ij - R_ib R_jb^T
        above = matrices[..., preceding, block] @ inverse.swapaxes(-1, -2)
        for rows in blocks[: blocks.index(block)]:
            matrices[..., rows, preceding] -= above[..., rows, :] @ above.swapaxes(-1, -2)
        matrices[..., preceding, block] = above
        matrices[..., block, preceding] = 0
    for block in blocks:  # U = R^-1
        preceding = slice(0, block.start)
        # U_ib = -U_ii R_ib U_bb; blocks before, and the diagonal block, hold U already.
        above = matrices[..., preceding, preceding] @ matrices[..., preceding, block]
        matrices[..., preceding, block] = -above @ matrices[..., block, block]


def _factor_block(start: jax.Array, width: int, matrix: jax.Array) -> jax.Array:
    """Does a step of the first loop of `_factor_in_place`."""
    corner = lax.dynamic_slice(matrix, (start, start), (width, width))
    corner = lax.linalg.cholesky(corner[::-1, ::-1], symmetrize_input=False)[::-1, ::-1]
    eye = jnp.eye(width, dtype=matrix.dtype)
    inverse = lax.linalg.triangular_solve(corner, eye, left_side=True, lower=False)
    column = dot(lax.dynamic_slice_in_dim(matrix, start, width, axis=1), inverse.mT)
    above = jnp.where(jnp.arange(len(matrix))[:, None] < start, column, 0)

    def subtract(i: jax.Array, matrix: jax.Array) -> jax.Array:
        rows = lax.dynamic_slice_in_dim(matrix, width * i, width)
        rows -= dot(lax.dynamic_slice_in_dim(above, width * i, width), above.mT)
        return lax.dynamic_update_slice_in_dim(matrix, rows, width * i, axis=0)

    matrix = lax.fori_loop(0, start // width, subtract, matrix)
    column = lax.dynamic_update_slice_in_dim(above, inverse, start, axis=0)
    return lax.dynamic_update_slice_in_dim(matrix, column, start, axis=1)


def _invert_block(start: jax.Array, width: int, matrix: jax.Array) -> jax.Array:
    """Does a step of the second loop of `_factor_in_place`."""
    column = lax.dynamic_slice_in_dim(matrix, start, width, axis=1)
    corner = lax.dynamic_slice_in_dim(column, start, width)
    is_above = jnp.arange(len(matrix))[:, None] < start
    above = dot(-dot(matrix, jnp.where(is_above, column, 0)), corner)
    column = jnp.where(is_above, above, column)
    return lax.dynamic_update_slice_in_dim(matrix, column, start, axis=1)
