"""Prunes before training, and finds lottery tickets."""

import jax
import jax.numpy as jnp

import sparsity

Params = dict[str, jax.Array]


def loss(params: Params, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(x @ params["w"] / 100) ** 2)


params: Params = {"w": jnp.arange(8.0).reshape(4, 2)}
batches = [jnp.ones((3, 4))]
scores = sparsity.snip_scores(loss, params, batches)
pruned, masks = sparsity.prune_at_init("snip", params, 0.5, loss_fn=loss, batches=batches)
kernel: jax.Array = pruned["w"]


def train(start: Params, masks: Params) -> Params:
    return start


for _, ticket, _ in sparsity.lottery_ticket(train, params, rounds=1, rate=0.5):
    first: jax.Array = ticket["w"]
