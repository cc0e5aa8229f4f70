"""Numbers of channels that stay of each group, under the limits of a scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.checks import check_number, is_traced
from sparsity.core.sharding import evaluate_now
from sparsity.graph.channels.groups import ChannelGroup
from sparsity.graph.scope.placed import PlacedGroup
from sparsity.selection.kept_counts import num_kept


class Limits(Protocol):
    """Fields of `Coupled` that limit the numbers of channels."""

    @property
    def across(self) -> bool | str: ...

    @property
    def round_to(self) -> int | Callable[[chex.Numeric], chex.Numeric]: ...

    @property
    def min_channels(self) -> int | None: ...


def count_by_sparsity(scope: Limits, group: PlacedGroup) -> chex.Numeric:
    """Counts the channels of a group that stay by its sparsity."""
    kept = num_kept(group.full.size, group.sparsity)
    count: chex.Numeric = apply_rounding(scope, group.full, kept, count_least(scope, group))
    return count


def count_allowed(scope: Limits, group: PlacedGroup) -> chex.Numeric:
    """Counts the channels that may stay under `across`, as float32 with fractions."""
    sparsity, n = group.sparsity, np.float32(group.full.size)
    if not is_traced(sparsity):
        num_kept(group.full.size, sparsity)  # which checks it
    least = apply_rounding(scope, group.full, 0, count_least(scope, group))
    if not is_traced(sparsity):
        return max(n * (1 - np.float32(sparsity)), np.float32(least))
    return jnp.maximum(n * (1 - _clip(sparsity)), jnp.float32(least))


def count_least(scope: Limits, group: PlacedGroup) -> chex.Numeric:
    """Returns the smallest number of channels of a group that stay."""
    n, sparsity = group.full.size, group.sparsity
    if scope.min_channels is not None or not scope.across:
        return min(scope.min_channels or 1, n)
    tenth = -(-n // 10)
    if is_traced(sparsity):
        fewer: jax.Array = jnp.int32(np.float32(n) * (1 - _clip(sparsity)))
        return jnp.clip(fewer, 1, tenth)
    return min(max(int(np.float32(n) * (1 - np.float32(sparsity))), 1), tenth)


def apply_rounding(scope: Limits, channels: ChannelGroup, kept: Any, least: Any) -> Any:
    """Applies `round_to` and the smallest number that may stay to a number of channels."""
    n = channels.size
    if is_traced(kept) or is_traced(least):
        return jnp.clip(round_to_multiple(scope, channels, jnp.maximum(kept, least)), least, n)
    with evaluate_now():
        rounded = int(round_to_multiple(scope, channels, max(int(kept), least)))
        return min(max(rounded, least), n)


def round_to_multiple(scope: Limits, channels: ChannelGroup, kept: Any) -> Any:
    """Applies `round_to` to a number of channels.

    Raises:
      ValueError: the group has fewer channels than `round_to`, or a function returns no number.
    """
    if callable(scope.round_to):
        rounded = scope.round_to(kept)
        if not is_traced(rounded):
            check_number(f"round_to({kept})", np.asarray(rounded)[()])
        return rounded
    if scope.round_to > channels.size:
        raise ValueError(
            f"round_to = {scope.round_to} cannot be met by the group {channels.name!r} of "
            f"{channels.size} channels. Give a smaller number, a function of the number that "
            "would stay, or leave its leaves out with filter_fn."
        )
    return -(-kept // scope.round_to) * scope.round_to


def _clip(sparsity: chex.Numeric) -> jax.Array:
    """Returns a traced sparsity within [0, 1], NaN as 0."""
    sparsity = jnp.asarray(sparsity)
    return jnp.where(sparsity > 0, jnp.minimum(sparsity, 1), 0).astype(jnp.float32)
