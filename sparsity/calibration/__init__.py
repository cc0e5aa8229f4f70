"""Pruning of trained models, by statistics of the inputs that each weight meets.

- `statistics`: sums over the rows of each product, which `calibrate` adds up while a model runs.
- `pruners`: masks and corrected weights from a weight and its statistic.
- `refits`: new values of the kept weights.
- `run`: `oneshot`, which prunes and refits layer by layer, and its report.
"""

from sparsity.calibration.pruners.base import StatisticsPruning as StatisticsPruning
from sparsity.calibration.pruners.channels import (
    FLAPPruning as FLAPPruning,
    OSSCARPruning as OSSCARPruning,
)
from sparsity.calibration.pruners.scored import (
    RIAPruning as RIAPruning,
    ScoredPruning as ScoredPruning,
    WandaPruning as WandaPruning,
)
from sparsity.calibration.pruners.sparsegpt import SparseGPTPruning as SparseGPTPruning
from sparsity.calibration.rates import Rates as Rates, Sensitivity as Sensitivity, owl as owl
from sparsity.calibration.refits.block import BlockRefit as BlockRefit
from sparsity.calibration.refits.layers import (
    ADMM as ADMM,
    BiasRefit as BiasRefit,
    LeastSquares as LeastSquares,
    Means as Means,
    Refit as Refit,
)
from sparsity.calibration.run.dry_run import DryRun as DryRun
from sparsity.calibration.run.oneshot import oneshot as oneshot
from sparsity.calibration.run.prune import prune as prune
from sparsity.calibration.run.report import LayerReport as LayerReport, Report as Report
from sparsity.calibration.statistics.capture import calibrate as calibrate
from sparsity.calibration.statistics.grams import (
    output_error as output_error,
    relative_error as relative_error,
)
from sparsity.calibration.statistics.statistic import Statistic as Statistic
from sparsity.calibration.store import open_checkpoint as open_checkpoint
