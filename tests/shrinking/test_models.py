"""Known networks without some channels have the outputs and gradients of the masked ones."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.graph import models
from tests.shrinking.oracles import check, drawn

pytestmark = pytest.mark.slow

PLAIN = models.SMALL | {
    "vit": functools.partial(models.vit, layers=1),
    "resnet": functools.partial(models.resnet, (1,), True, width=4, image=8, classes=3),
    "resnet of two convolutions": functools.partial(
        models.resnet, (1, 1), False, width=4, image=8, classes=3
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_each_group_alone_and_all_together(name):
    with jax.enable_x64(True):
        model = PLAIN[name]()
        check(model.fn, *drawn(model, jnp.float64), 1e-10)


@pytest.mark.parametrize("name", ["resnet", "vit", "scanned", "language_model"])
def test_all_groups_together_in_float32(name):
    model = PLAIN[name]()
    check(model.fn, *drawn(model, jnp.float32), 1e-5, is_each_alone=False)


# Models of packages: (function, params, inputs).


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)(y)
        y = nn.gelu(nn.Dense(12)(nn.LayerNorm()(x)))
        return nn.Dense(3)(nn.LayerNorm()(x + nn.Dense(8)(y)).mean(1))


def linen_transformer(x):
    return Block().apply, Block().init(jax.random.key(0), x), (x,)


def nnx_gate(x):
    class Gated(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(5, 8, rngs=rngs)
            self.norm = nnx.RMSNorm(8, rngs=rngs)
            self.gate_and_up = nnx.Linear(8, 12, rngs=rngs)
            self.down = nnx.Linear(6, 8, rngs=rngs)
            self.last = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            x = self.first(x)
            gate, up = jnp.split(self.gate_and_up(self.norm(x)), 2, axis=-1)
            return self.last(x + self.down(nnx.silu(gate) * up))

    definition, state = nnx.split(Gated(nnx.Rngs(0)))
    return lambda state, x: nnx.merge(definition, state)(x), state, (x,)


def haiku_convolutions(x):
    def forward(x):
        x = jax.nn.relu(hk.Conv2D(6, 3)(x[..., None]))
        x = jax.nn.relu(hk.DepthwiseConv2D(1, 3)(x))
        x = hk.LayerNorm(-1, True, True)(hk.Conv2D(8, 1)(x))
        return hk.Linear(3)(x.mean((1, 2)))

    forward = hk.without_apply_rng(hk.transform(forward))
    return forward.apply, forward.init(jax.random.key(0), x), (x,)


def equinox_mlp(x):
    mlp = eqx.nn.MLP(5, 3, 8, 2, key=jax.random.key(0))
    params, static = eqx.partition(mlp, eqx.is_array)
    return lambda params, x: jax.vmap(jax.vmap(eqx.combine(params, static)))(x), params, (x,)


PACKAGES = [linen_transformer, nnx_gate, haiku_convolutions, equinox_mlp]


@pytest.mark.parametrize("make", PACKAGES, ids=lambda make: make.__name__)
def test_models_of_any_package(make):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 5)))
        fn, params, args = make(x)
        params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float64), params)
        check(fn, params, args, 1e-10)
