"""Formats of kept values: groups without any dense parameter, and the choice by measurement."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import compact, trace
from tests.helpers import list_scatters, slow_but


def layer(h, w):
    return jnp.tanh(h @ w), None


MODELS = {
    "matrix": ((12, 16), lambda w, x: jnp.tanh(x @ w)),
    "transposed": ((16, 12), lambda w, x: jnp.tanh(x @ w.T)),
    "scanned": (
        (3, 12, 12),
        lambda w, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0],
    ),
    "heads": ((12, 4, 3), lambda w, x: jnp.einsum("bi,ihk->kbh", x, w)),
    "from heads": ((4, 3, 12), lambda w, x: jnp.einsum("bhk,hkd->bd", x.reshape(-1, 4, 3), w)),
    "experts": ((4, 12, 8), lambda w, x: jnp.einsum("ebi,eio->beo", jnp.stack([x] * 4), w)),
    "left": ((16, 12), lambda w, x: w @ x.T),
    "pointwise": (
        (1, 1, 3, 8),
        lambda w, x: jax.lax.conv_general_dilated(
            x.reshape(-1, 2, 2, 3), w, (2, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
    ),
    "ragged": ((12, 10), lambda w, x: x @ w),
}


def draw(name, group):
    """(function, pruned params, mask, input, graph) under FanIn, by the graph."""
    shape, fn = MODELS[name]
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=size)) for size in (shape, (5, 12)))
    graph = trace(fn, w, x)
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=lambda path, param: True),
        sparsity_type=graph.fan_in(group),
        batch_axes=int(name in ("scanned", "experts")),
    )
    return fn, *pruner.instant_sparsify(w), x, graph


@pytest.mark.parametrize(
    ("format", "outside"), [("values", "zero"), ("grouped", "zero"), ("values", "frozen")]
)
def test_padding_of_a_layer_writes_nothing_in_the_next_layer(format, outside):
    """XLA on GPUs with deterministic operations needs the promise that no position comes twice."""
    shape, fn = MODELS["scanned"]
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=size).astype(np.float32) for size in (shape, (5, 12)))
    mask = np.zeros(shape, np.uint8)
    for layer_mask, count in zip(mask, (2, 4, 3), strict=True):
        layer_mask[np.r_[0, rng.choice(np.arange(1, 12), count - 1, replace=False)]] = 1
    w *= mask
    model = compact(trace(fn, w, x), w, mask, outside=outside, formats={(): format})
    np.testing.assert_array_equal(model.dense(model.params), w)
    scatters = list_scatters(model.dense, model.params)
    assert [equation.params["unique_indices"] for equation in scatters] == [True]


@pytest.mark.parametrize("group", [4, 1])
@pytest.mark.parametrize("name", slow_but(["scanned"], MODELS))
def test_products_of_groups_are_those_of_the_masked_model(name, group):
    with jax.enable_x64(True):
        fn, w, mask, x, graph = draw(name, group)
        model = compact(graph, w, mask, formats={(): "grouped"} if group == 1 else None)
        assert model.formats == {(): "grouped"}
        assert model.params.shape[-1] == group
        np.testing.assert_array_equal(model.dense(model.params), w)
        np.testing.assert_array_equal(model.masks, mask)

        def loss(apply):
            return lambda w, x: (apply(w, x) ** 2).sum()

        grads = jax.jit(jax.value_and_grad(loss(model.apply), (0, 1)))
        expected = jax.jit(jax.value_and_grad(loss(fn), (0, 1)))(w, x)
        value, (dw, dx) = grads(model.params, x)
        np.testing.assert_allclose(value, expected[0], rtol=1e-12)
        np.testing.assert_allclose(dx, expected[1][1], rtol=1e-11, atol=1e-12)
        kept = expected[1][0] * mask
        np.testing.assert_allclose(model.dense(dw), kept, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(model.apply(model.params, x), fn(w, x), rtol=1e-12, atol=1e-12)
        text = jax.jit(model.apply).lower(model.params, x).as_text()
        shape = w.shape[int(name in ("scanned", "experts")) :]
        assert f"tensor<{'x'.join(map(str, shape))}x" not in text


@pytest.mark.parametrize(
    "options",
    [
        {"padding": [(1, 1), (0, 0)]},
        {"padding": [(0, 0), (0, 0)], "lhs_dilation": (2, 1)},
        {"padding": "VALID", "batch_group_count": 2},
    ],
)
def test_convolutions_that_do_more_than_multiply_each_place_are_those_of_the_masked_model(options):
    def fn(w, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), dimension_numbers=numbers, **options)

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        w, x = (jnp.asarray(rng.normal(size=size)) for size in ((1, 1, 3, 8), (4, 2, 2, 3)))
        mask = np.ones(w.shape, np.uint8)
        mask[..., 0, :4] = mask[..., 2, 4:] = 0
        model = compact(trace(fn, w, x), w * mask, mask, formats={(): "grouped"})
        assert model.formats == {(): "grouped"}
        np.testing.assert_allclose(model.apply(model.params, x), fn(w * mask, x), rtol=1e-12)


@pytest.mark.slow
def test_groups_are_found_in_masks_of_blocks_and_of_nothing_else():
    x, w = jnp.ones((2, 64)), jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)))
    graph = trace(lambda w, x: x @ w, w, x)
    for pattern, name in (
        (sparsity.Block((8, 8)), "grouped"),
        (sparsity.FanIn(16), "grouped"),
        (sparsity.Channel(0), "grouped"),
        (sparsity.Block((1, 16)), "grouped"),
        (sparsity.Block((16, 1)), "values"),
        (sparsity.Channel(1), "values"),
        (sparsity.FanIn(1), "values"),
        (sparsity.NByM(2, 4, axis=-2), "values"),
        (sparsity.Unstructured(), "values"),
    ):
        pruner = sparsity.MagnitudePruning(
            sparsity_type=pattern, sparsity_distribution_fn=sparsity.Uniform(0.75)
        )
        pruned, mask = pruner.instant_sparsify(w)
        model = compact(graph, pruned, mask)
        assert model.formats == {(): name}, pattern
        np.testing.assert_array_equal(model.dense(model.params), pruned)


def test_parameters_that_products_read_in_parts_keep_values():
    fn = lambda w, x: sum(x @ part for part in jnp.split(w, 2, axis=1))  # noqa: E731
    w, x = jnp.ones((12, 16)), jnp.ones((3, 12))
    graph, mask = trace(fn, w, x), np.repeat(np.arange(12)[:, None] % 2, 16, axis=1)
    model = compact(graph, w, mask)
    assert model.formats == {(): "values"}
    with pytest.raises(
        ValueError, match=r"formats has 'grouped' for 'params'.*keep different numbers"
    ):
        compact(graph, w, np.tril(np.ones((12, 16), np.uint8)), formats={(): "grouped"})


@pytest.mark.slow
def test_the_format_that_is_measured_fastest_is_taken_with_values_and_state():
    rng = np.random.default_rng(0)
    params = {"a": jnp.asarray(rng.normal(size=(32, 32)), jnp.float32)}
    params["layers"] = jnp.asarray(rng.normal(size=(2, 32, 32)), jnp.float32)

    def fn(params, x):
        return jax.lax.scan(layer, x @ params["a"], params["layers"])[0]

    x = jnp.ones((4, 32))
    pruner = sparsity.MagnitudePruning(
        sparsity_type=sparsity.FanIn(8),
        batch_axes=lambda path, param: param.ndim - 2,
        sparsity_distribution_fn=sparsity.Uniform(0.8),
    )
    pruned, masks = pruner.instant_sparsify(params)
    tx = optax.adam(0.1)
    _, state = tx.update(pruned, tx.init(pruned), pruned)
    model = compact(trace(fn, params, x), pruned, masks, state, tx)
    seconds = model.measure(model.params, x, rounds=1)
    assert {name for times in seconds.values() for name in times} == {"values", "grouped", "dense"}
    assert all(time > 0 for times in seconds.values() for time in times.values())
    assert "ms grouped" in model.report(seconds)
    tuned = model.tune(model.params, x, rounds=1)
    assert tuned.formats.keys() == seconds.keys()
    dense = tuned.dense(tuned.params)
    jax.tree.map(np.testing.assert_array_equal, dense, pruned)
    moments = tuned.dense_state(tuned.opt_state)[0].mu
    jax.tree.map(np.testing.assert_array_equal, moments, state[0].mu)
    np.testing.assert_allclose(tuned.apply(tuned.params, x), fn(pruned, x), rtol=1e-5, atol=1e-6)
    _, later = tx.update(model.params, model.opt_state, model.params)
    tuned = model.tune(model.params, x, rounds=1, opt_state=later)
    assert int(tuned.opt_state[0].count) == int(later[0].count) == 2


def test_the_picture_has_a_bar_for_each_masked_parameter():
    w, x = jnp.ones((12, 16)), jnp.ones((3, 12))
    model = compact(trace(lambda w, x: x @ w, w, x), w, np.eye(12, 16, dtype=np.uint8))
    axes = model.plot()
    assert [bar.get_width() for bar in axes.patches] == [12 * 16 * 4 / 1e6, 12 * (4 + 4) / 1e6]
