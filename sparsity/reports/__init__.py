"""Reports on sparse networks: sparsity by layer, tables, plots, measured times."""

from sparsity.reports.layers import LayerSummary, layer_summary, plot_sparsity, sparsity_table
from sparsity.reports.summary import active_masks, summarize_intersection, summarize_sparsity
from sparsity.reports.times import time_in_turn

__all__ = [
    "LayerSummary",
    "active_masks",
    "layer_summary",
    "plot_sparsity",
    "sparsity_table",
    "summarize_intersection",
    "summarize_sparsity",
    "time_in_turn",
]
