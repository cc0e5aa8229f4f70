"""Statistics of the inputs that each weight meets, summed up while a model runs."""

from sparsity.calibration.statistics.capture import calibrate
from sparsity.calibration.statistics.counts import Count
from sparsity.calibration.statistics.memory import check_memory
from sparsity.calibration.statistics.rows import Kind
from sparsity.calibration.statistics.statistic import (
    Path,
    Statistic,
    Statistics,
    check,
    check_solvable,
    is_finite,
    look_up_statistic,
    not_finite,
    output_error,
    relative_error,
    warn_of_zeros,
)

__all__ = [
    "Count",
    "Kind",
    "Path",
    "Statistic",
    "Statistics",
    "calibrate",
    "check",
    "check_memory",
    "check_solvable",
    "is_finite",
    "look_up_statistic",
    "not_finite",
    "output_error",
    "relative_error",
    "warn_of_zeros",
]
