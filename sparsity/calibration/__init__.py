"""Pruning what is trained already, by statistics of the inputs that each weight meets."""

from sparsity.calibration.capture import calibrate
from sparsity.calibration.counts import Count
from sparsity.calibration.memory import check_memory
from sparsity.calibration.oneshot import oneshot
from sparsity.calibration.prune import prune
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
from sparsity.calibration.refits import ADMM, LeastSquares, Refit
from sparsity.calibration.report import LayerReport, Report
from sparsity.calibration.sensitivity import Sensitivity
from sparsity.calibration.statistics import (
    Statistic,
    output_error,
    relative_error,
)

__all__ = [
    "ADMM",
    "Count",
    "FLAPPruning",
    "LayerReport",
    "LeastSquares",
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
