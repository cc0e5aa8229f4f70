"""`Coupled`: a scope in which whole channels compete, with all their entries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import ClassVar, Literal, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import exact, host, sharding, trees
from sparsity.core.checks import DataclassBase, check_bool, check_int, check_number, is_traced
from sparsity.core.exact_sums import ordered_sum
from sparsity.core.polynomials import Cost, Polynomial
from sparsity.core.trees import KeyPath, Masks, Params, Path, PyTree, ScoreTree, Sparsities
from sparsity.graph.channels.cuts import PlanLike, solve_sizes
from sparsity.graph.channels.groups import ChannelGroup, resize_groups
from sparsity.graph.graph import Graph
from sparsity.graph.scope.placed import (
    Leaves,
    Member,
    PlacedGroup,
    find_active,
    mask_best,
    rank_channels,
    spread_masks,
    sum_importance,
)
from sparsity.masks import BatchAxes, PatternChoice, TopkFn, TreeScope
from sparsity.masks.affordable import best_that_fit
from sparsity.masks.moves import move_units
from sparsity.patterns import SparsityType
from sparsity.programs.axes import Variable
from sparsity.selection import compute_array, num_kept

ChannelCounts: TypeAlias = Sequence[chex.Numeric]  # of channels, by group


@dataclasses.dataclass(frozen=True)
class Coupled(DataclassBase):
    """Scope that keeps or removes coupled channels as a whole, in all their members.

    A channel's importance is the sum of its entries' scores over all members: kernels in and out,
    biases, scales and shifts. A group of n channels at sparsity s keeps `num_kept(n, s)` channels,
    where s is the largest sparsity among its members; all members get masks. Each layer of a scan
    chooses channels for itself, where channels live within a layer. `sparsity.shrink` cuts masked
    channels; in the smaller model, n remains the size in `graph`, so that a ramp continues.

    SET and RigL keep the number of channels. A channel that grows starts at 0 on both sides; where
    its activation maps 0 to 0, as ReLU does, no gradient reaches the channel. Choose a pruner.

    Attributes:
      graph: the graph of the model, from `sparsity.trace`.
      order: 1 sums scores, with their sign where an algorithm has one (|w g| becomes the absolute
        value of the sum of w g); 2 takes the root of the sum of squares.
      normalize: divide the score of a member by its number of entries in a channel.
      across: let groups compete by importance per multiply-add, or per byte ("nbytes"); the page
        on budgets says which channels stay.
      round_to: round the number of channels that stay up to a multiple of this number; or a
        function of the number, which may be traced.
      min_channels: smallest number of channels that stay in every group; that page states the
        default.
      plan: the cut of the model, for parameters that are smaller than those of `graph`. By default
        shapes determine the cut, unless an axis joins channels of two groups that lie on no other
        axis.

    Sources: Fang et al. 2023, "DepGraph"; Molchanov et al. 2019, "Importance Estimation for Neural
    Network Pruning".

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"up": jnp.array([[1.0, 5.0]]), "down": jnp.array([[2.0], [3.0]])}
      >>> def model(params, x):
      ...     return x @ params["up"] @ params["down"]
      >>> graph = sparsity.trace(model, params, jnp.ones((1, 1)))
      >>> half = sparsity.Uniform(0.5)
      >>> pruner = sparsity.MagnitudePruning(scope=Coupled(graph), sparsity_distribution_fn=half)
      >>> masks = pruner.instant_sparsify(params)[1]
      >>> masks["up"].tolist(), masks["down"].tolist()  # the importance of the channels is 3 and 8
      ([[0, 1]], [[0], [1]])
    """

    graph: Graph
    _: dataclasses.KW_ONLY
    order: int = 1
    normalize: bool = False
    across: bool | Literal["nbytes"] = False
    round_to: int | Callable[[chex.Numeric], chex.Numeric] = 1
    min_channels: int | None = None
    plan: PlanLike | None = None

    takes_signed_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.graph, Graph):
            raise ValueError(f"graph must be made by sparsity.trace, got {self.graph!r}.")
        check_int("order", self.order, 1, 2)
        check_bool("normalize", self.normalize)
        is_nbytes = isinstance(self.across, str) and self.across == "nbytes"
        if not is_nbytes and not isinstance(self.across, bool):
            raise ValueError(
                f"across must be True, False or 'nbytes', got across = {self.across!r}."
            )
        if self.min_channels is not None:
            check_int("min_channels", self.min_channels, 1)
        if not callable(self.round_to):
            check_int("round_to", self.round_to, 1)
        if self.plan is not None and not isinstance(self.plan, PlanLike):
            raise ValueError(f"plan must be a sparsity.Plan or None, got plan = {self.plan!r}.")

    def check(self, pattern: PatternChoice, batch_axes: BatchAxes, topk_fn: TopkFn | None) -> None:
        """Raises a ValueError for other ways to select: patterns, batch axes, a topk_fn."""
        if isinstance(pattern, SparsityType) and not pattern.is_elementwise:
            raise ValueError(
                "Coupled removes whole channels and needs sparsity_type = Unstructured(), got "
                f"{pattern!r}."
            )
        if topk_fn is not None or (not callable(batch_axes) and batch_axes):
            raise ValueError(
                "Coupled finds channels in the graph and needs batch_axes = 0 and topk_fn = None, "
                f"got batch_axes = {batch_axes!r}, topk_fn = {topk_fn!r}."
            )

    def masked_paths(self, params: Params, sparsities: Sparsities) -> set[KeyPath]:
        """Returns the key paths of parameters that get masks: members of groups with a sparsity."""
        groups = self.place_groups(params, sparsities)
        return {member.key_path for group in groups for member in group.members}

    def count_channels(self, params: Params, sparsities: Sparsities) -> dict[Variable, Fraction]:
        """Counts the channels that stay of each group of `graph`, for sparsities in Python.

        With `across`, counts are fractions that cost as much as the channels that may stay.
        """
        groups = self.place_groups(params, sparsities)
        counts = zip(groups, self._count_kept(groups), strict=True)
        return {group.full.variable: Fraction(float(n)) for group, n in counts}

    def select_tree(self, scores: ScoreTree, sparsities: Sparsities) -> Masks:
        """Returns masks of all members; the channels of the highest importance stay."""
        groups = self.place_groups(scores, sparsities)
        if not groups:
            self.check_grouped(groups, sparsities)
        cost = self._count_cost(groups, scores) if self.across else None

        def select(leaves: Leaves, limits: tuple[ChannelCounts, ChannelCounts]) -> list[jax.Array]:
            importance, (counts, least) = self._sum_importance(groups, leaves), limits
            if cost is not None:
                counts = self._count_across(groups, importance, cost, counts, least)
            return mask_best(groups, importance, counts)

        limits = self._count_kept(groups), [*map(self._count_least, groups)]
        return self.make_masks(groups, select, [scores], limits, is_on_host=self.order == 1)

    def move_tree(
        self, masks: Masks, drop: PyTree, grow: PyTree, drop_fraction: chex.Numeric
    ) -> Masks:
        """Returns masks of as many channels of each group as before, some of them replaced."""
        present = trees.leaves_by_path(masks)
        sparsities = trees.map_matched(
            lambda key_path, _: 0.0 if key_path in present else None, drop
        )
        groups = [
            group
            for group in self.place_groups(drop, sparsities)
            if all(member.key_path in present for member in group.members)
        ]

        def move(
            masks: Leaves, drop: Leaves, grow: Leaves, fraction: chex.Numeric
        ) -> list[jax.Array]:
            active = [find_active(group, masks) for group in groups]
            drops = zip(self._sum_importance(groups, drop), active, strict=True)
            dropping = [rank_channels(importance, mask) for importance, mask in drops]
            growing = [rank_channels(x) for x in self._sum_importance(groups, grow)]
            return move_units(dropping, growing, fraction)

        return self.make_masks(groups, move, [masks, drop, grow], drop_fraction)

    # Hooks of subclasses.

    def is_scored(self, graph: Graph, path: Path, axis: int) -> bool:
        """Returns whether a member of a group adds to its importance; by default all members do."""
        return True

    def rank_across(
        self, importance: Sequence[jax.Array], costs: Sequence[Fraction]
    ) -> list[jax.Array]:
        """Returns the ranks of the channels of each group with `across`, [channels] each.

        Layers keep equally many channels: channels of equal rank in all layers count together.

        Args:
          importance: [channels] of each group, or [layers, channels].
          costs: cost of one channel of each group, in all layers.
        """
        totals = [
            ordered_sum(-jnp.sort(-x, axis=1), (0,)) if x.ndim == 2 else x for x in importance
        ]
        return [total / jnp.float32(cost) for total, cost in zip(totals, costs, strict=True)]

    # Groups as they lie in a tree.

    def place_groups(self, tree: PyTree, sparsities: Sparsities) -> list[PlacedGroup]:
        """Returns the groups that have a sparsity, at their sizes in a tree."""
        graph, arrays = self.graph, trees.leaves_by_path(tree)
        leaves = graph.parameters.match(tree)
        shapes = {parameter.path: arrays[key_path].shape for key_path, parameter in leaves.items()}
        axes = graph.removal.list_parameter_axes()
        sizes = solve_sizes(axes, shapes, self.plan)
        key_paths = {
            parameter.path: key_path
            for key_path, parameter in leaves.items()
            if jnp.issubdtype(parameter.dtype, jnp.inexact)  # others can have no mask
        }
        targets = trees.leaves_by_path(sparsities)
        groups = []
        for full, group in zip(graph.groups, resize_groups(graph.groups, axes, sizes), strict=True):
            members, scored, num_entries = [], [], []
            for i, (path, axis) in enumerate(group.members):
                if path in key_paths:
                    members.append(Member(key_paths[path], axis, group.positions[i]))
                    if self.is_scored(graph, path, axis):
                        scored.append(members[-1])
                        num_entries.append(self._count_member_entries(full, i))
            rates = [targets[x.key_path] for x in members if targets.get(x.key_path) is not None]
            if rates:
                largest = rates[0] if len(rates) == 1 else _find_largest_sparsity(rates)
                groups.append(PlacedGroup(group, full, members, scored, num_entries, largest))
        return groups

    def check_grouped(self, groups: Sequence[PlacedGroup], sparsities: Sparsities) -> None:
        """Raises a ValueError for a parameter with a sparsity that is in no group."""
        grouped = {key_path for group in groups for key_path, _, _ in group.members}
        for key_path in trees.leaves_by_path(sparsities):
            if key_path not in grouped:
                raise ValueError(
                    f"{trees.path_string(key_path)!r}, which has a sparsity, has no channels that "
                    f"can be removed: {_explain_refusals(self.graph, trees.path_names(key_path))}. "
                    "Keep it dense with filter_fn or custom_sparsity_map={path: None}."
                )

    def _count_member_entries(self, group: ChannelGroup, member: int) -> int:
        """Counts the entries of a member that belong to a channel of a layer."""
        (path, axis), positions = group.members[member], group.positions[member]
        shape = self.graph.parameters.find_shape(path)
        return math.prod(shape) // (shape[axis] * max(group.layers, 1)) * int(positions.shape[1])

    def make_masks(
        self,
        groups: Sequence[PlacedGroup],
        choose: Callable[..., list[jax.Array]],
        member_trees: Sequence[PyTree],
        extra: PyTree,
        is_on_host: bool = False,
    ) -> PyTree:
        """Returns masks like the first tree from masks of channels, which `choose` returns.

        Args:
          groups: the groups.
          choose: `choose(*leaves, extra)` returns the mask of each group's channels.
          member_trees: trees whose members of groups `choose` gets, {key path: leaf} of each.
          extra: more arrays for `choose`.
          is_on_host: `choose` takes arrays of numpy where these are concrete on one CPU.
        """
        for group in groups:
            if not group.scored:
                raise ValueError(
                    f"No product reads the channels of the group {group.channels.name!r}, so that "
                    "they have no importance here. Leave its parameters out with filter_fn."
                )
        key_paths = list(dict.fromkeys(x.key_path for group in groups for x in group.members))
        tables = [trees.leaves_by_path(x) for x in member_trees]
        # Lists, because jax sorts the keys of a dict, and key paths have no order.
        leaves = [[compute_array(table[key_path]) for key_path in key_paths] for table in tables]

        def spread_chosen(leaves: list[list[jax.Array]], extra: PyTree) -> list[jax.Array]:
            by_path = [dict(zip(key_paths, arrays, strict=True)) for arrays in leaves]
            return spread_masks(groups, choose(*by_path, extra), by_path[0])

        device = host.find_host_device(leaves, extra) if is_on_host else None
        if device is not None:
            masks = device.put(spread_chosen(*host.to_numpy((leaves, extra))))
        elif key_paths:
            masks = sharding.shard_like(leaves[0], spread_chosen, leaves, extra)
            masks = map(sharding.place_like, leaves[0], masks)
        else:
            masks = []
        masks_by_path = dict(zip(key_paths, masks, strict=True))
        return trees.map_matched(lambda key_path, _: masks_by_path.get(key_path), member_trees[0])

    def _sum_importance(self, groups: Sequence[PlacedGroup], leaves: Leaves) -> list[jax.Array]:
        return sum_importance(groups, leaves, self.order, self.normalize)

    def _count_cost(self, groups: Sequence[PlacedGroup], tree: PyTree) -> Cost:
        """Returns the cost of the model: multiply-adds, or bytes of the parameters of a tree."""
        sizes = {group.full.variable: Polynomial.variable(i) for i, group in enumerate(groups)}
        costs, parameters = self.graph.costs, self.graph.parameters
        if self.across == "nbytes":
            paths = {parameter.path for parameter in parameters.match(tree).values()}
            cost = Polynomial.convert(costs.count_small_bytes(sizes, paths))
        else:
            cost = Polynomial.convert(costs.count_small_macs(sizes))
        return Cost(cost, [group.full.size for group in groups])

    # Numbers of channels.

    def _count_kept(self, groups: Sequence[PlacedGroup]) -> list[chex.Numeric]:
        """Counts the channels that stay of each group, or may stay under `across`."""
        count = self._count_allowed if self.across else self.count_by_sparsity
        return [count(group) for group in groups]

    def count_by_sparsity(self, group: PlacedGroup) -> chex.Numeric:
        """Counts the channels of a group that stay by its sparsity."""
        count_before_limits = num_kept(group.full.size, group.sparsity)
        return self._limit_count(group, count_before_limits, self._count_least(group))

    def _count_allowed(self, group: PlacedGroup) -> chex.Numeric:
        """Counts the channels that may stay under `across`, as float32 with fractions."""
        sparsity, n = group.sparsity, np.float32(group.full.size)
        if not is_traced(sparsity):
            num_kept(group.full.size, sparsity)  # an error for a sparsity outside [0, 1]
        least = self._limit_count(group, 0, self._count_least(group))
        if not is_traced(sparsity):
            return max(n * (1 - np.float32(sparsity)), np.float32(least))
        return jnp.maximum(n * (1 - _clip(sparsity)), jnp.float32(least))

    def _count_least(self, group: PlacedGroup) -> chex.Numeric:
        """Returns the smallest number of channels of a group that stay."""
        n, sparsity = group.full.size, group.sparsity
        if self.min_channels is not None or not self.across:
            return min(self.min_channels or 1, n)
        # With `across` a tenth stays at least, or fewer if the group's own sparsity asks for fewer.
        tenth = -(-n // 10)
        if is_traced(sparsity):
            fewer: jax.Array = jnp.int32(np.float32(n) * (1 - _clip(sparsity)))
            return jnp.clip(fewer, 1, tenth)
        return min(max(int(np.float32(n) * (1 - np.float32(sparsity))), 1), tenth)

    def _limit_count(self, group: PlacedGroup, count: PyTree, least: PyTree) -> PyTree:
        """Applies `round_to` and the smallest number that may stay to a number of channels."""
        n = group.full.size
        if is_traced(count) or is_traced(least):
            return jnp.clip(self._round_count(group, jnp.maximum(count, least)), least, n)
        # `round_to` may compute with jax: under jit its result would be traced.
        with sharding.evaluate_now():
            rounded = int(self._round_count(group, max(int(count), least)))
            return min(max(rounded, least), n)

    def _round_count(self, group: PlacedGroup, count: PyTree) -> PyTree:
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

    def _count_across(
        self,
        groups: Sequence[PlacedGroup],
        importance: Sequence[jax.Array],
        cost: Cost,
        allowed: ChannelCounts,
        least: ChannelCounts,
    ) -> list[jax.Array]:
        """Counts the channels that stay of each group: the best per cost, within a cost."""
        ranks = self.rank_across(importance, cost.savings)
        limit = cost.limit(jnp.stack([jnp.asarray(n, jnp.float32) for n in allowed]))

        def limit_counts(counts: Sequence[jax.Array]) -> jax.Array:
            limited = map(self._limit_count, groups, counts, least)
            return jnp.stack([jnp.asarray(n, jnp.uint32) for n in limited])

        return list(
            limit_counts(
                best_that_fit(ranks, lambda n: exact.at_least(limit, cost.at(limit_counts(n))))
            )
        )


_IMPLEMENTATION: type[TreeScope] = Coupled  # lets mypy check the methods


def _explain_refusals(graph: Graph, path: Path) -> str:
    """Returns why the axes of a parameter are in no group."""
    texts = (f"axis {x.axis}: {x.explain()}" for x in graph.refused if x.path == path)
    return "; ".join(texts) or "its axes belong to several groups, or to a part of one"


def _find_largest_sparsity(sparsities: Sequence[chex.Numeric]) -> chex.Numeric:
    if any(map(is_traced, sparsities)):
        return jnp.max(jnp.stack([jnp.float32(x) for x in sparsities]))
    return max(float(x) for x in jax.device_get(list(sparsities)))


def _clip(sparsity: chex.Numeric) -> jax.Array:
    """Returns a traced sparsity within [0, 1], NaN as 0."""
    sparsity = jnp.asarray(sparsity)
    return jnp.where(sparsity > 0, jnp.minimum(sparsity, 1), 0).astype(jnp.float32)
