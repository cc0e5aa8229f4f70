"""Gradients of whole slices of a parameter, as products of these slices alone.

A slice is a channel, a head, or an input with all its entries. S2FT (Yang et al. 2024, section 3.2)
trains such a dense part of each matrix: the backward pass multiplies the part of the activations,
or of their gradient, that meets the slices.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from sparsity.compacting.kept import Deferred, Kept, Lazy, Sliced, is_lazy
from sparsity.core.sharding import explicit_sharding
from sparsity.programs.products import PRODUCTS, read_product
from sparsity.programs.program import Equation


def differentiate(
    equation: Equation, inputs: Sequence[Lazy], cotangents: Sequence[jax.Array]
) -> jax.Array | None:
    """Returns the gradient of the kept slices of a product.

    Args:
      equation: the product.
      inputs: its inputs; one is lazy.
      cotangents: the gradient of its result.

    Returns:
      `None` if the product needs the dense gradient: one of an expression of the slices, of ragged
      rows, of groups of features, along an axis of space, or of arrays on Explicit axes.
    """
    at = next(i for i, x in enumerate(inputs) if is_lazy(x))
    kept = inputs[at]
    if equation.name not in PRODUCTS or not isinstance(kept, Sliced) or len(inputs) != 2:
        return None
    other, (cotangent,) = inputs[1 - at], cotangents
    if isinstance(other, Kept | Deferred) or any(
        explicit_sharding(jax.typeof(x)) for x in (other, cotangent)
    ):
        return None
    product = read_product(equation)
    if product.groups > 1 or product.refusal or equation.params.get("out_sharding") is not None:
        return None
    partners = {pair[at]: pair[1 - at] for pair in product.pairs}
    batch = dict(zip(product.operands[at].batch, product.operands[1 - at].batch, strict=True))
    places = {source: i for i, source in enumerate(product.output) if source is not None}
    results = {axis: places[at, axis] for axis in product.operands[at].free}
    results |= {axis: places[0, axis if at == 0 else batch[axis]] for axis in batch}
    axis, *stack = (kept.axes.index(i) for i in (kept.stack + kept.axis, *range(kept.stack)))
    if not {*stack} <= {*batch} or not (axis in partners or axis in results):
        return None
    for_other, for_result = (
        _take(array, kept.indices, axes[axis], [axes[i] for i in stack]) if axis in axes else array
        for array, axes in ((other, partners), (cotangent, results))
    )

    def multiply(slices: jax.Array) -> jax.Array:
        operands = [slices.transpose(kept.axes), for_other]
        result: jax.Array = equation.bind(operands if at == 0 else operands[::-1])[0]
        return result

    gradient: jax.Array = jax.vjp(multiply, kept.values)[1](for_result)[0]
    return gradient


def _take(array: jax.Array, indices: jax.Array, axis: int, stack: Sequence[int]) -> jax.Array:
    """Returns slices of an array along an axis; those at padding are 0.

    Args:
      array: any floats.
      indices: integers [*stack, k].
      axis: axis of the array, whose size becomes k.
      stack: axes of the array that index separate products.
    """
    depth = range(len(stack))
    axis_in_slice = axis - sum(each < axis for each in stack)

    def take(array: jax.Array, indices: jax.Array) -> jax.Array:
        return jnp.take(array, indices, axis_in_slice, mode="fill", fill_value=0)

    for _ in depth:
        take = jax.vmap(take)
    taken = take(jnp.moveaxis(array, stack, depth), indices)
    return jnp.moveaxis(taken, depth, stack)
