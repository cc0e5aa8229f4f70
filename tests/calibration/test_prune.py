"""Pruning and refitting whole trees, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.calibration import prune
from tests import helpers
from tests.calibration import oracles
from tests.eight_devices import KINDS, run


def model(dtype=jnp.float32):
    weights, x, _ = oracles.layer(dtype=np.float32)
    params = {"in": {"kernel": jnp.asarray(weights.T, dtype), "bias": jnp.ones(16)}}
    return params, {("in", "kernel"): oracles.make_statistic(x)}


@pytest.mark.slow
@pytest.mark.parametrize("refit", [None, sparsity.LeastSquares(), sparsity.ADMM(gradual=2)])
def test_packed_masks_are_those_that_are_not_packed(refit):
    params, statistics = model()
    actual = {}
    for packed in (False, True):
        updater = sparsity.WandaPruning(
            sparsity_distribution_fn=helpers.half, use_packed_masks=packed
        )
        pruned, masks = prune(updater, params, statistics, refit)
        actual[packed] = sparsity.unpack_masks(masks, params) if packed else masks
        np.testing.assert_array_equal(actual[packed]["in"]["kernel"], pruned["in"]["kernel"] != 0)
        assert masks["in"]["bias"] is None
        assert pruned["in"]["bias"] is params["in"]["bias"]
    np.testing.assert_array_equal(actual[True]["in"]["kernel"], actual[False]["in"]["kernel"])


@pytest.mark.slow
def test_bfloat16_weights_stay_bfloat16():
    params, statistics = model(jnp.bfloat16)
    updater = sparsity.SparseGPTPruning(sparsity_distribution_fn=helpers.half)
    for refit in (None, sparsity.LeastSquares(), sparsity.ADMM()):
        pruned, masks = prune(updater, params, statistics, refit)
        assert pruned["in"]["kernel"].dtype == jnp.bfloat16
        assert masks["in"]["kernel"].dtype == jnp.uint8
        assert helpers.is_positive_zero(pruned["in"]["kernel"].astype(jnp.float32))[
            np.asarray(masks["in"]["kernel"]) == 0
        ].all()


@pytest.mark.slow
def test_training_goes_on_from_the_masks():
    params, statistics = model()
    updater = sparsity.SparseGPTPruning(
        sparsity_distribution_fn=helpers.half, use_packed_masks=True
    )
    pruned, masks = updater.instant_sparsify(params, statistics=statistics)
    tx = updater.wrap_optax(optax.sgd(0.1), masks=masks)
    state = tx.init(pruned)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(params, state, pruned)
        pruned = optax.apply_updates(pruned, updates)
    mask = sparsity.unpack_masks(masks, params)["in"]["kernel"]
    np.testing.assert_array_equal(pruned["in"]["kernel"] != 0, mask)


@pytest.mark.slow
def test_a_leaf_with_a_target_of_zero_stays_whole():
    params, statistics = model()
    for kind in (sparsity.Unstructured(), sparsity.NByM(2, 4, axis=0)):
        updater = sparsity.SparseGPTPruning(
            sparsity_distribution_fn=helpers.uniform(0.0), sparsity_type=kind
        )
        pruned, masks = updater.instant_sparsify(params, statistics=statistics)
        np.testing.assert_array_equal(pruned["in"]["kernel"], params["in"]["kernel"])
        assert masks["in"]["kernel"].all()


def test_few_rows_are_a_warning_that_says_what_decides():
    params, _ = model()
    _, x, _ = oracles.layer(rows=9, dtype=np.float32)
    updater = sparsity.SparseGPTPruning(sparsity_distribution_fn=helpers.half)
    message = r"'in/kernel' has 9 rows for 24 inputs.*singular.*damping = 0.01 decides"
    with pytest.warns(UserWarning, match=message):
        updater.instant_sparsify(params, statistics={("in", "kernel"): oracles.make_statistic(x)})


@pytest.mark.slow
def test_a_singular_gram_matrix_without_damping_is_an_error():
    params, _ = model()
    x = np.ones((30, 24), np.float32)
    updater = sparsity.SparseGPTPruning(sparsity_distribution_fn=helpers.half, damping=0)
    with pytest.raises(ValueError, match=r"'in/kernel'.*singular with damping = 0"):
        updater.instant_sparsify(params, statistics={("in", "kernel"): oracles.make_statistic(x)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"damping": -1.0}, "damping must be a finite number >= 0"),
        ({"scheduler": sparsity.OneShotSchedule(3)}, "Prune with instant_sparsify"),
        ({"scope": sparsity.Global()}, r"needs scope = Layerwise\(\)"),
        ({"topk_fn": lambda scores, sparsity: scores}, "topk_fn = None"),
    ],
)
def test_options_of_sparsegpt_are_checked_when_it_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        sparsity.SparseGPTPruning(**options)


def test_sparsegpt_refuses_what_it_cannot_solve():
    params, statistics = model()
    updater = sparsity.SparseGPTPruning(
        sparsity_distribution_fn=helpers.half, sparsity_type=sparsity.Channel(0)
    )
    with pytest.raises(ValueError, match=r"single weights.*Channel\(axis=0\) for 'in/kernel'"):
        updater.instant_sparsify(params, statistics=statistics)
    params["in"]["kernel"] = params["in"]["kernel"].astype(jnp.complex64)
    updater = sparsity.SparseGPTPruning(sparsity_distribution_fn=helpers.half)
    with pytest.raises(ValueError, match="'in/kernel' is complex64"):
        updater.instant_sparsify(params, statistics=statistics)


@pytest.mark.slow
@KINDS
def test_a_mesh_gives_what_one_device_gives(kind):
    run("calibration", kind)


@pytest.mark.parametrize("refit", [sparsity.LeastSquares, sparsity.ADMM, 3, "admm"])
def test_a_refit_that_is_no_instance_is_an_error_that_says_what_it_got(refit):
    kernel, seen = jnp.ones((4, 2)), {(): oracles.make_statistic(np.eye(4))}
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=helpers.half)
    calls = {
        "prune": lambda: prune(pruner, kernel, seen, refit),
        "oneshot": lambda: sparsity.oneshot(
            pruner, lambda w, x: x @ w, kernel, [jnp.eye(4)], refit
        ),
    }
    got = f"the class {refit.__name__}: make an" if isinstance(refit, type) else repr(refit)
    for call in calls.values():
        with pytest.raises(ValueError, match=f"refit must be None, .* Means.. or .*got {got}"):
            call()


@pytest.mark.parametrize("pruner", [sparsity.WandaPruning, None, jnp.abs])
def test_a_pruner_that_is_no_instance_is_an_error(pruner):
    kernel, seen = jnp.ones((4, 2)), {(): oracles.make_statistic(np.eye(4))}
    model, batch = lambda w, x: x @ w, jnp.eye(4)
    report = sparsity.calibration.Report({(): None})
    with pytest.raises(ValueError, match="pruner must be an updater"):
        prune(pruner, kernel, seen)
    with pytest.raises(ValueError, match="pruner must be an updater"):
        sparsity.oneshot(pruner, model, kernel, [batch])
    with pytest.raises(ValueError, match="pruner must be an updater"):
        report.sensitivity(pruner, model, kernel, [batch])


def test_rates_that_cannot_be_measured_are_refused():
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=helpers.half)
    report, arguments = sparsity.calibration.Report({(): None}), (jnp.ones((4, 2)), [jnp.eye(4)])
    for rates, message in (
        (0.5, "rates must be a list"),
        ((), "rates has no rate"),
        ((0.0,), "above 0"),
        ((2,), "in .0, 1."),
    ):
        with pytest.raises(ValueError, match=message):
            report.sensitivity(pruner, lambda w, x: x @ w, *arguments, rates=rates)
    with pytest.raises(ValueError, match="sequential must be True or False, got sequential = 3"):
        sparsity.oneshot(pruner, lambda w, x: x @ w, *arguments, sequential=3)
    for rate in (float("nan"), -0.1, 1.5, True):
        with pytest.raises(ValueError, match="the sparsity of 'a/b' must be in"):
            sparsity.calibration.Rates({("a", "b"): rate})


@pytest.mark.parametrize("trainer", [sparsity.RigL, sparsity.SET, sparsity.StaticRandomSparse])
def test_sparse_trainers_are_refused_with_the_pruners_that_fit(trainer):
    with pytest.raises(ValueError, match=r"trains sparse from the start.*WandaPruning, RIAPruning"):
        sparsity.oneshot(trainer(), lambda p, x: x @ p, jnp.ones((2, 2)), [jnp.ones((3, 2))])
