"""Pruners: training starts dense and becomes sparse; each says what a weight is worth."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity import selection
from sparsity.base_updater import BaseUpdater
from sparsity.core import trees
from sparsity.core.checks import is_traced
from sparsity.core.sharding import place_like, shard_like
from sparsity.training.state import SparseState


@dataclasses.dataclass(kw_only=True)
class MagnitudePruning(BaseUpdater):
    """Keeps the weights of the largest magnitude.

    Source: Zhu & Gupta 2017, "To prune, or not to prune", with a `PolynomialSchedule`.
    """

    def calculate_scores(
        self,
        params: chex.ArrayTree,
        sparse_state: SparseState | None = None,
        grads: chex.ArrayTree | None = None,
    ) -> chex.ArrayTree:
        return jax.tree.map(jnp.abs, params)


@dataclasses.dataclass(kw_only=True)
class SaliencyPruning(BaseUpdater):
    """Keeps the weights whose removal changes the loss most, to first order: |weight * gradient|.

    Source: Molchanov et al. 2016, "Pruning Convolutional Neural Networks for Resource Efficient
    Inference", equation 6.
    """

    def calculate_scores(
        self,
        params: chex.ArrayTree,
        sparse_state: SparseState | None = None,
        grads: chex.ArrayTree | None = None,
    ) -> chex.ArrayTree:
        if grads is None:
            raise ValueError(
                f"{type(self).__name__} scores weights by their gradients, got grads = None. Pass "
                "them: instant_sparsify(params, grads)."
            )

        def score(path: trees.KeyPath, param: Any, grad: Any) -> Any:
            if grad is None:
                raise ValueError(f"grads has no leaf for {trees.path_string(path)!r}.")
            return jnp.abs(param * grad)

        return trees.map_matched(score, params, grads)


@dataclasses.dataclass(kw_only=True)
class RandomPruning(BaseUpdater):
    """Keeps random weights; a pruned weight stays pruned while the sparsity grows."""

    def calculate_scores(
        self,
        params: chex.ArrayTree,
        sparse_state: SparseState | None = None,
        grads: chex.ArrayTree | None = None,
    ) -> chex.ArrayTree:
        return generate_random_scores(params, self.rng_seed)


def generate_random_scores(
    params: chex.ArrayTree, rng_seed: int | jax.Array, step: chex.Numeric = 0
) -> chex.ArrayTree:
    """Returns uint32 scores: a hash of seed, step, path and index, without communication.

    Args:
      params: tree of arrays; only paths and shapes matter.
      rng_seed: an int or a jax random key, old or new style, traced or not.
      step: int scalar; another step gives independent scores.

    Returns:
      A tree like `params` of uint32 arrays; they do not depend on how the arrays are sharded.

    Example:
      >>> generate_random_scores({"w": jnp.zeros((2, 3))}, 8)["w"].shape
      (2, 3)
    """
    words = _seed_words(rng_seed)

    def draw(path: trees.KeyPath, param: Any) -> jax.Array:
        leaf = np.uint32(zlib.crc32(trees.path_string(path).encode()))
        draw_shape = functools.partial(selection.hash_scores, jnp.shape(param))
        scores = shard_like(param, draw_shape, *words, step, leaf)
        # Inside jit XLA places them where they are used.
        return scores if is_traced(scores) else place_like(param, scores)

    return trees.map_matched(draw, params)


def _seed_words(rng_seed: int | jax.Array) -> tuple[chex.Numeric, ...]:
    if isinstance(rng_seed, jax.Array | np.ndarray):
        if jnp.issubdtype(rng_seed.dtype, jax.dtypes.prng_key):
            rng_seed = jax.random.key_data(rng_seed)
        words = tuple(jnp.ravel(rng_seed).astype(jnp.uint32))
        return words if rng_seed.ndim else (*words, 0)  # a scalar is a number, not a key
    seed = int(rng_seed)
    return np.uint32(seed & 0xFFFFFFFF), np.uint32((seed >> 32) & 0xFFFFFFFF)
