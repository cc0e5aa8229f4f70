"""SparseGPT: prunes the weights of a layer input by input, and corrects all later ones.

Source: Frantar & Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in
One-Shot" (arXiv 2301.00774), algorithm 1. Comments carry its symbols: weights W, mask M, errors E,
blocks of B inputs, masks for B_s inputs at once, and H^-1 for the upper Cholesky factor of the
inverse Gram matrix, which replaces the inverse. Swept matrices are transposed: [inputs, outputs].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity import selection
from sparsity.calibration.pruners.base import StatisticsPruning
from sparsity.calibration.pruners.scored import check_groups
from sparsity.calibration.statistics.grams import factor_damped_inverse
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.validation import check_solvable, is_finite
from sparsity.core import sharding
from sparsity.core.arrays import promote
from sparsity.core.checks import check_int, check_number
from sparsity.core.trees import PyTree
from sparsity.masks import Site
from sparsity.patterns import NByM, SparsityType
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


# B: inputs that are corrected together; few fit a cache, many make a fast product.
_SIZES = (8, 32, 128)


class Swept(NamedTuple):
    """Matrix after a sweep: [inputs, outputs] each.

    Attributes:
      weights: W; pruned ones are 0.
      mask: M, bool.
      errors: E; the sum of squares is the output error that pruning adds.
    """

    weights: jax.Array
    mask: jax.Array
    errors: jax.Array


def sweep(
    weights: jax.Array,
    factor: jax.Array,
    pattern: SparsityType,
    block_size: int,
    sparsity: chex.Numeric,
    live: jax.Array | None = None,
) -> Swept:
    """Prunes a matrix and corrects the kept weights.

    Args:
      weights: [inputs, outputs], 0 for inputs that were always 0.
      factor: H^-1 of `factor_damped_inverse`, [n, n], where the first of `choose_block_sizes`
        divides n >= inputs.
      pattern: `Unstructured()`: all weights of a block compete, and through each block num_kept of
        the entries so far stay. `FanIn(group, axis=0)`: the inputs of a group of outputs compete,
        and num_kept of the inputs so far stay. `NByM(n, m, axis=0)`: each output keeps n.
      block_size: B_s, consecutive inputs whose weights are chosen when the first of them is
        reached; m of N:M.
      sparsity: scalar; at 0 all stay.
      live: bool[inputs, outputs], False for entries that stay 0, whose mask is chosen at score 0;
        `None` if there are none.
    """
    inputs, outputs = weights.shape
    has_groups = pattern.group_axes > 0
    # Padding has weights of 0 and rows of the identity: its errors are 0 and correct nothing.
    padding = len(factor) - inputs
    ends = np.minimum(np.arange(0, inputs + padding + 1, block_size), inputs)
    entries = ends * (1 if has_groups else outputs)
    # Differences of running counts: each block makes up for the rounding of the blocks before.
    counts = jnp.diff(jnp.asarray(selection.num_kept(entries, sparsity)))

    def choose(scores: jax.Array, rows: jax.Array, live: jax.Array | None) -> jax.Array:
        """Returns M of the B_s inputs `rows`."""
        scores = scores if live is None else jnp.where(live, scores, 0)
        if isinstance(pattern, NByM):
            # N:M has one sparsity: any target above 0, which may be traced, prunes to n of m.
            return (selection.nm_mask(scores, pattern.n, pattern.m, axis=0) > 0) | (sparsity <= 0)
        units, count = pattern.pool(scores), counts[rows[0] // block_size]
        # The inputs are the last axis of the units of groups, and the first axis of entries.
        is_real = jnp.broadcast_to((rows if has_groups else rows[:, None]) < inputs, units.shape)
        units = selection.topk_mask(units, count, where=is_real, batch_axes=pattern.group_axes)
        return pattern.expand(units, scores.shape) > 0

    weights = jnp.pad(weights, ((0, padding), (0, 0)))
    rows, mask = jnp.arange(inputs + padding), jnp.zeros(weights.shape, bool)
    live = None if live is None else jnp.pad(live, ((0, padding), (0, 0)))
    sizes = choose_block_sizes(block_size, inputs)
    swept = _sweep_blocks(choose, block_size, sizes, weights, factor, rows, mask, live)
    return Swept(*(x[:inputs] for x in swept))


def _sweep_blocks(
    choose: Callable[[jax.Array, jax.Array, jax.Array | None], jax.Array],
    block_size: int,
    sizes: tuple[int, ...],
    weights: jax.Array,
    factor: jax.Array,
    rows: jax.Array,
    mask: jax.Array,
    live: jax.Array | None,
) -> Swept:
    """Sweeps some inputs block by block, each block in smaller blocks, down to single inputs.

    Args:
      choose: from scores, inputs and live entries to their mask.
      block_size: B_s, one of the sizes or larger than all.
      sizes: B of the blocks, and of the blocks within these.
      weights: W of the inputs, corrected for all inputs before them.
      factor: H^-1 of the inputs among themselves, [inputs, inputs].
      rows: the inputs, by their index in the matrix.
      mask: M of the inputs, where they are fewer than B_s.
      live: the entries that may differ from 0; `None` for all.
    """
    if not sizes:  # one input j
        kept = mask if live is None else mask & live
        lost = jnp.where(kept, 0, weights)  # (1 - M_j) W_j
        return Swept(weights - lost, mask, lost / factor)  # E_j = (1 - M_j) W_j / H^-1_jj
    size, *smaller = sizes

    def sweep_block(weights: jax.Array, inputs_of_block: PyTree) -> tuple[jax.Array, Swept]:
        start, factor, rows, mask, live = inputs_of_block  # i, H^-1_i:(i+B),:
        block_weights = lax.dynamic_slice_in_dim(weights, start, size)
        square = lax.dynamic_slice_in_dim(factor, start, size, axis=1)  # H^-1_i:(i+B),i:(i+B)
        if size == block_size:  # M <- the weights w_c of the largest w_c^2 / (H^-1_cc)^2
            mask = choose(jnp.square(block_weights / jnp.diagonal(square)[:, None]), rows, live)
        inner = block_weights, square, rows, mask, live
        swept = _sweep_blocks(choose, block_size, tuple(smaller), *inner)
        # W_(i+B): <- W_(i+B): - E H^-1_i:(i+B),(i+B):. Inputs before i meet zeros of the factor;
        # those of the block are changed, too, and not read again.
        update = jnp.dot(factor.T, swept.errors, precision=lax.Precision.HIGHEST)
        return weights - update, swept

    count = len(rows) // size
    arrays = factor, rows, mask, live
    blocks = jax.tree.map(lambda x: x.reshape(count, size, *x.shape[1:]), arrays)
    _, swept = lax.scan(sweep_block, weights, (size * jnp.arange(count), *blocks))
    return Swept(*(x.reshape(-1, weights.shape[1]) for x in swept))


def choose_block_sizes(block_size: int, inputs: int) -> tuple[int, ...]:
    """Returns the sizes of nested blocks; each divides the one before."""
    sizes = [block_size]
    # Below B_s, sizes divide B_s; above, they are multiples, as groups of N:M are small.
    for max_size in reversed(_SIZES):
        if max_size < sizes[-1]:
            sizes.append(max(n for n in range(1, max_size + 1) if sizes[-1] % n == 0))
    for max_size in _SIZES:
        sizes.insert(0, sizes[0] * max(1, max_size // sizes[0]))
    return tuple(sorted({n for n in (*sizes, 1) if n < inputs or n == block_size}, reverse=True))
