"""Constant fan-in: groups of neighbouring outputs that read the same inputs, equally many."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import check_int
from sparsity.patterns.base import (
    REMEDY,
    SparsityType,
    absolute_axis,
    describe_parameter,
    prepare_sums,
)
from sparsity.patterns.nm import check_axis
from sparsity.selection.kept_counts import count_kept_int


@dataclasses.dataclass(frozen=True)
class FanIn(SparsityType):
    """Keeps equally many inputs of every output; each `group` neighbouring outputs share them.

    A unit is one input of one group of outputs: `group` entries, scored by the sum of their scores.
    Of n inputs each group keeps `sparsity.selection.num_kept(n, sparsity)`, and moves on its own:
    SET and RigL replace a fraction of the inputs of each group.

    Attributes:
      group: outputs that read the same inputs. 1 is the constant fan-in of SRigL; 16 or 64 suit
        hardware that multiplies dense tiles. The last group may be smaller.
      axis: the contracted axis of a slice, or a tuple of them, such as (0, 1, 2) for the window and
        the input channels of a flax convolution. All other axes are outputs, counted with the last
        axis fastest.

    Source: Lasby et al. 2024, "Dynamic Sparse Training with Structured Sparsity", for the constant
    fan-in; the groups are an extension.

    Example:
      >>> scores = jnp.array([[1.0, 5.0, 1.0], [2.0, 0.0, 3.0], [3.0, 0.0, 2.0]])
      >>> FanIn(group=2).select(scores, 2 / 3)
      Array([[1, 1, 0],
             [0, 0, 1],
             [0, 0, 0]], dtype=uint8)
    """

    group_axes: ClassVar[int] = 1

    group: int = 1
    axis: int | tuple[int, ...] = -2

    def __post_init__(self) -> None:
        check_int("FanIn.group", self.group, 1)
        axes = self.axis if isinstance(self.axis, tuple | list) else (self.axis,)
        for axis in axes:
            check_int("FanIn.axis", axis)
        if len({*axes}) < max(len(axes), 1):
            raise ValueError(
                f"FanIn.axis must be different axes, at least one, got FanIn.axis = {self.axis}."
            )
        object.__setattr__(self, "group", int(self.group))
        object.__setattr__(self, "axis", axes[0] if len(axes) == 1 else tuple(sorted(axes)))

    @property
    def axes(self) -> tuple[int, ...]:
        """The contracted axes of a slice."""
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    def check(self, shape: tuple[int, ...], batch_axes: int = 0, name: str = "params") -> None:
        for axis in self.axes:
            check_axis(self, axis, shape, batch_axes, name)
        axes = {absolute_axis(axis, batch_axes, len(shape)) for axis in self.axes}
        if len(axes) < len(self.axes):
            parameter = describe_parameter(shape, batch_axes, name)
            raise ValueError(f"{self}: two of the axes are one axis of {parameter}. {REMEDY}")

    def renumber_axes(self, fn: Callable[[int], int]) -> Self:
        return dataclasses.replace(self, axis=tuple(map(fn, self.axes)))

    def pool(self, scores: jax.Array, batch_axes: int = 0) -> jax.Array:
        """Returns the scores of the units, [*batch, groups, *inputs]."""
        order, batch, outputs, inputs = self._split_axes(scores.shape, batch_axes)
        rows = scores.transpose(order).reshape(*batch, outputs, *inputs)
        group = self._limit_group_size(outputs)
        if group == 1:  # in the dtype of the scores: a cast could make ties
            return rows
        rows = prepare_sums(rows)
        if padding := -outputs % group:
            rows = jnp.pad(rows, [(0, padding * (i == batch_axes)) for i in range(rows.ndim)])
        groups = rows.reshape(*batch, -(-outputs // group), group, *inputs)
        return jnp.sum(groups, axis=batch_axes + 1)

    def expand(self, units: jax.Array, shape: tuple[int, ...], batch_axes: int = 0) -> jax.Array:
        order, _, outputs, _ = self._split_axes(shape, batch_axes)
        rows = jnp.repeat(units, self._limit_group_size(outputs), axis=batch_axes)
        rows = jax.lax.slice_in_dim(rows, 0, outputs, axis=batch_axes)
        return rows.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))

    def count_kept(self, shape: tuple[int, ...], sparsity: float, batch_axes: int = 0) -> int:
        _, _, outputs, inputs = self._split_axes(shape, batch_axes)
        return outputs * count_kept_int(math.prod(inputs), sparsity)

    def _limit_group_size(self, outputs: int) -> int:
        """Returns the outputs of a full group, not more than a slice has."""
        return max(1, min(self.group, outputs))

    def _split_axes(
        self, shape: tuple[int, ...], batch_axes: int
    ) -> tuple[list[int], tuple[int, ...], int, tuple[int, ...]]:
        """Returns the axes by role; the sizes of the batch, the outputs as one, and the inputs."""
        ndim = len(shape)
        inputs = sorted(absolute_axis(axis, batch_axes, ndim) for axis in self.axes)
        outputs = [axis for axis in range(batch_axes, ndim) if axis not in inputs]
        count = math.prod(shape[axis] for axis in outputs)
        order = [*range(batch_axes), *outputs, *inputs]
        return order, shape[:batch_axes], count, tuple(shape[axis] for axis in inputs)
