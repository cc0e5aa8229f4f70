"""Arrays: dtypes of results, sums of masks, derivatives through loops, and layouts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from sparsity.core import trees
from sparsity.core.trees import PyTree, Tree


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


def hold_constant(tree: Tree) -> Tree:
    """Returns a tree whose arrays have no derivatives; other leaves pass."""
    return jax.tree.map(lambda x: jax.lax.stop_gradient(x) if _is_inexact(x) else x, tree)


def replace_values(like: Tree, values: PyTree) -> Tree:
    """Returns `values` with the derivatives of `like`, which is computed only for derivatives.

    Args:
      like: tree of arrays.
      values: tree of the same structure, shapes and dtypes.
    """
    leaves, treedef = jax.tree.flatten(values)
    at = [i for i, leaf in enumerate(leaves) if _is_inexact(leaf)]
    likes = jax.tree.leaves(like)
    replaced = _take_values([leaves[i] for i in at], [likes[i] for i in at])
    for i, leaf in zip(at, replaced, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


@jax.custom_jvp
def _take_values(values: list[jax.Array], likes: list[jax.Array]) -> list[jax.Array]:
    return values


@_take_values.defjvp
def _take_derivatives(
    primals: tuple[list[jax.Array], list[jax.Array]],
    tangents: tuple[list[jax.Array], list[jax.Array]],
) -> tuple[list[jax.Array], list[jax.Array]]:
    return _take_values(*primals), tangents[1]


def _is_inexact(leaf: PyTree) -> bool:
    return trees.is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


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
