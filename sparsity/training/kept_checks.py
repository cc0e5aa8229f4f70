"""Checks that an updater with `use_compact_state` keeps static numbers of weights."""

from __future__ import annotations

from sparsity.masks import Site, has_statement
from sparsity.sparsity_schedules import has_updates
from sparsity.training.updater_hooks import UpdaterHooks, keeps_dense_weights


def check_compact_fields(updater: UpdaterHooks) -> None:
    """Raises a ValueError for fields that exclude `use_compact_state`; names field and value."""
    name, schedule = type(updater).__name__, updater.scheduler
    refused = "use_compact_state=True stores the optimizer's state for kept weights only"
    if updater.is_sparse_updates is False or keeps_dense_weights(updater):
        is_off = updater.is_sparse_updates is False
        field = "is_sparse_updates = False" if is_off else f"keeps_dense_weights holds for {name}"
        raise ValueError(
            f"{refused}, but {field}: pruned weights keep values and would be trained. Leave "
            "use_compact_state off."
        )
    if not updater.is_sparse_gradients:
        raise ValueError(
            f"{refused}, but is_sparse_gradients = False shows gradients of pruned weights to the "
            f"optimizer. Give {name} is_sparse_gradients=True too."
        )
    if not has_updates(schedule):
        return
    if updater.keeps_count == "any":
        raise ValueError(
            f"{refused}, but with scheduler = {schedule!r} {_describe_count(updater)}. The option "
            "can be had with static_sparse, set, rigl and srigl, or when masks are final: "
            "scheduler=NoUpdateSchedule() and wrap_optax(tx, masks=masks)."
        )
    if not has_statement(updater.scope, "keeps_targets"):
        raise ValueError(
            f"{refused}, but under scope = {updater.scope!r} an update of the masks may change the "
            "numbers of single parameters. Use scope = Layerwise(), or NoUpdateSchedule(). A scope "
            "of your own that keeps them states the class attribute `keeps_targets = True`."
        )


def check_first_masks(updater: UpdaterHooks) -> None:
    """Raises a ValueError if the first masks of an updater keep numbers that are not static."""
    reason = ""
    if updater.keeps_count == "any":
        reason = _describe_count(updater)
    elif not has_statement(updater.scope, "keeps_targets"):
        reason = f"scope = {updater.scope!r} may keep any number of weights of a parameter"
    elif updater.topk_fn is not None:
        reason = f"topk_fn = {updater.topk_fn!r} may keep any number of weights"
    if reason:
        raise ValueError(
            "use_compact_state=True needs the number of kept weights of each parameter, but "
            f"{reason}. Give the masks: wrap_optax(tx, masks=masks)."
        )


def check_moves(updater: UpdaterHooks, site: Site) -> None:
    """Raises a ValueError if updates may keep more entries than a mask of the user."""
    if not has_updates(updater.scheduler):
        return
    if updater.keeps_count == "at most" or not site.pattern.is_elementwise:
        raise ValueError(
            f"use_compact_state=True: {type(updater).__name__} with {site.pattern!r} may keep more "
            f"entries of {site.name!r} than the mask that wrap_optax got. Leave masks out, use "
            "NoUpdateSchedule(), or SET or RigL with Unstructured()."
        )


def _describe_count(updater: UpdaterHooks) -> str:
    return (
        f"{type(updater).__name__} may change the number of kept weights (state keeps_count = "
        "'exact' in the class if each slice keeps the number that its target gives)"
    )
