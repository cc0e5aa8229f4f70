"""Masks: storage, the parameters that have masks, and the scopes in which weights compete."""

from sparsity.core.names import Registry
from sparsity.masks.bits import (
    apply_mask as apply_mask,
    apply_mask_straight_through as apply_mask_straight_through,
    apply_masks as apply_masks,
    are_kept as are_kept,
    are_ones as are_ones,
    are_packed as are_packed,
    check_complete as check_complete,
    check_masks as check_masks,
    mask_updates as mask_updates,
    pack as pack,
    pack_masks as pack_masks,
    packed_shape as packed_shape,
    place_masks as place_masks,
    read_masks as read_masks,
    unpack as unpack,
    unpack_masks as unpack_masks,
)
from sparsity.masks.budgets import MaskBudget as MaskBudget
from sparsity.masks.distributions import (
    check_user_mask as check_user_mask,
    compute_targets as compute_targets,
    has_user_filter as has_user_filter,
    read_overrides as read_overrides,
)
from sparsity.masks.global_scope import Global as Global
from sparsity.masks.scopes import (
    Layerwise as Layerwise,
    MovingSite as MovingSite,
    Scope as Scope,
    ScoredSite as ScoredSite,
    TreeScope as TreeScope,
    adapt_scope as adapt_scope,
    find_missing_scope_method as find_missing_scope_method,
    has_statement as has_statement,
    is_layerwise as is_layerwise,
)
from sparsity.masks.sites import (
    BatchAxes as BatchAxes,
    Overrides as Overrides,
    PatternChoice as PatternChoice,
    Site as Site,
    Sites as Sites,
    TopkFn as TopkFn,
    leading_axes as leading_axes,
)

SCOPES: Registry[type[Scope]] = Registry("scope", {"layerwise": Layerwise, "global": Global})
