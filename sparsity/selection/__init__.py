"""Exact selection of the highest scores: of one tensor, of many, or of all together."""

from sparsity.core.hashing import hash_scores
from sparsity.selection.kept_counts import num_kept
from sparsity.selection.nm import nm_mask
from sparsity.selection.scores import EntryScores, LazyScores, Ranked, compute_array
from sparsity.selection.topk import global_topk_mask, topk_mask, topk_masks

__all__ = [
    "EntryScores",
    "LazyScores",
    "Ranked",
    "compute_array",
    "global_topk_mask",
    "hash_scores",
    "nm_mask",
    "num_kept",
    "topk_mask",
    "topk_masks",
]
