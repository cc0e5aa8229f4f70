"""Supports that published methods train, from pruners, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity

SHAPES = {"in": (12, 20), "out": (20, 6)}
DENSITY = 0.1
TARGET = sparsity.Uniform(1 - DENSITY)
GLOBAL = sparsity.Global(use_normalization=False)


def draw(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def network(params, x):
    return jnp.tanh(x @ params["in"]) @ params["out"]


def loss(params, batch):
    return jnp.mean(jnp.square(network(params, batch) - 1))


BATCHES = [np.random.default_rng(seed).normal(size=(5, 12)).astype(np.float32) for seed in (7, 8)]


def mean_gradient(params):
    grads = [jax.grad(loss)(params, batch) for batch in BATCHES]
    return jax.tree.map(lambda *each: sum(each) / len(each), *grads)


def top(scores, count):
    """Mask of the highest scores, for scores without ties."""
    order = np.argsort(scores.ravel())[::-1][:count]
    return np.isin(np.arange(scores.size), order).reshape(scores.shape)


def top_by_layer(scores):
    return {name: top(s, round(DENSITY * s.size)) for name, s in scores.items()}


def top_of_all(scores):
    flat = np.concatenate([score.ravel() for score in scores.values()])
    chosen = np.split(top(flat, round(DENSITY * flat.size)), [scores["in"].size])
    return {name: mask.reshape(SHAPES[name]) for name, mask in zip(SHAPES, chosen, strict=True)}


def check(masks, expected):
    for name, mask in expected.items():
        np.testing.assert_array_equal(np.asarray(masks[name]) > 0, mask)


def test_the_largest_weights_of_each_layer_as_in_shira_wm():
    params = draw(0)
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=TARGET)
    expected = top_by_layer(jax.tree.map(np.abs, params))
    check(pruner.instant_sparsify(params)[1], expected)


@pytest.mark.parametrize(
    ("scope", "rank"), [(sparsity.Layerwise(), top_by_layer), (GLOBAL, top_of_all)]
)
def test_the_largest_gradients_by_layer_or_of_all_as_in_sift_and_shira_grad(scope, rank):
    grads = mean_gradient(draw(0))
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=TARGET, scope=scope)
    expected = rank({name: np.abs(np.asarray(grad)) for name, grad in grads.items()})
    check(pruner.instant_sparsify(grads)[1], expected)


def test_the_largest_products_of_weight_and_gradient_as_in_shira_snip():
    params = draw(0)
    grads = mean_gradient(params)
    expected = top_by_layer(
        {name: np.abs(params[name] * np.asarray(grads[name])) for name in params}
    )
    pruner = sparsity.SaliencyPruning(sparsity_distribution_fn=TARGET)
    check(pruner.instant_sparsify(params, grads)[1], expected)
    scores = sparsity.snip_scores(loss, params, BATCHES)
    ranked = sparsity.MagnitudePruning(sparsity_distribution_fn=TARGET).instant_sparsify(scores)
    check(ranked[1], expected)


def test_random_entries_of_an_exact_number_as_in_shira_rand():
    pruner = sparsity.RandomPruning(sparsity_distribution_fn=TARGET)
    masks = pruner.instant_sparsify(draw(0))[1]
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"in": 24, "out": 12}
    check(pruner.instant_sparsify(draw(1))[1], jax.tree.map(np.asarray, masks))  # by seed alone


def test_rows_and_a_diagonal_as_in_shira_struct():
    params = draw(0)
    rows = sparsity.MagnitudePruning(
        sparsity_distribution_fn=TARGET, sparsity_type=sparsity.Channel(-2)
    ).instant_sparsify(params)[1]
    masks = {
        name: np.asarray(mask) | np.eye(*mask.shape, dtype=np.uint8) for name, mask in rows.items()
    }
    norms = {name: np.abs(param).sum(1) for name, param in params.items()}
    for name, (height, width) in SHAPES.items():
        chosen = top(norms[name], round(DENSITY * height))
        np.testing.assert_array_equal(
            masks[name] > 0, chosen[:, None] | np.eye(height, width, dtype=bool)
        )
    state = sparsity.train_only(optax.adam(0.1), masks).init(params)
    assert state.state[0].mu["in"].shape == (20 + 11,)


@pytest.mark.slow
def test_coupled_channels_groups_of_inputs_and_n_of_m_train_under_any_of_the_masks():
    params = draw(0)
    graph = sparsity.trace(network, params, BATCHES[0])
    patterns = {
        "channels": {"scope": sparsity.Coupled(graph)},
        "groups": {"sparsity_type": sparsity.FanIn(2)},
        "1 of 4": {
            "sparsity_type": graph.nm(1, 4),
            "sparsity_distribution_fn": sparsity.Uniform(0.75),
        },
    }
    for name, options in patterns.items():
        options = {"sparsity_distribution_fn": TARGET, **options}
        masks = sparsity.MagnitudePruning(**options).instant_sparsify(params)[1]
        tx = sparsity.train_only(optax.sgd(0.1), masks)
        updates, _ = tx.update(mean_gradient(params), tx.init(params), params)
        trained = optax.apply_updates(params, updates)
        for path, param in params.items():
            np.testing.assert_array_equal(trained[path] != param, np.asarray(masks[path]) > 0)
        kept = {path: int(mask.sum()) for path, mask in masks.items()}
        expected = {
            "channels": {"in": 12 * 2, "out": 2 * 6},
            "groups": {"in": 1 * 20, "out": 2 * 6},
            "1 of 4": {"in": 60, "out": 30},
        }
        assert kept == expected[name]
