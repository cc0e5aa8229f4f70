"""Values that kernels of XLA:CPU read at run time: computed once, and no part of their code."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def use_flat(x: jax.Array) -> bool:
    """Whether x may be reshaped freely: it lies on one device, as far as its type tells."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh.are_all_axes_manual if not mesh.empty else jax.device_count() == 1


def at_runtime(number: int) -> jax.Array:
    """The number, int32, read from a constant that the compiler does not see through.

    Programs that differ in nothing else then share a kernel. The constant has another entry, or it
    would be seen through all the same.
    """
    number_of: jax.Array = lax.optimization_barrier(jnp.array([number, -1], jnp.int32))[0]
    return number_of


def compute_once(x: Sequence[jax.Array]) -> list[jax.Array]:
    """Floats, computed once: what is cheap, XLA:CPU computes in every kernel that reads it.

    What a branch returns is no part of a kernel; this one is always taken.
    """
    held: list[jax.Array] = lax.cond(at_runtime(1) > 0, list, lambda x: [0 * leaf for leaf in x], x)
    return held


def part_of(x: jax.Array, start: int, count: int) -> jax.Array:
    """x[start : start + count], read by the same kernel wherever it starts."""
    if count == len(x):
        return x
    part: jax.Array = lax.dynamic_slice(
        x, (at_runtime(start),), (count,), allow_negative_indices=False
    )
    return part


def unstack(x: jax.Array) -> list[jax.Array]:
    """The entries of x[count], each read by the same kernel."""
    held = lax.optimization_barrier(x)
    return [part_of(held, i, 1)[0] for i in range(len(x))]
