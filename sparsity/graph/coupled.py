"""`Coupled`: a scope in which whole channels compete, with all their entries.

Groups that are factors of one axis share its sparsity: 4 heads of 16 channels that lie along one
axis of 64 keep 3 heads of 11 channels at sparsity 0.5. Numbers of channels are the same traced and
not.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import ModuleType
from typing import ClassVar, Literal, NamedTuple, Self, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import sharding, trees
from sparsity.core.arrays import promote, scale_for_sums, scale_to_one
from sparsity.core.checks import (
    DataclassBase,
    check_bool,
    check_fraction,
    check_int,
    check_kind,
    is_traced,
)
from sparsity.core.trees import KeyPath, Masks, Params, Path, PyTree, ScoreTree, Sparsities
from sparsity.graph.graph import Graph
from sparsity.graph.groups import (
    ChannelGroup,
    PlanLike,
    check_importance,
    find_matching,
    resize_groups,
    solve_sizes,
)
from sparsity.graph.traced_model import Parameter
from sparsity.masks import BatchAxes, PatternChoice, Site, Sites, TopkFn, TreeScope
from sparsity.masks.budgets import Cost, best_that_fit
from sparsity.patterns import SparsityType
from sparsity.programs.axes import Axis, Variable, count_entries, list_variables
from sparsity.selection import Candidates, move_units, num_kept, topk_masks

GroupChoice: TypeAlias = str | Collection[str] | Callable[[ChannelGroup], bool]
Leaves: TypeAlias = Mapping[KeyPath, jax.Array]  # of one tree, by key path
ChannelCounts: TypeAlias = Sequence[chex.Numeric]  # of channels, by group


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


@dataclasses.dataclass(frozen=True, eq=False)
class Width:
    """Axis of a weight, or one of several that follow one another along an axis.

    Attributes:
      axis: the axis in the program.
      variables: the variables that make up the axis, each once.
      targets: the sparsities of the parameters with this axis, at the end of a ramp.
    """

    axis: Axis
    variables: Sequence[Variable]
    targets: list[chex.Numeric] = dataclasses.field(default_factory=list)


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
      has_rate: whether `rates` gives its sparsity.
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
    has_rate: bool
    excluded: list[KeyPath]


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
      groups: the groups of which channels may go, others stay whole: kinds, names, or patterns of
        names such as 'layers/*/mlp', one or several; or a function of a `ChannelGroup`. By default
        the groups of `rates`, or all without `rates`.
      rates: sparsities of groups by the same keys, in place of those of their parameters; the last
        key that fits counts.
      importance: {group: importance of its channels}, [channels] or [layers, channels], in place
        of sums of scores; `sparsity.rank_groups` returns such a dict. By default only its groups
        may lose channels.
      order: 1 sums scores, with their sign where an algorithm has one (|w g| becomes the absolute
        value of the sum of w g); 2 takes the root of the sum of squares.
      normalize: divide the score of a member by its number of entries in a channel.
      across: let groups compete by importance per multiply-add, or per byte ("nbytes"); the page
        on budgets says which channels stay.
      round_to: round the number of channels that stay up to a multiple of this number.
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
    groups: GroupChoice | None = None
    rates: Mapping[str, float] | None = None
    importance: Mapping[str, np.ndarray] | None = None
    order: int = 1
    normalize: bool = False
    across: bool | Literal["nbytes"] = False
    round_to: int = 1
    min_channels: int | None = None
    plan: PlanLike | None = None

    # Set by `bind`.
    sites: Sites | None = dataclasses.field(default=None, init=False, repr=False, compare=False)
    targets: Sparsities | None = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )

    takes_signed_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.graph, Graph):
            raise ValueError(f"graph must be made by sparsity.trace, got {self.graph!r}.")
        check_kind("rates", self.rates, Mapping | None, "a dict {group: sparsity}")
        for key, rate in (self.rates or {}).items():
            check_fraction(f"rates[{key!r}]", rate)
        if self.rates is not None and self.across:
            raise ValueError(
                "rates gives each group a sparsity, and across lets groups compete: give one of "
                f"both, got rates = {self.rates!r}, across = {self.across!r}."
            )
        if self.groups is not None and not callable(self.groups):
            check_kind("groups", self.groups, Collection, "a name, several, or a function")
            for key in _list_keys(self.groups):
                find_matching(self.graph.groups, key, "groups")
        for key in self.rates or {}:
            if not any(map(self.chooses, find_matching(self.graph.groups, key, "rates"))):
                raise ValueError(f"rates: {key!r} names no group that `groups` chooses.")
        if self.importance is not None:
            self._check_importance(self.importance)
        if not any(map(self.chooses, self.graph.groups)) and self.graph.groups:
            raise ValueError(
                f"groups and rates choose no group of the model, got groups = {self.groups!r}, "
                f"rates = {self.rates!r}."
            )
        check_int("order", self.order, 1, 2)
        check_bool("normalize", self.normalize)
        is_nbytes = isinstance(self.across, str) and self.across == "nbytes"
        if not is_nbytes and not isinstance(self.across, bool):
            raise ValueError(
                f"across must be True, False or 'nbytes', got across = {self.across!r}."
            )
        if self.min_channels is not None:
            check_int("min_channels", self.min_channels, 1)
        check_int("round_to", self.round_to, 1)
        if self.plan is not None and not isinstance(self.plan, PlanLike):
            raise ValueError(f"plan must be a sparsity.Plan or None, got plan = {self.plan!r}.")

    def _check_importance(self, importance: Mapping[str, np.ndarray]) -> None:
        check_importance(self.graph.groups, importance)
        for group in filter(self.chooses, self.graph.groups):
            if group.name not in importance:
                raise ValueError(f"importance has none of the chosen group {group.name!r}.")
        if self.order != 1 or self.normalize:
            raise ValueError(
                "importance takes the place of sums of scores, which order and normalize change: "
                f"leave these, got order = {self.order!r}, normalize = {self.normalize!r}."
            )

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
        vars(bound).update(targets=targets)
        if isinstance(sites, Sites):
            vars(bound).update(sites=sites)
        return bound

    def masked_paths(self, params: Params, sparsities: Sparsities) -> set[KeyPath]:
        """Returns the key paths of parameters that get masks: members of groups with a sparsity."""
        groups = self.place_groups(params, sparsities)
        return {x.key_path for group in groups for x in group.members} | {*_list_empty(params)}

    def count_channels(self, params: Params, sparsities: Sparsities) -> dict[Variable, Fraction]:
        """Counts the channels that stay of each group of `graph`, for sparsities in Python.

        With `across`, counts are fractions that cost as much as the channels that may stay.
        """
        groups = self.place_groups(params, sparsities)
        counts = zip(groups, self.count_by_sparsity(groups), strict=True)
        sizes = {group.full.variable: Fraction(float(n)) for group, n in counts}
        return sizes | self._find_gone(params)

    def select_tree(self, scores: ScoreTree, sparsities: Sparsities) -> Masks:
        """Returns masks of all members; the channels of the highest importance stay."""
        groups = self.place_groups(scores, sparsities)

        def select(leaves: Leaves, counts: tuple[ChannelCounts, ChannelCounts]) -> list[jax.Array]:
            importance, kept = self._sum_importance(groups, leaves), counts[0]
            if self.across and groups:
                kept = self._count_across(groups, importance, scores, *counts)
            return _mask_best(groups, importance, kept)

        return self.make_masks(groups, select, [scores], self._count(groups))

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
            active = [_find_active(group, masks) for group in groups]
            drops = zip(self._sum_importance(groups, drop), active, strict=True)
            dropping = [_rank_channels(importance, mask) for importance, mask in drops]
            growing = [_rank_channels(x) for x in self._sum_importance(groups, grow)]
            return move_units(dropping, growing, fraction)

        return self.make_masks(groups, move, [masks, drop, grow], drop_fraction)

    def score_channels(self, scores: ScoreTree) -> dict[str, jax.Array]:
        """Returns {name of a group: importance}, [channels] or [layers, channels]."""
        zeros = jax.tree.map(lambda _: 0.0, scores)
        groups = [group for group in self.place_groups(scores, zeros) if group.scored]
        importance = self._sum_importance(groups, trees.leaves_by_path(scores))
        return {x.full.name: y for x, y in zip(groups, importance, strict=True)}

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
        listed = self.list_groups(tree, sparsities)
        # A group that has lost all of its channels is gone.
        groups = [x for x in listed if x.channels.size and self.chooses(x.full)]
        cut = [group for group in groups if not group.excluded]
        if groups and not cut:
            names = {trees.path_string(x): None for group in groups for x in group.excluded}
            raise ValueError(
                f"No channels can go: {trees.listed([*names])} are left out by filter_fn, "
                "custom_sparsity_map or sparsity_type, which keeps all channels of "
                f"{trees.listed([group.full.name for group in groups])}. Give parameters 0.0 in "
                "custom_sparsity_map to cut their channels with those of others."
            )
        rates = trees.leaves_by_path(sparsities).values()
        if not cut and any(is_traced(rate) or jax.device_get(rate) > 0 for rate in rates):
            self.check_grouped(listed, sparsities)
        return cut

    def chooses(self, group: ChannelGroup) -> bool:
        """Returns whether channels of a group may go."""
        if self.groups is None:
            is_ranked = self.importance is None or group.name in self.importance
            return is_ranked and (self.rates is None or self._find_rate(group) is not None)
        if callable(self.groups):
            return bool(self.groups(group))
        return any(group.matches(key) for key in _list_keys(self.groups))

    def _find_rate(self, group: ChannelGroup) -> float | None:
        """Returns the sparsity that `rates` gives a group."""
        fitting = [rate for key, rate in (self.rates or {}).items() if group.matches(key)]
        return fitting[-1] if fitting else None

    def list_groups(self, tree: PyTree, sparsities: Sparsities) -> list[PlacedGroup]:
        """Returns the groups that have a sparsity, also those that excluded members keep whole."""
        graph, arrays = self.graph, trees.leaves_by_path(tree)
        leaves = graph.parameters.match(tree)
        shapes = {parameter.path: arrays[key_path].shape for key_path, parameter in leaves.items()}
        all_axes = graph.removal.list_parameter_axes()
        sizes = solve_sizes(all_axes, shapes, self.plan, graph.removal.may_be_empty)
        key_paths = {x.path: key_path for key_path, x in leaves.items() if _is_inexact(x)}
        rates = trees.leaves_by_path(sparsities)
        targets = rates | trees.leaves_by_path(self.targets)
        widths = _list_widths(
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
                        shape, per_channel = graph.parameters.find_shape(path), full.positions[i]
                        outside = math.prod(shape) // (shape[axis] * max(full.layers, 1))
                        scored.append(members[-1])
                        num_entries.append(outside * per_channel.shape[1])
            asking = [x.key_path for x in members if rates.get(x.key_path) is not None]
            if asking:
                rate = _find_largest([rates[x] for x in asking])
                has_ramp = self.targets is not None
                target = _find_largest([targets[x] for x in asking]) if has_ramp else rate
                group_rate = self._find_rate(full)
                if group_rate is not None:
                    rate, target = _scale_ramp(group_rate, rate, target), group_rate
                group_widths = [x for x in widths if full.variable in x.variables]
                kept_full = [excluded[x] for x in full.paths if x in excluded]
                placed = group, full, members, scored, num_entries, rate, target, group_widths
                groups.append(PlacedGroup(*placed, group_rate is not None, kept_full))
        return groups

    def _find_excluded(self, rates: Collection[KeyPath]) -> dict[Path, KeyPath]:
        """Returns {path: key path} of the parameters that a user leaves out.

        Hooks may score some parameters only: the sites have them all.
        """
        if self.sites is None:
            return {}
        matrices = self.graph.matrices if self.sites.has_user_filter else frozenset[Path]()
        return {
            x.path: key_path
            for key_path, x in self.graph.parameters.match(self.sites.params).items()
            if _is_inexact(x)
            and key_path not in rates
            and (x.path in matrices or self.sites.is_named(key_path))
        }

    def check_grouped(self, groups: Sequence[PlacedGroup], sparsities: Sparsities) -> None:
        """Raises a ValueError for a parameter with a sparsity that is in no group."""
        grouped = {key_path for group in groups for key_path, _, _ in group.members}
        for key_path in trees.leaves_by_path(sparsities):
            if key_path in grouped:
                continue
            path = trees.path_names(key_path)
            texts = [f"axis {x.axis}: {x.explain()}" for x in self.graph.refused if x.path == path]
            raise ValueError(
                f"{trees.path_string(key_path)!r}, which has a sparsity, has no channels that can "
                f"be removed: {'; '.join(texts) or 'its axes are parts of groups'}. Keep it dense "
                "with filter_fn or custom_sparsity_map={path: None}."
            )

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
            return _spread_masks(groups, choose(*by_path, extra), by_path[0])

        masks: list[jax.Array] = []
        if key_paths:
            masks = sharding.shard_like(leaves[0], spread_chosen, leaves, extra)
            masks = [*map(sharding.place_like, leaves[0], masks)]
        masks_by_path = dict(zip(key_paths, masks, strict=True))
        for key_path, leaf in _list_empty(member_trees[0]).items():
            masks_by_path.setdefault(key_path, jnp.ones(leaf.shape, jnp.uint8))
        return trees.map_matched(lambda key_path, _: masks_by_path.get(key_path), member_trees[0])

    def _sum_importance(self, groups: Sequence[PlacedGroup], leaves: Leaves) -> list[jax.Array]:
        """Returns the importance of each group: [channels], or [layers, channels]."""
        if self.importance is not None:
            return [self._read_importance(group) for group in groups]
        scores = {x.key_path: leaves[x.key_path] for group in groups for x in group.scored}
        powers = [x.astype(promote(x.dtype, jnp.float32)) for x in scores.values()]
        if self.order == 2:
            powers = [jnp.square(x) for x in scale_to_one(powers)[0]]
        else:
            powers = scale_for_sums(powers, sum(x.size for x in powers))
        by_path = dict(zip(scores, powers, strict=True))
        totals = [_sum_members(group, by_path, self.normalize) for group in groups]
        return [jnp.abs(x) if self.order == 1 else jnp.sqrt(x) for x in totals]

    def _read_importance(self, group: PlacedGroup) -> jax.Array:
        size, name = group.channels.size, group.full.name
        if size != group.full.size:
            raise ValueError(
                f"importance[{name!r}] is that of {group.full.size} channels, of which {size} are "
                "left. Rank the groups of the smaller model, and give Coupled its graph."
            )
        return jnp.asarray((self.importance or {})[name])

    # Numbers of channels.

    def count_by_sparsity(self, groups: Sequence[PlacedGroup]) -> ChannelCounts:
        """Counts the channels of each group that stay, or whose cost may stay under `across`."""
        return self._count(groups)[0]

    def _count(self, groups: Sequence[PlacedGroup]) -> tuple[ChannelCounts, ChannelCounts]:
        """Returns the numbers of `count_by_sparsity`, and the smallest numbers that may stay."""
        final = self._share_widths(groups)
        counts: list[PyTree] = []
        fewest: list[PyTree] = []
        for group in groups:
            n = group.full.size
            count: PyTree = num_kept(n, group.sparsity)  # an error outside [0, 1]
            if self.across:
                rate = _namespace(count).float32(group.sparsity)
                count = np.float32(n) * (1 - rate.clip(0, 1))
            if group.full.variable in final:
                at_end = final[group.full.variable]
                count = _count_on_ramp(n, at_end, group.sparsity, group.target)
            least: PyTree = min(self.min_channels or 1, n)
            if self.across and self.min_channels is None:
                # A tenth stays at least, or fewer if the group's own sparsity asks for fewer.
                least = _namespace(count).int32(count).clip(1, -(-n // 10))
            limited = self._limit(group, 0 if self.across else count, least)
            if self.across:
                limited = _namespace(count, limited).maximum(count, limited)
            counts.append(limited)
            fewest.append(least)
        return counts, fewest

    def _limit(self, group: PlacedGroup, count: PyTree, least: PyTree) -> PyTree:
        """Applies `round_to` and the smallest number that may stay to a number of channels."""
        n, multiple = group.full.size, self.round_to
        if multiple > n:
            raise ValueError(
                f"round_to = {multiple} cannot be met by the group {group.full.name!r} of {n} "
                "channels. Give a smaller number, or leave its parameters out with filter_fn."
            )
        xp = _namespace(count, least)
        limited = xp.clip(-(-xp.maximum(count, least) // multiple) * multiple, least, n)
        return limited if xp is jnp else int(limited)

    def _share_widths(self, groups: Sequence[PlacedGroup]) -> dict[Variable, PyTree]:
        """Returns the numbers of channels of groups that share widths, at the end of a ramp."""
        by_variable = {group.full.variable: group for group in groups}

        def limit(variable: Variable, count: PyTree) -> PyTree:
            least = min(self.min_channels or 1, variable.size)
            return self._limit(by_variable[variable], count, least)

        widths = {
            width: [variable for variable in width.variables if variable in by_variable]
            for group in groups
            for width in group.widths
        }
        # A group that is all of some axis keeps as many channels as its sparsity says.
        alone = {factors[0] for factors in widths.values() if len(factors) == 1}
        alone |= {group.full.variable for group in groups if group.has_rate}
        counts: dict[Variable, PyTree] = {}
        for width, factors in sorted(widths.items(), key=lambda pair: len(pair[1])):
            if alone.issuperset(factors):
                continue
            for variable in alone.intersection(factors) - counts.keys():
                count = num_kept(variable.size, by_variable[variable].target)
                counts[variable] = limit(variable, count)
            if undecided := [variable for variable in factors if variable not in counts]:
                counts = _share_width(width, undecided, counts, limit)
        return {variable: count for variable, count in counts.items() if variable not in alone}

    def _count_across(
        self,
        groups: Sequence[PlacedGroup],
        importance: Sequence[jax.Array],
        tree: PyTree,
        allowed: ChannelCounts,
        least: ChannelCounts,
    ) -> list[jax.Array]:
        """Counts the channels that stay of each group: the best per cost, within a cost."""
        cost, sizes = self._count_cost(groups, tree), [group.full.size for group in groups]
        limit = jnp.stack([jnp.asarray(n, jnp.float32) for n in allowed])
        is_within = cost.make_limit(sizes, limit)

        def limit_counts(counts: Iterable[jax.Array]) -> jax.Array:
            limited = map(self._limit, groups, counts, least)
            return jnp.stack([jnp.asarray(n, jnp.uint32) for n in limited])

        ranks = self.rank_across(importance, cost.list_savings(sizes))
        return list(limit_counts(best_that_fit(ranks, lambda n: is_within(limit_counts(n)))))

    def _find_gone(self, tree: PyTree) -> dict[Variable, Fraction]:
        """Returns {variable: 0} of the groups that have lost all channels."""
        if not _list_empty(tree):
            return {}
        arrays, leaves = trees.leaves_by_path(tree), self.graph.parameters.match(tree)
        shapes = {parameter.path: arrays[key_path].shape for key_path, parameter in leaves.items()}
        removal = self.graph.removal
        axes = removal.list_parameter_axes()
        sizes = solve_sizes(axes, shapes, self.plan, removal.may_be_empty)
        return {variable: Fraction(0) for variable, size in sizes.items() if not size}

    def _count_cost(self, groups: Sequence[PlacedGroup], tree: PyTree) -> Cost:
        """Returns the cost of the model: multiply-adds, or bytes of the parameters of a tree."""
        sizes: dict[Variable, PyTree] = {**self._find_gone(tree)}
        sizes |= {group.full.variable: Cost.variable(i) for i, group in enumerate(groups)}
        if self.across == "nbytes":
            paths = {x.path for x in self.graph.parameters.match(tree).values()}
            return Cost.convert(self.graph.costs.count_small_bytes(sizes, paths))
        return Cost.convert(self.graph.costs.count_small_macs(sizes))


def _list_empty(tree: PyTree) -> Leaves:
    """Returns the arrays without entries, which groups that are gone have left."""
    leaves = trees.leaves_by_path(tree).items()
    return {key_path: x for key_path, x in leaves if hasattr(x, "shape") and not x.size}


_IMPLEMENTATION: type[TreeScope] = Coupled  # lets mypy check the methods


def _is_inexact(parameter: Parameter) -> bool:
    """Returns whether a parameter can have a mask."""
    return jnp.issubdtype(parameter.dtype, jnp.inexact)


def _list_keys(keys: str | Collection[str]) -> Collection[str]:
    return [keys] if isinstance(keys, str) else keys


def _scale_ramp(final: float, sparsity: chex.Numeric, target: chex.Numeric) -> chex.Numeric:
    """Returns a sparsity as far along its ramp to `final` as another along that to its target."""
    if sparsity is target:
        return final
    xp = _namespace(sparsity, target)
    share = xp.float32(sparsity) / xp.maximum(xp.float32(target), np.finfo(np.float32).tiny)
    # A parameter at 0 has no ramp.
    ramped: chex.Numeric = xp.where(xp.float32(target) > 0, xp.float32(final) * share, final)
    return ramped


def _namespace(*numbers: PyTree) -> ModuleType:
    """Returns jax.numpy if one of the numbers is traced, else numpy."""
    return jnp if any(map(is_traced, numbers)) else np


# Masks of channels.


def _mask_best(
    groups: Sequence[PlacedGroup], importance: Sequence[jax.Array], counts: ChannelCounts
) -> list[jax.Array]:
    """Returns masks of the most important channels of each group, and of each layer."""
    xp = _namespace(*counts)
    pairs = zip(counts, groups, strict=True)
    # One count for each slice: each layer of a group keeps as many.
    k = [
        xp.minimum(xp.asarray(k, np.uint32), group.channels.size)
        for k, group in pairs
        for _ in range(group.channels.layers or 1)
    ]
    return topk_masks([_rank_channels(x) for x in importance], xp.stack(k))


def _spread_masks(
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
            aligned = [n if i == axis else 1 for i, n in enumerate(shape)]
            by_path[key_path] *= axis_mask.reshape([layers, *aligned[1:]] if layers else aligned)
    return list(by_path.values())


def _find_active(group: PlacedGroup, masks: Leaves) -> jax.Array:
    """Returns uint8[channels]: 1 where entries stay in the first member of a group."""
    key_path, axis, positions = group.members[0]
    mask = masks[key_path]
    indexing = (0, axis) if group.channels.layers else (axis,)
    pooled = tuple(i for i in range(mask.ndim) if i not in indexing)
    return jnp.max(jnp.max(mask, axis=pooled)[..., positions], axis=-1)


def _rank_channels(importance: jax.Array, active: jax.Array | None = None) -> Candidates:
    """Returns the channels of a group as a search ranks them: layers of a scan are slices."""
    return Candidates(importance, active, importance.ndim - 1)


def _sum_members(group: PlacedGroup, powers: Leaves, normalize: bool) -> jax.Array:
    parts = []
    for (key_path, axis, positions), count in zip(group.scored, group.num_entries, strict=True):
        score = powers[key_path]
        summed = tuple(i for i in range(bool(group.channels.layers), score.ndim) if i != axis)
        part = jnp.sum(score, axis=summed)
        if not np.array_equal(positions, np.arange(score.shape[axis])[:, None]):
            part = jnp.sum(part[..., positions], axis=-1)
        parts.append(part / count if normalize else part)
    return sum(parts[1:], start=parts[0])


# Widths that groups share.


def _list_widths(weights: Iterable[tuple[Sequence[Axis], chex.Numeric]]) -> list[Width]:
    """Returns the axes of weights, which have these axes and targets, as widths."""

    def list_terms(axis: Axis) -> Iterator[Axis]:
        """Yields the products and variables that follow one another along an axis."""
        root = axis.root
        for part in root.parts if root.join == "sum" else ():
            yield from list_terms(part)
        if root.join != "sum":
            yield root

    widths: dict[tuple[Variable, ...], Width] = {}
    for axes, target in weights:
        for term in (term for axis in axes for term in list_terms(axis)):
            variables = tuple(list_variables(term))
            width = widths.setdefault(variables, Width(term, list(dict.fromkeys(variables))))
            width.targets.append(target)
    return list(widths.values())


def _find_largest(sparsities: Sequence[chex.Numeric]) -> chex.Numeric:
    if len(sparsities) == 1:
        return sparsities[0]
    if any(map(is_traced, sparsities)):
        return jnp.max(jnp.stack([jnp.float32(x) for x in sparsities]))
    return max(float(x) for x in jax.device_get(list(sparsities)))


def _share_width(
    width: Width,
    factors: Sequence[Variable],
    counts: Mapping[Variable, PyTree],
    limit: Callable[[Variable, PyTree], PyTree],
) -> dict[Variable, PyTree]:
    """Returns the numbers of channels of some factors, with which an axis has its width.

    From the smallest factor to the largest, each keeps an equal share of what remains, rounded; the
    largest makes up for the rounding.

    Args:
      width: the axis.
      factors: variables without a number.
      counts: numbers of other variables; those without one keep all channels.
      limit: raises a number to those that a group may keep.
    """
    axis, counts = width.axis, dict(counts)
    size: PyTree = num_kept(count_entries(axis, {}), _find_largest(width.targets))
    *smaller, largest = sorted(factors, key=lambda variable: variable.size)
    for index, variable in enumerate(smaller):
        remaining, n = count_entries(axis, counts), variable.size
        # n * (size / remaining) ** (1 / number of factors), rounded: a count of j or more, where
        # ((2 j - 1) / 2 n) ** number <= size / remaining. Products round alike everywhere.
        halves = np.float32(((2 * np.arange(1, n + 1) - 1) / (2 * n)) ** (len(factors) - index))
        xp = _namespace(size, remaining)
        fits = xp.float32(size) >= xp.float32(remaining) * halves
        counts[variable] = limit(variable, xp.sum(fits, dtype=np.int32))
    without = count_entries(axis, counts | {largest: 0})
    per_channel = count_entries(axis, counts | {largest: 1}) - without
    double = 2 * (size - without) + per_channel  # rounded to the nearest number
    counts[largest] = limit(largest, double // (2 * per_channel))
    return counts


def _count_on_ramp(
    n: int, final: PyTree, sparsity: chex.Numeric, target: chex.Numeric
) -> chex.Numeric:
    """Returns n - (n - final) * sparsity / target, rounded: `final` at the target.

    Numbers that make up for the rounding of others rise and fall with the sparsity; along a ramp
    they must not rise.
    """
    if sparsity is target:
        return final
    xp = _namespace(final, sparsity, target)
    numbers = np.arange(1, n + 1)
    removed = n - xp.asarray(final)
    # Products, which round alike everywhere, in place of a quotient
    products = (2 * removed).astype(np.float32) * xp.float32(sparsity)
    is_removed = (numbers <= removed) & (
        products >= np.float32(2 * numbers - 1) * xp.float32(target)
    )
    return n - xp.sum(is_removed, dtype=np.int32)
