"""Warnings of training that would leave weights or masks as they are."""

from __future__ import annotations

import jax
import numpy as np

from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.trees import Masks, Params, Sparsities
from sparsity.core.warn import warn
from sparsity.masks import leading_axes
from sparsity.sparsity_schedules import update_range
from sparsity.training.updater_hooks import UpdaterHooks


def warn_of_idle(
    updater: UpdaterHooks, params: Params, targets: Sparsities, masks: Masks, starts_dense: bool
) -> None:
    """Warns of masks that are missing or never move, and of weights that no step would train.

    Args:
      updater: updater of the masks.
      params: tree of parameters.
      targets: tree of target sparsities.
      masks: tree of the first masks.
      starts_dense: whether traced masks, whose values are unknown, count as all ones.
    """
    steps, scheduler = update_range(updater.scheduler), f"scheduler = {updater.scheduler!r}"
    name, leaves = type(updater).__name__, jax.tree.leaves(masks)
    remedy = "or start from masks with wrap_optax(tx, masks=masks)."
    if steps is None:
        prunes = any(is_traced(t) or jax.device_get(t) > 0 for t in jax.tree.leaves(targets))
        if not leaves or not prunes:
            return
        if all(starts_dense if is_traced(x) else np.all(jax.device_get(x)) for x in leaves):
            warn(
                f"{name} has target sparsities, but all masks are ones and {scheduler} never "
                "updates them: training stays dense. Set a scheduler, for example "
                "PolynomialSchedule(update_freq=100, update_start_step=1_000, "
                "update_end_step=10_000) (update_freq, update_start_step and update_end_step in a "
                f"configuration), {remedy}"
            )
        elif updater.schedule_type == "periodic":
            warn(
                f"{name} moves masks, but {scheduler} never updates them: the first masks stay. "
                "Set a scheduler, for example PeriodicSchedule(update_freq=100) (update_freq in a "
                "configuration), or train within fixed masks with StaticRandomSparse."
            )
        return
    has_no_target = updater.get_distribution_fn() is not None and not jax.tree.leaves(targets)
    if has_no_target and not leaves and _has_matrices(updater, params):
        warn(
            f"{name} has {scheduler}, but no parameter has a target sparsity: training stays "
            f"dense. Set sparsity_distribution_fn, for example Uniform(0.8), {remedy}"
        )
    start, end = steps
    last = start + 3 if end is None else end
    samples = {start, start + 1, (start + last) // 2}
    is_update = updater.scheduler.is_mask_update_iter
    if updater.skip_gradients and last > start + 1 and all(map(bool, map(is_update, samples))):
        warn(
            f"{name} skips the gradients of steps that update masks, and {scheduler} updates them "
            f"in every step from {start} {'on' if end is None else f'to {end}'}: no weight is "
            "trained then. Set a larger update_freq, or skip_gradients=False."
        )


def _has_matrices(updater: UpdaterHooks, params: Params) -> bool:
    """Returns whether a parameter has more than one axis beyond its batch axes."""
    weights = trees.leaves_by_path(trees.prunable(params))
    return any(
        param.ndim - leading_axes(updater.batch_axes, trees.path_names(path), param) > 1
        for path, param in weights.items()
    )
