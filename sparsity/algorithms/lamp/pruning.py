"""Layer-adaptive magnitude pruning: one threshold for all layers, without tuning.

Source: Lee et al. 2021, "Layer-adaptive sparsity for the magnitude-based pruning", equation 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Self

import jax

from sparsity.algorithms.lamp.scores import lamp_scores
from sparsity.algorithms.lamp.search import search_together
from sparsity.core import sharding
from sparsity.core.exact import Words
from sparsity.core.trees import Grads, Params, ScoreTree
from sparsity.masks import Global, Scope
from sparsity.selection import LazyScores
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.hooks import StepInputs
from sparsity.training.state import SparseState
from sparsity.training.updater_hooks import is_overridden


@dataclasses.dataclass(frozen=True, eq=False)
class LampScores(LazyScores):
    """Scores of a layer by `lamp_scores`, computed where a scope needs the array.

    Attributes:
      weights: array of any shape, real or complex.
    """

    weights: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weights.shape

    def compute(self) -> jax.Array:
        scores = sharding.shard_like(self.weights, lamp_scores, self.weights)
        return sharding.place_like(self.weights, scores)

    @classmethod
    def select_together(cls, scores: Sequence[Self], k: Words) -> list[jax.Array] | None:
        return search_together([layer.weights for layer in scores], k)


@dataclasses.dataclass(kw_only=True)
class LampPruning(BaseUpdater):
    """Keeps the weights with the largest squares, relative to the larger weights of their layer.

    The score of a weight is its square over the sum of the squares that rank no lower in its layer,
    including the square itself. Of equal magnitudes the one with the lower index ranks higher. The
    largest weight of a layer scores 1, so that no layer vanishes while at least as many weights are
    kept as there are layers. On hosts an update searches the masks and sorts only weights near the
    threshold. `calculate_scores` sorts a layer, and so does an update on other devices and on a
    mesh, which gathers a sharded layer.

    Source: Lee et al. 2021, "Layer-adaptive sparsity" (LAMP), equation 4.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"large": jnp.array([[100.0, 400.0]]), "small": jnp.array([[1.0, 4.0]])}
      >>> pruner = LampPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> {name: mask.tolist() for name, mask in pruner.instant_sparsify(params)[1].items()}
      {'large': [[0, 1]], 'small': [[0, 1]]}
    """

    regrows: ClassVar[bool | None] = False  # a pruned weight is 0, which scores lowest
    scope: Scope = Global(use_normalization=False)

    def calculate_scores(
        self, params: Params, sparse_state: SparseState | None = None, grads: Grads | None = None
    ) -> ScoreTree:
        return jax.tree.map(lambda param: LampScores(param).compute(), params)

    def defer_scores(self, inputs: StepInputs) -> ScoreTree | None:
        if is_overridden(self, "calculate_scores", LampPruning):
            return super().defer_scores(inputs)
        return jax.tree.map(LampScores, inputs.masked_weights)
