"""Base of pruners that need statistics of the inputs of each weight.

A pruner that treats parameters one by one overrides `solve`, which prunes and corrects one of them;
pruners of channels override `solve_tree`. The base does all else: patterns, sparsities and checked
statistics by parameter, masks and their packing. Pruners by scores are in `scored.py`.

Where products multiply a parameter by constants, methods see multiplier * parameter, and their
weights are divided by the multiplier. Where that is 0 no output depends on the parameter: the entry
scores 0, and keeps its value if the mask keeps it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.statistics.statistic import Statistic, Statistics
from sparsity.calibration.statistics.sums import StatisticsKind
from sparsity.calibration.statistics.validation import (
    check_finite,
    check_solution,
    check_statistic,
    look_up_statistic,
    read_pruned,
)
from sparsity.core import sharding, trees
from sparsity.core.checks import check_iterable, is_traced
from sparsity.core.trees import Grads, KeyPath, Masks, Params, PyTree, Sparsities, Tree
from sparsity.masks import Site, adapt_scope, apply_masks, is_layerwise, pack_masks
from sparsity.sparsity_schedules import has_updates
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.hooks import ExtraArg, call_hook, is_overridden


def scale_params(
    params: Tree, statistics: PyTree
) -> tuple[Tree, PyTree, Callable[[Tree, Masks], Tree]]:
    """Returns the weights that products read, less offsets, their statistics, and the way back.

    Args:
      params: tree of parameters.
      statistics: `{path: Statistic}`; anything else is returned as it is.

    Returns:
      (weights, statistics of weights, `restore(new_weights, masks)`, which returns parameters).

    Raises:
      ValueError: a multiplier does not fit its parameter; from `restore`: kept weights differ from
        0 where the multiplier is 0.
    """
    by_path = statistics if isinstance(statistics, Mapping) else {}
    leaves: dict[KeyPath, tuple[jax.Array, jax.Array, jax.Array]] = {}
    for key_path, param in trees.leaves_by_path(params).items():
        statistic = by_path.get(trees.path_names(key_path))
        if isinstance(statistic, Statistic) and statistic.multiplier is not None:
            check_statistic(statistic, param.shape, trees.path_string(key_path))
            leaves[key_path] = param, statistic.scale_weights(param), statistic.multiplier

    def restore(weights: Tree, masks: Masks) -> Tree:
        masks_by_path = trees.leaves_by_path(masks) if leaves else {}

        def restore_leaf(key_path: KeyPath, new: jax.Array) -> jax.Array:
            if key_path not in leaves:
                return new
            mask = masks_by_path.get(key_path, jnp.ones(new.shape, jnp.uint8))
            like = new, jnp.zeros(())
            restored, is_lost = sharding.shard_like(like, _restore, *leaves[key_path], new, mask)
            if not is_traced(is_lost) and is_lost:
                raise ValueError(
                    f"{trees.path_string(key_path)!r}: the model multiplies some of its entries by "
                    "0, and the method gives weights to these entries, which no output would show. "
                    "Prune with WandaPruning, RIAPruning or SparseGPTPruning."
                )
            return sharding.place_like(leaves[key_path][0], restored)

        return trees.map_matched(restore_leaf, weights)

    if not leaves:
        return params, statistics, restore
    weights = trees.map_matched(lambda path, x: leaves[path][1] if path in leaves else x, params)
    names = {trees.path_names(key_path) for key_path in leaves}
    scaled = {path: x.for_scaled_weights() if path in names else x for path, x in by_path.items()}
    return weights, scaled, restore


def _restore(
    param: jax.Array, scaled: jax.Array, multiplier: jax.Array, new: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the parameter of new weights, and whether weights are lost on the way."""
    is_dead, is_kept = multiplier == 0, mask != 0
    quotient = new / jnp.where(is_dead, 1, multiplier).astype(new.dtype)
    # Quotients of weights that have not changed would be rounded.
    restored = jnp.where((new == scaled) | is_dead, param.astype(new.dtype), quotient)
    is_lost = (is_dead & is_kept & (new != 0)).any()
    return jnp.where(is_kept, restored, 0).astype(param.dtype), is_lost


class Problem(NamedTuple):
    """A parameter to prune: the arguments of `solve`."""

    site: Site
    param: jax.Array
    statistic: Statistic
    target: chex.Numeric | None  # `None` if only other parameters in its group have a sparsity


Problems: TypeAlias = Mapping[KeyPath, Problem]


@dataclasses.dataclass(kw_only=True)
class StatisticsPruning(BaseUpdater):
    """Prunes at once by statistics of the inputs; a subclass overrides `solve`.

    `instant_sparsify(params, statistics=sparsity.calibrate(fn, params, batches, kind))` prunes all
    parameters by the same statistics, `sparsity.oneshot` one after the other.

    Attributes:
      statistics_kind: class attribute: the kind of statistics that `solve` needs, the `kind` of
        `sparsity.calibrate`.
      corrects: class attribute: names the values that change besides the masks, so that no step of
        an optimizer can prune along a schedule; `None` if only masks change.

    Example:
      >>> class InputPruning(StatisticsPruning):
      ...     statistics_kind = "squares"
      ...     def solve(self, site, param, statistic, target):
      ...         squares = statistic.sums_of_squares()[..., None, :]
      ...         scores = statistic.to_matrices(param) ** 2 * squares
      ...         scores = statistic.from_matrices(scores, param.shape)
      ...         return param, site.pattern.select(scores, target)
      >>> from sparsity import Uniform
      >>> seen = Statistic(squares=jnp.array([9.0, 1.0]), count=2, contracting=(0,), output=(1,))
      >>> pruner = InputPruning(sparsity_distribution_fn=Uniform(0.5))
      >>> pruner.instant_sparsify(jnp.array([[1.0], [2.0]]), statistics={(): seen})[0].T
      Array([[1., 0.]], dtype=float32)
    """

    statistics_kind: ClassVar[StatisticsKind] = "gram"
    corrects: ClassVar[str | None] = "weights"

    def check_fields(self) -> None:
        super().check_fields()
        if self.corrects and has_updates(self.scheduler):
            raise ValueError(
                f"{type(self).__name__} changes {self.corrects} when it prunes, which no step of "
                f"an optimizer can, got scheduler = {self.scheduler!r}. Prune with "
                "instant_sparsify, and train with wrap_optax(tx, masks=masks)."
            )
        self.check_scope()

    def solve(
        self, site: Site, param: jax.Array, statistic: Statistic, target: chex.Numeric
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the weights of a parameter, corrected for the removed ones, and its mask.

        Args:
          site: the parameter: its name, pattern and batch axes.
          param: its weights, not empty.
          statistic: the checked statistic of its inputs. `statistic.to_matrices(param)` is [*batch,
            outputs, inputs]; `statistic.from_matrices(matrices, param.shape)` undoes it.
          target: its sparsity, a scalar in [0, 1].

        Returns:
          (weights, mask) of the parameter's shape. Entries outside the mask become 0.
        """
        raise NotImplementedError(f"{type(self).__name__} must override solve.")

    def solve_tree(
        self,
        params: Params,
        targets: Sparsities,
        problems: Problems,
        grads: Grads | None = None,
        **extra_args: ExtraArg,
    ) -> tuple[Params, Masks]:
        """Returns (weights, masks) of a tree; `solve` treats each parameter by itself.

        Pruners that compare parameters override this method, as pruners of channels do. Weights of
        another floating dtype are cast to that of their parameter.

        Args:
          params: tree of parameters.
          targets: tree of sparsities, `None` for parameters that stay dense.
          problems: by path, of `calibrated_paths`.
          grads: tree of gradients of `instant_sparsify`, for overrides; `solve` needs none.
          **extra_args: other arguments of `instant_sparsify`, for overrides.
        """
        weights: dict[KeyPath, jax.Array] = {}
        masks: dict[KeyPath, jax.Array] = {}
        for key_path, problem in problems.items():
            site, param, statistic, target = problem
            if target is None:
                raise ValueError(
                    f"{type(self).__name__}.calibrated_paths names {site.name!r}, which has no "
                    "sparsity, so that solve cannot prune it. Override solve_tree, too."
                )
            if np.ndim(target):
                raise ValueError(
                    f"{type(self).__name__} solves all slices of {site.name!r} at one sparsity, "
                    f"got {np.shape(target)} of them. Give one, or prune with "
                    "sparsity.oneshot(..., sequential=True), which takes the layers of a scan one "
                    "by one."
                )
            if not param.size:
                weights[key_path], masks[key_path] = param, jnp.ones(param.shape, jnp.uint8)
                continue
            solution = self.solve(site, param, statistic, target)
            check_solution(solution, f"{type(self).__name__}.solve", site.name, param)
            weights[key_path], masks[key_path] = (sharding.place_like(param, x) for x in solution)
        return (
            trees.map_matched(weights.get, params),
            trees.map_matched(lambda key_path, _: masks.get(key_path), params),
        )

    def calibrated_paths(self, params: Params, targets: Sparsities) -> Iterable[KeyPath]:
        """Returns the paths of the parameters that need statistics: all with a sparsity."""
        return trees.leaves_by_path(targets)

    def instant_sparsify(
        self,
        params: Tree,
        grads: Grads | None = None,
        *,
        statistics: Statistics | None = None,
        **extra_args: ExtraArg,
    ) -> tuple[Tree, Masks]:
        """Prunes and corrects at once.

        Args:
          params: tree of parameters, or a single array.
          grads: tree of gradients, for a `solve_tree` that names them.
          statistics: `{path: Statistic}` of the kind `statistics_kind`, for each parameter that has
            a sparsity; pruners of channels need one for each parameter that reads them.
          **extra_args: `solve_tree` gets the arguments that its signature names, and passes them
            to the hooks of scores in pruners of channels that have scores.

        Returns:
          (pruned and corrected params, masks); with `use_packed_masks` the masks are packed.

        Raises:
          ValueError: a statistic is missing or does not fit, or the pruner cannot prune a
            parameter; the error names the parameter.
        """
        self.check_fields()
        sites = self.sites(params)
        targets = self.compute_targets(params, sites)
        params, statistics, restore = scale_params(params, statistics)
        leaves, sparsities = map(trees.leaves_by_path, (params, targets))
        problems = {}
        name = type(self).__name__
        paths = self.calibrated_paths(params, targets)
        check_iterable(f"the result of {name}.calibrated_paths", paths)
        for key_path in paths:
            if key_path not in leaves:
                raise ValueError(
                    f"{name}.calibrated_paths must return key paths of the params, got "
                    f"{key_path!r}."
                )
            site, param, kind = sites[key_path], leaves[key_path], self.statistics_kind
            statistic = look_up_statistic(statistics, site, param.shape, kind, name)
            problems[key_path] = Problem(site, param, statistic, sparsities.get(key_path))
        solves_tree = is_overridden(self, "solve_tree", StatisticsPruning)
        label = f"{name}.{'solve_tree' if solves_tree else 'solve'}"
        extra = {**extra_args, "grads": grads}
        solved = call_hook(self.solve_tree, params, targets, problems, extra=extra)
        required = adapt_scope(self.scope, sites).masked_paths(params, targets)
        weights, masks = read_pruned(solved, label, params, required, self.use_packed_masks)
        # `solve` changes the parameters of problems alone; others, such as embeddings, are large.
        check_finite(weights, label, params, leaves if solves_tree else problems)
        pruned = restore(apply_masks(weights, masks), masks)
        return pruned, pack_masks(masks, params) if self.use_packed_masks else masks

    def check_scope(self) -> None:
        """Raises a ValueError for a scope or a topk_fn, which `solve` would never call."""
        if not is_layerwise(self.scope) or self.topk_fn is not None:
            raise ValueError(
                f"{type(self).__name__} solves each parameter by itself and needs scope = "
                f"Layerwise() and topk_fn = None, got scope = {self.scope!r}, topk_fn = "
                f"{self.topk_fn!r}."
            )
