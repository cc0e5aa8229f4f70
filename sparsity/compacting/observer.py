"""Arrays that are computed from the gradients of dense slices, within a backward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from sparsity.core import sharding
from sparsity.core.trees import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Observer:
    """Computes an array from the gradient of each dense slice, where a backward pass has it.

    The array leaves the backward pass as the cotangent of `result`. Kept values get no gradient.
    If a `vmap` maps gradients and no `arrays`, the gradients of all rows are added up first. A
    slice that is read twice has two gradients, whose results are added up.

    Attributes:
      function: maps a slice of `arrays` and the gradient of a dense slice to a slice of `result`.
      arrays: tree of arrays [*stack, ...].
      result: [*stack, ...] zeros.
    """

    function: Callable[[PyTree, jax.Array], jax.Array]
    arrays: PyTree
    result: jax.Array

    def watch(self, slices: jax.Array, depth: int) -> jax.Array:
        """Returns the dense slices [*stack, ...], whose gradients are observed."""
        return _watch(self.function, depth, lax.stop_gradient(slices), self.arrays, self.result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _watch(
    function: Callable[[PyTree, jax.Array], jax.Array],
    depth: int,
    slices: jax.Array,
    arrays: PyTree,
    result: jax.Array,
) -> jax.Array:
    return slices


def _observe(
    function: Callable[[PyTree, jax.Array], jax.Array],
    depth: int,
    residuals: tuple[PyTree, jax.Array],
    gradient: jax.Array,
) -> tuple[None, None, jax.Array]:
    """Returns the cotangents of slices, arrays and result; see `Observer`."""
    arrays, result = residuals
    like = sharding.abstract(result)  # the array itself would leak a tracer

    def run(arrays: PyTree, gradient: jax.Array) -> jax.Array:
        def run_slice(pair: tuple[PyTree, jax.Array]) -> jax.Array:
            return function(*pair)

        for _ in range(depth):
            run_slice = functools.partial(lax.map, run_slice)
        return run_slice((arrays, gradient))

    run_sharded = functools.partial(sharding.shard_like, like, run)
    observe = custom_vmap(run_sharded)

    @observe.def_vmap
    def observe_mapped(
        _: int, is_mapped: PyTree, arrays: PyTree, gradients: jax.Array
    ) -> tuple[jax.Array, bool]:
        """Returns the result under a `vmap`, and whether the result is mapped.

        A `vmap` over models maps the arrays: each model has its result. A `vmap` over the examples
        of a batch, in the loss of one model, maps the gradients alone: the result is that of their
        sum, the gradient of the loss.
        """
        if any(jax.tree.leaves(is_mapped[0])):
            in_axes = jax.tree.map(lambda is_one: 0 if is_one else None, is_mapped)
            results: jax.Array = jax.vmap(run_sharded, in_axes=in_axes)(arrays, gradients)
            return results, True
        return observe(arrays, jnp.sum(gradients, axis=0)), False

    return None, None, observe(arrays, gradient)


_watch.defvjp(lambda _, __, slices, arrays, result: (slices, (arrays, result)), _observe)
jax.tree_util.register_dataclass(Observer, ["arrays", "result"], ["function"])
