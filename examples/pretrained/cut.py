"""Cuts channels out of pretrained networks, and trains the rest to agree with the dense network."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsity

Params = dict[str, jax.Array]
Apply = Callable[[Params, jax.Array], jax.Array]

SHARES = (0.5, 0.25)  # of the multiply-adds, which stay
METHODS = ("magnitude", "FLAP")


def cut(
    method: str, share: float, graph: sparsity.Graph, fn: Apply, params: Params, batches: list[Any]
) -> Any:
    """Returns the network without the channels that a method removes.

    Args:
      method: a name of `METHODS`.
      share: part of the multiply-adds that stays.
      graph: graph of the network.
      fn: the network.
      params: its parameters.
      batches: inputs to calibrate with.
    """
    scope, budget = sparsity.Coupled(graph, across=True), sparsity.budget(graph, macs=share)
    if method == "FLAP":
        # The bias of an LSTM belongs to two products, so that no mean can be added.
        fields = {"scope": scope, "sparsity_distribution_fn": budget, "compensate": False}
        pruner = sparsity.FLAPPruning(**fields)
        statistics = sparsity.calibrate(fn, params, batches, "moments")
        pruned, masks = pruner.instant_sparsify(params, statistics=statistics)
    else:
        pruner = sparsity.MagnitudePruning(scope=scope, sparsity_distribution_fn=budget)
        pruned, masks = pruner.instant_sparsify(params)
    return sparsity.shrink(graph, pruned, masks)


def draw_weights(params: Params) -> Params:
    """Returns new weights of the same shapes; those of an array have its mean and deviation."""
    random = np.random.default_rng(0)
    return {
        name: jnp.asarray(random.normal(np.mean(x), np.std(x), x.shape), x.dtype)
        for name, x in params.items()
    }


def distil(
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    apply: Apply,
    params: Params,
    batches: list[np.ndarray],
    answers: list[np.ndarray],
    steps: int,
    learning_rate: float,
) -> Params:
    """Trains a network to give the outputs of the dense one, without labels.

    Args:
      loss: from outputs and those of the dense network to a scalar.
      apply: the network.
      params: its parameters.
      batches: inputs.
      answers: outputs of the dense network for each batch.
      steps: steps of Adam, whose rate falls to 0 along a cosine.
      learning_rate: the first rate.

    Returns:
      The trained parameters.
    """
    tx = optax.adam(optax.cosine_decay_schedule(learning_rate, steps))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Params, state: optax.OptState, x: jax.Array, answer: jax.Array
    ) -> tuple[Params, optax.OptState]:
        grads = jax.grad(lambda params: loss(apply(params, x), answer))(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, params)  # a step donates them
    state = tx.init(params)
    for i in range(steps):
        params, state = step(params, state, batches[i % len(batches)], answers[i % len(batches)])
    trained: Params = jax.block_until_ready(params)
    return trained
