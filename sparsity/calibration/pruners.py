"""Pruners that score weights by the inputs they meet.

They are updaters whose hooks take one more argument, `statistics`, as `sparsity.calibrate` returns
it: `instant_sparsify(params, statistics=statistics)`, or `tx.update(grads, state, params,
statistics=statistics)` along a schedule.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeGuard

import jax
import jax.numpy as jnp

from sparsity.base_updater import BaseUpdater
from sparsity.calibration.rows import Kind
from sparsity.calibration.statistics import Statistic, Statistics, statistic_of
from sparsity.core import sharding, trees
from sparsity.core.exact import ordered_sum
from sparsity.core.trees import KeyPath, PyTree
from sparsity.masks import Layerwise, Scope, Site, Sites, TopkFn, Wanted, create_masks
from sparsity.patterns import NByM
from sparsity.patterns.base import absolute_axis
from sparsity.sparsity_schedules import update_range
from sparsity.training.state import SparseState


def check_prunes_at_once(pruner: BaseUpdater, what: str) -> None:
    """Raises a ValueError if a pruner that changes `what` has a schedule."""
    if update_range(pruner.scheduler) is not None:
        raise ValueError(
            f"{type(pruner).__name__} changes {what} when it prunes, which no step of an optimizer "
            f"can, got scheduler = {pruner.scheduler!r}. Prune with instant_sparsify, and train "
            "with wrap_optax(tx, masks=masks)."
        )


@dataclasses.dataclass(kw_only=True)
class CalibratedPruning(BaseUpdater):
    """Scores each weight by its magnitude and the sum of squares of its input."""

    # Whether the weights of each output compete by themselves, or those of all its outputs.
    is_per_output: ClassVar[bool] = False
    # What `oneshot` calibrates with, as `kind` of `sparsity.calibrate`.
    statistics_kind: ClassVar[Kind] = "squares"

    def score(self, weights: jax.Array, squares: jax.Array) -> jax.Array:
        """Returns the scores of matrices, [*batch, outputs, inputs].

        Args:
          weights: [*batch, outputs, inputs], magnitudes.
          squares: [*batch, 1, inputs], sums of squares of the inputs.
        """
        raise NotImplementedError(f"{type(self).__name__} must override score.")

    def calculate_scores(
        self,
        params: PyTree,
        sparse_state: SparseState | None = None,
        grads: PyTree | None = None,
        statistics: Statistics | None = None,
        *,
        sites: Sites | None = None,
    ) -> PyTree:
        table = self.sites(params) if sites is None else sites

        def score(path: KeyPath, param: jax.Array) -> jax.Array | None:
            if statistics is not None and trees.path_names(path) not in statistics:
                return None  # it stays dense, or create_masks says what it lacks
            own = self._statistic(statistics, table[path], param.shape)

            def of(param: jax.Array, squares: jax.Array) -> jax.Array:
                weights = jnp.abs(own.matrices(param))
                weights = weights.astype(jnp.promote_types(weights.dtype, squares.dtype))
                scores = self.score(weights, squares.astype(weights.dtype)[..., None, :])
                return own.leaf(scores, param.shape)

            return sharding.shard_like(param, of, param, own.sums_of_squares())

        return trees.map_matched(score, params)

    def create_masks(
        self,
        scores: PyTree,
        sparsities: PyTree,
        target_sparsities: PyTree | None = None,
        statistics: Statistics | None = None,
        *,
        sites: Sites | None = None,
    ) -> PyTree:
        """Returns masks that keep the highest scores among those that compete.

        Blocks and channels compete as in every pruner, and so do all leaves in a global scope.

        Args:
          scores: tree of scores.
          sparsities: tree of sparsities, `None` for leaves that stay dense.
          target_sparsities: where a ramp ends, for N:M types; `sparsities` by default.
          statistics: those that the scores were computed from.
          sites: as in every updater.

        Raises:
          ValueError: a leaf that has a sparsity has no statistic, or N:M groups do not lie along
            its inputs.
        """
        table = self.sites(scores) if sites is None else sites
        shapes = trees.leaves_by_path(scores)
        apart = {}
        for path in trees.leaves_by_path(sparsities):
            shape = getattr(shapes.get(path), "shape", ())
            own = self._statistic(statistics, table[path], shape)
            if self.is_per_output:
                check_groups(table[path], own, shape)
            apart[path] = (*own.batch, *(own.output if self.is_per_output else ()))
        scope = Within(self.scope, apart) if is_per_slice(self.scope) else self.scope
        return create_masks(scope, table, scores, sparsities, target_sparsities, self.topk_fn)

    def _statistic(
        self, statistics: Statistics | None, site: Site, shape: tuple[int, ...]
    ) -> Statistic:
        return statistic_of(statistics, site, shape, "squares", type(self).__name__)


@dataclasses.dataclass(kw_only=True)
class WandaPruning(CalibratedPruning):
    """Keeps the largest |weight| x norm of its input, of each output separately.

    Source: Sun et al. 2023, "A Simple and Effective Pruning Approach for Large Language Models",
    equation 1.

    Example:
      >>> from sparsity.sparsity_distributions import Uniform
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
        return weights * jnp.sqrt(squares)


@dataclasses.dataclass(kw_only=True)
class RIAPruning(CalibratedPruning):
    """Keeps the largest relative importance x root of the norm of the input, over the layer.

    A weight's relative importance is its share of its output's magnitudes plus its share of its
    input's, so that no channel is lost as a whole.

    Source: Zhang et al. 2024, "Plug-and-Play: An Efficient Post-training Pruning Method for Large
    Language Models", equation 4 with a = 0.5.
    """

    def score(self, weights: jax.Array, squares: jax.Array) -> jax.Array:
        return (_share(weights, -1) + _share(weights, -2)) * jnp.sqrt(jnp.sqrt(squares))


def statistics_kind(pruner: BaseUpdater) -> Kind:
    """The kind of statistics that a pruner needs: Gram matrices unless it says or takes none."""
    kind: Kind | None = getattr(pruner, "statistics_kind", None)
    if kind is not None:
        return kind
    parameters = [
        parameter
        for hook in (pruner.calculate_scores, pruner.create_masks)
        for parameter in inspect.signature(hook).parameters.values()
    ]
    takes = any(x.name == "statistics" or x.kind is x.VAR_KEYWORD for x in parameters)
    prunes_itself = type(pruner).instant_sparsify is not BaseUpdater.instant_sparsify
    return "gram" if takes or prunes_itself else "squares"


def check_groups(site: Site, statistic: Statistic, shape: tuple[int, ...]) -> None:
    """Raises a ValueError that names the leaf if N:M groups do not lie along its inputs."""
    pattern = site.pattern
    if not isinstance(pattern, NByM):
        return
    axis = absolute_axis(pattern.axis, site.batch_axes, len(shape))
    if axis not in statistic.contracting:
        raise ValueError(
            f"{pattern} of {site.name!r}, shape {shape}: its weights are compared within an "
            f"output, and axis {pattern.axis} is none that its product contracts, "
            f"{statistic.contracting}. Give one of these as the axis of NByM; sparsity_type may be "
            "a function of (path, param)."
        )


def is_per_slice(scope: object) -> TypeGuard[Scope]:
    """Whether each slice of a leaf has a mask that depends on its own scores alone."""
    return getattr(scope, "per_slice", False) is True


@dataclasses.dataclass(frozen=True)
class Within(Layerwise):
    """A scope of slices whose entries compete where they agree along some axes.

    Attributes:
      scope: what selects within a slice.
      apart: these axes, by path.
    """

    scope: Scope
    apart: Mapping[KeyPath, tuple[int, ...]]

    def select(self, leaves: Sequence[Wanted], topk_fn: TopkFn | None) -> list[jax.Array]:
        """Returns a mask for each leaf."""
        masks = self.scope.select([self._moved(leaf) for leaf in leaves], topk_fn)
        return [
            jnp.moveaxis(mask, range(len(own)), own)
            for own, mask in zip(map(self._axes, leaves), masks, strict=True)
        ]

    def _moved(self, leaf: Wanted) -> Wanted:
        """The leaf with the axes in front."""
        axes = self._axes(leaf)
        if not axes:
            return leaf
        scores = jnp.moveaxis(jnp.asarray(leaf.scores), axes, range(len(axes)))
        return leaf._replace(lazy_scores=scores, site=leaf.site._replace(batch_axes=len(axes)))

    def _axes(self, leaf: Wanted) -> tuple[int, ...]:
        """The axes that separate single entries; units of several have an order of their own."""
        return self.apart[leaf.site.path] if leaf.site.pattern.is_elementwise else ()


def _share(weights: jax.Array, axis: int) -> jax.Array:
    """Each weight divided by the sum along an axis, 0 where that is 0."""
    total = jnp.expand_dims(ordered_sum(weights, (axis % weights.ndim,)), axis)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 0)
