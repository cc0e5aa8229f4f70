"""Masks of small and of large weights: a power of two changes no mask."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.graph import Coupled, trace

_RNG = np.random.default_rng(0)
_SHAPES = {"up": (16, 32), "down": (32, 8)}
_WEIGHTS, _GRADS = (
    {name: _RNG.standard_normal(shape).astype(np.float32) for name, shape in _SHAPES.items()}
    for _ in range(2)
)
_HALF = {"sparsity_distribution_fn": sparsity.Uniform(0.5)}
_UPDATERS = {
    "saliency": sparsity.SaliencyPruning(**_HALF),
    "blocks": sparsity.SaliencyPruning(**_HALF, sparsity_type=sparsity.Block((4, 4))),
    "channels": sparsity.MagnitudePruning(**_HALF, sparsity_type=sparsity.Channel()),
    "rows of blocks": sparsity.MagnitudePruning(**_HALF, sparsity_type=sparsity.FanIn(4)),
    "blocks of weights": sparsity.MagnitudePruning(**_HALF, sparsity_type=sparsity.Block((3, 5))),
}


def _scale(tree, exponent):
    return {name: jnp.asarray(np.ldexp(x, exponent)) for name, x in tree.items()}


def _prune(updater, weight_exponent, grad_exponent, jit):
    params, grads = _scale(_WEIGHTS, weight_exponent), _scale(_GRADS, grad_exponent)
    if not jit:
        return updater.instant_sparsify(params, grads)[1]
    once = sparsity.OneShotSchedule(0)
    tx = dataclasses.replace(updater, scheduler=once).wrap_optax(optax.sgd(0.1))
    return jax.jit(tx.update)(grads, tx.init(params), params)[1].masks


@pytest.mark.parametrize("jit", [False, True], ids=["at once", "in a step"])
@pytest.mark.parametrize("name", _UPDATERS)
def test_a_power_of_two_changes_no_mask(name, jit):
    updater = _UPDATERS[name]
    expected = _prune(updater, 0, 0, jit)
    for pair in [(60, 60), (115, 0), (-50, -50), (-90, -20)]:
        masks = _prune(updater, *pair, jit)
        jax.tree.map(np.testing.assert_array_equal, masks, expected)
    assert 0 < sum(int(mask.sum()) for mask in expected.values()) < 16 * 32 + 32 * 8


@pytest.mark.parametrize("jit", [False, True], ids=["at once", "in a step"])
@pytest.mark.parametrize("use_normalization", [False, True])
@pytest.mark.parametrize(
    "exponents", [(0, 0), (-36, -36), (-50, -50), (62, 62), (-90, 90)], ids=str
)
@pytest.mark.parametrize("name", ["saliency", "magnitude"])
def test_scores_of_all_layers_are_those_of_numpy(name, exponents, use_normalization, jit):
    scope = sparsity.Global(use_normalization)
    updater = sparsity.ALGORITHM_REGISTRY[name](**_HALF, scope=scope)
    masks = _prune(updater, *exponents, jit)
    scores = {key: np.abs(np.ldexp(np.float64(x), exponents[0])) for key, x in _WEIGHTS.items()}
    if name == "saliency":
        scores = {key: x * np.abs(np.ldexp(_GRADS[key], exponents[1])) for key, x in scores.items()}
    if use_normalization:
        scores = {key: x / (np.linalg.norm(x) + 1e-8) for key, x in scores.items()}
    threshold = np.sort(np.concatenate([x.ravel() for x in scores.values()]))[-384]
    for key, score in scores.items():
        np.testing.assert_array_equal(masks[key], score >= threshold)


@pytest.mark.parametrize("order", [1, 2])
def test_sums_of_channels_do_not_overflow(order):
    def model(params, x):
        return jnp.tanh(x @ params["up"]) @ params["down"]

    graph = trace(model, _scale(_WEIGHTS, 0), jnp.ones((2, 16)))
    updater = sparsity.MagnitudePruning(**_HALF, scope=Coupled(graph, order=order))
    expected = _prune(updater, 0, 0, False)
    jax.tree.map(np.testing.assert_array_equal, _prune(updater, 125, 0, False), expected)
    assert int(expected["up"].sum()) == 16 * 16


@pytest.mark.parametrize("exponent", [0, -400, 400])
def test_float64_is_multiplied_in_float64(exponent):
    with jax.enable_x64(True):
        weights, grads = (
            {name: jnp.ldexp(jnp.asarray(x, jnp.float64), exponent) for name, x in tree.items()}
            for tree in (_WEIGHTS, _GRADS)
        )
        masks = _UPDATERS["saliency"].instant_sparsify(weights, grads)[1]
    jax.tree.map(np.testing.assert_array_equal, masks, _prune(_UPDATERS["saliency"], 0, 0, False))
