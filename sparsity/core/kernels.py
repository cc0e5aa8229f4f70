"""Controls what XLA:CPU fuses into a kernel, folds into a constant, and schedules first.

The page of the design lists these functions and the barriers elsewhere: the place, the reason, and
the test that fails without each (section "Workarounds for XLA").
"""

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sparsity.core.trees import PyTree


def use_flat(x: jax.Array) -> bool:
    """Returns whether x may be reshaped freely: its type says that it lies on one device."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh.are_all_axes_manual if not mesh.empty else jax.device_count() == 1


def at_runtime(number: int) -> jax.Array:
    """Returns the number, int32, as a value of the running program.

    Slices of one array at 20 constant places compile to 20 kernels; at 20 such numbers, to one.
    XLA folds a barrier around a scalar constant, but not the entry of an array behind a barrier.
    """
    return lax.optimization_barrier(jnp.array([number, -1], jnp.int32))[0]


def compute_once_after(arrays: PyTree, count: chex.Numeric) -> PyTree:
    """Computes arrays once, as results of a branch whose predicate is `count >= 0`.

    Otherwise the loop that scatters updates over a parameter would compute the update of a kept
    entry again for each of its neighbours, ten times at 90 %. XLA:CPU removes barriers before it
    fuses loops, but stores the operands of a branch.
    """
    return lax.cond(count >= 0, lambda x: x, lambda x: jax.tree.map(jnp.zeros_like, x), arrays)


def read_part(x: jax.Array, start: int, count: int) -> jax.Array:
    """Returns x[start : start + count], read by the same kernel whatever the start is."""
    if count == len(x):
        return x
    return lax.dynamic_slice(x, (at_runtime(start),), (count,), allow_negative_indices=False)


def unstack(x: jax.Array) -> list[jax.Array]:
    """Returns the entries of x[count], each read by the same kernel."""
    return [read_part(x, i, 1)[0] for i in range(len(x))]
