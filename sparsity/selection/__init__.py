"""Exact selection of the highest scores: of one tensor, of many, or of all together."""

from sparsity.core.hashing import hash_scores as hash_scores
from sparsity.selection.candidates import Candidates as Candidates
from sparsity.selection.kept_counts import num_kept as num_kept
from sparsity.selection.nm import nm_mask as nm_mask
from sparsity.selection.topk import (
    global_topk_mask as global_topk_mask,
    topk_mask as topk_mask,
    topk_masks as topk_masks,
)
