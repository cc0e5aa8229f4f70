"""Random scores as hooks of users get them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.algorithms.pruners import generate_random_scores

pytestmark = pytest.mark.slow


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
