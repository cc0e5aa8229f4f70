"""What a sparse network looks like: sparsity by layer, overlap of masks, a table and a plot."""

from sparsity.reports.layers import LayerSummary, layer_summary, plot_sparsity, sparsity_table
from sparsity.reports.summary import active_masks, summarize_intersection, summarize_sparsity

__all__ = [
    "LayerSummary",
    "active_masks",
    "layer_summary",
    "plot_sparsity",
    "sparsity_table",
    "summarize_intersection",
    "summarize_sparsity",
]
