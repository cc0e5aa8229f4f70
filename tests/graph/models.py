"""Models of plain functions, as the shapes of their parameters and what they compute."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Model(NamedTuple):
    """A model.

    Attributes:
      fn: the function of parameters and inputs.
      shapes: tree of the shapes of its parameters.
      inputs: its inputs, as arrays or shapes.
      num_groups: how many groups of channels it has.
    """

    fn: Callable
    shapes: object
    inputs: tuple
    num_groups: int


def abstract(shapes, dtype=jnp.float32):
    """Parameters without values, from their shapes."""
    return _map_shapes(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes)


def draw(shapes, dtype=jnp.float32, seed=0):
    """Random parameters. All are positive of those called 'var', as variances are."""
    rng = np.random.default_rng(seed)
    drawn = _map_shapes(lambda shape: rng.normal(size=shape) / np.sqrt(max(shape[-1:])), shapes)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.asarray(1 + np.abs(x) if path[-1].key == "var" else x, dtype), drawn
    )


def _map_shapes(fn, shapes):
    return jax.tree.map(fn, shapes, is_leaf=lambda x: isinstance(x, tuple))


def mlp():
    """Three layers."""

    def fn(params, x):
        x = jnp.tanh(x @ params["up"])
        x = jax.nn.relu(x @ params["middle"] + params["bias"])
        return x @ params["down"]

    shapes = {"up": (3, 8), "middle": (8, 6), "bias": (6,), "down": (6, 2)}
    return Model(fn, shapes, (jax.ShapeDtypeStruct((4, 3), jnp.float32),), 2)


# Convolutions.


def _conv(x, kernel, stride=1, groups=1):
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


def _unit(size, ins, outs, groups=1):
    """Shapes of a convolution and its norm."""
    norm = dict.fromkeys(("scale", "shift", "mean", "var"), (outs,))
    return {"kernel": (size, size, ins // groups, outs), **norm}


def _normed(x, p, stride=1, groups=1):
    x = _conv(x, p["kernel"], stride, groups)
    return (x - p["mean"]) * (p["scale"] * lax.rsqrt(p["var"] + 1e-5)) + p["shift"]


def resnet(blocks, is_bottleneck, width=64, image=224, classes=1000, num_groups=0):
    """ResNet (He et al. 2015) with the usual stem; in a bottleneck the 3x3 convolution strides."""
    growth = 4 if is_bottleneck else 1
    shapes, ins = {"stem": _unit(7, 3, width)}, width
    for stage, count in enumerate(blocks):
        middle = width << stage
        outs = middle * growth
        for i in range(count):
            if is_bottleneck:
                units = [_unit(1, ins, middle), _unit(3, middle, middle), _unit(1, middle, outs)]
            else:
                units = [_unit(3, ins, middle), _unit(3, middle, outs)]
            shapes[f"{stage}_{i}"] = {f"conv{j}": unit for j, unit in enumerate(units)}
            if i == 0 and (stage or is_bottleneck):
                shapes[f"{stage}_{i}"]["shortcut"] = _unit(1, ins, outs)
            ins = outs
    shapes["head"] = {"kernel": (ins, classes), "bias": (classes,)}

    def fn(params, x):
        x = jax.nn.relu(_normed(x, params["stem"], 2))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage, count in enumerate(blocks):
            for i in range(count):
                block, stride = params[f"{stage}_{i}"], 2 if stage and not i else 1
                y = _normed(x, block["conv0"], 1 if is_bottleneck else stride)
                y = _normed(jax.nn.relu(y), block["conv1"], stride if is_bottleneck else 1)
                if is_bottleneck:
                    y = _normed(jax.nn.relu(y), block["conv2"])
                if "shortcut" in block:
                    x = _normed(x, block["shortcut"], stride)
                x = jax.nn.relu(x + y)
        return x.mean((1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]

    inputs = (jax.ShapeDtypeStruct((1, image, image, 3), jnp.float32),)
    return Model(fn, shapes, inputs, num_groups)


resnet18 = functools.partial(resnet, (2, 2, 2, 2), False, num_groups=12)
resnet50 = functools.partial(resnet, (3, 4, 6, 3), True, num_groups=37)
small_resnet = functools.partial(resnet, (1, 1), True, width=4, image=16, classes=3, num_groups=7)


def densenet():
    """Two layers whose outputs are concatenated to what they read."""

    def fn(params, x):
        x = _conv(x, params["stem"])
        for i in range(2):
            layer = params[f"layer{i}"]
            y = _conv(jax.nn.relu(x * layer["scale"] + layer["shift"]), layer["kernel"])
            x = jnp.concatenate([x, y], -1)
        return x.mean((1, 2)) @ params["head"]

    shapes = {"stem": (3, 3, 3, 6), "head": (14, 2)}
    for i, ins in enumerate((6, 10)):
        shapes[f"layer{i}"] = {"scale": (ins,), "shift": (ins,), "kernel": (3, 3, ins, 4)}
    return Model(fn, shapes, (jax.ShapeDtypeStruct((1, 5, 5, 3), jnp.float32),), 3)


def mobilenet():
    """An inverted residual: wider, depthwise, and narrow again, with a gate for each channel."""

    def fn(params, x):
        x = _normed(x, params["stem"])
        y = jax.nn.relu6(_normed(x, params["wide"]))
        y = jax.nn.relu6(_normed(y, params["depthwise"], 1, 8))
        gate = jax.nn.sigmoid(jax.nn.relu(y.mean((1, 2)) @ params["squeeze"]) @ params["excite"])
        x = x + _normed(y * gate[:, None, None], params["narrow"])
        return x.mean((1, 2)) @ params["head"]

    shapes = {
        "stem": _unit(3, 3, 4),
        "wide": _unit(1, 4, 8),
        "depthwise": _unit(3, 8, 8, groups=8),
        "squeeze": (8, 4),
        "excite": (4, 8),
        "narrow": _unit(1, 8, 4),
        "head": (4, 2),
    }
    return Model(fn, shapes, (jax.ShapeDtypeStruct((1, 5, 5, 3), jnp.float32),), 3)


# Transformers.


def _rms_norm(x, scale):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def _layer_norm(x, scale, shift):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(
        x.var(-1, keepdims=True) + 1e-6
    ) * scale + shift


def vit(layers=2, width=8, heads=2, hidden=12, patches=4, classes=3):
    """A vision transformer: fused q, k and v, LayerNorm, a class token, learned positions."""
    inner = width // heads

    def fn(params, x):
        x = x @ params["patches"]
        token = jnp.broadcast_to(params["token"], (len(x), 1, width))
        x = jnp.concatenate([token, x], 1) + params["positions"]
        for i in range(layers):
            p = params[f"layer{i}"]
            y = _layer_norm(x, p["scale1"], p["shift1"])
            q, k, v = jnp.moveaxis(
                (y @ p["qkv"] + p["bias"]).reshape(*y.shape[:2], 3, heads, -1), 2, 0
            )
            weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * inner**-0.5)
            y = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
            x = x + y @ p["out"]
            y = _layer_norm(x, p["scale2"], p["shift2"])
            x = x + jax.nn.gelu(y @ p["up"]) @ p["down"]
        return x[:, 0] @ params["head"]

    layer = {
        **{f"{kind}{i}": (width,) for kind in ("scale", "shift") for i in (1, 2)},
        "qkv": (width, 3 * width), "bias": (3 * width,), "out": (width, width),
        "up": (width, hidden), "down": (hidden, width),
    }  # fmt: skip
    shapes = {
        "patches": (5, width), "token": (1, width), "positions": (patches + 1, width),
        "head": (width, classes), **{f"layer{i}": layer for i in range(layers)},
    }  # fmt: skip
    inputs = (jax.ShapeDtypeStruct((2, patches, 5), jnp.float32),)
    return Model(fn, shapes, inputs, 3 * layers + 1)


def scanned(layers=3, width=6, hidden=8):
    """Layers in a scan, each computed again in the backward pass."""

    def fn(params, x):
        @jax.checkpoint
        def layer(x, p):
            y = jax.nn.silu(_rms_norm(x, p["scale"]) @ p["up"])
            return x + y @ p["down"], None

        x, _ = lax.scan(layer, x @ params["embed"], params["layers"])
        return x @ params["head"]

    stack = {"scale": (layers, width), "up": (layers, width, hidden)}
    shapes = {
        "embed": (3, width), "head": (width, 2),
        "layers": stack | {"down": (layers, hidden, width)},
    }  # fmt: skip
    return Model(fn, shapes, (jax.ShapeDtypeStruct((4, 3), jnp.float32),), 2)


def language_model(layers=1, width=8, heads=4, shared=2, inner=4, hidden=6, words=11, length=5):
    """Tied embeddings, grouped queries, rotary positions, RMSNorm and SwiGLU, as in LLaMA."""

    def rotated(x):
        one, other = jnp.split(x, 2, -1)
        angle = jnp.arange(length)[:, None, None] * 0.1 ** jnp.arange(inner // 2)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)

    def fn(params, tokens):
        x = jnp.take(params["embed"], tokens, axis=0, mode="clip")
        for i in range(layers):
            p = params[f"layer{i}"]
            y = _rms_norm(x, p["scale1"])
            q = rotated((y @ p["query"]).reshape(*y.shape[:2], heads, inner))
            k = rotated((y @ p["key"]).reshape(*y.shape[:2], heads // shared, inner))
            v = (y @ p["value"]).reshape(*y.shape[:2], heads // shared, inner)
            q = q.reshape(*y.shape[:2], heads // shared, shared, inner)
            weights = jnp.einsum("btgnd,bsgd->bgnts", q, k) / inner
            weights = jnp.where(jnp.tri(length, dtype=bool), weights, -jnp.inf)
            y = jnp.einsum("bgnts,bsgd->btgnd", jax.nn.softmax(weights), v)
            x = x + y.reshape(*x.shape[:2], -1) @ p["out"]
            y = _rms_norm(x, p["scale2"])
            gate, up = jnp.split(y @ p["gate_and_up"], 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ p["down"]
        return _rms_norm(x, params["scale"]) @ params["embed"].T

    layer = {
        "scale1": (width,), "scale2": (width,), "query": (width, heads * inner),
        "key": (width, heads // shared * inner), "value": (width, heads // shared * inner),
        "out": (heads * inner, width), "gate_and_up": (width, 2 * hidden), "down": (hidden, width),
    }  # fmt: skip
    shapes = {"embed": (words, width), "scale": (width,)}
    shapes |= {f"layer{i}": layer for i in range(layers)}
    inputs = (jax.ShapeDtypeStruct((2, length), jnp.int32),)
    return Model(fn, shapes, inputs, 5 * layers + 1)


SMALL = {
    fn.__name__ if hasattr(fn, "__name__") else "resnet": fn
    for fn in (mlp, small_resnet, densenet, mobilenet, vit, scanned, language_model)
}


# A Llama without norms: grouped queries, gated units.
WIDTH, INNER, GROUPS, QUERIES, SIZE = 16, 24, 2, 2, 4  # queries that share a key
LLAMA_SHAPES = {
    "self_attn.q_proj": (GROUPS * QUERIES * SIZE, WIDTH),
    "self_attn.k_proj": (GROUPS * SIZE, WIDTH),
    "self_attn.v_proj": (GROUPS * SIZE, WIDTH),
    "self_attn.o_proj": (WIDTH, GROUPS * QUERIES * SIZE),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
LLAMA_TOKENS = jnp.arange(12).reshape(2, 6)


def llama(params, tokens):
    x = params["embed"][tokens]
    for i in range(2):
        w = {name: params[f"model.layers.{i}.{name}.weight"].T for name in LLAMA_SHAPES}
        q, k, v = (x @ w[f"self_attn.{name}_proj"] for name in "qkv")
        q = q.reshape(*x.shape[:2], GROUPS, QUERIES, SIZE)
        k, v = (y.reshape(*x.shape[:2], GROUPS, SIZE) for y in (k, v))
        scores = jax.nn.softmax(jnp.einsum("bqghd,bkgd->bghqk", q, k))
        mixed = jnp.einsum("bghqk,bkgd->bqghd", scores, v).reshape(*x.shape[:2], -1)
        x = x + mixed @ w["self_attn.o_proj"]
        x = x + (jax.nn.silu(x @ w["mlp.gate_proj"]) * (x @ w["mlp.up_proj"])) @ w["mlp.down_proj"]
    return x @ params["embed"].T


def draw_llama():
    shapes = {f"model.layers.{i}.{n}.weight": x for i in range(2) for n, x in LLAMA_SHAPES.items()}
    keys = jax.random.split(jax.random.key(0), 20)
    shapes["embed"] = (30, WIDTH)
    return {n: jax.random.normal(k, x) / 4 for k, (n, x) in zip(keys, shapes.items(), strict=False)}
