"""Masks: storage, the parameters that have masks, and the scopes in which weights compete."""

from sparsity.core.names import Registry
from sparsity.masks.affordable import MaskBudget
from sparsity.masks.bits import (
    apply_mask,
    apply_mask_straight_through,
    apply_masks,
    are_kept,
    are_ones,
    are_packed,
    check_complete,
    check_masks,
    mask_updates,
    pack,
    pack_masks,
    packed_shape,
    place_masks,
    read_masks,
    unpack,
    unpack_masks,
)
from sparsity.masks.draws import Draw, make_draw
from sparsity.masks.global_scope import Global
from sparsity.masks.layerwise import Layerwise, is_layerwise
from sparsity.masks.lazy import (
    defer_scores,
    elementwise,
    host_scores,
    may_score_slices,
)
from sparsity.masks.scopes import (
    MovingSite,
    Scope,
    ScoredSite,
    TreeScope,
    adapt_scope,
    find_missing_scope_method,
    is_per_slice,
    is_stated,
    takes_signed_scores,
)
from sparsity.masks.sites import (
    BatchAxes,
    Overrides,
    PatternChoice,
    Site,
    Sites,
    TopkFn,
    leading_axes,
)
from sparsity.masks.targets import check_user_mask, compute_targets, read_overrides

SCOPES: Registry[type[Scope]] = Registry("scope", {"layerwise": Layerwise, "global": Global})

__all__ = [
    "SCOPES",
    "BatchAxes",
    "Draw",
    "Global",
    "Layerwise",
    "MaskBudget",
    "MovingSite",
    "Overrides",
    "PatternChoice",
    "Scope",
    "ScoredSite",
    "Site",
    "Sites",
    "TopkFn",
    "TreeScope",
    "adapt_scope",
    "apply_mask",
    "apply_mask_straight_through",
    "apply_masks",
    "are_kept",
    "are_ones",
    "are_packed",
    "check_complete",
    "check_masks",
    "check_user_mask",
    "compute_targets",
    "defer_scores",
    "elementwise",
    "find_missing_scope_method",
    "host_scores",
    "is_layerwise",
    "is_per_slice",
    "is_stated",
    "leading_axes",
    "make_draw",
    "mask_updates",
    "may_score_slices",
    "pack",
    "pack_masks",
    "packed_shape",
    "place_masks",
    "read_masks",
    "read_overrides",
    "takes_signed_scores",
    "unpack",
    "unpack_masks",
]
