"""One-shot runs, which prune and refit a tree or a model layer by layer, and their reports."""

from sparsity.calibration.run.estimate import Estimate
from sparsity.calibration.run.oneshot import oneshot
from sparsity.calibration.run.outputs import OutputReport
from sparsity.calibration.run.prune import prune
from sparsity.calibration.run.report import LayerReport, Report
from sparsity.calibration.run.sensitivity import Sensitivity

__all__ = ["Estimate", "LayerReport", "OutputReport", "Report", "Sensitivity", "oneshot", "prune"]
