"""Refits: the weights that stay take over what the pruned ones did, layer by layer.

A refit gets a leaf before and after pruning, its mask, the Gram matrix of its inputs, and a way to
select a new mask. The error of an output is sum((X d)^2), d what was lost of its weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve
from jax.scipy.sparse.linalg import cg

from sparsity.calibration.statistics import Statistic
from sparsity.core import sharding
from sparsity.core.checks import check_int, check_number, is_traced

# From scores of the leaf and a share of its target sparsity to a mask.
Select: TypeAlias = Callable[[jax.Array, float], jax.Array]

_MOST_DIRECT = 1024  # inputs, above which least squares are solved by conjugate gradients
_PROGRAMS = 16  # at most, for supports of any size of leaves of one shape
_AT_ONCE = 2**28  # bytes of the matrices that are factored together

_dot = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Refit(Protocol):
    """What `refit` must offer: `LeastSquares()`, `ADMM()`, or a class of your own."""

    def __call__(
        self,
        dense: jax.Array,
        pruned: jax.Array,
        mask: jax.Array,
        statistic: Statistic,
        select: Select,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the weights of a leaf, 0 where they are pruned, and their mask.

        Args:
          dense: the leaf before it was pruned, whose outputs are wanted.
          pruned: the leaf as the pruner left it.
          mask: uint8 mask of the same shape.
          statistic: with a Gram matrix, as `statistic_of` returns it.
          select: `select(scores, share) -> mask` keeps the highest scores of each matrix, all its
            outputs together, at a share of the leaf's target sparsity, in the pruner's pattern: of
            N:M n of m at every share. Raises a ValueError under a scope that compares leaves.
        """


@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """The weights on the support whose outputs are nearest to the dense ones: exact, per output.

    Each output is a system of its own, factored by Cholesky; of many inputs, it is solved by
    conjugate gradients. Outputs that keep the same inputs, as whole channels do, share one factor.
    Where the data leave weights free, they stay near the pruner's. No output has a larger error
    than before.

    Example:
      >>> x = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> seen = Statistic(gram=x.T @ x, count=2, contracting=(0,), output=(1,))
      >>> mask = jnp.array([[1], [0]], jnp.uint8)
      >>> dense, pruned = jnp.array([[2.0], [4.0]]), jnp.array([[2.0], [0.0]])
      >>> LeastSquares()(dense, pruned, mask, seen, select=None)[0]  # 2 + 4 x 1 / 2
      Array([[4.],
             [0.]], dtype=float32)
    """

    def __call__(
        self,
        dense: jax.Array,
        pruned: jax.Array,
        mask: jax.Array,
        statistic: Statistic,
        select: Select | None,
    ) -> tuple[jax.Array, jax.Array]:
        most, is_shared = statistic.inputs(dense.shape), False
        if not is_traced(mask):
            with jax.ensure_compile_time_eval():
                most, is_shared = _supports(statistic.matrices(mask))
        is_direct = is_shared or statistic.inputs(dense.shape) <= _MOST_DIRECT
        refit = functools.partial(_least_squares, most if is_direct else None, is_shared)
        return sharding.shard_like(dense, refit, dense, pruned, mask, statistic), mask


@dataclasses.dataclass(frozen=True)
class ADMM:
    """Alternates between the outputs and the support, by the alternating direction of multipliers.

    Inputs are scaled to unit norm, so that weights compare as Wanda's do. With `gradual`, the
    pruner gives sparsity, pattern and batch axes, and its mask does not matter: the first
    iterations choose one in its place. Iteration i keeps the highest |W + U| of the layer at
    sparsity s (1 - (1 - (i + 1) / gradual)^3), or n of m.

    Attributes:
      iterations: of which each costs one product with the inverse Gram matrix.
      gradual: iterations that choose a mask; 0 keeps the pruner's.
      rho: weight of the support against the outputs.
      damping: added to the diagonal, which is 1.

    Source: Boza 2024, "Fast and Effective Weight Update for Pruned Large Language Models",
    algorithms 1 and 2. A version of its code starts at the full sparsity and lets N:M ramp.
    Inputs that were always 0 keep the pruner's weights.

    Example:
      >>> x = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> seen = Statistic(gram=x.T @ x, count=2, contracting=(0,), output=(1,))
      >>> mask = jnp.array([[1], [0]], jnp.uint8)
      >>> dense, pruned = jnp.array([[2.0], [4.0]]), jnp.array([[2.0], [0.0]])
      >>> refit = ADMM(iterations=50, damping=0.0)
      >>> refit(dense, pruned, mask, seen, select=None)[0].round(3)  # 2 + 4 x 1 / 2
      Array([[4.],
             [0.]], dtype=float32)
    """

    iterations: int = 20
    gradual: int = 0
    rho: float = 1.0
    damping: float = 0.1

    def __post_init__(self) -> None:
        check_int("iterations", self.iterations, 1)
        check_int("gradual", self.gradual, 0, self.iterations)
        for name in ("rho", "damping"):
            check_number(name, getattr(self, name), 0)
        if not self.rho:
            raise ValueError("rho must be above 0, got rho = 0.")

    def __call__(
        self,
        dense: jax.Array,
        pruned: jax.Array,
        mask: jax.Array,
        statistic: Statistic,
        select: Select,
    ) -> tuple[jax.Array, jax.Array]:
        like = (dense, dense, statistic.real_grams())
        start = functools.partial(_start, self.rho, self.damping)
        weights, wanted, inverse = sharding.shard_like(like, start, dense, statistic)
        duals = jnp.zeros_like(weights)
        step = functools.partial(_step, self.rho)
        for i in range(self.iterations):
            if i < self.gradual:
                share = 1 - (1 - (i + 1) / self.gradual) ** 3
                mask = select(jnp.abs(weights + duals), share)
            state = (weights, duals, mask, wanted, inverse)
            weights, duals = sharding.shard_like((dense, dense), step, *state, statistic)
        end = sharding.shard_like(dense, _end, weights + duals, pruned, mask, statistic)
        return end, mask


def _supports(masks: jax.Array) -> tuple[int, bool]:
    """At least the most inputs that an output keeps, and whether all that keep any keep the same.

    Args:
      masks: [*batch, outputs, inputs].
    """
    kept = jnp.sum(masks, axis=-1, dtype=jnp.int32)
    step = -(-masks.shape[-1] // _PROGRAMS)
    most = -(-int(jnp.max(kept, initial=1)) // step) * step
    union = jnp.max(masks, axis=-2, keepdims=True, initial=0)
    is_shared = jnp.all((masks == union) | (kept == 0)[..., None])
    return min(most, masks.shape[-1]), bool(is_shared)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _least_squares(
    most: int | None,
    is_shared: bool,
    dense: jax.Array,
    pruned: jax.Array,
    mask: jax.Array,
    statistic: Statistic,
) -> jax.Array:
    """The refitted leaf; of at most so many weights of an output, or by conjugate gradients."""
    lead, dtype = statistic.lead(dense.shape), dense.dtype

    def of_matrix(
        dense: jax.Array, pruned: jax.Array, mask: jax.Array, gram: jax.Array
    ) -> jax.Array:
        kept, lost = mask > 0, dense - pruned
        outputs = _dot(lost, gram)
        gradient = jnp.where(kept, outputs, 0)
        if most is None:
            gain = _by_gradients(gradient, kept, gram)
        elif is_shared:
            gain = _by_factor(gradient.T, jnp.any(kept, axis=0), gram, most).T
        else:
            gain = _by_factors(gradient, kept, gram, most, math.prod(lead))
        new = (pruned + gain).astype(dtype).astype(gram.dtype)
        rest = dense - new
        before, after = jnp.sum(outputs * lost, -1), jnp.sum(_dot(rest, gram) * rest, -1)
        return jnp.where((after <= before)[:, None], new, pruned)

    refitted: jax.Array = statistic.solve(of_matrix, dense, pruned, mask)
    return refitted.astype(dtype)


def _by_factors(
    gradient: jax.Array, kept: jax.Array, gram: jax.Array, most: int, matrices: int
) -> jax.Array:
    """What each output gains on its support, [outputs, inputs], by a Cholesky factor for each."""
    at_once = max(1, _AT_ONCE // (most**2 * gram.dtype.itemsize * matrices))
    gains: jax.Array = lax.map(
        lambda x: _by_factor(x[0], x[1], gram, most),
        (gradient, kept),
        batch_size=min(at_once, len(gradient)),
    )
    return gains


def _by_factor(gradient: jax.Array, kept: jax.Array, gram: jax.Array, most: int) -> jax.Array:
    """What outputs gain on the support that they share, [inputs], or [inputs, outputs]."""
    diagonal = jnp.diagonal(gram)
    scale = jnp.where(diagonal > 0, lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1)), 0)
    places = jnp.argsort(~kept, stable=True)[:most]
    own = jnp.where(kept, scale, 0)[places]
    system = gram[places[:, None], places] * own[:, None] * own
    # Rounding makes a matrix indefinite; the shift that prevents it is taken back below.
    shift = jnp.where(own > 0, most * jnp.finfo(gram.dtype).eps, 1)
    factor = lax.linalg.cholesky(system + jnp.diag(shift), symmetrize_input=False), True
    own = own.reshape(-1, *[1] * (gradient.ndim - 1))
    wanted = gradient[places] * own
    gain = jnp.zeros_like(wanted)
    for _ in range(3):
        gain += cho_solve(factor, wanted - _dot(system, gain))
    return jnp.zeros_like(gradient).at[places].set(gain * own)


def _by_gradients(gradient: jax.Array, kept: jax.Array, gram: jax.Array) -> jax.Array:
    """As `_by_factors`, by conjugate gradients; all outputs share each product with the Gram."""
    diagonal = jnp.diagonal(gram)
    scale = jnp.where(diagonal > 0, 1 / jnp.where(diagonal > 0, diagonal, 1), 0)

    def of_output(gradient: jax.Array, kept: jax.Array) -> jax.Array:
        solution: jax.Array = cg(
            lambda x: jnp.where(kept, _dot(gram, x), 0),
            gradient,
            tol=float(jnp.finfo(gram.dtype).eps) ** 0.75,
            maxiter=len(gram),
            M=lambda x: x * scale,
        )[0]
        return solution

    gains: jax.Array = jax.vmap(of_output)(gradient, kept)
    return gains


@jax.jit
def _start(
    rho: float, damping: float, dense: jax.Array, statistic: Statistic
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The scaled weights, their products with the scaled Gram, and the inverse of that plus rho."""
    norms, inverse_norms = _norms(statistic)
    gram = statistic.real_grams().astype(jnp.promote_types(dense.dtype, norms.dtype))
    gram *= inverse_norms[..., :, None] * inverse_norms[..., None, :]
    eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    gram += damping * eye
    weights = statistic.matrices(dense).astype(gram.dtype) * norms[..., None, :]
    inverse = jnp.linalg.inv(gram + rho * eye)
    shape = dense.shape
    return statistic.leaf(weights, shape), statistic.leaf(_dot(weights, gram), shape), inverse


@jax.jit
def _step(
    rho: float,
    weights: jax.Array,
    duals: jax.Array,
    mask: jax.Array,
    wanted: jax.Array,
    inverse: jax.Array,
    statistic: Statistic,
) -> tuple[jax.Array, jax.Array]:
    """One iteration: the support, its duals, the outputs."""
    sparse = jnp.where(mask > 0, weights + duals, 0)
    duals = duals + weights - sparse
    pull = statistic.matrices(wanted + rho * (sparse - duals))
    return statistic.leaf(_dot(pull, inverse), mask.shape), duals


@jax.jit
def _end(weights: jax.Array, pruned: jax.Array, mask: jax.Array, statistic: Statistic) -> jax.Array:
    """The weights on the support, in the scale of the leaf."""
    _, inverse_norms = _norms(statistic)
    scale = inverse_norms[..., None, :]
    own = jnp.where(scale > 0, statistic.matrices(weights) * scale, statistic.matrices(pruned))
    return jnp.where(mask > 0, statistic.leaf(own, mask.shape), 0).astype(pruned.dtype)


def _norms(statistic: Statistic) -> tuple[jax.Array, jax.Array]:
    """Norms of the inputs, and 1 / norm; 0 for inputs that were always 0."""
    norms = jnp.sqrt(jnp.diagonal(statistic.real_grams(), axis1=-2, axis2=-1))
    return norms, jnp.where(norms > 0, 1 / jnp.where(norms > 0, norms, 1), 0)
