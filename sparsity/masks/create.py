"""Creates and moves masks: of single tensors by pattern, of trees by scope."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import chex
import jax

from sparsity.core import trees
from sparsity.core.checks import check_fraction
from sparsity.core.trees import Masks, Params, PyTree, ScoreTree, Sparsities
from sparsity.masks.scopes import MovingLeaf, Scope, ScoredLeaf, TreeScope
from sparsity.masks.sites import Site, TopkFn
from sparsity.patterns import SparsityType
from sparsity.selection import Scores


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
    `max(1, round_half_even(n * (1 - float32(sparsity))))` are kept; of `FanIn`, of the n inputs of
    every group.

    Args:
      scores: [*batch, ...] array of any real dtype.
      sparsity: scalar in [0, 1], Python or traced.
      sparsity_type: pattern of the entries that are kept or removed together.
      target: for N:M, the sparsity at which n of m entries are kept: a lower `sparsity` keeps
        proportionally more of each group. `None` means `sparsity` itself.
      batch_axes: number of leading axes that index separate slices.
      topk_fn: `topk_fn(scores, sparsity) -> mask` replaces the selection; called with the scores
        of the entries, blocks or channels of one slice, or of the inputs of one group.

    Returns:
      uint8 mask of the shape of `scores`.
    """
    if not isinstance(sparsity_type, SparsityType):
        raise ValueError(
            f"sparsity_type must be a pattern such as NByM(2, 4), got sparsity_type = "
            f"{sparsity_type!r}."
        )
    check_fraction("sparsity", sparsity)
    return sparsity_type.select(
        scores, sparsity, target=target, batch_axes=batch_axes, topk_fn=topk_fn
    )


def adapt_scope(
    scope: Scope | TreeScope,
    sites: Mapping[trees.KeyPath, Site] | None = None,
    targets: Sparsities | None = None,
    topk_fn: TopkFn | None = None,
) -> TreeScope:
    """Returns a `TreeScope` as it is, and a `Scope` as a `LeafScope` with the other arguments."""
    return (
        scope if isinstance(scope, TreeScope) else LeafScope(scope, sites or {}, targets, topk_fn)
    )


@dataclasses.dataclass(frozen=True)
class LeafScope(TreeScope):
    """Makes masks of trees by a `Scope`, which gets the parameters with a sparsity or a mask.

    Attributes:
      scope: decides which weights compete.
      sites: the sites of the parameters.
      targets: sparsities at the end of a ramp, for N:M; by default the sparsities of a call.
      topk_fn: as in `create_mask`.
    """

    scope: Scope
    sites: Mapping[trees.KeyPath, Site]
    targets: Sparsities | None = None
    topk_fn: TopkFn | None = None

    def check(self, pattern: object, batch_axes: object, topk_fn: TopkFn | None) -> None:
        self.scope.check(pattern, batch_axes, topk_fn)

    def masked(self, params: Params, sparsities: Sparsities) -> set[trees.KeyPath]:
        return set(trees.leaves_by_path(sparsities))

    def select_tree(self, scores: ScoreTree, sparsities: Sparsities) -> Masks:
        leaves: list[ScoredLeaf] = []

        def collect(
            path: trees.KeyPath,
            score: jax.Array | Scores,
            sparsity: chex.Numeric | None,
            target: chex.Numeric | None,
        ) -> None:
            if sparsity is not None:
                check_fraction(f"the sparsity of {trees.path_string(path)!r}", sparsity)
                target = sparsity if target is None else target
                leaves.append(ScoredLeaf(self.sites[path], score, sparsity, target))

        trees.map_matched(collect, scores, sparsities, self.targets, role="scores")
        return _place(leaves, self.scope.select(leaves, self.topk_fn), scores)

    def move_tree(
        self, masks: Masks, drop: PyTree, grow: PyTree, drop_fraction: chex.Numeric
    ) -> Masks:
        leaves: list[MovingLeaf] = []

        def collect(
            path: trees.KeyPath,
            drop: jax.Array | Scores,
            grow: PyTree,
            mask: jax.Array | None,
        ) -> None:
            if mask is not None:
                leaves.append(MovingLeaf(self.sites[path], mask, drop, grow))

        trees.map_matched(collect, drop, grow, masks, role="drop scores")
        return _place(leaves, self.scope.move(leaves, drop_fraction), masks)


def _place(
    leaves: Sequence[ScoredLeaf] | Sequence[MovingLeaf], masks: Sequence[jax.Array], like: PyTree
) -> Masks:
    """Returns the masks of parameters in a tree like `like`, with `None` elsewhere."""
    by_path = dict(zip([leaf.site.path for leaf in leaves], masks, strict=True))
    return trees.map_matched(lambda path, _: by_path.get(path), like)


def check_user_mask(
    scope: Scope | TreeScope, sites: Mapping[trees.KeyPath, Site], path: trees.KeyPath
) -> None:
    """Raises a ValueError if a parameter has a mask but no target, and could get no later mask.

    Args:
      scope: scope that would create the next mask.
      sites: the sites of the parameters.
      path: path of the parameter.
    """
    name = trees.path_string(path)
    try:
        if path not in sites:
            raise ValueError(f"{name!r} is no array of floating-point numbers.")
        scope.check(sites[path].pattern, sites[path].batch_axes, None)
    except ValueError as error:
        raise ValueError(
            f"The masks of wrap_optax have one for {name!r}, which has no target sparsity, but no "
            f"other could be made for it later. Give None for it there, or fix this: {error}"
        ) from error
