"""Numbers of channels that stay of each group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import sharding
from sparsity.core.checks import check_number, is_traced
from sparsity.core.trees import PyTree
from sparsity.graph.scope.placed import PlacedGroup
from sparsity.graph.scope.widths import Counts, count_on_ramp, find_largest, share_width
from sparsity.programs.axes import Variable
from sparsity.selection import num_kept

ChannelCounts: TypeAlias = Sequence[chex.Numeric]  # of channels, by group


class ChannelLimits(NamedTuple):
    """Options of `Coupled` that say how many channels stay.

    Attributes:
      across: whether groups compete.
      round_to: as in `Coupled`.
      min_channels: as in `Coupled`.
    """

    across: bool
    round_to: int | Callable[[chex.Numeric], chex.Numeric]
    min_channels: int | None

    def count_kept(self, groups: Sequence[PlacedGroup]) -> tuple[ChannelCounts, ChannelCounts]:
        """Returns the numbers of channels that stay by sparsities, and the smallest numbers.

        Under `across` the first are the numbers that may stay, float32 with fractions.
        """
        final = self._share_widths(groups)
        counts: list[chex.Numeric] = []
        fewest: list[chex.Numeric] = []
        for group in groups:
            count = self._count_asked(group, final.get(group.full.variable))
            least = self._count_least(group, count)
            if self.across:
                xp = jnp if is_traced(count) else np
                fewest_allowed = self.limit(group, 0, least)
                counts.append(xp.maximum(xp.float32(count), xp.float32(fewest_allowed)))
            else:
                counts.append(self.limit(group, count, least))
            fewest.append(least)
        return counts, fewest

    def limit(self, group: PlacedGroup, count: PyTree, least: PyTree) -> PyTree:
        """Applies `round_to` and the smallest number that may stay to a number of channels."""
        n = group.full.size
        if is_traced(count) or is_traced(least):
            return jnp.clip(self._round(group, jnp.maximum(count, least)), least, n)
        # `round_to` may compute with jax: under jit its result would be traced.
        with sharding.evaluate_now():
            rounded = int(self._round(group, max(int(count), least)))
            return min(max(rounded, least), n)

    def _share_widths(self, groups: Sequence[PlacedGroup]) -> Counts:
        """Returns the numbers of channels of groups that share widths, at the end of a ramp."""
        by_variable = {group.full.variable: group for group in groups}

        def limit(variable: Variable, count: PyTree) -> PyTree:
            least = min(self.min_channels or 1, variable.size)
            return self.limit(by_variable[variable], count, least)

        widths = [
            (width, [variable for variable in width.variables if variable in by_variable])
            for width in dict.fromkeys(width for group in groups for width in group.widths)
        ]
        # A group that is all of some axis keeps as many channels as its sparsity says.
        alone = {factors[0] for _, factors in widths if len(factors) == 1}
        counts: dict[Variable, PyTree] = {}
        for width, factors in sorted(widths, key=lambda pair: len(pair[1])):
            if all(variable in alone for variable in factors):
                continue
            for variable in alone.intersection(factors) - counts.keys():
                count = num_kept(variable.size, by_variable[variable].target)
                counts[variable] = limit(variable, count)
            if undecided := [variable for variable in factors if variable not in counts]:
                target = find_largest(width.targets)
                counts = share_width(width.axis, target, undecided, counts, limit)
        return {variable: count for variable, count in counts.items() if variable not in alone}

    def _count_asked(self, group: PlacedGroup, final: chex.Numeric | None) -> chex.Numeric:
        """Returns the number of channels that stay by the sparsity of a group, before limits.

        Args:
          group: the group.
          final: the number at the end of a ramp, where the group shares widths with others.
        """
        n, sparsity = group.full.size, group.sparsity
        if final is not None:
            return count_on_ramp(n, final, sparsity, group.target)
        if self.across and is_traced(sparsity):
            return np.float32(n) * (1 - _clip(sparsity))
        count: PyTree = num_kept(n, sparsity)  # an error for a sparsity outside [0, 1]
        return np.float32(n) * (1 - np.float32(sparsity)) if self.across else count

    def _count_least(self, group: PlacedGroup, asked: chex.Numeric) -> chex.Numeric:
        """Returns the smallest number of channels of a group that stay."""
        n = group.full.size
        if self.min_channels is not None or not self.across:
            return min(self.min_channels or 1, n)
        # With `across` a tenth stays at least, or fewer if the group's own sparsity asks for fewer.
        tenth = -(-n // 10)
        if is_traced(asked):
            return jnp.clip(jnp.int32(asked), 1, tenth)
        return min(max(int(asked), 1), tenth)

    def _round(self, group: PlacedGroup, count: PyTree) -> PyTree:
        """Applies `round_to` to a number of channels.

        Raises:
          ValueError: the group has fewer channels than `round_to`, or a function returns no number.
        """
        if callable(self.round_to):
            rounded = self.round_to(count)
            if not is_traced(rounded):
                check_number(f"round_to({count})", np.asarray(rounded)[()])
            return rounded
        if self.round_to > group.full.size:
            raise ValueError(
                f"round_to = {self.round_to} cannot be met by the group {group.full.name!r} of "
                f"{group.full.size} channels. Give a smaller number, a function of the number that "
                "would stay, or leave its parameters out with filter_fn."
            )
        return -(-count // self.round_to) * self.round_to


def _clip(sparsity: chex.Numeric) -> jax.Array:
    """Returns a traced sparsity within [0, 1], NaN as 0."""
    sparsity = jnp.asarray(sparsity)
    return jnp.where(sparsity > 0, jnp.minimum(sparsity, 1), 0).astype(jnp.float32)
