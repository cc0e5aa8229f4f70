"""Blocks and channels: units of many entries, scored as one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import check_bool, check_int, is_traced
from sparsity.patterns import base
from sparsity.selection import num_kept


@dataclasses.dataclass(frozen=True)
class Block(base.SparsityType):
    """Keeps or removes rectangles of the last two axes, ragged edges included.

    A sparsity is a fraction of the blocks. A smaller block at a ragged edge counts as one, so that
    the fraction of entries may differ.

    Attributes:
      block_shape: rows and columns of a block; the edges of the array cut larger blocks.
      use_avg_pooling: score a block by the mean of its entries' scores, not by their maximum.

    Source: Narang et al. 2017, "Block-Sparse Recurrent Neural Networks".

    Example:
      >>> Block((1, 2)).select(jnp.array([[1.0, 2.0, 4.0, 0.0]]), 0.5)
      Array([[0, 0, 1, 1]], dtype=uint8)
    """

    block_shape: tuple[int, int]
    use_avg_pooling: bool = True

    def __post_init__(self) -> None:
        shape = self.block_shape
        if not isinstance(shape, tuple | list) or len(shape) != 2:
            raise ValueError(f"block_shape must be (rows, columns), got block_shape = {shape}.")
        for size in shape:
            check_int("Block.block_shape", size, 1)
        check_bool("Block.use_avg_pooling", self.use_avg_pooling)
        object.__setattr__(self, "block_shape", tuple(map(int, shape)))

    def check(self, shape: tuple[int, ...], batch_axes: int = 0, name: str = "params") -> None:
        if len(shape) - batch_axes < 1:
            parameter = base.describe_parameter(shape, batch_axes, name)
            raise ValueError(f"{self} needs at least one axis; {parameter} has none. {base.REMEDY}")

    def pool(self, scores: jax.Array, batch_axes: int = 0) -> jax.Array:
        leading, sizes, (height, width) = self._cut_to(scores.shape, batch_axes)
        scores = scores.reshape(*leading, *sizes)
        missing = [(0, -sizes[0] % height), (0, -sizes[1] % width)]
        # Repeated edge rows and columns change no maximum.
        mode = "constant" if self.use_avg_pooling else "edge"
        if missing != [(0, 0)] * 2:
            scores = jnp.pad(scores, [(0, 0)] * len(leading) + missing, mode)
        rows, columns = scores.shape[-2] // height, scores.shape[-1] // width
        blocks, axes = scores.reshape(*leading, rows, height, columns, width), (-3, -1)
        if not self.use_avg_pooling:
            return jnp.max(blocks, axes)
        total = base.sum_units(blocks, axes)
        heights = np.minimum(height, sizes[0] - height * np.arange(rows))
        widths = np.minimum(width, sizes[1] - width * np.arange(columns))
        counts = np.outer(heights, widths).astype(total.dtype)
        counts = counts if is_traced(total) else jax.device_put(counts)
        return total / jnp.broadcast_to(counts, total.shape)

    def expand(self, units: jax.Array, shape: tuple[int, ...], batch_axes: int = 0) -> jax.Array:
        _, sizes, (height, width) = self._cut_to(shape, batch_axes)
        entries = jnp.repeat(jnp.repeat(units, height, axis=-2), width, axis=-1)
        return entries[..., : sizes[0], : sizes[1]].reshape(shape)

    def count_kept(
        self, shape: tuple[int, ...], sparsity: float, batch_axes: int = 0
    ) -> int | None:
        _, sizes, block = self._cut_to(shape, batch_axes)
        if sizes[0] % block[0] or sizes[1] % block[1]:
            return None  # blocks at the edges are smaller
        size, entries = math.prod(shape[batch_axes:]), math.prod(block)
        return num_kept(size // entries, sparsity) * entries

    def _cut_to(
        self, shape: tuple[int, ...], batch_axes: int
    ) -> tuple[tuple[int, ...], tuple[int, int], tuple[int, int]]:
        """Returns the axes before the last two, the sizes of these, and a block cut to them."""
        height, width = (1, *shape[batch_axes:])[-2:]
        rows, columns = self.block_shape
        block = max(1, min(rows, height)), max(1, min(columns, width))
        return shape[: max(len(shape) - 2, batch_axes)], (height, width), block


@dataclasses.dataclass(frozen=True)
class Channel(base.SparsityType):
    """Keeps or removes together all entries with the same index along `axis`.

    The score of a channel is the sum of its entries' scores.

    Attributes:
      axis: the channel axis.

    Example:
      >>> Channel(axis=-1).select(jnp.array([[1.0, 2.0], [3.0, 0.0]]), 0.5)
      Array([[1, 0],
             [1, 0]], dtype=uint8)
    """

    axis: int = -1

    def __post_init__(self) -> None:
        check_int("Channel.axis", self.axis)

    def check(self, shape: tuple[int, ...], batch_axes: int = 0, name: str = "params") -> None:
        base.check_axis(self, self.axis, shape, batch_axes, name)

    def renumber_axes(self, fn: Callable[[int], int]) -> Self:
        return dataclasses.replace(self, axis=fn(self.axis))

    def pool(self, scores: jax.Array, batch_axes: int = 0) -> jax.Array:
        return base.sum_units(scores, self._list_other_axes(scores.ndim, batch_axes))

    def expand(self, units: jax.Array, shape: tuple[int, ...], batch_axes: int = 0) -> jax.Array:
        other_axes = self._list_other_axes(len(shape), batch_axes)
        return jnp.broadcast_to(jnp.expand_dims(units, other_axes), shape)

    def count_kept(self, shape: tuple[int, ...], sparsity: float, batch_axes: int = 0) -> int:
        channels = shape[base.absolute_axis(self.axis, batch_axes, len(shape))]
        size = math.prod(shape[batch_axes:])
        return num_kept(channels, sparsity) * (size // max(channels, 1))

    def _list_other_axes(self, ndim: int, batch_axes: int) -> tuple[int, ...]:
        axis = base.absolute_axis(self.axis, batch_axes, ndim)
        return tuple(i for i in range(batch_axes, ndim) if i != axis)


@dataclasses.dataclass(frozen=True)
class FanIn(base.SparsityType):
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
    def input_axes(self) -> tuple[int, ...]:
        return self.axis if isinstance(self.axis, tuple) else (self.axis,)

    def check(self, shape: tuple[int, ...], batch_axes: int = 0, name: str = "params") -> None:
        for axis in self.input_axes:
            base.check_axis(self, axis, shape, batch_axes, name)
        axes = {base.absolute_axis(axis, batch_axes, len(shape)) for axis in self.input_axes}
        if len(axes) < len(self.input_axes):
            parameter = base.describe_parameter(shape, batch_axes, name)
            raise ValueError(f"{self}: two of the axes are one axis of {parameter}. {base.REMEDY}")

    def renumber_axes(self, fn: Callable[[int], int]) -> Self:
        return dataclasses.replace(self, axis=tuple(map(fn, self.input_axes)))

    def pool(self, scores: jax.Array, batch_axes: int = 0) -> jax.Array:
        """Returns the scores of the units, [*batch, groups, *inputs]."""
        order, batch, outputs, inputs = self._split_axes(scores.shape, batch_axes)
        rows = scores.transpose(order).reshape(*batch, outputs, *inputs)
        group = self.outputs_per_group(outputs)
        if group == 1:  # in the dtype of the scores: a cast could make ties
            return rows
        if padding := -outputs % group:
            rows = jnp.pad(rows, [(0, padding * (i == batch_axes)) for i in range(rows.ndim)])
        groups = rows.reshape(*batch, -(-outputs // group), group, *inputs)
        return base.sum_units(groups, batch_axes + 1)

    def expand(self, units: jax.Array, shape: tuple[int, ...], batch_axes: int = 0) -> jax.Array:
        order, _, outputs, _ = self._split_axes(shape, batch_axes)
        rows = jnp.repeat(units, self.outputs_per_group(outputs), axis=batch_axes)
        rows = jax.lax.slice_in_dim(rows, 0, outputs, axis=batch_axes)
        return rows.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))

    def count_kept(self, shape: tuple[int, ...], sparsity: float, batch_axes: int = 0) -> int:
        _, _, outputs, inputs = self._split_axes(shape, batch_axes)
        return outputs * num_kept(math.prod(inputs), sparsity)

    def for_matrix(self) -> FanIn:
        return FanIn(self.group, axis=0)

    def outputs_per_group(self, outputs: int) -> int:
        return max(1, min(self.group, outputs))

    def _split_axes(
        self, shape: tuple[int, ...], batch_axes: int
    ) -> tuple[list[int], tuple[int, ...], int, tuple[int, ...]]:
        """Returns the axes by role; the sizes of the batch, the outputs as one, and the inputs."""
        ndim = len(shape)
        inputs = sorted(base.absolute_axis(axis, batch_axes, ndim) for axis in self.input_axes)
        outputs = [axis for axis in range(batch_axes, ndim) if axis not in inputs]
        count = math.prod(shape[axis] for axis in outputs)
        order = [*range(batch_axes), *outputs, *inputs]
        return order, shape[:batch_axes], count, tuple(shape[axis] for axis in inputs)
