"""Layers stacked along leading axes: scanned models of linen and nnx, experts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sparsity
from sparsity import sparsity_distributions
from sparsity.core import trees
from tests import helpers

pytestmark = pytest.mark.slow


_DEPTH, _WIDTH, _EXPERTS = 3, 8, 2


class _LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(_WIDTH)(x)), None


def _linen():
    scanned = nn.scan(
        _LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=_DEPTH
    )()
    params = scanned.init(jax.random.key(0), jnp.ones((2, _WIDTH)), None)
    return params, lambda params, x: scanned.apply(params, x, None)[0]


class _NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(_WIDTH, _WIDTH, rngs=rngs)

    def __call__(self, x):
        return nnx.tanh(self.dense(x))


def _nnx():
    @nnx.split_rngs(splits=_DEPTH)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs):
        return _NnxBlock(rngs)

    graph, params = nnx.split(make(nnx.Rngs(0)), nnx.Param)

    def apply(params, x):
        scan = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, nnx.merge(graph, params))

    return params, apply


def _experts():
    rng = np.random.default_rng(0)
    # Each expert is ten times as large as the one before: one threshold would empty the first.
    sizes = 10.0 ** np.arange(_EXPERTS).reshape(1, _EXPERTS, 1, 1)
    kernel = rng.normal(size=(_DEPTH, _EXPERTS, _WIDTH, _WIDTH)) * sizes
    params = {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.zeros((_DEPTH, _WIDTH))}

    def apply(params, x):
        for kernel, bias in zip(params["kernel"], params["bias"], strict=True):
            x = jnp.tanh(jnp.einsum("bi,eij->bj", x, kernel / sizes.max()) + bias)
        return x

    return params, apply


_MODELS = {"linen.scan": (_linen, 1), "nnx.scan": (_nnx, 1), "experts": (_experts, 2)}


@pytest.mark.parametrize(
    ("algorithm", "model", "packed"),
    [
        (sparsity.RigL, "linen.scan", False),
        (sparsity.RigL, "nnx.scan", True),
        (sparsity.RigL, "experts", True),
        (sparsity.MagnitudePruning, "nnx.scan", False),
        (sparsity.MagnitudePruning, "experts", False),
    ],
)
def test_every_slice_has_its_own_exact_sparsity(algorithm, model, packed):
    make, axes = _MODELS[model]
    params, apply = make()
    updater = algorithm(
        sparsity_distribution_fn=helpers.uniform(0.75, batch_axes=axes),
        scheduler=sparsity.PeriodicSchedule(2, 1),
        batch_axes=axes,
        use_packed_masks=packed,
    )
    tx = updater.wrap_optax(optax.adam(0.01))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, _WIDTH)), jnp.float32)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            grads = jax.grad(lambda params: jnp.sum((apply(params, x) - 1) ** 2))(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), length=4)[0]

    params, state = train(params)
    (mask,) = jax.tree.leaves(state.masks)
    if packed:
        assert mask.shape[-1] == 1
        mask = np.unpackbits(np.asarray(mask), axis=-1)
    (kernel,) = (leaf for leaf in jax.tree.leaves(params) if leaf.ndim == axes + 2)
    assert np.all(np.sum(np.asarray(mask), axis=(-2, -1)) == 16)  # a quarter of 64
    assert not np.any(np.asarray(kernel)[np.asarray(mask) == 0])
    biases = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim < axes + 2]
    assert all(np.all(np.asarray(bias) != 0) for bias in biases)


@pytest.mark.parametrize("model", ["linen.scan", "nnx.scan"])
def test_distributions_see_the_shape_of_one_layer(model):
    params = _MODELS[model][0]()[0]
    params = {"blocks": params, "head": {"kernel": jnp.ones((_WIDTH, 4))}}
    # Three kernels of 8 x 8 and one of 8 x 4: raw densities 16/64 and 12/32, budget 112 of 224.
    eps = 112 / (192 * 16 / 64 + 32 * 12 / 32)
    expected = {192: 1 - eps * 16 / 64, 32: 1 - eps * 12 / 32}
    actual = sparsity_distributions.erk(params, 0.5, batch_axes=_batch_axes)
    shapes = trees.leaves_by_path(params)
    sparsities = trees.leaves_by_path(actual)
    assert len(sparsities) == 2  # no bias, though it has two axes
    for path, value in sparsities.items():
        np.testing.assert_allclose(value, expected[shapes[path].size], rtol=1e-6)
    uniform = sparsity_distributions.uniform(params, 0.5, batch_axes=_batch_axes)
    assert trees.leaves_by_path(uniform) == dict.fromkeys(sparsities, 0.5)


def _batch_axes(path, param):
    del param
    return 1 if path[0] == "blocks" else 0
