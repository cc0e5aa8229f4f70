"""The model, its training step and its evaluation.

The lines that make a training loop sparse are marked with "sparsity:"; the rest would be the same
without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

import sparsity
from examples.mnist.data import Digits


class CNN(nn.Module):
    """Two convolutions and two dense layers; images [N, 28, 28, 1] to logits [N, 10]."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(32, (5, 5), strides=2, name="conv1")(images))
        x = nn.relu(nn.Conv(64, (5, 5), strides=2, name="conv2")(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(128, name="hidden")(x))
        return nn.Dense(10, name="logits")(x)


class TrainState(NamedTuple):
    """All that training changes."""

    params: Any
    opt_state: Any  # sparsity: the masks are in here


class Network(NamedTuple):
    """A network in training; `train_step` takes over the memory of the state that it gets."""

    name: str
    updater: sparsity.BaseUpdater
    state: TrainState
    train_step: Callable[[TrainState, Digits], tuple[TrainState, jax.Array]]
    accuracy: Callable[[TrainState, Digits], jax.Array]

    def used_params(self) -> Any:
        """The parameters that the model computes with."""
        return self.updater.pre_forward_update(self.state.params, self.state.opt_state)


def make_network(
    name: str, updater: sparsity.BaseUpdater, config: ConfigDict, num_steps: int
) -> Network:
    """Returns a network with initial weights that depend on the seed only."""
    model = CNN()
    schedule = optax.cosine_decay_schedule(config.learning_rate, num_steps)
    tx = updater.wrap_optax(optax.adam(schedule))  # sparsity: wrap the optimizer

    def logits(params: Any, opt_state: Any, images: Any) -> Any:
        # sparsity: straight-through methods mask the weights here, others return them as they are.
        params = updater.pre_forward_update(params, opt_state)
        return model.apply({"params": params}, images)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: Digits) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            outputs = logits(params, state.opt_state, batch.images)
            return optax.softmax_cross_entropy_with_integer_labels(outputs, batch.labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params = updater.post_gradient_update(params, opt_state)  # sparsity: pruned stays 0
        return TrainState(params, opt_state), loss

    @jax.jit
    def accuracy(state: TrainState, digits: Digits) -> jax.Array:
        outputs = logits(state.params, state.opt_state, digits.images)
        return (outputs.argmax(-1) == digits.labels).mean()

    params = model.init(jax.random.key(config.seed), jnp.zeros((1, 28, 28, 1)))["params"]
    return Network(name, updater, TrainState(params, tx.init(params)), train_step, accuracy)
