"""Refits: kept weights or biases take over from pruned weights, layer by layer.

A `Refit` of weights gets a parameter before and after pruning, its mask, the statistic of its
inputs, and a way to select a new mask. A `BiasRefit` gets the bias that the model adds to the
outputs, too, and changes only the bias. The error of an output is sum((X d)^2) for the changes d
of its weights.

Comments of `ADMM` carry the symbols of the paper and its code: W weights, Z weights on the support,
U scaled duals, XX the damped Gram matrix of inputs of unit norm, XY = XX W.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_solve

from sparsity.calibration.statistics.grams import dot, mean_outputs
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.sums import StatisticsKind
from sparsity.core import sharding
from sparsity.core.arrays import promote
from sparsity.core.checks import check_int, check_number, is_traced
from sparsity.core.trees import Path
from sparsity.graph import Bias, Graph
from sparsity.programs.program import Value

# From scores of the parameter and a share of its target sparsity to a mask.
Select: TypeAlias = Callable[[jax.Array, float], jax.Array]


class Refit(Protocol):
    """Protocol of refits that change weights: `LeastSquares()`, `ADMM()`, or your own.

    A class may state more:

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


@dataclasses.dataclass(frozen=True)
class Means:
    """Adds the means of the lost outputs to biases: the cheapest refit, for `refit=` of `oneshot`.

    The bias of a layer becomes b + (W - W_pruned) mean(x), so that pruning keeps the mean of each
    output. Weights stay as the pruner leaves them, and no Gram matrix is needed. A BatchNorm in
    inference mode that follows a layer serves as well: its running mean, if that is among the
    params, or its shift, times the scale before. Parameters without either are pruned and named in
    a warning.

    `ADMM` and `LeastSquares` gain more; `Means` costs one product with a vector, and suits networks
    of one-sided activations.

    Example:
      >>> import sparsity
      >>> params = {"kernel": jnp.array([[4.0], [1.0]]), "bias": jnp.zeros(1)}
      >>> pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> batch = jnp.array([[1.0, 2.0], [1.0, 4.0]])
      >>> model = lambda p, x: x @ p["kernel"] + p["bias"]
      >>> pruned, _, _ = sparsity.oneshot(pruner, model, params, [batch], refit=Means())
      >>> pruned["kernel"].T, pruned["bias"]  # the mean of the lost input is 3
      (Array([[4., 0.]], dtype=float32), Array([3.], dtype=float32))
    """

    statistics_kind: ClassVar[StatisticsKind] = "moments"

    def shift(
        self,
        place: Bias,
        bias: jax.Array,
        dense: jax.Array,
        pruned: jax.Array,
        statistic: Statistic,
        read: Callable[[Value], jax.Array],
    ) -> jax.Array:
        """Returns the bias that keeps the means of the outputs, as `BiasRefit.shift` says."""

        def add(
            bias: jax.Array, lost: jax.Array, statistic: Statistic, *scales: jax.Array
        ) -> jax.Array:
            return place.shift(bias, mean_outputs(statistic, lost), scales)

        scales = [read(scale.value) for scale in place.scales]
        return sharding.place_like(
            bias, sharding.shard_like(bias, add, bias, dense - pruned, statistic, *scales)
        )


def holds_outputs(graph: Graph, path: Path, bias: Bias) -> bool:
    """Returns whether a bias can hold outputs: a real one would lose their imaginary parts."""
    outputs = [use.equation.outputs[0].dtype for use in graph.tracker.find_products(path)]
    (dtype,) = (param.dtype for param in graph.parameters if param.path == bias.path)
    is_complex = [jnp.issubdtype(x, jnp.complexfloating) for x in (dtype, *outputs)]
    return is_complex[0] or not any(is_complex)


_PROGRAMS = 4  # at most, for supports of any size of parameters of one shape
_MAX_BYTES_AT_ONCE = 2**25  # bytes of the matrices that are factored together
_ROUNDS = 3  # solutions of residuals, as one factor in float32 leaves rounding


@dataclasses.dataclass(frozen=True)
class LeastSquares:
    """Weights on the support whose outputs are nearest to the dense ones: exact, per output.

    The costliest refit: each output takes a Cholesky factor of its own, k^3 / 3 multiply-adds for k
    kept inputs. Where outputs keep the same inputs, as after the pruning of channels, one factor
    serves all. `ADMM` costs one inverse and comes close.

    Weights that the data leave free stay near the weights of the pruner. No output has a larger
    error than before.

    Example:
      >>> x = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> seen = Statistic(gram=x.T @ x, count=2, contracting=(0,), output=(1,))
      >>> mask = jnp.array([[1], [0]], jnp.uint8)
      >>> dense, pruned = jnp.array([[2.0], [4.0]]), jnp.array([[2.0], [0.0]])
      >>> LeastSquares()(dense, pruned, mask, seen)[0]  # 2 + 4 x 1 / 2
      Array([[4.],
             [0.]], dtype=float32)
    """

    def __call__(
        self,
        dense: jax.Array,
        pruned: jax.Array,
        mask: jax.Array,
        statistic: Statistic,
        select: Select | None = None,  # the mask stays
    ) -> tuple[jax.Array, jax.Array]:
        if not dense.size:
            return pruned, mask
        inputs = statistic.count_inputs(dense.shape)
        max_kept, is_shared = inputs, False
        if not is_traced(mask):
            with sharding.evaluate_now():
                max_kept, is_shared = _read_supports(statistic.to_matrices(mask))
        # Rounded up, so that supports of any size share a few programs.
        step = -(-inputs // _PROGRAMS)
        max_kept = min(-(-max_kept // step) * step, inputs)
        refit = functools.partial(_refit, max_kept, is_shared)
        return sharding.shard_like(dense, refit, dense, pruned, mask, statistic), mask


def _read_supports(masks: jax.Array) -> tuple[int, bool]:
    """Returns the most inputs that an output keeps, and whether all non-empty supports agree.

    Args:
      masks: [..., outputs, inputs].
    """
    num_kept = (masks > 0).sum(axis=-1)
    union = (masks > 0).any(axis=-2, keepdims=True)
    is_shared = (((masks > 0) == union) | (num_kept == 0)[..., None]).all()
    return max(int(num_kept.max()), 1), bool(is_shared)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _refit(
    max_kept: int,
    is_shared: bool,
    dense: jax.Array,
    pruned: jax.Array,
    mask: jax.Array,
    statistic: Statistic,
) -> jax.Array:
    """Returns the refitted parameter, from a bound on the inputs that an output keeps."""
    num_matrices = math.prod(statistic.read_batch_shape(dense.shape))

    def refit_matrix(
        dense: jax.Array, pruned: jax.Array, mask: jax.Array, gram: jax.Array
    ) -> jax.Array:
        """Returns a refitted matrix, [outputs, inputs]; outputs that would get worse stay."""
        lost_weights, kept = dense - pruned, mask > 0
        # (W0 - W) G: the right side of the systems, and a factor of the error before.
        outputs = dot(lost_weights, gram)
        gradient = jnp.where(kept, outputs, 0)
        if is_shared:
            gains = _solve(max_kept, gram, kept.any(axis=0), gradient)
        else:
            system_bytes = num_matrices * max_kept**2 * gram.dtype.itemsize
            gains = lax.map(
                lambda row: _solve(max_kept, gram, row[0], row[1][None])[0],
                (kept, gradient),
                batch_size=max(1, min(_MAX_BYTES_AT_ONCE // system_bytes, len(kept))),
            )
        # The error counts weights as the parameter stores them.
        corrected = (pruned + gains).astype(dtype).astype(gram.dtype)
        difference = dense - corrected
        error_before = (outputs * lost_weights).sum(axis=-1)
        error_after = (dot(difference, gram) * difference).sum(axis=-1)
        return jnp.where((error_after <= error_before)[:, None], corrected, pruned)

    dtype = dense.dtype
    return statistic.map_matrices(refit_matrix, dense, pruned, mask).astype(dtype)


def _solve(max_kept: int, gram: jax.Array, kept: jax.Array, gradient: jax.Array) -> jax.Array:
    """Returns corrections of outputs that share a support, [outputs, inputs].

    Args:
      max_kept: bound on the inputs of the support.
      gram: [inputs, inputs].
      kept: [inputs], the support.
      gradient: [outputs, inputs], 0 outside the support.
    """
    diagonal = gram.diagonal()
    scales = jnp.where(kept & (diagonal > 0), lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1)), 0)
    # Kept inputs come first; the others, up to `max_kept`, get scale 0.
    indices = jnp.argsort(~kept, stable=True)[:max_kept]
    scales = scales[indices].astype(gram.dtype)
    system = gram[indices[:, None], indices] * scales[:, None] * scales
    # Rounding can make a matrix indefinite. The refinement below takes back the shift against it.
    shift = jnp.where(scales > 0, max_kept * jnp.finfo(gram.dtype).eps, 1).astype(gram.dtype)
    factor = lax.linalg.cholesky(system + jnp.diag(shift), symmetrize_input=False), True
    gains = jnp.zeros_like(gradient)
    # Iterative refinement: each round solves for the residual of the unshifted system.
    for _ in range(_ROUNDS):
        residual = (gradient - dot(gains, gram))[:, indices] * scales
        gains = gains.at[:, indices].add(cho_solve(factor, residual.T).T * scales)
    return gains


@dataclasses.dataclass(frozen=True)
class ADMM:
    """Alternates between the outputs and the support, by the alternating direction of multipliers.

    This refit, for `refit=` of `oneshot` and `prune`, solves the layers of a trained model without
    training; the algorithm `sparsity.ADMMPruning` uses the same method while a network trains.

    Inputs are scaled to unit norm, so that weights compare as Wanda's do. With `gradual`, the
    pruner gives sparsity, pattern and batch axes, and its mask does not matter: the first
    iterations choose one in its place. Iteration i keeps the highest |W + U| of the layer at
    sparsity s (1 - (1 - (i + 1) / gradual)^3), or n of m.

    Attributes:
      iterations: number of iterations; each costs one product with the inverse Gram matrix.
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
      >>> refit(dense, pruned, mask, seen, select=lambda *_: mask)[0].round(3)  # 2 + 4 x 1 / 2
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
        grams = statistic.require_real_grams()
        start = functools.partial(_initialize, self.rho, self.damping)
        state = sharding.shard_like((dense, dense, grams), start, dense, statistic)
        (weights, products, inverse), duals = state, jnp.zeros_like(state[0])
        step = functools.partial(_iterate, self.rho)
        for i in range(self.iterations):
            if i < self.gradual:
                share = 1 - (1 - (i + 1) / self.gradual) ** 3  # of the target sparsity
                mask = select(jnp.abs(weights + duals), share)
            weights, duals = sharding.shard_like(
                (dense, dense), step, weights, duals, mask, products, inverse, statistic
            )
        total = weights + duals  # Z = (W + U) M
        return sharding.shard_like(dense, _unscale_weights, total, pruned, mask, statistic), mask


@jax.jit
def _initialize(
    rho: float, damping: float, dense: jax.Array, statistic: Statistic
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns W and XY as parameters, and inv(XX + rho I)."""
    norms, inverse_norms = _compute_input_norms(statistic)
    gram = statistic.require_real_grams().astype(promote(dense.dtype, norms.dtype))
    eye = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    gram = gram * inverse_norms[..., :, None] * inverse_norms[..., None, :] + damping * eye  # XX
    # W of inputs of unit norm: W_ij ||X_j||, so that outputs stay
    weights = statistic.to_matrices(dense).astype(gram.dtype) * norms[..., None, :]
    factor = lax.linalg.cholesky(gram + rho * eye, symmetrize_input=False), True
    inverse = cho_solve(factor, jnp.broadcast_to(eye, gram.shape))
    products = statistic.from_matrices(dot(weights, gram), dense.shape)
    return statistic.from_matrices(weights, dense.shape), products, inverse


@jax.jit
def _iterate(
    rho: float,
    weights: jax.Array,
    duals: jax.Array,
    mask: jax.Array,
    products: jax.Array,
    inverse: jax.Array,
    statistic: Statistic,
) -> tuple[jax.Array, jax.Array]:
    """Returns W and U after one iteration."""
    sparse = jnp.where(mask > 0, weights + duals, 0)  # Z = (W + U) M
    duals = duals + weights - sparse  # U = U + W - Z
    right_side = statistic.to_matrices(products + rho * (sparse - duals))
    # W = XXinv (XY + rho (Z - U))
    return statistic.from_matrices(dot(right_side, inverse), mask.shape), duals


@jax.jit
def _unscale_weights(
    weights: jax.Array, pruned: jax.Array, mask: jax.Array, statistic: Statistic
) -> jax.Array:
    """Returns the weights on the support, in the scale of the parameter."""
    scale = _compute_input_norms(statistic)[1][..., None, :]
    kept = statistic.to_matrices(pruned).astype(weights.dtype)  # jax promotes no float8
    unscaled = jnp.where(scale > 0, statistic.to_matrices(weights) * scale, kept)
    solution = jnp.where(mask > 0, statistic.from_matrices(unscaled, mask.shape), 0)
    return solution.astype(pruned.dtype)


def _compute_input_norms(statistic: Statistic) -> tuple[jax.Array, jax.Array]:
    """Returns norms of the inputs, and 1 / norm; 0 for inputs that were always 0."""
    norms = jnp.sqrt(jnp.diagonal(statistic.require_real_grams(), axis1=-2, axis2=-1))
    return norms, jnp.where(norms > 0, 1 / jnp.where(norms > 0, norms, 1), 0)
