"""Adds an algorithm of one's own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sparsity


@dataclasses.dataclass
class Signed(sparsity.BaseUpdater):
    slope: float = 0.5

    def calculate_scores(
        self, params: Any, sparse_state: sparsity.SparseState | None = None, grads: Any = None
    ) -> Any:
        def score(weights: jax.Array) -> jax.Array:
            return jnp.where(weights > 0, weights, -self.slope * weights)

        return jax.tree.map(score, params)


signed = Signed(slope=0.1, sparsity_distribution_fn=sparsity.Uniform(0.5))
slope: float = signed.slope
tx: optax.GradientTransformationExtraArgs = signed.wrap_optax(optax.sgd(0.1))
sparsity.ALGORITHM_REGISTRY["signed"] = Signed
updater: sparsity.BaseUpdater = sparsity.create_updater_from_config(
    {"algorithm": "signed", "sparsity": 0.5}
)
