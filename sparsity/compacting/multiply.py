"""Products that read kept values of groups, without any dense parameter."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax

from sparsity.compacting.grouped import grouped_product
from sparsity.compacting.kept import Grouped, Lazy, is_lazy
from sparsity.programs.products import read_product
from sparsity.programs.program import Equation


class Contraction(NamedTuple):
    """A product as a dot of the kept values with the other operand.

    Attributes:
      contracted: pairs (axis of the parameter, axis of the other operand) that are summed over.
      batch: pairs that index separate products.
      free: axes of the other operand that become axes of the result.
      result: for each axis of the result (whether the parameter has the axis, the axis there).
    """

    contracted: tuple[tuple[int, int], ...]
    batch: tuple[tuple[int, int], ...]
    free: tuple[int, ...]
    result: tuple[tuple[bool, int], ...]


def multiply(equation: Equation, inputs: Sequence[Lazy]) -> jax.Array | None:
    """Returns a product of kept values of groups, `None` for products that need a dense array."""
    at = 0 if isinstance(inputs[0], Grouped) else 1
    kept, other = inputs[at], inputs[1 - at] if len(inputs) == 2 else None
    if not isinstance(kept, Grouped) or other is None or is_lazy(other):
        return None
    if kept.base is not None or kept.observer is not None:
        return None
    assert isinstance(other, jax.Array)
    contraction = None
    if equation.name == "dot_general" and equation.params.get("out_sharding") is None:
        contraction = _read_dot(equation, at)
    elif equation.name == "conv_general_dilated" and at == 1 and _is_pointwise(equation):
        contraction = _read_pointwise(equation)
        other = _stride(equation, other)
    if contraction is None or not _fits(contraction, kept):
        return None
    return _contract(equation, contraction, kept, other)


def _read_dot(equation: Equation, at: int) -> Contraction:
    product = read_product(equation)
    kept, other = product.operands[at], product.operands[1 - at]
    batch = tuple(zip(kept.batch, other.batch, strict=True))
    by_axis = {axis: number for number, axis in batch}
    pairs = [pair for pair in product.output if pair is not None]
    result = [(operand == at, axis) for operand, axis in pairs]
    return Contraction(
        tuple(zip(kept.contracted, other.contracted, strict=True)),
        batch,
        other.free,
        tuple(
            (True, by_axis[axis]) if not is_kept and axis in by_axis else (is_kept, axis)
            for is_kept, axis in result
        ),
    )


def _read_pointwise(equation: Equation) -> Contraction:
    spec = equation.params["dimension_numbers"]
    (batch, channels, *space), (out, inputs, *_) = spec.lhs_spec, spec.rhs_spec
    sources = {spec.out_spec[0]: (False, batch), spec.out_spec[1]: (True, out)}
    sources |= {i: (False, axis) for i, axis in zip(spec.out_spec[2:], space, strict=True)}
    result = tuple(sources[i] for i in range(len(sources)))
    return Contraction(((inputs, channels),), (), (batch, *space), result)


def _is_pointwise(equation: Equation) -> bool:
    """Returns whether a convolution multiplies each place by one matrix."""
    params, kernel = equation.params, equation.inputs[1]
    window = [kernel.shape[axis] for axis in params["dimension_numbers"].rhs_spec[2:]]
    return (
        all(size == 1 for size in window)
        and all(pad == (0, 0) for pad in params["padding"])
        and all(step == 1 for step in params["lhs_dilation"])
        and params["feature_group_count"] == params["batch_group_count"] == 1
    )


def _stride(equation: Equation, image: jax.Array) -> jax.Array:
    steps = [1] * image.ndim
    space = equation.params["dimension_numbers"].lhs_spec[2:]
    for axis, step in zip(space, equation.params["window_strides"], strict=True):
        steps[axis] = step
    return lax.slice(image, [0] * image.ndim, image.shape, steps)


def _fits(contraction: Contraction, kept: Grouped) -> bool:
    """Returns whether a product sums over all inputs of the groups, and over nothing else."""
    summed = {kept.axes[axis] for axis, _ in contraction.contracted}
    first, end = kept.stack, kept.stack + kept.inputs
    unsummed = [i for i in range(first, end) if i not in summed]
    batch = sorted(kept.axes[axis] for axis, _ in contraction.batch)
    sums_inputs = all(first <= i < end for i in summed) and all(
        kept.sizes[i] == 1 for i in unsummed
    )
    return sums_inputs and batch == list(range(kept.stack))


def _contract(
    equation: Equation, contraction: Contraction, kept: Grouped, other: jax.Array
) -> jax.Array:
    """Brings the other operand to [*stack, rows, inputs], and the result to its own axes."""
    stored = {kept.axes[axis]: axis_of_other for axis, axis_of_other in contraction.contracted}
    stacked = {kept.axes[axis]: axis_of_other for axis, axis_of_other in contraction.batch}
    order = (
        [stacked[i] for i in sorted(stacked)],
        contraction.free,
        [stored[i] for i in sorted(stored)],
    )
    x = other.transpose([axis for axes in order for axis in axes])
    stack = x.shape[: kept.stack]
    rows = x.shape[kept.stack : kept.stack + len(contraction.free)]
    end = kept.stack + kept.inputs
    outputs = kept.sizes[end:]
    count = math.prod(outputs)
    precision = equation.params["precision"]
    run = functools.partial(
        grouped_product,
        outputs=count,
        precision=precision,
        preferred_element_type=equation.params["preferred_element_type"],
    )
    for _ in range(kept.stack):
        run = jax.vmap(run)
    size = math.prod(rows)
    inputs = math.prod(kept.sizes[kept.stack : end])
    y = run(kept.read_values(), kept.indices, x.reshape(*stack, size, inputs))
    y = y.reshape(*stack, *rows, *outputs)
    # Axes of y: the stack, the free axes of the other operand, the outputs of the parameter.
    places = {(True, axis): kept.axes[axis] for axis, _ in contraction.batch}
    places |= {(False, axis): kept.stack + i for i, axis in enumerate(contraction.free)}
    shift = len(rows) - kept.inputs
    places |= {(True, axis): i + shift for axis, i in enumerate(kept.axes) if i >= end}
    return y.transpose([places[source] for source in contraction.result])
