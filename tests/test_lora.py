"""Adapters merged into pruned weights: values, sparsity, layouts, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import merge_lora
from tests import helpers
from tests.eight_devices import KINDS, run


def adapter(a_shape, b_shape, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=a_shape), dtype), jnp.asarray(
        rng.normal(size=b_shape), dtype
    )


def pruned(shape=(16, 32), dtype=jnp.float32):
    params = helpers.params(shape=shape, dtype=dtype)
    updater = sparsity.create_updater_from_config({"algorithm": "magnitude", "sparsity": 0.5})
    return updater.instant_sparsify(params)


@pytest.mark.slow
def test_merging_is_the_masked_sum():
    params, masks = pruned()
    a, b = adapter((16, 4), (4, 32))
    merged = merge_lora(params, {"kernel": (a, b), "bias": None}, masks, scale=0.5)
    exact = np.asarray(params["kernel"], np.float64) + 0.5 * np.float64(a) @ np.float64(b)
    expected = np.where(masks["kernel"], exact, 0)
    np.testing.assert_allclose(merged["kernel"], expected, rtol=1e-5, atol=1e-6)
    assert merged["bias"] is params["bias"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sparsity_after_merging_is_that_before(dtype):
    params, masks = pruned(dtype=dtype)
    lora = {"kernel": adapter((16, 4), (4, 32), dtype)}
    merged = merge_lora(params, lora, masks)
    assert merged["kernel"].dtype == dtype
    assert np.array_equal(merged["kernel"] != 0, masks["kernel"] != 0)
    assert helpers.is_positive_zero(merged["kernel"])[np.asarray(masks["kernel"]) == 0].all()
    # Without the masks it is lost.
    dense = merge_lora(params, lora, {"kernel": None, "bias": None})
    assert np.count_nonzero(dense["kernel"]) > 0.99 * dense["kernel"].size


@pytest.mark.parametrize(
    ("weight", "a", "b", "formula"),
    [
        ((6, 8), (6, 2), (2, 8), "ir,ro->io"),
        ((3, 6, 8), (3, 6, 2), (3, 2, 8), "lir,lro->lio"),  # scanned layers
        ((6, 4, 2), (6, 3), (3, 4, 2), "ir,rho->iho"),  # queries: [in, head, out]
        ((4, 2, 6), (4, 2, 3), (3, 6), "hir,ro->hio"),  # what comes out of the heads
        ((5, 6, 4, 2), (5, 6, 3), (5, 3, 4, 2), "lir,lrho->liho"),
    ],
)
def test_axes_of_inputs_outputs_and_batches_are_found(weight, a, b, formula):
    a, b = adapter(a, b)
    zeros, ones = jnp.zeros(weight), jnp.ones(weight, jnp.uint8)
    merged = merge_lora([zeros], [(a, b)], [ones])[0]
    np.testing.assert_allclose(merged, np.einsum(formula, a, b), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_half_precision_is_summed_in_float32_and_rounded_once():
    # In bfloat16 each of the two products is lost beside 1, but not their sum.
    weight, a, b = jnp.ones((1, 1)), jnp.full((1, 2), 2.0**-8), jnp.ones((2, 1))
    weight, a, b = (x.astype(jnp.bfloat16) for x in (weight, a, b))
    merged = merge_lora([weight], [(a, b)], [jnp.ones((1, 1))])[0]
    assert weight + a[0, 0] * b[0, 0] == 1
    assert merged == jnp.bfloat16(1 + 2.0**-7)


@pytest.mark.slow
def test_masks_of_an_optimizer_packed_or_not_give_the_same():
    params = helpers.params(shape=(16, 32))
    lora = {"kernel": adapter((16, 4), (4, 32))}
    results = []
    for packed in (False, True):
        updater = helpers.make_updater("static_sparse", use_packed_masks=packed)
        state = updater.wrap_optax(optax.sgd(0.1)).init(params)
        masks = sparsity.get_sparse_state(state).masks
        results.append(merge_lora(params, lora, masks)["kernel"])
    assert np.array_equal(*results)
    assert 0 < np.count_nonzero(results[0]) < results[0].size


@pytest.mark.slow
def test_a_forward_pass_with_merged_weights_trains_only_what_is_kept():
    params, masks = pruned()
    lora = {"kernel": adapter((16, 4), (4, 32))}
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 16)), jnp.float32)

    @jax.jit
    def grads(lora):
        merge = lambda lora: merge_lora(params, lora, masks, scale=0.5)["kernel"]  # noqa: E731
        return jax.grad(lambda lora: (x @ merge(lora)).sum())(lora)

    da, db = grads(lora)["kernel"]
    a, b = lora["kernel"]
    dw = (x.sum(axis=0)[:, None] * jnp.ones((1, 32))) * (masks["kernel"] > 0)
    np.testing.assert_allclose(da, 0.5 * dw @ b.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(db, 0.5 * a.T @ dw, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("a", "b"),
    [((6, 2), (3, 8)), ((8, 2), (2, 6)), ((6,), (8,)), ((6, 2), (2, 8, 1)), ((2, 6, 2), (2, 2, 8))],
)
def test_an_adapter_that_does_not_fit_is_named(a, b):
    params = {"layer": {"kernel": jnp.ones((6, 8))}}
    with pytest.raises(ValueError, match=r"The adapter of 'layer/kernel' has the shapes A = \("):
        merge_lora(params, {"layer": {"kernel": adapter(a, b)}}, {"layer": {"kernel": None}})


@pytest.mark.parametrize(("weight", "factor"), [(jnp.int32, jnp.float32), (jnp.float32, "c8")])
def test_an_adapter_whose_numbers_the_weight_cannot_hold_is_named(weight, factor):
    adapter = jnp.ones((6, 2), factor), jnp.ones((2, 8))
    with pytest.raises(ValueError, match="cannot hold the adapter of 'w'"):
        merge_lora({"w": jnp.ones((6, 8), weight)}, {"w": adapter}, None)


def test_an_adapter_of_numbers_is_named():
    with pytest.raises(ValueError, match=r"The adapter of 'w' has the shapes A = \(\) and B"):
        merge_lora({"w": jnp.ones((6, 8))}, {"w": (1.0, jnp.ones((2, 6, 2, 8)))}, None)


@pytest.mark.parametrize("scale", [1j, np.ones((3, 1, 1)), np.ones(8)])
def test_a_scale_that_is_no_real_number_is_an_error(scale):
    lora = {"w": (jnp.ones((6, 2)), jnp.ones((2, 8)))}
    with pytest.raises(ValueError, match="scale must be a real number, got scale"):
        merge_lora({"w": jnp.ones((6, 8))}, lora, None, scale=scale)


def test_half_an_adapter_is_named():
    params, masks = pruned()
    with pytest.raises(ValueError, match=r"'kernel' has the shapes A = \(16, 4\) and B = None"):
        merge_lora(params, {"kernel": (jnp.ones((16, 4)), None)}, masks)


@pytest.mark.parametrize("lora", [{"kernal": (0.0, 1.0)}, {"kernel": {"a": 0.0, "b": 1.0}}])
def test_adapters_without_a_weight_are_named(lora):
    params, masks = pruned()
    with pytest.raises(ValueError, match=r"lora has leaves at 'kern.*give a tuple \(A, B\)"):
        merge_lora(params, lora, masks)


def test_masks_of_another_model_are_refused():
    params, masks = pruned()
    with pytest.raises(ValueError, match="The masks have nothing for 'bias'"):
        merge_lora(params, {}, {"kernel": masks["kernel"]})


@KINDS
@pytest.mark.slow
def test_on_eight_devices_merged_weights_lie_where_the_weights_lie(kind):
    run("lora", kind)
