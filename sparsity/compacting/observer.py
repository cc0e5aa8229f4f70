"""Arrays that are computed from the gradients of dense slices, within a backward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from sparsity.core.sharding import shard_like
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
    arrays, result = residuals

    def run(arrays: PyTree, gradient: jax.Array) -> jax.Array:
        def mapped(each: tuple[PyTree, jax.Array]) -> jax.Array:
            return function(*each)

        for _ in range(depth):
            mapped = functools.partial(lax.map, mapped)
        return mapped((arrays, gradient))

    def call(arrays: PyTree, gradient: jax.Array) -> jax.Array:
        return shard_like(result, run, arrays, gradient)

    observe = custom_vmap(call)

    @observe.def_vmap
    def observe_rows(
        _: int, batched: PyTree, arrays: PyTree, gradients: jax.Array
    ) -> tuple[jax.Array, bool]:
        if any(jax.tree.leaves(batched[0])):  # models in parallel
            in_axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
            rows: jax.Array = jax.vmap(call, in_axes=in_axes)(arrays, gradients)
            return rows, True
        return observe(arrays, jnp.sum(gradients, axis=0)), False

    return None, None, observe(arrays, gradient)


_watch.defvjp(lambda _, __, slices, arrays, result: (slices, (arrays, result)), _observe)
jax.tree_util.register_dataclass(Observer, ["arrays", "result"], ["function"])
