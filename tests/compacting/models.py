"""Small models that read their weights in many ways: {name: (function, shapes of weights)}."""

import jax
import jax.numpy as jnp
import numpy as np

from sparsity import trace

MODELS = {}
# Models whose loops or rules have no second derivatives.
FIRST_ORDER = ("while_loop",)


def model(*shapes):
    def register(fn):
        MODELS[fn.__name__.strip("_")] = fn, shapes
        return fn

    return register


def masked(name, density=0.4, seed=0):
    """Returns (function, masked params, masks, input, graph)."""
    fn, shapes = MODELS[name]
    rng = np.random.default_rng(seed)
    params, masks = [], []
    for shape in shapes:
        mask = rng.random(shape) < density
        mask.flat[0] = True
        params.append(jnp.asarray(rng.normal(size=shape) * mask / max(shape[-2:][0], 1) ** 0.5))
        masks.append(mask.astype(np.uint8))
    x = jnp.asarray(rng.normal(size=(5, 12)))
    return fn, params, masks, x, trace(fn, params, x)


def layer(h, w):
    return jnp.tanh(h @ w), None


@model((12, 12), (12,), (12,))
def biases_and_scales(params, x):
    h = x @ params[0] + params[1]
    return (h - h.mean(-1, keepdims=True)) / h.std(-1, keepdims=True) * params[2]


@model((12, 12))
def tied(params, x):
    return jnp.tanh(x @ params[0]) @ params[0].T


@model((3, 12, 12))
def scanned(params, x):
    return jax.lax.scan(layer, x, params[0], reverse=True)[0]


@model((12, 3, 12))
def scanned_along_axis_1(params, x):
    return jax.lax.scan(layer, x, jnp.moveaxis(params[0], 1, 0))[0]


@model((2, 3, 12, 12))
def scanned_twice(params, x):
    return jax.lax.scan(lambda h, stack: jax.lax.scan(layer, h, stack), x, params[0])[0]


@model((3, 12, 12))
def scanned_after_a_cast(params, x):
    narrow = params[0].astype(jnp.float32)
    return jax.lax.scan(lambda h, w: layer(h, w.astype(h.dtype)), x, narrow)[0]


@model((12, 12))
def constant_of_a_scan(params, x):
    return jax.lax.scan(lambda h, _: layer(h, params[0]), x, None, length=3)[0]


@model((12, 12), (12, 12))
def stacked_before_a_scan(params, x):
    return jax.lax.scan(layer, x, jnp.stack(params))[0]


@model((3, 12, 12))
def rematerialized(params, x):
    return jax.lax.scan(jax.checkpoint(layer), x, params[0])[0]


@model((12, 12), (12, 12))
def cond(params, x):
    return jax.lax.cond(x[0, 0] > 0, lambda: jnp.tanh(x @ params[0]), lambda: x @ params[1])


@model((12, 12))
def while_loop(params, x):
    def step(carry):
        return carry[0] + 1, jnp.tanh(carry[1] @ params[0])

    return jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]


@model((3, 12, 12))
def layers_by_number(params, x):
    x = jax.lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ params[0][i]), x)
    return x @ params[0][2]


@model((12, 36))
def split(params, x):
    query, key, value = jnp.split(params[0], 3, axis=1)
    return jnp.tanh(x @ query) * (x @ key) + x @ value


@model((144,), (6, 12), (6, 12))
def reshaped_and_joined(params, x):
    return x @ params[0].reshape(12, 12) + x @ jnp.concatenate(params[1:])


@model((12, 12), (12,))
def scaled(params, x):
    return x @ (params[0] * 0.3 / 2) + x @ (params[0] * params[1][None]) - x @ -params[0]


@model((12, 12))
def weight_norm(params, x):
    return x @ (params[0] / jnp.linalg.norm(params[0], axis=0))


@model((12, 12), (12, 2), (2, 12))
def low_rank_sum(params, x):
    return x @ (params[0] + params[1] @ params[2])


@model((12, 12))
def fake_quantized(params, x):
    scale = jnp.abs(params[0]).max() / 7
    rounded = jnp.round(params[0] / scale) * scale
    return x @ (params[0] + jax.lax.stop_gradient(rounded - params[0]))


@model((4, 12, 6), (12, 4, 3))
def experts_and_heads(params, x):
    heads = jnp.einsum("bi,ihk->bhk", x, params[1])
    return jnp.einsum("bi,eio->ebo", x, params[0]).sum() + heads


@model((3, 12, 12))
def mapped_over_layers(params, x):
    return jax.vmap(lambda w: jnp.tanh(x @ w))(params[0])


@model((12, 12))
def custom_vjp(params, x):
    @jax.custom_vjp
    def double(w, x):
        return jnp.tanh(x @ w)

    double.defvjp(
        lambda w, x: (jnp.tanh(x @ w), (w, x)),
        lambda saved, g: (2 * saved[1].T @ g, g @ saved[0].T),
    )
    return double(params[0], x)


@model((12, 12))
def custom_jvp(params, x):
    @jax.custom_jvp
    def double(w, x):
        return jnp.tanh(x @ w)

    @double.defjvp
    def rule(primals, tangents):
        return double(*primals), 2 * (primals[1] @ tangents[0]) + tangents[1] @ primals[0]

    return double(params[0], x)


@model((3, 3, 2, 6), (3, 3, 1, 6), (3, 3, 3, 4))
def convolutions(params, x):
    image = x[:, :, None, None] * jnp.ones((5, 12, 4, 2))
    numbers = ("NHWC", "HWIO", "NHWC")
    for kernel, groups in zip(params, (1, 6, 2), strict=True):
        image = jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )
    return image


@model((20, 12), (12, 12))
def embedding(params, x):
    return jnp.tanh(params[0][jnp.arange(5)] @ params[1]) @ params[0].T


@model((12, 12), (12, 12))
def returned_and_read_entrywise(params, x):
    return x @ params[0], params[0].T, x * jnp.tanh(params[1]).sum(0), x[:, :1] * params[1][:1]
