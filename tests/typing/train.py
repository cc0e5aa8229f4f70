"""Wraps an optimizer and trains."""

from typing import cast

import jax
import jax.numpy as jnp
import optax

import sparsity

Params = dict[str, jax.Array]


def loss(params: Params, x: jax.Array) -> jax.Array:
    return jnp.mean(x @ params["kernel"] + params["bias"])


def gradients(params: Params, x: jax.Array) -> Params:
    return cast(Params, jax.grad(loss)(params, x))


pruner = sparsity.RigL(
    sparsity_distribution_fn=sparsity.ERK(0.5),
    scheduler=sparsity.PeriodicSchedule(update_freq=2),
)
tx = pruner.wrap_optax(optax.adam(1e-3))
params: Params = {"kernel": jnp.ones((8, 4)), "bias": jnp.zeros(4)}
opt_state = tx.init(params)
for _ in range(2):
    grads = gradients(params, jnp.ones((2, 8)))
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    params = pruner.post_gradient_update(params, opt_state)
state: sparsity.SparseState = sparsity.get_sparse_state(opt_state)
table: str = sparsity.sparsity_table(params, opt_state, pruner)
