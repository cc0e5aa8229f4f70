"""Sweep of SparseGPT over the inputs of a matrix: each is pruned, and all later ones corrected.

Source: Frantar & Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in
One-Shot" (arXiv 2301.00774), algorithm 1. Comments carry its symbols: weights W, mask M, errors E,
blocks of B inputs, masks for B_s inputs at once, and H^-1 for the upper Cholesky factor of the
inverse Gram matrix, which replaces the inverse. Matrices are transposed: [inputs, outputs].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity import selection
from sparsity.core.trees import PyTree
from sparsity.patterns import NByM, SparsityType

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
