"""SparseGPT: prunes the weights of a layer and corrects the kept ones."""

from __future__ import annotations

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.inverses import factor_damped_inverse
from sparsity.calibration.pruners.base import StatisticsPruning
from sparsity.calibration.pruners.scored import check_groups
from sparsity.calibration.pruners.sweep import choose_block_sizes, sweep
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.validation import check_solvable, is_finite
from sparsity.core import sharding
from sparsity.core.arrays import promote
from sparsity.core.checks import check_int, check_number
from sparsity.masks import Site
from sparsity.patterns import SparsityType
from sparsity.patterns.base import absolute_axis


@dataclasses.dataclass(kw_only=True)
class SparseGPTPruning(StatisticsPruning):
    """Prunes block by block of the inputs, each time correcting the weights that come after.

    This pruner changes weights as well as masks, so it prunes at once and not along a schedule:
    `instant_sparsify(params, statistics=statistics)`. Training continues from its masks:
    `pruner.wrap_optax(tx, masks=masks)`.

    Within a block of inputs the weights of all outputs compete; through each block num_kept of the
    entries so far stay. An N:M group is chosen when its first input is reached, so that blocks do
    not matter. Under `FanIn` each group of outputs keeps num_kept of the inputs so far, by its sums
    of scores. Weights of inputs that were always 0 go first. Grouped convolutions and batch axes
    are separate matrices. The inputs come in the order of the parameter, the axis of N:M groups
    last.

    Attributes:
      block_size: inputs whose weights are chosen at once.
      damping: added to the diagonal of the Gram matrix, in units of its mean over the inputs that
        were not always 0.

    Source: Frantar & Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in
    One-Shot". Its code keeps a weight more or less by blocks, and takes ties otherwise.

    Example:
      >>> from sparsity import Uniform
      >>> x = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> seen = Statistic(gram=x.T @ x, count=2, contracting=(0,), output=(1,))
      >>> pruner = SparseGPTPruning(sparsity_distribution_fn=Uniform(0.5), damping=0.0)
      >>> pruner.instant_sparsify(jnp.array([[1.0], [4.0]]), statistics={(): seen})[0]
      Array([[0.],
             [5.]], dtype=float32)
    """

    block_size: int = 128
    damping: float = 0.01

    def check_fields(self) -> None:
        super().check_fields()
        check_int("block_size", self.block_size, 1)
        check_number("damping", self.damping, 0)

    def solve(
        self, site: Site, param: jax.Array, statistic: Statistic, target: chex.Numeric
    ) -> tuple[jax.Array, jax.Array]:
        """Returns a parameter pruned and corrected, and its mask.

        Args:
          site: the parameter; its pattern is `Unstructured`, `NByM` or `FanIn`.
          param: its weights.
          statistic: with a Gram matrix.
          target: its sparsity; above 0 an N:M parameter keeps n of m.

        Raises:
          ValueError: the pattern is another one, or does not lie along the inputs; the weights are
            complex; the Gram matrix is singular.
        """
        inputs, innermost = statistic.count_inputs(param.shape), statistic.contracting[-1]
        check_groups(site, statistic, param.shape)
        pattern, block_size = site.pattern.for_matrix(), min(self.block_size, inputs)
        if pattern is None:
            raise ValueError(
                f"{type(self).__name__} removes single weights, of sparsity_type = Unstructured(), "
                f"NByM(n, m, axis) or FanIn(group, axis), got {site.pattern} for {site.name!r}. "
                "Use WandaPruning and a refit."
            )
        if pattern.inputs_per_group:
            [axis], block_size = site.pattern.input_axes, pattern.inputs_per_group
            innermost = absolute_axis(axis, site.batch_axes, param.ndim)
        elif pattern.input_axes:
            _check_fan_in(site, statistic, param.shape)
        check_solvable(statistic, param, site.name, self.damping)
        grams = statistic.require_grams()
        squares, permutation = statistic.with_squares(param.shape, innermost)
        dtype = promote(param.dtype, np.empty(0, grams.dtype).real.dtype)
        multiple = choose_block_sizes(block_size, inputs)[0]
        factors = factor_damped_inverse(grams, self.damping, dtype, multiple, permutation)
        prune = functools.partial(_prune_by_sweep, pattern, block_size)
        weights, mask = sharding.shard_like((param, param), prune, param, squares, factors, target)
        if not is_finite(weights):
            raise ValueError(
                f"{type(self).__name__} found no finite weights for {site.name!r}: its Gram matrix "
                f"is singular with damping = {self.damping}. Raise it, or calibrate with more rows "
                "than inputs."
            )
        return weights, mask


def _check_fan_in(site: Site, statistic: Statistic, shape: tuple[int, ...]) -> None:
    """Raises a ValueError unless the groups of outputs share all inputs of one matrix."""
    pattern = site.pattern
    inputs = {absolute_axis(axis, site.batch_axes, len(shape)) for axis in pattern.input_axes}
    if inputs != {*statistic.contracting} or statistic.groups > 1:
        raise ValueError(
            f"{pattern} of {site.name!r}, shape {shape}: SparseGPTPruning prunes whole matrices, "
            f"but products sum over axes {statistic.contracting} in {statistic.groups} groups. "
            "Give all these axes to FanIn, or use WandaPruning."
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prune_by_sweep(
    pattern: SparsityType,
    block_size: int,
    param: jax.Array,
    squares: Statistic,
    factors: jax.Array,
    sparsity: chex.Numeric,
) -> tuple[jax.Array, jax.Array]:
    """Returns weights and mask, by the squares of the inputs and H^-1, [*batch, n, n]."""
    is_live = squares.sums_of_squares()[..., None, :] > 0
    weights = squares.from_matrices(jnp.where(is_live, squares.to_matrices(param), 0), param.shape)

    def prune_matrix(
        weights: jax.Array, *live_and_factor: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        *live, factor = live_and_factor
        may_differ = live[0].T if live else None
        swept = sweep(weights.T, factor, pattern, block_size, sparsity, may_differ)
        return swept.weights.T, swept.mask.T

    live = () if squares.multiplier is None else (squares.multiplier,)
    pruned, mask = squares.map_matrices(prune_matrix, weights, *live, square_matrices=factors)
    return pruned.astype(param.dtype), mask.astype(jnp.uint8)
