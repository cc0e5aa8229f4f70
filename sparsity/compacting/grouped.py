"""The format 'grouped': neighbouring outputs that keep the same inputs, and their products."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec, reshard

from sparsity.compacting import grouped_products
from sparsity.compacting.formats import FormatLayout, KeptArray, KeptProduct, MaskedParameter
from sparsity.core.sharding import explicit_sharding
from sparsity.core.trees import AnyArray
from sparsity.masks import Site
from sparsity.masks.slice_layout import SliceLayout
from sparsity.patterns import FanIn
from sparsity.patterns.base import absolute_axis
from sparsity.programs.products import Product, read_product
from sparsity.programs.program import Equation

# At 90 % with gradients, groups of 1 are 1.1 to 1.7 times as fast as dense, groups of 4 2.0 to 4.5.
_LEAST_GROUP = 4
_MOST_PADDING = 1.25  # ratio of stored entries that are not kept to kept entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped(FormatLayout):
    """Kept values [*stack, groups, k, group] of slices [*inputs, *outputs].

    Each group of neighbouring outputs reads the k inputs at the positions [*stack, groups, k].

    Attributes:
      inputs: axes of the parameter that products sum over.
    """

    format = "grouped"
    refusal = (
        "its outputs keep different numbers of inputs, its products sum over different axes, or "
        "outside = 'frozen'. Use 'values', or masks of FanIn."
    )
    multiplies = True

    inputs: tuple[int, ...]

    @classmethod
    def make(cls, parameter: MaskedParameter) -> tuple[Self, np.ndarray] | None:
        return cls.make_groups(parameter) or cls.make_groups(parameter, is_single=True)

    @classmethod
    def make_groups(
        cls, parameter: MaskedParameter, is_single: bool = False
    ) -> tuple[Self, np.ndarray] | None:
        """Returns the layout and the inputs that each group reads; see `find_groups`."""
        mask, stack, inputs = parameter.mask, parameter.stack, parameter.inputs
        if parameter.is_frozen or not inputs:
            return None
        by_output = _to_matrices(mask, stack, inputs).swapaxes(-1, -2)
        groups = find_groups(by_output, is_single=is_single)
        if groups is None:
            return None
        group, positions = groups
        shape = (*positions.shape[len(stack) :], group)
        padding = positions.size * group - int(np.count_nonzero(mask))
        layout = cls(mask.shape, stack, slice_kept_shape=shape, padding=padding, inputs=inputs)
        return layout, positions

    @property
    def order(self) -> tuple[int, ...]:
        """The axes of the parameter: those that index slices, inputs, and outputs."""
        return SliceLayout(self.shape, (*self.stack, *self.inputs)).order

    @property
    def positions_shape(self) -> tuple[int, ...]:
        return self.kept_shape[:-1]

    @property
    def group(self) -> int:
        """Number of outputs of a group."""
        return self.slice_kept_shape[-1]

    @property
    def num_inputs(self) -> int:
        """Number of inputs."""
        return math.prod(self.shape[axis] for axis in self.inputs)

    def take(self, array: AnyArray, positions: AnyArray) -> jax.Array:
        groups, _, group = self.slice_kept_shape
        matrices = jnp.asarray(_to_matrices(array, self.stack, self.inputs))
        *batch, inputs, outputs = matrices.shape
        missing = [(0, 0)] * (len(batch) + 1) + [(0, groups * group - outputs)]
        rows = jnp.pad(matrices, missing).reshape(*batch, inputs, groups, group).swapaxes(-3, -2)
        at = jnp.expand_dims(positions, -1).astype(jnp.int32)
        return jnp.take_along_axis(rows, at, -2, mode="fill", fill_value=0)

    def densify_slice(self, kept: KeptArray, token: jax.Array | int) -> jax.Array:
        outputs = math.prod(self.slice_shape[len(self.inputs) :])
        positions = kept.positions + token
        matrix = grouped_products.scatter_groups(kept.values, positions, self.num_inputs, outputs)
        return matrix.reshape(-1)

    def multiply(self, product: KeptProduct) -> jax.Array | None:
        equation, at, kept, other = product
        roles, num_inputs = read_product(equation), len(self.inputs)
        if kept.frozen is not None:
            return None
        if roles.kind == "convolution" and at == 1 and _is_pointwise(equation, roles):
            other = _stride(equation, other)
        elif roles.kind != "dot" or equation.params.get("out_sharding") is not None:
            return None
        contraction = _read_contraction(roles, at, kept)
        if not _sums_all_inputs(contraction, kept, num_inputs):
            return None
        return _contract(equation, contraction, kept, num_inputs, other)

    def mark_units(self, mask: jax.Array) -> jax.Array:
        matrices = _to_matrices(mask, self.stack, self.inputs)
        # All outputs of a group read the same inputs: the first one tells.
        units = matrices[..., :: self.group].swapaxes(-1, -2)
        return units.reshape(math.prod(self.positions_shape[:-1]), self.num_inputs)

    def locate(self, mask: jax.Array) -> jax.Array:
        # Padding is the number of inputs, which 16 bits hold.
        return jnp.minimum(super().locate(mask), self.num_inputs)

    def fits(self, site: Site) -> bool:
        pattern = site.pattern
        is_full = self.num_kept == math.prod(self.shape)
        if is_full or not isinstance(pattern, FanIn):
            return is_full
        axes = {absolute_axis(x, site.batch_axes, len(self.shape)) for x in pattern.input_axes}
        largest = min(pattern.group, math.prod(self.slice_shape[len(self.inputs) :]))
        return axes == {*self.inputs} and largest % self.group == 0

    @property
    def divisible_axes(self) -> tuple[int, ...]:
        # Values are [*stack, groups, k, group]. Devices that share the first axis of the outputs
        # share the groups, which are neighbouring outputs, if each device gets equally many.
        return (len(self.inputs),)


def _to_matrices(array: AnyArray, stack: tuple[int, ...], inputs: tuple[int, ...]) -> AnyArray:
    """Returns an array of the shape of a parameter as [*stack, inputs, outputs]."""
    rows = SliceLayout(array.shape, (*stack, *inputs)).slices(array)
    sizes, depth = rows.shape, len(stack)
    return rows.reshape(*sizes[:depth], math.prod(sizes[depth:-1]), sizes[-1])


class Contraction(NamedTuple):
    """A product as a dot of the kept values with the other operand.

    Axes of the parameter are those of `KeptArray.sizes`.

    Attributes:
      summed: {axis of the parameter: axis of the other operand} that are summed over.
      stacked: the same for axes that index separate products.
      free: axes of the other operand that become axes of the result.
      result: for each axis of the result (whether the parameter has the axis, the axis there).
    """

    summed: dict[int, int]
    stacked: dict[int, int]
    free: tuple[int, ...]
    result: tuple[tuple[bool, int], ...]


def _read_contraction(product: Product, at: int, kept: KeptArray) -> Contraction:
    """Returns a dot, or a convolution that multiplies each place by one matrix."""
    roles, other = product.operands[at], product.operands[1 - at]
    space = [axis for index, axis in product.ordered if index == 2]  # of the result
    places = {place: (True, kept.axes[axis]) for place, axis in product.map_result_axes(at).items()}
    places |= {place: (False, axis) for place, axis in zip(space, other.window, strict=True)}
    return Contraction(
        {kept.axes[i]: j for i, j in zip(roles.inputs, other.inputs, strict=True)},
        {kept.axes[i]: j for i, j in zip(roles.batch, other.batch, strict=True)},
        (*other.free, *other.window),
        tuple(places.get(i, (False, x[1] if x else 0)) for i, x in enumerate(product.output)),
    )


def _is_pointwise(equation: Equation, product: Product) -> bool:
    """Returns whether a convolution multiplies each place by one matrix."""
    params, kernel = equation.params, equation.inputs[1]
    return (
        all(kernel.shape[axis] == 1 for axis in product.rhs.window)
        and all(pad == (0, 0) for pad in params["padding"])
        and all(step == 1 for step in params["lhs_dilation"])
        and product.groups == 1
        and product.refusal is None
    )


def _stride(equation: Equation, image: jax.Array) -> jax.Array:
    # A pointwise convolution reads every stride-th place of the image.
    steps = [1] * image.ndim
    space = equation.params["dimension_numbers"].lhs_spec[2:]
    for axis, step in zip(space, equation.params["window_strides"], strict=True):
        steps[axis] = step
    return lax.slice(image, [0] * image.ndim, image.shape, steps)


def _sums_all_inputs(contraction: Contraction, kept: KeptArray, num_inputs: int) -> bool:
    """Returns whether a product sums over all inputs of the groups, and over nothing else."""
    summed, inputs = {*contraction.summed}, {*range(kept.depth, kept.depth + num_inputs)}
    sums_inputs = summed <= inputs and all(kept.sizes[i] == 1 for i in inputs - summed)
    return sums_inputs and {*contraction.stacked} == {*range(kept.depth)}


def _contract(
    equation: Equation, contraction: Contraction, kept: KeptArray, num_inputs: int, other: jax.Array
) -> jax.Array:
    """Brings the other operand to [*stack, *rows, inputs], and the result to its own axes."""
    summed, stacked, free, result = contraction
    stack_axes, inputs_axes = ([axes[i] for i in sorted(axes)] for axes in (stacked, summed))
    x = other.transpose([*stack_axes, *free, *inputs_axes])
    rows = x.shape[: kept.depth + len(free)]
    if placed := explicit_sharding(jax.typeof(x)):  # sharded inputs cannot be joined to one axis
        x = reshard(x, placed.update(spec=PartitionSpec(*placed.spec[: len(rows)])))
    end = kept.depth + num_inputs
    inputs, outputs = kept.sizes[kept.depth : end], kept.sizes[end:]
    y = grouped_products.multiply_stack(
        kept.values,
        kept.positions,
        x.reshape(*rows, math.prod(inputs)),
        math.prod(outputs),
        equation.params["precision"],
        equation.params["preferred_element_type"],
    ).reshape(*rows, *outputs)
    # Axes of y: the stack, the free axes of the other operand, the outputs of the parameter.
    places = {(True, i): i for i in range(kept.depth)}
    places |= {(False, axis): kept.depth + i for i, axis in enumerate(free)}
    shift = len(free) - num_inputs
    places |= {(True, i): i + shift for i in range(end, len(kept.sizes))}
    y = y.transpose([places[source] for source in result])
    placed = explicit_sharding(equation.outputs[0])
    return reshard(y, placed) if placed else y


def find_groups(mask: np.ndarray, *, is_single: bool = False) -> tuple[int, np.ndarray] | None:
    """Finds the largest groups of neighbouring outputs that keep the same inputs.

    Outputs g * group to g * group + group - 1 are group g; the last one may be ragged. The size is
    read from the entries of the mask, not from the name of a pattern.

    Args:
      mask: bool or uint8 [*stack, outputs, inputs], 1 = kept. All matrices of a stack get the same
        group and k.
      is_single: make each output a group; by default groups have at least 4 outputs.

    Returns:
      The size, and positions [*stack, groups, k]: sorted, uint16 where `inputs` fits, and `inputs`
      where a group keeps fewer than k. `None` for smaller groups, or too much padding.

    Example:
      >>> find_groups(np.repeat([[1, 0, 1], [0, 1, 0]], 4, axis=0))
      (4, array([[0, 2], [1, 3]], dtype=uint16))
    """
    mask = np.asarray(mask).astype(bool, copy=False)
    differs = (mask[..., 1:, :] != mask[..., :-1, :]).any(axis=(*range(mask.ndim - 2), -1))
    # A group ends wherever neighbours differ, so that the size divides all these positions.
    common = int(np.gcd.reduce(1 + np.flatnonzero(differs)))
    group = 1 if is_single else common or max(mask.shape[-2], 1)
    if group < _LEAST_GROUP and not is_single:
        return None
    positions, num_kept = list_kept(mask[..., ::group, :]), np.count_nonzero(mask)
    is_padded = positions.size * group - num_kept > _MOST_PADDING * num_kept
    return None if is_padded else (group, positions)


def list_kept(rows: np.ndarray) -> np.ndarray:
    """Returns the kept inputs of bool[..., inputs], padded: [..., k]."""
    inputs = rows.shape[-1]
    positions = SliceLayout(rows.shape, tuple(range(rows.ndim - 1))).list_positions(rows)
    dtype = np.uint16 if inputs <= np.iinfo(np.uint16).max else np.int32
    return np.minimum(positions, inputs).astype(dtype)
