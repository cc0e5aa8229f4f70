"""SRigL: updates by a loop of numpy, the constant fan-in, what it refuses."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.algorithms.pruners import generate_random_scores
from sparsity.algorithms.srigl import constant_fan_in
from tests import helpers
from tests.algorithms import oracles
from tests.selection_oracle import best, best_first, drop_and_grow

_UPDATE = jax.jit(constant_fan_in, static_argnames=("min_salient", "batch_axes"))


def _expected(mask, drop, grow, fraction, target, min_salient):
    """Lasby et al. 2024, section 3.1, neuron by neuron."""
    neurons, inputs = mask.shape[-1], mask[..., 0].size
    budget, active = helpers.num_kept(mask.size, target), int(mask.sum())
    salient = drop_and_grow(mask, drop, grow, fraction).reshape(-1, neurons).sum(axis=0)
    bound = max(1, math.floor(min_salient * (budget // neurons))) if min_salient else 0
    fewest = min(neurons, budget // inputs + 1)
    while np.sum(salient >= bound) < fewest:
        bound -= 1
    stays = salient >= bound
    fan_in = min(inputs, budget // int(stays.sum()))
    kept = best(drop, helpers.num_kept(active, fraction), mask * stays)
    new = np.zeros_like(mask).reshape(-1, neurons)
    for j in np.flatnonzero(stays):
        columns = [x.reshape(-1, neurons)[:, j] for x in (kept, drop, grow)]
        first = best_first(columns[1], columns[0])[:fan_in]
        new[first, j] = 1
        new[best_first(columns[2], 1 - new[:, j])[: fan_in - len(first)], j] = 1
    return new.reshape(mask.shape)


def _fan_ins(mask):
    return np.asarray(mask).reshape(-1, mask.shape[-1]).sum(axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("min_salient", [0.3, 1.0])
def test_updates_are_those_of_numpy(min_salient):
    ablated = 0
    for seed in oracles.TREES:
        rng = np.random.default_rng(seed)
        shape = [(6, 10), (3, 4, 8)][seed % 2]
        target = np.float32([0.5, 0.8][seed // 2 % 2])
        budget = helpers.num_kept(math.prod(shape), target)
        mask = np.moveaxis(np.zeros(shape, np.uint8), -1, 0).reshape(shape[-1], -1)
        for row in mask:
            row[rng.permutation(row.size)[: budget // shape[-1]]] = 1
        mask = np.ascontiguousarray(np.moveaxis(mask.reshape(shape[-1], *shape[:-1]), 0, -1))
        for _ in range(3):
            drop, grow = np.abs(rng.normal(size=(2, *shape))).astype(np.float32)
            # A few neurons matter: others lose their salient weights.
            grow, drop = grow * rng.random(shape[-1]) ** 2, drop * rng.random(shape[-1]) ** 2
            drop, grow = np.float32(drop * mask), np.float32(grow)
            expected = _expected(mask, drop, grow, 0.3, target, min_salient)
            actual = _UPDATE(mask, drop, grow, 0.3, target, min_salient=min_salient)
            np.testing.assert_array_equal(actual, expected)
            mask = expected
            ablated += np.count_nonzero(_fan_ins(mask) == 0)
    assert ablated > 20


@pytest.mark.slow
def test_an_update_by_hand():
    # 2 inputs, 3 neurons, B = 3, fan-in 1; half of 3 active: K = 2 (1.5 to even) stay, one grows.
    mask = np.array([[1, 1, 0], [0, 0, 1]], np.uint8)
    drop = np.array([[3.0, 2, 0], [0, 0, 1]])
    grow = np.array([[0.0, 0, 5], [9, 1, 2]])
    # Salient: 3, 2 and the gradient 9, so 2, 1, 0 by neuron; the third is removed, and the fan-in
    # stays 3 // 2 = 1.
    actual = constant_fan_in(*map(jnp.asarray, (mask, drop, grow)), 0.5, 0.5)
    np.testing.assert_array_equal(actual, [[1, 1, 0], [0, 0, 0]])
    # It returns once its gradient is large.
    grow = np.array([[0.0, 0, 5], [0, 1, 99]])
    actual = constant_fan_in(actual, *map(jnp.asarray, (drop, grow)), 0.5, 0.5)
    np.testing.assert_array_equal(actual, [[1, 0, 0], [0, 0, 1]])


@pytest.mark.slow
def test_so_many_neurons_stay_that_the_budget_fits():
    # All salient weights are in one neuron of two inputs; B = 4 needs two: 4 // 2 + 1 = 3 stay.
    mask = np.array([[1, 1, 1, 1], [0, 0, 0, 0]], np.uint8)
    drop = np.array([[9.0, 8, 7, 6], [0, 0, 0, 0]])
    actual = constant_fan_in(
        *map(jnp.asarray, (mask, drop, np.zeros((2, 4)))), 0.0, 0.5, min_salient=1.0
    )
    np.testing.assert_array_equal(actual, mask)


@pytest.mark.slow
def test_the_fan_in_is_constant_after_each_of_200_updates():
    updater = sparsity.create_updater_from_config(
        {
            "algorithm": "srigl",
            "sparsity": 0.8,
            "update_freq": 1,
            "update_start_step": 0,
            "update_end_step": 199,
            "skip_gradients": False,
            "min_salient": 0.9,
        }
    )
    params = oracles.tree(0)
    grads = [jax.tree.map(lambda g: g**3, oracles.tree(0, 1 + step)) for step in range(200)]
    budget = {name: helpers.num_kept(params[name].size, 0.8) for name in ("a", "b")}
    for _, state in oracles.runner(updater, optax.adam(0.01))(params, grads):
        for name, most in budget.items():
            fans = _fan_ins(state.masks[name])
            remaining = np.count_nonzero(fans)
            inputs = params[name][..., 0].size
            assert {*fans} - {0} == {min(inputs, most // remaining)}


def test_it_starts_from_random_masks_with_the_fan_in_that_the_budget_allows():
    updater = sparsity.SRigL(sparsity_distribution_fn=helpers.uniform(0.7))
    params = {"w": jnp.ones((3, 4, 10)), "b": jnp.ones(10)}
    mask = np.asarray(updater.init_state(params).masks["w"])
    assert {*_fan_ins(mask)} == {36 // 10}
    scores = np.asarray(generate_random_scores(params, 8)["w"])
    for j in range(10):
        np.testing.assert_array_equal(mask[..., j], best(scores[..., j].astype(np.int64), 3))


@pytest.mark.slow
def test_every_slice_of_a_stack_moves_by_itself():
    rng = np.random.default_rng(0)
    mask = np.zeros((2, 6, 5), np.uint8)
    mask[:, :2] = 1
    drop, grow = np.abs(rng.normal(size=(2, 2, 6, 5))).astype(np.float32)
    grow[0, :, 3:] *= 0.01
    actual = _UPDATE(mask, drop * mask, grow, 0.4, np.float32(2 / 3), batch_axes=1)
    for i in range(2):
        alone = _expected(mask[i], drop[i] * mask[i], grow[i], 0.4, 2 / 3, 0.3)
        np.testing.assert_array_equal(actual[i], alone)


@pytest.mark.parametrize("kind", [sparsity.NByM(2, 4), sparsity.Channel(-1)])
def test_other_structures_are_an_error_that_says_why(kind):
    with pytest.raises(
        ValueError, match=r"SRigL keeps equally many weights in every neuron.*Use RigL"
    ):
        sparsity.SRigL(sparsity_type=kind)
    some = sparsity.SRigL(
        sparsity_type=lambda path, param: kind, sparsity_distribution_fn=helpers.half
    )
    with pytest.raises(ValueError, match=r"Unstructured\(\), got sparsity_type = .* for 'kernel'"):
        some.init_state({"kernel": jnp.ones((4, 8))})


def test_settings_out_of_range_are_errors():
    with pytest.raises(ValueError, match=r"min_salient must be in \[0, 1\].*got min_salient = 1.5"):
        sparsity.SRigL(min_salient=1.5)
    with pytest.raises(ValueError, match=r"SRigL chooses .* scope = Layerwise\(\)"):
        sparsity.SRigL(scope=sparsity.Global())
    with pytest.raises(ValueError, match=r"SRigL chooses .* topk_fn = None .* got <"):
        sparsity.SRigL(topk_fn=lambda scores, sparsity: scores > 0)
    sparse = sparsity.SRigL(sparsity_distribution_fn=helpers.uniform(0.95))
    with pytest.raises(ValueError, match=r"0.95 leaves 'layer/kernel' of shape \(6, 10\).*10 neur"):
        sparse.wrap_optax(optax.sgd(0.1)).init({"layer": {"kernel": jnp.ones((6, 10))}})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ties_zeros_nan_and_stacks_of_large_layers_move_as_in_numpy(dtype):
    rng = np.random.default_rng(5)
    shape, target = (2, 3, 30, 40), np.float32(0.8)
    mask = np.zeros(shape, np.uint8)
    mask[:, 0, :18] = 1  # 18 of 90 inputs
    drop = jnp.asarray(np.round(8 * np.abs(rng.normal(size=shape))) / 8 * mask, dtype)
    grow = np.where(rng.random(shape) < 0.02, np.nan, np.abs(rng.normal(size=shape)))
    grow = grow * rng.integers(0, 2, shape[-1])  # half of the neurons lose salient weights
    drop = drop * jnp.asarray(0.2 + rng.integers(0, 2, shape[-1]), dtype)
    grow = jnp.asarray(grow, dtype)
    for fraction in (0.0, 0.5):
        moved = _UPDATE(mask, drop, grow, fraction, target, min_salient=0.9, batch_axes=1)
        for i in range(2):
            arrays = mask[i], np.asarray(drop[i]), np.asarray(grow[i])
            expected = _expected(*arrays, fraction, target, 0.9)
            np.testing.assert_array_equal(moved[i], expected)
    assert np.any(np.asarray(moved).sum(axis=(1, 2)) == 0)
