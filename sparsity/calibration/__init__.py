"""Pruning of trained models, by statistics of the inputs that each weight meets.

- `statistics`: sums over the rows of each product, which `calibrate` adds up while a model runs.
- `pruners`: masks and corrected weights from a weight and its statistic.
- `refits`: new values of the kept weights.
- `run`: `oneshot`, which prunes and refits layer by layer, and its report.
"""

from sparsity.calibration.pruners import (
    FLAPPruning,
    OSSCARPruning,
    RIAPruning,
    ScoredPruning,
    SparseGPTPruning,
    StatisticsPruning,
    WandaPruning,
)
from sparsity.calibration.rates import Rates, owl
from sparsity.calibration.refits import ADMM, LeastSquares, Means, Refit
from sparsity.calibration.run import Estimate, LayerReport, Report, Sensitivity, oneshot, prune
from sparsity.calibration.statistics import (
    Count,
    Statistic,
    calibrate,
    check_memory,
    output_error,
    relative_error,
)

__all__ = [
    "ADMM",
    "Count",
    "Estimate",
    "FLAPPruning",
    "LayerReport",
    "LeastSquares",
    "Means",
    "OSSCARPruning",
    "RIAPruning",
    "Rates",
    "Refit",
    "Report",
    "ScoredPruning",
    "Sensitivity",
    "SparseGPTPruning",
    "Statistic",
    "StatisticsPruning",
    "WandaPruning",
    "calibrate",
    "check_memory",
    "oneshot",
    "output_error",
    "owl",
    "prune",
    "relative_error",
]
