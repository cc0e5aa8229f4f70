"""First calls outside of `jit` have the results of compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity import selection
from tests.graph.models import draw, small_resnet

SHAPES = {"a": (3, 40), "b": (7,), "c": (2, 3, 5, 4)}


def kernels(dtype, kind, seed=0):
    """Arrays of three shapes, hard to rank: with ties, or over the range of a dtype."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in SHAPES.items():
        values = rng.normal(size=shape)
        if kind == "ties":
            values = np.round(values)
        elif kind == "wide":
            values = values * 10.0 ** rng.uniform(-44, 35, shape)
        elif kind == "odd":
            odd = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-40])
            values = np.where(rng.random(shape) < 0.3, rng.choice(odd, shape), values)
        arrays[name] = jnp.asarray(values.astype(np.float32)).astype(dtype)
    return arrays


def assert_same_bits(tree, other):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert (x.dtype, x.shape, x.committed) == (y.dtype, y.shape, y.committed)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scope", [sparsity.Layerwise(), sparsity.Global(), sparsity.Global(False)])
def test_masks_have_the_bits_of_the_compiled_program(scope, dtype):
    pruner = sparsity.MagnitudePruning(
        scope=scope, sparsity_distribution_fn=sparsity.Uniform(0.4, filter_fn=lambda *_: True)
    )
    compiled = jax.jit(pruner.instant_sparsify)
    for kind in ("normal", "ties", "wide", "odd"):
        params = kernels(dtype, kind)
        assert_same_bits(pruner.instant_sparsify(params), compiled(params))


@pytest.mark.parametrize(
    "dtype", ["float4_e2m1fn", "float8_e8m0fnu", "float8_e4m3fn", "int8", "uint8"]
)
def test_masks_of_scores_that_are_widened_have_the_bits_of_the_compiled_program(dtype):
    scores = jnp.asarray(np.array([[1, 4, 2], [2, 3, 1]]).astype(dtype))
    compiled = jax.jit(selection.topk_mask, static_argnums=1)
    for k in range(1, 6):
        assert_same_bits(selection.topk_mask(scores, k), compiled(scores, k))


def test_results_lie_where_the_parameters_were_committed():
    params = jax.device_put(kernels("float32", "normal"), jax.devices()[0])
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    for x in jax.tree.leaves(pruner.instant_sparsify(params)):
        assert x.committed
        assert x.devices() == {jax.devices()[0]}


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [False, True])
def test_coupled_masks_and_cuts_have_the_bits_of_the_compiled_program(normalize):
    model = small_resnet()
    params = jax.tree.map(jax.device_put, draw(model.shapes))
    graph = sparsity.trace(model.fn, params, *model.inputs)
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph, normalize=normalize),
        sparsity_distribution_fn=sparsity.Uniform(0.5),
    )
    pruned, masks = pruner.instant_sparsify(params)
    small = sparsity.shrink(graph, pruned, masks)
    assert_same_bits((pruned, masks), jax.jit(pruner.instant_sparsify)(params))
    cut = jax.jit(lambda params: sparsity.shrink(graph, params, small.plan).params)(pruned)
    assert_same_bits(small.params, cut)
