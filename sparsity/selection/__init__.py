"""Exact selection of the highest scores: of one tensor, of many, or of all together."""

from sparsity.core.hashing import hash_scores as hash_scores
from sparsity.selection.keys import Candidates as Candidates
from sparsity.selection.topk import (
    global_topk_mask as global_topk_mask,
    lowest_sparsity as lowest_sparsity,
    move_units as move_units,
    nm_mask as nm_mask,
    num_kept as num_kept,
    topk_mask as topk_mask,
    topk_masks as topk_masks,
)
