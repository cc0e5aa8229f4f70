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
    """Warns of masks that are missing or stay all ones, and of weights that no step would train.

    Args:
      updater: updater of the masks.
      params: tree of parameters.
      targets: tree of target sparsities.
      masks: tree of the first masks.
      starts_dense: whether traced masks, whose values are unknown, count as all ones.
    """
    steps = update_range(updater.scheduler)
    if steps is None:
        _warn_of_fixed_masks(updater, targets, masks, starts_dense)
        return
    _warn_of_missing_targets(updater, params, targets, masks)
    if updater.skip_gradients:
        _warn_of_skipped_steps(updater, *steps)


def _warn_of_fixed_masks(
    updater: UpdaterHooks, targets: Sparsities, masks: Masks, starts_dense: bool
) -> None:
    """Warns of masks that no step updates, if they are ones or those of an algorithm that moves."""
    leaves = jax.tree.leaves(masks)
    prunes = any(is_traced(t) or jax.device_get(t) > 0 for t in jax.tree.leaves(targets))
    if not leaves or not prunes:
        return
    name, fixed = type(updater).__name__, f"scheduler = {updater.scheduler!r} never updates them"
    if all(starts_dense if is_traced(mask) else np.all(jax.device_get(mask)) for mask in leaves):
        warn(
            f"{name} has target sparsities, but all masks are ones and {fixed}: training stays "
            "dense. Set a scheduler, for example PolynomialSchedule(update_freq=100, "
            "update_start_step=1_000, update_end_step=10_000) (update_freq, update_start_step and "
            "update_end_step in a configuration), or start from masks with wrap_optax(tx, "
            "masks=masks)."
        )
    elif updater.schedule_type == "periodic":
        warn(
            f"{name} moves masks, but {fixed}: the first masks stay. Set a scheduler, for example "
            "PeriodicSchedule(update_freq=100) (update_freq in a configuration), or train within "
            "fixed masks with StaticRandomSparse."
        )


def _warn_of_missing_targets(
    updater: UpdaterHooks, params: Params, targets: Sparsities, masks: Masks
) -> None:
    """Warns of a schedule of masks, if no parameter has a mask or a target."""
    has_no_target = updater.get_distribution_fn() is not None and not jax.tree.leaves(targets)
    if has_no_target and not jax.tree.leaves(masks) and _has_matrices(updater, params):
        warn(
            f"{type(updater).__name__} has scheduler = {updater.scheduler!r}, but no parameter has "
            "a target sparsity: training stays dense. Set sparsity_distribution_fn, for example "
            "Uniform(0.8), or start from masks with wrap_optax(tx, masks=masks)."
        )


def _warn_of_skipped_steps(updater: UpdaterHooks, start: int, end: int | None) -> None:
    """Warns if every step from `start` to `end` updates masks, and so trains nothing."""
    last = start + 3 if end is None else end
    samples = {start, start + 1, (start + last) // 2}
    every = all(bool(updater.scheduler.is_mask_update_iter(step)) for step in samples)
    if every and last > start + 1:
        warn(
            f"{type(updater).__name__} skips the gradients of steps that update masks, and "
            f"scheduler = {updater.scheduler!r} updates them in every step from {start} "
            f"{'on' if end is None else f'to {end}'}: no weight is trained then. Set a larger "
            "update_freq, or skip_gradients=False."
        )


def _has_matrices(updater: UpdaterHooks, params: Params) -> bool:
    """Returns whether a parameter has more than one axis beyond its batch axes."""
    weights = trees.leaves_by_path(trees.prunable(params))
    return any(
        param.ndim - leading_axes(updater.batch_axes, trees.path_names(path), param) > 1
        for path, param in weights.items()
    )
