"""Trains kept values only."""

from typing import cast

import jax
import jax.numpy as jnp
import optax

import sparsity

Params = dict[str, jax.Array]


def model(params: Params, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["up"]) @ params["down"]


params: Params = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 2))}
x = jnp.ones((5, 4))
graph = sparsity.trace(model, params, x)
pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
pruned, masks = pruner.instant_sparsify(params)
tx = optax.adam(1e-3)
compact = sparsity.compact(graph, pruned, masks, tx.init(pruned), tx)


def loss(values: Params) -> jax.Array:
    return jnp.sum(compact.apply(values, x) ** 2)


def gradients(values: Params) -> Params:
    return cast(Params, jax.grad(loss)(values))


updates, opt_state = tx.update(gradients(compact.params), compact.opt_state, compact.params)
values = optax.apply_updates(compact.params, updates)
dense = compact.dense(values)
formats = dict(compact.formats)
