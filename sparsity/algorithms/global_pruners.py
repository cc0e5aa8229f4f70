"""Global pruners: all layers share one threshold, so that each finds its own sparsity."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from sparsity import selection, sparsity_distributions
from sparsity.algorithms.pruners import MagnitudePruning, SaliencyPruning
from sparsity.base_updater import BaseUpdater
from sparsity.core import exact as exact_counts
from sparsity.core import trees
from sparsity.core.sharding import shard_like
from sparsity.sparsity_types import Unstructured, check_fraction


@dataclasses.dataclass
class GlobalPruning(BaseUpdater):
    """Ranks the scores of all selected leaves together; exactly the target is kept in total.

    Attributes:
      sparsity: fraction of the weights of all selected leaves to remove, in [0, 1].
      filter_fn: selects leaves, as in `sparsity_distributions.uniform`.
      custom_sparsity_map: leaves that have a sparsity of their own and are not ranked with the
        others, as in `sparsity_distributions.uniform`.
      use_normalization: divide the scores of each leaf by their L2 norm before ranking.
    """

    sparsity: float = 0.0
    filter_fn: sparsity_distributions.FilterFn | None = None
    custom_sparsity_map: sparsity_distributions.Overrides | None = None
    use_normalization: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("sparsity", self.sparsity)
        if self.sparsity_distribution_fn is not sparsity_distributions.uniform:
            raise ValueError(
                f"{type(self).__name__} ranks all leaves together and takes no "
                "sparsity_distribution_fn. Give it sparsity, filter_fn and custom_sparsity_map."
            )
        if not isinstance(self.sparsity_type, Unstructured) or self.topk_fn is not None:
            raise ValueError(
                f"{type(self).__name__} needs sparsity_type = Unstructured() and topk_fn = None, "
                f"got {self.sparsity_type!r} and {self.topk_fn!r}."
            )

    def create_masks(
        self,
        scores: chex.ArrayTree,
        target_sparsity: chex.ArrayTree,
        target_sparsities: chex.ArrayTree | None = None,
    ) -> chex.ArrayTree:
        """Returns masks that keep the highest scores of all leaves together.

        Args:
          scores: tree of scores.
          target_sparsity: tree of sparsities, the same for all leaves that are ranked together, or
            one scalar for these.
          target_sparsities: not used.
        """
        if jax.tree_util.all_leaves([target_sparsity]):
            target_sparsity = self._distribute(target_sparsity)(scores)
        sparsities = trees.leaves_by_path(target_sparsity)
        with_own = dict.fromkeys(self.custom_sparsity_map or {})
        ranked = sparsity_distributions.uniform(
            scores, 1.0, self.filter_fn, with_own, self.batch_axes
        )
        ranked = [path for path in trees.leaves_by_path(ranked) if path in sparsities]
        by_path = trees.leaves_by_path(scores)
        kept = self._rank([by_path[path] for path in ranked], [sparsities[path] for path in ranked])
        together = dict(zip(ranked, kept, strict=True))
        alone = trees.map_matched(
            lambda path, _, sparsity: None if path in together else sparsity,
            scores,
            target_sparsity,
        )
        alone = super().create_masks(scores, alone, target_sparsities)
        return trees.map_matched(lambda path, _, mask: together.get(path, mask), scores, alone)

    def _rank(self, scores: list[Any], sparsities: list[Any]) -> list[jax.Array]:
        if not scores:
            return []
        if self.use_normalization:
            scores = [_normalize(score) for score in scores]
        dtype = functools.reduce(jnp.promote_types, [score.dtype for score in scores])
        size = sum(score.size for score in scores)

        def rank(scores: list[jax.Array], sparsity: chex.Numeric) -> list[jax.Array]:
            return selection.global_topk_mask(scores, selection.num_kept(size, sparsity))

        return shard_like(scores, rank, [score.astype(dtype) for score in scores], sparsities[0])

    def get_distribution_fn(self) -> Callable[[chex.ArrayTree], chex.ArrayTree]:
        return self._distribute(self.sparsity)

    def _distribute(self, sparsity: chex.Numeric) -> Callable[[chex.ArrayTree], chex.ArrayTree]:
        return functools.partial(
            sparsity_distributions.uniform,
            sparsity=sparsity,
            filter_fn=self.filter_fn,
            custom_sparsity_map=self.custom_sparsity_map,
            batch_axes=self.batch_axes,
        )


@dataclasses.dataclass
class GlobalMagnitudePruning(GlobalPruning, MagnitudePruning):
    """Keeps the weights of the largest magnitude in the whole network."""


@dataclasses.dataclass
class GlobalSaliencyPruning(GlobalPruning, SaliencyPruning):
    """Keeps the weights of the largest |weight * gradient| in the whole network."""


def _normalize(score: chex.Array) -> jax.Array:
    wide = score.astype(jnp.float64 if score.dtype == jnp.float64 else jnp.float32)
    norm = jnp.sqrt(exact_counts.ordered_sum(wide * wide, tuple(range(wide.ndim))))
    return wide / jnp.where(norm > 0, norm, 1)
