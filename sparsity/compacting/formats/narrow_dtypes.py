"""Numbers of less than 32 bits: stored as integers, read by layer, and told from quantized ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.trees import PyTree


def to_bits(array: PyTree) -> PyTree:
    """Returns floats of less than 32 bits as unsigned integers; other arrays unchanged.

    XLA on CPUs has few operations on such floats. It widens the operand of each other one, and
    would widen all layers of a stack at once where a loop takes a layer. Integers stay narrow.
    """
    if not is_narrow(array.dtype):
        return array
    dtype = unsigned_like(array.dtype)
    if isinstance(array, jax.ShapeDtypeStruct):
        return array.update(dtype=dtype)
    return lax.bitcast_convert_type(array, dtype)


def is_narrow(dtype: np.dtype) -> bool:
    """Returns whether numbers of a dtype are floats of 8 or 16 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize <= 2


def unsigned_like(dtype: np.dtype) -> np.dtype:
    """Returns the dtype of unsigned integers of the same bits."""
    return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def is_quantized(dtype: np.dtype) -> bool:
    """Returns whether numbers of a dtype are multiplied only after a cast: float8, small integers.

    float32 holds them all.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return dtype.itemsize <= 2
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize == 1


@jax.custom_jvp
def read_layer(values: jax.Array, layers: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the values of a layer; the gradient is that of `values`, which are equal.

    XLA on CPUs would widen the values of all layers before the scan. The barrier keeps the
    conversion in the step, where it is a part of reading the layer. jax drops rules for derivatives
    from a scan that was differentiated: second derivatives are those of `layers`.
    """
    layers, index = lax.optimization_barrier((layers, index))
    return lax.dynamic_index_in_dim(layers, index, keepdims=False)


@read_layer.defjvp
def _read_layer_tangents(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    return read_layer(*primals), tangents[0]
