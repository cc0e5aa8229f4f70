"""`Coupled`: a scope in which whole channels compete, with all their entries."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import ClassVar, Literal, Self

import chex
import jax
import jax.numpy as jnp

from sparsity.core import exact, sharding, trees
from sparsity.core.checks import DataclassBase, check_bool, check_int, is_traced
from sparsity.core.polynomials import Cost, Polynomial
from sparsity.core.trees import KeyPath, Masks, Params, Path, PyTree, ScoreTree, Sparsities
from sparsity.graph.channels.cuts import PlanLike, solve_sizes
from sparsity.graph.channels.groups import ChannelGroup, resize_groups
from sparsity.graph.graph import Graph
from sparsity.graph.scope.counts import ChannelCounts, ChannelLimits
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
from sparsity.graph.scope.widths import find_largest, list_widths
from sparsity.graph.traced_model import Parameter
from sparsity.masks import BatchAxes, PatternChoice, Site, Sites, TopkFn, TreeScope
from sparsity.masks.affordable import best_that_fit
from sparsity.patterns import SparsityType
from sparsity.programs.axes import Variable
from sparsity.selection import move_units


@dataclasses.dataclass(frozen=True)
class Coupled(DataclassBase):
    """Scope that keeps or removes coupled channels as a whole, in all their members.

    A channel's importance is the sum of its entries' scores over all members: kernels in and out,
    biases, scales and shifts. A group of n channels at sparsity s keeps `num_kept(n, s)` channels,
    where s is the largest sparsity among its members; all members get masks. Groups that are
    factors of one axis, such as heads and their channels, share its sparsity. A parameter that the
    user leaves out, by `None` in a `custom_sparsity_map` or by a filter, keeps its groups whole;
    the page on shrinking states both rules. Each layer of a scan chooses channels for itself, where
    channels live within a layer. `sparsity.shrink` cuts masked channels; in the smaller model, n
    remains the size in `graph`, so that a ramp continues.

    SET and RigL keep the number of channels. A channel that grows starts at 0 on both sides; where
    its activation maps 0 to 0, as ReLU does, no gradient reaches the channel. Choose a pruner.
    Masks of parts of channels are refused where updates would complete the channels.

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

    # Set by `bind`.
    sites: Sites | None = dataclasses.field(default=None, init=False, repr=False, compare=False)
    paths: Mapping[KeyPath, Path] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    targets: Sparsities | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )

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

    def bind(self, sites: Mapping[KeyPath, Site], targets: Sparsities | None) -> Self:
        """Returns a copy that knows the sites of an updater, and the ends of its ramp if any."""
        bound = copy.copy(self)
        if isinstance(sites, Sites):
            matches = self.graph.parameters.match(sites.params).items()
            paths = {key_path: x.path for key_path, x in matches if _is_inexact(x)}
            vars(bound).update(sites=sites, paths=paths)
        vars(bound).update(targets=targets)
        return bound

    def masked_paths(self, params: Params, sparsities: Sparsities) -> set[KeyPath]:
        """Returns the key paths of parameters that get masks: members of groups with a sparsity."""
        groups = self.place_groups(params, sparsities)
        return {member.key_path for group in groups for member in group.members}

    def count_channels(self, params: Params, sparsities: Sparsities) -> dict[Variable, Fraction]:
        """Counts the channels that stay of each group of `graph`, for sparsities in Python.

        With `across`, counts are fractions that cost as much as the channels that may stay.
        """
        groups = self.place_groups(params, sparsities)
        counts = zip(groups, self.count_by_sparsity(groups), strict=True)
        return {group.full.variable: Fraction(float(n)) for group, n in counts}

    def select_tree(self, scores: ScoreTree, sparsities: Sparsities) -> Masks:
        """Returns masks of all members; the channels of the highest importance stay."""
        groups = self.place_groups(scores, sparsities)
        cost = self._count_cost(groups, scores) if self.across else None

        def select(leaves: Leaves, limits: tuple[ChannelCounts, ChannelCounts]) -> list[jax.Array]:
            importance, (counts, least) = self._sum_importance(groups, leaves), limits
            if cost is not None:
                counts = self._count_across(groups, importance, cost, counts, least)
            return mask_best(groups, importance, counts)

        limits = self._limits.count_kept(groups)
        return self.make_masks(groups, select, [scores], limits)

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
        totals = [jnp.sum(-jnp.sort(-x, axis=1), axis=0) if x.ndim == 2 else x for x in importance]
        return [total / jnp.float32(cost) for total, cost in zip(totals, costs, strict=True)]

    # Groups as they lie in a tree.

    def place_groups(self, tree: PyTree, sparsities: Sparsities) -> list[PlacedGroup]:
        """Returns the groups of which channels may go, at their sizes in a tree.

        Raises:
          ValueError: the user leaves parameters of all groups out, or no group is left for a
            sparsity above 0.
        """
        groups = self.list_groups(tree, sparsities)
        cut = [group for group in groups if not group.excluded]
        rates = trees.leaves_by_path(sparsities).values()
        if not cut:
            self._check_excluded(groups)
            if any(is_traced(rate) or jax.device_get(rate) > 0 for rate in rates):
                self.check_grouped(groups, sparsities)
        return cut

    def list_groups(self, tree: PyTree, sparsities: Sparsities) -> list[PlacedGroup]:
        """Returns the groups that have a sparsity, also those that excluded members keep whole."""
        graph, arrays = self.graph, trees.leaves_by_path(tree)
        leaves = graph.parameters.match(tree)
        shapes = {parameter.path: arrays[key_path].shape for key_path, parameter in leaves.items()}
        all_axes = graph.removal.list_parameter_axes()
        sizes = solve_sizes(all_axes, shapes, self.plan)
        key_paths = {
            parameter.path: key_path
            for key_path, parameter in leaves.items()
            if _is_inexact(parameter)
        }
        rates = trees.leaves_by_path(sparsities)
        targets = rates | trees.leaves_by_path(self.targets)
        widths = list_widths(
            (axes, targets[key_path])
            for parameter, axes in all_axes
            if (key_path := key_paths.get(parameter.path)) in rates
            and parameter.path in graph.matrices
        )
        excluded = self._find_excluded(rates)
        groups = []
        resized = resize_groups(graph.groups, all_axes, sizes)
        for full, group in zip(graph.groups, resized, strict=True):
            members, scored, num_entries = [], [], []
            for i, (path, axis) in enumerate(group.members):
                if path in key_paths:
                    members.append(Member(key_paths[path], axis, group.positions[i]))
                    if self.is_scored(graph, path, axis):
                        scored.append(members[-1])
                        num_entries.append(self._count_member_entries(full, i))
            asking = [x.key_path for x in members if rates.get(x.key_path) is not None]
            if asking:
                rate = find_largest([rates[x] for x in asking])
                has_ramp = self.targets is not None
                placed = PlacedGroup(
                    group,
                    full,
                    members,
                    scored,
                    num_entries,
                    sparsity=rate,
                    target=find_largest([targets[x] for x in asking]) if has_ramp else rate,
                    widths=widths.get(full.variable, []),
                    excluded=[excluded[x] for x in full.paths if x in excluded],
                )
                groups.append(placed)
        return groups

    def _find_excluded(self, rates: Collection[KeyPath]) -> dict[Path, KeyPath]:
        """Returns {path: key path} of the parameters that a user leaves out.

        Hooks may score some parameters only: the sites have them all.
        """
        if self.sites is None:
            return {}
        matrices = self.graph.matrices if self.sites.has_user_filter else frozenset[Path]()
        return {
            path: key_path
            for key_path, path in self.paths.items()
            if key_path not in rates and (path in matrices or self.sites.is_named(key_path))
        }

    def _check_excluded(self, groups: Sequence[PlacedGroup]) -> None:
        """Raises a ValueError if parameters that the user leaves out keep groups whole."""
        names = dict.fromkeys(trees.path_string(x) for group in groups for x in group.excluded)
        if names:
            raise ValueError(
                f"No channels can go: {trees.listed(list(names))} are left out by filter_fn, "
                "custom_sparsity_map or sparsity_type, which keeps all channels of "
                f"{trees.listed([group.full.name for group in groups])}. Give parameters 0.0 in "
                "custom_sparsity_map to cut their channels with those of others."
            )

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
    ) -> PyTree:
        """Returns masks like the first tree from masks of channels, which `choose` returns.

        Args:
          groups: the groups.
          choose: `choose(*leaves, extra)` returns the mask of each group's channels.
          member_trees: trees whose members of groups `choose` gets, {key path: leaf} of each.
          extra: more arrays for `choose`.
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
        leaves = [[table[key_path] for key_path in key_paths] for table in tables]

        def spread_chosen(leaves: list[list[jax.Array]], extra: PyTree) -> list[jax.Array]:
            by_path = [dict(zip(key_paths, arrays, strict=True)) for arrays in leaves]
            return spread_masks(groups, choose(*by_path, extra), by_path[0])

        masks: list[jax.Array] = []
        if key_paths:
            masks = sharding.shard_like(leaves[0], spread_chosen, leaves, extra)
            masks = [*map(sharding.place_like, leaves[0], masks)]
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

    def count_by_sparsity(self, groups: Sequence[PlacedGroup]) -> ChannelCounts:
        """Counts the channels of each group that stay, or may stay under `across`."""
        return self._limits.count_kept(groups)[0]

    @property
    def _limits(self) -> ChannelLimits:
        return ChannelLimits(bool(self.across), self.round_to, self.min_channels)

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
            limited = map(self._limits.limit, groups, counts, least)
            return jnp.stack([jnp.asarray(n, jnp.uint32) for n in limited])

        return list(
            limit_counts(
                best_that_fit(ranks, lambda n: exact.at_least(limit, cost.at(limit_counts(n))))
            )
        )


_IMPLEMENTATION: type[TreeScope] = Coupled  # lets mypy check the methods


def _is_inexact(parameter: Parameter) -> bool:
    """Returns whether a parameter can have a mask."""
    return jnp.issubdtype(parameter.dtype, jnp.inexact)


def _explain_refusals(graph: Graph, path: Path) -> str:
    """Returns why the axes of a parameter are in no group."""
    texts = (f"axis {x.axis}: {x.explain()}" for x in graph.refused if x.path == path)
    return "; ".join(texts) or "its axes belong to several groups, or to a part of one"
