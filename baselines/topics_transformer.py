"""A character transformer on the help topics of Python, 465,000 characters of English."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsity
from baselines import training

BATCH, LENGTH, STEPS, LEARNING_RATE = 16, 64, 1500, 3e-3
WEIGHT_DECAY, MAX_NORM = 1e-2, 1.0
WIDTH, HEADS, LAYERS = 64, 4, 2
TEST_BATCH = 256


@functools.cache
def data() -> tuple[np.ndarray, np.ndarray, int]:
    """(characters to train on, the last tenth to test on, number of different characters)."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    alphabet, text = np.unique(np.array(list(text)), return_inverse=True)
    text = text.astype(np.int32)
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:], len(alphabet)


def init(key: jax.Array) -> chex.ArrayTree:
    keys = iter(jax.random.split(key, 3 + 4 * LAYERS))
    alphabet = data()[2]
    dense = functools.partial(training.dense, gain=1.0)
    return {
        "embedding": 0.3 * jax.random.normal(next(keys), (alphabet, WIDTH)),
        "position": 0.3 * jax.random.normal(next(keys), (LENGTH, WIDTH)),
        "layers": [
            {
                "qkv": dense(next(keys), WIDTH, 3 * WIDTH),
                "mixed": dense(next(keys), WIDTH, WIDTH, gain=0.5 / LAYERS),
                "up": dense(next(keys), WIDTH, 4 * WIDTH, gain=2.0),
                "down": dense(next(keys), 4 * WIDTH, WIDTH, gain=0.5 / LAYERS),
                "scales": [jnp.ones(WIDTH), jnp.ones(WIDTH)],
            }
            for _ in range(LAYERS)
        ],
        "scale": jnp.ones(WIDTH),
        "logits": dense(next(keys), WIDTH, alphabet),
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def model(params: chex.ArrayTree, text: jax.Array) -> jax.Array:
    """Logits [batch, length, alphabet] of the character after each; text is int32."""
    x = params["embedding"][text] + params["position"][: text.shape[-1]]
    for layer in params["layers"]:
        qkv = training.apply_dense(layer["qkv"], norm(x, layer["scales"][0]))
        heads = qkv.reshape(*qkv.shape[:-1], 3, HEADS, WIDTH // HEADS)
        mixed = jax.nn.dot_product_attention(*jnp.unstack(heads, axis=-3), is_causal=True)
        x = x + training.apply_dense(layer["mixed"], mixed.reshape(x.shape))
        hidden = jax.nn.relu(training.apply_dense(layer["up"], norm(x, layer["scales"][1])))
        x = x + training.apply_dense(layer["down"], hidden)
    return training.apply_dense(params["logits"], norm(x, params["scale"]))


def train(key: jax.Array, updater: sparsity.BaseUpdater) -> training.Metrics:
    text, test_text = (jnp.asarray(x) for x in data()[:2])
    init_key, key = jax.random.split(key)

    def loss_at(params: chex.ArrayTree, text: jax.Array, starts: jax.Array) -> jax.Array:
        window = text[starts[:, None] + jnp.arange(LENGTH + 1)]
        return training.cross_entropy(model(params, window[:, :-1]), window[:, 1:])

    def loss_fn(params: chex.ArrayTree, key: jax.Array) -> jax.Array:
        return loss_at(params, text, jax.random.randint(key, (BATCH,), 0, len(text) - LENGTH))

    rate = training.warmup_cosine(LEARNING_RATE, STEPS)
    optimizer = optax.chain(
        optax.clip_by_global_norm(MAX_NORM), optax.adamw(rate, weight_decay=WEIGHT_DECAY)
    )
    example = text[None, :LENGTH]
    params = training.fit(key, updater, init(init_key), optimizer, loss_fn, STEPS, model, example)
    starts = jnp.linspace(0, len(test_text) - LENGTH - 1, TEST_BATCH).astype(jnp.int32)
    bits = loss_at(params, test_text, starts) / jnp.log(2.0)
    return {"metric": bits, "sparsity": training.sparsity_of(params)}


TASK = training.Task(
    name="topics_transformer",
    title="Character transformer on Python's help topics",
    metric="test bits per character",
    higher_is_better=False,
    sparsities=(0.8,),
    seeds=3,
    settings={
        "batch": BATCH,
        "length": LENGTH,
        "steps": STEPS,
        "adamw": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "max_norm": MAX_NORM,
        "width": WIDTH,
        "heads": HEADS,
        "layers": LAYERS,
        "test_batch": TEST_BATCH,
    },
    train=train,
)
