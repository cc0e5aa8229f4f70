"""Statistics are the sums of what each weight is multiplied with, in any framework and layout."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from tests.calibration.models import draw


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def gram(rows):
    rows = np.asarray(rows, np.float64)
    return rows.T @ rows


@pytest.mark.slow
def test_a_dense_layer_sums_its_inputs_over_all_batches():
    params = {"first": draw(0, 4, 6), "second": draw(1, 6, 2)}

    def model(params, x):
        return jnp.tanh(x @ params["first"]) @ params["second"]

    batches = [draw(2, 5, 4), draw(3, 7, 4)]  # of two sizes
    actual = sparsity.calibrate(model, params, iter(batches), "gram")
    x = np.concatenate(batches)
    close(actual[("first",)].gram, gram(x))
    close(actual[("second",)].gram, gram(np.tanh(x @ params["first"])))
    assert int(actual[("first",)].count) == 12
    squares = sparsity.calibrate(model, params, batches)
    close(squares[("first",)].squares, np.sum(x**2, axis=0))


@pytest.mark.slow
def test_attention_kernels_of_three_axes_keep_the_order_of_the_leaf():
    model = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6)
    x = draw(0, 2, 5, 4)
    params = model.init(jax.random.key(1), x)
    seen = []

    def spy(next_fn, args, kwargs, context):
        if context.module.name == "out" and context.method_name == "__call__":
            seen.append(args[0])
        return next_fn(*args, **kwargs)

    with nn.intercept_methods(spy):
        model.apply(params, x)
    actual = sparsity.calibrate(model.apply, params, [x], "gram")
    out = actual[("params", "out", "kernel")]
    assert (out.contracting, out.output) == ((0, 1), (2,))
    close(out.gram, gram(seen[0].reshape(10, 6)))
    query = actual[("params", "query", "kernel")]
    assert (query.contracting, query.output) == ((0,), (1, 2))
    close(query.gram, gram(x.reshape(10, 4)))


@pytest.mark.slow
def test_layers_of_a_scan_have_statistics_of_their_own():
    params = {"kernel": draw(0, 3, 4, 4)}

    def model(params, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["kernel"])[0]

    x = draw(1, 6, 4)
    actual = sparsity.calibrate(model, params, [x], "gram")[("kernel",)]
    assert (actual.batch, actual.contracting, actual.output) == ((0,), (1,), (2,))
    for layer in range(3):
        close(actual.gram[layer], gram(x))
        x = np.tanh(x @ params["kernel"][layer])


@pytest.mark.slow
def test_a_weight_that_a_scan_repeats_sums_over_its_steps():
    params = {"kernel": draw(0, 4, 4)}

    def model(params, x):
        def step(h, _):
            return jnp.tanh(h @ params["kernel"]), None

        return jax.lax.scan(step, x, None, length=2)[0]

    x = draw(1, 6, 4)
    actual = sparsity.calibrate(model, params, [x], "gram")[("kernel",)]
    close(actual.gram, gram(x) + gram(np.tanh(x @ params["kernel"])))
    assert int(actual.count) == 12


def test_experts_and_branches():
    params = {"experts": draw(0, 3, 4, 5), "one": draw(1, 4, 4), "other": draw(2, 4, 4)}

    def model(params, x):
        x = jax.lax.cond(
            x.sum() > 1e9, lambda h: h @ params["one"], lambda h: h @ params["other"], x
        )
        return jnp.einsum("erk,eko->ero", x.reshape(3, 2, 4), params["experts"])

    x = draw(3, 6, 4)
    actual = sparsity.calibrate(model, params, [x], "gram")
    after = np.asarray(x @ params["other"]).reshape(3, 2, 4)
    for expert in range(3):
        close(actual[("experts",)].gram[expert], gram(after[expert]))
    assert int(actual[("one",)].count) == 0
    close(actual[("other",)].gram, gram(x))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_sum_over_patches(groups):
    layer = nn.Conv(4, (3, 2), strides=(2, 1), padding="VALID", feature_group_count=groups)
    x = draw(0, 2, 7, 5, 4)
    params = layer.init(jax.random.key(1), x)
    actual = sparsity.calibrate(layer.apply, params, [x], "gram")[("params", "kernel")]
    squares = sparsity.calibrate(layer.apply, params, [x])[("params", "kernel")].squares
    patches = np.stack(
        [x[:, i : i + 3, j : j + 2] for i in range(0, 5, 2) for j in range(4)], axis=1
    )  # [batch, places, 3, 2, 4]
    grams = [
        gram(part.reshape(-1, 3 * 2 * 4 // groups))
        for part in np.split(patches.reshape(24, 3, 2, 4), groups, axis=-1)
    ]
    expected = np.stack(grams) if groups > 1 else grams[0]
    close(actual.gram, expected)
    close(squares, np.diagonal(expected, axis1=-2, axis2=-1))
    moments = sparsity.calibrate(layer.apply, params, [x], "moments")[("params", "kernel")]
    close(moments.squares, squares)
    sums = np.split(patches.reshape(24, 3, 2, 4).sum(0), groups, axis=-1)
    close(moments.sums, np.stack([part.ravel() for part in sums]).reshape(moments.sums.shape))
    assert int(actual.count) == 24


def convolve(groups):
    return lambda params, x: jax.lax.conv_general_dilated(
        x, params["kernel"][..., 0], [1], "VALID", feature_group_count=groups
    )


@pytest.mark.parametrize(
    ("model", "kernel", "inputs"),
    [
        pytest.param(lambda p, x: x @ p["kernel"].reshape(4, 3), (1, 4, 3), (6, 4), id="reshape"),
        pytest.param(convolve(1), (4, 4, 3, 1), (2, 4, 5), id="conv", marks=pytest.mark.slow),
        pytest.param(convolve(2), (4, 2, 3, 1), (2, 4, 5), id="groups", marks=pytest.mark.slow),
    ],
)
def test_an_axis_of_length_one_may_be_taken_out_before_the_product(model, kernel, inputs):
    params, x = {"kernel": draw(0, *kernel)}, draw(1, *inputs)
    half = sparsity.WandaPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    pruned, _, report = sparsity.oneshot(half, model, params, [x])
    lost = np.sum(np.square(model(params, x) - model(pruned, x)))
    close(report["kernel",].error, lost / np.sum(np.square(model(params, x))))


@pytest.mark.slow
def test_an_equinox_module_whose_weights_are_transposed():
    model = eqx.nn.MLP(3, 2, 5, 1, key=jax.random.key(0))
    x = draw(1, 6, 3)
    actual = sparsity.calibrate(lambda m, x: jax.vmap(m)(x), model, [x], "gram")
    first = actual[("layers", "0", "weight")]
    assert (first.contracting, first.output) == ((1,), (0,))
    close(first.gram, gram(x))


@pytest.mark.slow
def test_bad_input_is_named():
    params = {"kernel": draw(0, 4, 2)}

    def model(params, x):
        return x @ params["kernel"]

    with pytest.raises(ValueError, match="no batch"):
        sparsity.calibrate(model, params, [])
    with pytest.raises(ValueError, match="kind must be one of"):
        sparsity.calibrate(model, params, [draw(1, 3, 4)], "cubes")
    batches = [draw(1, 3, 4), draw(1, 3, 4).at[1, 1].set(jnp.nan)]
    with pytest.raises(ValueError, match=r"'kernel'.*batch 1"):
        sparsity.calibrate(model, params, batches)
