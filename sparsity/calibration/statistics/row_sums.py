"""Sums over the rows of a product: of its inputs, and of the outputs that weights give."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax

from sparsity.calibration.statistics.alignment import Alignment
from sparsity.calibration.statistics.counts import Count
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.core.dtypes import promote
from sparsity.graph import Use
from sparsity.programs.products import Operand, read_product

Kind: TypeAlias = Literal["squares", "moments", "gram"]
KINDS = get_args(Kind)

_HIGHEST = lax.Precision.HIGHEST


def check_statistics_kind(kind: object, who: str) -> None:
    """Raises a ValueError that names a pruner or a refit unless its statistics are of a kind."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"statistics_kind of {who} must be one of {KINDS}, got {kind!r}.")


def sum_inputs(use: Use, alignment: Alignment, kind: Kind, x: jax.Array) -> Statistic:
    """Sums up the inputs of a product over its rows, and counts the rows.

    Args:
      use: the product.
      alignment: alignment of the use, without the axes that scans took apart.
      kind: the kind of sums.
      x: the other operand of the product.

    Returns:
      The statistic in the order of the parameter, of one layer where scans run over several.
    """
    x = _wide(x)
    is_dot = use.kind == "dot"
    count = Count.from_number(_num_rows(use, x) * alignment.repeats)
    seen = dataclasses.replace(alignment.axes, count=count)
    if kind == "gram":
        rows = _rows_of_dot(use, x) if is_dot else _patches(use, x)
        grams = jnp.einsum("...mk,...ml->...kl", jnp.conj(rows), rows, precision=_HIGHEST)
        rows_sum = jnp.sum(rows, axis=-2)
        gram, sums = alignment.sums(grams, 2), alignment.sums(rows_sum, 1)
        return dataclasses.replace(seen, gram=gram, sums=sums)
    total = functools.partial(_sum_of_dot if is_dot else _sum_of_convolution, use)
    seen = dataclasses.replace(seen, squares=alignment.sums(total(_squared(x)), 1))
    if kind == "moments":
        return dataclasses.replace(seen, sums=alignment.sums(total(x), 1))
    return seen


def sum_outputs(use: Use, alignment: Alignment, x: jax.Array, *matrices: jax.Array) -> jax.Array:
    """Sums up |y|^2 over the outputs y of each matrix: [number of matrices].

    Args:
      use: the product.
      alignment: alignment of the use, without the axes that scans took apart.
      x: the other operand of the product.
      *matrices: [*batch, outputs, inputs] in the order of the parameter.
    """
    x = _wide(x)

    def total(matrices: jax.Array) -> jax.Array:
        weights = alignment.operand(matrices.astype(promote(matrices.dtype, x.dtype)))
        if use.kind == "dot":
            rows = _rows_of_dot(use, x)
            rows = rows.reshape(len(weights), *rows.shape[-2:])
            outputs = jnp.einsum("bmi,boi->bmo", rows, weights, precision=_HIGHEST)
        else:
            outputs = _convolved(use, x, weights)
        return jnp.sum(_squared(outputs))

    return jnp.stack([total(each) for each in matrices])


def _squared(x: jax.Array) -> jax.Array:
    """Returns |x|^2."""
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)


def _wide(x: jax.Array) -> jax.Array:
    """Returns the operand in the dtype of the sums, at least float32."""
    x = jnp.asarray(x)  # a batch may be of numpy
    return x.astype(promote(x.dtype, jnp.float32))


def _num_rows(use: Use, x: jax.Array) -> int:
    """Returns the number of rows in each slice of a product."""
    if use.kind == "dot":
        return math.prod(x.shape[i] for i in _roles(use).free)
    sources = zip(use.equation.outputs[0].shape, read_product(use.equation).output, strict=True)
    return math.prod(size for size, source in sources if source is None or source[0] == 0)


def _roles(use: Use) -> Operand:
    """Returns the roles of the axes of the inputs."""
    return read_product(use.equation).operands[1 - use.operand]


def _rows_of_dot(use: Use, x: jax.Array) -> jax.Array:
    """Returns the rows of a dot product, [*slices, rows, inputs]."""
    inputs, free, batch, *_ = _roles(use)
    lead = [x.shape[i] for i in batch]
    count, size = (math.prod(x.shape[i] for i in axes) for axes in (free, inputs))
    return x.transpose(*batch, *free, *inputs).reshape(*lead, count, size)


def _sum_of_dot(use: Use, x: jax.Array) -> jax.Array:
    """Sums up the rows, [*slices, inputs]."""
    inputs, free, batch, *_ = _roles(use)
    kept_axes = [i for i in range(x.ndim) if i not in free]
    total = jnp.sum(x, axis=tuple(free)).transpose([kept_axes.index(i) for i in (*batch, *inputs)])
    return total.reshape(*[x.shape[i] for i in batch], math.prod(x.shape[i] for i in inputs))


def _sum_of_convolution(use: Use, x: jax.Array) -> jax.Array:
    """Sums up the patches, [groups, inputs], by the transposed convolution of ones."""
    spec = use.equation.params["dimension_numbers"].rhs_spec
    # One output for each group.
    shape = list(use.equation.inputs[1].shape)
    shape[spec[0]] = use.groups
    convolve = functools.partial(_convolve, use, x)
    weights = jax.ShapeDtypeStruct(tuple(shape), x.dtype)
    outputs = jax.eval_shape(convolve, weights)
    (sums,) = jax.linear_transpose(convolve, weights)(jnp.ones(outputs.shape, outputs.dtype))
    ordered: jax.Array = sums.transpose(spec).reshape(
        use.groups, math.prod(shape) // shape[spec[0]]
    )
    return ordered


def _patches(use: Use, x: jax.Array) -> jax.Array:
    """Returns the patches of a convolution, [groups, patches, inputs]."""
    params, kernel = use.equation.params, use.equation.inputs[1]
    spec = params["dimension_numbers"]
    patches = lax.conv_general_dilated_patches(
        x,
        [kernel.shape[i] for i in spec.rhs_spec[2:]],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        dimension_numbers=spec,
        precision=_HIGHEST,
    )
    rows = jnp.moveaxis(patches, spec.out_spec[1], -1)
    inputs = math.prod(kernel.shape[i] for i in spec.rhs_spec[1:])
    rows = rows.reshape(_num_rows(use, x), use.groups, inputs)
    return jnp.moveaxis(rows, 1, 0)


def _convolved(use: Use, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Convolves with weights [groups, outputs, inputs]."""
    spec = use.equation.params["dimension_numbers"].rhs_spec
    kernel = [use.equation.inputs[1].shape[i] for i in spec[1:]]
    ordered = weights.reshape(weights.shape[0] * weights.shape[1], *kernel)
    return _convolve(use, x, jnp.moveaxis(ordered, range(ordered.ndim), spec))


def _convolve(use: Use, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves as a use does with another kernel, in the dtype of both."""
    changed = {"preferred_element_type": None, "precision": (_HIGHEST, _HIGHEST)}
    return jnp.asarray(use.equation.bind([x, kernel], **changed)[0])
