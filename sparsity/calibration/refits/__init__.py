"""Refits: the kept weights take over from the pruned ones, layer by layer."""

from sparsity.calibration.refits.admm import ADMM
from sparsity.calibration.refits.base import Refit, Select, shifts_biases
from sparsity.calibration.refits.least_squares import LeastSquares
from sparsity.calibration.refits.means import Means, loses_imaginary, shift_bias

__all__ = [
    "ADMM",
    "LeastSquares",
    "Means",
    "Refit",
    "Select",
    "loses_imaginary",
    "shift_bias",
    "shifts_biases",
]
