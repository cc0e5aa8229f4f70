"""Masks of one tensor: made from scores, updated by drop and grow, packed to bits, applied.

A mask is a uint8 array of the tensor's shape, 1 where the weight is kept. A packed mask holds one
bit a weight: `packbits` along the last axis, each row padded to whole bytes, so that leading axes
and their sharding stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity import selection
from sparsity.core import exact as exact_counts
from sparsity.core.sharding import shard_like
from sparsity.patterns.types import (
    Block,
    Channel,
    NByM,
    SparsityType,
    Unstructured,
    check_fraction,
)
from sparsity.selection.counting import sums

TopkFn = Callable[[chex.Array, chex.Numeric], chex.Array]


def create_mask(
    scores: chex.Array,
    sparsity: chex.Numeric,
    sparsity_type: SparsityType,
    *,
    target: chex.Numeric | None = None,
    batch_axes: int = 0,
    topk_fn: TopkFn | None = None,
) -> jax.Array:
    """Keeps the highest scores; ties go to the lowest index, NaN scores lowest.

    Of the n entries, blocks or channels of every slice exactly
    `max(1, round_half_even(n * (1 - sparsity)))` are kept.

    Args:
      scores: [*batch, ...] array of any real dtype.
      sparsity: scalar in [0, 1], Python or traced.
      sparsity_type: what is kept or removed together.
      target: for N:M, the sparsity at which n of m are reached: a lower `sparsity` keeps more of
        each group, in proportion. `None` means `sparsity` itself.
      batch_axes: number of leading axes that index separate slices.
      topk_fn: `topk_fn(scores, sparsity) -> mask` replaces the selection; it gets one slice's
        entries, blocks or channels.

    Returns:
      uint8 mask of the shape of `scores`.
    """
    check_fraction("sparsity", sparsity)

    def create(scores: jax.Array, sparsity: chex.Numeric, target: chex.Numeric) -> jax.Array:
        if isinstance(sparsity_type, NByM):
            n = _kept_of_group(sparsity_type, sparsity, target)
            axis = _axis(sparsity_type.axis, batch_axes)
            return selection.nm_mask(scores, n, sparsity_type.m, axis=axis)
        units = _pool(scores, sparsity_type, batch_axes)
        if topk_fn is None:
            kept = selection.num_kept(math.prod(units.shape[batch_axes:]), sparsity)
            mask = selection.topk_mask(units, kept, batch_axes=batch_axes)
        else:
            select = topk_fn
            for _ in range(batch_axes):
                select = jax.vmap(select, in_axes=(0, None))
            mask = jnp.asarray(select(units, sparsity)).astype(jnp.uint8)
        return _expand(mask, sparsity_type, scores.shape, batch_axes)

    return shard_like(scores, create, scores, sparsity, sparsity if target is None else target)


def drop_and_grow(
    mask: chex.Array,
    drop_scores: chex.Array,
    grow_scores: chex.Array,
    drop_fraction: chex.Numeric,
    sparsity_type: SparsityType,
    *,
    batch_axes: int = 0,
) -> jax.Array:
    """Replaces a fraction of the active entries (blocks, channels); their number does not change.

    Of the n active entries (blocks, channels) of every slice the
    `max(1, round_half_even(n * (1 - drop_fraction)))` with the highest drop scores are kept, and as
    many as were dropped grow: those with the highest grow scores among all that were not kept, so
    that a dropped weight may come back. For N:M each group grows as many as it lost.

    Args:
      mask: [*batch, ...] uint8 array, the present mask.
      drop_scores: same shape; the lowest of active weights are dropped.
      grow_scores: same shape.
      drop_fraction: scalar in [0, 1].
      sparsity_type: as in `create_mask`.
      batch_axes: as in `create_mask`.

    Returns:
      uint8 mask of the same shape.
    """
    check_fraction("drop_fraction", drop_fraction)

    def move(
        mask: jax.Array, drop: jax.Array, grow: jax.Array, fraction: chex.Numeric
    ) -> jax.Array:
        if isinstance(sparsity_type, NByM):
            kept, _ = _keep_active(mask, drop, fraction, batch_axes)
            axis = _axis(sparsity_type.axis, batch_axes)
            grown = selection.nm_mask(grow, sparsity_type.n, sparsity_type.m, axis=axis, keep=kept)
            # A leaf with target 0 is dense and has no groups.
            return jnp.where(jnp.all(mask > 0), mask, grown)
        # A unit is all ones or all zeros.
        active, drop, grow = (_pool(x, sparsity_type, batch_axes) for x in (mask, drop, grow))
        kept, lost = _keep_active(active, drop, fraction, batch_axes)
        grown = selection.topk_mask(grow, lost, where=1 - kept, batch_axes=batch_axes)
        return _expand(kept | grown, sparsity_type, mask.shape, batch_axes)

    return shard_like(mask, move, mask, drop_scores, grow_scores, drop_fraction)


def check_type(
    sparsity_type: SparsityType, shape: tuple[int, ...], batch_axes: int, name: str
) -> None:
    """Raises a ValueError that names the parameter when the type does not fit its shape."""
    if isinstance(sparsity_type, Unstructured):
        return
    ndim = len(shape) - batch_axes
    of_what = f"parameter {name!r} of shape {shape}" + (
        f" (of which {batch_axes} leading are batch axes)" if batch_axes else ""
    )
    if isinstance(sparsity_type, Block):
        if ndim < 1:
            raise ValueError(
                f"{sparsity_type} needs at least one axis; {of_what} has none. {_REMEDY}"
            )
        return
    if not isinstance(sparsity_type, NByM | Channel):
        raise ValueError(
            f"sparsity_type must be Unstructured, NByM, Block or Channel, got {sparsity_type!r} "
            f"for {of_what}."
        )
    axis = sparsity_type.axis
    if not -ndim <= axis < ndim:
        raise ValueError(f"{sparsity_type}: {of_what} has no axis {axis}. {_REMEDY}")
    size = shape[_axis(axis, batch_axes)]
    if isinstance(sparsity_type, NByM) and size % sparsity_type.m:
        raise ValueError(
            f"{sparsity_type}: axis {axis} of {of_what} has {size} entries, which m = "
            f"{sparsity_type.m} does not divide. {_REMEDY}"
        )


_REMEDY = (
    "Give another axis, make sparsity_type a function of (path, param), or keep this parameter "
    "dense with filter_fn or custom_sparsity_map={path: None}."
)


def pack(mask: chex.Array, like: chex.Array) -> jax.Array:
    """Packs a mask to bits: uint8[*shape[:-1], ceil(shape[-1] / 8)]; packed ones pass.

    Args:
      mask: a mask of the shape of `like`, or a packed one, also by `jnp.packbits(mask)`.
      like: the parameter; the leading axes of the packed mask are sharded as its are, the last one
        if its bytes divide.

    Example:
      >>> pack(jnp.array([[1, 0, 0, 0, 0, 0, 0, 0, 1]], jnp.uint8), jnp.zeros((1, 9)))
      Array([[128, 128]], dtype=uint8)
    """
    shape = jnp.shape(like)
    if 0 in shape:
        return jnp.zeros(packed_shape(shape), jnp.uint8)
    if mask.shape != shape and mask.shape == packed_shape(shape):
        return mask
    mask = unpack(mask, like)

    def to_bits(mask: jax.Array) -> jax.Array:
        return jnp.packbits(mask.astype(bool).reshape(shape or (1,)), axis=-1)

    return shard_like(like, to_bits, mask, shape=packed_shape(shape))


def unpack(mask: chex.Array, like: chex.Array) -> jax.Array:
    """Returns a mask, packed or not, as uint8 in the shape and sharding of the parameter `like`."""
    shape = jnp.shape(like)
    if 0 in shape:
        return jnp.zeros(shape, jnp.uint8)

    def to_bytes(mask: jax.Array) -> jax.Array:
        if mask.shape == shape:
            # A row of one weight is one byte, packed or not; hooks may return bool masks.
            is_clear = mask.dtype == jnp.uint8 and shape[-1:] != (1,)
            return mask if is_clear else (mask != 0).astype(jnp.uint8)
        if mask.shape == packed_shape(shape):
            return jnp.unpackbits(mask, axis=-1, count=(shape or (1,))[-1]).reshape(shape)
        return jnp.unpackbits(mask, count=math.prod(shape)).reshape(shape)

    return shard_like(like, to_bytes, mask)


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the packed mask of a tensor of `shape`."""
    return (*shape[:-1], -(-shape[-1] // 8)) if shape else (1,)


def mask_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes that a mask of a tensor of `shape` may have: plain, packed, packed as one row."""
    return [shape, packed_shape(shape), (-(-math.prod(shape) // 8),)]


def apply_mask(param: chex.Array, mask: chex.Array | None) -> chex.Array:
    """Selects: kept entries as they are, all others exactly 0.0, were they NaN, inf or -0.0.

    Args:
      param: array of any shape and dtype.
      mask: its mask, packed or not, or `None` for a dense parameter.
    """
    if mask is None:
        return param
    return jnp.where(unpack(mask, param) > 0, param, jnp.zeros((), param.dtype))


@jax.custom_jvp
def apply_mask_straight_through(param: chex.Array, mask: chex.Array | None) -> chex.Array:
    """`apply_mask` whose gradient with respect to `param` is the identity."""
    return apply_mask(param, mask)


@apply_mask_straight_through.defjvp
def _straight_through_jvp(primals, tangents):  # type: ignore[no-untyped-def]
    return apply_mask_straight_through(*primals), tangents[0]


def _keep_active(
    active: chex.Array, scores: chex.Array, drop_fraction: chex.Numeric, batch_axes: int
) -> tuple[jax.Array, jax.Array]:
    """Mask of those that stay active, and how many of each slice do not."""
    n = _count(active, batch_axes)
    k = jnp.asarray(selection.num_kept(n, drop_fraction))
    return selection.topk_mask(scores, k, where=active, batch_axes=batch_axes), n - k


def _count(active: chex.Array, batch_axes: int) -> jax.Array:
    """How many of each slice are not zero, int32[*batch]."""
    axes = range(batch_axes, active.ndim)
    # The barrier keeps the second operand, and with it the fused loop.
    return jax.lax.optimization_barrier(sums([active > 0, active <= 0], axes))[0]


def _kept_of_group(kind: NByM, sparsity: chex.Numeric, target: chex.Numeric) -> int | jax.Array:
    """max(n, ceil(m * (1 - sparsity / target * (1 - n / m)))), exactly n at the target."""
    sparsity, target = jnp.float32(sparsity), jnp.float32(target)
    reached = jnp.where(target > 0, sparsity / jnp.where(target > 0, target, 1), 0)
    removed = jnp.floor(reached * (kind.m - kind.n)).astype(jnp.int32)
    return jnp.maximum(kind.n, kind.m - removed)


def _axis(axis: int, batch_axes: int) -> int:
    return axis if axis < 0 else axis + batch_axes


def _pool(scores: chex.Array, sparsity_type: SparsityType, batch_axes: int) -> chex.Array:
    """Scores of the units: [*batch, ...entries], [*batch, ..., rows, columns] or [*batch, channel].

    Pooled scores are float32, or float64 where the scores are.
    """
    if isinstance(sparsity_type, Unstructured | NByM):
        return scores
    scores = scores.astype(jnp.float64 if scores.dtype == jnp.float64 else jnp.float32)
    if isinstance(sparsity_type, Channel):
        axis = _axis(sparsity_type.axis, batch_axes) % scores.ndim
        others = tuple(i for i in range(batch_axes, scores.ndim) if i != axis)
        return exact_counts.ordered_sum(scores, others)
    block, grid, sizes = _block_grid(sparsity_type, scores.shape, batch_axes)
    if not sparsity_type.use_avg_pooling:
        return _reduce_blocks(scores, block, grid, sizes, jnp.max, -jnp.inf)
    total = _reduce_blocks(scores, block, grid, sizes, exact_counts.ordered_sum, 0.0)
    entries = [
        np.minimum(step, size - step * np.arange(count))
        for step, size, count in zip(block, sizes, grid[-2:], strict=True)
    ]
    return total / jnp.broadcast_to(jnp.asarray(np.outer(*entries), total.dtype), total.shape)


def _block_grid(
    kind: Block, shape: tuple[int, ...], batch_axes: int
) -> tuple[tuple[int, int], tuple[int, ...], tuple[int, int]]:
    """Block shape cut to the array, [..., rows, columns] of blocks, and the last two axes."""
    height, width = (1, *shape[batch_axes:])[-2:]
    lead = shape[: max(len(shape) - 2, batch_axes)]
    rows, columns = (
        max(1, min(b, s)) for b, s in zip(kind.block_shape, (height, width), strict=True)
    )
    return (rows, columns), (*lead, -(-height // rows), -(-width // columns)), (height, width)


def _reduce_blocks(
    scores: chex.Array,
    block: tuple[int, int],
    grid: tuple[int, ...],
    sizes: tuple[int, int],
    reduce: Callable[..., jax.Array],
    fill: float,
) -> jax.Array:
    *lead, rows, columns = grid
    scores = scores.reshape(*lead, *sizes)
    spare = (rows * block[0] - sizes[0], columns * block[1] - sizes[1])
    if any(spare):
        widths = [(0, 0)] * len(lead) + [(0, spare[0]), (0, spare[1])]
        scores = jnp.pad(scores, widths, constant_values=fill)
    split = scores.reshape(*lead, rows, block[0], columns, block[1])
    return reduce(split, (-3, -1))


def _expand(
    units: jax.Array, sparsity_type: SparsityType, shape: tuple[int, ...], batch_axes: int
) -> jax.Array:
    """Spreads the mask of the units over the entries."""
    if isinstance(sparsity_type, Unstructured | NByM):
        return units
    if isinstance(sparsity_type, Channel):
        axis = _axis(sparsity_type.axis, batch_axes) % len(shape)
        others = tuple(i for i in range(batch_axes, len(shape)) if i != axis)
        return jnp.broadcast_to(jnp.expand_dims(units, others), shape)
    block, grid, sizes = _block_grid(sparsity_type, shape, batch_axes)
    *lead, rows, columns = grid
    wide = jnp.broadcast_to(
        units[..., :, None, :, None], (*lead, rows, block[0], columns, block[1])
    ).reshape(*lead, rows * block[0], columns * block[1])
    return wide[..., : sizes[0], : sizes[1]].reshape(shape)
