"""A residual MLP on MNIST-1D: 40 noisy samples of a curve, ten classes (Greydanus 2020)."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsity
from baselines import training

BATCH, STEPS, LEARNING_RATE, WIDTH, BLOCKS = 100, 6000, 2e-3, 256, 3


@functools.cache
def data() -> tuple[np.ndarray, ...]:
    """(train inputs, train labels, test inputs, test labels); inputs [n, 40]."""
    from mnist1d.data import make_dataset

    made = make_dataset()
    return tuple(
        np.asarray(made[name], dtype)
        for name, dtype in (
            ("x", np.float32),
            ("y", np.int32),
            ("x_test", np.float32),
            ("y_test", np.int32),
        )
    )


def init(key: jax.Array) -> chex.ArrayTree:
    keys = iter(jax.random.split(key, 2 + 2 * BLOCKS))
    return {
        "inputs": training.dense(next(keys), 40, WIDTH),
        "blocks": [
            {
                "up": training.dense(next(keys), WIDTH, WIDTH),
                "down": training.dense(next(keys), WIDTH, WIDTH, gain=0.5 / BLOCKS),
            }
            for _ in range(BLOCKS)
        ],
        "logits": training.dense(next(keys), WIDTH, 10, gain=1.0),
    }


def model(params: chex.ArrayTree, x: jax.Array) -> jax.Array:
    x = training.apply_dense(params["inputs"], x)
    for block in params["blocks"]:
        hidden = jax.nn.relu(training.apply_dense(block["up"], jax.nn.relu(x)))
        x = x + training.apply_dense(block["down"], hidden)
    return training.apply_dense(params["logits"], jax.nn.relu(x))


def train(key: jax.Array, updater: sparsity.BaseUpdater) -> training.Metrics:
    x, labels, test_x, test_labels = map(jnp.asarray, data())
    init_key, key = jax.random.split(key)

    def loss_fn(params: chex.ArrayTree, key: jax.Array) -> jax.Array:
        chosen = jax.random.randint(key, (BATCH,), 0, len(x))
        return training.cross_entropy(model(params, x[chosen]), labels[chosen])

    rate = training.warmup_cosine(LEARNING_RATE, STEPS)
    optimizer = optax.adamw(rate, weight_decay=1e-2)
    params = training.fit(key, updater, init(init_key), optimizer, loss_fn, STEPS)
    right = model(params, test_x).argmax(-1) == test_labels
    return {"metric": 100 * right.mean(), "sparsity": training.sparsity_of(params)}


TASK = training.Task(
    name="mnist1d_mlp",
    title="Residual MLP on MNIST-1D",
    metric="test accuracy, %",
    higher_is_better=True,
    sparsities=(0.9,),
    seeds=5,
    settings={
        "batch": BATCH,
        "steps": STEPS,
        "adamw": LEARNING_RATE,
        "weight_decay": 1e-2,
        "width": WIDTH,
        "blocks": BLOCKS,
    },
    train=train,
)
