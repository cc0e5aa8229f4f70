"""Arguments of wrong types, shapes and paths: errors that name them, not those of jax or numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration import Rates, Sensitivity, output_error, relative_error
from tests import helpers

PARAMS = {"w": jnp.ones((4, 3))}
X = jnp.eye(4)


def model(params, x):
    return x @ params["w"]


def seen(**fields):
    fields = {"gram": jnp.eye(4), "count": 9, "contracting": (0,), "output": (1,)} | fields
    return sparsity.Statistic(**fields)


@pytest.mark.parametrize(
    "pruner", [sparsity.WandaPruning, sparsity.RIAPruning, sparsity.SparseGPTPruning]
)
@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ("gram", "statistics must be a dict {path: Statistic}, got statistics = 'gram'"),
        ([seen()], "statistics must be a dict"),
        ({("w",): X}, "the statistic of 'w' must be a Statistic, got"),
        ({("w",): seen(gram=np.eye(4).tolist())}, r"The gram of 'w', .* must have shape"),
    ],
)
def test_statistics_of_other_types_are_named(pruner, statistics, message):
    with pytest.raises(ValueError, match=message):
        pruner(sparsity_distribution_fn=helpers.half).instant_sparsify(
            PARAMS, statistics=statistics
        )


@pytest.mark.parametrize("kind", [sparsity.WandaPruning, sparsity.SparseGPTPruning])
def test_parameters_may_be_named_and_statistics_must_be(kind):
    pruner = kind(sparsity_distribution_fn=helpers.half)
    statistics = {("w",): seen()}
    masks = pruner.instant_sparsify(params=PARAMS, grads=None, statistics=statistics)[1]
    assert int(masks["w"].sum()) == 6
    with pytest.raises(TypeError, match="takes from 2 to 3 positional arguments"):
        pruner.instant_sparsify(PARAMS, None, statistics)


def test_calibrate_names_arrays_without_values():
    with pytest.raises(ValueError, match=r"params\['w'\] has no values yet"):
        sparsity.calibrate(model, jax.eval_shape(lambda: PARAMS), [X])
    with pytest.raises(ValueError, match=r"batches\[1\] has no values yet"):
        sparsity.calibrate(model, PARAMS, [X, jax.eval_shape(lambda: X)])
    with pytest.raises(ValueError, match=r"batches\[0\] has no values yet.*outside of jit"):
        jax.jit(lambda x: sparsity.calibrate(model, PARAMS, [x])[("w",)].squares)(X)


def test_rates_and_owl_name_what_they_cannot_read():
    with pytest.raises(ValueError, match=r"sparsities must be a dict {path: sparsity}, got"):
        Rates([0.5])
    with pytest.raises(ValueError, match="the statistic of 'w' must be a Statistic, got"):
        sparsity.owl({("w",): 3}, PARAMS)
    with pytest.raises(ValueError, match=r"params\['w'\] has no values yet"):
        sparsity.owl({("w",): seen()}, jax.eval_shape(lambda: PARAMS))
    with pytest.raises(ValueError, match=r"sparsity has no values yet.*outside of jit"):
        jax.jit(lambda s: sparsity.owl({("w",): seen()}, PARAMS, s)(PARAMS))(0.5)


def test_parameters_that_do_not_fit_a_statistic_have_no_error():
    with pytest.raises(ValueError, match=r"do not fit a parameter of shape \(3, 4\)"):
        output_error(seen(), PARAMS["w"].T)
    with pytest.raises(ValueError, match=r"do not fit a parameter of shape \(\)"):
        output_error(seen(), "w")
    with pytest.raises(ValueError, match=r"pruned must have the shape \(4, 3\), got \(3,\)"):
        relative_error(seen(), PARAMS["w"], PARAMS["w"][0])


def test_the_sensitivity_of_missing_parameters_has_no_distribution():
    for errors in ({}, {("w",): {}}, {("w",): {0.5: 0.1}, ("v",): {0.5: 0.1}}):
        with pytest.raises(ValueError, match=r"Errors were measured of .*; each needs a rate and"):
            Sensitivity(errors).distribution(PARAMS, 0.3)
