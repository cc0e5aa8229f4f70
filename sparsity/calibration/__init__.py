"""Pruning of trained models, by statistics of the inputs that each weight meets.

- `statistics`: sums over the rows of each product, which `calibrate` adds up while a model runs.
- `pruners`: masks and corrected weights from a weight and its statistic.
- `refits`: new values of the kept weights.
- `run`: `oneshot`, which prunes and refits layer by layer, and its report.
"""

from sparsity.calibration.pruners.base import StatisticsPruning
from sparsity.calibration.pruners.flap import FLAPPruning
from sparsity.calibration.pruners.osscar import OSSCARPruning
from sparsity.calibration.pruners.scored import RIAPruning, ScoredPruning, WandaPruning
from sparsity.calibration.pruners.sparsegpt import SparseGPTPruning
from sparsity.calibration.rates import Rates, owl
from sparsity.calibration.refits.admm import ADMM
from sparsity.calibration.refits.base import BiasRefit, Refit
from sparsity.calibration.refits.least_squares import LeastSquares
from sparsity.calibration.refits.means import Means
from sparsity.calibration.run.estimate import Estimate
from sparsity.calibration.run.oneshot import oneshot
from sparsity.calibration.run.prune import prune
from sparsity.calibration.run.report import LayerReport, Report
from sparsity.calibration.run.sensitivity import Sensitivity
from sparsity.calibration.statistics.capture import calibrate
from sparsity.calibration.statistics.counts import Count
from sparsity.calibration.statistics.errors import output_error, relative_error
from sparsity.calibration.statistics.memory import check_memory
from sparsity.calibration.statistics.statistic import Statistic

__all__ = [
    "ADMM",
    "BiasRefit",
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
