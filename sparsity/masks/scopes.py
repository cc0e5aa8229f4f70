"""Scopes: what competes with what for a place in the masks.

Within a scope as many weights stay as the sparsities ask for, and the scope says which of them are
compared: those of one leaf, or those of all leaves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp

from sparsity import selection
from sparsity.core import exact, sharding
from sparsity.core.checks import check_bool, check_number
from sparsity.core.names import Registry
from sparsity.masks.sites import Pattern, Site, TopkFn


class Wanted(NamedTuple):
    """A leaf that needs a mask: its site, scores, present sparsity, and where a ramp ends."""

    site: Site
    scores: jax.Array
    sparsity: chex.Numeric
    target: chex.Numeric


class Moving(NamedTuple):
    """A leaf whose mask moves: its site, mask, and the scores to drop and to grow by."""

    site: Site
    mask: jax.Array
    drop_scores: jax.Array
    grow_scores: jax.Array


class Scope(Protocol):
    """What `scope` must offer: `Layerwise()`, `Global()`, or a class of your own."""

    def check(self, pattern: object, batch_axes: object, topk_fn: TopkFn | None) -> None:
        """Raises a ValueError if it cannot make masks of these; called when an updater is made."""

    def select(self, leaves: Sequence[Wanted], topk_fn: TopkFn | None) -> list[jax.Array]:
        """Returns a mask for each leaf."""

    def move(self, leaves: Sequence[Moving], drop_fraction: chex.Numeric) -> list[jax.Array]:
        """Returns each leaf's mask with a fraction of the active weights replaced."""


@dataclasses.dataclass(frozen=True)
class Layerwise:
    """Every leaf by itself, at its own sparsity; with batch axes, every slice of it."""

    def check(self, pattern: object, batch_axes: object, topk_fn: TopkFn | None) -> None:
        """Takes everything."""

    def select(self, leaves: Sequence[Wanted], topk_fn: TopkFn | None) -> list[jax.Array]:
        """Returns a mask for each leaf, by its own pattern."""
        return [
            leaf.site.pattern.select(
                leaf.scores,
                leaf.sparsity,
                target=leaf.target,
                batch_axes=leaf.site.batch_axes,
                topk_fn=topk_fn,
            )
            for leaf in leaves
        ]

    def move(self, leaves: Sequence[Moving], drop_fraction: chex.Numeric) -> list[jax.Array]:
        """Returns masks in which every leaf has as many active weights as before."""
        return [
            leaf.site.pattern.move(
                leaf.mask,
                leaf.drop_scores,
                leaf.grow_scores,
                drop_fraction,
                batch_axes=leaf.site.batch_axes,
            )
            for leaf in leaves
        ]


@dataclasses.dataclass(frozen=True)
class Global:
    """All leaves together under one threshold; the total stays, layers may trade.

    If all leaves have one sparsity, `num_kept` of all their weights stay; if they differ, as many
    as the leaves would keep by themselves. A leaf with an entry in `custom_sparsity_map` keeps
    exactly that and is not ranked with the others.

    Attributes:
      use_normalization: divide the scores of each leaf by their L2 norm before ranking, so that
        layers of different scales compare. Integer scores (the random ones) are never divided.
      normalization_eps: added to the norm.

    Source: Lee et al. 2023, "JaxPruner", for the normalization.
    """

    use_normalization: bool = True
    normalization_eps: float = 1e-8

    def __post_init__(self) -> None:
        check_bool("use_normalization", self.use_normalization)
        check_number("normalization_eps", self.normalization_eps, 0)

    def check(self, pattern: object, batch_axes: object, topk_fn: TopkFn | None) -> None:
        """Raises a ValueError for patterns, batch axes and a topk_fn, which rank within a leaf."""
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
        masks: dict[int, jax.Array] = {}
        ranked = [i for i, leaf in enumerate(leaves) if not leaf.site.has_own_sparsity]
        alone = [i for i in range(len(leaves)) if i not in ranked]
        masks.update(
            zip(alone, Layerwise().select([leaves[i] for i in alone], topk_fn), strict=True)
        )
        if together := [leaves[i] for i in ranked]:
            self._check_sites([leaf.site for leaf in together])
            scores = [leaf.scores for leaf in together]
            sparsities = [jnp.float32(leaf.sparsity) for leaf in together]

            def select(scores: list[jax.Array], sparsities: list[jax.Array]) -> list[jax.Array]:
                kept = _kept_of_all([score.size for score in scores], sparsities)
                masks: list[jax.Array] = selection.global_topk_mask(self._comparable(scores), kept)
                return masks

            found = sharding.shard_like(scores, select, scores, sparsities)
            masks.update(zip(ranked, found, strict=True))
        return [masks[i] for i in range(len(leaves))]

    def move(self, leaves: Sequence[Moving], drop_fraction: chex.Numeric) -> list[jax.Array]:
        """Returns masks with as many active weights in total as before.

        Of the n active weights of all leaves the num_kept(n, drop_fraction) with the highest drop
        scores are kept, and as many as were dropped grow anywhere. A leaf with a sparsity of its
        own moves by itself.
        """
        ranked = [leaf for leaf in leaves if not leaf.site.has_own_sparsity]
        alone = [leaf for leaf in leaves if leaf.site.has_own_sparsity]
        together = iter(self._move_together(ranked, drop_fraction))
        apart = iter(Layerwise().move(alone, drop_fraction))
        return [next(apart if leaf.site.has_own_sparsity else together) for leaf in leaves]

    def _move_together(
        self, leaves: Sequence[Moving], drop_fraction: chex.Numeric
    ) -> list[jax.Array]:
        if not leaves:
            return []
        self._check_sites([leaf.site for leaf in leaves])
        masks = [leaf.mask for leaf in leaves]

        def move(
            masks: list[jax.Array],
            drop: list[jax.Array],
            grow: list[jax.Array],
            fraction: chex.Numeric,
        ) -> list[jax.Array]:
            active = exact.total(jnp.stack([jnp.sum(mask > 0, dtype=jnp.int32) for mask in masks]))
            stay = exact.num_kept_of_words(active, fraction)
            kept = selection.global_topk_mask(self._comparable(drop), stay, where=masks)
            free = [1 - mask for mask in kept]
            lost = exact.minus(active, stay)
            grown = selection.global_topk_mask(self._comparable(grow), lost, where=free)
            return [a | b for a, b in zip(kept, grown, strict=True)]

        drop, grow = [x.drop_scores for x in leaves], [x.grow_scores for x in leaves]
        return sharding.shard_like(masks, move, masks, drop, grow, drop_fraction)

    def _comparable(self, scores: list[jax.Array]) -> list[jax.Array]:
        """Scores of one dtype, divided by their norm where that is asked for."""
        if self.use_normalization:
            scores = [self._normalize(score) for score in scores]
        dtype = functools.reduce(jnp.promote_types, [score.dtype for score in scores])
        return [score.astype(dtype) for score in scores]

    def _normalize(self, score: jax.Array) -> jax.Array:
        if not jnp.issubdtype(score.dtype, jnp.floating):
            return score
        wide = score.astype(jnp.float64 if score.dtype == jnp.float64 else jnp.float32)
        # A NaN stays one and ranks lowest; the others are as they would be without it.
        finite = jnp.where(jnp.isfinite(wide), wide, 0)
        _, exponent = jnp.frexp(jnp.max(jnp.abs(finite), initial=0))
        squares = jnp.ldexp(finite, -exponent) ** 2
        for axis in reversed(range(squares.ndim)):  # axis by axis: fewer digits a pass
            squares = exact.ordered_sum(squares, (axis,))
        norm = jnp.ldexp(jnp.sqrt(squares), exponent)
        return wide / jnp.maximum(norm + self.normalization_eps, jnp.finfo(wide.dtype).tiny)

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


SCOPES: Registry[type[Scope]] = Registry("scope", {"layerwise": Layerwise, "global": Global})


def _kept_of_all(sizes: list[int], sparsities: list[jax.Array]) -> exact.Words:
    """How many weights stay in total: of all at one sparsity, or the sum of what each keeps."""
    each = [exact.num_kept(size, own) for size, own in zip(sizes, sparsities, strict=True)]
    if len(sizes) == 1:
        return exact.as_words(each[0])
    alike = functools.reduce(jnp.logical_and, [own == sparsities[0] for own in sparsities[1:]])
    together = exact.as_words(exact.num_kept(sum(sizes), sparsities[0]))
    return exact.choose(alike, together, exact.total(jnp.stack([jnp.int32(k) for k in each])))
