"""Norms of scores, by which a global scope makes parameters comparable."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsity.core import sharding
from sparsity.core.dtypes import promote
from sparsity.core.exact_sums import finite, ordered_sum, scale_to_one


def divide_by_norm(scores: jax.Array, eps: float) -> jax.Array:
    """Returns scores over the sum of `eps` and the L2 norm of the finite ones.

    Integers and empty arrays stay. A norm may exceed the range of the dtype: scores are taken to at
    most 1 before they are squared.
    """
    if not jnp.issubdtype(scores.dtype, jnp.floating) or not scores.size:
        return scores
    return sharding.shard_like(scores, _divide, scores, eps)


@jax.jit
def _divide(scores: jax.Array, eps: float) -> jax.Array:
    [wide], factors = scale_to_one([scores.astype(promote(scores.dtype, jnp.float32))])
    squares = jnp.square(finite(wide))
    # The sum of at most 2**29 squares has the same bits on any mesh, and so have masks.
    add = ordered_sum if squares.size <= 2**29 else jnp.sum
    norm = jnp.sqrt(add(squares, tuple(range(squares.ndim))))
    divisor = norm + jnp.asarray(eps, wide.dtype) * factors[0] * factors[1]
    # A product: XLA turns a division into a product in some kernels and not in others.
    return wide * (1 / jnp.maximum(divisor, jnp.finfo(wide.dtype).tiny))
