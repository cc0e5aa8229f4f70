"""`Coupled`: a scope in which whole channels compete, with all that belongs to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact, sharding, trees
from sparsity.core.checks import check_bool, check_int, is_traced
from sparsity.core.trees import KeyPath, PyTree
from sparsity.graph.channels import ChannelGroup
from sparsity.graph.dims import Dim
from sparsity.graph.graph import Graph
from sparsity.graph.uses import Path
from sparsity.masks import Pattern, TopkFn
from sparsity.masks.costs import first_that_fits
from sparsity.selection import Leaf, Scores, computed, moved_masks, topk_masks


@dataclasses.dataclass(frozen=True)
class Coupled:
    """Channels that live and die together are kept or removed as a whole, by all their members.

    A channel's importance is the sum of its entries' scores over all members: kernels in and out,
    biases, scales and shifts. Of a group of n channels at sparsity s `num_kept(n, s)` stay, where s
    is the largest sparsity among its members that have one; all members get masks. Each layer of a
    scan chooses its own channels, where they live within a layer. What is masked can be cut by
    `sparsity.shrink`; n is that of `graph` in the smaller model, too, so that a ramp goes on.

    SET and RigL keep the number of channels. One that grows starts at 0 on both sides; where its
    activation maps 0 to 0, as ReLU does, no gradient reaches it from there. Choose a pruner then.

    Attributes:
      graph: the graph of the model, from `sparsity.trace`.
      order: 1 sums scores, with their sign where an algorithm has one (|w g| becomes the absolute
        value of the sum of w g); 2 takes the root of the sum of squares.
      normalize: divide what a member adds by its number of entries in a channel.
      across: let groups compete by importance per multiply-add: what stays costs no more
        multiply-adds than the sparsities leave group by group.
      round_to: the number of channels that stay is rounded up to a multiple of it; or a function of
        that number.
      min_channels: at least so many stay in every group.

    Sources: Fang et al. 2023, "DepGraph"; Molchanov et al. 2019, "Importance Estimation for Neural
    Network Pruning".
    """

    graph: Graph
    _: dataclasses.KW_ONLY
    order: int = 1
    normalize: bool = False
    across: bool = False
    round_to: int | Callable[[chex.Numeric], chex.Numeric] = 1
    min_channels: int = 1

    takes_signed_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.graph, Graph):
            raise ValueError(f"graph must be made by sparsity.trace, got {self.graph!r}.")
        if self.order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got order = {self.order!r}.")
        check_bool("normalize", self.normalize)
        check_bool("across", self.across)
        check_int("min_channels", self.min_channels, 1)
        if not callable(self.round_to):
            check_int("round_to", self.round_to, 1)

    def check(self, pattern: object, batch_axes: object, topk_fn: TopkFn | None) -> None:
        """Raises a ValueError for what selects by itself: patterns, batch axes, a topk_fn."""
        if isinstance(pattern, Pattern) and not pattern.is_elementwise:
            raise ValueError(
                "Coupled removes whole channels and needs sparsity_type = Unstructured(), got "
                f"{pattern!r}."
            )
        if topk_fn is not None or (not callable(batch_axes) and batch_axes):
            raise ValueError(
                "Coupled finds channels in the graph and needs batch_axes = 0 and topk_fn = None, "
                f"got batch_axes = {batch_axes!r}, topk_fn = {topk_fn!r}."
            )

    def is_scored(self, graph: Graph, path: Path, axis: int) -> bool:
        """Whether a member of a group adds to its importance; all do, unless a subclass differs."""
        return True

    def masked(self, params: PyTree, sparsities: PyTree) -> set[KeyPath]:
        """Paths of the leaves that get masks: all members of groups that have a sparsity."""
        groups = self._groups(params, sparsities)
        return {path for group in groups for path, _, _ in group.members}

    def scored(self, params: PyTree, sparsities: PyTree) -> set[KeyPath]:
        """Paths of the leaves that add to the importance of groups that have a sparsity."""
        groups = self._groups(params, sparsities)
        return {path for group in groups for path, _, _ in group.scored}

    def left(self, params: PyTree, sparsities: PyTree) -> dict[Dim, int]:
        """How many channels stay of each group, of Python numbers."""
        groups = self._groups(params, sparsities)
        return {group.channels.variable: int(self._kept(group)) for group in groups}

    def select_tree(self, scores: PyTree, sparsities: PyTree) -> PyTree:
        """Returns masks of all members; the channels of the highest importance stay."""

        def choose(
            groups: Sequence[PlacedGroup],
            leaves: Mapping[KeyPath, jax.Array],
            kept: Sequence[chex.Numeric],
            _: None,
        ) -> list[jax.Array]:
            importance = self._importance(groups, leaves)
            if self.across:
                return self._select_across(groups, importance, kept)
            return _best(groups, importance, kept)

        return self.masks_by(choose, scores, sparsities)

    def masks_by(
        self, choose: Choose, tree: PyTree, sparsities: PyTree, given: PyTree = None
    ) -> PyTree:
        """Returns masks of all members, of the channels that a function chooses.

        Args:
          choose: `choose(groups, leaves, kept, given)` returns uint8[channels] for each group, or
            [layers, channels]; it gets the leaves of all members, and how many channels stay.
          tree: of these leaves.
          sparsities: tree of sparsities, `None` for leaves that have none.
          given: arrays that `choose` needs beside.
        """
        groups = self._groups(tree, sparsities)
        kept = [self._kept(group) for group in groups]

        def select(leaves: Mapping[KeyPath, jax.Array], how: Any) -> list[jax.Array]:
            return choose(groups, leaves, *how)

        return self._masks(groups, tree, select, [tree], (kept, given))

    def move_tree(
        self, masks: PyTree, drop: PyTree, grow: PyTree, drop_fraction: chex.Numeric
    ) -> PyTree:
        """Returns masks with as many channels of each group as before, some of them replaced."""
        present = trees.leaves_by_path(masks)
        sparsities = trees.map_matched(lambda path, _: 0.0 if path in present else None, drop)
        groups = [
            group
            for group in self._groups(drop, sparsities)
            if all(path in present for path, _, _ in group.members)
        ]

        def move(
            masks: Mapping[KeyPath, jax.Array],
            drop: Mapping[KeyPath, jax.Array],
            grow: Mapping[KeyPath, jax.Array],
            fraction: chex.Numeric,
        ) -> list[jax.Array]:
            active = [_stays(group, masks) for group in groups]
            drops = zip(self._importance(groups, drop), active, strict=True)
            ranked = [_channels(importance, on) for importance, on in drops]
            others = [_channels(x) for x in self._importance(groups, grow)]
            return moved_masks(ranked, others, fraction)

        return self._masks(groups, masks, move, [masks, drop, grow], drop_fraction)

    # What follows works on the groups as they lie in a tree.

    def _graph_of(self, tree: PyTree) -> Graph:
        """The graph of the model that has these leaves, if it was shrunken meanwhile."""
        leaves = trees.leaves_by_path(tree).items()
        return self.graph.of_tree(
            {trees.path_names(path): x for path, x in leaves if hasattr(x, "shape")}
        )

    def _groups(self, tree: PyTree, sparsities: PyTree) -> list[PlacedGroup]:
        """The groups that have a sparsity, with their members in a tree."""
        graph = self._graph_of(tree)
        places = {
            leaf.path: path
            for path, leaf in graph.leaves_of(tree).items()
            if jnp.issubdtype(leaf.dtype, jnp.inexact)  # others can have no mask
        }
        wanted = trees.leaves_by_path(sparsities)
        found = []
        for group in graph.groups:
            members, scored = [], []
            for (path, axis), positions in zip(group.members, group.positions, strict=True):
                if path in places:
                    members.append((places[path], axis, positions))
                    if self.is_scored(graph, path, axis):
                        scored.append(members[-1])
            own = [wanted[path] for path, _, _ in members if wanted.get(path) is not None]
            if own:
                largest = own[0] if len(own) == 1 else _largest(own)
                whole = self.graph.whole_group(group, graph)
                found.append(PlacedGroup(group, whole, members, scored, largest))
        return found

    def _kept(self, group: PlacedGroup) -> Any:
        """How many channels of a group stay, of those that the model of `graph` has."""
        return self._rounded(group.whole, exact.num_kept(group.whole.size, group.sparsity))

    def _rounded(self, channels: ChannelGroup, kept: Any) -> Any:
        """A number of channels as `round_to` and `min_channels` make it."""
        n = channels.size
        if callable(self.round_to):
            kept = self.round_to(kept)
        elif self.round_to > 1:
            if self.round_to > n:
                raise ValueError(
                    f"round_to = {self.round_to} cannot be met by the group {channels.name!r} of "
                    f"{n} channels. Give a smaller number, a function of the number that would "
                    "stay, or leave its leaves out with filter_fn."
                )
            kept = -(-kept // self.round_to) * self.round_to
        if is_traced(kept):
            return jnp.clip(kept, min(self.min_channels, n), n)
        return min(max(int(kept), self.min_channels), n)

    def _masks(
        self,
        groups: Sequence[PlacedGroup],
        tree: PyTree,
        choose: Callable[..., list[jax.Array]],
        trees_of_members: Sequence[PyTree],
        how: Any,
    ) -> PyTree:
        """The masks of a tree, from those of channels that `choose` makes of trees by path."""
        for group in groups:
            if not group.scored:
                raise ValueError(
                    f"No product reads the channels of the group {group.channels.name!r}, so that "
                    "they have no importance here. Leave its leaves out with filter_fn."
                )
        paths = list(dict.fromkeys(path for group in groups for path, _, _ in group.members))
        by_path = [trees.leaves_by_path(x) for x in trees_of_members]
        members = [[computed(leaves[path]) for path in paths] for leaves in by_path]

        def of_members(members: list[list[jax.Array]], how: Any) -> list[jax.Array]:
            leaves = [dict(zip(paths, x, strict=True)) for x in members]
            return self._spread(groups, choose(*leaves, how), leaves[0])

        found = sharding.shard_like(members[0], of_members, members, how) if paths else []
        placed = map(sharding.place_like, members[0], found)
        masks = dict(zip(paths, placed, strict=True))
        return trees.map_matched(lambda path, _: masks.get(path), tree)

    def _importance(
        self, groups: Sequence[PlacedGroup], leaves: Mapping[KeyPath, jax.Array]
    ) -> list[jax.Array]:
        """[channels] of each group, or [layers, channels]."""
        return [self._of_group(group, leaves) for group in groups]

    def _of_group(self, group: PlacedGroup, leaves: Mapping[KeyPath, Any]) -> jax.Array:
        parts = []
        for path, axis, positions in group.scored:
            score = leaves[path]
            score = score.astype(jnp.promote_types(score.dtype, jnp.float32))
            places = positions.reshape(-1)
            if not np.array_equal(places, np.arange(score.shape[axis])):
                score = jnp.take(score, places, axis=axis)
            lead = (group.channels.layers,) if group.channels.layers else ()
            entries = jnp.moveaxis(score, axis, len(lead)).reshape(*lead, group.channels.size, -1)
            powers = entries if self.order == 1 else jnp.square(entries)
            part = exact.ordered_sum(powers, (entries.ndim - 1,))
            parts.append(part / entries.shape[-1] if self.normalize else part)
        total = exact.ordered_sum(jnp.stack(parts), (0,)) if len(parts) > 1 else parts[0]
        found: jax.Array = jnp.abs(total) if self.order == 1 else jnp.sqrt(total)
        return found

    def _select_across(
        self,
        groups: Sequence[PlacedGroup],
        importance: Sequence[jax.Array],
        kept: Sequence[Any],
    ) -> list[jax.Array]:
        """Under one threshold of importance per multiply-add; a bisection over thresholds."""
        graph, whole_groups = self.graph, [group.whole for group in groups]
        variables = [group.variable for group in whole_groups]
        dense = {variable: variable.size for variable in variables}
        whole: int = graph.macs_left(dense)
        ranked = []
        for variable, x in zip(variables, importance, strict=True):
            each = whole - graph.macs_left({variable: dense[variable] - 1})
            # Layers keep equally many: what counts is their average channel of each rank.
            average = jnp.mean(jnp.sort(x, descending=True), axis=0) if x.ndim == 2 else x
            ranked.append(average / jnp.float32(each))

        def left(counts: Sequence[Any]) -> jax.Array:
            by_variable = {
                v: jnp.asarray(n, jnp.float32) for v, n in zip(variables, counts, strict=True)
            }
            return jnp.asarray(graph.macs_left(by_variable), jnp.float32)

        allowed = left(kept)

        def counts(bits: jax.Array) -> list[Any]:
            threshold = lax.bitcast_convert_type(bits, jnp.float32)
            return [
                self._rounded(group, jnp.sum(x > threshold, dtype=jnp.int32))
                for group, x in zip(whole_groups, ranked, strict=True)
            ]

        highest = int(np.float32(np.inf).view(np.int32))  # bits are ordered as what they mean
        bits = first_that_fits(lambda x: left(counts(x)) <= allowed, 0, highest)
        return _best(groups, importance, counts(bits))

    def _spread(
        self,
        groups: Sequence[PlacedGroup],
        masks: Sequence[jax.Array],
        leaves: Mapping[KeyPath, jax.Array],
    ) -> list[jax.Array]:
        """The masks of leaves from those of channels."""
        found = {path: jnp.ones(leaf.shape, jnp.uint8) for path, leaf in leaves.items()}
        for group, mask in zip(groups, masks, strict=True):
            size, layers = group.channels.size, group.channels.layers
            for path, axis, positions in group.members:
                shape = leaves[path].shape
                label = np.full(shape[axis], -1)
                label[positions] = np.arange(size)[:, None]
                along = jnp.where(label < 0, jnp.uint8(1), mask[..., np.maximum(label, 0)])
                wide = [n if i == axis else 1 for i, n in enumerate(shape)]
                found[path] *= along.reshape([layers, *wide[1:]] if layers else wide)
        return list(found.values())


@dataclasses.dataclass(frozen=True)
class PlacedGroup:
    """A group as it lies in a tree.

    Attributes:
      channels: the group.
      whole: the same before the model was shrunken.
      members: (path, axis, positions) of all that goes with a channel.
      scored: of those that add to its importance.
      sparsity: of the group.
    """

    channels: ChannelGroup
    whole: ChannelGroup
    members: list[tuple[KeyPath, int, np.ndarray]]
    scored: list[tuple[KeyPath, int, np.ndarray]]
    sparsity: chex.Numeric


# From groups, the leaves of their members, how many channels stay, and more, to their masks.
Choose: TypeAlias = Callable[
    [Sequence[PlacedGroup], Mapping[KeyPath, jax.Array], Sequence[chex.Numeric], PyTree],
    list[jax.Array],
]


def _largest(sparsities: Sequence[chex.Numeric]) -> chex.Numeric:
    if any(map(is_traced, sparsities)):
        return jnp.max(jnp.stack([jnp.float32(x) for x in sparsities]))
    return max(float(x) for x in jax.device_get(list(sparsities)))


def _stays(group: PlacedGroup, masks: Mapping[KeyPath, jax.Array]) -> jax.Array:
    """uint8[channels]: which channels of a group stay in its first member."""
    path, axis, positions = group.members[0]
    mask = masks[path]
    own = (0, axis) if group.channels.layers else (axis,)
    others = tuple(i for i in range(mask.ndim) if i not in own)
    return jnp.max(mask, axis=others)[..., positions[:, 0]]


def _best(
    groups: Sequence[PlacedGroup], importance: Sequence[jax.Array], kept: Sequence[Any]
) -> list[jax.Array]:
    """Masks of the most important channels of each group, and of each layer."""
    sizes = [group.channels.size for group in groups]
    counts = [jnp.minimum(jnp.asarray(k, jnp.uint32), n) for k, n in zip(kept, sizes, strict=True)]
    times = [group.channels.layers or 1 for group in groups]
    low = jnp.stack([k for k, n in zip(counts, times, strict=True) for _ in range(n)])
    return topk_masks([_channels(x) for x in importance], (low & 0, low))


def _channels(importance: jax.Array, active: jax.Array | None = None) -> Leaf:
    """The channels of a group as a search takes them: the layers of a scan are slices."""
    return Leaf(Scores.of(importance), active, importance.ndim - 1)
