"""Sums of masks, and powers of two that keep sums of floats in range."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def sums(masks: Sequence[jax.Array], axes: Sequence[int]) -> list[jax.Array]:
    """Returns int32 sums of two or more masks, or of partial sums, along axes.

    A reduction of two and more operands compiles to one fused loop. XLA:CPU cuts a reduction of one
    integer operand into windows, and stores an int32 operand as large as the data first.
    """
    return lax.reduce(
        [mask.astype(jnp.int32) for mask in masks],
        [np.int32(0)] * len(masks),
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        tuple(axes),
    )


def count(mask: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Counts the entries of a bool mask that are True along axes, int32.

    The barrier keeps a second operand that nobody reads, and with it the fused loop of `sums`.
    """
    return lax.optimization_barrier(sums([mask, ~mask], axes))[0]


@jax.jit
def scale_to_one(arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """Returns floats times one power of two, and this power.

    The largest finite absolute value of all arrays comes to [1/4, 4].
    """
    largest = _find_largest(arrays)
    most = jnp.finfo(largest.dtype).maxexp - 2  # powers beyond are infinite, or 0
    factor = jnp.ldexp(jnp.ones_like(largest), -jnp.clip(jnp.frexp(largest)[1], -most, most))
    return [x * factor.astype(x.dtype) for x in arrays], factor


@functools.partial(jax.jit, static_argnums=1)
def scale_for_sums(arrays: Sequence[jax.Array], summands: int) -> list[jax.Array]:
    """Scales floats by one power of two, 1 if possible, so that no sum overflows.

    Args:
      arrays: arrays of at least float32.
      summands: the most summands of a sum.
    """
    largest = _find_largest(arrays)
    most = jnp.finfo(largest.dtype).maxexp - 1 - max(summands - 1, 0).bit_length()
    exponent = jnp.minimum(most - jnp.frexp(largest)[1], 0)
    factor = jnp.ldexp(jnp.ones_like(largest), exponent)
    return [x * factor.astype(x.dtype) for x in arrays]


def _find_largest(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the largest finite absolute value of all arrays, 1 if all are empty."""
    sizes = [jnp.abs(x) for x in arrays if x.size]
    maxima = [jnp.max(jnp.where(jnp.isfinite(x), x, 0)) for x in sizes] or [jnp.ones(())]
    return functools.reduce(jnp.maximum, maxima)
