"""Blocks and channels: units of many entries, scored as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import exact
from sparsity.core.checks import check_bool, check_int, is_traced
from sparsity.patterns.base import REMEDY, SparsityType, absolute_axis, of_what, pooled_dtype
from sparsity.patterns.nm import check_axis


@dataclasses.dataclass(frozen=True)
class Block(SparsityType):
    """Rectangles of the last two axes are kept or removed as a whole; ragged edges included.

    A sparsity is a share of the blocks. Blocks at ragged edges are smaller and count as much as
    others, so that the share of entries may differ from it there.

    Attributes:
      block_shape: rows and columns of a block; a block that exceeds the array is cut at its edge.
      use_avg_pooling: a block's score is the mean of its entries' scores; otherwise their maximum.

    Source: Narang et al. 2017, "Block-Sparse Recurrent Neural Networks".
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
        object.__setattr__(self, "block_shape", tuple(shape))

    def check(self, shape: tuple[int, ...], batch_axes: int = 0, name: str = "params") -> None:
        if len(shape) - batch_axes < 1:
            what = of_what(shape, batch_axes, name)
            raise ValueError(f"{self} needs at least one axis; {what} has none. {REMEDY}")

    def pool(self, scores: jax.Array, batch_axes: int = 0) -> jax.Array:
        scores = scores.astype(pooled_dtype(scores))
        grid = _Grid.of(self.block_shape, scores.shape, batch_axes)
        if not self.use_avg_pooling:
            # Repeating the last row and column changes no maximum.
            return grid.reduce(scores, jnp.max, "edge")
        total = grid.reduce(scores, exact.ordered_sum, "constant")
        entries = np.outer(*grid.entries()).astype(total.dtype)
        entries = entries if is_traced(total) else jax.device_put(entries)
        return total / jnp.broadcast_to(entries, total.shape)

    def expand(self, units: jax.Array, shape: tuple[int, ...], batch_axes: int = 0) -> jax.Array:
        return _Grid.of(self.block_shape, shape, batch_axes).spread(units).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Channel(SparsityType):
    """All entries with the same index along `axis` are kept or removed together.

    Attributes:
      axis: the channel axis; a channel's score is the sum of its entries' scores.
    """

    axis: int = -1

    def __post_init__(self) -> None:
        check_int("Channel.axis", self.axis)

    def check(self, shape: tuple[int, ...], batch_axes: int = 0, name: str = "params") -> None:
        check_axis(self, self.axis, shape, batch_axes, name)

    def pool(self, scores: jax.Array, batch_axes: int = 0) -> jax.Array:
        scores = scores.astype(pooled_dtype(scores))
        total: jax.Array = exact.ordered_sum(scores, self._others(scores.ndim, batch_axes))
        return total

    def expand(self, units: jax.Array, shape: tuple[int, ...], batch_axes: int = 0) -> jax.Array:
        others = self._others(len(shape), batch_axes)
        return jnp.broadcast_to(jnp.expand_dims(units, others), shape)

    def _others(self, ndim: int, batch_axes: int) -> tuple[int, ...]:
        axis = absolute_axis(self.axis, batch_axes, ndim)
        return tuple(i for i in range(batch_axes, ndim) if i != axis)


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The blocks of an array."""

    block: tuple[int, int]  # rows and columns, cut to the array
    lead: tuple[int, ...]  # axes before the last two
    counts: tuple[int, int]  # rows and columns of blocks
    sizes: tuple[int, int]  # the last two axes

    @classmethod
    def of(cls, block_shape: tuple[int, int], shape: tuple[int, ...], batch_axes: int) -> _Grid:
        height, width = (1, *shape[batch_axes:])[-2:]
        rows, columns = (
            max(1, min(b, s)) for b, s in zip(block_shape, (height, width), strict=True)
        )
        counts = (-(-height // rows), -(-width // columns))
        lead = shape[: max(len(shape) - 2, batch_axes)]
        return cls((rows, columns), lead, counts, (height, width))

    def reduce(self, scores: jax.Array, reduce: Callable[..., jax.Array], mode: str) -> jax.Array:
        """[*lead, rows, columns] of blocks; ragged edges are filled up by `jnp.pad` in a mode."""
        scores = scores.reshape(*self.lead, *self.sizes)
        spare = [n * b - s for n, b, s in zip(self.counts, self.block, self.sizes, strict=True)]
        if any(spare):
            scores = jnp.pad(scores, [(0, 0)] * len(self.lead) + [(0, n) for n in spare], mode)
        (rows, columns), (height, width) = self.counts, self.block
        blocks = scores.reshape(*self.lead, rows, height, columns, width)
        return reduce(blocks, (blocks.ndim - 3, blocks.ndim - 1))

    def entries(self) -> list[np.ndarray]:
        """How many rows, and columns, of the array the blocks have."""
        return [
            np.minimum(step, size - step * np.arange(count))
            for step, size, count in zip(self.block, self.sizes, self.counts, strict=True)
        ]

    def spread(self, units: jax.Array) -> jax.Array:
        """Undoes `reduce`, every entry with the value of its block."""
        (rows, columns), (height, width) = self.counts, self.block
        wide = jnp.broadcast_to(
            units[..., :, None, :, None], (*self.lead, rows, height, columns, width)
        ).reshape(*self.lead, rows * height, columns * width)
        return wide[..., : self.sizes[0], : self.sizes[1]]
