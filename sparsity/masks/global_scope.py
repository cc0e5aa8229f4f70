"""`Global`: the weights of all parameters compete under one threshold, or within one budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core import sharding
from sparsity.core.arrays import promote, scale_to_one
from sparsity.core.checks import DataclassBase, check_bool, check_number, is_traced
from sparsity.core.trees import path_names
from sparsity.masks.budgets import Cost, within_budget
from sparsity.masks.scopes import (
    AnySite,
    Layerwise,
    MovingSite,
    ScoredSite,
    count_units,
    stack_sparsities,
)
from sparsity.masks.sites import BatchAxes, PatternChoice, TopkFn
from sparsity.patterns import SparsityType
from sparsity.selection import Candidates, move_units, num_kept, topk_masks
from sparsity.selection.keys import readable


@dataclasses.dataclass(frozen=True)
class Global(DataclassBase):
    """Ranks the weights of all parameters together; layers may trade within a fixed total.

    If all parameters have one sparsity, `num_kept` of all their weights stay. If sparsities differ,
    as many weights stay as the parameters would keep separately. A parameter with an entry in
    `custom_sparsity_map` keeps exactly that sparsity and is not ranked with the others.

    Attributes:
      use_normalization: divide the scores of each parameter by their L2 norm before ranking, so
        that layers of different scales compare. Integer scores (the random ones) are never divided.
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

    keeps_total: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bool("use_normalization", self.use_normalization)
        check_number("normalization_eps", self.normalization_eps, 0)

    def check(self, pattern: PatternChoice, batch_axes: BatchAxes, topk_fn: TopkFn | None) -> None:
        """Raises a ValueError for a ranking inside a parameter: by pattern, batch axes, topk_fn."""
        _check(pattern, batch_axes, topk_fn)

    def select(self, scored_sites: Sequence[ScoredSite], topk_fn: TopkFn | None) -> list[jax.Array]:
        """Returns masks that keep the highest scores of all parameters together."""
        competitors, fixed = _split_overrides(scored_sites)
        together = self._select_together(competitors, fixed) if competitors else []
        return _merge_overrides(scored_sites, together, Layerwise().select(fixed, topk_fn))

    def _select_together(
        self, scored_sites: Sequence[ScoredSite], fixed: Sequence[ScoredSite]
    ) -> list[jax.Array]:
        """Returns masks of the parameters that compete; `fixed` counts towards the budget only."""
        total = _find_cost([*scored_sites, *fixed])
        if total is not None and not total.is_alike(len(scored_sites)):
            return self._select_within(total, scored_sites, fixed)
        scores = [scored.scores for scored in scored_sites]
        sizes, sparsities = [x.size for x in scores], [scored.sparsity for scored in scored_sites]
        _check_total(sizes)
        k = count_units(sizes, sparsities).sum()[None]
        k = _count_in_total(sizes, sparsities) if total is None else k
        all_candidates = [Candidates(x) for x in self._make_comparable(scores)]
        return topk_masks(all_candidates, k, together=True)

    def _select_within(
        self, total: Cost, scored_sites: Sequence[ScoredSite], fixed: Sequence[ScoredSite]
    ) -> list[jax.Array]:
        """Returns the masks of parameters whose weights cost differently, within a budget.

        Args:
          total: cost of the masks of `scored_sites` and `fixed` in the numbers of kept weights.
          scored_sites: the parameters that compete.
          fixed: parameters that keep their own sparsity.
        """
        everyone = [*scored_sites, *fixed]
        sizes = [scored.scores.size for scored in everyone]
        kept = jnp.asarray(count_units(sizes, [scored.sparsity for scored in everyone]), jnp.uint32)
        is_within, added = total.make_limit(sizes, kept), kept[len(scored_sites) :]
        return within_budget(
            self._make_comparable([scored.scores for scored in scored_sites]),
            [scored.site.cost for scored in scored_sites],
            lambda counts: is_within(jnp.concatenate([counts, added])),
        )

    def move(
        self, moving_sites: Sequence[MovingSite], drop_fraction: chex.Numeric
    ) -> list[jax.Array]:
        """Returns masks with as many active weights in total as before.

        Of the n active weights of all parameters the num_kept(n, drop_fraction) with the highest
        drop scores are kept. As many weights as were dropped grow anywhere. A parameter with an
        entry in `custom_sparsity_map` moves separately.
        """
        competitors, fixed = _split_overrides(moving_sites)
        together = self._move_together(competitors, drop_fraction) if competitors else []
        return _merge_overrides(moving_sites, together, Layerwise().move(fixed, drop_fraction))

    def _move_together(
        self, moving_sites: Sequence[MovingSite], drop_fraction: chex.Numeric
    ) -> list[jax.Array]:
        _check_total([moving.mask.size for moving in moving_sites])
        total = _find_cost(moving_sites)
        if total is not None and not total.is_alike(len(moving_sites)):
            raise ValueError(
                "Under a global scope weights move between parameters whose weights cost "
                "differently, so that no budget would be kept. Use scope=Layerwise() with this "
                "budget."
            )
        drop = self._make_comparable([moving.drop_scores for moving in moving_sites])
        grow = self._make_comparable([moving.grow_scores for moving in moving_sites])
        active = [Candidates(x, moving.mask) for x, moving in zip(drop, moving_sites, strict=True)]
        return move_units(active, [Candidates(x) for x in grow], drop_fraction, together=True)

    def _make_comparable(self, scores: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns scores of one dtype, divided by their norm where `use_normalization` says so."""
        read = [readable(score) for score in scores]
        if self.use_normalization:
            read = [divide_by_norm(x, self.normalization_eps) for x in read]
        dtype = promote(*(x.dtype for x in read))
        return [x.astype(dtype) for x in read]


def _check_total(sizes: Sequence[int]) -> None:
    """Raises a ValueError for more weights than one competition counts, in 32 bits."""
    if sum(sizes) >= 2**31:
        raise ValueError(
            f"scope = Global() ranks {sum(sizes):,} weights together, and fewer than 2**31 can "
            "compete. Use Layerwise(), or leave parameters out with filter_fn."
        )


def _check(
    pattern: PatternChoice, batch_axes: BatchAxes, topk_fn: TopkFn | None, where: str = ""
) -> None:
    """Raises a ValueError as `Global.check` does; `where` names the parameter."""
    if isinstance(pattern, SparsityType) and not pattern.is_elementwise:
        raise ValueError(
            "A global scope ranks single weights of all parameters and needs sparsity_type "
            f"= Unstructured(), got sparsity_type = {pattern!r}{where}. Use scope=Layerwise()."
        )
    if topk_fn is not None:
        raise ValueError(
            "A global scope ranks all parameters together and needs topk_fn = None, got "
            f"topk_fn = {topk_fn!r}."
        )
    if not callable(batch_axes) and batch_axes:
        raise ValueError(
            "A global scope lets layers trade weights, so that no slice can have an exact mask "
            f"of its own: batch_axes must be 0, got batch_axes = {batch_axes}{where}. Use "
            "scope=Layerwise(), or leave stacked biases out with filter_fn."
        )


def _check_meshes(competitors: Sequence[ScoredSite | MovingSite]) -> None:
    """Raises a ValueError for parameters on several meshes, which no program ranks together."""
    names = {sharding.find_mesh(x[1:]): x.site.name for x in competitors}
    names.pop(None, None)  # a program moves what lies on no mesh
    if len(names) > 1:
        (mesh, name), (other_mesh, other), *_ = names.items()
        raise ValueError(
            f"A global scope ranks all parameters together, but {name!r} lies on {mesh} and "
            f"{other!r} on {other_mesh}. Place all parameters on one mesh, or use "
            "scope=Layerwise()."
        )


def _split_overrides(parameters: Sequence[AnySite]) -> tuple[list[AnySite], list[AnySite]]:
    """Returns the parameters that compete, checked, and those with a sparsity of their own."""
    competitors = [x for x in parameters if not x.site.has_override]
    for site in (x.site for x in competitors):
        _check(site.pattern, site.batch_axes, None, f" for {site.name!r}")
    _check_meshes(competitors)
    return competitors, [x for x in parameters if x.site.has_override]


def _merge_overrides(
    parameters: Sequence[ScoredSite] | Sequence[MovingSite],
    together: list[jax.Array],
    fixed: list[jax.Array],
) -> list[jax.Array]:
    """Returns masks in the order of the parameters, from both parts of `_split_overrides`."""
    parts = iter(together), iter(fixed)
    return [next(parts[x.site.has_override]) for x in parameters]


def _count_in_total(
    sizes: Sequence[int], sparsities: Sequence[chex.Numeric]
) -> jax.Array | np.ndarray:
    """Returns the number of weights that all parameters keep together, [1].

    Parameters of one sparsity count as one; otherwise the kept weights of each add up.
    """
    each = count_units(sizes, sparsities).sum()
    if not any(map(is_traced, sparsities)):
        shares = {float(np.float32(x)) for x in jax.device_get(list(sparsities))}
        return np.array([num_kept(sum(sizes), *shares) if len(shares) == 1 else each])
    stacked = stack_sparsities(sparsities)
    alike = jnp.all(stacked == stacked[0])
    return jnp.where(alike, num_kept(sum(sizes), stacked[0]), each)[None]


def _find_cost(competitors: Sequence[ScoredSite | MovingSite]) -> Cost | None:
    """Returns the cost of masks in the numbers of kept weights; `None` without a budget."""
    budget = competitors[0].site.budget
    if budget is None:
        return None
    arrays: Any = [x.mask if isinstance(x, MovingSite) else x.scores for x in competitors]
    paths = [path_names(x.site.key_path) for x in competitors]
    return budget.total(list(zip(paths, arrays, strict=True)))  # reads shapes only


def divide_by_norm(scores: jax.Array, eps: float) -> jax.Array:
    """Returns scores over the sum of `eps` and the L2 norm of the finite ones.

    Integers and empty arrays stay. A norm may exceed the range of the dtype: scores are taken to at
    most 1 before they are squared.
    """
    if not jnp.issubdtype(scores.dtype, jnp.floating) or not scores.size:
        return scores
    return sharding.shard_like(scores, _divide, scores, eps)


@jax.jit
def _divide(scores: jax.Array, eps: float) -> jax.Array:
    [wide], factor = scale_to_one([scores.astype(promote(scores.dtype, jnp.float32))])
    norm = jnp.sqrt(jnp.sum(jnp.square(jnp.where(jnp.isfinite(wide), wide, 0))))
    divisor = norm + jnp.asarray(eps, wide.dtype) * factor
    # A product: XLA turns a division into a product in some kernels and not in others.
    return wide * (1 / jnp.maximum(divisor, jnp.finfo(wide.dtype).tiny))
