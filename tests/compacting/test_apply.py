"""A compact model computes what the masked model computes: values, gradients, bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import io_callback

from sparsity import compact, trace
from tests.compacting.models import FIRST_ORDER, MODELS, masked
from tests.helpers import slow_but


def loss(apply):
    """Returns the sum of squares of all outputs, and the outputs."""

    def run(params, x):
        outputs = apply(params, x)
        return sum((y**2).sum() for y in jax.tree.leaves(outputs)), outputs

    return run


def kept(arrays, masks):
    """Kept entries by numpy, for masks whose slices are not padded."""
    return [np.asarray(x)[np.asarray(mask) > 0] for x, mask in zip(arrays, masks, strict=True)]


@pytest.mark.parametrize("name", slow_but(["scanned", "experts_and_heads", "convolutions"], MODELS))
def test_values_have_the_bits_and_gradients_the_numbers_of_the_masked_model(name):
    with jax.enable_x64(True):
        fn, params, masks, x, graph = masked(name)
        model = compact(graph, params, masks)
        if name == "while_loop":
            expected, values = jax.jit(fn)(params, x), jax.jit(model.apply)(model.params, x)
            np.testing.assert_array_equal(values, expected)
            return
        run = jax.jit(jax.grad(loss(fn), (0, 1), has_aux=True))
        (dense, dense_x), expected = run(params, x)
        run = jax.jit(jax.grad(loss(model.apply), (0, 1), has_aux=True))
        (grads, grads_x), values = run(model.params, x)
        for one, other in zip(jax.tree.leaves(values), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(grads_x, dense_x, rtol=1e-12, atol=1e-12)
        grads = kept(model.dense(grads), masks)
        for one, other in zip(grads, kept(dense, masks), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [3.0, -2.0, 0.0, np.inf, np.nan])
def test_multiples_of_a_parameter_have_the_bits_of_the_masked_model_also_at_zeros(factor):
    def fn(w, x):
        scaled = w * factor
        return x @ scaled, x @ (w / factor), jax.lax.bitcast_convert_type(scaled, jnp.uint32)

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for _ in range(2))
    mask = np.eye(4, dtype=np.uint8)
    w = jnp.where(mask, w, 0)  # a product with the mask has zeros of both signs
    model = compact(trace(fn, w, x), w, mask)
    for values, expected in zip(model.apply(model.params, x), fn(w, x), strict=True):
        np.testing.assert_array_equal(values, expected)


def test_layers_are_taken_from_a_stack_without_a_dense_copy():
    def fn(w, x):
        for layers in (w[1:3], jax.lax.slice_in_dim(w, 0, 5, 2)):
            x = jax.lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, layers)[0]
        return x

    rng = np.random.default_rng(0)
    # Sums of integers are exact, in whichever order a version of XLA adds.
    w, x = (jnp.float32(rng.integers(-9, 10, size)) for size in ((5, 6, 6), (2, 6)))
    mask = (rng.random(w.shape) < 0.5).astype(np.uint8)
    model = compact(trace(fn, w, x), w * mask, mask)
    np.testing.assert_array_equal(model.apply(model.params, x), fn(w * mask, x))
    assert "tensor<5x6x6x" not in jax.jit(model.apply).lower(model.params, x).as_text()


def test_equal_layers_of_groups_are_traced_and_lowered_once():
    def count_products(num_layers):
        rng = np.random.default_rng(0)
        params = [jnp.asarray(rng.normal(size=(16, 16)), jnp.float32) for _ in range(num_layers)]
        rows = [rng.permutation(16) < 4 for _ in params]
        masks = [np.repeat(kept[:, None], 16, axis=1) for kept in rows]
        x = jnp.ones((4, 16))
        fn = lambda params, x: functools.reduce(jnp.matmul, params, x)  # noqa: E731
        model = compact(
            trace(fn, params, x),
            params,
            masks,
            formats=dict.fromkeys(map(str, range(num_layers)), "grouped"),
        )
        gradient = jax.grad(lambda params: loss(model.apply)(params, x)[0])
        return jax.jit(gradient).lower(model.params).as_text().count("stablehlo.dot_general")

    assert count_products(7) == count_products(4) > 0


@jax.default_matmul_precision("default")
def test_products_of_equal_shapes_keep_their_axes_and_precision():
    rng = np.random.default_rng(0)
    x, *params = (jnp.asarray(rng.normal(size=(16, 16)), jnp.float32) for _ in range(5))
    masks = [rng.permutation(256).reshape(16, 16) < 64 for _ in params]

    def fn(params, x):
        x = x @ params[0] @ params[1].T
        x = jnp.matmul(x, params[2], precision="highest")
        return params[3] @ x

    model = compact(trace(fn, params, x), params, masks)
    masked = [np.where(mask, w, 0) for mask, w in zip(masks, params, strict=True)]
    np.testing.assert_array_equal(jax.jit(model.apply)(model.params, x), jax.jit(fn)(masked, x))
    text = jax.jit(model.apply).lower(model.params, x).as_text()
    assert text.count("precision = [HIGHEST, HIGHEST]") == 1


@pytest.mark.parametrize("name", ["scanned_along_axis_1", "split", "custom_vjp"])
def test_second_derivatives_are_those_of_the_masked_model(name):
    assert name not in FIRST_ORDER
    with jax.enable_x64(True):
        fn, params, masks, x, graph = masked(name)
        model = compact(graph, params, masks)

        def second(apply, params):
            first = jax.grad(lambda params: loss(apply)(params, x)[0])
            squares = jax.grad(lambda p: sum((g**2).sum() for g in jax.tree.leaves(first(p))))
            return jax.jvp(first, (params,), (params,))[1], squares(params)

        # Entries outside the masks add to the sum of squares: mask them.
        held = lambda params, x: fn([w * m for w, m in zip(params, masks, strict=True)], x)  # noqa: E731
        expected = jax.jit(lambda p: second(held, p))(params)
        computed = jax.jit(lambda p: second(model.apply, p))(model.params)
        for tree, dense in zip(computed, expected, strict=True):
            for one, other in zip(kept(model.dense(tree), masks), kept(dense, masks), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


def test_callbacks_get_the_masked_parameter():
    seen = []

    def fn(params, x):
        jax.debug.callback(seen.append, params)
        offset = io_callback(lambda w: w[0], jax.ShapeDtypeStruct((3,), x.dtype), params)
        return x @ params + offset

    params, mask, x = jnp.ones((2, 3)), np.eye(2, 3, dtype=np.uint8), jnp.ones((1, 2))
    model = compact(trace(fn, params, x), params, mask)
    assert model.apply(model.params, x).tolist() == [[2, 1, 0]]
    jax.effects_barrier()
    np.testing.assert_array_equal(seen, [mask])


def test_models_are_mapped_exported_and_run_at_other_batch_sizes():
    fn, params, masks, x, graph = masked("scanned")
    model = compact(graph, params, masks)
    expected = fn(params, x)
    rows = jax.jit(jax.vmap(lambda row: model.apply(model.params, row[None])[0]))(x)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model.apply(model.params, x[:2]), fn(params, x[:2]))
    call = jax.jit(lambda model, params, x: model.apply(params, x))
    np.testing.assert_array_equal(call(model, model.params, x), jax.jit(fn)(params, x))
    exported = export.export(jax.jit(model.apply))(model.params, x)
    np.testing.assert_array_equal(exported.call(model.params, x), jax.jit(fn)(params, x))
    pairs = jax.tree.map(lambda values: jnp.stack([values, 2 * values]), model.params)
    both = jax.vmap(model.apply, (0, None))(pairs, x)
    twice = fn([2 * w for w in params], x)
    np.testing.assert_allclose(both, jnp.stack([expected, twice]), rtol=1e-5, atol=1e-6)


def test_symbolic_sizes_are_refused_with_the_way_to_export_them():
    params, mask, x = jnp.ones((2, 3)), np.eye(2, 3, dtype=np.uint8), jnp.ones((1, 2))
    model = compact(trace(lambda w, x: x @ w, params, x), params, mask)
    rows = jax.ShapeDtypeStruct((*export.symbolic_shape("rows"), 2), x.dtype)
    with pytest.raises(ValueError, match=r"\(rows, 3\).*jax.vmap of lambda row: model.apply"):
        export.export(jax.jit(model.apply))(model.params, rows)
    by_row = jax.vmap(lambda params, row: model.apply(params, row[None])[0], (None, 0))
    exported = export.export(jax.jit(by_row))(model.params, rows)
    np.testing.assert_array_equal(exported.call(model.params, jnp.ones((3, 2))), [[1, 1, 0]] * 3)


def test_models_without_products_of_symbolic_sizes_are_exported():
    table, mask, tokens = jnp.ones((2, 3)), np.eye(2, 3, dtype=np.uint8), jnp.zeros(1, jnp.int32)
    model = compact(trace(lambda table, tokens: table[tokens], table, tokens), table, mask)
    rows = jax.ShapeDtypeStruct(export.symbolic_shape("rows"), tokens.dtype)
    exported = export.export(jax.jit(model.apply))(model.params, rows)
    np.testing.assert_array_equal(exported.call(model.params, jnp.array([1, 0])), mask[::-1])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64, jnp.float8_e4m3fn])
def test_narrow_and_complex_parameters_keep_their_bits(dtype):
    rng = np.random.default_rng(0)
    mask = (rng.random((8, 8)) < 0.5).astype(np.uint8)
    params = jnp.where(mask, jnp.asarray(rng.normal(size=(8, 8)), dtype), jnp.zeros((), dtype))
    x = jnp.asarray(rng.normal(size=(3, 8)), jnp.float32 if dtype == jnp.float8_e4m3fn else dtype)

    def fn(params, x):
        return x @ params.astype(x.dtype)

    model = compact(trace(fn, params, x), params, mask)
    assert model.params.dtype == dtype
    assert model.params.shape == (mask.sum(),)
    np.testing.assert_array_equal(
        jax.jit(model.apply)(model.params, x).astype(jnp.complex64),
        jax.jit(fn)(params, x).astype(jnp.complex64),
    )


def test_frozen_entries_take_part_and_are_not_trained():
    fn, _, masks, x, graph = masked("scanned_along_axis_1")
    rng = np.random.default_rng(1)
    params = [jnp.asarray(rng.normal(size=mask.shape), jnp.float32) for mask in masks]
    model = compact(graph, params, masks, outside="frozen")
    np.testing.assert_array_equal(jax.jit(model.apply)(model.params, x), jax.jit(fn)(params, x))
    grads = jax.grad(lambda p: loss(model.apply)(p, x)[0])(model.params)
    dense = jax.grad(lambda p: loss(fn)(p, x)[0])(params)
    moved = model.dense(jax.tree.map(lambda w, g: w - 0.1 * g, model.params, grads))[0]
    expected = np.where(masks[0] > 0, params[0] - 0.1 * dense[0], params[0])
    np.testing.assert_allclose(moved, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(moved[masks[0] == 0], params[0][masks[0] == 0])


def loop(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0]


def loop_in_loop(params, x):
    return jax.lax.scan(lambda x, w: (loop({"w": w}, x), None), x, params["w"])[0]


def unrolled(params, x):
    return functools.reduce(lambda x, w: jnp.tanh(x @ w), params["w"][0], x)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [loop, loop_in_loop, unrolled])
def test_products_of_bfloat16_have_the_bits_and_gradients_of_the_masked_model(fn):
    rng = np.random.default_rng(0)
    shape = (3, 6, 6) if fn is loop else (2, 3, 6, 6)
    params = {"w": jnp.asarray(rng.normal(size=shape), jnp.bfloat16)}
    masks = {"w": (rng.random(shape) < 0.5).astype(np.uint8)}
    x = jnp.asarray(rng.normal(size=(4, 6)), jnp.bfloat16)
    masked = jax.tree.map(lambda param, mask: param * mask, params, masks)
    model = compact(trace(fn, params, x), params, masks)

    def loss(fn, params):
        return fn(params, x).astype(jnp.float32).sum()

    np.testing.assert_array_equal(model.apply(model.params, x), fn(masked, x))
    grads = jax.jit(jax.grad(functools.partial(loss, model.apply)))(model.params)
    expected = jax.jit(jax.grad(functools.partial(loss, fn)))(masked)["w"] * masks["w"]
    np.testing.assert_array_equal(model.dense(grads)["w"], expected)
