"""Parameters that the inner optimizer never moves stay dense, with a warning."""

from __future__ import annotations

import optax

from sparsity.core import trees
from sparsity.core.trees import Masks, Params
from sparsity.core.warn import warn
from sparsity.masks import Sites, adapt_scope
from sparsity.programs.optimizers import find_frozen
from sparsity.sparsity_schedules import has_updates
from sparsity.training.updater_hooks import UpdaterHooks


def exclude_frozen(
    updater: UpdaterHooks,
    inner: optax.GradientTransformation,
    params: Params,
    user_masks: Masks | None,
    sites: Sites,
) -> Sites:
    """Returns the sites without parameters that the inner optimizer never moves; warns of these.

    With masks of the user all sites stay: such masks may prune any parameter.

    Raises:
      ValueError: masks of the user would move. The message names the parameters.
    """
    frozen = find_frozen(inner, params)
    if not frozen:
        return sites
    if user_masks is not None:
        masked = frozen & trees.leaves_by_path(user_masks).keys()
        if masked and has_updates(updater.scheduler):
            raise ValueError(
                f"Give None in the masks of wrap_optax for {trees.list_paths(masked)}, which the "
                "inner optimizer never moves, or set no scheduler: a weight that returned to a "
                "mask would stay 0."
            )
        return sites
    targets = updater.compute_targets(params, sites)
    find_masked, excluded, kept_dense = adapt_scope(updater.scope).masked_paths, set(), set()
    for path in trees.leaves_by_path(targets):
        alone = trees.map_matched(
            lambda each, target, path=path: target if each == path else None, targets
        )
        # A scope of channels also masks what goes with the channels of a parameter.
        if affected := frozen & {path, *find_masked(params, alone)}:
            excluded.add(path)
            kept_dense |= affected
    if excluded:
        warn(
            f"Prune {trees.list_paths(kept_dense)} outside of training, by instant_sparsify, or "
            "leave out what is frozen with filter_fn or custom_sparsity_map={path: None}: the "
            "inner optimizer never moves these parameters, so that they stay dense, and so do "
            f"{trees.list_paths(excluded)}."
        )
    return sites.without(excluded) if excluded else sites
