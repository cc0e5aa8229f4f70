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

from sparsity import shrink, trace
from sparsity.core import trees
from tests import helpers
from tests.graph import models, removal

pytestmark = pytest.mark.slow

PLAIN = models.SMALL | {
    "vit": functools.partial(models.vit, layers=1),
    "resnet": functools.partial(models.resnet, (1,), True, width=4, image=8, classes=3),
    "resnet of two convolutions": functools.partial(
        models.resnet, (1, 1), False, width=4, image=8, classes=3
    ),
}


def make_masks(graph, params, groups, seed):
    """Masks that keep some channels of these groups, drawn at random."""
    masks = removal.make_masks(graph, groups, removal.choose(groups, seed))
    return trees.map_matched(lambda path, _: masks.get(trees.path_names(path)), params)


def gradients(fn, params, args):
    """(outputs, gradients of a function of all of them)."""

    def loss(params):
        outputs = fn(params, *args)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(outputs)), outputs

    (_, outputs), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return outputs, grads


def difference(expected, actual):
    """The largest difference of any entry, in units of the largest entry of all."""
    trees_of_numpy = jax.device_get((expected, actual))  # jax would compile for each shape
    pairs = list(zip(*map(jax.tree.leaves, trees_of_numpy), strict=True))
    largest = max(float(np.abs(one).max()) for one, _ in pairs)
    return max(float(np.abs(one - other).max()) for one, other in pairs) / largest


def check(fn, params, args, tolerance, is_each_alone=True):
    """Cuts each group alone, and all of them together."""
    graph = trace(fn, params, *args)
    cuts = [[group] for group in graph.groups if is_each_alone] + [graph.groups]
    assert graph.groups
    smaller = []
    for seed, groups in enumerate(cuts):
        masks = make_masks(graph, params, groups, seed)
        masked = trees.map_matched(
            lambda _, x, mask: x if mask is None else jnp.asarray(np.asarray(x) * mask, x.dtype),
            params,
            masks,
        )
        smaller.append((masked, shrink(graph, masked, masks)))

    @functools.partial(jax.jit, compiler_options=helpers.WITHOUT_EMITTERS)
    def run(trees_of_params):
        return [
            (gradients(fn, masked, args), gradients(small.apply, params, args))
            for (masked, params), (_, small) in zip(trees_of_params, smaller, strict=True)
        ]

    actual = run([(masked, small.params) for masked, small in smaller])
    for ((outputs, grads), small_results), (_, small), groups in zip(
        actual, smaller, cuts, strict=True
    ):
        expected = outputs, shrink(graph, grads, small.plan).params
        assert difference(expected, small_results) <= tolerance, [group.name for group in groups]


def drawn(model, dtype):
    """(params, inputs) of a model."""
    rng = np.random.default_rng(1)
    inputs = [
        jnp.asarray(rng.integers(0, 9, x.shape))
        if x.dtype == jnp.int32
        else jnp.asarray(rng.normal(size=x.shape), dtype)
        for x in model.inputs
    ]
    return models.draw(model.shapes, dtype), inputs


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
