"""Alignment of the inputs and slices of a product with the parameter that the product reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.statistics.statistic import Statistic
from sparsity.graph import Graph, Use
from sparsity.graph.affine import FunctionKey
from sparsity.graph.uses import Factor
from sparsity.programs.products import read_product

_GROUPS = -1  # stands for the groups of a convolution among the axes of a parameter


@dataclasses.dataclass(frozen=True, eq=False)
class Alignment:
    """Map from sums in the order of a product's operand to the order of its parameter.

    Sums belong to one layer of a stack, without the axes that scans take apart.

    Attributes:
      use: the product.
      axes: the roles of the layer's axes, a statistic without sums.
      shape: the shape of the layer; without scans, of the parameter.
      slices: int[slices of the operand], the slice of the parameter for each; a weight that is
        broadcast along a batch axis has several slices of the operand in one place.
      inputs: int[inputs], the places of the parameter's inputs among the inputs of the operand.
      copies: how often each output occurs.
    """

    use: Use
    axes: Statistic
    shape: tuple[int, ...]
    slices: np.ndarray
    inputs: np.ndarray
    copies: int

    @property
    def repeats(self) -> int:
        """Number of slices and outputs of the operand for each one of the parameter."""
        slices = math.prod(self.axes.read_batch_shape(self.shape))
        return self.copies * len(self.slices) // max(slices, 1)

    def to_parameter_order(self, sums: jax.Array, ndim: int) -> jax.Array:
        """Returns sums [*batch, ...] in the order of the parameter.

        Args:
          sums: sums of the operand, [*slices, inputs], or [*slices, inputs, inputs].
          ndim: the number of axes of inputs.
        """
        lead = self.axes.read_batch_shape(self.shape)
        input_shape = sums.shape[sums.ndim - ndim :]
        flat, slices = sums.reshape(len(self.slices), *input_shape), math.prod(lead)
        if len(self.slices) != slices:
            # A slice that is broadcast adds up the sums of its copies.
            flat = jnp.zeros((slices, *input_shape), flat.dtype).at[self.slices].add(flat)
        elif not _is_identity(self.slices):
            flat = flat[np.argsort(self.slices)]
        if not _is_identity(self.inputs):
            flat = flat[..., self.inputs]
            flat = flat[:, self.inputs] if ndim == 2 else flat
        flat = flat.reshape(*lead, *input_shape)
        return flat * self.copies if self.copies > 1 else flat

    def add_layers(self, sums: Statistic) -> Statistic:
        """Returns the statistic of all layers; its sums lead with the axes of the layers."""
        stacked = self.use.view.stacked
        axes = [axis for axis in range(len(self.shape) + len(stacked)) if axis not in stacked]
        return dataclasses.replace(
            sums,
            contracting=tuple(axes[axis] for axis in sums.contracting),
            output=tuple(axes[axis] for axis in sums.output),
            batch=(*stacked, *(axes[axis] for axis in sums.batch)),
        )

    def to_operand_order(self, matrices: jax.Array) -> jax.Array:
        """Returns matrices in the order of the operand, [slices, outputs, inputs]."""
        lead = math.prod(matrices.shape[:-2])
        flat = matrices.reshape(lead, *matrices.shape[-2:])
        flat = flat if _is_identity(self.slices) else flat[self.slices]
        return flat if _is_identity(self.inputs) else flat[..., np.argsort(self.inputs)]


def align(use: Use, graph: Graph) -> Alignment | None:
    """Returns the alignment of a use, or `None` if its inputs are no entries of the parameter."""
    stacked, shape = use.view.stacked, graph.parameters.find_shape(use.path)
    if not meets_data(use, graph) or not _reads_all_entries(use, shape):
        return None
    contracted, slices, outputs = _read_factors(use)
    group_axes, groups, outputs = _split_groups(use.groups, outputs, shape)
    slice_factors = [*slices, *group_axes, *([Factor(_GROUPS, groups)] if groups > 1 else [])]
    batch = [*use.batch, *(factor.axis for factor in group_axes if factor.axis is not None)]
    batch = [axis for axis in dict.fromkeys(batch) if axis not in stacked]
    output = sorted({*use.output} - {*batch})
    if groups > 1:  # these are parts of the first output axis
        output.sort(key=lambda axis: not outputs or axis != outputs[0].axis)
    output += [
        axis
        for axis, n in enumerate(shape)
        if n == 1 and axis not in (*use.contracting, *use.batch, *output)
    ]
    fits = (
        sorted((*use.contracting, *output, *batch, *stacked)) == [*range(len(shape))]
        and _covers(contracted, use.contracting, shape)
        and _covers(slice_factors, batch, shape)
        and (groups == 1 or _are_groups_first(outputs, groups, output, shape))
    )
    if not fits or any(factor.axis is None for factor in contracted):
        return None
    axes = [axis for axis in range(len(shape)) if axis not in stacked]
    sizes = {**dict(enumerate(shape)), _GROUPS: groups}
    return Alignment(
        use,
        axes=Statistic(
            count=0,
            contracting=tuple(map(axes.index, use.contracting)),
            output=tuple(map(axes.index, output)),
            batch=tuple(map(axes.index, batch)),
            groups=groups,
        ),
        shape=tuple(shape[axis] for axis in axes),
        slices=_compute_positions(slice_factors, [*batch, _GROUPS], sizes),
        inputs=np.argsort(_compute_positions(contracted, use.contracting, sizes)),
        copies=math.prod(factor.size for factor in outputs if factor.axis is None),
    )


def describe_function(use: Use, graph: Graph) -> FunctionKey | None:
    """Returns a key that uses by one affine function share; `None` for other functions."""
    return ("number",) if use.view.scale is not None else graph.affine.describe(use)


def meets_data(use: Use, graph: Graph) -> bool:
    """Returns whether a product multiplies data with an affine function of a parameter."""
    is_data = graph.tracker.is_data(use.equation.inputs[1 - use.operand])
    return is_data and describe_function(use, graph) is not None


def _reads_all_entries(use: Use, shape: tuple[int, ...]) -> bool:
    """Returns whether a use multiplies all entries of the parameter, or of a layer in each step."""
    view = use.view
    if use.kind not in ("dot", "convolution") or not use.contracting or use.trips is None:
        return False
    if view.has_other_entries or len(view.stacked) != len(view.scans):
        return False
    layers = zip(view.stacked, view.scans, strict=True)
    if any(shape[axis] != scan.length for axis, scan in layers):
        return False
    is_dot = use.kind == "dot"
    return is_dot or (use.operand == 1 and use.equation.params["batch_group_count"] == 1)


def _read_factors(use: Use) -> list[list[Factor]]:
    """Returns the factors of the operand's contracted, batch and free axes."""
    roles = read_product(use.equation).operands[use.operand]
    return [
        [factor for i in axes for factor in use.view.factors[i] if factor.size != 1]
        for axes in (roles.contracted, roles.batch, roles.free)
    ]


def _split_groups(
    groups: int, outputs: Sequence[Factor], shape: tuple[int, ...]
) -> tuple[list[Factor], int, list[Factor]]:
    """Splits the outputs of a convolution into factors that are entire groups, and others.

    If `vmap` maps over the kernels, the mapped axis comes first; a tiled axis has its copies there.

    Returns:
      (factors that are groups, number of groups within the next factor, other factors).
    """
    remaining: list[Factor] = [*outputs]
    group_factors: list[Factor] = []
    while groups > 1 and remaining and remaining[0].size:
        axis, size, _ = remaining[0]
        if axis is None and size % groups == 0:
            group_factors.append(Factor(None, groups))
            remaining[0] = Factor(None, size // groups)
            groups = 1
        elif groups % size == 0 and (axis is None or (size == shape[axis] and len(remaining) > 1)):
            group_factors.append(remaining.pop(0))
            groups //= size
        else:
            break
    return group_factors, groups, remaining


def _are_groups_first(
    outputs: Sequence[Factor], groups: int, output: Sequence[int], shape: tuple[int, ...]
) -> bool:
    """Returns whether groups are equal parts of the first output axis, one after the other."""
    if not outputs or not output:
        return False
    axis, size, step = outputs[0]
    return axis == output[0] and size * step == shape[output[0]] and size % groups == 0


def _covers(factors: Sequence[Factor], axes: Iterable[int], shape: tuple[int, ...]) -> bool:
    """Returns whether factors run over all entries of some axes."""
    return all(
        math.prod(factor.size for factor in factors if factor.axis == axis) == shape[axis]
        for axis in axes
    )


def _compute_positions(
    factors: Sequence[Factor], axes: Sequence[int], sizes: Mapping[int, int]
) -> np.ndarray:
    """Returns the row-major place in the axes of each combination of factors, in their order."""
    positions = np.zeros(1, int)
    for axis, size, step in factors:
        index = np.arange(size) if step > 0 else np.arange(size)[::-1]
        inner = 0 if axis is None else math.prod(sizes[x] for x in axes[axes.index(axis) + 1 :])
        positions = (positions[:, None] + index * abs(step) * inner).reshape(-1)
    return positions


def _is_identity(positions: np.ndarray) -> bool:
    return np.array_equal(positions, np.arange(len(positions)))
