"""Wanda and RIA: pruners that score each weight by its magnitude and its inputs.

Their hooks take one more argument, `statistics`, as `sparsity.calibrate` returns it:
`instant_sparsify(params, statistics=statistics)`, or `tx.update(grads, state, params,
statistics=statistics)` along a schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from sparsity.calibration.reuse import compile_or_reuse
from sparsity.calibration.statistics.statistic import Statistic, Statistics
from sparsity.calibration.statistics.sums import StatisticsKind
from sparsity.calibration.statistics.validation import look_up_statistic
from sparsity.core import sharding, trees
from sparsity.core.arrays import promote
from sparsity.core.checks import check_real_array
from sparsity.core.trees import KeyPath, Params, PyTree, Sparsities
from sparsity.masks import (
    Layerwise,
    Scope,
    ScoredSite,
    Site,
    Sites,
    TopkFn,
    adapt_scope,
    has_statement,
)
from sparsity.patterns.base import absolute_axis
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.state import SparseState


@dataclasses.dataclass(kw_only=True)
class ScoredPruning(BaseUpdater):
    """Scores weights by their magnitudes and the sums of squares of their inputs.

    A subclass overrides `score` alone. Masks follow schedules and scopes as in every updater that
    scores weights; kept weights do not change.

    Attributes:
      is_per_output: class attribute: only weights of the same output compete, instead of all
        weights of a matrix.
    """

    is_per_output: ClassVar[bool] = False
    statistics_kind: ClassVar[StatisticsKind] = "squares"

    def score(self, weights: jax.Array, squares: jax.Array) -> jax.Array:
        """Returns the scores of matrices, [*batch, outputs, inputs].

        Args:
          weights: [*batch, outputs, inputs], magnitudes.
          squares: [*batch, 1, inputs], sums of squares of the inputs.
        """
        raise NotImplementedError(f"{type(self).__name__} must override score.")

    def calculate_scores(
        self,
        params: Params,
        sparse_state: SparseState | None = None,
        grads: PyTree | None = None,
        statistics: Statistics | None = None,
        *,
        sites: Sites | None = None,
    ) -> PyTree:
        sites = sites or self.sites(params)
        kind, label = self.statistics_kind, type(self).__name__

        def score(key_path: KeyPath, param: jax.Array) -> jax.Array | None:
            if isinstance(statistics, Mapping) and trees.path_names(key_path) not in statistics:
                return None  # stays dense, or create_masks names the missing statistic
            site = sites[key_path]
            statistic = look_up_statistic(statistics, site, param.shape, kind, label)
            return self._score_leaf(site.name, statistic, statistic.scale_weights(param))

        return trees.map_matched(score, params)

    def _score_leaf(self, name: str, statistic: Statistic, param: jax.Array) -> jax.Array:
        """Returns the scores of a parameter, by one compiled program."""

        def score(param: jax.Array, squares: jax.Array) -> jax.Array:
            weights = abs(statistic.to_matrices(param))
            weights = weights.astype(promote(weights.dtype, squares.dtype))
            scores = self.score(weights, squares.astype(weights.dtype)[..., None, :])
            label = f"the result of {type(self).__name__}.score of {name!r}"
            check_real_array(label, scores, weights.shape)
            return statistic.from_matrices(scores, param.shape)

        squares = statistic.sums_of_squares()
        return sharding.shard_like(param, compile_or_reuse(score, param, squares), param, squares)

    def create_masks(
        self,
        scores: PyTree,
        sparsities: Sparsities,
        target_sparsities: Sparsities | None = None,
        statistics: Statistics | None = None,
        *,
        sites: Sites | None = None,
    ) -> PyTree:
        """Returns masks that keep the highest of the scores that compete.

        Blocks and channels compete as in every pruner, and so do all parameters in a global scope.

        Args:
          scores: tree of scores.
          sparsities: tree of sparsities, `None` for parameters that stay dense.
          target_sparsities: ends of ramps, for N:M types; `sparsities` by default.
          statistics: statistics that the scores were computed from.
          sites: patterns and batch axes; `None` resolves them from the scores.

        Raises:
          ValueError: a parameter that has a sparsity has no statistic, or the groups of N:M or
            `FanIn` do not lie along its inputs.
        """
        sites = sites or self.sites(scores)
        shapes = trees.leaves_by_path(scores)
        kind, label = self.statistics_kind, type(self).__name__
        split_axes = {}
        for key_path in trees.leaves_by_path(sparsities):
            shape = getattr(shapes.get(key_path), "shape", ())
            statistic = look_up_statistic(statistics, sites[key_path], shape, kind, label)
            split_axes[key_path] = statistic.batch
            if self.is_per_output:
                check_groups(sites[key_path], statistic, shape)
                split_axes[key_path] += statistic.output
        # Other scopes compare weights of several outputs, so that no slice is to be split.
        scope = self.scope
        if has_statement(scope, "per_slice"):
            scope = SplitScope(scope, split_axes)
        tree_scope = adapt_scope(scope, sites, target_sparsities, self.topk_fn)
        return tree_scope.select_tree(scores, sparsities)


@dataclasses.dataclass(kw_only=True)
class WandaPruning(ScoredPruning):
    """Keeps the largest |weight| x norm of its input, of each output separately.

    Source: Sun et al. 2023, "A Simple and Effective Pruning Approach for Large Language Models",
    equation 1.

    Example:
      >>> from sparsity import Uniform
      >>> seen = Statistic(squares=jnp.array([100.0, 1.0, 4.0, 9.0]), count=8, contracting=(0,),
      ...                  output=(1,))
      >>> kernel = jnp.array([[0.1, 1.0], [2.0, 0.5], [2.0, 0.1], [0.1, 1.0]])
      >>> pruner = WandaPruning(sparsity_distribution_fn=Uniform(0.5))
      >>> pruner.instant_sparsify({"kernel": kernel}, statistics={("kernel",): seen})[1]["kernel"]
      Array([[0, 1],
             [1, 0],
             [1, 0],
             [0, 1]], dtype=uint8)
    """

    is_per_output: ClassVar[bool] = True

    def score(self, weights: jax.Array, squares: jax.Array) -> jax.Array:
        return weights * jnp.sqrt(squares)  # S_ij = |W_ij| ||X_j||_2


@dataclasses.dataclass(kw_only=True)
class RIAPruning(ScoredPruning):
    """Keeps the largest relative importance x root of the norm of the input, over the layer.

    A weight's relative importance is its share of its output's magnitudes plus its share of its
    input's, so that the weights of small channels compete with those of large ones.

    Source: Zhang et al. 2024, "Plug-and-Play: An Efficient Post-training Pruning Method for Large
    Language Models", equation 4 with a = 0.5.

    Example:
      >>> from sparsity import Uniform
      >>> seen = Statistic(squares=jnp.ones(2), count=8, contracting=(0,), output=(1,))
      >>> kernel = jnp.array([[1.0, 3.0], [1.0, 1.0]])
      >>> pruner = RIAPruning(sparsity_distribution_fn=Uniform(0.5))
      >>> pruner.instant_sparsify(kernel, statistics={(): seen})[1]  # shares 0.75, 1.5, 1, 0.75
      Array([[0, 1],
             [1, 0]], dtype=uint8)
    """

    def score(self, weights: jax.Array, squares: jax.Array) -> jax.Array:
        # RI_ij = |W_ij| / sum_j |W_ij| + |W_ij| / sum_i |W_ij|; RIA_ij = RI_ij ||X_j||_2^a
        return (_divide_by_sum(weights, -1) + _divide_by_sum(weights, -2)) * jnp.sqrt(
            jnp.sqrt(squares)
        )


def check_groups(site: Site, statistic: Statistic, shape: tuple[int, ...]) -> None:
    """Raises a ValueError that names the parameter if N:M or `FanIn` runs along axes of outputs."""
    pattern = site.pattern
    for axis in pattern.input_axes:
        if absolute_axis(axis, site.batch_axes, len(shape)) not in statistic.contracting:
            pattern_name = type(pattern).__name__
            raise ValueError(
                f"{pattern} of {site.name!r}, shape {shape}: its weights are compared within an "
                f"output, and axis {axis} is none that its product contracts, "
                f"{statistic.contracting}. Give one of these as the axis of {pattern_name}; "
                "sparsity_type may be a function of (path, param)."
            )


@dataclasses.dataclass(frozen=True)
class SplitScope(Layerwise):
    """Scope of slices whose entries compete where they agree along some axes.

    Attributes:
      scope: selects within a slice.
      split_axes: axes along which entries must agree to compete, by key path.
    """

    scope: Scope
    split_axes: Mapping[KeyPath, tuple[int, ...]]

    def select(self, scored_sites: Sequence[ScoredSite], topk_fn: TopkFn | None) -> list[jax.Array]:
        """Returns a mask for each parameter."""
        moved, moves = [], []
        for scored in scored_sites:
            site = scored.site
            # Units of several entries are not split.
            axes = self.split_axes[site.key_path] if site.pattern.is_elementwise else ()
            first_axes = tuple(range(len(axes)))
            moves.append((first_axes, axes))
            if axes:
                scores = jnp.moveaxis(jnp.asarray(scored.scores), axes, first_axes)
                site = site._replace(batch_axes=len(axes))
                scored = scored._replace(scores=scores, site=site)
            moved.append(scored)
        masks = self.scope.select(moved, topk_fn)
        return [jnp.moveaxis(mask, *move) for mask, move in zip(masks, moves, strict=True)]


def _divide_by_sum(weights: jax.Array, axis: int) -> jax.Array:
    """Returns each weight divided by the sum along an axis, 0 where that is 0."""
    total = jnp.sum(weights, axis=axis, keepdims=True)
    # The inner `where` avoids 0 / 0.
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0)
