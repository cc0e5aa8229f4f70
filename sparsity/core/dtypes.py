"""Dtypes of numbers that are computed together."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def promote(*dtypes: DTypeLike) -> np.dtype:
    """Returns the dtype that jax promotes to, with float8 and float4 as bfloat16.

    jax promotes these to no other dtype; bfloat16 holds all of their numbers. The result is the
    same under `jax_numpy_dtype_promotion="strict"`.

    Example:
      >>> promote(jnp.float8_e5m2, jnp.float32), promote(jnp.float8_e5m2, jnp.float8_e5m2)
      (dtype('float32'), dtype(float8_e5m2))
    """
    distinct = {np.dtype(dtype) for dtype in dtypes}
    if len(distinct) > 1:
        distinct = {np.dtype(jnp.bfloat16) if _is_narrow(dtype) else dtype for dtype in distinct}
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, sorted(distinct, key=str))


def multiply(one: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the product of two arrays in at least float32: in float16 small products are 0.

    Example:
      >>> small = jnp.array([1e-4], jnp.float16)
      >>> (small * small).tolist(), bool(multiply(small, small) > 0)
      ([0.0], True)
    """
    dtype = promote(one.dtype, other.dtype, jnp.float32)
    return one.astype(dtype) * other.astype(dtype)


def _is_narrow(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 8
