"""Sums over the rows of a product: what the entries of its weight are multiplied with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from sparsity.graph import Use

Kind = Literal["squares", "moments", "gram"]
KINDS = get_args(Kind)


def sum_up(use: Use, kind: Kind, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of a product over its rows, and how many rows there are.

    Args:
      use: the product.
      kind: what is summed.
      x: the operand that its weight is multiplied with.

    Returns:
      ([*batch, inputs] for 'squares', [*batch, 2, inputs] for 'moments', squares first,
      [*batch, inputs, inputs] for 'gram'; int32 scalar).
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    of_rows = _of_dot if use.primitive == "dot_general" else _of_convolution
    found, count = of_rows(use, kind, x)
    return found, jnp.int32(count)


def _of_dot(use: Use, kind: Kind, x: jax.Array) -> tuple[jax.Array, int]:
    contracted, batch = use.equation.params["dimension_numbers"]
    inputs, batch = contracted[1 - use.operand], batch[1 - use.operand]
    free = [i for i in range(x.ndim) if i not in inputs and i not in batch]
    count = math.prod(x.shape[i] for i in free)
    lead, size = [x.shape[i] for i in batch], math.prod(x.shape[i] for i in inputs)
    if kind == "gram":
        rows = x.transpose(*batch, *free, *inputs).reshape(*lead, count, size)
        return _gram(rows), count
    left = [i for i in range(x.ndim) if i not in free]
    order = [left.index(i) for i in (*batch, *inputs)]

    def summed(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=tuple(free)).transpose(order).reshape(*lead, size)

    return _sums(kind, x, summed), count


def _of_convolution(use: Use, kind: Kind, x: jax.Array) -> tuple[jax.Array, int]:
    equation = use.equation
    params, kernel, groups = equation.params, equation.inputs[1], use.groups
    spec = params["dimension_numbers"]
    output = equation.outputs[0]
    count = math.prod(output.shape[i] for i in (spec.out_spec[0], *spec.out_spec[2:]))

    def summed(x: jax.Array) -> jax.Array:
        """The convolution's own transpose, of ones, with one output a group."""
        shape = [groups if i == spec.rhs_spec[0] else n for i, n in enumerate(kernel.shape)]

        def convolve(weights: jax.Array) -> jax.Array:
            found = equation.bind([x, weights], preferred_element_type=None)
            return jnp.asarray(found[0])

        weights = jax.ShapeDtypeStruct(tuple(shape), x.dtype)
        ones = jax.eval_shape(convolve, weights)
        (sums,) = jax.linear_transpose(convolve, weights)(jnp.ones(ones.shape, ones.dtype))
        ordered = sums.transpose(spec.rhs_spec)  # [groups, inputs, *window]
        return jnp.asarray(ordered.reshape(*([groups] if groups > 1 else []), -1))

    if kind != "gram":
        return _sums(kind, x, summed), count
    patches = lax.conv_general_dilated_patches(
        x,
        [kernel.shape[i] for i in spec.rhs_spec[2:]],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        dimension_numbers=spec,
        precision=lax.Precision.HIGHEST,
    )
    rows = jnp.moveaxis(patches, spec.out_spec[1], -1).reshape(count, groups, -1)
    grams = _gram(jnp.moveaxis(rows, 1, 0))
    return (grams if groups > 1 else grams[0]), count


def _sums(kind: Kind, x: jax.Array, summed: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Sums of squares; for moments those of the entries, too, below them."""
    squares = summed(jnp.square(x))
    return squares if kind == "squares" else jnp.stack([squares, summed(x)], axis=-2)


def _gram(rows: jax.Array) -> jax.Array:
    """X^T X of [..., rows, inputs]."""
    grams: jax.Array = jnp.einsum("...mk,...ml->...kl", rows, rows, precision=lax.Precision.HIGHEST)
    return grams
