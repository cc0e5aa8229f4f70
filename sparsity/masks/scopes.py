"""Scopes decide which weights compete for a place in the masks.

A scope keeps as many weights as the sparsities ask for, and compares the weights of one leaf or of
all leaves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeGuard, TypeVar, runtime_checkable

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import exact, host, sharding
from sparsity.core.checks import check_bool, check_number, is_traced
from sparsity.core.kernels import unstack
from sparsity.core.names import Registry
from sparsity.core.polynomials import Cost, Polynomial
from sparsity.core.trees import KeyPath, PyTree, path_names
from sparsity.masks.costs import total_cost, within_budget
from sparsity.masks.lamp import LampScores
from sparsity.masks.lamp_search import select_together
from sparsity.masks.moves import moved_masks
from sparsity.masks.norms import norms
from sparsity.masks.sites import Pattern, Site, TopkFn
from sparsity.selection import Ranked, Scores, computed, topk_masks


class Wanted(NamedTuple):
    """Leaf that needs a mask.

    Attributes:
      site: path, pattern and batch axes of the leaf.
      lazy_scores: scores, stored or computed by the search where the search reads them.
      sparsity: sparsity at this step.
      target: sparsity at the end of a ramp.
    """

    site: Site
    lazy_scores: jax.Array | Scores | LampScores
    sparsity: chex.Numeric
    target: chex.Numeric

    @property
    def scores(self) -> jax.Array:
        """Scores as an array."""
        scores: jax.Array = computed(self.lazy_scores)
        return scores


class Moving(NamedTuple):
    """Leaf whose mask moves.

    Attributes:
      site: path, pattern and batch axes of the leaf.
      mask: the current mask.
      lazy_drop_scores: scores to drop by, stored or computed by the search.
      lazy_grow_scores: scores to grow by, stored or computed by the search.
    """

    site: Site
    mask: jax.Array
    lazy_drop_scores: jax.Array | Scores
    lazy_grow_scores: jax.Array | Scores

    @property
    def drop_scores(self) -> jax.Array:
        """Scores to drop by as an array."""
        scores: jax.Array = computed(self.lazy_drop_scores)
        return scores

    @property
    def grow_scores(self) -> jax.Array:
        """Scores to grow by as an array."""
        scores: jax.Array = computed(self.lazy_grow_scores)
        return scores


L = TypeVar("L", Wanted, Moving)


class Scope(Protocol):
    """Interface of `scope`: `Layerwise()`, `Global()`, or a custom class.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> class AboveOne:
      ...     def check(self, pattern, batch_axes, topk_fn):
      ...         pass
      ...
      ...     def select(self, leaves, topk_fn):
      ...         return [(leaf.scores > 1).astype(jnp.uint8) for leaf in leaves]
      ...
      ...     def move(self, leaves, drop_fraction):
      ...         raise NotImplementedError
      >>> half = sparsity.Uniform(0.5)
      >>> pruner = sparsity.MagnitudePruning(scope=AboveOne(), sparsity_distribution_fn=half)
      >>> pruner.instant_sparsify(jnp.array([[1.0, -3.0], [2.0, 0.5]]))[1]
      Array([[0, 1],
             [1, 0]], dtype=uint8)
    """

    def check(self, pattern: object, batch_axes: object, topk_fn: TopkFn | None) -> None:
        """Raises a ValueError if the scope cannot create masks of this pattern.

        Called when an updater is created.

        Args:
          pattern: `sparsity_type` of the updater.
          batch_axes: `batch_axes` of the updater.
          topk_fn: `topk_fn` of the updater, if any.
        """

    def select(self, leaves: Sequence[Wanted], topk_fn: TopkFn | None) -> list[jax.Array]:
        """Returns a mask for each leaf: uint8, of the shape of its scores.

        Args:
          leaves: each with a `site`, `scores`, the current `sparsity`, and the `target` of a ramp.
          topk_fn: `topk_fn` of the updater, if any.
        """

    def move(self, leaves: Sequence[Moving], drop_fraction: chex.Numeric) -> list[jax.Array]:
        """Returns each leaf's mask with a fraction of the active weights replaced.

        Args:
          leaves: each with a `site`, its `mask`, `drop_scores` and `grow_scores`.
          drop_fraction: fraction of the active weights to replace, in [0, 1].
        """


@runtime_checkable
class TreeScope(Protocol):
    """Interface of a scope that selects the leaves with masks, and gets all their scores."""

    def check(self, pattern: object, batch_axes: object, topk_fn: TopkFn | None) -> None:
        """Raises a ValueError as `Scope.check` does."""

    def masked(self, params: PyTree, sparsities: PyTree) -> set[KeyPath]:
        """Returns the paths of the leaves that get masks."""

    def select_tree(self, scores: PyTree, sparsities: PyTree) -> PyTree:
        """Returns a tree of masks, `None` for leaves that stay dense."""

    def move_tree(
        self, masks: PyTree, drop: PyTree, grow: PyTree, drop_fraction: chex.Numeric
    ) -> PyTree:
        """Returns the masks with a fraction of the active weights or channels replaced."""


@dataclasses.dataclass(frozen=True)
class Layerwise:
    """Ranks the weights of each leaf alone, at its sparsity; with batch axes, of each slice.

    An override of `select` gets leaves whose leading `site.batch_axes` index slices.

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

    def check(self, pattern: object, batch_axes: object, topk_fn: TopkFn | None) -> None:
        """Accepts all patterns, batch axes and functions."""

    def select(self, leaves: Sequence[Wanted], topk_fn: TopkFn | None) -> list[jax.Array]:
        """Returns a mask for each leaf, by the pattern of the leaf."""

        def one(leaf: Wanted) -> jax.Array:
            site = leaf.site
            return site.pattern.select(
                leaf.scores,
                leaf.sparsity,
                target=leaf.target,
                batch_axes=site.batch_axes,
                topk_fn=topk_fn,
            )

        return _by_kind(leaves, _select_ranked, one, one_by_one=topk_fn is not None)

    def move(self, leaves: Sequence[Moving], drop_fraction: chex.Numeric) -> list[jax.Array]:
        """Returns masks that keep the number of active weights of each leaf."""

        def one(leaf: Moving) -> jax.Array:
            site = leaf.site
            scores = leaf.drop_scores, leaf.grow_scores
            return site.pattern.move(leaf.mask, *scores, drop_fraction, batch_axes=site.batch_axes)

        return _by_kind(leaves, functools.partial(_move_ranked, drop_fraction), one)


@dataclasses.dataclass(frozen=True)
class Global:
    """Ranks the weights of all leaves under one threshold; layers may trade within a fixed total.

    If all leaves have one sparsity, `num_kept` of all their weights stay. If sparsities differ, as
    many weights stay as the leaves would keep separately. A leaf with an entry in
    `custom_sparsity_map` keeps exactly that sparsity and is not ranked with the others.

    Attributes:
      use_normalization: divide the scores of each leaf by their L2 norm before ranking, so that
        layers of different scales compare. Integer scores (the random ones) are never divided.
      normalization_eps: number added to the norm.

    With `sparsity.budget` as the distribution, weights are ranked by score per cost, and as many
    stay as the budget allows.

    Source: Lee et al. 2023, "JaxPruner", for the normalization.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"large": jnp.array([[10.0, 40.0]]), "small": jnp.array([[1.0, 4.0]])}
      >>> scope = Global(use_normalization=False)
      >>> half = sparsity.Uniform(0.5)
      >>> pruner = sparsity.MagnitudePruning(scope=scope, sparsity_distribution_fn=half)
      >>> {name: mask.tolist() for name, mask in pruner.instant_sparsify(params)[1].items()}
      {'large': [[1, 1]], 'small': [[0, 0]]}
    """

    use_normalization: bool = True
    normalization_eps: float = 1e-8

    def __post_init__(self) -> None:
        check_bool("use_normalization", self.use_normalization)
        check_number("normalization_eps", self.normalization_eps, 0)

    def check(self, pattern: object, batch_axes: object, topk_fn: TopkFn | None) -> None:
        """Raises a ValueError for a ranking inside one leaf: by pattern, batch axes or topk_fn."""
        if isinstance(pattern, Pattern):
            self._check_pattern(pattern)
        if topk_fn is not None:
            raise ValueError(
                "A global scope ranks all leaves together and needs topk_fn = None, got topk_fn = "
                f"{topk_fn!r}."
            )
        if not callable(batch_axes) and batch_axes:
            raise ValueError(self._no_slices(f"got batch_axes = {batch_axes}"))

    def select(self, leaves: Sequence[Wanted], topk_fn: TopkFn | None) -> list[jax.Array]:
        """Returns masks that keep the highest scores of all leaves together."""
        ranked = [leaf for leaf in leaves if not leaf.site.has_override]
        alone = [leaf for leaf in leaves if leaf.site.has_override]
        together = iter(self._select_together(ranked, alone))
        apart = iter(Layerwise().select(alone, topk_fn))
        return [next(apart if leaf.site.has_override else together) for leaf in leaves]

    def _select_together(
        self, leaves: Sequence[Wanted], alone: Sequence[Wanted]
    ) -> list[jax.Array]:
        """Returns the masks of the leaves that compete; `alone` counts towards the budget only."""
        if not leaves:
            return []
        self._check_sites([leaf.site for leaf in leaves])
        everyone = [*leaves, *alone]
        total = _total_cost(everyone)
        sizes = [leaf.lazy_scores.size for leaf in everyone]
        sparsities = [leaf.sparsity for leaf in everyone]
        if total is None:
            k = _kept_in_total(sizes[: len(leaves)], sparsities[: len(leaves)])
            lamp = [x for leaf in leaves if isinstance(x := leaf.lazy_scores, LampScores)]
            if len(lamp) == len(leaves) and not self.use_normalization:
                return select_together(lamp, (k[0].reshape(1), k[1].reshape(1)))
        scores = self._comparable([leaf.lazy_scores for leaf in leaves])
        if total is not None:
            kept = _kept_per_leaf(sizes, sparsities).astype(jnp.uint32)
            if total.slope(range(len(leaves))) is None:
                cost = Cost(total, sizes)
                limit, fixed = cost.at(kept), kept[len(leaves) :]

                def fits(counts: jax.Array) -> jax.Array:
                    return exact.at_least(limit, cost.at(jnp.concatenate([counts, fixed])))

                return within_budget(scores, [leaf.site.cost for leaf in leaves], fits)
            k = exact.total(kept[: len(leaves)])
        return topk_masks([Ranked(x) for x in scores], k, together=True)

    def move(self, leaves: Sequence[Moving], drop_fraction: chex.Numeric) -> list[jax.Array]:
        """Returns masks with as many active weights in total as before.

        Of the n active weights of all leaves the num_kept(n, drop_fraction) with the highest drop
        scores are kept. As many weights as were dropped grow anywhere. A leaf with an entry
        in `custom_sparsity_map` moves separately.
        """
        ranked = [leaf for leaf in leaves if not leaf.site.has_override]
        alone = [leaf for leaf in leaves if leaf.site.has_override]
        together = iter(self._move_together(ranked, drop_fraction))
        apart = iter(Layerwise().move(alone, drop_fraction))
        return [next(apart if leaf.site.has_override else together) for leaf in leaves]

    def _move_together(
        self, leaves: Sequence[Moving], drop_fraction: chex.Numeric
    ) -> list[jax.Array]:
        if not leaves:
            return []
        self._check_sites([leaf.site for leaf in leaves])
        total = _total_cost(leaves)
        if total is not None and total.slope(range(len(leaves))) is None:
            raise ValueError(
                "Under a global scope weights move between leaves whose weights cost differently, "
                "so that no budget would be kept. Use scope=Layerwise() with this budget."
            )
        drop = self._comparable([leaf.lazy_drop_scores for leaf in leaves])
        grow = self._comparable([leaf.lazy_grow_scores for leaf in leaves])
        active = [Ranked(x, leaf.mask) for x, leaf in zip(drop, leaves, strict=True)]
        return moved_masks(active, [Ranked(x) for x in grow], drop_fraction, together=True)

    def _comparable(self, scores: Sequence[jax.Array | Scores | LampScores]) -> list[Scores]:
        """Returns scores of one dtype, divided by their norm where `use_normalization` says so."""
        lazy = [Scores.wrap(score) for score in scores]
        divided = [
            i
            for i, score in enumerate(lazy)
            if self.use_normalization and jnp.issubdtype(score.dtype, jnp.floating) and score.size
        ]
        if divided:
            scales = norms([lazy[i] for i in divided])
            for i, factor in zip(divided, _factors(scales, self.normalization_eps), strict=True):
                lazy[i] = _scaled(lazy[i], factor)
        dtypes = [score.dtype for score in lazy]
        dtype = functools.reduce(jnp.promote_types, dtypes)
        return [
            score if score.dtype == dtype else Scores.wrap(score.compute().astype(dtype))
            for score in lazy
        ]

    def _check_pattern(self, pattern: Pattern, where: str = "") -> None:
        if not pattern.is_elementwise:
            raise ValueError(
                "A global scope ranks single weights of all leaves and needs sparsity_type = "
                f"Unstructured(), got sparsity_type = {pattern!r}{where}. Use scope=Layerwise()."
            )

    def _check_sites(self, sites: Sequence[Site]) -> None:
        for site in sites:
            self._check_pattern(site.pattern, f" for {site.name!r}")
            if site.batch_axes:
                raise ValueError(
                    self._no_slices(f"got batch_axes = {site.batch_axes} for {site.name!r}")
                )

    def _no_slices(self, got: str) -> str:
        return (
            "A global scope lets layers trade weights, so that no slice can have an exact mask of "
            f"its own: batch_axes must be 0, {got}. Use scope=Layerwise(), or leave stacked biases "
            "out with filter_fn."
        )


def is_per_slice(scope: object) -> TypeGuard[Scope]:
    """Returns whether each slice of a leaf has a mask that depends on its own scores alone."""
    return getattr(scope, "per_slice", False) is True


SCOPES: Registry[type[Scope]] = Registry("scope", {"layerwise": Layerwise, "global": Global})


def _by_kind(
    leaves: Sequence[L],
    ranked: Callable[[Sequence[L]], list[jax.Array]],
    one: Callable[[L], jax.Array],
    one_by_one: bool = False,
) -> list[jax.Array]:
    """Returns masks: by one search for patterns that rank units, leaf by leaf for all others.

    Patterns of single entries are searched apart from those of blocks and channels, because scores
    of single entries need not be stored.
    """
    masks: dict[int, jax.Array] = {}
    kinds: dict[bool | None, list[int]] = {}
    for i, leaf in enumerate(leaves):
        pattern = leaf.site.pattern
        is_ranked = getattr(pattern, "ranks_units", False) and not one_by_one
        kinds.setdefault(pattern.is_elementwise if is_ranked else None, []).append(i)
    for i in kinds.pop(None, []):
        masks[i] = one(leaves[i])
    for members in kinds.values():
        masks.update(zip(members, ranked([leaves[i] for i in members]), strict=True))
    return [masks[i] for i in range(len(leaves))]


def _select_ranked(leaves: Sequence[Wanted]) -> list[jax.Array]:
    """Returns the masks of the highest units of each leaf, or of each slice of a leaf."""
    sites = [leaf.site for leaf in leaves]

    def select(
        scores: Sequence[jax.Array | Scores], sparsities: Sequence[chex.Numeric]
    ) -> list[jax.Array]:
        units = [_units(*x) for x in zip(sites, scores, strict=True)]
        sizes, slices = [leaf.size for leaf in units], [leaf.slices for leaf in units]
        leaf_index = np.repeat(np.arange(len(units)), slices)  # of each slice
        if any(map(is_traced, sparsities)):
            kept = _kept_per_leaf(sizes, sparsities)
            low = (kept if len(kept) == len(leaf_index) else kept[leaf_index]).astype(jnp.uint32)
            k = low & 0, low
        else:
            pairs = zip(sizes, jax.device_get(list(sparsities)), strict=True)
            counts = np.array([exact.num_kept(n, float(x)) for n, x in pairs], np.uint32)
            counts = counts[leaf_index]
            k = jax.device_put((counts & 0, counts))  # explicitly, as a transfer guard may demand
        masks = topk_masks(units, k)
        return [_entries(*x) for x in zip(sites, masks, scores, strict=True)]

    scores = [leaf.lazy_scores for leaf in leaves]
    return _shard(sites, select, scores, [leaf.sparsity for leaf in leaves])


def _move_ranked(drop_fraction: chex.Numeric, leaves: Sequence[Moving]) -> list[jax.Array]:
    """Returns masks with some active units of each leaf, or of each slice, replaced."""
    sites = [leaf.site for leaf in leaves]

    def move(
        masks: Sequence[jax.Array],
        drop: Sequence[jax.Array | Scores],
        grow: Sequence[jax.Array | Scores],
        fraction: chex.Numeric,
    ) -> list[jax.Array]:
        active = [
            dataclasses.replace(_units(site, scores), where=_unit_mask(site, mask))
            for site, scores, mask in zip(sites, drop, masks, strict=True)
        ]
        others = [_units(*x) for x in zip(sites, grow, strict=True)]
        moved = moved_masks(active, others, fraction)
        return [_entries(*x) for x in zip(sites, moved, masks, strict=True)]

    masks = [leaf.mask for leaf in leaves]
    drop = [leaf.lazy_drop_scores for leaf in leaves]
    grow = [leaf.lazy_grow_scores for leaf in leaves]
    return _shard(sites, move, masks, drop, grow, drop_fraction)


def _shard(
    sites: Sequence[Site], fn: Callable[..., list[jax.Array]], *args: PyTree
) -> list[jax.Array]:
    """Returns fn(*args); XLA chooses the sharding of units, entries keep their sharding."""
    if sites[0].pattern.is_elementwise:
        return fn(*args)
    args = jax.tree.map(computed, args)
    return sharding.shard_like(args[0], fn, *args)


def _units(site: Site, scores: jax.Array | Scores) -> Ranked:
    """Returns the scores of the units of a leaf."""
    pattern: Any = site.pattern  # a pattern that ranks units has `pool` and `expand`
    if pattern.is_elementwise:
        return Ranked(Scores.wrap(scores), None, site.batch_axes)
    units = pattern.pool(scores, site.batch_axes)
    return Ranked(Scores.wrap(units), None, site.batch_axes + pattern.group_axes)


def _unit_mask(site: Site, mask: jax.Array) -> jax.Array:
    """Returns the mask of the units, each of which is all ones or all zeros."""
    if site.pattern.is_elementwise:
        return mask
    return (_units(site, mask).scores.compute() != 0).astype(jnp.uint8)


def _entries(site: Site, units: jax.Array, like: jax.Array | Scores) -> jax.Array:
    """Returns the mask of the entries of a leaf from the mask of its units."""
    pattern: Any = site.pattern
    mask: jax.Array = units
    if not pattern.is_elementwise:
        mask = pattern.expand(units, like.shape, site.batch_axes)
    return mask


def _factors_on_host(scales: np.ndarray, eps: float) -> list[np.ndarray]:
    factors = 1 / np.maximum(scales + scales.dtype.type(eps), np.finfo(scales.dtype).tiny)
    return [*factors[:, None]]


@host.instead(_factors_on_host)
def _factors(scales: jax.Array, eps: float) -> list[jax.Array]:
    """Returns the factor of the scores of each leaf, a number, from their norms."""
    # A product: XLA turns a division into a product in some kernels and not in others.
    return unstack(1 / jnp.maximum(scales + eps, jnp.finfo(scales.dtype).tiny))


def _scaled(scores: Scores, factor: jax.Array) -> Scores:
    """Returns scores times a number."""
    fn = _Scaled(scores.fn, len(scores.arrays) + len(scores.scalars))
    return dataclasses.replace(scores, fn=fn, scalars=(*scores.scalars, factor))


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """Product of `fn` of `count` values and the next value; equal for equal `fn` and `count`."""

    fn: Callable[..., jax.Array]
    count: int

    def __call__(self, *values: jax.Array) -> jax.Array:
        score = self.fn(*values[: self.count], *values[self.count + 1 :])
        wide = score.astype(jnp.promote_types(score.dtype, jnp.float32))
        return wide * values[self.count].astype(wide.dtype)

    @property
    def on_host(self) -> Callable[..., np.ndarray] | None:
        """Function of arrays of numpy with the same bits; `None` if numpy does not know `fn`."""
        return self._on_host if getattr(self.fn, "on_host", None) else None

    def _on_host(self, *values: np.ndarray) -> np.ndarray:
        fn: PyTree = self.fn
        score = fn.on_host(*values[: self.count], *values[self.count + 1 :])
        wide = np.dtype(jnp.promote_types(score.dtype, jnp.float32))
        return host.product(score.astype(wide, copy=False), values[self.count].astype(wide))


def _total_cost(leaves: Sequence[Wanted | Moving]) -> Polynomial | None:
    """Returns the cost of masks in the numbers of kept weights; `None` without a budget."""
    budget = leaves[0].site.budget
    if budget is None:
        return None
    scores = (
        leaf.lazy_scores if isinstance(leaf, Wanted) else leaf.lazy_drop_scores for leaf in leaves
    )
    sites = (leaf.site for leaf in leaves)
    named: Any = [(path_names(site.path), x) for site, x in zip(sites, scores, strict=True)]
    return total_cost(budget, named)


def _kept_per_leaf(sizes: Sequence[int], sparsities: Sequence[chex.Numeric]) -> jax.Array:
    return jnp.asarray(exact.num_kept(np.array(sizes), _stacked(sparsities)))


def _stacked(sparsities: Sequence[chex.Numeric]) -> jax.Array:
    return jnp.stack([jnp.float32(sparsity) for sparsity in sparsities])


def _kept_in_total(sizes: Sequence[int], sparsities: Sequence[chex.Numeric]) -> exact.Words:
    """Returns the number of weights that all leaves keep together, in two words.

    Leaves of one sparsity count as one leaf; otherwise the kept weights of each leaf add up.
    """
    if not any(map(is_traced, sparsities)):
        shares = [float(np.float32(x)) for x in jax.device_get(list(sparsities))]
        if len({*shares}) == 1:
            sizes, shares = [sum(sizes)], shares[:1]
        k: Any = sum(exact.num_kept(*leaf) for leaf in zip(sizes, shares, strict=True))
        words: exact.Words = jax.device_put(exact.split(k))
        return words
    stacked = _stacked(sparsities)
    alike = jnp.all(stacked == stacked[0])
    together = exact.as_words(exact.num_kept(sum(sizes), stacked[0]))
    return exact.choose(alike, together, exact.total(_kept_per_leaf(sizes, sparsities)))
