"""One-shot pruners, which remove weights by statistics of their inputs."""

from sparsity.calibration.pruners.base import StatisticsPruning, statistics_kind
from sparsity.calibration.pruners.flap import FLAPPruning
from sparsity.calibration.pruners.osscar import OSSCARPruning
from sparsity.calibration.pruners.scored import RIAPruning, ScoredPruning, SplitScope, WandaPruning
from sparsity.calibration.pruners.sparsegpt import SparseGPTPruning

__all__ = [
    "FLAPPruning",
    "OSSCARPruning",
    "RIAPruning",
    "ScoredPruning",
    "SparseGPTPruning",
    "SplitScope",
    "StatisticsPruning",
    "WandaPruning",
    "statistics_kind",
]
