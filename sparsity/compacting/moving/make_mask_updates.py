"""Mask updates of a compact model: those that its updater and layouts allow."""

from __future__ import annotations

import math
from collections.abc import Mapping

import chex

from sparsity.compacting.formats.base import FormatLayout
from sparsity.compacting.moving.mask_update import MaskUpdate
from sparsity.core import trees
from sparsity.core.trees import Path, PyTree
from sparsity.masks import Site, has_statement
from sparsity.training.hooks import UpdaterHooks, is_overridden


def make_mask_updates(
    updater: UpdaterHooks, example: PyTree, layouts: Mapping[Path, FormatLayout]
) -> dict[Path, MaskUpdate]:
    """Returns the mask updates of all masked parameters but those that keep all entries.

    Args:
      updater: the updater.
      example: the dense parameters, as shapes.
      layouts: layouts of the masked parameters by path.

    Raises:
      ValueError: the updater, or its pattern for a parameter, may change the number of kept
        values. The error names the field, or the parameter.
    """
    _check_updater(updater)
    sites = updater.sites(example)
    targets = trees.leaves_by_path(updater.compute_targets(example, sites))
    rule, mask_updates = updater.slice_rule(), {}
    for path in trees.leaves_by_path(example):
        names = trees.path_names(path)
        if names in layouts:
            layout = layouts[names]
            target = targets.get(path)
            _check_site(updater, sites[path], layout, target)
            if layout.num_kept and not layout.is_full:  # or nothing to drop, or to grow
                is_stack = sites[path].batch_axes == len(layout.stack)
                each = rule if rule is not None and (rule.move is None or is_stack) else None
                mask_updates[names] = MaskUpdate(
                    updater, example, sites, target, path, layout, each
                )
    return mask_updates


def _check_updater(updater: UpdaterHooks) -> None:
    name = type(updater).__name__
    refused = f"{name} cannot move the masks of a compact model"
    if not has_statement(updater.scope, "keeps_targets"):
        raise ValueError(
            f"{refused}: under scope = {updater.scope!r} parameters may trade entries, and the "
            "numbers of kept values change. Use scope = Layerwise(). A scope of your own that "
            "keeps them states the class attribute `keeps_targets = True`."
        )
    if not has_statement(updater.scope, "per_slice"):
        raise ValueError(
            f"{refused}: scope = {updater.scope!r} may compare slices, which move one by one here. "
            "Use scope = Layerwise(). A scope of your own that compares none states the class "
            "attribute `per_slice = True`."
        )
    for hook in ("accumulate", "init_algorithm_state"):
        if is_overridden(updater, hook):
            raise ValueError(
                f"{refused}: its hook {hook} keeps a state from step to step. Wrap an optimizer of "
                "dense parameters: wrap_optax."
            )


def _check_site(
    updater: UpdaterHooks, site: Site, layout: FormatLayout, target: chex.Numeric | None
) -> None:
    refused = f"The mask of {site.name!r} of shape {layout.shape} cannot move"
    inner = [axis for axis in layout.stack if axis >= site.batch_axes]
    if inner:
        raise ValueError(
            f"{refused}: axis {inner[0]} indexes slices, which store equally many values, but the "
            f"updater has batch_axes = {site.batch_axes} and lets slices trade entries. Give it "
            f"batch_axes={inner[-1] + 1}, a number or a function of (path, param)."
        )
    if layout.stores_all:
        return
    kept = layout.num_kept // math.prod(layout.batch_shape)
    after = updater.count_after_move(site, layout.shape, kept, target)
    if after != kept:
        number = "another number of" if after is None else after
        raise ValueError(
            f"{refused}: of {site.pattern!r} {type(updater).__name__} may keep {number} entries of "
            f"a slice, where {kept} are stored. Use SET or RigL with Unstructured(), NByM, FanIn, "
            "or a Block that divides the axes, SRigL with min_salient=None, or "
            "formats={path: 'dense'}."
        )
    if reason := layout.explain_refusal(site):
        raise ValueError(f"{refused}: {reason}")
