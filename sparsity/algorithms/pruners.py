"""Pruners: training starts dense and becomes sparse; each class has its own scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from sparsity.core import trees
from sparsity.core.arrays import promote, scale_to_one
from sparsity.core.hashing import generate_random_scores
from sparsity.core.trees import Grads, Params, ScoreTree
from sparsity.masks import has_statement
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.state import SparseState

__all__ = ["MagnitudePruning", "RandomPruning", "SaliencyPruning", "generate_random_scores"]


@dataclasses.dataclass(kw_only=True)
class MagnitudePruning(BaseUpdater):
    """Keeps the weights of the largest magnitude of each layer.

    Other scopes rank all layers together, or whole channels. Weights that were pruned are 0 and
    rank last, so that masks only lose weights along a ramp. The magnitude of a complex weight whose
    parts are subnormal counts as 0, as in `jax.numpy.abs`.

    Source: Zhu & Gupta 2017, "To prune, or not to prune", with a `PolynomialSchedule`.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> weights = jnp.array([[1.0, -3.0], [2.0, 0.5]])
      >>> pruner = MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> pruner.instant_sparsify(weights)[0]
      Array([[ 0., -3.],
             [ 2.,  0.]], dtype=float32)
    """

    regrows: ClassVar[bool] = False  # a pruned weight is 0, which scores lowest

    def calculate_scores(
        self, params: Params, sparse_state: SparseState | None = None, grads: Grads | None = None
    ) -> ScoreTree:
        return jax.tree.map(jnp.abs, params)


@dataclasses.dataclass(kw_only=True)
class SaliencyPruning(BaseUpdater):
    """Keeps the weights whose removal changes the loss most, to first order: |weight * gradient|.

    Source: Molchanov et al. 2016, "Pruning Convolutional Neural Networks for Resource Efficient
    Inference", equation 6.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> weights, grads = jnp.array([[1.0, -3.0]]), jnp.array([[4.0, 1.0]])
      >>> pruner = SaliencyPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> pruner.instant_sparsify(weights, grads)[0]
      Array([[1., 0.]], dtype=float32)
    """

    def calculate_scores(
        self, params: Params, sparse_state: SparseState | None = None, grads: Grads | None = None
    ) -> ScoreTree:
        if grads is None:
            raise ValueError(
                f"{type(self).__name__} scores weights by their gradients, got grads = None. Pass "
                "them: instant_sparsify(params, grads)."
            )

        factors: list[tuple[jax.Array, jax.Array]] = []

        def read(path: trees.KeyPath, param: jax.Array, grad: jax.Array | None) -> int:
            if grad is None:
                name = trees.path_string(path)
                raise ValueError(f"grads has no leaf for {name!r}. Give all gradients of params.")
            dtype = promote(param.dtype, grad.dtype, jnp.float32)
            factors.append((param.astype(dtype), grad.astype(dtype)))
            return len(factors) - 1

        places = trees.map_matched(read, params, grads)
        scores = _multiply_in_range(*zip(*factors, strict=True)) if factors else []
        # A scope that adds up the scores of channels takes the absolute value of the sum.
        if not has_statement(self.scope, "takes_signed_scores"):
            scores = list(map(jnp.abs, scores))
        return jax.tree.map(scores.__getitem__, places)


def _multiply_in_range(weights: Sequence[jax.Array], grads: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns products, times one power of two if the largest would leave [2**-60, 2**120]."""
    (weights, first), (grads, second) = scale_to_one(weights), scale_to_one(grads)
    exponent = 2 - jnp.frexp(first)[1] - jnp.frexp(second)[1]  # of what scaling to 1 took away
    factor = jnp.ldexp(jnp.ones_like(first), jnp.clip(exponent, -60, 120))
    return [x * y * factor.astype(x.dtype) for x, y in zip(weights, grads, strict=True)]


@dataclasses.dataclass(kw_only=True)
class RandomPruning(BaseUpdater):
    """Keeps a random subset, which `rng_seed` and the path of the parameter determine.

    Masks are nested as the sparsity rises: a pruned weight stays pruned.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> pruner = RandomPruning(rng_seed=1, sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> int(pruner.instant_sparsify(jnp.ones((4, 5)))[1].sum())
      10
    """

    regrows: ClassVar[bool] = False

    def calculate_scores(
        self, params: Params, sparse_state: SparseState | None = None, grads: Grads | None = None
    ) -> ScoreTree:
        return generate_random_scores(params, self.rng_seed)
