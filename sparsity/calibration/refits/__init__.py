"""Refits: the kept weights take over from the pruned ones, layer by layer."""

from sparsity.calibration.refits.admm import ADMM
from sparsity.calibration.refits.base import Refit, Select
from sparsity.calibration.refits.least_squares import LeastSquares

__all__ = ["ADMM", "LeastSquares", "Refit", "Select"]
