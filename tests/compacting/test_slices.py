"""Whole slices among frozen entries have a gradient that is a product of the slices alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity import compact, trace
from tests.helpers import slow_but

# {name: (shape, axis of the slices, function)}; the first axis is the stack where a name says so.
IMAGE = ("NHWC", "HWIO", "NHWC")
MODELS = {
    "outputs": ((12, 16), 1, lambda w, x: jnp.tanh(x @ w)),
    "inputs": ((12, 16), 0, lambda w, x: jnp.tanh(x @ w)),
    "outputs, transposed": ((16, 12), 0, lambda w, x: jnp.tanh(x @ w.T)),
    "inputs, from the left": ((16, 12), 1, lambda w, x: w @ x.T),
    "scanned": (
        (3, 12, 12),
        2,
        lambda w, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0],
    ),
    "heads": ((12, 4, 3), 1, lambda w, x: jnp.einsum("bi,ihk->kbh", x, w)),
    "from heads": ((4, 3, 12), 0, lambda w, x: jnp.einsum("bhk,hkd->bd", x.reshape(-1, 4, 3), w)),
    "heads that are apart": (
        (4, 3, 5),
        0,
        lambda w, x: jnp.einsum("bhk,hkd->bdh", x.reshape(-1, 4, 3), w),
    ),
    "experts": ((4, 12, 8), 2, lambda w, x: jnp.einsum("ebi,eio->beo", jnp.stack([x] * 4), w)),
    "inputs of experts": (
        (4, 12, 8),
        1,
        lambda w, x: jnp.einsum("ebi,eio->beo", jnp.stack([x, -x, x, x]), w),
    ),
    "convolution": (
        (3, 3, 3, 8),
        3,
        lambda w, x: jax.lax.conv_general_dilated(
            x.reshape(-1, 2, 2, 3), w, (2, 1), "SAME", dimension_numbers=IMAGE
        ),
    ),
    "inputs of a convolution": (
        (3, 3, 3, 8),
        2,
        lambda w, x: jax.lax.conv_general_dilated(
            x.reshape(-1, 2, 2, 3), w, (2, 1), "SAME", dimension_numbers=IMAGE
        ),
    ),
    "cast": ((12, 16), 1, lambda w, x: jnp.tanh(x.astype(jnp.float32) @ w.astype(jnp.float32))),
    "scaled": ((12, 16), 1, lambda w, x: jnp.tanh(x @ (w * jnp.arange(1.0, 17.0)))),  # dense
}
STACKED = ("scanned", "experts", "inputs of experts")


def draw(name):
    """Returns (function, parameter, mask of a third of the slices, input, graph)."""
    shape, axis, fn = MODELS[name]
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=size)) for size in (shape, (5, 12)))
    mask = np.zeros(shape, np.uint8)
    layers = mask if name in STACKED else mask[None]
    for index, layer in enumerate(layers):
        size = shape[axis]
        count = max(size // 3 - (index if name == "scanned" else 0), 1)  # scans pad
        places = np.sort(rng.choice(size, count, replace=False))
        np.moveaxis(layer, axis - (name in STACKED), 0)[places] = 1
    return fn, w, mask, x, trace(fn, w, x)


@pytest.mark.parametrize("name", slow_but(["outputs", "scanned"], MODELS))
def test_gradients_of_slices_are_those_of_the_dense_parameter(name):
    with jax.enable_x64(True):
        fn, w, mask, x, graph = draw(name)
        model = compact(graph, w, mask, outside="frozen")
        assert model.formats == {(): "slices"}
        np.testing.assert_array_equal(model.masks, mask)
        np.testing.assert_array_equal(model.dense(model.params), w)
        np.testing.assert_array_equal(
            model.dense(model.params * 0 + 7), np.where(mask, 7.0, np.asarray(w))
        )
        np.testing.assert_array_equal(jax.jit(model.apply)(model.params, x), jax.jit(fn)(w, x))

        def grads(apply, w):
            return jax.jit(jax.grad(lambda w, x: jnp.sum(apply(w, x) ** 2), (0, 1)))(w, x)

        dw, dx = grads(model.apply, model.params)
        expected, expected_dx = grads(fn, w)
        tolerance = 1e-5 if name == "cast" else 1e-12  # casts multiply in float32
        np.testing.assert_allclose(dx, expected_dx, rtol=tolerance, atol=tolerance)
        dense = np.asarray(model.dense(dw))
        np.testing.assert_allclose(
            np.where(mask, dense, 0), np.asarray(expected) * mask, rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_pass_of_a_tenth_of_the_channels_takes_fewer_operations(dtype):
    def network(params, x):
        def block(x, layer):
            layer = jax.tree.map(lambda w: w.astype(x.dtype), layer)
            return x + jax.nn.relu(x @ layer["up"]) @ layer["down"], None

        return jax.lax.scan(block, x, params)[0]

    rng = np.random.default_rng(0)
    shapes = {"up": (2, 40, 80), "down": (2, 80, 40)}
    params = {k: jnp.asarray(rng.normal(size=s) / 9, jnp.float32) for k, s in shapes.items()}
    x = jnp.ones((64, 40), dtype)
    graph = trace(network, params, x)
    # S2FT: the channels between the two matrices, with all their entries on both sides.
    chooser = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph),
        sparsity_distribution_fn=sparsity.Uniform(0.9),
    )
    masks = chooser.instant_sparsify(params)[1]
    model = compact(graph, params, masks, outside="frozen")
    assert model.params["up"].shape == (2, 40, 8)
    assert model.params["down"].shape == (2, 8, 40)

    def count(fn, *arguments):
        return jax.jit(fn).lower(*arguments).compile().cost_analysis()["flops"]

    def loss(apply, params):
        return jnp.sum(apply(params, x).astype(jnp.float32) ** 2)

    forward = count(functools.partial(loss, network), params)
    full = count(jax.grad(functools.partial(loss, network)), params) - forward
    both = count(lambda p, m: jax.grad(functools.partial(loss, m.apply))(p), model.params, model)
    # 1 product for the inputs and a tenth for the weights, of 2 in full training; conversions of
    # bfloat16 count, too, and XLA has more of them in some versions.
    assert 0.5 * full < both - forward < 0.7 * full


def test_masks_of_parts_of_slices_keep_values_and_are_no_slices_by_request():
    w, x = jnp.ones((12, 16)), jnp.ones((3, 12))
    graph = trace(lambda w, x: x @ w, w, x)
    corner = np.zeros((12, 16), np.uint8)
    corner[:2, :2] = 1
    assert compact(graph, w, corner, outside="frozen").formats == {(): "values"}
    assert compact(graph, w, np.ones((12, 16)), outside="frozen").formats == {(): "values"}
    with pytest.raises(ValueError, match=r"'slices' for 'params'.*no whole slices"):
        compact(graph, w, corner, outside="frozen", formats={(): "slices"})
    columns = np.zeros((12, 16), np.uint8)
    columns[:, 3:5] = 1
    with pytest.raises(ValueError, match=r"'slices' for 'params'.*outside = 'zero'"):
        compact(graph, w, columns, formats={(): "slices"})
    model = compact(graph, w, columns, outside="frozen")
    times = model.measure(model.params, x, rounds=1)
    assert {*times[()]} == {"values", "slices", "dense"}
    assert "ms slices" in model.report(times)


def test_slices_train_with_the_moments_of_a_full_run_and_under_vmap():
    _, w, mask, x, graph = draw("scanned")
    model = compact(graph, w, mask, outside="frozen")
    moments = np.random.default_rng(1).normal(size=w.shape).astype(np.float32)
    (taken,) = compact(graph, w, mask, (moments,), outside="frozen").opt_state
    np.testing.assert_array_equal(model.dense_state((taken,))[0], moments * mask)

    def grad(x):
        return jax.grad(lambda v: jnp.sum(model.apply(v, x) ** 2))(model.params)

    both = jax.jit(jax.vmap(grad))(jnp.stack([x, -x]))
    np.testing.assert_allclose(both[1], jax.jit(grad)(-x), rtol=1e-5, atol=1e-5)
