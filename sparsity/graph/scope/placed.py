"""Groups of channels as they lie in a tree: their importance, and the masks of their members."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import is_traced
from sparsity.core.dtypes import promote
from sparsity.core.exact_sums import scale_for_sums, scale_to_one
from sparsity.core.trees import KeyPath
from sparsity.graph.channels.groups import ChannelGroup
from sparsity.graph.scope.widths import Width
from sparsity.selection import Candidates, topk_masks

Leaves: TypeAlias = Mapping[KeyPath, jax.Array]  # of one tree, by key path


class Member(NamedTuple):
    """Entries of a parameter that are removed with the channels of a group.

    Attributes:
      key_path: place of the parameter in the tree.
      axis: the axis of the channels.
      positions: where each channel lies along the axis, int[channels, n].
    """

    key_path: KeyPath
    axis: int
    positions: np.ndarray


@dataclasses.dataclass(frozen=True)
class PlacedGroup:
    """A group as it lies in a tree.

    Attributes:
      channels: the group.
      full: the same group before the model was cut.
      members: all entries that are removed with a channel.
      scored: the members that add to the importance of a channel.
      num_entries: for each scored member the number of entries of a channel of `full`, in a layer.
      sparsity: the sparsity of the group, the largest among its members.
      target: the same at the end of a ramp.
      widths: axes of weights of which the group is all or a factor.
      excluded: members that the user leaves out, which keep all channels.
    """

    channels: ChannelGroup
    full: ChannelGroup
    members: list[Member]
    scored: list[Member]
    num_entries: list[int]
    sparsity: chex.Numeric
    target: chex.Numeric
    widths: list[Width]
    excluded: list[KeyPath]


def sum_importance(
    groups: Sequence[PlacedGroup], leaves: Leaves, order: int, normalize: bool
) -> list[jax.Array]:
    """Returns the importance of each group: [channels], or [layers, channels].

    Args:
      groups: the groups.
      leaves: scores of their members, by key path.
      order: as in `Coupled`.
      normalize: as in `Coupled`.
    """
    scores = {x.key_path: leaves[x.key_path] for group in groups for x in group.scored}
    powers = [x.astype(promote(x.dtype, jnp.float32)) for x in scores.values()]
    if order == 2:
        powers = [jnp.square(x) for x in scale_to_one(powers)[0]]
    else:
        powers = scale_for_sums(powers, sum(x.size for x in powers))
    by_path = dict(zip(scores, powers, strict=True))
    return [_sum_members(group, by_path, order, normalize) for group in groups]


def mask_best(
    groups: Sequence[PlacedGroup], importance: Sequence[jax.Array], num_kept: Sequence[chex.Numeric]
) -> list[jax.Array]:
    """Returns masks of the most important channels of each group, and of each layer."""
    xp = jnp if any(map(is_traced, num_kept)) else np
    pairs = zip(num_kept, groups, strict=True)
    counts = [xp.minimum(xp.asarray(k, np.uint32), group.channels.size) for k, group in pairs]
    repeats = [group.channels.layers or 1 for group in groups]
    # One count for each slice: each layer of a group keeps as many.
    k = xp.stack([k for k, n in zip(counts, repeats, strict=True) for _ in range(n)])
    return topk_masks([rank_channels(x) for x in importance], k)


def spread_masks(
    groups: Sequence[PlacedGroup], masks: Sequence[jax.Array], leaves: Leaves
) -> list[jax.Array]:
    """Returns the masks of parameters from masks of channels."""
    by_path = {key_path: jnp.ones(leaf.shape, jnp.uint8) for key_path, leaf in leaves.items()}
    for group, mask in zip(groups, masks, strict=True):
        size, layers = group.channels.size, group.channels.layers
        for key_path, axis, positions in group.members:
            shape = leaves[key_path].shape
            channel_indices = np.full(shape[axis], -1)
            channel_indices[positions] = np.arange(size)[:, None]
            # Reads by index: XLA would otherwise shard one mask like another.
            # -1 stands for entries of no channel here, which read channel 0 and are kept below.
            chosen = jnp.asarray(mask)[..., np.maximum(channel_indices, 0)]
            axis_mask = jnp.where(channel_indices < 0, np.uint8(1), chosen)
            shape_along_axis = [n if i == axis else 1 for i, n in enumerate(shape)]
            by_path[key_path] *= axis_mask.reshape(
                [layers, *shape_along_axis[1:]] if layers else shape_along_axis
            )
    return list(by_path.values())


def find_active(group: PlacedGroup, masks: Leaves) -> jax.Array:
    """Returns uint8[channels]: 1 where entries stay in the first member of a group."""
    key_path, axis, positions = group.members[0]
    mask = masks[key_path]
    indexing = (0, axis) if group.channels.layers else (axis,)
    pooled = tuple(i for i in range(mask.ndim) if i not in indexing)
    return jnp.max(jnp.max(mask, axis=pooled)[..., positions], axis=-1)


def rank_channels(importance: jax.Array, active: jax.Array | None = None) -> Candidates:
    """Returns the channels of a group as a search ranks them: layers of a scan are slices."""
    return Candidates(importance, active, importance.ndim - 1)


def _sum_members(group: PlacedGroup, powers: Leaves, order: int, normalize: bool) -> jax.Array:
    parts, layers = [], group.channels.layers
    for (key_path, axis, positions), count in zip(group.scored, group.num_entries, strict=True):
        score = powers[key_path]
        summed = tuple(i for i in range(bool(layers), score.ndim) if i != axis)
        part = jnp.sum(score, axis=summed)
        is_full_axis = np.array_equal(positions, np.arange(score.shape[axis])[:, None])
        if not is_full_axis:
            part = jnp.sum(part[..., positions], axis=-1)
        parts.append(part / count if normalize else part)
    total = sum(parts[1:], start=parts[0])
    return jnp.abs(total) if order == 1 else jnp.sqrt(total)
