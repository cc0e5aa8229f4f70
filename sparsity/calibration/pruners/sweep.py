"""The sweep of SparseGPT over the inputs of a matrix: prune one, correct all that come after it.

Sources: Frantar & Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in
One-Shot", algorithm 1. Removing weights of input i and correcting the later inputs optimally adds
the squares of (weight / U_ii) to the output error, U the upper Cholesky factor of the inverse Gram.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity import selection

# Inputs that are corrected together: few fit a cache, many make a fast product.
_SIZES = (8, 32, 128)


class Swept(NamedTuple):
    """What a sweep leaves of a matrix: [inputs, outputs] each.

    Attributes:
      weights: pruned ones are 0.
      mask: bool.
      errors: what each weight lost, in units of the root of the output error that it adds.
    """

    weights: jax.Array
    mask: jax.Array
    errors: jax.Array


def sweep(
    weights: jax.Array,
    gram: jax.Array,
    unit: int,
    n: int | None,
    sparsity: chex.Numeric,
    damping: chex.Numeric,
) -> Swept:
    """Prunes a matrix and corrects what stays.

    Args:
      weights: [inputs, outputs].
      gram: [inputs, inputs].
      unit: consecutive inputs whose weights are chosen when the first of them is reached.
      n: how many of these each output keeps. `None`: the outputs compete, and through each block
        num_kept of the entries so far stay.
      sparsity: scalar; at 0 all stay.
      damping: added to the diagonal, in units of its mean over live inputs.
    """
    inputs, outputs = weights.shape
    live = jnp.diagonal(gram) > 0
    weights = jnp.where(live[:, None], weights, 0)
    sizes = _sizes(unit, inputs)
    missing = -inputs % sizes[0]
    upper = jnp.pad(_inverse_factor(gram, live, damping), (0, missing))
    upper += jnp.diag(jnp.arange(inputs + missing) >= inputs).astype(upper.dtype)
    ends = np.minimum(np.arange(0, inputs + missing + 1, unit), inputs)
    kept = jnp.diff(jnp.asarray(selection.num_kept(ends * outputs, sparsity)))

    def choose(scores: jax.Array, rows: jax.Array) -> jax.Array:
        if n is not None:
            return (selection.nm_mask(scores, n, unit, axis=0) > 0) | (sparsity <= 0)
        real = jnp.broadcast_to(rows[:, None] < inputs, scores.shape)
        return selection.topk_mask(scores, kept[rows[0] // unit], where=real) > 0

    def swept(
        weights: jax.Array,
        upper: jax.Array,
        rows: jax.Array,
        mask: jax.Array,
        sizes: tuple[int, ...],
    ) -> Swept:
        """The inputs `rows`, with their square of the factor; mask is that of the block around."""
        if not sizes:
            lost = jnp.where(mask, 0, weights)
            return Swept(weights - lost, mask, lost / upper)
        size, *smaller = sizes

        def step(weights: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, Swept]:
            start, upper, rows, mask = part
            own = lax.dynamic_slice_in_dim(weights, start, size)
            square = lax.dynamic_slice_in_dim(upper, start, size, axis=1)
            if size == unit:
                mask = choose(jnp.square(own / jnp.diagonal(square)[:, None]), rows)
            done = swept(own, square, rows, mask, tuple(smaller))
            # Of inputs before these the factor is 0; they themselves are not read again.
            spread = jnp.dot(upper.T, done.errors, precision=lax.Precision.HIGHEST)
            return weights - spread, done

        count = len(rows) // size
        parts = jax.tree.map(lambda x: x.reshape(count, size, *x.shape[1:]), (upper, rows, mask))
        _, done = lax.scan(step, weights, (size * jnp.arange(count), *parts))
        return Swept(*(x.reshape(-1, outputs) for x in done))

    rows = jnp.arange(inputs + missing)
    weights = jnp.pad(weights, ((0, missing), (0, 0)))
    done = swept(weights, upper, rows, jnp.zeros(weights.shape, bool), sizes)
    return Swept(*(x[:inputs] for x in done))


def _sizes(unit: int, inputs: int) -> tuple[int, ...]:
    """Sizes of the blocks that are swept one within the other; each divides the one before."""
    sizes = [unit]
    for most in reversed(_SIZES):
        if most < sizes[-1]:
            sizes.append(max(n for n in range(1, most + 1) if sizes[-1] % n == 0))
    for most in _SIZES:
        sizes.insert(0, sizes[0] * max(1, most // sizes[0]))
    return tuple(sorted({n for n in (*sizes, 1) if n < inputs or n == unit}, reverse=True))


def _inverse_factor(gram: jax.Array, live: jax.Array, damping: chex.Numeric) -> jax.Array:
    """The upper triangular U with U^T U = (gram + damping)^-1."""
    diagonal = jnp.diagonal(gram)
    mean = jnp.sum(diagonal) / jnp.maximum(jnp.sum(live), 1)
    shift = damping * mean + jnp.where(live, 0, 1)
    damped = gram + jnp.diag(shift)
    # From the last input to the first, so that gram = R R^T with R upper, and U is its inverse.
    lower = lax.linalg.cholesky(damped[::-1, ::-1], symmetrize_input=False)
    eye = jnp.eye(len(gram), dtype=gram.dtype)
    inverse: jax.Array = lax.linalg.triangular_solve(
        lower[::-1, ::-1], eye, left_side=True, lower=False
    )
    return inverse
