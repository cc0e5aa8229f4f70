"""Arrays of a program that are computed where an equation reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from sparsity.compacting.formats.base import KeptArray, Token, is_kept
from sparsity.programs.program import Equation


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """An output of an equation that is computed again by each product that reads the output.

    Attributes:
      equation: an entrywise equation, or one of layout.
      output_index: index of the output.
      inputs: arrays; some are kept values, or deferred.
    """

    equation: Equation
    output_index: int
    inputs: tuple[MaybePending, ...]


# Kept values and deferred outputs are pending: no dense array holds them yet.
MaybePending: TypeAlias = jax.Array | KeptArray | Deferred

jax.tree_util.register_dataclass(Deferred, ["inputs"], ["equation", "output_index"])


def is_pending(array: MaybePending) -> bool:
    """Returns whether an array is kept values, or deferred."""
    return isinstance(array, KeptArray | Deferred)


def densify_pending(array: MaybePending, token: Token = 0) -> jax.Array:
    """Returns an array as a dense one, for an equation of the model; `token` as in `KeptArray`."""
    if isinstance(array, KeptArray):
        dense = array.layout.find_dense(array)
        return array.densify(token) if dense is None else dense
    if isinstance(array, Deferred):
        inputs = [densify_pending(each, token) for each in array.inputs]
        return array.equation.bind(inputs)[array.output_index]
    return array


def kept_in(arrays: Sequence[MaybePending]) -> list[KeptArray]:
    """Returns the kept values from which arrays are computed."""
    return list(filter(is_kept, jax.tree.leaves(list(arrays), is_leaf=is_kept)))


def make_token(arrays: Sequence[jax.Array]) -> Token:
    """Returns an int32 0 that depends on the floating `arrays`.

    A buffer of zeros made from this 0 is not allocated before the arrays. The schedule of XLA on
    CPUs begins with all buffers of zeros, of all layers at once. A dependence on the input of a
    layer keeps one dense parameter at a time; a barrier does not, because XLA removes barriers
    before scheduling.
    """
    token: Token = 0
    for array in arrays:
        if jnp.issubdtype(jnp.result_type(array), jnp.inexact) and np.size(array):
            token = token + _exceeds_infinity(lax.stop_gradient(array))
    return token


@custom_vmap
def _exceeds_infinity(array: jax.Array) -> jax.Array:
    first = lax.slice(array, [0] * array.ndim, [1] * array.ndim).reshape(())
    # False for all numbers and NaN; XLA does not infer this, and keeps the dependence.
    return (first.real.astype(jnp.float32) > jnp.inf).astype(jnp.int32)


@_exceeds_infinity.def_vmap
def _exceeds_infinity_once(_: int, __: object, array: jax.Array) -> tuple[jax.Array, bool]:
    """Keeps one dense parameter for all rows of a `vmap`."""
    return _exceeds_infinity(array[0]), False
