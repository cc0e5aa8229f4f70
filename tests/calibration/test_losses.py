"""Errors of one-shot pruning on a CPU, from programs that the run needs anyway."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from tests.helpers import counted_programs

HALF = sparsity.Uniform(0.5, filter_fn=lambda *_: True)


def convolve(w, x, **options):
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


PRODUCTS = {  # a product, the shapes of its weight and of its inputs
    "dot": (lambda w, x: x @ w, (6, 4), (5, 6)),
    "weight first": (lambda w, x: w @ x.T, (4, 6), (5, 6)),
    "heads": (lambda w, x: jnp.einsum("tea,ahe->th", x, w), (3, 4, 6), (5, 6, 3)),
    "experts": (lambda w, x: jnp.einsum("ebi,eio->ebo", x, w), (3, 6, 4), (3, 5, 6)),
    "convolution": (
        lambda w, x: convolve(w, x, window_strides=(2,), padding=[(2, 1)], rhs_dilation=(2,)),
        (3, 2, 4),
        (3, 9, 2),
    ),
    "groups": (
        lambda w, x: convolve(w, x, window_strides=(1,), padding="SAME", feature_group_count=2),
        (3, 2, 6),
        (3, 7, 4),
    ),
}


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", PRODUCTS)
def test_errors_are_the_lost_outputs_of_any_product(name):
    product, shape, inputs = PRODUCTS[name]
    params, batches = {"w": draw(*shape)}, [draw(*inputs), 3 * draw(*inputs)]
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=HALF)
    pruned, _, report = sparsity.oneshot(
        pruner, lambda p, x: product(p["w"], x), params, batches, held=()
    )
    lost, total = (
        sum(np.sum(np.float64(product(w, x)) ** 2) for x in batches)
        for w in (params["w"] - pruned["w"], params["w"])
    )
    assert 0 < report["w",].error < 1
    assert report["w",].error == pytest.approx(lost / total, rel=1e-5)


def test_outputs_of_few_digits_are_summed_in_float32():
    params, x = {"w": jnp.asarray(draw(64, 4), jnp.bfloat16)}, jnp.asarray(draw(9, 64))
    x = x.astype(jnp.bfloat16)
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=HALF)
    pruned, _, report = sparsity.oneshot(pruner, lambda p, x: x @ p["w"], params, [x], held=())
    w, new, rows = (np.float64(each) for each in (params["w"], pruned["w"], x))
    error = np.sum((rows @ (w - new)) ** 2) / np.sum((rows @ w) ** 2)
    assert report["w",].error == pytest.approx(error, rel=1e-5)  # three digits of bfloat16


def test_held_batches_of_several_shapes_add_up_over_leading_axes():
    params = {"w": draw(6, 4)}
    held = [draw(2, 3, 6), draw(5, 1, 6)]
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=HALF)
    pruned, _, report = sparsity.oneshot(
        pruner, lambda p, x: (x @ p["w"] + 1, x.shape), params, held[:1], held=held
    )
    rows = np.float64(np.concatenate([x.reshape(-1, 6) for x in held]))
    expected, returned = rows @ params["w"] + 1, rows @ np.float64(pruned["w"]) + 1
    lost = np.sum((expected - returned) ** 2)
    spread = np.sum((expected - expected.mean(0)) ** 2)
    assert report.outputs.error == pytest.approx(lost / np.sum(expected**2), rel=1e-5)
    assert report.outputs.unexplained == pytest.approx(lost / spread, rel=1e-5)


def two_products(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


def products_in_a_loop(p, x):
    step = lambda h, _: (jnp.tanh(h @ p["a"]) @ p["b"], None)  # noqa: E731
    return jax.lax.scan(step, x, None, length=3)[0]


def loop_beside_products(p, x):
    return jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h), x) @ p["a"] @ p["b"]


def branch_beside_products(p, x):
    return jax.lax.cond(x.sum() > 0, jnp.tanh, jnp.sin, x) @ p["a"] @ p["b"]


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize(
    "model", [two_products, products_in_a_loop, loop_beside_products, branch_beside_products]
)
def test_a_second_run_compiles_nothing_and_reads_the_functions_of_today(model, sequential):
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=HALF)
    params, batches = {"a": draw(6, 8), "b": draw(8, 6)}, [draw(9, 6), draw(9, 6)]

    def run(factor):
        fn = lambda p, x: factor * model(p, x)  # noqa: E731
        with counted_programs() as count:
            report = sparsity.oneshot(pruner, fn, params, batches, sequential=sequential)[2]
        return count[0], report.outputs.error, report["b",].error

    first, again, other = run(2.0), run(2.0), run(np.arange(6, dtype=np.float32))
    assert first[0] > 0
    assert again == (0, *first[1:])
    assert other[1] != first[1]


def test_a_weight_that_a_loop_reads_along_two_axes_is_fitted_to_the_first():
    params, x = {"w": draw(6, 4)}, draw(9, 6)

    def fn(p, x):
        step = lambda h, _: (jnp.tanh(h @ p["w"]) @ p["w"].T, None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=2)[0]

    pruned, masks, report = sparsity.oneshot(
        sparsity.WandaPruning(sparsity_distribution_fn=HALF), fn, params, [x]
    )
    w, rows = np.float64(params["w"]), [np.float64(x)]
    rows.append(np.tanh(x @ w) @ w.T)
    rows = np.concatenate(rows)
    scores = np.abs(w) * np.sqrt((rows**2).sum(0))[:, None]
    kept = scores >= np.sort(scores, axis=0)[3]  # half of the inputs of each output
    np.testing.assert_array_equal(masks["w"], kept)
    lost = np.sum((rows @ (w - np.float64(pruned["w"]))) ** 2)
    assert report["w",].error == pytest.approx(lost / np.sum((rows @ w) ** 2), rel=1e-5)
