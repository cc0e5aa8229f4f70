"""AC/DC: the string of phases, and what becomes of weights that return."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers
from tests.algorithms import oracles


def _make(**options):
    config = {"algorithm": "acdc", "sparsity": 0.75, "update_freq": 4, "update_start_step": 3}
    return sparsity.create_updater_from_config(config | {"update_end_step": 17} | options)


def _phases(updater, steps, **options):
    """A letter for each step: S where three of four weights are zero."""
    params = {"w": jnp.array([[1.0, 2.0, 3.0, 4.0]])}
    grads = [{"w": jnp.array([[0.1, -0.1, 0.1, -0.1]])}] * steps
    runs = oracles.runner(updater, **options)(params, grads)
    kept = [(int(state.masks["w"].sum()), np.count_nonzero(params["w"])) for params, state in runs]
    return "".join({(4, 4): "D", (1, 1): "S"}[pair] for pair in kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Updates at 3, 7, 11, 15 and, as the last, 17.
        ({}, "DDD" + "SSSS" + "DDDD" + "SSSS" + "DD" + "SSSSS"),
        # The last update falls into a sparse phase.
        ({"update_end_step": 13}, "DDD" + "SSSS" + "DDDD" + "SSSSSSSSSSS"),
        ({"update_start_step": 17}, "D" * 17 + "SSSSS"),
        ({"update_start_step": 0, "update_freq": 20}, "S" * 22),
    ],
)
def test_phases_alternate_and_the_end_is_sparse(options, expected):
    assert _phases(_make(**options), len(expected)) == expected


def test_without_a_schedule_training_is_dense():
    updater = sparsity.ACDC(sparsity_distribution_fn=helpers.uniform(0.75))
    with pytest.warns(UserWarning, match="training stays dense"):
        assert _phases(updater, 3) == "DDD"


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_weights_and_masks_are_those_of_numpy(momentum):
    run = oracles.runner(_make(), optax.sgd(0.1, momentum))
    for seed in oracles.TREES:
        weights = oracles.wide(oracles.tree(seed))
        traces = {name: np.zeros(w.shape) for name, w in weights.items()}
        masks = {name: np.ones(w.shape) for name, w in weights.items()}
        actual = run(oracles.tree(seed), oracles.draws(seed, 20))
        for step, (params, state) in enumerate(actual):
            if step in (3, 11, 17):
                sizes = {name: np.abs(w) for name, w in weights.items()}
                masks = oracles.layerwise(sizes, 0.75)
            elif step in (7, 15):
                masks = {name: np.ones(w.shape) for name, w in weights.items()}
            grads = oracles.wide(oracles.tree(seed, 1 + step))
            for name, mask in masks.items():
                # No gradient of a pruned weight enters its trace, and none outlives pruning.
                traces[name] = ((momentum or 0) * traces[name] + grads[name]) * mask
                weights[name] = weights[name] * mask - 0.1 * traces[name]
            oracles.same_masks(state.masks, masks)
            oracles.close(params, weights, 1e-5)


def test_weights_return_at_zero_and_train_in_that_step():
    options = {"update_freq": 1, "update_start_step": 0, "update_end_step": 5}
    params = {"w": jnp.array([[1.0, 2.0, 3.0, 4.0]])}
    grads = [{"w": jnp.ones((1, 4))}] * 2
    *_, (params, _) = oracles.runner(_make(**options), optax.sgd(0.5))(params, grads)
    np.testing.assert_array_equal(params["w"], [[-0.5, -0.5, -0.5, 3.0]])
