"""Pruning and refitting of a tree by statistics: the step that one-shot pruning repeats.

A refit is any object with the method of `Refit` or `BiasRefit`, and a pruner any updater; both may
state the kind of statistics that they need.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import chex
import jax
import jax.numpy as jnp

from sparsity.calibration.pruners.base import scale_params
from sparsity.calibration.pruners.scored import SplitScope
from sparsity.calibration.refits.layers import BiasRefit, Refit, Select
from sparsity.calibration.statistics.grams import output_error
from sparsity.calibration.statistics.statistic import Statistic, Statistics
from sparsity.calibration.statistics.sums import (
    FIELDS_BY_KIND,
    StatisticsKind,
    check_statistics_kind,
)
from sparsity.calibration.statistics.validation import (
    check_solution,
    check_solvable,
    look_up_statistic,
    read_pruned,
)
from sparsity.core import sharding, trees
from sparsity.core.trees import KeyPath, Masks, PyTree, Tree
from sparsity.masks import ScoredSite, Site, are_kept, has_statement, pack_masks
from sparsity.training.base_updater import BaseUpdater


def combine_kinds(pruner: object, refit: object | None) -> StatisticsKind:
    """Returns the kind of statistics of a run, which always takes means, for centred errors.

    Raises:
      ValueError: no kind of statistics gives the sums of both the pruner and the refit.
    """
    methods = [pruner] if refit is None else [pruner, refit]
    fields = {"sums"}.union(*(FIELDS_BY_KIND[read_kind(method)] for method in methods))
    kinds = [kind for kind, fields_of_kind in FIELDS_BY_KIND.items() if fields <= fields_of_kind]
    if not kinds:
        names = " and ".join(map(method_name, methods))
        raise ValueError(f"{names}: no statistics_kind gives {sorted(fields)}, which a run needs.")
    return kinds[0]


def method_name(method: object) -> str:
    """Returns the name of a pruner's or refit's class, or of a function, for messages.

    Example:
      >>> method_name(lambda dense, pruned, mask, statistic, select: (pruned, mask))
      'the function <lambda>'
    """
    function = method.func if isinstance(method, functools.partial) else method
    name = getattr(function, "__name__", None)
    return type(method).__name__ if name is None else f"the function {name}"


def read_kind(method: object) -> StatisticsKind:
    """Returns the `statistics_kind` that a pruner or a refit states.

    By default a pruner needs sums of squares, for errors and not for masks; a refit needs Gram
    matrices, and means for biases.
    """
    default = "moments" if isinstance(method, BiasRefit) else "gram"
    default = "squares" if isinstance(method, BaseUpdater) else default
    kind: PyTree = getattr(method, "statistics_kind", default)
    check_statistics_kind(kind, method_name(method))
    return kind


def prune(
    pruner: BaseUpdater, params: Tree, statistics: Statistics, refit: Refit | None = None
) -> tuple[Tree, Masks]:
    """Prunes with statistics of the inputs, and refits the kept weights.

    Args:
      pruner: any updater that prunes at once.
      params: tree of parameters.
      statistics: `{path: Statistic}` for each parameter that has a sparsity.
      refit: `LeastSquares()`, `ADMM()` or another `Refit`.

    Returns:
      (pruned params, masks), as `pruner.instant_sparsify` returns them.

    Raises:
      ValueError: the pruner is no updater or the refit no `Refit`, either is a class, or a
        statistic is missing, does not fit its parameter, or lacks the sums that the refit needs;
        the refit returns arrays of another shape or kind.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> x = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> seen = sparsity.Statistic(gram=x.T @ x, count=2, contracting=(0,), output=(1,))
      >>> pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> kernel = jnp.array([[4.0], [2.0]])
      >>> prune(pruner, kernel, {(): seen}, refit=sparsity.LeastSquares())[0].T  # 4 + 2 x 1 / 2
      Array([[5., 0.]], dtype=float32)
    """
    check_pruner_and_refit(pruner, refit)
    if isinstance(refit, BiasRefit):
        raise ValueError(
            f"{method_name(refit)} changes the biases that follow weights, which only the "
            f"program of a model shows: give refit = {refit!r} to oneshot."
        )
    _, refitted, masks = prune_and_refit(pruner, params, statistics, refit)
    return refitted, pack_masks(masks, params) if pruner.use_packed_masks else masks


def prune_and_refit(
    pruner: BaseUpdater,
    params: Tree,
    statistics: Statistics,
    refit: Refit | None,
    required: Iterable[KeyPath] = (),
) -> tuple[Tree, Tree, Masks]:
    """Returns (pruned params, refitted params, masks that are not packed), checked.

    Args:
      pruner: the updater.
      params: tree of parameters.
      statistics: `{path: Statistic}` for each parameter that has a sparsity.
      refit: refits all parameters that have a mask; without one the refitted params are the pruned.
      required: paths of the parameters that must have a mask.
    """
    params, statistics, restore = scale_params(params, statistics)
    result = pruner.instant_sparsify(params, statistics=statistics)
    label = f"{type(pruner).__name__}.instant_sparsify"
    pruned, masks = read_pruned(result, label, params, required, pruner.use_packed_masks)
    pruned_params = restore(pruned, masks)
    if refit is None:
        return pruned_params, pruned_params, masks
    sites = pruner.sites(params)
    targets = trees.leaves_by_path(pruner.compute_targets(params, sites))
    leaves, pruned_leaves = map(trees.leaves_by_path, (params, pruned))
    refitted: dict[KeyPath, tuple[jax.Array, jax.Array]] = {}
    for key_path, mask in trees.leaves_by_path(masks).items():
        layer = pruned_leaves[key_path], mask
        if key_path in targets or trees.path_names(key_path) in statistics:
            site, target = sites[key_path], targets.get(key_path, 0.0)
            layer = _refit_layer(refit, pruner, site, target, leaves[key_path], layer, statistics)
        refitted[key_path] = layer  # without either, a bias of coupled channels
    weights = trees.map_matched(lambda key_path, x: refitted.get(key_path, (x,))[0], pruned)
    masks = trees.map_matched(lambda key_path, _: refitted[key_path][1], masks)
    return pruned_params, restore(weights, masks), masks


def check_pruner_and_refit(pruner: object, refit: object = None) -> None:
    """Raises a ValueError unless a pruner and a refit are instances that can be called."""
    if not isinstance(pruner, BaseUpdater):
        raise ValueError(
            "pruner must be an updater, for example "
            f"WandaPruning(sparsity_distribution_fn=Uniform(0.5)), {_describe_value(pruner)}."
        )
    if not pruner.prunes_at_once:
        raise ValueError(
            f"{type(pruner).__name__} trains sparse from the start and prunes no trained model. "
            "Give MagnitudePruning, WandaPruning, RIAPruning, SparseGPTPruning, FLAPPruning, "
            "OSSCARPruning or another updater that has instant_sparsify."
        )
    is_refit = callable(refit) or isinstance(refit, BiasRefit)
    if refit is not None and (isinstance(refit, type) or not is_refit):
        expected = "None, LeastSquares(), ADMM(), Means() or another `Refit` or `BiasRefit`"
        raise ValueError(f"refit must be {expected}, {_describe_value(refit)}.")


def _describe_value(value: object) -> str:
    """Returns the end of a message about a value, which may be a class instead of an instance."""
    if isinstance(value, type):
        return f"got the class {value.__name__}: make an instance, {value.__name__}(...)"
    return f"got {value!r}"


def _refit_layer(
    refit: Refit,
    pruner: BaseUpdater,
    site: Site,
    target: chex.Numeric,
    dense: jax.Array,
    pruned_layer: tuple[jax.Array, jax.Array],
    statistics: Statistics,
) -> tuple[jax.Array, jax.Array]:
    """Refits the weights of a parameter that a pruner kept, unless that makes the outputs worse.

    Without a Gram matrix a parameter stays as it is if the refit returns NaN or infinities.

    Args:
      refit: `LeastSquares()`, `ADMM()` or another `Refit`.
      pruner: the updater that has pruned.
      site: the parameter.
      target: its sparsity.
      dense: its weights before pruning.
      pruned_layer: its weights and mask after pruning.
      statistics: `{path: Statistic}`.

    Returns:
      (refitted weights, mask).

    Raises:
      ValueError: the statistic is missing, does not fit the parameter, or lacks the refit's sums.
    """
    if not dense.size:
        return pruned_layer
    kind, label = read_kind(refit), method_name(refit)
    statistic = look_up_statistic(statistics, site, dense.shape, kind, label)
    if kind == "gram":
        check_solvable(statistic, dense, site.name, getattr(refit, "damping", None))
    select = _make_select(pruner, site, statistic, target)
    solution = _call_refit(refit, dense, *pruned_layer, statistic, select)
    check_solution(solution, label, site.name, dense)
    weights, mask = sharding.shard_like(
        (dense, dense), _choose_better, dense, solution, pruned_layer, statistic
    )
    return sharding.place_like(dense, weights), sharding.place_like(dense, mask)


def _call_refit(
    refit: Refit,
    dense: jax.Array,
    pruned: jax.Array,
    mask: jax.Array,
    statistic: Statistic,
    select: Select,
) -> tuple[jax.Array, jax.Array]:
    """Returns the result of a refit, which gets masks without the entries that must stay 0."""
    live = statistic.multiplier
    if live is None:
        return refit(dense, pruned, mask, statistic, select)
    live_mask = live.astype(jnp.uint8)

    def select_live(scores: jax.Array, share: float) -> jax.Array:
        nonlocal mask
        mask = select(jnp.where(live, scores, 0), share)
        return mask * live_mask

    solution = refit(dense, pruned, mask * live_mask, statistic, select_live)
    if not isinstance(solution, tuple) or len(solution) != 2:
        return solution  # `check_solution` says what is wrong
    # The others are kept as the mask says that was chosen last.
    return solution[0], jnp.where(live, solution[1], mask)


@jax.jit
def _choose_better(
    dense: jax.Array,
    solution: tuple[jax.Array, jax.Array],
    pruned_layer: tuple[jax.Array, jax.Array],
    statistic: Statistic,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weights and the mask that change the outputs of a parameter less.

    Refitted weights get the dtype of the parameter and become 0 outside their mask. Weights that
    are not finite change outputs more.
    """
    solution = (
        jnp.where(solution[1] != 0, solution[0], 0).astype(dense.dtype),
        are_kept(solution[1]),
    )

    def measure_error(weights: jax.Array) -> jax.Array:
        if statistic.gram is None:
            return jnp.sum(~jnp.isfinite(weights))
        return output_error(statistic, dense - weights).sum()

    is_better = measure_error(solution[0]) <= measure_error(pruned_layer[0])
    pairs = zip(solution, pruned_layer, strict=True)
    weights, mask = (jnp.where(is_better, new, before) for new, before in pairs)
    return weights, mask


def _make_select(
    pruner: BaseUpdater, site: Site, statistic: Statistic, target: chex.Numeric
) -> Select:
    """Returns the selection of the highest scores of each matrix, in the pattern of the pruner."""

    def select(scores: jax.Array, share: float) -> jax.Array:
        if not has_statement(pruner.scope, "per_slice"):
            raise ValueError(
                f"The refit chooses the mask of {site.name!r} alone and needs scope = Layerwise(), "
                f"got {pruner.scope!r}. Give a refit that keeps masks: ADMM(gradual=0)."
            )
        sparsity = share * target
        # Both the current and the final sparsity, so that N:M keeps n of m at every share.
        scored = ScoredSite(site, scores, sparsity, sparsity)
        matrices = SplitScope(pruner.scope, {site.key_path: statistic.batch})
        (mask,) = matrices.select([scored], pruner.topk_fn)
        return mask

    return select
