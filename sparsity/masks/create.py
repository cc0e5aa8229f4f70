"""Creates and moves masks: of single tensors by pattern, of trees by scope."""

from __future__ import annotations

from collections.abc import Mapping

import chex
import jax

from sparsity.core import trees
from sparsity.core.checks import check_fraction
from sparsity.core.trees import Masks, Params, PyTree, ScoreTree, Sparsities
from sparsity.masks.scopes import MovingLeaf, Scope, ScoredLeaf, TreeScope
from sparsity.masks.sites import Site, TopkFn
from sparsity.patterns import SparsityType
from sparsity.selection import Scores, compute_array


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


def create_masks(
    scope: Scope | TreeScope,
    sites: Mapping[trees.KeyPath, Site],
    scores: ScoreTree,
    sparsities: Sparsities,
    targets: Sparsities | None = None,
    topk_fn: TopkFn | None = None,
) -> Masks:
    """Creates the masks of a tree.

    Args:
      scope: decides which weights compete.
      sites: the sites of the parameters.
      scores: tree of scores, stored or lazy.
      sparsities: tree of sparsities, `None` for leaves that stay dense.
      targets: sparsities at the end of a ramp, for N:M; `sparsities` by default.
      topk_fn: as in `create_mask`.

    Returns:
      Tree like `scores` of masks, `None` for leaves that stay dense.

    Raises:
      ValueError: a sparsity lies outside [0, 1] or a pattern does not fit; the leaf is named.
    """
    if isinstance(scope, TreeScope):
        return scope.select_tree(jax.tree.map(compute_array, scores), sparsities)
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
            leaves.append(ScoredLeaf(sites[path], score, sparsity, target))

    trees.map_matched(collect, scores, sparsities, targets, role="scores")
    masks = _by_path([leaf.site.path for leaf in leaves], scope.select(leaves, topk_fn))
    return trees.map_matched(lambda path, _: masks.get(path), scores)


def move_masks(
    scope: Scope | TreeScope,
    sites: Mapping[trees.KeyPath, Site],
    masks: Masks,
    drop_scores: PyTree,
    grow_scores: PyTree,
    drop_fraction: chex.Numeric,
) -> Masks:
    """Moves the masks of a tree: drops active weights and grows as many others, within the scope.

    Args:
      scope: decides which weights compete.
      sites: the sites of the parameters.
      masks: tree of the current masks.
      drop_scores: tree of scores, stored or lazy; the active weights with the lowest are dropped.
      grow_scores: tree of scores, stored or lazy; the weights not kept with the highest grow.
      drop_fraction: scalar in [0, 1].

    Returns:
      Tree like `masks`.
    """
    check_fraction("drop_fraction", drop_fraction)
    if isinstance(scope, TreeScope):
        drop_scores, grow_scores = jax.tree.map(compute_array, (drop_scores, grow_scores))
        return scope.move_tree(masks, drop_scores, grow_scores, drop_fraction)
    leaves: list[MovingLeaf] = []

    def collect(
        path: trees.KeyPath,
        drop: jax.Array | Scores,
        grow: PyTree,
        mask: jax.Array | None,
    ) -> None:
        if mask is not None:
            leaves.append(MovingLeaf(sites[path], mask, drop, grow))

    trees.map_matched(collect, drop_scores, grow_scores, masks, role="drop scores")
    moved = _by_path([leaf.site.path for leaf in leaves], scope.move(leaves, drop_fraction))
    return trees.map_matched(lambda path, _: moved[path], masks)


def masked_paths(
    scope: Scope | TreeScope, params: Params, sparsities: Sparsities
) -> set[trees.KeyPath]:
    """Returns the paths of the leaves with masks: those with a sparsity, or as `TreeScope` says."""
    if isinstance(scope, TreeScope):
        return scope.masked(params, sparsities)
    return set(trees.leaves_by_path(sparsities))


def check_user_mask(
    scope: Scope | TreeScope, sites: Mapping[trees.KeyPath, Site], path: trees.KeyPath
) -> None:
    """Raises a ValueError if a leaf has a mask but no target, and could get no later mask.

    Args:
      scope: scope that would create the next mask.
      sites: the sites of the parameters.
      path: path of the leaf.
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


def _by_path(paths: list[trees.KeyPath], masks: list[jax.Array]) -> dict[trees.KeyPath, jax.Array]:
    return dict(zip(paths, masks, strict=True))
