"""Reports on sparse networks: sparsity by layer, tables, plots, measured times."""

from sparsity.reports.check import check as check
from sparsity.reports.layers import (
    LayerSummary as LayerSummary,
    layer_summary as layer_summary,
    plot_sparsity as plot_sparsity,
    sparsity_table as sparsity_table,
)
from sparsity.reports.summary import (
    active_masks as active_masks,
    summarize_intersection as summarize_intersection,
    summarize_sparsity as summarize_sparsity,
)
from sparsity.reports.times import time_in_turn as time_in_turn
