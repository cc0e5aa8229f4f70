"""Layouts of leaves: every one gives what its matrices give; and what is wrong with statistics."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration import output_error, prune
from sparsity.calibration.statistics import capture
from sparsity.calibration.statistics.sums import sum_inputs
from tests import helpers
from tests.calibration import oracles

# Shape of a leaf, and what its axes are. Every leaf holds matrices of 12 inputs.
LAYOUTS = {
    "kernel": ((12, 4), {"contracting": (0,), "output": (1,)}),
    "torch": ((4, 12), {"contracting": (1,), "output": (0,)}),
    "heads of inputs": ((3, 4, 5), {"contracting": (0, 1), "output": (2,)}),
    "heads of outputs": ((12, 2, 3), {"contracting": (0,), "output": (1, 2)}),
    "between outputs": ((2, 12, 3), {"contracting": (1,), "output": (0, 2)}),
    "convolution": ((2, 2, 3, 4), {"contracting": (0, 1, 2), "output": (3,)}),
    "torch convolution": ((4, 3, 2, 2), {"contracting": (1, 2, 3), "output": (0,)}),
    "experts": ((2, 12, 4), {"contracting": (1,), "output": (2,), "batch": (0,)}),
    "experts last": ((12, 4, 2), {"contracting": (0,), "output": (1,), "batch": (2,)}),
    "stacked experts": ((2, 2, 12, 4), {"contracting": (2,), "output": (3,), "batch": (0, 1)}),
    "grouped": ((2, 2, 3, 6), {"contracting": (0, 1, 2), "output": (3,), "groups": 3}),
    "depthwise": ((2, 6, 1, 5), {"contracting": (0, 1, 2), "output": (3,), "groups": 5}),
    "stacked groups": (
        (2, 12, 6),
        {"contracting": (1,), "output": (2,), "batch": (0,), "groups": 3},
    ),
}


def make(name, dtype=np.float32, seed=0):
    """A leaf, its statistic, and its matrices, [outputs, inputs], with their inputs."""
    shape, axes = LAYOUTS[name]
    groups, batch = axes.get("groups", 1), axes.get("batch", ())
    lead = [shape[axis] for axis in batch] + ([groups] if groups > 1 else [])
    count = int(np.prod(lead))
    outputs = int(np.prod(shape)) // 12 // count
    made = [oracles.layer(12, outputs, 50, 6, seed + i, dtype)[:2] for i in range(count)]
    moved = np.stack([weights for weights, _ in made])
    order = (*batch, *axes["output"], *axes["contracting"])
    leaf = moved.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))
    grams = np.stack([x.T @ x for _, x in made]).reshape(*lead, 12, 12)
    squares = np.stack([(x**2).sum(0) for _, x in made]).reshape(*lead, 12)
    statistic = sparsity.Statistic(
        gram=jnp.asarray(grams), squares=jnp.asarray(squares), count=50, **axes
    )
    return jnp.asarray(leaf), statistic, made


def matrices(leaf, statistic):
    """[matrices, outputs, inputs] by the library."""
    actual = np.asarray(statistic.to_matrices(leaf))
    return actual.reshape(-1, *actual.shape[-2:])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_leaf_is_seen_as_its_matrices_and_put_back(name):
    leaf, statistic, made = make(name)
    actual = matrices(leaf, statistic)
    np.testing.assert_array_equal(actual, np.stack([weights for weights, _ in made]))
    back = statistic.from_matrices(statistic.to_matrices(leaf), leaf.shape)
    np.testing.assert_array_equal(back, leaf)


def test_groups_of_a_convolution_are_those_of_jax():
    # Six inputs in three groups of two; 3x3 patches of the centre, by the library's view.
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(1, 3, 3, 6)), rng.normal(size=(3, 3, 2, 12))
    with jax.enable_x64(True):
        expected = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", feature_group_count=3,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        axes = {"contracting": (0, 1, 2), "output": (3,), "groups": 3}
        seen = sparsity.Statistic(count=1, **axes).to_matrices(jnp.asarray(kernel))
    patches = x.reshape(9, 3, 2).transpose(1, 0, 2).reshape(3, 18)
    actual = np.einsum("goi,gi->go", seen, patches)
    np.testing.assert_allclose(actual.ravel(), expected.ravel(), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["heads of inputs", "between outputs", "experts last", "stacked groups"]
)
def test_leaves_are_pruned_and_refitted_as_their_matrices_are(name):
    with jax.enable_x64(True):
        leaf, statistic, made = make(name, np.float64)
        statistics, options = {(): statistic}, {"sparsity_distribution_fn": _half}
        wanda = sparsity.WandaPruning(**options)
        masks = wanda.instant_sparsify(leaf, statistics=statistics)[1]
        refitted, _ = prune(wanda, leaf, statistics, sparsity.LeastSquares())
        swept, _ = sparsity.SparseGPTPruning(block_size=5, **options).instant_sparsify(
            leaf, statistics=statistics
        )
        errors = output_error(statistic, leaf - refitted)
    actual = zip(*(matrices(x, statistic) for x in (masks, refitted, swept)), strict=True)
    errors = np.asarray(errors).reshape(len(made), -1)
    for (weights, x), error, (mask, by_squares, by_sweep) in zip(made, errors, actual, strict=True):
        np.testing.assert_array_equal(mask, oracles.wanda(weights, (x**2).sum(0), 0.5))
        expected = oracles.least_squares(weights, mask, x.T @ x)
        np.testing.assert_allclose(by_squares, expected, rtol=1e-7)
        np.testing.assert_allclose(error, oracles.error(x, weights - expected), rtol=1e-7)
        expected = oracles.sparsegpt(weights, x.T @ x, 0.5, block=5)[0]
        np.testing.assert_allclose(by_sweep, expected, atol=1e-10)


def _half(params):
    return jax.tree.map(lambda _: 0.5, params)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [1, 2])
def test_groups_along_an_inner_axis_are_swept_with_that_axis_last(axis):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        kernel = rng.normal(size=(3, 4, 2))  # outputs, and two axes of inputs
        x = rng.normal(size=(40, 4, 2))
        rows = x.reshape(40, 8)
        seen = sparsity.Statistic(
            gram=jnp.asarray(rows.T @ rows), count=40, contracting=(1, 2), output=(0,)
        )
        pruner = sparsity.SparseGPTPruning(
            sparsity_distribution_fn=_half, sparsity_type=sparsity.NByM(1, 2, axis=axis)
        )
        actual, mask = pruner.instant_sparsify(jnp.asarray(kernel), statistics={(): seen})
    last = np.moveaxis(x, axis, -1).reshape(40, 8)
    weights = np.moveaxis(kernel, axis, -1)
    expected, kept = oracles.sparsegpt(weights.reshape(3, 8), last.T @ last, nm=(1, 2))
    np.testing.assert_allclose(
        np.moveaxis(np.asarray(actual), axis, -1), expected.reshape(weights.shape), atol=1e-10
    )
    np.testing.assert_array_equal(
        np.moveaxis(np.asarray(mask), axis, -1), kept.reshape(weights.shape)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kernel", "experts"])
def test_batch_axes_of_the_updater_separate_what_shares_its_inputs(kind):
    with jax.enable_x64(True):
        _, statistic, made = make("kernel", np.float64)
        stack = np.stack([made[0][0].T, 3 + made[0][0].T])  # [2, inputs, outputs], of one input
        x, axes = made[0][1], {"contracting": (1,), "output": (0, 2)}
        if kind == "experts":
            axes = {"contracting": (1,), "output": (2,), "batch": (0,)}
        seen = sparsity.Statistic(
            gram=jnp.asarray(np.stack([x.T @ x] * 2) if "batch" in axes else x.T @ x),
            count=50, **axes,
        )  # fmt: skip
        options = {"sparsity_distribution_fn": _half, "batch_axes": 1}
        for pruner in (sparsity.RIAPruning, sparsity.SparseGPTPruning):
            pruned, masks = pruner(**options).instant_sparsify(
                jnp.asarray(stack), statistics={(): seen}
            )
            for i in range(2):
                alone = pruner(sparsity_distribution_fn=_half).instant_sparsify(
                    jnp.asarray(stack[i]), statistics={(): statistic}
                )
                np.testing.assert_array_equal(masks[i], alone[1])
                np.testing.assert_allclose(pruned[i], alone[0], atol=1e-10)


# Bad input

SEEN = {"contracting": (0,), "output": (1,), "count": 9}


def sparsify(statistic, pruner=sparsity.WandaPruning, **options):
    updater = pruner(sparsity_distribution_fn=helpers.half, **options)
    statistics = {("layer", "kernel"): statistic} if statistic is not None else None
    return updater.instant_sparsify({"layer": {"kernel": jnp.ones((4, 4))}}, statistics=statistics)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"squares": jnp.array([1.0, jnp.nan, 1, 1])}, "squares.*'layer/kernel' are not all fini"),
        ({"squares": jnp.ones(3)}, r"'layer/kernel'.*must have shape \(4,\), got \(3,\)"),
        ({"gram": jnp.ones(4)}, r"gram.*must have shape \(4, 4\), got \(4,\)"),
        ({}, "'layer/kernel' has neither squares nor gram"),
        ({"contracting": (-2,)}, "each axis of contracting must be at least 0, got .* = -2"),
        ({"contracting": [0]}, r"contracting must be a tuple of axes, got contracting = \[0\]"),
        ({"output": (1, 1)}, r"output must name each axis once, got output = \(1, 1\)"),
        ({"groups": 0}, "groups must be at least 1"),
        ({"contracting": (1,)}, r"name each axis of shape \(4, 4\) once"),
        ({"groups": 3}, "groups = 3, which must divide"),
    ],
)
def test_a_statistic_that_does_not_fit_names_its_leaf(fields, message):
    with pytest.raises(ValueError, match=message):
        sparsify(sparsity.Statistic(**SEEN | fields))


@pytest.mark.slow
@pytest.mark.parametrize("pruner", [sparsity.WandaPruning, sparsity.SparseGPTPruning])
def test_missing_statistics_say_how_to_get_them(pruner):
    with pytest.raises(ValueError, match=r"statistics = None.*sparsity.calibrate"):
        sparsify(None, pruner)
    params = {"read": jnp.ones((4, 4)), "unread": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    seen = sparsity.Statistic(gram=jnp.eye(4), **SEEN)
    updater = pruner(sparsity_distribution_fn=helpers.half)
    with pytest.raises(ValueError, match=r"no entry \('unread',\).*No product.*dense with"):
        updater.instant_sparsify(params, statistics={("read",): seen})
    only = helpers.uniform(0.5, custom_sparsity_map={"unread": None})
    updater = dataclasses.replace(updater, sparsity_distribution_fn=only)
    pruned, masks = updater.instant_sparsify(params, statistics={("read",): seen})
    assert pruned["unread"] is params["unread"]
    assert (masks["unread"], masks["bias"]) == (None, None)


def test_what_needs_a_gram_says_which_leaf_has_none():
    squares = sparsity.Statistic(squares=jnp.ones(4), **SEEN)
    with pytest.raises(
        ValueError, match=r"SparseGPTPruning needs the Gram.*'layer/kernel'.*'gram'"
    ):
        sparsify(squares, sparsity.SparseGPTPruning)
    with pytest.raises(ValueError, match=r"LeastSquares needs the Gram matrix of 'params'"):
        prune(
            sparsity.WandaPruning(sparsity_distribution_fn=helpers.half),
            jnp.ones((4, 4)), {(): squares}, sparsity.LeastSquares(),
        )  # fmt: skip
    with pytest.raises(ValueError, match="no Gram matrix"):
        output_error(squares, jnp.ones((4, 4)))


def test_batch_axes_that_cut_through_inputs_are_refused():
    with pytest.raises(ValueError, match=r"batch_axes = 1 of 'params'.*contracts axes \(0,\)"):
        sparsity.WandaPruning(sparsity_distribution_fn=_half, batch_axes=1).instant_sparsify(
            jnp.ones((4, 4)), statistics={(): sparsity.Statistic(squares=jnp.ones(4), **SEEN)}
        )


def experts(params, x):
    """Rows 0 to 3 meet the first expert, the others the second one."""
    hidden = jnp.tanh(x @ params["router"])
    return jax.lax.ragged_dot(hidden, params["experts"], jnp.array([4, 8]))


def test_weights_of_ragged_products_are_named_and_others_are_calibrated():
    params = {"router": jnp.eye(3), "experts": jnp.ones((2, 3, 5))}
    x = jnp.ones((12, 3))
    statistics = sparsity.calibrate(experts, params, [x])
    assert list(statistics) == [("router",)]
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    for sequential in (True, False):
        with pytest.raises(
            ValueError, match=r"'experts', .*read by ragged_dot.*test_statistics.py"
        ):
            sparsity.oneshot(pruner, experts, params, [x], sequential=sequential)
    with pytest.raises(ValueError, match=r"no entry \('experts',\).*ragged_dot"):
        pruner.instant_sparsify(params, statistics=statistics)
    router = sparsity.Uniform(0.5, custom_sparsity_map={"experts": None})
    pruned, _, report = sparsity.oneshot(
        sparsity.WandaPruning(sparsity_distribution_fn=router), experts, params, [x]
    )
    assert list(report) == [("router",)]
    np.testing.assert_array_equal(pruned["experts"], params["experts"])


@pytest.mark.parametrize("field", ["squares", "gram"])
def test_inputs_that_were_always_zero_are_a_warning_that_names_the_leaf(field):
    sums = jnp.zeros(4) if field == "squares" else jnp.zeros((4, 4))
    with pytest.warns(UserWarning, match="All inputs of 'layer/kernel' met nothing but zeros"):
        sparsify(sparsity.Statistic(**{field: sums}, **SEEN))
    sums = sums.at[0].set(1) if field == "squares" else sums.at[0, 0].set(1)
    sparsify(sparsity.Statistic(**{field: sums}, **SEEN))  # some inputs may be dead


def test_slices_of_zeros_are_named_by_their_index():
    squares = jnp.ones((3, 4)).at[1].set(0)
    seen = {
        (): sparsity.Statistic(squares=squares, contracting=(1,), output=(2,), batch=(0,), count=9)
    }
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=helpers.half)
    with pytest.warns(UserWarning, match=r"Slices \[\[1\]\] of 'params' met nothing but zeros"):
        pruner.instant_sparsify(jnp.ones((3, 4, 2)), statistics=seen)


@pytest.mark.parametrize("sequential", [True, False])
def test_oneshot_warns_of_a_weight_that_meets_only_zeros_though_magnitudes_need_no_inputs(
    sequential,
):
    params = {"first": jnp.ones((4, 4)), "dead": jnp.ones((4, 2)), "dense": jnp.ones(2)}
    model = lambda p, x: jnp.minimum(jnp.abs(x @ p["first"]), 0) @ p["dead"] + p["dense"]  # noqa: E731
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
    with pytest.warns(UserWarning, match="All inputs of 'dead' met nothing") as caught:
        _, _, report = sparsity.oneshot(pruner, model, params, [jnp.ones((3, 4))], None, sequential)
    assert len(caught) == 1
    assert report["dead",].error == 0


class Forwarding(sparsity.MagnitudePruning):
    """A pruner of the user's that passes all arguments on, and states no kind."""

    def calculate_scores(self, params, *args, **extra):
        return super().calculate_scores(params, *args)


@pytest.mark.parametrize("sequential", [True, False])
def test_gram_matrices_are_made_only_for_what_needs_them(monkeypatch, sequential):
    def record(alignment, kind, x, row_weights=None):
        kinds.add(kind)
        return sum_inputs(alignment, kind, x, row_weights)

    kinds = set()
    monkeypatch.setattr(capture, "sum_inputs", record)
    params = {
        "a": jax.random.normal(jax.random.key(0), (6, 8)),
        "b": jnp.arange(16.0).reshape(8, 2),
    }
    batches = [jax.random.normal(jax.random.key(i), (9, 6)) for i in (1, 2)]
    model = lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"]  # noqa: E731
    options = {"sparsity_distribution_fn": sparsity.Uniform(0.5)}
    scored = (sparsity.MagnitudePruning, sparsity.WandaPruning, sparsity.RIAPruning, Forwarding)
    for pruner in scored:
        report = sparsity.oneshot(pruner(**options), model, params, batches, None, sequential)[2]
        assert {*report} == {("a",), ("b",)}
        assert "gram" not in kinds
    for pruner, refit in [(scored[0], sparsity.ADMM()), (sparsity.SparseGPTPruning, None)]:
        kinds.clear()
        sparsity.oneshot(pruner(**options), model, params, batches, refit, sequential)
        assert kinds == {"gram"}
