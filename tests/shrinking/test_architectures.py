"""Layers of published architectures, as their authors spell them: cut exactly, with gradients."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sparsity import trace
from tests.graph import models
from tests.shrinking import oracles

BATCH, LENGTH, HEADS, SIZE = 2, 4, 4, 3


def norm(x, axis=-1):
    centred = x - x.mean(axis, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(axis, keepdims=True) + 1e-6)


def attend(query, key, value):
    """Attention of arrays [heads, length, channels]."""
    return jax.nn.softmax(query @ key.swapaxes(1, 2)) @ value


def grouped_queries(p, x):
    """Two heads of keys and values for four of queries, all in one product, split unequally."""
    q, k, v = jnp.split(x @ p["qkv"], [HEADS * SIZE, (HEADS + 2) * SIZE], -1)
    q = q.reshape(BATCH, LENGTH, 2, HEADS // 2, SIZE)
    k, v = (y.reshape(BATCH, LENGTH, 2, SIZE) for y in (k, v))
    scores = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k))
    return jnp.einsum("bkgts,bskd->btkgd", scores, v).reshape(BATCH, LENGTH, -1) @ p["out"]


def heads_in_the_batch(p, x):
    """Heads that a reshape merges into the batch, and a mask that is repeated for each head."""

    def merge(y):
        y = y.reshape(BATCH, LENGTH, HEADS, SIZE).swapaxes(1, 2)
        return y.reshape(BATCH * HEADS, LENGTH, SIZE)

    q, k, v = (merge(x @ p[name]) for name in ("query", "key", "value"))
    mask = jnp.repeat(x[:, :, 0] > 0, HEADS, axis=0)[:, None]
    scores = jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(1, 2), -1e9))
    y = (scores @ v).reshape(BATCH, HEADS, LENGTH, SIZE).swapaxes(1, 2)
    return y.reshape(BATCH, LENGTH, HEADS * SIZE) @ p["out"]


def head_of_zeros(p, x):
    """A head, a token and channels of zeros, as paddings for kernels of attention make them."""
    q, k, v = (
        (x @ p[name]).reshape(BATCH, LENGTH, HEADS, SIZE) for name in ("query", "key", "value")
    )
    q, k, v = (jnp.pad(y, ((0, 0), (0, 1), (0, 1), (0, 2))) for y in (q, k, v))
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
    y = jnp.einsum("bhts,bshd->bthd", scores, v)[:, :LENGTH, :HEADS, :SIZE]
    return y.reshape(BATCH, LENGTH, -1) @ p["out"]


def heads_in_unequal_parts(p, x):
    """One head of four without a function of its own, three with one, as in CoaT."""
    y = x @ p["value"]
    parts = y[..., :SIZE], jnp.sin(y[..., SIZE:])
    y = jnp.concatenate(parts, -1).reshape(BATCH, LENGTH, HEADS, SIZE)
    return y.reshape(BATCH, LENGTH, -1) @ p["out"]


def patch_merging(p, x):
    """A norm over four neighbours, whose channels follow one another, as in Swin."""
    y = (x @ p["in"]).reshape(BATCH, 2, 2, 6)
    y = jnp.concatenate([y[:, i, j] for j in range(2) for i in range(2)], -1)
    return jnp.tanh(norm(y) * p["scale"]) @ p["out"]


def norm_of_one_group(p, x):
    """A norm over channels and tokens, as in PoolFormer."""
    y = (x @ p["in"]).swapaxes(1, 2)
    y = norm(y.reshape(BATCH, 1, -1)).reshape(y.shape) * p["scale"][:, None]
    return jnp.tanh(y.swapaxes(1, 2)) @ p["out"]


def doubled_channels(p, x):
    """A norm over channels of which a grouped convolution makes two each, as in PiT."""
    y = lax.conv_general_dilated(
        (x @ p["in"]).swapaxes(1, 2), p["double"], (1,), "SAME", feature_group_count=6
    )
    return jnp.tanh(norm(y.swapaxes(1, 2)) * p["scale"]) @ p["out"]


def standardized_kernel(p, x):
    """A kernel that is normalized over inputs and window, as in NFNets."""
    kernel = norm(p["kernel"].reshape(5, -1)) * p["gain"]
    y = jax.nn.relu((x @ p["in"]).swapaxes(1, 2))
    y = lax.conv(y, kernel.reshape(p["kernel"].shape), (1,), "SAME")
    return jnp.tanh(y.swapaxes(1, 2)) @ p["out"]


def channel_shuffle(p, x):
    """Channels of two branches in turn, then halves of these, as in ShuffleNet."""
    branches = jnp.concatenate([jnp.tanh(x @ p["one"]), jnp.sin(x @ p["two"])], -1)
    shuffled = branches.reshape(BATCH, LENGTH, 2, 4).swapaxes(2, 3).reshape(branches.shape)
    one, two = jnp.split(shuffled, 2, -1)
    return one @ p["out"] + jnp.tanh(two) @ p["other"]


def token_mixing(p, x):
    """Products over tokens with biases, so that masked channels hold numbers, as in MLP-Mixer."""
    y = x @ p["in"]
    for _ in range(2):
        mixed = jnp.tanh((norm(y) * p["scale"]).swapaxes(1, 2) @ p["up"] + p["bias"]) @ p["down"]
        y = y + mixed.swapaxes(1, 2)
    return (norm(y) * p["scale"]) @ p["out"]


def sinusoids(p, x):
    """A constant in the channels, whose readers are all masked."""
    return jnp.tanh(x @ p["in"] + np.sin(np.arange(LENGTH * 6).reshape(LENGTH, 6))) @ p["out"]


ATTENTION = dict.fromkeys(("query", "key", "value"), (3, 12)) | {"out": (12, 2)}
# {layer: (shapes of its parameters, sizes of the groups that may lose channels)}
LAYERS = {
    grouped_queries: ({"qkv": (3, 24), "out": (12, 2)}, [2, 2, 3, 3]),
    heads_in_the_batch: (ATTENTION, [3, 3, 4]),
    head_of_zeros: (ATTENTION, [3, 3, 4]),
    heads_in_unequal_parts: ({"value": (3, 12), "out": (12, 2)}, [3, 3]),
    patch_merging: ({"in": (3, 6), "scale": (24,), "out": (24, 2)}, [6]),
    norm_of_one_group: ({"in": (3, 6), "scale": (6,), "out": (6, 2)}, [6]),
    doubled_channels: (
        {"in": (3, 6), "double": (12, 1, 3), "scale": (12,), "out": (12, 2)}, [2, 6]),
    standardized_kernel: (
        {"in": (3, 6), "kernel": (5, 6, 3), "gain": (5, 1), "out": (5, 2)}, [5, 6]),
    channel_shuffle: ({"one": (3, 4), "two": (3, 4), "out": (4, 2), "other": (4, 2)}, [2, 2]),
    token_mixing: (
        {"in": (3, 6), "scale": (6,), "up": (4, 5), "bias": (5,), "down": (5, 4), "out": (6, 2)},
        [5, 6]),
    sinusoids: ({"in": (3, 6), "out": (6, 2)}, [6]),
}  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_a_layer_is_cut_as_masking_says(layer):
    shapes, sizes = LAYERS[layer]
    with jax.enable_x64(True):
        params = models.draw(shapes, jnp.float64)
        x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, 3))
        assert sorted(group.size for group in trace(layer, params, x).groups) == sizes
        oracles.check(layer, params, (x,), 1e-10)


# Decoding.


class Decoder(nn.Module):
    """A layer that keeps keys and values for later tokens."""

    @nn.compact
    def __call__(self, x, _):
        attention = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8, decode=True)
        x = x + attention(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(nn.Dense(6)(nn.LayerNorm()(x)))), None


class Decoders(nn.Module):
    """Layers in a scan, with their keys and values."""

    @nn.compact
    def __call__(self, tokens):
        axes = {"params": 0, "cache": 0}
        scan = nn.scan(Decoder, variable_axes=axes, split_rngs={"params": True}, length=2)
        x, _ = scan()(nn.Embed(11, 8)(tokens), None)
        return nn.Dense(11)(nn.LayerNorm()(x))


@pytest.mark.slow
def test_scanned_layers_that_decode_with_a_cache_are_cut_as_masking_says():
    tokens = jnp.array([[3, 1, 4, 1]])
    shapes = jax.eval_shape(lambda: Decoders().init(jax.random.key(0), tokens))

    def decode(params, tokens):
        def step(cache, token):
            variables = {"params": params, "cache": cache}
            logits, updated = Decoders().apply(variables, token[:, None], mutable=["cache"])
            return updated["cache"], logits

        dtypes = {jnp.float32: jnp.float64, jnp.int32: jnp.int32}
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, dtypes[x.dtype.type]), shapes["cache"])
        return lax.scan(step, empty, tokens.T)[1]

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), shapes["params"])
        sizes = sorted(group.size for group in trace(decode, params, tokens).groups)
        assert sizes == [2, 4, 4, 6, 8]
        oracles.check(decode, params, (tokens,), 1e-10, is_each_alone=False)
