"""Sparse activations as functions of one array."""

from __future__ import annotations

import functools
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity import selection
from sparsity.core import trees
from sparsity.core.checks import check_bool, check_density, check_int, check_kind
from sparsity.core.dtypes import promote
from sparsity.core.sharding import shard_like
from sparsity.masks import apply_mask, apply_mask_straight_through
from sparsity.patterns import NByM, Unstructured, parse_nm


def prune_act_unstruct(
    x: chex.Array, density: chex.Numeric, *, batch_axes: int = 0, straight_through: bool = False
) -> jax.Array:
    """Keeps the entries of the largest magnitude, with their sign; all others become 0.0.

    Of n entries exactly `max(1, round_half_even(n * (1 - float32(1 - density))))` are kept; ties go
    to the lowest index. A density is the fraction to keep, a sparsity the fraction to remove.

    Args:
      x: [*batch, ...] array of any floating or complex dtype.
      density: fraction to keep, in (0, 1]; may be traced.
      batch_axes: number of leading axes that index separate slices, each of which keeps `density`;
        by default the array is one slice.
      straight_through: pass the gradient to all entries, not only to kept ones.

    Returns:
      Array of the shape, dtype and sharding of `x`.

    Raises:
      ValueError: an argument is out of range, or `x` is an array of integers.

    Example:
      >>> prune_act_unstruct(jnp.array([1.0, -4.0, 0.5, 3.0]), 0.5)
      Array([ 0., -4.,  0.,  3.], dtype=float32)
    """
    check_density("density", density)
    check_int("batch_axes", batch_axes, 0)
    if not isinstance(density, int | float):  # bfloat16 would round the difference
        density = jnp.asarray(density, promote(jnp.result_type(density), jnp.float32))
    create = functools.partial(Unstructured().select, sparsity=1 - density, batch_axes=batch_axes)
    return _apply_created_mask(x, create, straight_through)


def prune_act_struct(
    x: chex.Array,
    pattern: str | tuple[int, int] | NByM,
    axis: int = -1,
    *,
    straight_through: bool = False,
) -> jax.Array:
    """Keeps the n largest magnitudes of every m consecutive entries, with their sign.

    A shorter last group keeps n entries, or all if it has fewer. Ties go to the lowest index.

    Args:
      x: array of any floating or complex dtype with at least one axis.
      pattern: (n, m), 'n:m', or an `NByM`; n in [1, m].
      axis: the axis of the groups, unless `pattern` is an `NByM`.
      straight_through: pass the gradient to all entries, not only to kept ones.

    Returns:
      Array of the shape, dtype and sharding of `x`.

    Raises:
      ValueError: an argument is out of range, or `x` is an array of integers.

    Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks".

    Example:
      >>> prune_act_struct(jnp.array([1.0, -4.0, 0.5, 3.0, 2.0]), (1, 4))
      Array([ 0., -4.,  0.,  0.,  2.], dtype=float32)
    """
    nm = parse_nm("pattern", pattern, axis)

    def create(scores: jax.Array) -> jax.Array:
        select = functools.partial(selection.nm_mask, n=nm.n, m=nm.m, axis=nm.axis)
        return shard_like(scores, select, scores)

    return _apply_created_mask(x, create, straight_through)


def _apply_created_mask(
    x: chex.Array, create: Callable[[jax.Array], jax.Array], straight_through: bool
) -> jax.Array:
    check_bool("straight_through", straight_through)
    check_kind("x", x, jax.Array | np.ndarray | np.generic | list | tuple | float, "an array")
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError) as error:  # of text, objects, and rows of different lengths
        expected = "x must be an array of floating or complex numbers"
        raise ValueError(f"{expected}, got x = {x!r}.") from error
    if not trees.is_prunable(x):
        raise ValueError(f"x must be an array of floating or complex numbers, got {x.dtype}.")
    mask = create(jnp.abs(jax.lax.stop_gradient(x)))
    return (apply_mask_straight_through if straight_through else apply_mask)(x, mask)
