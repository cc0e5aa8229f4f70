"""Weights behind a function are pruned exactly if it is affine entry by entry, else refused."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from tests.calibration import oracles
from tests.calibration.models import draw
from tests.calibration.oracles import layer

W, X, _ = (jnp.asarray(x, jnp.float32) for x in layer(12, 12, rows=64))
PARAMS = {"w": W.T}
WANDA = sparsity.WandaPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
FUNCTIONS = {
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


def test_a_parameter_of_a_product_without_data_is_refused_by_name():
    params = PARAMS | {"a": draw(1, 12, 2), "b": draw(2, 2, 12)}
    half = sparsity.Uniform(0.5, filter_fn=lambda path, _: path == ("b",))
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=half)
    with pytest.raises(ValueError, match=r"reads 'b', .* behind a function, or without"):
        sparsity.oneshot(pruner, lambda p, x: x @ (p["a"] @ p["b"]), params, [X])


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
    rows = 16.0 ** draw(3, 8, 1)
    masks = prune(make_model(rows), params)
    expected = prune(make_model(1.0), params | {"other": rows * params["other"]})
    jax.tree.map(np.testing.assert_array_equal, masks, expected)


ROWS, COLUMNS = np.geomspace(0.03, 30.0, 12), np.linspace(-2, 3, 12)
UPPER = np.tri(12).T  # zeros half of the entries
ARRAYS = {
    "rows": jnp.asarray(ROWS, jnp.float32),
    "columns": jnp.asarray(COLUMNS, jnp.float32),
    "a": draw(1, 12, 2),
    "b": draw(2, 2, 12),
}
CHANGE = np.asarray(ARRAYS["a"] @ ARRAYS["b"], np.float64)
AFFINE = {  # {name: (f(params), c, d) of weights c * w + d}
    "a norm's scale": (lambda p: p["w"] * p["rows"][:, None], ROWS[:, None], 0),
    "an array moved": (
        lambda p: (p["w"].T[::-1] * p["rows"] / p["columns"][::-1, None])[::-1].T,
        ROWS[:, None] / COLUMNS,
        0,
    ),
    "a mask": (lambda p: jnp.triu(p["w"]), UPPER, 0),
    "a mask times it": (lambda p: UPPER.astype(np.float32) * p["w"], UPPER, 0),
    "a low-rank change": (lambda p: p["w"] + p["a"] @ p["b"], 1, CHANGE),
    "all of it in a call": (
        jax.jit(lambda p: 2.0 - (p["w"] - p["a"] @ p["b"]) / p["columns"]),
        -1 / COLUMNS,
        2 + CHANGE / COLUMNS,
    ),
    "without a gradient": (
        lambda p: jax.lax.stop_gradient(p["w"]) * p["columns"] - p["a"] @ p["b"],
        COLUMNS,
        -CHANGE,
    ),
}
METHODS = {
    "Wanda": (sparsity.WandaPruning, None),
    "RIA": (sparsity.RIAPruning, None),
    "SparseGPT": (sparsity.SparseGPTPruning, None),
    "ADMM": (sparsity.WandaPruning, sparsity.ADMM()),
    "ADMM that chooses": (sparsity.WandaPruning, sparsity.ADMM(gradual=10)),
    "least squares": (sparsity.RIAPruning, sparsity.LeastSquares()),
}


def prune_weights(method, fn, params, rate=0.5, **options):
    """Prunes the parameters whose names begin with w."""
    rates = sparsity.Uniform(rate, filter_fn=lambda path, _: path[0].startswith("w"))
    pruner, refit = METHODS[method]
    return sparsity.oneshot(
        pruner(sparsity_distribution_fn=rates), fn, params, [X], refit, **options
    )


def lose(fn, dense, pruned):
    """Returns the lost share of the outputs of a model, in float64."""
    before, after = (np.asarray(fn(p, X), np.float64) for p in (dense, pruned))
    return ((before - after) ** 2).sum() / (before**2).sum()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", AFFINE)
def test_an_affine_function_of_a_weight_is_pruned_as_its_effective_weights(name, method):
    function, multiplier, _ = AFFINE[name]
    params = PARAMS | ARRAYS

    def fn(params, x):
        return x @ function(params)

    effective = {"w": jnp.asarray(multiplier * np.asarray(PARAMS["w"]), jnp.float32)}
    expected, expected_masks, _ = prune_weights(method, lambda p, x: x @ p["w"], effective)
    pruned, masks, report = prune_weights(method, fn, params)
    np.testing.assert_array_equal(masks["w"], expected_masks["w"])
    # Entries that the function multiplies by 0 keep what no output shows.
    np.testing.assert_allclose(multiplier * pruned["w"], expected["w"], rtol=1e-4, atol=3e-5)
    np.testing.assert_allclose(report[("w",)].error, lose(fn, params, pruned), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_entries_times_0_go_first_keep_their_values_and_take_no_correction(method):
    function, _, _ = AFFINE["a mask"]

    def fn(params, x):
        return x @ function(params)

    pruned, masks, report = prune_weights(method, fn, PARAMS, rate=0.3)
    kept, is_live = np.asarray(masks["w"]) > 0, UPPER > 0
    assert kept.mean() == pytest.approx(0.7, abs=0.04)
    assert (kept & ~is_live).any()
    unread = np.where(kept & ~is_live, PARAMS["w"], 0)
    np.testing.assert_array_equal(np.where(is_live, 0, pruned["w"]), unread)
    np.testing.assert_allclose(report[("w",)].error, lose(fn, PARAMS, pruned), rtol=1e-3, atol=1e-9)


def test_sparsegpt_leaves_entries_times_0_out_of_its_corrections():
    pruner = sparsity.SparseGPTPruning(sparsity_distribution_fn=sparsity.Uniform(0.3), block_size=4)
    pruned, masks, _ = sparsity.oneshot(pruner, lambda p, x: x @ jnp.triu(p["w"]), PARAMS, [X])
    x, weights = np.asarray(X, np.float64), (UPPER * np.asarray(PARAMS["w"], np.float64)).T
    upper = np.linalg.cholesky(np.linalg.inv(oracles.damped(x.T @ x))).T
    kept = (np.asarray(masks["w"]) * UPPER).T > 0
    for j in range(12):  # algorithm 1 for this mask
        lost = np.where(kept[:, j], 0, weights[:, j]) / upper[j, j]
        weights[:, j:] -= np.outer(lost, upper[j, j:])
        weights[:, j] = np.where(kept[:, j], weights[:, j], 0)
    np.testing.assert_allclose((UPPER * pruned["w"]).T, weights, rtol=1e-3, atol=1e-4)


def test_a_correction_of_entries_times_0_by_an_own_pruner_is_refused():
    class Own(sparsity.calibration.StatisticsPruning):
        def solve(self, site, param, statistic, target):
            return param + 1, jnp.ones(param.shape, jnp.uint8)

    pruner = Own(sparsity_distribution_fn=sparsity.Uniform(0.5))
    with pytest.raises(ValueError, match="'w': the model multiplies some of its entries by 0"):
        sparsity.oneshot(pruner, lambda p, x: x @ jnp.triu(p["w"]), PARAMS, [X])


LAYERS = {
    "w": 0.3 * draw(3, 3, 12, 12),
    "scale": jnp.exp(draw(4, 3, 12)),
    "change": 0.3 * draw(5, 3, 12, 2),
}


def run_layers(params, x):
    def step(x, layer):
        change = layer["change"] @ layer["change"].T
        return jnp.tanh(x @ (layer["w"] * layer["scale"][:, None] + change)), None

    return jax.lax.scan(step, x, params)[0]


def run_folded(params, x):
    scaled = jnp.moveaxis(params["w"], 0, 1) * params["scale"].T[..., None]
    weights = jnp.moveaxis(scaled, 1, 0) + params["change"] @ params["change"].mT
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def run_one_by_one(params, x):
    for i in range(3):
        change = params["change"][i] @ params["change"][i].T
        x = jnp.tanh(x @ (params[f"w{i}"] * params["scale"][i][:, None] + change))
    return x


@pytest.mark.parametrize("method", ["Wanda", "SparseGPT", "least squares"])
@pytest.mark.parametrize("fn", [run_layers, run_folded])
def test_layers_of_a_scan_have_multipliers_of_their_own(fn, method):
    unstacked = {f"w{i}": LAYERS["w"][i] for i in range(3)}
    for sequential in (True, False):
        options = {"sequential": sequential, "held": ()}
        pruned, _, report = prune_weights(method, fn, LAYERS, **options)
        params = unstacked | LAYERS
        params.pop("w")
        expected, _, reports = prune_weights(method, run_one_by_one, params, **options)
        joined = np.stack([expected[f"w{i}"] for i in range(3)])
        np.testing.assert_allclose(pruned["w"], joined, rtol=1e-4, atol=1e-5)
    layers = [reports[(f"w{i}",)].error for i in range(3)]
    assert min(layers) < report[("w",)].error < max(layers)


def test_layers_with_multipliers_are_pruned_from_disk_to_disk(tmp_path):
    expected, _, _ = prune_weights("least squares", run_layers, LAYERS)
    pruned, _, _ = prune_weights("least squares", run_layers, LAYERS, out=tmp_path / "out")
    np.testing.assert_array_equal(pruned["w"][:], expected["w"])


def test_a_statistic_states_the_function_and_doors_prune_by_it():
    function, multiplier, offset = AFFINE["all of it in a call"]
    params = PARAMS | ARRAYS

    def fn(params, x):
        return x @ function(params)

    statistic = sparsity.calibrate(fn, params, [X], "gram")[("w",)]
    full = np.broadcast_to(multiplier, (12, 12))
    np.testing.assert_allclose(statistic.multiplier, full, rtol=1e-5)
    np.testing.assert_allclose(statistic.offset, offset, rtol=1e-4, atol=1e-5)
    scaled = {"w": jnp.asarray(full * np.asarray(PARAMS["w"]), jnp.float32)}
    plain = dataclasses.replace(statistic, multiplier=None, offset=None)
    half = sparsity.Uniform(0.5)
    for make in (sparsity.WandaPruning, sparsity.SparseGPTPruning):
        pruner = make(sparsity_distribution_fn=half)
        pruned, masks = pruner.instant_sparsify(PARAMS, statistics={("w",): statistic})
        expected, expected_masks = pruner.instant_sparsify(scaled, statistics={("w",): plain})
        np.testing.assert_array_equal(masks["w"], expected_masks["w"])
        np.testing.assert_allclose(full * pruned["w"], expected["w"], rtol=1e-4, atol=1e-5)
        error = sparsity.calibration.relative_error(statistic, PARAMS["w"], pruned["w"])
        np.testing.assert_allclose(error, lose(fn, params, params | pruned), rtol=1e-3)
    options = {"sparsity": 0.5, "threshold": 1.0}
    assert sparsity.owl({("w",): statistic}, PARAMS, **options) == sparsity.owl(
        {("w",): plain}, scaled, **options
    )
    with pytest.raises(ValueError, match="The product reads multiplier \\* parameter"):
        sparsity.LeastSquares()(PARAMS["w"], pruned["w"], masks["w"], statistic)
    wrong = dataclasses.replace(statistic, multiplier=jnp.ones(11))
    with pytest.raises(ValueError, match=r"multiplier of 'w', shape .* must broadcast"):
        pruner.instant_sparsify(PARAMS, statistics={("w",): wrong})


def test_products_that_read_a_weight_behind_different_functions_are_refused():
    def fn(params, x):
        hidden = jnp.tanh(x @ (params["w"] * params["rows"][:, None]))
        return hidden @ (params["w"] * params["columns"])

    with pytest.raises(ValueError, match="'w', which has a sparsity, behind different functions"):
        prune_weights("Wanda", fn, PARAMS | ARRAYS)
    assert ("w",) not in sparsity.calibrate(fn, PARAMS | ARRAYS, [X])


def test_a_layer_that_is_called_twice_is_pruned_by_the_inputs_of_both_calls():
    def fn(params, x):
        def call(x):
            return x @ (params["w"] * params["rows"][:, None])

        return jnp.concatenate([call(x), call(jnp.square(x))], axis=-1)

    params = PARAMS | ARRAYS
    pruned, _, report = prune_weights("Wanda", fn, params, sequential=False)
    np.testing.assert_allclose(report[("w",)].error, lose(fn, params, pruned), rtol=1e-3)


def test_a_multiplier_that_differs_from_step_to_step_is_refused():
    def fn(params, x):
        def step(x, scale):
            return jnp.tanh(x @ (params["w"] * scale)), None

        return jax.lax.scan(step, x, params["rows"])[0]

    with pytest.raises(ValueError, match="reads 'w', which has a sparsity, behind a function"):
        prune_weights("Wanda", fn, PARAMS | ARRAYS)


def test_repeated_weights_with_multipliers_of_their_own_are_refused():
    def fn(params, x):
        kernels = params["w"] * params["rows"][:, None, None]  # one for each of 12 products
        return jnp.einsum("ri,nio->nro", x, kernels)

    with pytest.raises(ValueError, match="reads 'w', which has a sparsity"):
        prune_weights("Wanda", fn, PARAMS | ARRAYS)


def test_kernels_of_convolutions_times_a_scale_of_each_output_are_refitted_exactly():
    params = {"w": draw(6, 3, 3, 4, 6), "scale": jnp.exp(draw(7, 6))}
    images = draw(8, 2, 8, 8, 4)

    def fn(params, x):
        names = ("NHWC", "HWIO", "NHWC")
        kernel = params["w"] * params["scale"]
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=names)

    rates = sparsity.Uniform(0.5, filter_fn=lambda path, _: path == ("w",))
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=rates)
    pruned, _, report = sparsity.oneshot(pruner, fn, params, [images], sparsity.ADMM())
    before, after = (np.asarray(fn(p, images), np.float64) for p in (params, pruned))
    lost = ((before - after) ** 2).sum() / (before**2).sum()
    np.testing.assert_allclose(report[("w",)].error, lost, rtol=1e-3)


def test_channels_of_a_weight_with_an_offset_are_refused_by_name():
    params = {"w": draw(0, 12, 8), "down": draw(1, 8, 3)}

    def fn(params, x):
        return jax.nn.relu(x @ params["w"]) @ (params["down"] + np.linspace(0, 1, 3))

    for make in (sparsity.OSSCARPruning, sparsity.FLAPPruning):
        scope = sparsity.Coupled(sparsity.trace(fn, params, X))
        pruner = make(scope=scope, sparsity_distribution_fn=sparsity.Uniform(0.5))
        statistics = sparsity.calibrate(fn, params, [X], make.statistics_kind)
        with pytest.raises(ValueError, match="products read 'down' plus an array"):
            pruner.instant_sparsify(params, statistics=statistics)
