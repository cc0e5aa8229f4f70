"""A residual MLP on MNIST-1D: 40 noisy samples of a curve, ten classes (Greydanus 2020)."""

from __future__ import annotations

import functools

import chex
import jax
import numpy as np

import sparsity
from baselines import training

WIDTH, BLOCKS = 128, 3
SETTINGS = {
    "batch": 100,
    "steps": 4000,
    "adamw": 1e-2,
    "weight_decay": 0.3,
    "width": WIDTH,
    "blocks": BLOCKS,
}


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
    return training.fit_classifier(
        key, updater, data=data(), init=init, model=model, settings=SETTINGS
    )


TASK = training.Task(
    name="mnist1d_mlp",
    title="Residual MLP on MNIST-1D",
    metric="test accuracy, %",
    higher_is_better=True,
    sparsities=(0.9,),
    seeds=5,
    settings=SETTINGS,
    train=train,
)
