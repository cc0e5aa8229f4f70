"""One-shot runs: a tree or a model pruned and refitted, layer by layer, and what that did to it."""

from sparsity.calibration.run.oneshot import oneshot
from sparsity.calibration.run.prune import prune
from sparsity.calibration.run.report import LayerReport, Report
from sparsity.calibration.run.sensitivity import Sensitivity

__all__ = ["LayerReport", "Report", "Sensitivity", "oneshot", "prune"]
