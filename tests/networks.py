"""Random networks of the layers of flax, haiku and equinox.

A network is a chain of layers on rows [batch, length, width] or images [batch, height, width,
channels]. Each layer comes from one of the frameworks with random options, and stands within random
wrappers: a residual, a checkpoint, a scan over stacked layers, a branch, a map over examples.
"""

import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

BATCH, LENGTH, CLASSES = 2, 6, 3
WIDTHS = (4, 6, 8)
ACTIVATIONS = (jax.nn.relu, jax.nn.gelu, jnp.tanh, jax.nn.silu, jax.nn.sigmoid, lambda x: x)
ROWS, IMAGES = {}, {}  # {name: function (rng, sizes) -> Layer}


@dataclasses.dataclass
class Layer:
    """A layer: `init(key, x)` returns parameters, `apply(params, x)` the outputs."""

    init: Callable
    apply: Callable


@dataclasses.dataclass
class Network:
    """A random network: `apply(params, x)` with the names of its layers in `names`."""

    names: list[str]
    apply: Callable
    params: dict
    x: jax.Array


def make(seed, dtype=jnp.float64):
    """Returns a random `Network`; the same for the same seed."""
    rng = np.random.default_rng(seed)
    table = ROWS if rng.random() < 0.6 else IMAGES
    x = jnp.asarray(rng.normal(size=(BATCH, *[LENGTH] * (1 if table is ROWS else 2), 4)), dtype)
    names, layers, params, h = [], [], {}, x
    for _ in range(rng.integers(2, 5)):
        name = str(rng.choice(sorted(table)))
        layer = table[name](rng, h.shape[-1], int(rng.choice(WIDTHS)))
        wrapper, layer = wrap(rng, layer, h)
        activation = ACTIVATIONS[rng.integers(len(ACTIVATIONS))]
        layer = Layer(layer.init, functools.partial(_activate, layer.apply, activation))
        name = f"{len(names)}_{wrapper}{name}"
        weights = draw(rng, jax.eval_shape(layer.init, jax.random.key(0), h), dtype)
        h = jax.eval_shape(layer.apply, weights, h)
        names, layers, params = [*names, name], [*layers, layer], params | {name: weights}
    params["out"] = draw(rng, jax.ShapeDtypeStruct((h.shape[-1], CLASSES), dtype), dtype)

    def apply(params, x):
        for name, layer in zip(names, layers, strict=True):
            x = layer.apply(params[name], x)
        return x.mean(tuple(range(1, x.ndim - 1))) @ params["out"]

    return Network(names, apply, params, x)


def _activate(apply, activation, params, x):
    return activation(apply(params, x))


def draw(rng, shapes, dtype):
    """Returns random parameters; vectors and variances of norms are near 1."""

    def one(path, leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        is_variance = "'var'" in jax.tree_util.keystr(path)  # a scan stacks them
        scale, start = (0.2, 1) if leaf.ndim < 2 or is_variance else (0.6, 0)
        return jnp.asarray(start + scale * rng.normal(size=leaf.shape), dtype)

    return jax.tree_util.tree_map_with_path(one, shapes)


# Wrappers.


def wrap(rng, layer, h):
    """Returns (name, layer) of a layer within a random wrapper, or as it is."""
    outputs = jax.eval_shape(layer.apply, jax.eval_shape(layer.init, jax.random.key(0), h), h)
    names = ["", "", "checkpoint_", "map_", "branch_"]
    if outputs.shape == h.shape:
        names += ["residual_", "scan_", "loop_"]
    name = names[rng.integers(len(names))]
    return name, layer if not name else WRAPPERS[name](layer)


def residual(layer):
    return Layer(layer.init, lambda params, x: x + layer.apply(params, x))


def checkpoint(layer):
    return Layer(layer.init, jax.checkpoint(layer.apply))


def scan(layer):
    def init(key, x):
        return jax.vmap(lambda key: layer.init(key, x))(jax.random.split(key, 3))

    def apply(params, x):
        return jax.lax.scan(lambda x, one: (layer.apply(one, x), None), x, params)[0]

    return Layer(init, apply)


def loop(layer):
    def apply(params, x):
        return jax.lax.fori_loop(0, 2, lambda _, x: layer.apply(params, x), x)

    return Layer(layer.init, apply)


def branch(layer):
    def apply(params, x):
        run = functools.partial(layer.apply, params)
        return jax.lax.cond(x.sum() > 0, run, lambda x: run(-x), x)

    return Layer(layer.init, apply)


def over_examples(layer):
    return Layer(
        layer.init, lambda params, x: jax.vmap(lambda x: layer.apply(params, x[None])[0])(x)
    )


WRAPPERS = {
    "residual_": residual,
    "checkpoint_": checkpoint,
    "scan_": scan,
    "loop_": loop,
    "branch_": branch,
    "map_": over_examples,
}


# Layers. A maker gets (rng, inputs, outputs) and returns a `Layer`.


def register(*tables):
    def keep(make_layer):
        for table in tables:
            table[make_layer.__name__] = make_layer
        return make_layer

    return keep


def choose(rng, *choices):
    return choices[rng.integers(len(choices))]


def linen_layer(module):
    return Layer(module.init, module.apply)


def nnx_layer(make_module):
    definition = nnx.graphdef(nnx.eval_shape(lambda: make_module(nnx.Rngs(0))))

    def init(key, x):
        del x
        return nnx.state(make_module(nnx.Rngs(params=key)))

    return Layer(init, lambda state, x: nnx.merge(definition, state)(x))


def haiku_layer(make_module):
    transformed = hk.without_apply_rng(hk.transform(lambda x: make_module()(x)))
    return Layer(transformed.init, transformed.apply)


def equinox_layer(make_module, axes, channels_first=False):
    """A layer for one example, mapped over `axes` leading axes."""

    def init(key, x):
        del x
        return eqx.filter(make_module(key), eqx.is_inexact_array)

    def apply(params, x):
        fixed = eqx.filter(make_module(jax.random.key(0)), eqx.is_inexact_array, inverse=True)
        call = eqx.combine(params, fixed)
        for _ in range(axes):
            call = jax.vmap(call)
        if channels_first:
            return jnp.moveaxis(call(jnp.moveaxis(x, -1, 1)), 1, -1)
        return call(x)

    return Layer(init, apply)


@register(ROWS, IMAGES)
def linen_dense(rng, inputs, outputs):
    return linen_layer(nn.Dense(outputs, use_bias=bool(rng.integers(2))))


@register(ROWS, IMAGES)
def linen_general(rng, inputs, outputs):
    class Heads(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.DenseGeneral((2, 3))(x)
            return nn.DenseGeneral(outputs, axis=(-2, -1))(x)

    return linen_layer(Heads())


@register(ROWS, IMAGES)
def linen_norm(rng, inputs, outputs):
    module = choose(rng, nn.LayerNorm, nn.RMSNorm, functools.partial(nn.GroupNorm, num_groups=2))
    return linen_layer(nn.Sequential([nn.Dense(outputs), module()]))


@register(ROWS, IMAGES)
def linen_batch_norm(rng, inputs, outputs):
    norm = nn.BatchNorm(use_running_average=True, use_scale=bool(rng.integers(2)))
    return linen_layer(nn.Sequential([nn.Dense(outputs), norm]))


@register(ROWS)
def linen_attention(rng, inputs, outputs):
    module = functools.partial(
        nn.MultiHeadDotProductAttention, num_heads=2, qkv_features=8, out_features=outputs
    )
    return linen_layer(module(use_bias=bool(rng.integers(2)), normalize_qk=bool(rng.integers(2))))


@register(ROWS)
def linen_recurrent(rng, inputs, outputs):
    cell = choose(rng, nn.GRUCell, nn.OptimizedLSTMCell, nn.SimpleCell, nn.LSTMCell, nn.MGUCell)
    cell = cell(outputs, param_dtype=jnp.float64)
    return linen_layer(nn.RNN(cell, reverse=bool(rng.integers(2)), keep_order=True))


@register(ROWS, IMAGES)
def linen_low_rank(rng, inputs, outputs):
    return linen_layer(nn.Sequential([nn.Dense(2, use_bias=False), nn.Dense(outputs)]))


@register(ROWS)
def linen_convolution_of_rows(rng, inputs, outputs):
    padding = choose(rng, "SAME", "CAUSAL", "CIRCULAR")
    return linen_layer(nn.Conv(outputs, (3,), padding=padding, kernel_dilation=choose(rng, 1, 2)))


@register(IMAGES)
def linen_convolution(rng, inputs, outputs):
    groups = choose(rng, 1, 2)
    return linen_layer(
        nn.Conv(
            outputs,
            choose(rng, (1, 1), (3, 3), (3, 2)),
            strides=choose(rng, 1, 2),
            feature_group_count=groups if inputs % groups == outputs % groups == 0 else 1,
            use_bias=bool(rng.integers(2)),
        )
    )


@register(IMAGES)
def linen_depthwise(rng, inputs, outputs):
    return linen_layer(
        nn.Sequential(
            [nn.Conv(inputs, (3, 3), feature_group_count=inputs), nn.Conv(outputs, (1, 1))]
        )
    )


@register(IMAGES)
def linen_transposed(rng, inputs, outputs):
    return linen_layer(nn.ConvTranspose(outputs, (2, 2), strides=choose(rng, (1, 1), (2, 2))))


@register(IMAGES)
def linen_squeeze(rng, inputs, outputs):
    class Squeeze(nn.Module):
        @nn.compact
        def __call__(self, x):
            gate = nn.Dense(2)(x.mean((1, 2), keepdims=True))
            x = x * nn.sigmoid(nn.Dense(inputs)(nn.relu(gate)))
            return nn.Conv(outputs, (1, 1))(x)

    return linen_layer(Squeeze())


@register(IMAGES)
def linen_pooled(rng, inputs, outputs):
    pool = choose(rng, nn.avg_pool, nn.max_pool)
    window = functools.partial(pool, window_shape=(2, 2), strides=(1, 1), padding="SAME")
    return linen_layer(nn.Sequential([nn.Conv(outputs, (3, 3)), window]))


@register(ROWS, IMAGES)
def linen_spectral_norm_of_weights(rng, inputs, outputs):
    return linen_layer(nn.WeightNorm(nn.Dense(outputs)))


@register(ROWS, IMAGES)
def nnx_linear(rng, inputs, outputs):
    bias = bool(rng.integers(2))
    return nnx_layer(lambda rngs: nnx.Linear(inputs, outputs, use_bias=bias, rngs=rngs))


@register(ROWS, IMAGES)
def nnx_gated(rng, inputs, outputs):
    class Gated(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.RMSNorm(inputs, rngs=rngs)
            self.up = nnx.Linear(inputs, 12, rngs=rngs)
            self.down = nnx.Linear(6, outputs, rngs=rngs)

        def __call__(self, x):
            gate, up = jnp.split(self.up(self.norm(x)), 2, axis=-1)
            return self.down(nnx.silu(gate) * up)

    return nnx_layer(Gated)


@register(ROWS)
def nnx_attention(rng, inputs, outputs):
    class Attention(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(
                2, inputs, 8, outputs, decode=False, rngs=rngs, use_bias=True
            )

        def __call__(self, x):
            return self.attention(x)

    return nnx_layer(Attention)


@register(ROWS, IMAGES)
def nnx_lora(rng, inputs, outputs):
    class Lora(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.LoRALinear(inputs, outputs, lora_rank=2, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    return nnx_layer(Lora)


@register(IMAGES)
def nnx_batch_norm(rng, inputs, outputs):
    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(inputs, outputs, (3, 3), use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(outputs, use_running_average=True, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.conv(x))

    return nnx_layer(Normed)


@register(ROWS, IMAGES)
def nnx_einsum(rng, inputs, outputs):
    return nnx_layer(
        lambda rngs: nnx.Einsum("...i,hio->...o", (2, inputs, outputs), (outputs,), rngs=rngs)
    )


@register(ROWS, IMAGES)
def haiku_linear(rng, inputs, outputs):
    return haiku_layer(lambda: hk.Linear(outputs, with_bias=bool(inputs % 4)))


@register(ROWS, IMAGES)
def haiku_mlp(rng, inputs, outputs):
    return haiku_layer(lambda: hk.nets.MLP([6, outputs]))


@register(ROWS)
def haiku_attention(rng, inputs, outputs):
    def module():
        attention = hk.MultiHeadAttention(
            2, 4, model_size=outputs, w_init=hk.initializers.VarianceScaling(1.0)
        )
        return lambda x: attention(x, x, x)

    return haiku_layer(module)


@register(ROWS)
def haiku_recurrent(rng, inputs, outputs):
    cell = choose(rng, hk.GRU, hk.LSTM, hk.VanillaRNN)

    def module():
        core = cell(outputs)
        return lambda x: hk.dynamic_unroll(
            core, x, core.initial_state(x.shape[0]), time_major=False
        )[0]

    return haiku_layer(module)


@register(IMAGES)
def haiku_convolution(rng, inputs, outputs):
    kind = choose(rng, "plain", "transposed", "depthwise")
    makers = {
        "plain": lambda: hk.Conv2D(outputs, 3, rate=2),
        "transposed": lambda: hk.Conv2DTranspose(outputs, 3, stride=2),
        "depthwise": lambda: hk.DepthwiseConv2D(2, 3),
    }
    return haiku_layer(makers[kind])


@register(ROWS, IMAGES)
def haiku_norm(rng, inputs, outputs):
    def module():
        norm = hk.LayerNorm(-1, create_scale=True, create_offset=True)
        return lambda x: norm(hk.Linear(outputs)(x))

    return haiku_layer(module)


@register(ROWS, IMAGES)
def haiku_bias_and_scale(rng, inputs, outputs):
    def module():
        return hk.Sequential([hk.Linear(outputs, with_bias=False), hk.Bias(bias_dims=[-1])])

    return haiku_layer(module)


@register(ROWS)
def equinox_linear(rng, inputs, outputs):
    bias = bool(rng.integers(2))
    return equinox_layer(lambda key: eqx.nn.Linear(inputs, outputs, use_bias=bias, key=key), 2)


@register(ROWS)
def equinox_mlp(rng, inputs, outputs):
    return equinox_layer(lambda key: eqx.nn.MLP(inputs, outputs, 6, 2, key=key), 2)


@register(ROWS)
def equinox_attention(rng, inputs, outputs):
    def module(key):
        attention = eqx.nn.MultiheadAttention(
            2, inputs, output_size=outputs, qk_size=3, vo_size=2, key=key
        )
        return SelfAttention(attention)

    return equinox_layer(module, 1)


class SelfAttention(eqx.Module):
    attention: eqx.nn.MultiheadAttention

    def __call__(self, x):
        return self.attention(x, x, x)


class Recurrent(eqx.Module):
    cell: eqx.Module

    def __call__(self, x):
        size = self.cell.hidden_size
        state = jnp.zeros(size, x.dtype)
        if isinstance(self.cell, eqx.nn.LSTMCell):
            state = state, state

        def step(state, x):
            state = self.cell(x, state)
            return state, state[0] if isinstance(state, tuple) else state

        return jax.lax.scan(step, state, x)[1]


@register(ROWS)
def equinox_recurrent(rng, inputs, outputs):
    cell = choose(rng, eqx.nn.GRUCell, eqx.nn.LSTMCell)
    return equinox_layer(lambda key: Recurrent(cell(inputs, outputs, key=key)), 1)


@register(IMAGES)
def equinox_convolution(rng, inputs, outputs):
    kernel, stride = choose(rng, 1, 3), choose(rng, 1, 2)
    return equinox_layer(
        lambda key: eqx.nn.Conv2d(inputs, outputs, kernel, stride, padding=1, key=key), 1, True
    )


@register(IMAGES)
def equinox_group_norm(rng, inputs, outputs):
    class Normed(eqx.Module):
        conv: eqx.nn.Conv2d
        norm: eqx.nn.GroupNorm

        def __call__(self, x):
            return self.norm(self.conv(x))

    return equinox_layer(
        lambda key: Normed(
            eqx.nn.Conv2d(inputs, outputs, 1, key=key), eqx.nn.GroupNorm(2, outputs)
        ),
        1,
        True,
    )


@register(ROWS)
def equinox_norm(rng, inputs, outputs):
    norm = choose(rng, eqx.nn.LayerNorm, eqx.nn.RMSNorm)
    return equinox_layer(lambda key: norm(inputs), 2)
