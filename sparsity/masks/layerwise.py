"""`Layerwise`: each parameter keeps the best of its units: entries, blocks or channels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sparsity.core import exact, sharding
from sparsity.core.checks import DataclassBase, is_traced
from sparsity.masks.bits import are_kept
from sparsity.masks.moves import move_units
from sparsity.masks.scopes import AnySite, MovingSite, ScoredSite, check_slice_sizes, find_site_mesh
from sparsity.masks.sites import BatchAxes, PatternChoice, Site, TopkFn
from sparsity.patterns.base import expand_units, is_ranking_units, pool_units
from sparsity.selection import Candidates, num_kept, topk_masks
from sparsity.selection.keys import readable


@dataclasses.dataclass(frozen=True)
class Layerwise(DataclassBase):
    """Ranks the weights of each parameter alone, at its sparsity; with batch axes, of each slice.

    An override of `select` gets parameters whose leading `site.batch_axes` index slices.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"large": jnp.array([[10.0, 40.0]]), "small": jnp.array([[1.0, 4.0]])}
      >>> half = sparsity.Uniform(0.5)
      >>> pruner = sparsity.MagnitudePruning(scope=Layerwise(), sparsity_distribution_fn=half)
      >>> {name: mask.tolist() for name, mask in pruner.instant_sparsify(params)[1].items()}
      {'large': [[0, 1]], 'small': [[0, 1]]}
    """

    # Whether a mask depends on the scores of its slice alone, so that slices are pruned one by one.
    per_slice: ClassVar[bool] = True
    keeps_targets: ClassVar[bool] = True

    def check(self, pattern: PatternChoice, batch_axes: BatchAxes, topk_fn: TopkFn | None) -> None:
        """Accepts all patterns, batch axes and functions."""

    def select(self, scored_sites: Sequence[ScoredSite], topk_fn: TopkFn | None) -> list[jax.Array]:
        """Returns a mask for each parameter, by the pattern of the parameter."""

        def select_alone(scored: ScoredSite) -> jax.Array:
            site = scored.site
            return site.pattern.select(
                scored.scores,
                scored.sparsity,
                target=scored.target,
                batch_axes=site.batch_axes,
                topk_fn=topk_fn,
            )

        if topk_fn is not None:
            return [select_alone(scored) for scored in scored_sites]
        check_slice_sizes(scored_sites)
        return _search_alike(scored_sites, _select_units, select_alone)

    def move(
        self, moving_sites: Sequence[MovingSite], drop_fraction: chex.Numeric
    ) -> list[jax.Array]:
        """Returns masks that keep the number of active weights of each parameter."""

        def move_alone(moving: MovingSite) -> jax.Array:
            site = moving.site
            scores = moving.drop_scores, moving.grow_scores
            return site.pattern.move(
                moving.mask, *scores, drop_fraction, batch_axes=site.batch_axes
            )

        check_slice_sizes(moving_sites)
        return _search_alike(
            moving_sites, functools.partial(_move_units, drop_fraction), move_alone
        )


def is_layerwise(scope: object) -> bool:
    """Returns whether a scope makes the masks of `Layerwise`, so that a pruner need not call it."""
    if not isinstance(scope, Layerwise):
        return False
    cls = type(scope)
    return cls.select is Layerwise.select and cls.move is Layerwise.move


def _search_alike(
    competitors: Sequence[AnySite],
    search: Callable[[Sequence[AnySite]], list[jax.Array]],
    mask_alone: Callable[[AnySite], jax.Array],
) -> list[jax.Array]:
    """Returns masks: by one search for patterns that rank units, one by one for all others.

    No program reads arrays of several meshes.
    """
    masks: dict[int, jax.Array] = {}
    members_by_mesh: dict[Mesh | None, list[int]] = {}
    for i, competitor in enumerate(competitors):
        if is_ranking_units(competitor.site.pattern):
            members_by_mesh.setdefault(find_site_mesh(competitor), []).append(i)
        else:
            masks[i] = mask_alone(competitor)
    for members in members_by_mesh.values():
        masks.update(zip(members, search([competitors[i] for i in members]), strict=True))
    return [masks[i] for i in range(len(competitors))]


def _select_units(scored_sites: Sequence[ScoredSite]) -> list[jax.Array]:
    """Returns the masks of the highest units of each parameter, or of each slice of a parameter."""
    sites = [scored.site for scored in scored_sites]

    def select(scores: Sequence[jax.Array], sparsities: Sequence[chex.Numeric]) -> list[jax.Array]:
        units = [_pool_scores(*x) for x in zip(sites, scores, strict=True)]
        sizes = [candidates.slice_size for candidates in units]
        leaf_index = np.repeat(np.arange(len(units)), [x.num_slices for x in units])  # of slices
        k: exact.Words | np.ndarray
        if any(map(is_traced, sparsities)):
            k = exact.as_words(count_units(sizes, sparsities)[leaf_index])
        else:
            pairs = zip(sizes, jax.device_get(list(sparsities)), strict=True)
            counts = np.array([num_kept(n, float(x)) for n, x in pairs], np.uint32)[leaf_index]
            k = np.stack([counts & 0, counts])
        masks = topk_masks(units, k)
        return [_expand_mask(*x) for x in zip(sites, masks, scores, strict=True)]

    scores = [scored.scores for scored in scored_sites]
    return sharding.shard_like(scores, select, scores, [x.sparsity for x in scored_sites])


def _move_units(drop_fraction: chex.Numeric, moving_sites: Sequence[MovingSite]) -> list[jax.Array]:
    """Returns masks with some active units of each parameter, or of each slice, replaced."""
    sites = [moving.site for moving in moving_sites]

    def move(
        masks: Sequence[jax.Array],
        drop: Sequence[jax.Array],
        grow: Sequence[jax.Array],
        fraction: chex.Numeric,
    ) -> list[jax.Array]:
        active = [_pool_scores(*x) for x in zip(sites, drop, masks, strict=True)]
        growing = [_pool_scores(*x) for x in zip(sites, grow, strict=True)]
        moved = move_units(active, growing, fraction)
        return [_expand_mask(*x) for x in zip(sites, moved, masks, strict=True)]

    masks = [moving.mask for moving in moving_sites]
    drop = [moving.drop_scores for moving in moving_sites]
    grow = [moving.grow_scores for moving in moving_sites]
    return sharding.shard_like(masks, move, masks, drop, grow, drop_fraction)


def _pool_scores(site: Site, scores: jax.Array, mask: jax.Array | None = None) -> Candidates:
    """Returns the scores of the units of a parameter; with a mask, of the units that it keeps."""
    pattern, batch_axes = site.pattern, site.batch_axes
    if pattern.is_elementwise:
        return Candidates(readable(scores), mask, batch_axes)
    units = readable(pool_units(pattern, scores, batch_axes, site.name))
    if mask is not None:  # all ones or all zeros within a unit
        mask = are_kept(pattern.pool(mask, batch_axes))
    return Candidates(units, mask, batch_axes + pattern.group_axes)


def _expand_mask(site: Site, units: jax.Array, like: jax.Array) -> jax.Array:
    """Returns the mask of the entries of a parameter from the mask of its units."""
    pattern = site.pattern
    if pattern.is_elementwise:
        return units
    return expand_units(pattern, units, like.shape, site.batch_axes, site.name)


def count_units(sizes: Sequence[int], sparsities: Sequence[chex.Numeric]) -> jax.Array:
    """Counts the units that stay of each parameter."""
    return jnp.asarray(num_kept(np.array(sizes), stack_sparsities(sparsities)))


def stack_sparsities(sparsities: Sequence[chex.Numeric]) -> jax.Array:
    """Returns the sparsities of parameters as float32[parameters]."""
    return jnp.stack([jnp.float32(sparsity) for sparsity in sparsities])
