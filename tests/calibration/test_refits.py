"""Refits against normal equations and a plain program, and what all methods leave of outputs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sparsity
from sparsity.calibration import prune, relative_error
from tests import helpers
from tests.calibration import oracles

KINDS = {"50 %": sparsity.Unstructured(), "2:4": sparsity.NByM(2, 4, axis=0)}


def wanda(kind=KINDS["50 %"], half=0.5):
    return sparsity.WandaPruning(sparsity_distribution_fn=helpers.uniform(half), sparsity_type=kind)


def refitted(pruner, refit, weights, x):
    """Weights and mask, [outputs, inputs], of a kernel."""
    kernel, statistics = jnp.asarray(weights.T), {(): oracles.make_statistic(x)}
    pruned, mask = prune(pruner, kernel, statistics, refit)
    return np.asarray(pruned).T, np.asarray(mask).T


# Least squares


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_least_squares_are_those_of_the_normal_equations(kind):
    weights, x, _ = oracles.layer()
    with jax.enable_x64(True):
        pruned, mask = refitted(wanda(kind), sparsity.LeastSquares(), weights, x)
        before = refitted(wanda(kind), None, weights, x)[0]
    np.testing.assert_allclose(pruned, oracles.least_squares(weights, mask, x.T @ x), rtol=1e-7)
    gradient = (pruned - weights) @ x.T @ x
    assert np.linalg.norm(gradient * mask) <= 1e-8 * np.linalg.norm(weights @ x.T @ x)
    lost, lost_before = (oracles.error(x, w - weights) for w in (pruned, before))
    assert (lost <= lost_before).all()
    assert helpers.is_positive_zero(pruned)[mask == 0].all()


@pytest.mark.slow
def test_least_squares_take_masks_with_outputs_of_any_number_of_weights():
    weights, x, _ = oracles.layer()
    pruner = helpers.make_updater("magnitude")
    with jax.enable_x64(True):
        pruned, mask = refitted(pruner, sparsity.LeastSquares(), weights, x)
    np.testing.assert_allclose(pruned, oracles.least_squares(weights, mask, x.T @ x), rtol=1e-7)


@pytest.mark.slow
def test_supports_of_more_than_two_blocks_are_factored_exactly():
    weights, x, _ = oracles.layer(600, 3, 900)
    with jax.enable_x64(True):
        pruned, mask = refitted(wanda(), sparsity.LeastSquares(), weights, x)
    np.testing.assert_allclose(pruned, oracles.least_squares(weights, mask, x.T @ x), rtol=1e-7)


@pytest.mark.slow
def test_outputs_that_keep_the_same_inputs_are_factored_once_and_exactly(monkeypatch):
    monkeypatch.setattr(lax, "map", None)  # one by one
    weights, x, _ = oracles.layer()
    mask = np.outer(np.arange(16) % 5 > 0, np.arange(24) % 3 > 0).astype(np.uint8)
    with jax.enable_x64(True):
        kernel, kept = jnp.asarray(weights.T), jnp.asarray(mask.T)
        actual, _ = sparsity.LeastSquares()(
            kernel, kernel * kept, kept, oracles.make_statistic(x), None
        )
    np.testing.assert_allclose(actual.T, oracles.least_squares(weights, mask, x.T @ x), rtol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_output_gets_worse_where_rows_are_few_and_inputs_dead(dtype):
    weights, x, _ = oracles.layer(rows=10, dtype=np.float32)
    x[:, [1, 5]] = 0
    kernel = jnp.asarray(weights.T, dtype)
    seen = oracles.make_statistic(x)
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.5))
    before, _ = pruner.instant_sparsify(kernel)
    with pytest.warns(UserWarning, match=r"'params' has 10 rows for 24 inputs"):
        pruned, _ = prune(pruner, kernel, {(): seen}, sparsity.LeastSquares())
    assert pruned.dtype == kernel.dtype
    lost, lost_before = (
        oracles.error(x, np.asarray(w - kernel, np.float32).T) for w in (pruned, before)
    )
    assert (lost <= lost_before * (1 + 1e-5)).all()
    assert lost.sum() < 0.5 * lost_before.sum()
    np.testing.assert_array_equal(pruned[jnp.array([1, 5])], before[jnp.array([1, 5])])


@pytest.mark.slow
def test_least_squares_refit_what_a_traced_mask_keeps():
    weights, x, _ = oracles.layer()
    with jax.enable_x64(True):
        kernel, statistics = jnp.asarray(weights.T), {(): oracles.make_statistic(x)}
        run = jax.jit(lambda kernel: prune(wanda(), kernel, statistics, sparsity.LeastSquares()))
        pruned, mask = (np.asarray(leaf).T for leaf in run(kernel))
    np.testing.assert_allclose(pruned, oracles.least_squares(weights, mask, x.T @ x), rtol=1e-7)


# ADMM


def test_a_refit_that_makes_a_leaf_worse_is_not_kept():
    class Worse:
        def __call__(self, dense, pruned, mask, statistic, select):
            return 2 * pruned, 1 - mask

    weights, x, _ = oracles.layer()
    kernel = jnp.asarray(weights.T, jnp.float32)
    statistics = {(): oracles.make_statistic(x)}
    expected = prune(wanda(), kernel, statistics)
    pruned, mask = prune(wanda(), kernel, statistics, Worse())
    np.testing.assert_array_equal(pruned, expected[0])
    np.testing.assert_array_equal(mask, expected[1])


@pytest.mark.parametrize("under_jit", [False, True])
def test_what_a_refit_of_ones_own_returns_is_0_outside_its_mask_and_finite_or_not_kept(under_jit):
    weights, x, _ = oracles.layer()
    kernel = jnp.asarray(weights.T, jnp.float32)
    expected = prune(wanda(), kernel, {(): oracles.make_statistic(x)})
    refits = [
        lambda dense, pruned, mask, *_: (dense, mask),
        lambda dense, pruned, mask, *_: (pruned * jnp.nan, mask),
    ]
    for refit in refits:
        run = functools.partial(prune, wanda(), refit=refit)
        run = jax.jit(run) if under_jit else run
        pruned, mask = run(kernel, {(): oracles.make_statistic(x)})
        np.testing.assert_array_equal(pruned, expected[0])
        np.testing.assert_array_equal(mask, expected[1])


@pytest.mark.parametrize("kind", ["gram", "squares"])
@pytest.mark.parametrize(
    "convert", [lambda mask: mask * 0.5, lambda mask: -mask.astype(int), lambda mask: mask > 0]
)
def test_masks_of_a_refit_of_ones_own_become_zeros_and_ones(kind, convert):
    class Converted:
        statistics_kind = kind

        def __call__(self, dense, pruned, mask, statistic, select):
            return pruned, convert(mask)

    weights, x, _ = oracles.layer()
    kernel, statistics = jnp.asarray(weights.T, jnp.float32), {(): oracles.make_statistic(x)}
    pruned, mask = prune(wanda(), kernel, statistics, Converted())
    expected = prune(wanda(), kernel, statistics)
    assert mask.dtype == jnp.uint8
    np.testing.assert_array_equal(mask, expected[1])
    np.testing.assert_array_equal(pruned, expected[0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
def test_wider_weights_of_a_refit_get_the_dtype_of_the_parameter(dtype):
    def widened(dense, pruned, mask, *_):
        return pruned.astype(jnp.float32), mask

    weights, x, _ = oracles.layer()
    kernel, statistics = jnp.asarray(weights.T, dtype), {(): oracles.make_statistic(x)}
    pruned, _ = prune(wanda(), kernel, statistics, widened)
    assert pruned.dtype == dtype
    expected = prune(wanda(), kernel, statistics)[0]
    np.testing.assert_array_equal(pruned.astype(float), expected.astype(float))


class Scaled:
    """Scales kept weights to the sum of squares that dense ones have."""

    statistics_kind = "squares"

    def __call__(self, dense, pruned, mask, statistic, select):
        squares = statistic.sums_of_squares()[..., None, :]
        first, last = (jnp.sum(statistic.to_matrices(w) ** 2 * squares) for w in (dense, pruned))
        return pruned * jnp.sqrt(first / last), mask


@pytest.mark.parametrize("sequential", [True, False])
def test_a_refit_of_ones_own_may_need_squares_alone(sequential):
    weights, x, _ = oracles.layer(rows=10, dtype=np.float32)
    kernel, run = jnp.asarray(weights.T), functools.partial(sparsity.oneshot, sequential=sequential)
    first, mask, before = run(wanda(), lambda w, x: x @ w, kernel, [x])
    new, kept, report = run(wanda(), lambda w, x: x @ w, kernel, [x], Scaled())
    np.testing.assert_array_equal(kept, mask)
    squares = np.square(x).sum(0)
    scale = np.sqrt((squares @ weights.T**2).sum() / (squares @ np.square(first)).sum())
    np.testing.assert_allclose(new, scale * first, rtol=1e-5)
    assert report[()].unrefitted == pytest.approx(before[()].error, rel=1e-5)
    lost = np.square(x @ (new - kernel)).sum() / np.square(x @ kernel).sum()
    assert report[()].error == pytest.approx(lost, rel=1e-4)
    statistics = sparsity.calibrate(lambda w, x: x @ w, kernel, [x], kind="squares")
    np.testing.assert_allclose(prune(wanda(), kernel, statistics, Scaled())[0], new, rtol=1e-5)
    statistics = {(): dataclasses.replace(statistics[()], squares=statistics[()].squares * 0)}
    with pytest.warns(UserWarning, match="met nothing but zeros"):
        unscaled, _ = prune(wanda(), kernel, statistics, Scaled())  # the scale is 0 / 0
    assert np.isfinite(unscaled).all()


@pytest.mark.parametrize("kind", ["gram", "squares"])
@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda dense, pruned, mask, *_: None, "None"),
        (lambda dense, pruned, mask, *_: (pruned, mask, mask), r"\(\(\d+, \d+\), .*\), .*\)\)"),
        (lambda dense, pruned, mask, *_: (pruned[:1], mask), r"\(\(1, \d+\), \(\d+, \d+\)\)"),
        (lambda dense, pruned, mask, *_: ("a", mask), r"\(\(\), "),
        (lambda dense, pruned, mask, *_: pruned, r"one array of shape \(\d+, \d+\)\.$"),
        (lambda dense, pruned, mask, *_: [0] * 99, r"\[0, 0, 0, 0, 0, 0, \.\.\.\]\.$"),
        (lambda dense, pruned, mask, *_: (pruned + 1j, mask), "weights of complex64: .*lose"),
        (lambda dense, pruned, mask, *_: (pruned.astype(int), mask), "weights of int"),
        (lambda dense, pruned, mask, *_: (pruned.tolist(), mask), "weights of list"),
        (lambda dense, pruned, mask, *_: (pruned, mask + 0j), "a mask of complex"),
    ],
)
def test_a_refit_that_returns_other_things_is_named_with_its_parameter(returned, got, kind):
    class Returning:
        statistics_kind = kind

        def __call__(self, *args):
            return returned(*args)

    weights, x, _ = oracles.layer()
    kernel = jnp.asarray(weights.T, jnp.float32)
    message = rf"Returning must return .weights, mask. of 'w'.* got {got}"
    with pytest.raises(ValueError, match=message):
        prune(wanda(), {"w": kernel}, {("w",): oracles.make_statistic(x)}, Returning())


def test_a_function_as_a_refit_is_named_by_its_own_name():
    weights, x, _ = oracles.layer()
    kernel = jnp.asarray(weights.T, jnp.float32)
    for refit in (lambda *args: None, functools.partial(lambda *args: None)):
        with pytest.raises(ValueError, match="the function <lambda> must return"):
            prune(wanda(), {"w": kernel}, {("w",): oracles.make_statistic(x)}, refit)


@pytest.mark.slow
def test_admm_on_a_mask_is_that_of_a_plain_program():
    weights, x, _ = oracles.layer()
    with jax.enable_x64(True):
        pruned, mask = refitted(wanda(), sparsity.ADMM(), weights, x)
    np.testing.assert_array_equal(mask, oracles.wanda(weights, (x**2).sum(0), 0.5))
    np.testing.assert_allclose(pruned, oracles.admm(weights, x.T @ x, mask)[0], atol=1e-10)


def test_admm_finds_the_mask_of_a_plain_program():
    weights, x, _ = oracles.layer()
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.6))
    options = {"iterations": 9, "gradual": 5, "rho": 0.7, "damping": 0.2}
    with jax.enable_x64(True):
        pruned, mask = refitted(pruner, sparsity.ADMM(**options), weights, x)
    expected = oracles.admm(weights, x.T @ x, None, sparsity_=0.6, **options)
    np.testing.assert_array_equal(mask, expected[1])
    np.testing.assert_allclose(pruned, expected[0], atol=1e-10)


@pytest.mark.parametrize("pruner", [sparsity.WandaPruning, sparsity.MagnitudePruning])
@pytest.mark.parametrize("kind", KINDS)
def test_gradual_admm_finds_the_mask_of_the_source_whatever_the_pruner_compares(kind, pruner):
    weights, x, _ = oracles.layer(48, 24, seed=1)
    options = {"sparsity_distribution_fn": helpers.uniform(0.5), "sparsity_type": KINDS[kind]}
    with jax.enable_x64(True):
        pruned, mask = refitted(pruner(**options), sparsity.ADMM(gradual=15), weights, x)
    nm = (2, 4) if kind == "2:4" else None
    expected = oracles.admm(weights, x.T @ x, None, gradual=15, sparsity_=0.5, nm=nm)
    np.testing.assert_array_equal(mask, expected[1])
    np.testing.assert_allclose(pruned, expected[0], atol=1e-10)
    assert helpers.is_positive_zero(pruned)[mask == 0].all()


def test_gradual_admm_chooses_in_each_expert_by_itself():
    layers = [oracles.layer(12, 6, seed=seed) for seed in range(3)]
    stack, grams = (np.stack(x) for x in zip(*[(w.T, x.T @ x) for w, x, _ in layers], strict=True))
    axes = {"contracting": (1,), "output": (2,), "batch": (0,)}
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.6))
    with jax.enable_x64(True):
        seen = {(): sparsity.Statistic(gram=jnp.asarray(grams), count=96, **axes)}
        pruned, masks = prune(pruner, jnp.asarray(stack), seen, sparsity.ADMM(gradual=5))
    for actual, mask, (weights, x, _) in zip(pruned, masks, layers, strict=True):
        expected = oracles.admm(weights, x.T @ x, None, gradual=5, sparsity_=0.6)
        np.testing.assert_array_equal(mask.T, expected[1])
        np.testing.assert_allclose(actual.T, expected[0], atol=1e-10)


def test_gradual_admm_keeps_blocks_and_refuses_scopes_that_compare_leaves():
    weights, x, _ = oracles.layer()
    blocks = wanda(sparsity.Block((4, 4)))
    _, mask = refitted(blocks, sparsity.ADMM(gradual=4), weights, x)
    each = mask.reshape(4, 4, 6, 4).sum((1, 3))
    assert sorted(each.ravel()) == [0] * 12 + [16] * 12
    pruner = sparsity.GlobalMagnitudePruning(sparsity=0.5)
    with pytest.raises(ValueError, match=r"mask of 'params' alone.*got Global.*ADMM\(gradual=0\)"):
        refitted(pruner, sparsity.ADMM(gradual=4), weights, x)
    refitted(pruner, sparsity.ADMM(), weights, x)


def test_admm_leaves_weights_of_dead_inputs_to_the_pruner():
    weights, x, _ = oracles.layer()
    x[:, 3] = 0
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.5))
    with jax.enable_x64(True):
        pruned, mask = refitted(pruner, sparsity.ADMM(), weights, x)
    assert np.isfinite(pruned).all()
    np.testing.assert_array_equal(pruned[:, 3], weights[:, 3] * mask[:, 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"gradual": 30}, "gradual must be at most 20"),
        ({"rho": 0}, "rho must be above 0"),
        ({"damping": -1}, "damping must be a finite number >= 0"),
    ],
)
def test_options_of_admm_are_checked_when_it_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        sparsity.ADMM(**options)


# What is left of the outputs


@pytest.fixture(scope="module")
def errors():
    """Errors of held-out outputs against Wanda's, means over four layers."""

    def measure_errors(kind, seed):
        weights, x, held_out = oracles.layer(64, 48, 512, rank=32, seed=seed, dtype=np.float32)
        options = {"sparsity_distribution_fn": helpers.uniform(0.5), "sparsity_type": KINDS[kind]}
        runs = {
            "wanda": (wanda(KINDS[kind]), None),
            "magnitude": (sparsity.MagnitudePruning(**options), None),
            "sparsegpt": (sparsity.SparseGPTPruning(**options), None),
            "least squares": (wanda(KINDS[kind]), sparsity.LeastSquares()),
            "admm": (wanda(KINDS[kind]), sparsity.ADMM()),
            "gradual admm": (wanda(KINDS[kind]), sparsity.ADMM(gradual=15)),
        }
        lost = {
            name: oracles.error(held_out, refitted(*run, weights, x)[0] - weights).sum()
            for name, run in runs.items()
        }
        return {name: value / lost["wanda"] for name, value in lost.items()}

    def mean(kind):
        layers = [measure_errors(kind, seed) for seed in range(4)]
        return {name: np.mean([layer[name] for layer in layers]) for name in layers[0]}

    return {kind: mean(kind) for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "most"),
    [
        ("50 %", "sparsegpt", 0.85),
        ("50 %", "least squares", 0.75),
        ("50 %", "admm", 0.80),
        ("50 %", "gradual admm", 0.70),
        ("2:4", "sparsegpt", 0.70),
        ("2:4", "least squares", 0.75),
        ("2:4", "admm", 0.80),
    ],
)
def test_a_reconstruction_loses_less_than_wanda(errors, kind, method, most):
    assert errors[kind][method] <= most


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_magnitude_loses_more_than_wanda(errors, kind):
    assert errors[kind]["magnitude"] >= 1.5


@pytest.mark.slow
def test_the_relative_error_is_the_share_of_the_outputs_that_is_lost():
    weights, x, _ = oracles.layer()
    pruned = np.where(np.abs(weights) > 0.5, weights, 0)
    with jax.enable_x64(True):
        actual = relative_error(
            oracles.make_statistic(x), jnp.asarray(weights.T), jnp.asarray(pruned.T)
        )
    expected = oracles.error(x, weights - pruned).sum() / oracles.error(x, weights).sum()
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "refit", [sparsity.ADMM(), sparsity.ADMM(gradual=0), sparsity.LeastSquares()]
)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_layers_without_inputs_or_outputs_stay_as_they_are(refit, shape):
    inputs = shape[0]
    gram = jnp.zeros((inputs, inputs))
    statistic = sparsity.Statistic(gram=gram, count=2, contracting=(0,), output=(1,))
    weights, mask = jnp.ones(shape), jnp.ones(shape, jnp.uint8)
    assert refit(weights, weights, mask, statistic, select=None)[0].shape == shape
