"""Controls what XLA fuses, and how arrays lie in memory.

The page of the design lists these functions and the barriers elsewhere: the place, the reason, and
the check that fails without each (section "Workarounds for XLA").
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from sparsity.core.trees import PyTree


def use_flat(x: jax.Array) -> bool:
    """Returns whether x may be reshaped freely: its type names no mesh of several devices.

    jit hides a mesh that `in_shardings` or `out_shardings` alone name: such arrays are gathered.
    """
    mesh = jax.typeof(x).sharding.mesh
    return mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual


def pin_layout(tree: PyTree) -> PyTree:
    """Returns a tree whose arrays lie in memory with the last axis innermost, on GPUs.

    XLA chooses the layouts of what a loop carries by what the loop does. Where a loop transposes,
    all that the loop carries would be transposed before, in each step. Arrays on a mesh stay as
    they are: XLA would gather them.
    """
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and _has_layout(x)]

    def pin(arrays: list[jax.Array]) -> list[jax.Array]:
        return [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in arrays]

    arrays = [leaves[i] for i in places]
    pinned = lax.platform_dependent(arrays, default=lambda x: x, cuda=pin, rocm=pin)
    for i, x in zip(places, pinned, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(treedef, leaves)


def _has_layout(x: jax.Array) -> bool:
    return x.ndim > 1 and use_flat(x) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
