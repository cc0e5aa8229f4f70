"""Statistics of the inputs that each weight meets, summed up while a model runs."""

from sparsity.calibration.statistics.capture import calibrate
from sparsity.calibration.statistics.checks import (
    check,
    check_solvable,
    is_finite,
    look_up_statistic,
    not_finite,
    warn_of_zeros,
)
from sparsity.calibration.statistics.counts import Count
from sparsity.calibration.statistics.errors import (
    dot,
    mean_outputs,
    num_rows,
    output_error,
    ratio,
    relative_error,
    squared_means,
)
from sparsity.calibration.statistics.memory import check_memory
from sparsity.calibration.statistics.rows import Kind
from sparsity.calibration.statistics.statistic import Statistic, Statistics

__all__ = [
    "Count",
    "Kind",
    "Statistic",
    "Statistics",
    "calibrate",
    "check",
    "check_memory",
    "check_solvable",
    "dot",
    "is_finite",
    "look_up_statistic",
    "mean_outputs",
    "not_finite",
    "num_rows",
    "output_error",
    "ratio",
    "relative_error",
    "squared_means",
    "warn_of_zeros",
]
