"""Pruners: what each keeps, by hand-worked numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.algorithms.pruners import generate_random_scores
from tests import helpers

# Magnitude


def test_magnitude_keeps_the_largest_absolute_values():
    updater = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.5))
    params = {"w": jnp.array([[0.5, -4.0, 3.0], [-0.1, 2.0, -1.0]]), "b": jnp.array([9.0, 0.0])}
    pruned, masks = updater.instant_sparsify(params)
    np.testing.assert_array_equal(masks["w"], [[0, 1, 1], [0, 1, 0]])
    np.testing.assert_array_equal(pruned["w"], [[0, -4, 3], [0, 2, 0]])
    np.testing.assert_array_equal(pruned["b"], params["b"])


def test_equal_magnitudes_are_kept_from_the_lowest_index():
    updater = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.5))
    masks = updater.instant_sparsify(jnp.array([[1.0, -1.0, 1.0], [-1.0, 1.0, 1.0]]))[1]
    np.testing.assert_array_equal(masks, [[1, 1, 1], [0, 0, 0]])


def test_complex_weights_are_ranked_by_their_absolute_value():
    updater = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.5))
    pruned, masks = updater.instant_sparsify(jnp.array([[3 + 4j, 5.5], [1j, -0.1]]))
    np.testing.assert_array_equal(masks, [[1, 1], [0, 0]])
    np.testing.assert_array_equal(pruned, np.array([[3 + 4j, 5.5], [0, 0]], np.complex64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (sparsity.NByM(1, 2), [[0, 1, 1, 0], [0, 1, 0, 1]]),
        (sparsity.NByM(1, 2, axis=0), [[0, 0, 1, 0], [1, 1, 0, 1]]),
        (sparsity.Block((1, 2)), [[0, 0, 1, 1], [0, 0, 1, 1]]),
        (sparsity.Block((2, 2), use_avg_pooling=False), [[0, 0, 1, 1], [0, 0, 1, 1]]),
        (sparsity.Channel(-1), [[0, 0, 1, 1], [0, 0, 1, 1]]),
        (sparsity.Channel(0), [[0, 0, 0, 0], [1, 1, 1, 1]]),
    ],
)
def test_magnitude_keeps_groups_of_the_given_type(kind, expected):
    # Sums of rows 9, 12.5; of columns 3.5, 5, 6, 7; of the blocks (1, 2) 3, 6 / 5.5, 7.
    weights = jnp.array([[1.0, 2.0, 4.0, -2.0], [-2.5, 3.0, 2.0, 5.0]])
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5), sparsity_type=kind
    )
    np.testing.assert_array_equal(updater.instant_sparsify(weights)[1], expected)


@pytest.mark.slow
def test_a_gradual_ramp_follows_zhu_and_gupta_and_ends_at_the_target():
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.9),
        scheduler=sparsity.PolynomialSchedule(3, 1, 8),
    )
    tx = updater.wrap_optax(optax.sgd(0.0))
    params = {"w": jnp.arange(1.0, 101.0).reshape(10, 10)}
    state = tx.init(params)
    kept = []
    for _ in range(10):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
        kept.append(int(state.masks["w"].sum()))
    # 100 (0.1 + 0.9 (1 - (t - 1) / 7)^3) at t = 1, 4, 7 and 8: 100, 26.79, 10.26, 10.
    assert kept == [100] * 4 + [27] * 3 + [10] * 3


# Saliency


def test_saliency_keeps_the_largest_products_of_weight_and_gradient():
    updater = sparsity.SaliencyPruning(sparsity_distribution_fn=helpers.uniform(0.5))
    params = {"w": jnp.array([[1.0, -2.0], [3.0, 4.0]]), "b": jnp.array([1.0])}
    grads = {"w": jnp.array([[10.0, 3.0], [-1.0, 0.5]]), "b": jnp.array([0.0])}
    _, masks = updater.instant_sparsify(params, grads)  # products 10, 6, 3, 2
    np.testing.assert_array_equal(masks["w"], [[1, 1], [0, 0]])
    assert masks["b"] is None


@pytest.mark.parametrize("compiled", [False, True])
def test_products_that_float16_cannot_hold_are_ranked(compiled):
    params, grads = jnp.float16([[1e-3, 2e-3, 3e-3, 4e-3]]), jnp.float16([[4e-5, 3e-5, 2e-5, 1e-6]])
    updater = sparsity.SaliencyPruning(sparsity_distribution_fn=helpers.uniform(0.5))
    prune = jax.jit(updater.instant_sparsify) if compiled else updater.instant_sparsify
    masks = prune(params, grads)[1]  # products 4, 6, 6 and 0.4 e-8, of which float16 holds 5.96e-8
    np.testing.assert_array_equal(masks, [[0, 1, 1, 0]])


def test_saliency_without_gradients_says_what_it_needs():
    updater = sparsity.SaliencyPruning(sparsity_distribution_fn=helpers.uniform(0.5))
    with pytest.raises(ValueError, match=r"SaliencyPruning scores.*gradients.*grads = None"):
        updater.instant_sparsify({"w": jnp.ones((2, 2))})


def test_saliency_names_the_parameter_whose_gradient_is_missing():
    updater = sparsity.SaliencyPruning(sparsity_distribution_fn=helpers.uniform(0.5))
    params = {"layer": {"w": jnp.ones((2, 2)), "v": jnp.ones((2, 2))}}
    with pytest.raises(ValueError, match="'layer/w'"):
        updater.instant_sparsify(params, {"layer": {"v": jnp.ones((2, 2))}})


@pytest.mark.slow
def test_saliency_keeps_pruned_weights_pruned_while_training():
    updater = sparsity.SaliencyPruning(
        sparsity_distribution_fn=helpers.uniform(0.75),
        scheduler=sparsity.PolynomialSchedule(1, 0, 4),
    )
    tx = updater.wrap_optax(optax.sgd(0.01))
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)
    state = tx.init(params)
    before = np.ones((8, 8))
    for _ in range(5):
        grads = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert np.all(np.asarray(state.masks) <= before)
        before = np.asarray(state.masks)
    assert before.sum() == 16


# Random


@pytest.mark.slow
def test_random_pruning_is_nested_along_a_ramp():
    updater = sparsity.RandomPruning(
        sparsity_distribution_fn=helpers.uniform(0.9),
        scheduler=sparsity.PolynomialSchedule(1, 0, 6),
    )
    tx = updater.wrap_optax(optax.sgd(0.1))
    params = {"w": jnp.ones((10, 10))}
    state = tx.init(params)
    before, counts = np.ones((10, 10)), []
    for _ in range(7):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
        mask = np.asarray(state.masks["w"])
        assert np.all(mask <= before)
        before = mask
        counts.append(int(mask.sum()))
    assert counts[-1] == 10
    assert len(set(counts)) >= 5


def test_random_pruning_ignores_the_weights():
    updater = sparsity.RandomPruning(sparsity_distribution_fn=helpers.uniform(0.5))
    first = updater.instant_sparsify({"w": jnp.ones((8, 8))})[1]["w"]
    second = updater.instant_sparsify({"w": jnp.arange(64.0).reshape(8, 8)})[1]["w"]
    np.testing.assert_array_equal(first, second)
    assert int(first.sum()) == 32


def test_parameters_of_equal_shape_draw_masks_of_their_own():
    updater = sparsity.RandomPruning(sparsity_distribution_fn=helpers.uniform(0.5))
    params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
    masks = updater.instant_sparsify(params)[1]
    assert np.any(np.asarray(masks["a"]) != np.asarray(masks["b"]))
    # A mask depends on the path, not on what other parameters there are.
    alone = updater.instant_sparsify({"b": jnp.ones((8, 8))})[1]
    np.testing.assert_array_equal(alone["b"], masks["b"])


# generate_random_scores


def test_random_scores_are_32_bits_for_every_entry_and_depend_on_seed_step_and_path():
    params = {"a": jnp.zeros((50, 40), jnp.bfloat16), "b": None, "c": jnp.zeros((50, 40))}
    scores = generate_random_scores(params, 8)
    assert scores["b"] is None
    assert scores["a"].shape == (50, 40)
    assert scores["a"].dtype == jnp.uint32
    others = [
        scores["c"],
        generate_random_scores(params, 9)["a"],
        generate_random_scores(params, 8, 1)["a"],
        generate_random_scores(params, jax.random.key(8))["a"],
    ]
    for other in others:
        assert np.mean(np.asarray(other) == np.asarray(scores["a"])) < 0.01
    np.testing.assert_array_equal(generate_random_scores(params, 8)["a"], scores["a"])


def test_random_scores_are_uniform_and_uncorrelated_between_steps():
    first, second = (
        np.asarray(generate_random_scores(jnp.zeros((100, 100)), 8, step)).astype(np.float64)
        / 2**32
        for step in (1, 2)
    )
    # 10,000 draws: the mean has a standard deviation of 0.0029, a correlation one of 0.01.
    assert abs(first.mean() - 0.5) < 0.015
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(first[1:].ravel(), first[:-1].ravel())[0, 1]) < 0.05
    counts = np.histogram(first, bins=10, range=(0, 1))[0]
    assert np.all(np.abs(counts - 1000) < 150)  # five standard deviations


def test_random_scores_of_a_traced_seed_and_step_are_those_of_the_values():
    params = {"w": jnp.zeros((4, 4))}
    key = jax.random.key(3)
    traced = jax.jit(lambda key, step: generate_random_scores(params, key, step))(key, 5)
    np.testing.assert_array_equal(traced["w"], generate_random_scores(params, key, 5)["w"])
