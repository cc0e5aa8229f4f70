"""Entries outside the masks stay, in any dtype, and have no dense gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import compact, trace

LAYERS, WIDTH = 6, 64


def scanned(params, x):
    def layer(x, layer):
        weights = layer["w"].astype(x.dtype)
        return jnp.tanh(x @ (weights * layer["scale"].astype(x.dtype))), None

    return jax.lax.scan(layer, x, params)[0]


def draw(dtype, width=WIDTH, density=0.05):
    rng = np.random.default_rng(0)
    shape = (LAYERS, width, width)
    weights = rng.normal(size=shape) / width**0.5
    scale = np.ones((LAYERS, width), np.float32)
    params = {"w": jnp.asarray(weights, dtype), "scale": jnp.asarray(scale)}
    masks = {"w": (rng.random(shape) < density).astype(np.uint8), "scale": None}
    return params, masks, jnp.asarray(rng.normal(size=(4, width)), jnp.bfloat16)


def loss(apply, params, x):
    return jnp.mean(jnp.square(apply(params, x).astype(jnp.float32) - 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_table_counts_the_bytes_of_all_arrays(dtype):
    params, masks, x = draw(dtype)
    model = compact(trace(scanned, params, x), params, masks, outside="frozen")
    arrays = model.params["w"], model.indices["w"], model.frozen["w"]
    (row,) = [line.split() for line in model.report().splitlines() if line.split()[:1] == ["w"]]
    assert row[-3:] == [f"{array.nbytes:,}" for array in arrays]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_train_on_a_base_of_any_dtype_behind_a_cast(dtype):
    params, masks, x = draw(dtype)
    model = compact(trace(scanned, params, x), params, masks, outside="frozen")
    assert model.params["w"].dtype == dtype
    np.testing.assert_array_equal(
        jax.jit(model.apply)(model.params, x).astype(jnp.float32),
        jax.jit(scanned)(params, x).astype(jnp.float32),
    )
    wide = params | {"w": params["w"].astype(jnp.float32)}
    dense = jax.jit(jax.grad(functools.partial(loss, scanned)))(wide, x)["w"]
    values, model_2 = model.params, jax.jit(lambda model: model)(model)
    grads = jax.jit(lambda p, m: jax.grad(functools.partial(loss, m.apply))(p, x))(values, model_2)
    for layer in range(LAYERS):
        at = np.flatnonzero(masks["w"][layer])
        expected = np.asarray(dense[layer]).ravel()[at]
        computed = np.asarray(grads["w"][layer][: len(at)], np.float32)
        np.testing.assert_allclose(
            computed, expected, rtol=0.05, atol=0.02 * np.abs(expected).max()
        )
    merged = model.dense(values | {"w": values["w"] + 1})["w"]
    frozen = masks["w"] == 0
    np.testing.assert_array_equal(
        np.asarray(merged, np.float32)[frozen], np.asarray(params["w"], np.float32)[frozen]
    )
    assert merged.dtype == values["w"].dtype


def test_complex_entries_are_frozen_and_come_back():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(3, 4)) + 1j * rng.normal(size=(3, 4)))}
    x, masks = jnp.ones((2, 3), params["w"].dtype), {"w": np.eye(3, 4, dtype=np.uint8)}
    model = compact(trace(lambda p, x: x @ p["w"], params, x), params, masks, outside="frozen")
    np.testing.assert_array_equal(model.apply(model.params, x), x @ params["w"])
    np.testing.assert_array_equal(model.dense(model.params)["w"], params["w"])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nans_among_frozen_entries_come_back_bit_for_bit_in_every_format(dtype):
    rng, unsigned = np.random.default_rng(0), np.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    shape, infinity = (4, 3, 6), np.asarray(np.inf, jnp.dtype(dtype)).view(unsigned)
    bits = rng.integers(0, np.iinfo(unsigned).max, shape, unsigned, endpoint=True)
    bits[..., ::2] |= infinity  # NaNs of both signs, signalling ones too
    w, mask = bits.view(jnp.dtype(dtype)), np.zeros(shape, np.uint8)
    mask[..., ::3] = 1
    cotangent = rng.integers(1, 100, shape).astype(w.dtype)
    graph = trace(lambda w, x: jnp.einsum("bi,ieo->ebo", x, w), w, jnp.ones((2, 4), w.dtype))
    for name in ("values", "dense"):
        model = compact(graph, w, mask, outside="frozen", formats={(): name})
        for densify in (type(model).dense, jax.jit(type(model).dense)):
            np.testing.assert_array_equal(densify(model, model.params).view(unsigned), bits)
        (grad,) = jax.vjp(model.dense, model.params)[1](jnp.asarray(cotangent))
        np.testing.assert_array_equal(np.sort(grad[grad != 0]), np.sort(cotangent[mask > 0]))


def test_a_step_holds_no_dense_gradient_and_no_copy_of_the_base():
    params, masks, x = draw("float32", width=256, density=0.01)
    model = compact(trace(scanned, params, x), params, masks, outside="frozen")
    assert model.frozen["w"] is params["w"]  # once on the device
    mask = {"w": True, "scale": False}
    tx = optax.partition({True: optax.adam(1e-3), False: optax.set_to_zero()}, mask)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(values, state, model, x):
        grads = jax.grad(functools.partial(loss, model.apply))(values, x)
        updates, state = tx.update(grads, state, values)
        return optax.apply_updates(values, updates), state

    arguments = jax.tree.map(jnp.copy, model.params), tx.init(model.params), model, x
    program = step.lower(*arguments).compile()
    # A layer is a sixth of the weights: the layer and its gradient, each in float32.
    temporaries = program.memory_analysis().temp_size_in_bytes
    assert temporaries < 0.8 * 4 * LAYERS * 256**2
    values, _ = program(*arguments)
    assert not model.frozen["w"].is_deleted()  # donated are values and state alone
    assert values["w"].shape == model.params["w"].shape


def test_zeros_of_a_pruned_base_stay_and_a_part_of_its_weights_is_trained():
    params, _, x = draw("float32")
    pruner = sparsity.MagnitudePruning(
        batch_axes=1,
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=lambda p, _: p == ("w",)),
    )
    pruned, kept = pruner.instant_sparsify(params)
    grads = jax.grad(functools.partial(loss, scanned))(pruned, x)
    scores = jax.tree.map(
        lambda g, mask: g if mask is None else g * mask, grads, kept, is_leaf=lambda x: x is None
    )
    support = pruner.instant_sparsify(scores)[1]
    assert (support["w"] <= kept["w"]).all()
    model = compact(trace(scanned, pruned, x), pruned, support, outside="frozen")
    values = jax.tree.map(lambda v: v + 1, model.params)
    merged = model.dense(values)["w"]
    assert (np.asarray(merged)[np.asarray(kept["w"]) == 0] == 0).all()
    assert ((np.asarray(merged) != np.asarray(pruned["w"])) == (np.asarray(support["w"]) > 0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_models_are_differentiated_twice_and_mapped(dtype):
    params, masks, x = draw("bfloat16")
    x = x.astype(dtype)
    model = compact(trace(scanned, params, x), params, masks, outside="frozen")

    def curvature(apply, values):
        grad = jax.grad(lambda values: loss(apply, values, x))
        ones = jax.tree.map(jnp.ones_like, values)
        return jax.jvp(grad, (values,), (ones,))[1]["w"]

    def dense_apply(values, x):
        return scanned(values | {"w": place(values["w"])}, x)

    def place(values):
        rows = params["w"].reshape(LAYERS, -1)
        return (
            rows.at[jnp.arange(LAYERS)[:, None], model.indices["w"]]
            .set(values, mode="drop")
            .reshape(params["w"].shape)
        )

    exact = curvature(dense_apply, model.params).astype(jnp.float32)
    computed = curvature(model.apply, model.params).astype(jnp.float32)
    np.testing.assert_allclose(computed, exact, rtol=0.1, atol=0.1 * float(jnp.abs(exact).max()))
    both = jax.vmap(
        lambda scale: model.apply(
            jax.tree.map(lambda v: (v * scale).astype(v.dtype), model.params), x
        )
    )(jnp.ones(2))
    np.testing.assert_array_equal(
        both[0].astype(jnp.float32), model.apply(model.params, x).astype(jnp.float32)
    )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_frozen_entries_are_rounded_by_the_cast_of_the_model(dtype):
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(64, 48)) * 1000, dtype)}
    masks = {"w": (rng.random((64, 48)) < 0.3).astype(np.uint8)}
    x = jnp.asarray(rng.normal(size=(8, 64)), jnp.bfloat16)

    def fn(params, x):
        return x @ params["w"].astype(x.dtype)

    graph = trace(fn, params, x)
    model = compact(graph, params, masks, outside="frozen", formats={"w": "values"})
    np.testing.assert_array_equal(jax.jit(model.apply)(model.params, x), jax.jit(fn)(params, x))


def test_groups_among_frozen_entries_are_stored_one_by_one():
    params = {"w": jnp.arange(128.0).reshape(16, 8)}
    graph = trace(lambda params, x: x @ params["w"], params, jnp.ones((1, 16)))
    masks = {"w": np.repeat(np.eye(16, 2, dtype=np.uint8), 4, axis=1)}
    assert set(compact(graph, params, masks).formats.values()) == {"grouped"}
    frozen = compact(graph, params, masks, outside="frozen")
    assert set(frozen.formats.values()) == {"values"}
