"""Adds algorithms of one's own, and trains with them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sparsity
from sparsity import sparsity_distributions


@dataclasses.dataclass
class Signed(sparsity.BaseUpdater):
    slope: float = 0.5

    def calculate_scores(
        self, params: Any, sparse_state: sparsity.SparseState | None = None, grads: Any = None
    ) -> Any:
        def score(weights: jax.Array) -> jax.Array:
            return jnp.where(weights > 0, weights, -self.slope * weights)

        return jax.tree.map(score, params)


@dataclasses.dataclass
class Careful(sparsity.MagnitudePruning):
    """Keeps its masks while the loss, which the training loop passes, is high."""

    def update_state(
        self,
        sparse_state: sparsity.SparseState,
        params: Any,
        grads: Any,
        *,
        loss: float = 0.0,
        **extra_args: Any,
    ) -> sparsity.SparseState:
        if loss > 1:
            return sparse_state
        return super().update_state(sparse_state, params, grads, **extra_args)


params: dict[str, jax.Array] = {
    "kernel": jnp.linspace(-1.0, 1.0, 32).reshape(8, 4),
    "bias": jnp.zeros(4),
}
half = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
signed = Signed(
    scheduler=sparsity.OneShotSchedule(0),
    sparsity_distribution_fn=half,
    sparsity_type=sparsity.NByM(2, 4),
    slope=0.1,
)
slope: float = signed.slope
tx: optax.GradientTransformationExtraArgs = signed.wrap_optax(
    optax.chain(optax.clip(1.0), optax.adam(1e-3))
)


def train_step(
    params: dict[str, jax.Array], opt_state: optax.OptState
) -> tuple[dict[str, jax.Array], optax.OptState]:
    weights = signed.pre_forward_update(params, opt_state)
    grads = {name: jnp.ones_like(weight) for name, weight in weights.items()}
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    return signed.post_gradient_update(params, opt_state), opt_state


trained, opt_state = train_step(params, tx.init(params))
count: int = int(sparsity.get_sparse_state(opt_state).count)
total: float = sparsity.summarize_sparsity(trained)["_total_sparsity"]
assert total == 16 / 36

careful = Careful(
    scheduler=sparsity.PeriodicSchedule(2),
    sparsity_distribution_fn=half,
    batch_axes=lambda path, param: 0,
)
tx = careful.wrap_optax(optax.sgd(0.1), masks=None)
_, opt_state = tx.update(params, tx.init(params), params, loss=0.5)

rigl = sparsity.RigL(drop_fraction_fn=optax.cosine_decay_schedule(0.3, 100))
fraction = rigl.drop_fraction_fn(3)
sparsity.ALGORITHM_REGISTRY["signed"] = Signed
updater: sparsity.BaseUpdater = sparsity.create_updater_from_config(
    {"algorithm": "signed", "sparsity": 0.5, "dist_type": "erk", "filter_fn": None}
)
