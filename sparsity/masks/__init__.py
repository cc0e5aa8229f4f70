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
from sparsity.masks.global_scope import Global
from sparsity.masks.layerwise import Layerwise, keeps_targets
from sparsity.masks.lazy import (
    Draw,
    defer_scores,
    elementwise,
    host_scores,
    is_elementwise,
    make_draw,
    may_score_slices,
)
from sparsity.masks.scopes import (
    LeafScope,
    MovingLeaf,
    Scope,
    ScoredLeaf,
    TreeScope,
    adapt_scope,
    find_missing_scope_method,
    is_per_slice,
    takes_signed_scores,
)
from sparsity.masks.sites import (
    BatchAxes,
    Overrides,
    Site,
    Sites,
    TopkFn,
    leading_axes,
)
from sparsity.masks.targets import (
    check_user_mask,
    compute_targets,
    read_overrides,
)

SCOPES: Registry[type[Scope]] = Registry("scope", {"layerwise": Layerwise, "global": Global})

__all__ = [
    "SCOPES",
    "BatchAxes",
    "Draw",
    "Global",
    "Layerwise",
    "LeafScope",
    "MaskBudget",
    "MovingLeaf",
    "Overrides",
    "Scope",
    "ScoredLeaf",
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
    "is_elementwise",
    "is_per_slice",
    "keeps_targets",
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
