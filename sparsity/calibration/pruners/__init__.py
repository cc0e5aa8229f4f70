"""One-shot pruners: what each removes of a weight, by statistics of the inputs that it meets."""

from sparsity.calibration.pruners.flap import FLAPPruning
from sparsity.calibration.pruners.osscar import OSSCARPruning
from sparsity.calibration.pruners.scored import (
    RIAPruning,
    WandaPruning,
    Within,
    is_per_slice,
    statistics_kind,
)
from sparsity.calibration.pruners.sparsegpt import SparseGPTPruning

__all__ = [
    "FLAPPruning",
    "OSSCARPruning",
    "RIAPruning",
    "SparseGPTPruning",
    "WandaPruning",
    "Within",
    "is_per_slice",
    "statistics_kind",
]
