"""Base of refits: the kept weights take over from the pruned ones, layer by layer.

A refit gets a parameter before and after pruning, its mask, the statistic of its inputs, and a
way to select a new mask. The error of an output is sum((X d)^2) for the changes d of its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import jax

from sparsity.calibration.statistics.statistic import Statistic

# From scores of the parameter and a share of its target sparsity to a mask.
Select: TypeAlias = Callable[[jax.Array, float], jax.Array]


class Refit(Protocol):
    """Protocol of `refit`: `LeastSquares()`, `ADMM()`, or a class of your own.

    A class may state more, which `run/needs.py` reads:

    - `gram_copies`, which `StatisticsPruning` explains, and `count_bytes(outputs, inputs)`, the
      bytes of a solution beside one Gram matrix, for the estimate of memory;
    - `statistics_kind`, 'gram' by default; without a Gram matrix no refitted weights are compared
      with those of the pruner;
    - `damping`, which the warning of a singular Gram matrix names;
    - `shifts_biases = True`, to leave weights as they are: `oneshot` adds the means of the lost
      outputs to biases, and the refit is not called.
    """

    def __call__(
        self,
        dense: jax.Array,
        pruned: jax.Array,
        mask: jax.Array,
        statistic: Statistic,
        select: Select,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the weights of a parameter and their mask, of any real dtype.

        Entries of the mask that are not 0 are kept; weights outside the mask become 0.

        Args:
          dense: the parameter before pruning, whose outputs are to be reconstructed.
          pruned: the parameter as the pruner left it.
          mask: uint8 mask of the same shape.
          statistic: of the kind `statistics_kind`, as `look_up_statistic` returns it.
          select: `select(scores, share) -> mask` keeps the highest scores of each matrix, all its
            outputs together, at a share of the target sparsity, in the pruner's pattern; an N:M
            pattern keeps n of m at every share. Raises a ValueError under a scope that compares
            parameters.
        """
