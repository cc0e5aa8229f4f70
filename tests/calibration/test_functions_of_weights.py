"""Weights behind a function are pruned exactly if the function casts or scales, else refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from tests.calibration.models import draw
from tests.calibration.oracles import layer

W, X, _ = (jnp.asarray(x, jnp.float32) for x in layer(12, 12, rows=64))
PARAMS = {"w": W.T}
WANDA = sparsity.WandaPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
FUNCTIONS = {
    "nothing": lambda w: 0.0 * w,
    "a scale of each input": lambda w: jnp.linspace(0.1, 9, 12)[:, None] * w,
    "a scale of each output": lambda w: w * jnp.linspace(0.1, 9, 12),
    "a constant mask": lambda w: jnp.tril(w),
    "weight norm": lambda w: w / jnp.linalg.norm(w, axis=0),
    "spectral norm": lambda w: w / jnp.linalg.norm(w),
    "weight standardization": lambda w: (w - w.mean(0)) / w.std(0),
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
    "integers": lambda w: (8 * w).astype(jnp.int8).astype(jnp.float32),
    "straight-through rounding": lambda w: w + jax.lax.stop_gradient(jnp.round(w) - w),
    "an inverse": lambda w: 1 / w,
    "two parts": lambda w: 0.5 * w + 0.25 * w,
    "a difference of both orders": lambda w: w - w.T,
    "a scale that depends on the weight": lambda w: w * w[0, 0],
    "a product with a constant": lambda w: np.tri(12, dtype=np.float32) @ w,
}
SCALED = {
    "times 0.25": (0.25, lambda w: 0.25 * w),
    "negative, divided": (-1 / 3, lambda w: -w / 3),
    "twice, and in a call": (2.0, lambda w: jax.jit(lambda w: w * 0.5)(4 * w)),
    "by a root": (12**-0.5, lambda w: w / jnp.sqrt(12.0)),
    "times an array of one number": (2.0, lambda w: w * jnp.full((12, 1), 2.0)),
    "transposed": (2.0, lambda w: (2 * w.T).T),
    "in bfloat16": (1.0, lambda w: w.astype(jnp.bfloat16).astype(jnp.float32)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_weight_behind_a_function_is_refused_by_its_path_before_anything_runs(name):
    def fn(params, x):
        jax.debug.callback(lambda: calls.append(0))
        return x @ FUNCTIONS[name](params["w"])

    calls: list[int] = []
    remedy = r"reads 'w', .*Store the array .* as the parameter"
    for options in ({}, {"sequential": False}, {"dry_run": True}):
        with pytest.raises(ValueError, match=remedy):
            sparsity.oneshot(WANDA, fn, PARAMS, [X], **options)
    assert not calls
    assert not sparsity.calibrate(fn, PARAMS, [X])
    with pytest.raises(ValueError, match=r"no entry \('w',\) .* a function of it"):
        WANDA.instant_sparsify(PARAMS, statistics=sparsity.calibrate(fn, PARAMS, [X]))


def test_a_weight_that_one_of_two_products_reads_behind_a_function_is_refused():
    def fn(params, x):
        return (x @ params["w"]) @ jax.nn.softplus(params["w"])

    with pytest.raises(ValueError, match="reads 'w', which has a sparsity, behind a function"):
        sparsity.oneshot(WANDA, fn, PARAMS, [X])


def test_low_rank_changes_and_masks_among_the_parameters_are_refused_by_name():
    params = PARAMS | {"a": draw(1, 12, 2), "b": draw(2, 2, 12), "mask": jnp.ones((12, 12))}
    merged = {
        "w": lambda p, x: x @ (p["w"] + p["a"] @ p["b"]),
        "b": lambda p, x: x @ (p["a"] @ p["b"]),
        "mask": lambda p, x: x @ (p["w"] * p["mask"]),
    }
    for name, fn in merged.items():
        half = sparsity.Uniform(0.5, filter_fn=lambda path, _, name=name: path == (name,))
        pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=half)
        with pytest.raises(ValueError, match=f"reads '{name}', .* behind a function, or without"):
            sparsity.oneshot(pruner, fn, params, [X])


def test_the_weight_norm_of_flax_is_refused():
    model = nn.WeightNorm(nn.Dense(5))
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), variables)
    with pytest.raises(ValueError, match=r"reads 'params/layer_instance/kernel', .* a function"):
        sparsity.oneshot(WANDA, model.apply, params, [X])


@pytest.mark.parametrize("name", SCALED)
def test_a_weight_times_a_number_is_pruned_and_refitted_as_its_product(name):
    scale, function = SCALED[name]

    def fn(params, x):
        return x @ function(params["w"])

    seen = sparsity.calibrate(fn, PARAMS, [X], "gram")[("w",)]
    inputs = scale * np.asarray(X, np.float64)
    np.testing.assert_allclose(seen.gram, inputs.T @ inputs, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(seen.sums, inputs.sum(0), rtol=1e-4, atol=1e-4)
    expected = sparsity.oneshot(
        WANDA, lambda p, x: x @ p["w"], PARAMS, [X], sparsity.LeastSquares()
    )
    for sequential in (True, False):
        pruned, mask, report = sparsity.oneshot(
            WANDA, fn, PARAMS, [X], sparsity.LeastSquares(), sequential=sequential
        )
        np.testing.assert_array_equal(mask["w"], expected[1]["w"])
        np.testing.assert_allclose(pruned["w"], expected[0]["w"], rtol=1e-3, atol=1e-4)
        dense, sparse = (np.asarray(fn(p, X), np.float64) for p in (PARAMS, pruned))
        lost = ((dense - sparse) ** 2).sum() / (dense**2).sum()
        np.testing.assert_allclose(report[("w",)].error, lost, rtol=0.02)


def test_products_with_several_multiples_add_up_as_the_multiples_count():
    def fn(params, x):
        return jnp.concatenate([x @ params["w"], jnp.square(x) @ (9 * params["w"])], axis=-1)

    *_, report = sparsity.oneshot(WANDA, fn, PARAMS, [X], sequential=False)
    pruned, _ = WANDA.instant_sparsify(PARAMS, statistics=sparsity.calibrate(fn, PARAMS, [X]))
    dense, sparse = (np.asarray(fn(p, X), np.float64) for p in (PARAMS, pruned))
    lost = ((dense - sparse) ** 2).sum() / (dense**2).sum()
    np.testing.assert_allclose(report[("w",)].error, lost, rtol=1e-4)


def test_a_weight_that_a_loop_scales_in_each_step_is_refused():
    def fn(params, x):
        def step(carry, _):
            x, w = carry
            return (jnp.tanh(x @ w), 0.5 * w), None

        return jax.lax.scan(step, (x, params["w"]), None, length=3)[0][0]

    with pytest.raises(ValueError, match="'w', which has a sparsity"):
        sparsity.oneshot(WANDA, fn, PARAMS, [X])


def test_layers_of_a_scan_times_a_number_are_pruned_by_what_each_meets():
    stack = {"w": jnp.stack([PARAMS["w"], PARAMS["w"][::-1]])}

    def fn(params, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ (0.125 * w)), None), x, params["w"])[0]

    pruned, _, report = sparsity.oneshot(WANDA, fn, stack, [X], sparsity.ADMM())
    unscaled = jax.tree.map(lambda w: 0.125 * w, stack)
    expected = sparsity.oneshot(
        WANDA,
        lambda p, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0],
        unscaled,
        [X],
        sparsity.ADMM(),
    )
    np.testing.assert_allclose(0.125 * pruned["w"], expected[0]["w"], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(report[("w",)].error, expected[2][("w",)].error, rtol=1e-3)


def test_channels_are_chosen_by_the_multiples_that_their_readers_take():
    params = {"up": draw(0, 12, 8), "one": draw(1, 8, 3), "other": draw(2, 8, 3)}

    def make_model(scale):
        def fn(params, x):
            hidden = jax.nn.relu(x @ params["up"])
            return hidden @ params["one"] + jnp.square(hidden @ (scale * params["other"]))

        return fn

    def prune(fn, params):
        pruner = sparsity.OSSCARPruning(
            scope=sparsity.Coupled(sparsity.trace(fn, params, X)),
            sparsity_distribution_fn=sparsity.Uniform(0.5),
        )
        statistics = sparsity.calibrate(fn, params, [X], "gram")
        return pruner.instant_sparsify(params, statistics=statistics)[1]

    masks = prune(make_model(16.0), params)
    expected = prune(make_model(1.0), params | {"other": 16 * params["other"]})
    jax.tree.map(np.testing.assert_array_equal, masks, expected)
    with pytest.raises(ValueError, match="no entry"):
        prune(make_model(draw(3, 8, 1)), params)
