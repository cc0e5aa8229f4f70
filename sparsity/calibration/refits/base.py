"""Protocols of refits: kept weights or biases take over from pruned weights, layer by layer.

A `Refit` of weights gets a parameter before and after pruning, its mask, the statistic of its
inputs, and a way to select a new mask. A `BiasRefit` gets the bias that the model adds to the
outputs, too, and changes only the bias. The error of an output is sum((X d)^2) for the changes d
of its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

import jax

from sparsity.calibration.statistics.statistic import Statistic
from sparsity.graph import Bias
from sparsity.programs.program import Value

# From scores of the parameter and a share of its target sparsity to a mask.
Select: TypeAlias = Callable[[jax.Array, float], jax.Array]


class Refit(Protocol):
    """Protocol of refits that change weights: `LeastSquares()`, `ADMM()`, or your own.

    A class may state more:

    - `gram_copies`, which `StatisticsPruning` explains, and `count_bytes(outputs, inputs)`, the
      bytes of a solution besides one Gram matrix, for the estimate of memory;
    - `statistics_kind`, 'gram' by default; without a Gram matrix no refitted weights are compared
      with those of the pruner;
    - `damping`, which the warning of a singular Gram matrix names.
    """

    def __call__(
        self,
        dense: jax.Array,
        pruned: jax.Array,
        mask: jax.Array,
        statistic: Statistic,
        select: Select,
        /,
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


@runtime_checkable
class BiasRefit(Protocol):
    """Protocol of refits that change biases and leave weights as they are: `Means()`, or your own.

    A bias is a parameter that the model adds to the outputs of a weight and reads nowhere else,
    such as the running mean of a BatchNorm. `oneshot` finds the biases, and reports the errors of
    outputs whose means the bias keeps. A class may state the same attributes as a `Refit`;
    `statistics_kind` is 'moments' by default.
    """

    def shift(
        self,
        place: Bias,
        bias: jax.Array,
        dense: jax.Array,
        pruned: jax.Array,
        statistic: Statistic,
        read: Callable[[Value], jax.Array],
        /,
    ) -> jax.Array:
        """Returns the bias of a weight, of the same shape, dtype and sharding.

        Args:
          place: how the model adds the bias; `place.shift(bias, outputs, scales)` adds outputs.
          bias: the bias, or its layer.
          dense: the weight before pruning.
          pruned: the weight after pruning.
          statistic: with `sums`.
          read: returns the array of a value that depends on parameters alone, for `place.scales`.
        """
