"""Budgets: masks that leave a given part of a model's cost, and never more."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.graph import trace
from tests.graph import models

SHAPES = {
    "conv": (3, 3, 3, 16),
    "bias": (16,),
    "wide": (16, 96),
    "deep": (96, 20),
    "head": (20, 10),
}


def fn(params, x):
    x = jax.nn.relu(models._conv(x, params["conv"]) + params["bias"]).mean((1, 2))
    return jnp.tanh(jnp.tanh(x @ params["wide"]) @ params["deep"]) @ params["head"]


@functools.cache
def case():
    params = models.draw(SHAPES)
    return params, trace(fn, params, jax.ShapeDtypeStruct((1, 3, 3, 3), jnp.float32))


def nbytes(params, masks):
    """Bytes of what is kept, and a bit for each weight that a mask is for."""
    total = 0
    for name, param in params.items():
        mask = masks[name]
        kept = param.size if mask is None else int(np.count_nonzero(mask))
        total += kept * param.dtype.itemsize + (0 if mask is None else math.ceil(param.size / 8))
    return total


def left(graph, params, masks, name):
    """The part of the cost that masks leave."""
    if name == "macs":
        return graph.macs(masks) / graph.macs()
    return nbytes(params, masks) / sum(x.nbytes for x in params.values())


def masks_of(params, distribution, **options):
    return sparsity.MagnitudePruning(
        sparsity_distribution_fn=distribution, **options
    ).instant_sparsify(params)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share", "spread", "scope"),
    [
        ("macs", 0.3, sparsity.Uniform(), sparsity.Layerwise()),
        ("macs", 0.07, sparsity.ERK(), sparsity.Layerwise()),
        ("nbytes", 0.2, sparsity.Uniform(), sparsity.Layerwise()),
        ("nbytes", 0.6, sparsity.ERK(), sparsity.Layerwise()),
        ("macs", 0.3, sparsity.Uniform(), sparsity.Global()),
        ("nbytes", 0.2, sparsity.ERK(), sparsity.Global()),
    ],
)
def test_masks_cost_what_is_allowed_or_up_to_half_a_percent_less(name, share, spread, scope):
    params, graph = case()
    distribution = sparsity.budget(graph, **{name: share}, distribution=spread)
    masks = masks_of(params, distribution, scope=scope)
    assert 0.995 * share <= left(graph, params, masks, name) <= share
    assert masks["bias"] is None


def test_a_budget_of_a_whole_model_removes_nothing():
    params, graph = case()
    assert set(sparsity.budget(graph, macs=1)(params).values()) == {None, 0.0}


@pytest.mark.slow
def test_under_a_global_scope_cheap_weights_are_kept_for_their_score():
    # A weight of conv runs at 9 positions, one of the others at one.
    params, graph = case()
    pruner = functools.partial(masks_of, params, sparsity.budget(graph, macs=0.3))
    by_layer, by_cost = pruner(), pruner(scope=sparsity.Global())
    assert by_cost["deep"].mean() > by_layer["deep"].mean()
    assert by_cost["conv"].mean() < by_layer["conv"].mean()


def test_overrides_and_filters_of_the_distribution_hold():
    params, graph = case()
    spread = sparsity.Uniform(
        filter_fn=lambda path, _: path[0] != "head",
        custom_sparsity_map={"deep": 0.25, "bias": None},
    )
    rates = sparsity.budget(graph, nbytes=0.6, distribution=spread)(params)
    assert (rates["head"], rates["bias"], rates["deep"]) == (None, None, 0.25)
    assert rates["wide"] == pytest.approx(rates["conv"], rel=0.05)


@pytest.mark.slow
def test_patterns_with_a_density_of_their_own_are_counted_with_it():
    params, graph = case()
    masks = masks_of(params, sparsity.budget(graph, macs=0.6), sparsity_type=sparsity.NByM(1, 2))
    # What is left of the budget after half of all is spent on leaves that stay dense.
    assert {float(mask.mean()) for mask in masks.values() if mask is not None} <= {0.5, 1.0}
    assert 0.5 <= graph.macs(masks) / graph.macs() <= 0.6


@pytest.mark.slow
def test_patterns_of_units_stay_within_the_budget():
    params, graph = case()
    params = {name: params[name] for name in ("wide", "deep", "head")}
    graph = trace(lambda p, x: x @ p["wide"] @ p["deep"] @ p["head"], params, jnp.ones((1, 16)))
    masks = masks_of(params, sparsity.budget(graph, macs=0.3), sparsity_type=sparsity.Block((2, 2)))
    assert 0.27 <= graph.macs(masks) / graph.macs() <= 0.3


def test_what_cannot_be_met_is_said_with_the_least_that_can():
    params, graph = case()
    spread = sparsity.Uniform(filter_fn=lambda path, _: path[0] != "conv")
    with pytest.raises(
        ValueError, match=r"budget\(macs=0.5\) cannot be met.* 0\.(\d+) of the cost"
    ) as error:
        sparsity.budget(graph, macs=0.5, distribution=spread)(params)
    least = float(str(error.value).split("selects, ")[1].split()[0])
    conv = 9 * 27 * 16
    assert least == pytest.approx(conv / graph.macs(), abs=2e-3)


@pytest.mark.parametrize("value", [0, -0.1, 1.5, float("nan"), "half"])
@pytest.mark.parametrize("name", ["macs", "nbytes"])
def test_budgets_outside_their_range_are_named(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        sparsity.budget(case()[1], **{name: value})


def test_one_budget_and_no_sparsity_are_needed():
    graph = case()[1]
    with pytest.raises(ValueError, match=r"one of macs and nbytes, got macs = None, nbytes = None"):
        sparsity.budget(graph)
    with pytest.raises(ValueError, match=r"got macs = 0.5, nbytes = 0.5"):
        sparsity.budget(graph, macs=0.5, nbytes=0.5)
    with pytest.raises(ValueError, match=r"give ERK\(\) without one, got sparsity = 0.8"):
        sparsity.budget(graph, macs=0.5, distribution=sparsity.ERK(0.8))


def test_parameters_of_another_shape_are_named():
    params, graph = case()
    with pytest.raises(ValueError, match=r"shape \(2, 2\) at 'head'.*traced with \(20, 10\)"):
        sparsity.budget(graph, macs=0.5)(params | {"head": jnp.ones((2, 2))})
