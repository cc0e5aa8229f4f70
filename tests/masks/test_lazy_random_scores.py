"""Random scores that the search computes are those that are stored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import masks as masks_lib
from sparsity.algorithms.pruners import generate_random_scores

pytestmark = pytest.mark.slow

_PARAMS = {"w": jnp.ones((3, 64, 40)), "small": jnp.ones((1, 7, 10))}
_TYPES = {"w": sparsity.Block((2, 5)), "small": sparsity.Unstructured()}


def _masks_of_a_start_and_an_update(updater):
    state = jax.jit(lambda params: updater.init_state(params))(_PARAMS)
    update = jax.jit(lambda state, params: updater.update_state(state, params, params))
    return jax.device_get([state.masks, update(state, _PARAMS).masks])


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (sparsity.SET, {"batch_axes": 1}),
        (sparsity.SET, {"scope": sparsity.Global()}),
        (sparsity.RandomPruning, {"sparsity_type": lambda path, x: _TYPES[path[-1]]}),
    ],
    ids=["slices", "global", "types"],
)
def test_a_compiled_update_draws_the_masks_of_one_that_stores_its_scores(cls, options, monkeypatch):
    updater = cls(sparsity_distribution_fn=sparsity.Uniform(0.75), **options)
    lazy = _masks_of_a_start_and_an_update(updater)
    monkeypatch.setattr(masks_lib.draws, "is_traced", lambda _: False)
    stored = _masks_of_a_start_and_an_update(updater)
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), lazy, stored)


def test_a_hook_of_the_users_gets_arrays_of_the_random_scores():
    class Halved(sparsity.RandomPruning):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return jax.tree.map(lambda x: x // 2, super().calculate_scores(params))

    class Chosen(sparsity.StaticRandomSparse):
        def create_masks(self, scores, sparsities, target_sparsities=None):
            return jax.tree.map(lambda x: x >> 31, scores)

    params = {"w": jnp.ones((8, 8))}
    scores = generate_random_scores(params, 8)["w"]
    half = sparsity.Uniform(0.5)
    pruner = Halved(sparsity_distribution_fn=half, scheduler=sparsity.OneShotSchedule(0))
    for updater, expected in (
        (pruner, np.asarray(scores) >= np.sort(np.ravel(scores))[32]),
        (Chosen(sparsity_distribution_fn=half), np.asarray(scores) >> 31),
    ):
        tx = updater.wrap_optax(optax.sgd(0.1))
        _, state = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
        np.testing.assert_array_equal(state.masks["w"], expected)
