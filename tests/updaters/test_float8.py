"""Parameters of float8, which jax promotes to no other dtype, beside those of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.core.arrays import promote
from tests import helpers

SPREAD = {"sparsity_distribution_fn": helpers.half}
PRUNERS = [
    sparsity.LampPruning(**SPREAD),
    sparsity.MovementPruning(**SPREAD),
    sparsity.MagnitudePruning(scope=sparsity.Global(), **SPREAD),
    sparsity.GlobalMagnitudePruning(sparsity=0.5),
    sparsity.WandaPruning(**SPREAD),
    sparsity.RIAPruning(**SPREAD),
    sparsity.SparseGPTPruning(**SPREAD),
]


def params_and_statistics():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {"v": jax.random.normal(keys[0], (8, 6)), "w": jax.random.normal(keys[1], (8, 6))}
    params["w"] = params["w"].astype(jnp.float8_e4m3fn)
    grads = {"v": jax.random.normal(keys[2], (8, 6)), "w": params["w"].T.reshape(8, 6)}
    x = jax.random.normal(keys[3], (20, 8))
    seen = sparsity.Statistic(gram=x.T @ x, count=20, contracting=(0,), output=(1,))
    return params, grads, {(name,): seen for name in params}


@pytest.mark.parametrize("under_jit", [False, True])
@pytest.mark.parametrize("pruner", PRUNERS, ids=lambda pruner: type(pruner).__name__)
def test_masks_of_float8_are_those_of_the_same_numbers_in_float32(pruner, under_jit):
    params, grads, statistics = params_and_statistics()

    def prune(params, grads):
        more = {"statistics": statistics} if hasattr(pruner, "statistics_kind") else {}
        return pruner.instant_sparsify(params, grads, **more)

    prune = jax.jit(prune) if under_jit else prune
    pruned, masks = prune(params, grads)
    wide = [jax.tree.map(lambda x: x.astype(jnp.float32), tree) for tree in (params, grads)]
    for name, mask in prune(*wide)[1].items():
        np.testing.assert_array_equal(masks[name], mask)
    assert pruned["w"].dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize("refit", [None, sparsity.LeastSquares(), sparsity.ADMM()])
def test_a_model_of_float8_is_pruned_and_refitted_in_one_shot(refit):
    params, _, _ = params_and_statistics()
    model = lambda params, x: x @ params["w"].astype(jnp.float32)  # noqa: E731
    pruner = sparsity.SparseGPTPruning(**SPREAD)
    batch = jax.random.normal(jax.random.key(1), (20, 8))
    pruned, masks, report = sparsity.oneshot(pruner, model, {"w": params["w"]}, [batch], refit)
    lost = np.asarray(model(params, batch) - model(pruned, batch))
    assert masks["w"].sum() == 24
    error = np.sum(lost**2) / np.sum(np.asarray(model(params, batch)) ** 2)
    assert report[("w",)].error == pytest.approx(error, rel=0.05)  # differences are float8


@pytest.mark.slow
def test_biases_and_rates_of_float8_are_those_of_the_same_numbers_in_float32():
    params, _, _ = params_and_statistics()
    params["w"], params["b"] = params["w"].T, jnp.zeros(8, jnp.float8_e5m2)
    params["c"] = jnp.zeros(6, jnp.float8_e5m2)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    batch = jax.random.normal(jax.random.key(1), (20, 8)) + 2

    def model(params, x):
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return jax.nn.relu(x @ params["v"] + params["c"]) @ params["w"] + params["b"]

    pruner = sparsity.FLAPPruning(
        scope=sparsity.Coupled(sparsity.trace(model, params, batch)), **SPREAD
    )
    seen = sparsity.calibrate(model, params, [batch], "moments")
    (pruned, masks), (other, expected) = (
        pruner.instant_sparsify(tree, statistics=seen) for tree in (params, wide)
    )
    np.testing.assert_array_equal(masks["v"], expected["v"])
    np.testing.assert_array_equal(pruned["b"], other["b"].astype(jnp.float8_e5m2))
    assert sparsity.owl(seen, params, 0.5) == sparsity.owl(seen, wide, 0.5)
    refit = sparsity.calibration.Means()
    runs = [
        sparsity.oneshot(sparsity.WandaPruning(**SPREAD), model, tree, [batch], refit)[0]
        for tree in (params, wide)
    ]
    np.testing.assert_array_equal(runs[0]["c"], runs[1]["c"].astype(jnp.float8_e5m2))


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn])
def test_bfloat16_holds_the_numbers_of_narrower_floats(dtype):
    assert promote(dtype, dtype) == dtype
    assert promote(dtype, jnp.bfloat16) == promote(jnp.bfloat16, dtype) == jnp.bfloat16
    assert promote(dtype, jnp.float16, jnp.int8) == jnp.float32
    bits = jnp.finfo(dtype).bits
    every = np.arange(2**bits, dtype=np.uint8).view(dtype)
    np.testing.assert_array_equal(
        every.astype(np.float32), every.astype(jnp.bfloat16).astype(np.float32)
    )


def test_scales_of_a_dtype_without_a_zero_stay_dense():
    params = {"w": jnp.ones((4, 4)), "scales": jnp.ones((4, 4), jnp.float8_e8m0fnu)}
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    pruned, masks = pruner.instant_sparsify(params)
    assert masks["scales"] is None
    assert pruned["scales"] is params["scales"]
    assert int(masks["w"].sum()) == 8
