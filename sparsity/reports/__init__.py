"""What a sparse network looks like: sparsity by layer, overlap of masks, a table and a plot."""

from sparsity.reports.summary import (
    active_masks,
    layer_summary,
    plot_sparsity,
    sparsity_table,
    summarize_intersection,
    summarize_sparsity,
)

__all__ = [
    "active_masks",
    "layer_summary",
    "plot_sparsity",
    "sparsity_table",
    "summarize_intersection",
    "summarize_sparsity",
]
