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
import numpy as np
import optax
from ml_collections import ConfigDict

import sparsity
from examples.mnist.data import Digits

IMAGE = jax.ShapeDtypeStruct((1, 28, 28, 1), jnp.uint8)  # a batch of one


class CNN(nn.Module):
    """Two convolutions and two dense layers; images [N, 28, 28, 1] of bytes to logits [N, 10]."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.astype(jnp.float32) / 255
        x = nn.relu(nn.Conv(32, (5, 5), strides=2, name="conv1")(x))
        x = nn.relu(nn.Conv(64, (5, 5), strides=2, name="conv2")(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(128, name="hidden")(x))
        return nn.Dense(10, name="logits")(x)


class TrainState(NamedTuple):
    """All that training changes."""

    params: Any
    opt_state: Any  # sparsity: the masks are in here


class Model(NamedTuple):
    """A function of its parameters, and the parameters to start with."""

    init: Callable[[], Any]
    apply: Callable[[Any, jax.Array], jax.Array]  # from parameters and images to logits


class Network(NamedTuple):
    """What can be done with a state: functions only, so that it is made once.

    A step takes over the memory of the state that it gets. `view` returns the dense parameters of
    a state, and its masks; `used_params` and `accuracy` take this view.
    """

    name: str
    model: Model
    updater: sparsity.BaseUpdater
    init: Callable[[], TrainState]
    train_step: Callable[[Any, Digits], tuple[Any, jax.Array]]
    used_params: Callable[[TrainState], Any]  # the parameters that the model computes with
    num_correct: Callable[[Any, Digits], jax.Array]
    move_step: Callable[[Any, Digits], tuple[Any, jax.Array]] | None = None
    view: Callable[[Any], TrainState] = lambda state: state

    def step_at(self, step: int) -> Callable[[Any, Digits], tuple[Any, jax.Array]]:
        """Returns the program of a step; `move_step`, if any, is that of steps that move masks."""
        if self.move_step and self.updater.scheduler.is_mask_update_iter(step):
            return self.move_step
        return self.train_step

    def accuracy(self, state: TrainState, digits: Digits) -> float:
        """Returns the share of the images whose label is found."""
        params = self.used_params(state)
        parts = [slice(start, start + 1000) for start in range(0, len(digits.labels), 1000)]
        correct = (self.num_correct(params, Digits(*(a[part] for a in digits))) for part in parts)
        return int(np.sum([*correct])) / len(digits.labels)


def make_model(seed: int, sparse_layers: sparsity.activations.Layers) -> Model:
    """Returns a model whose initial weights depend on the seed only."""
    module = CNN()
    sparse_apply = sparsity.sparsify_linen(module.apply, sparse_layers)  # sparsity: of activations

    def init() -> Any:
        # Compiled by itself, this gives all networks the same bits.
        return jax.jit(module.init)(jax.random.key(seed), jnp.zeros(IMAGE.shape))["params"]

    def apply(params: Any, images: jax.Array) -> jax.Array:
        return sparse_apply({"params": params}, images)

    jax.eval_shape(apply, jax.eval_shape(init), IMAGE)  # checks names of layers
    return Model(init, apply)


def make_optimizer(config: ConfigDict, num_steps: int) -> optax.GradientTransformation:
    """Returns the optimizer that the configuration describes, without masks."""
    return optax.adam(optax.cosine_decay_schedule(config.learning_rate, num_steps))


def mean_loss(
    apply: Callable[[Any, jax.Array], jax.Array], params: Any, batch: Digits
) -> jax.Array:
    """Returns the mean cross entropy of a batch."""
    outputs = apply(params, batch.images)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch.labels).mean()


def make_network(
    name: str, model: Model, updater: sparsity.BaseUpdater, config: ConfigDict, num_steps: int
) -> Network:
    """Returns what trains a model and makes it sparse."""
    tx = updater.wrap_optax(make_optimizer(config, num_steps))  # sparsity: wrap the optimizer

    def init() -> TrainState:
        params = model.init()
        # sparsity: applies the first masks of algorithms that start sparse.
        return TrainState(*jax.jit(functools.partial(updater.init, tx))(params))

    def used_params(state: TrainState) -> Any:
        # sparsity: straight-through methods mask the weights here, others return them as they are.
        return updater.pre_forward_update(state.params, state.opt_state)

    def train_step(state: TrainState, batch: Digits) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            params = used_params(TrainState(params, state.opt_state))
            return mean_loss(model.apply, params, batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params = updater.post_gradient_update(params, opt_state)  # sparsity: pruned stays 0
        return TrainState(params, opt_state), loss

    def num_correct(params: Any, digits: Digits) -> jax.Array:
        outputs = model.apply(params, digits.images)
        return (outputs.argmax(-1) == digits.labels).sum()

    return Network(
        name,
        model,
        updater,
        init=init,
        train_step=jax.jit(train_step, donate_argnums=0),
        used_params=jax.jit(used_params),
        num_correct=jax.jit(num_correct),
    )
