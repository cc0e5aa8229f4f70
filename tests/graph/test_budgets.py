"""Budgets: masks that leave a given part of a model's cost, and never more."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.graph import trace
from tests.graph import models
from tests.helpers import slow_but

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


def measure_share(graph, params, masks, name):
    """The part of the cost that masks leave."""
    if name == "macs":
        return graph.macs(masks) / graph.macs()
    return nbytes(params, masks) / sum(x.nbytes for x in params.values())


def make_masks(params, distribution, **options):
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
    masks = make_masks(params, distribution, scope=scope)
    assert 0.995 * share <= measure_share(graph, params, masks, name) <= share
    assert masks["bias"] is None


def test_a_budget_of_a_whole_model_removes_nothing():
    params, graph = case()
    assert set(sparsity.budget(graph, macs=1)(params).values()) == {None, 0.0}


@pytest.mark.slow
def test_under_a_global_scope_cheap_weights_are_kept_for_their_score():
    # A weight of conv runs at 9 positions, one of the others at one.
    params, graph = case()
    pruner = functools.partial(make_masks, params, sparsity.budget(graph, macs=0.3))
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
    masks = make_masks(params, sparsity.budget(graph, macs=0.6), sparsity_type=sparsity.NByM(1, 2))
    # What is left of the budget after half of all is spent on leaves that stay dense.
    assert {float(mask.mean()) for mask in masks.values() if mask is not None} <= {0.5, 1.0}
    assert 0.5 <= graph.macs(masks) / graph.macs() <= 0.6


def test_of_parameters_with_a_density_of_their_own_those_that_fit_stay_dense():
    # Each of the two products has half of the cost; 2:4 removes a quarter of the whole from it.
    params = {"a": jnp.ones((8, 4)), "b": jnp.ones((4, 8))}
    graph = trace(lambda params, x: x @ params["a"] @ params["b"], params, jnp.ones((2, 8)))
    for share, expected in ((0.8, [0, 0.5]), (0.74, [0.5, 0.5]), (0.5, [0.5, 0.5])):
        state = sparsity.MagnitudePruning(
            sparsity_type=sparsity.NByM(2, 4),
            sparsity_distribution_fn=sparsity.budget(graph, macs=share),
        ).init_state(params)
        assert [float(x) for x in state.target_sparsities.values()] == expected


@pytest.mark.slow
def test_patterns_of_units_stay_within_the_budget():
    params, graph = case()
    params = {name: params[name] for name in ("wide", "deep", "head")}
    graph = trace(lambda p, x: x @ p["wide"] @ p["deep"] @ p["head"], params, jnp.ones((1, 16)))
    masks = make_masks(
        params, sparsity.budget(graph, macs=0.3), sparsity_type=sparsity.Block((2, 2))
    )
    assert 0.27 <= graph.macs(masks) / graph.macs() <= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 4])
def test_a_constant_fan_in_meets_the_budget_exactly_with_a_smaller_last_group(group):
    params = {"w": jax.random.normal(jax.random.key(0), (100, 10))}
    graph = trace(lambda p, x: x @ p["w"], params, jnp.ones((1, 100)))
    budget = sparsity.budget(graph, macs=0.25)
    mask = make_masks(params, budget, sparsity_type=sparsity.FanIn(group))["w"]
    np.testing.assert_array_equal(mask.sum(axis=0), [25] * 10)


def test_what_cannot_be_met_is_said_with_the_least_that_can():
    params, graph = case()
    spread = sparsity.Uniform(filter_fn=lambda path, _: path[0] != "conv")
    with pytest.raises(
        ValueError, match=r"budget\(macs=0.5\) cannot be met: the sparsest masks .* of the cost"
    ) as error:
        sparsity.budget(graph, macs=0.5, distribution=spread)(params)
    least = float(str(error.value).split("leave ")[1].split()[0])
    conv = 9 * 27 * 16
    assert least == pytest.approx(conv / graph.macs(), abs=2e-3)


def test_a_pattern_that_a_budget_cannot_meet_is_said_to_keep_what_it_keeps():
    graph = trace(lambda p, x: x @ p["w"], {"w": jnp.ones((4, 8))}, jnp.ones((1, 4)))
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.budget(graph, macs=0.3), sparsity_type=sparsity.NByM(2, 4)
    )
    with pytest.raises(ValueError, match=r"the sparsest masks of its patterns leave 0\.5"):
        updater.instant_sparsify({"w": jnp.ones((4, 8))})


def odd_budget(final, *overrides):
    """Targets of a pattern that ends at `final`; some methods it overrides without a change."""
    params = {"w": jnp.ones((4, 8))}
    graph = trace(lambda p, x: x @ p["w"], params, jnp.ones((1, 4)))
    methods = {
        name: functools.partialmethod(getattr(sparsity.SparsityType, name)) for name in overrides
    }
    methods |= {"final_sparsity": lambda self, target: final}
    pruner = sparsity.MagnitudePruning(
        sparsity_type=type("Odd", (sparsity.SparsityType,), methods)(),
        sparsity_distribution_fn=sparsity.budget(graph, macs=0.5),
    )
    return pruner.compute_targets(params, pruner.sites(params))


@pytest.mark.parametrize("overrides", [(), ("select",)])
@pytest.mark.parametrize("final", [float("nan"), -0.5, 1.5, "0.5", np.full(2, 0.5), True])
def test_a_final_sparsity_that_is_no_fraction_is_named(final, overrides):
    with pytest.raises(ValueError, match=r"Odd.*\.final_sparsity of 'w' must be in \[0, 1\]"):
        odd_budget(final, *overrides)


@pytest.mark.parametrize(("final", "target"), [(None, 0.5), (1 + 1e-9, 1.0), (-1e-9, 0.0)])
def test_a_final_sparsity_may_be_unknown_or_rounded(final, target):
    assert odd_budget(final)["w"] == pytest.approx(target, abs=0.02)


def test_a_pattern_with_unknown_counts_is_assumed_to_keep_everything():
    with pytest.raises(ValueError, match=r"cannot be met: .* leave 1\.0 of the cost"):
        odd_budget(None, "select")


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


@pytest.mark.parametrize(("quantity", "across"), [("macs", "nbytes"), ("nbytes", True)])
def test_groups_that_trade_another_cost_than_that_of_a_budget_are_an_error(quantity, across):
    params, graph = case()
    distribution = sparsity.budget(graph, **{quantity: 0.5})
    remedy = {"macs": "True", "nbytes": "'nbytes'"}[quantity]
    with pytest.raises(
        ValueError, match=rf"across = {across!r} counts another cost .* Use across = {remedy}\."
    ):
        distribution(params, scope=sparsity.Coupled(graph, across=across))
    for fits in (False, {"macs": True, "nbytes": "nbytes"}[quantity]):
        sparsities = distribution(params, scope=sparsity.Coupled(graph, across=fits))
        assert 0 < sparsities["deep"] < 1


# Under a global scope leaves trade weights: the cost of products counts, not that of leaves.


def low_rank(p, x):
    return x @ p["w"] + x @ p["a"] @ p["b"]


def merged(p, x):
    return x @ (p["a"] @ p["b"])


def branched(p, x):
    return jax.lax.cond(x.sum() > 0, lambda: x @ p["w"], lambda: (x @ p["a"]) @ p["b"])


def joined(p, x):
    return x @ jnp.concatenate([p["w"], p["v"]], 1) @ jnp.concatenate([p["v"], p["w"]], 1).T


def quantized(p, x):
    def q(w):
        return w + jax.lax.stop_gradient(jnp.round(8 * w) / 8 - w)

    return jnp.tanh(x @ q(p["a"])) @ q(p["b"])


def looped(p, x):
    x = jax.lax.scan(lambda x, _: (jnp.tanh(x @ p["w"][:, :12]), None), x, None, length=3)[0]
    return x @ p["a"] @ p["b"]


GLOBAL = {
    "low rank": (low_rank, {}),
    "merged": (merged, {}),
    "branched": (branched, {}),
    "joined": (joined, {}),
    "quantized": (quantized, {}),
    "looped": (looped, {}),
    "overridden": (merged, {"custom_sparsity_map": {"b": 0.25}}),
    "experts": (lambda p, x: jax.lax.ragged_dot(x, p["e"], jnp.array([1, 2])) @ p["b"], {}),
}


@pytest.mark.parametrize("name", slow_but(["low rank", "overridden", "experts"], GLOBAL))
@pytest.mark.parametrize("share", slow_but([0.6], [0.4, 0.6, 0.8]))
def test_a_global_scope_never_exceeds_a_budget(name, share):
    fn, options = GLOBAL[name]
    shapes = {"w": (12, 20), "v": (12, 9), "a": (12, 5), "b": (5, 20), "e": (2, 12, 5)}
    rng = np.random.default_rng(0)
    params = {
        key: jnp.asarray(rng.normal(size=shape), jnp.float32) for key, shape in shapes.items()
    }
    graph = trace(fn, params, jnp.ones((3, 12)))
    spread = sparsity.Uniform(**options)
    for scale in (1.0, 30.0):  # the scores of one leaf win
        scaled = params | {"w": scale * params["w"], "b": scale * params["b"]}
        distribution = sparsity.budget(graph, macs=share, distribution=spread)
        masks = make_masks(scaled, distribution, scope=sparsity.Global(use_normalization=False))
        assert graph.macs(masks) <= share * graph.macs()
        assert graph.macs(masks) >= 0.8 * share * graph.macs()


def test_a_budget_of_equal_weights_is_not_exceeded_by_rounding():
    # At the lowest sparsity at which each of the two keeps 128 of 256, 256.9 of 512 stay.
    params = {name: jnp.arange(1.0, 257).reshape(16, 16) for name in "ab"}
    graph = trace(lambda p, x: x @ p["a"] + x @ p["b"], params, jnp.ones((1, 16)))
    distribution = sparsity.budget(graph, macs=0.5)
    masks = make_masks(params, distribution, scope=sparsity.Global())
    assert sum(int(mask.sum()) for mask in masks.values()) == 256


@pytest.mark.parametrize("name", ["low rank", "merged", "branched"])
def test_a_budget_holds_along_a_ramp_and_where_it_is_traced(name):
    fn, _ = GLOBAL[name]
    params = models.draw({"w": (12, 20), "a": (12, 5), "b": (5, 20)})
    graph = trace(fn, params, jnp.ones((3, 12)))
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.budget(graph, macs=0.4),
        scope=sparsity.Global(),
        scheduler=sparsity.PolynomialSchedule(1, 0, 3),
    )
    tx = pruner.wrap_optax(optax.sgd(0.1))
    state, macs = tx.init(params), []
    for _ in range(4):
        updates, state = jax.jit(tx.update)(params, state, params)
        params = optax.apply_updates(params, updates)
        macs.append(graph.macs(state.masks))
    assert macs == sorted(macs, reverse=True)
    assert 0.3 * graph.macs() <= macs[-1] <= 0.4 * graph.macs()


def test_rigl_under_a_global_scope_refuses_a_budget_that_a_move_would_break():
    params = models.draw({"a": (12, 5), "b": (5, 20)})
    graph = trace(merged, params, jnp.ones((3, 12)))
    pruner = sparsity.RigL(
        sparsity_distribution_fn=sparsity.budget(graph, macs=0.4),
        scope=sparsity.Global(),
        scheduler=sparsity.PeriodicSchedule(2, 0, 4),
    )
    tx = pruner.wrap_optax(optax.sgd(0.1))
    with pytest.raises(ValueError, match="no budget would be kept"):
        tx.update(params, tx.init(params), params)


@pytest.mark.slow
def test_costs_of_a_distribution_of_ones_own_add_up():
    class Priced(sparsity.masks.MaskBudget):
        custom_sparsity_map = None

        def __call__(self, params):
            return dict.fromkeys(params, 0.5)

        def cost(self, path, param):
            return {"a": 3.0, "b": 0.1}[path[0]]

    params = {"a": jnp.arange(1.0, 11), "b": jnp.arange(1.0, 41)}
    masks = make_masks(params, Priced(), scope=sparsity.Global(use_normalization=False))
    cost = 3 * masks["a"].sum() + 0.1 * masks["b"].sum()
    assert 0.9 * (3 * 5 + 0.1 * 20) <= cost <= 3 * 5 + 0.1 * 20 + 1e-6
    assert masks["b"].sum() > 20  # a weight of b is worth 30 times more
