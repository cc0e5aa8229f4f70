"""Scopes decide which weights compete for a place in the masks.

A scope keeps as many weights as the sparsities ask for, and compares the weights of one parameter
or of all parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import (
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    TypeGuard,
    TypeVar,
    runtime_checkable,
)

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import checks, sharding, trees
from sparsity.core.trees import KeyPath, Masks, Params, PyTree, ScoreTree, Sparsities
from sparsity.masks.bits import are_kept
from sparsity.masks.sites import BatchAxes, PatternChoice, Site, TopkFn
from sparsity.patterns.base import expand_units, pool_units
from sparsity.selection import Candidates, move_units, num_kept, topk_masks
from sparsity.selection.keys import readable


class ScoredSite(NamedTuple):
    """Site of a parameter that needs a mask, with its scores and sparsities.

    Attributes:
      site: path, pattern and batch axes of the parameter.
      scores: scores of the entries.
      sparsity: sparsity at this step.
      target: sparsity at the end of a ramp.
    """

    site: Site
    scores: jax.Array
    sparsity: chex.Numeric
    target: chex.Numeric


class MovingSite(NamedTuple):
    """Site of a parameter whose mask moves, with its mask and scores.

    Attributes:
      site: path, pattern and batch axes of the parameter.
      mask: the current mask.
      drop_scores: scores to drop by.
      grow_scores: scores to grow by.
    """

    site: Site
    mask: jax.Array
    drop_scores: jax.Array
    grow_scores: jax.Array


AnySite = TypeVar("AnySite", ScoredSite, MovingSite)
Arrays: TypeAlias = Sequence[jax.Array]


class Scope(Protocol):
    """Interface of `scope`: `Layerwise()`, `Global()`, or a custom class.

    A class may also state what holds for all of its masks, as class attributes that are True:

    - `per_slice`: a mask depends on the scores of its slice alone, so that `oneshot` prunes
      parameter by parameter, and `Compact.move` moves slice by slice.
    - `keeps_targets`: each slice keeps the number of entries that its pattern keeps at its
      sparsity, and moves keep this number. `use_compact_state`, `Compact.move` and
      `Uniform(entries=)` rely on it.
    - `keeps_total`: all parameters of one sparsity together keep `num_kept` of their entries.
      `Uniform(entries=)` relies on it.
    - `takes_signed_scores`: scores are summed, so that those of saliency keep their signs.

    A subclass inherits the statements: if its masks no longer keep one, it states False.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> class AboveOne:
      ...     def check(self, pattern, batch_axes, topk_fn):
      ...         pass
      ...
      ...     def select(self, scored_sites, topk_fn):
      ...         return [(scored.scores > 1).astype(jnp.uint8) for scored in scored_sites]
      ...
      ...     def move(self, moving_sites, drop_fraction):
      ...         raise NotImplementedError
      >>> half = sparsity.Uniform(0.5)
      >>> pruner = sparsity.MagnitudePruning(scope=AboveOne(), sparsity_distribution_fn=half)
      >>> pruner.instant_sparsify(jnp.array([[1.0, -3.0], [2.0, 0.5]]))[1]
      Array([[0, 1],
             [1, 0]], dtype=uint8)
    """

    def check(
        self, pattern: PatternChoice, batch_axes: BatchAxes, topk_fn: TopkFn | None, /
    ) -> None:
        """Raises a ValueError if the scope cannot create masks of this pattern.

        Called when an updater is created.

        Args:
          pattern: `sparsity_type` of the updater.
          batch_axes: `batch_axes` of the updater.
          topk_fn: `topk_fn` of the updater, if any.
        """

    def select(
        self, scored_sites: Sequence[ScoredSite], topk_fn: TopkFn | None, /
    ) -> list[jax.Array]:
        """Returns a mask for each parameter: uint8, of the shape of its scores.

        Args:
          scored_sites: each with a `site`, `scores`, the current `sparsity`, and the `target` at
            the end of a ramp.
          topk_fn: `topk_fn` of the updater, if any.
        """

    def move(
        self, moving_sites: Sequence[MovingSite], drop_fraction: chex.Numeric, /
    ) -> list[jax.Array]:
        """Returns each parameter's mask with a fraction of the active weights replaced.

        Args:
          moving_sites: each with a `site`, its `mask`, `drop_scores` and `grow_scores`.
          drop_fraction: fraction of the active weights to replace, in [0, 1].
        """


@runtime_checkable
class TreeScope(Protocol):
    """Interface of scopes within the package: trees in, trees out; see `adapt_scope`."""

    def bind(self, sites: Mapping[KeyPath, Site], targets: Sparsities | None) -> Self:
        """Returns the scope with the sites of an updater, and the ends of its ramp if any."""

    def check(self, pattern: PatternChoice, batch_axes: BatchAxes, topk_fn: TopkFn | None) -> None:
        """Raises a ValueError as `Scope.check` does."""

    def masked_paths(self, params: Params, sparsities: Sparsities) -> set[KeyPath]:
        """Returns the paths of the parameters that get masks."""

    def select_tree(self, scores: ScoreTree, sparsities: Sparsities) -> Masks:
        """Returns a tree of masks, `None` for parameters that stay dense."""

    def move_tree(
        self, masks: Masks, drop: PyTree, grow: PyTree, drop_fraction: chex.Numeric
    ) -> Masks:
        """Returns the masks with a fraction of the active weights or channels replaced."""


def find_missing_scope_method(scope: object) -> str | None:
    """Returns the first method of a `Scope` that a value lacks, `None` if it has all."""
    methods = () if isinstance(scope, TreeScope) else ("check", "select", "move")
    return checks.find_missing_method(scope, methods)


def has_statement(
    scope: object,
    attribute: Literal["per_slice", "keeps_targets", "keeps_total", "takes_signed_scores"],
) -> TypeGuard[Scope]:
    """Returns whether a scope states that an attribute of `Scope` is True."""
    return getattr(scope, attribute, False) is True


def adapt_scope(
    scope: Scope | TreeScope,
    sites: Mapping[KeyPath, Site] | None = None,
    targets: Sparsities | None = None,
    topk_fn: TopkFn | None = None,
) -> TreeScope:
    """Returns a bound `TreeScope`, or a `Scope` as an `AdaptedScope` of the arguments."""
    if isinstance(scope, TreeScope):
        return scope.bind(sites or {}, targets)
    return AdaptedScope(scope, sites or {}, targets, topk_fn)


@dataclasses.dataclass(frozen=True)
class AdaptedScope(TreeScope):
    """Makes masks of trees by a `Scope`, which gets the parameters with a sparsity or a mask.

    Attributes:
      scope: decides which weights compete.
      sites: the sites of the parameters.
      targets: sparsities at the end of a ramp, for N:M; by default the sparsities of a call.
      topk_fn: replaces the selection, as in `SparsityType.select`.
    """

    scope: Scope
    sites: Mapping[KeyPath, Site]
    targets: Sparsities | None = None
    topk_fn: TopkFn | None = None

    def bind(self, sites: Mapping[KeyPath, Site], targets: Sparsities | None) -> Self:
        return dataclasses.replace(self, sites=sites, targets=targets)

    def check(self, pattern: PatternChoice, batch_axes: BatchAxes, topk_fn: TopkFn | None) -> None:
        self.scope.check(pattern, batch_axes, topk_fn)

    def masked_paths(self, params: Params, sparsities: Sparsities) -> set[KeyPath]:
        return set(trees.leaves_by_path(sparsities))

    def select_tree(self, scores: ScoreTree, sparsities: Sparsities) -> Masks:
        scored_sites: list[ScoredSite] = []

        def collect(key_path: KeyPath, score: PyTree, sparsity: PyTree, target: PyTree) -> None:
            if sparsity is not None:
                name, site = trees.path_string(key_path), self.sites[key_path]
                checks.check_fractions(f"the sparsity of {name!r}", sparsity)
                if np.ndim(sparsity) not in (0, site.batch_axes):
                    raise ValueError(
                        f"{name!r} has sparsities of shape {np.shape(sparsity)}, one for each "
                        f"slice, and needs batch_axes = {np.ndim(sparsity)}, got "
                        f"batch_axes = {site.batch_axes}."
                    )
                target = sparsity if target is None else target
                scored_sites.append(ScoredSite(self.sites[key_path], score, sparsity, target))

        trees.map_matched(collect, scores, sparsities, self.targets, role="scores")
        masks = self.scope.select(scored_sites, self.topk_fn)
        return self._place("select", [x.site for x in scored_sites], masks, scores)

    def move_tree(
        self, masks: Masks, drop: PyTree, grow: PyTree, drop_fraction: chex.Numeric
    ) -> Masks:
        moving_sites: list[MovingSite] = []

        def collect(key_path: KeyPath, drop: PyTree, grow: PyTree, mask: jax.Array | None) -> None:
            if mask is not None:
                moving_sites.append(MovingSite(self.sites[key_path], mask, drop, grow))

        trees.map_matched(collect, drop, grow, masks, role="drop scores")
        moved = self.scope.move(moving_sites, drop_fraction)
        return self._place("move", [x.site for x in moving_sites], moved, masks)

    def _place(self, method: str, sites: Sequence[Site], masks: object, like: PyTree) -> Masks:
        """Returns the masks of sites in a tree like `like`, with `None` elsewhere."""
        method = f"{type(self.scope).__name__}.{method}"
        if not isinstance(masks, Sequence) or len(masks) != len(sites):
            raise ValueError(
                f"{method} must return a list of masks, one for each of {len(sites)} parameters, "
                f"got {reprlib.repr(masks)}."
            )
        by_path = {}
        for site, mask in zip(sites, masks, strict=True):
            checks.check_real_array(f"the mask of {site.name!r} by {method}", mask)
            by_path[site.key_path] = mask
        return trees.map_matched(lambda key_path, _: by_path.get(key_path), like)


@dataclasses.dataclass(frozen=True)
class Layerwise(checks.DataclassBase):
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
            site, scores, sparsity, target = scored
            if np.ndim(sparsity):  # one for each slice
                inner = site._replace(batch_axes=site.batch_axes - 1)
                rates, targets = jnp.asarray(sparsity), jnp.broadcast_to(target, np.shape(sparsity))
                slices = zip(scores, rates, targets, strict=True)
                return jnp.stack([select_alone(ScoredSite(inner, *x)) for x in slices])
            options: PyTree = {"target": target, "batch_axes": site.batch_axes, "topk_fn": topk_fn}
            return site.pattern.select(scores, sparsity, **options)

        if topk_fn is not None:
            return [select_alone(scored) for scored in scored_sites]
        return _search_alike(scored_sites, _select_units, select_alone)

    def move(
        self, moving_sites: Sequence[MovingSite], drop_fraction: chex.Numeric
    ) -> list[jax.Array]:
        """Returns masks that keep the number of active weights of each parameter."""

        def move_alone(moving: MovingSite) -> jax.Array:
            site, mask, drop, grow = moving
            options = {"batch_axes": site.batch_axes}
            return site.pattern.move(mask, drop, grow, drop_fraction, **options)

        move = functools.partial(_move_units, drop_fraction)
        return _search_alike(moving_sites, move, move_alone)


def is_layerwise(scope: object) -> bool:
    """Returns whether a scope makes the masks of `Layerwise`, so that a pruner need not call it."""
    cls = type(scope) if isinstance(scope, Layerwise) else None
    return bool(cls and cls.select is Layerwise.select and cls.move is Layerwise.move)


def _search_alike(
    competitors: Sequence[AnySite],
    search: Callable[[Sequence[AnySite]], list[jax.Array]],
    mask_alone: Callable[[AnySite], jax.Array],
) -> list[jax.Array]:
    """Returns masks: by one search for patterns that rank units, one by one for all others.

    No program reads arrays of several meshes.
    """
    masks: dict[int, jax.Array] = {}
    members_by_mesh: dict[object, list[int]] = {}
    for i, competitor in enumerate(competitors):
        if competitor.site.pattern.ranks_units:
            members_by_mesh.setdefault(sharding.find_mesh(competitor[1:]), []).append(i)
        else:
            masks[i] = mask_alone(competitor)
    for members in members_by_mesh.values():
        masks.update(zip(members, search([competitors[i] for i in members]), strict=True))
    return [masks[i] for i in range(len(competitors))]


def _select_units(scored_sites: Sequence[ScoredSite]) -> list[jax.Array]:
    """Returns the masks of the highest units of each parameter, or of each slice of a parameter."""
    sites, scores, sparsities, _ = zip(*scored_sites, strict=True)

    def select(scores: Arrays, sparsities: Sequence[chex.Numeric]) -> list[jax.Array]:
        units = [_pool_scores(*x) for x in zip(sites, scores, strict=True)]
        masks = topk_masks(units, _count_by_slice(units, sparsities))
        return [_expand_mask(*x) for x in zip(sites, masks, scores, strict=True)]

    return sharding.shard_like(list(scores), select, scores, sparsities)


def _count_by_slice(
    units: Sequence[Candidates], sparsities: Sequence[chex.Numeric]
) -> jax.Array | np.ndarray:
    """Counts the units that stay of each slice, of all parameters in a row."""
    if not any(map(np.ndim, sparsities)):
        k = count_units([candidates.slice_size for candidates in units], sparsities)
        return k[np.repeat(np.arange(len(units)), [x.num_slices for x in units])]
    shares = [
        jnp.repeat(jnp.ravel(jnp.float32(sparsity)), x.num_slices // max(np.size(sparsity), 1))
        for x, sparsity in zip(units, sparsities, strict=True)
    ]
    sizes = np.repeat([x.slice_size for x in units], [x.num_slices for x in units])
    return jnp.asarray(num_kept(sizes, jnp.concatenate(shares)))


def _move_units(drop_fraction: chex.Numeric, moving_sites: Sequence[MovingSite]) -> list[jax.Array]:
    """Returns masks with some active units of each parameter, or of each slice, replaced."""
    sites, masks, drop, grow = zip(*moving_sites, strict=True)

    def move(masks: Arrays, drop: Arrays, grow: Arrays, fraction: chex.Numeric) -> list[jax.Array]:
        active = [_pool_scores(*x) for x in zip(sites, drop, masks, strict=True)]
        growing = [_pool_scores(*x) for x in zip(sites, grow, strict=True)]
        moved = move_units(active, growing, fraction)
        return [_expand_mask(*x) for x in zip(sites, moved, masks, strict=True)]

    return sharding.shard_like(list(masks), move, masks, drop, grow, drop_fraction)


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
    if site.pattern.is_elementwise:
        return units
    return expand_units(site.pattern, units, like.shape, site.batch_axes, site.name)


def count_units(sizes: Sequence[int], sparsities: Sequence[chex.Numeric]) -> jax.Array | np.ndarray:
    """Counts the units that stay of each parameter, int32; of numpy for plain sparsities."""
    if any(map(checks.is_traced, sparsities)):
        return jnp.asarray(num_kept(np.array(sizes), stack_sparsities(sparsities)))
    pairs = zip(sizes, jax.device_get(list(sparsities)), strict=True)
    return np.array([num_kept(n, float(x)) for n, x in pairs])


def stack_sparsities(sparsities: Sequence[chex.Numeric]) -> jax.Array:
    """Returns the sparsities of parameters as float32[parameters]."""
    return jnp.stack([jnp.float32(sparsity) for sparsity in sparsities])
