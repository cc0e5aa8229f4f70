"""Masked channels are cut for real: what is left computes what the masked model computes."""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import Coupled, Plan, Uniform, shrink, trace
from tests.helpers import ROOT
from tests.shrinking.networks import Network


@jax.custom_vjp
def _straight_through(x):
    return jnp.sign(x)


_straight_through.defvjp(
    lambda x: (jnp.sign(x), x), lambda x, residual: (residual * (jnp.abs(x) < 1),)
)


@jax.custom_jvp
def _steep(x):
    return jnp.maximum(x, 0.0)


@_steep.defjvp
def _steep_jvp(primals, tangents):
    return _steep(*primals), 3 * tangents[0] * (primals[0] >= 0)  # 3 at 0, where relu has 0


def _mlp(params, x):
    hidden = _steep(x @ params["first"]["kernel"] + params["first"]["bias"])
    second = jax.checkpoint(lambda h: jnp.tanh(h @ params["second"]["kernel"]))(hidden)
    second = second + 0.1 * _straight_through(second)
    return second @ params["last"]["kernel"] + params["last"]["bias"]


@pytest.fixture
def mlp():
    key = iter(jax.random.split(jax.random.key(0), 5))
    with jax.enable_x64(True):
        draw = functools.partial(jax.random.normal, dtype=jnp.float64)
        params = {
            "first": {"kernel": draw(next(key), (5, 8)), "bias": draw(next(key), (8,))},
            "second": {"kernel": draw(next(key), (8, 12)) / 3},
            "last": {"kernel": draw(next(key), (12, 2)), "bias": jnp.zeros(2)},
        }
        x = draw(next(key), (6, 5))
        yield params, x, trace(_mlp, params, x)


def _coupled(graph, sparsity=0.5, **options):
    return {
        "scope": Coupled(graph, **options),
        "sparsity_distribution_fn": Uniform(sparsity, filter_fn=graph.is_weight),
    }


def _difference(one, other):
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max((float(jnp.abs(a - b).max()) for a, b in leaves), default=0.0)


@pytest.mark.slow
def test_the_channels_of_the_largest_sums_stay_with_all_that_belongs_to_them(mlp):
    params, _, graph = mlp
    masks = sparsity.MagnitudePruning(**_coupled(graph)).instant_sparsify(params)[1]
    importance = (
        np.abs(params["first"]["kernel"]).sum(0)
        + np.abs(params["first"]["bias"])
        + np.abs(params["second"]["kernel"]).sum(1)
    )
    stays = np.zeros(8, np.uint8)
    stays[np.argsort(-importance)[:4]] = 1
    np.testing.assert_array_equal(masks["first"]["bias"], stays)
    np.testing.assert_array_equal(masks["first"]["kernel"], np.tile(stays, (5, 1)))
    np.testing.assert_array_equal(np.asarray(masks["second"]["kernel"]).max(1), stays)
    assert masks["last"]["bias"] is None


@pytest.mark.slow
def test_signed_saliencies_are_summed_before_the_absolute_value(mlp):
    params, _, graph = mlp
    grads = jax.tree.map(lambda w: jnp.cos(7 * w), params)
    masks = sparsity.SaliencyPruning(**_coupled(graph)).instant_sparsify(params, grads)[1]
    product = jax.tree.map(lambda w, g: np.asarray(w * g), params, grads)
    importance = np.abs(
        product["first"]["kernel"].sum(0)
        + product["first"]["bias"]
        + product["second"]["kernel"].sum(1)
    )
    kept = np.flatnonzero(masks["first"]["bias"])
    assert set(kept) == set(np.argsort(-importance)[:4])


@pytest.mark.slow
def test_what_is_left_computes_the_masked_model_and_its_gradients(mlp):
    params, x, graph = mlp
    pruned, masks = sparsity.MagnitudePruning(**_coupled(graph)).instant_sparsify(params)
    small = shrink(graph, pruned, masks)
    assert small.params["second"]["kernel"].shape == (4, 6)
    assert _difference(small.apply(small.params, x), _mlp(pruned, x)) < 1e-12

    def loss(apply, params):
        return jnp.sum(jnp.sin(apply(params, x)))

    on_small = jax.grad(functools.partial(loss, small.apply))(small.params)
    on_masked = jax.grad(functools.partial(loss, _mlp))(pruned)
    assert _difference(on_small, shrink(graph, on_masked, small.plan).params) < 1e-12


@pytest.mark.slow
def test_rules_for_derivatives_are_kept_at_kinks(mlp):
    params, x, graph = mlp
    masks = sparsity.MagnitudePruning(**_coupled(graph)).instant_sparsify(params)[1]
    small = shrink(graph, params, masks)
    at_kink = jax.tree.map(jnp.zeros_like, small.params)
    at_kink["second"]["kernel"] += 1
    at_kink["last"]["kernel"] += 1
    slope = jax.grad(lambda p: jnp.sum(small.apply(p, x)))(at_kink)["first"]["bias"]
    # tanh'(0) + 0.1 = 1.1 for each of 6 channels, 2 outputs, 6 rows, 3 for the rule of `_steep`.
    np.testing.assert_allclose(slope, 1.1 * 6 * 2 * 6 * 3)


@pytest.mark.slow
def test_other_batch_sizes_jit_and_vmap(mlp):
    params, x, graph = mlp
    pruned, masks = sparsity.MagnitudePruning(**_coupled(graph)).instant_sparsify(params)
    small = shrink(graph, pruned, masks)
    expected = _mlp(pruned, x)
    assert _difference(jax.jit(small.apply)(small.params, x[:3]), expected[:3]) < 1e-12
    each = jax.vmap(lambda row: small.apply(small.params, row[None])[0])(x)
    assert _difference(each, expected) < 1e-12


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(1e-2),
    "lion": optax.lion(1e-3),
    "rmsprop": optax.rmsprop(1e-3),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_the_masked_run_would(mlp, name):
    params, x, graph = mlp
    pruner = sparsity.MagnitudePruning(
        scheduler=sparsity.OneShotSchedule(2),
        use_packed_masks=name == "adamw",
        **_coupled(graph),
    )
    tx = pruner.wrap_optax(OPTIMIZERS[name])

    def step(apply, params, state):
        grads = jax.grad(lambda p: jnp.mean((apply(p, x) - 1) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    on_masked, state = jax.jit(functools.partial(step, _mlp)), tx.init(params)
    for _ in range(4):
        params, state = on_masked(params, state)
    masks = state.masks
    if pruner.use_packed_masks:
        masks = sparsity.unpack_masks(masks, params)
    small = shrink(graph, params, masks, state)
    on_small, small_params, small_state = (
        jax.jit(functools.partial(step, small.apply)),
        *read_small(small),
    )
    for _ in range(3):
        params, state = on_masked(params, state)
        small_params, small_state = on_small(small_params, small_state)
    expected = shrink(graph, params, small.plan, state)
    assert _difference(expected.params, small_params) < 1e-10
    assert _difference(expected.opt_state, small_state) < 1e-10


def read_small(small):
    return small.params, small.opt_state


@pytest.mark.slow
def test_rigl_and_set_keep_the_number_of_channels(mlp):
    params, _, graph = mlp
    for kind in (sparsity.RigL, sparsity.SET):
        pruner = kind(scheduler=sparsity.PeriodicSchedule(1, 1, 9), **_coupled(graph))
        state = pruner.init_state(params)
        first = state.masks
        grads = jax.tree.map(lambda w: jnp.cos(9 * w), params)
        moved = pruner.update_state(state._replace(count=jnp.int32(3)), params, grads).masks
        for masks in (first, moved):
            assert int(masks["first"]["bias"].sum()) == 4
            assert int(masks["last"]["kernel"].sum()) == 6 * 2
        assert shrink(graph, params, moved).params["second"]["kernel"].shape == (4, 6)


@pytest.mark.slow
def test_a_budget_is_that_of_the_smaller_arrays(mlp):
    params, _, graph = mlp
    for options in ({}, {"across": True}, {"round_to": 2}, {"across": True, "round_to": 2}):
        pruner = sparsity.MagnitudePruning(
            scope=Coupled(graph, **options),
            sparsity_distribution_fn=sparsity.budget(graph, macs=0.5),
        )
        small = shrink(graph, *pruner.instant_sparsify(params))
        assert small.macs() <= 0.5 * graph.macs()
        if not options:  # a channel more of every group would be too much
            first, second = (small.params[x]["kernel"].shape[1] + 1 for x in ("first", "second"))
            assert 6 * (5 * first + first * second + second * 2) > 0.5 * graph.macs()
        if "round_to" in options:
            assert small.params["second"]["kernel"].shape[0] % 2 == 0


@pytest.mark.slow
def test_a_plan_is_text_that_cuts_another_checkpoint(mlp):
    params, x, graph = mlp
    masks = sparsity.MagnitudePruning(**_coupled(graph)).instant_sparsify(params)[1]
    plan = Plan.from_json(shrink(graph, params, masks).plan.to_json())
    other = jax.tree.map(lambda w: w + 1, params)
    again = shrink(trace(_mlp, params, x[:2]), other, plan)
    kept = np.flatnonzero(masks["first"]["bias"])
    np.testing.assert_array_equal(again.params["first"]["bias"], other["first"]["bias"][kept])


def test_a_smaller_model_is_equal_to_itself_alone(mlp):
    params, _, graph = mlp
    masks = sparsity.MagnitudePruning(**_coupled(graph)).instant_sparsify(params)[1]
    small = shrink(graph, params, masks)
    assert small in {small}
    assert small != dataclasses.replace(small)


@pytest.mark.slow
def test_shrinking_twice_is_shrinking_by_the_composed_plan(mlp):
    params, x, graph = mlp
    first = shrink(graph, *sparsity.MagnitudePruning(**_coupled(graph)).instant_sparsify(params))
    pruner = sparsity.MagnitudePruning(**_coupled(first.graph))
    second = shrink(first.graph, *pruner.instant_sparsify(first.params))
    once = shrink(graph, params, first.plan.then(second.plan))
    assert once.params["second"]["kernel"].shape == (2, 3)
    assert _difference(once.params, second.params) == 0
    assert _difference(once.apply(once.params, x), second.apply(second.params, x)) < 1e-12


def _scanned(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"], None

    return jax.lax.scan(layer, x @ params["first"], params["layers"])[0] @ params["last"]


@pytest.mark.slow
def test_each_layer_of_a_scan_chooses_its_own_channels_and_shares_those_of_the_stream():
    key = iter(jax.random.split(jax.random.key(0), 6))
    with jax.enable_x64(True):
        draw = functools.partial(jax.random.normal, dtype=jnp.float64)
        layers = {"up": draw(next(key), (3, 6, 8)), "down": draw(next(key), (3, 8, 6))}
        params = {
            "first": draw(next(key), (4, 6)),
            "layers": layers | {"bias": draw(next(key), (3, 8))},
            "last": draw(next(key), (6, 2)),
        }
        x = draw(next(key), (5, 4))
        graph = trace(_scanned, params, x)
        assert {group.name: group.layers for group in graph.groups} == {
            "first:1": 0,
            "layers/up:2": 3,
        }
        pruner = sparsity.MagnitudePruning(**_coupled(graph))
        pruned, masks = pruner.instant_sparsify(params)
        kept = [set(np.flatnonzero(row)) for row in np.asarray(masks["layers"]["bias"])]
        importance = (
            np.abs(layers["up"]).sum(1)
            + np.abs(params["layers"]["bias"])
            + np.abs(layers["down"]).sum(2)
        )
        assert kept == [set(np.argsort(-row)[:4]) for row in importance]
        small = shrink(graph, pruned, masks)
        assert small.params["layers"]["up"].shape == (3, 3, 4)
        assert _difference(small.apply(small.params, x), _scanned(pruned, x)) < 1e-12
        assert Plan.from_json(small.plan.to_json()) == small.plan


@pytest.mark.slow
def test_channels_move_within_each_layer_of_a_scan():
    key = iter(jax.random.split(jax.random.key(0), 4))
    draw = jax.random.normal
    # A layer whose weights are all larger would win every place, if layers competed.
    scale = jnp.array([1.0, 10.0, 100.0])[:, None, None]
    layers = {"up": scale * draw(next(key), (3, 6, 8)), "down": scale * draw(next(key), (3, 8, 6))}
    params = {
        "first": draw(next(key), (4, 6)),
        "layers": layers | {"bias": jnp.ones((3, 8))},
        "last": draw(next(key), (6, 2)),
    }
    graph = trace(_scanned, params, jnp.ones((5, 4)))
    pruner = sparsity.RigL(scheduler=sparsity.PeriodicSchedule(1, 1, 9), **_coupled(graph))
    state = pruner.init_state(params)
    grads = jax.tree.map(lambda w: jnp.cos(9 * w), params)
    moved = pruner.update_state(state._replace(count=jnp.int32(3)), params, grads).masks
    assert np.asarray(moved["layers"]["bias"]).sum(axis=1).tolist() == [4, 4, 4]
    assert (np.asarray(moved["layers"]["bias"]) != state.masks["layers"]["bias"]).any()
    assert shrink(graph, params, moved).params["layers"]["up"].shape == (3, 3, 4)


@pytest.mark.slow
def test_statistics_that_the_model_returns_shrink_with_their_channels():
    x = jax.random.normal(jax.random.key(1), (4, 6, 6, 2))
    variables = Network().init(jax.random.key(0), x)

    def fn(variables, x):
        return Network(train=True).apply(variables, x, mutable="batch_stats")

    graph = trace(fn, variables, x)
    pruner = sparsity.MagnitudePruning(**_coupled(graph))
    pruned, masks = pruner.instant_sparsify(variables["params"])
    small = shrink(graph, {**variables, "params": pruned}, {"params": masks})
    (expected, _), (actual, state) = (
        fn({**variables, "params": pruned}, x),
        small.apply(small.params, x),
    )
    assert _difference(expected, actual) < 1e-5
    assert state["batch_stats"]["BatchNorm_1"]["mean"].shape == (8,)
    assert "16" in small.report()


# Bad input.


def test_channels_whose_removal_is_not_proven_stay_with_their_masks(mlp):
    params, x, graph = mlp
    stays = jnp.arange(8) % 2
    first = {"first": {"kernel": jnp.tile(stays, (5, 1))}}
    both = first | {"second": {"kernel": jnp.ones((8, 12))}}
    inputs = {"first": {"kernel": jnp.ones((5, 8)).at[2].set(0)}}
    for masks in (first, both, inputs):  # a bias goes on, or an axis is that of the input
        small = shrink(graph, params, masks)
        assert small.plan == Plan({}, {})
        kept = small.masks["first"]["kernel"]
        np.testing.assert_array_equal(kept, masks["first"]["kernel"])
        kernel = small.params["first"]["kernel"]
        np.testing.assert_array_equal(kernel, params["first"]["kernel"] * kept)
    masked = params | {"first": params["first"] | {"kernel": kernel}}
    assert _difference(small.apply(small.params, x), _mlp(masked, x)) == 0


def test_a_group_that_a_norm_reads_does_not_vanish():
    def model(params, x):
        h = x @ params["up"]
        return (h - h.mean(-1, keepdims=True)) @ params["down"]

    params = {"up": jnp.ones((3, 8)), "down": jnp.ones((8, 2))}
    masks, x = jax.tree.map(jnp.zeros_like, params), jnp.ones((1, 3))
    small = shrink(sparsity.trace(model, params, x), params, masks)
    assert small.params["up"].shape == (3, 1)
    np.testing.assert_array_equal(small.apply(small.params, x), [[0, 0]])


def test_masks_and_plans_of_another_model_are_refused(mlp):
    params, _, graph = mlp
    with pytest.raises(ValueError, match=r"other/kernel"):
        shrink(graph, params, {"other": {"kernel": jnp.ones((5, 8))}})
    plan = Plan({("first", "bias"): {0: np.arange(3)}}, {("first", "bias"): (9,)})
    with pytest.raises(ValueError, match=r"first/bias.*\(9,\)"):
        shrink(graph, params, plan)
    with pytest.raises(ValueError, match=r"Not a plan"):
        Plan.from_json("[]")


def test_round_to_that_cannot_be_met_names_the_group(mlp):
    params, _, graph = mlp
    with pytest.raises(ValueError, match=r"round_to = 10.*first/kernel:1"):
        sparsity.MagnitudePruning(**_coupled(graph, round_to=10)).instant_sparsify(params)


def test_factored_moments_join_channels_and_are_refused(mlp):
    params, _, graph = mlp
    masks = sparsity.MagnitudePruning(**_coupled(graph)).instant_sparsify(params)[1]
    state = optax.adafactor(1e-3, min_dim_size_to_factor=2).init(params)
    with pytest.raises(ValueError, match=r"first/bias|first/kernel.*factored moments"):
        shrink(graph, params, masks, state)
    unfactored = optax.adafactor(1e-3).init(params)  # too small to be factored
    assert shrink(graph, params, masks, unfactored).params["last"]["kernel"].shape == (6, 2)


@pytest.mark.slow
def test_the_state_of_other_params_is_refused(mlp):
    params, _, graph = mlp
    masks = sparsity.MagnitudePruning(**_coupled(graph)).instant_sparsify(params)[1]
    for other in ({"a": params["first"]}, params | {"more": jnp.ones(2)}):
        with pytest.raises(ValueError, match=r"\(8,\).*state of these params"):
            shrink(graph, params, masks, optax.adam(1e-3).init(other))


_CUT = """
import sys
import jax.numpy as jnp
import numpy as np
import sparsity

stored = np.load("checkpoint.npz")
params = {"up": stored["up"], "bias": stored["bias"], "down": stored["down"]}
model = lambda p, x: jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]
graph = sparsity.trace(model, params, jnp.ones((3, 4)))  # at another batch size
small = sparsity.shrink(graph, params, sparsity.Plan.from_json(open("plan.json").read()))
np.savez("small.npz", y=small.apply(small.params, stored["x"]), **small.params)
"""


@pytest.mark.slow
def test_a_plan_cuts_another_checkpoint_in_another_process(tmp_path):
    draw = np.random.default_rng(0).standard_normal

    def params():
        return {
            "up": np.float32(draw((4, 6))),
            "bias": np.float32(draw(6)),
            "down": np.float32(draw((6, 2))),
        }

    def model(params, x):
        return jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]

    one, other, x = params(), params(), np.float32(draw((8, 4)))
    graph = trace(model, one, x)
    masks = sparsity.MagnitudePruning(**_coupled(graph)).instant_sparsify(one)[1]
    (tmp_path / "plan.json").write_text(shrink(graph, one, masks).plan.to_json())
    np.savez(tmp_path / "checkpoint.npz", x=x, **other)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", _CUT], cwd=tmp_path, env=environment, check=True)
    actual = np.load(tmp_path / "small.npz")
    assert actual["up"].shape == (4, 3)
    masked = jax.tree.map(lambda w, mask: w * mask, other, masks)
    np.testing.assert_allclose(actual["y"], model(masked, x), atol=1e-6)


@jax.custom_jvp
def _with_signs(x):
    return 2.0 * x, (x > 0).astype(jnp.int32)


@_with_signs.defjvp
def _with_signs_jvp(primals, tangents):
    signs = np.zeros(primals[0].shape, jax.dtypes.float0)
    return _with_signs(*primals), (3.0 * tangents[0], signs)  # 3, where the derivative is 2


def test_a_rule_for_derivatives_may_belong_to_a_function_that_returns_integers_too():
    def fn(params, x):
        doubled, signs = _with_signs(x @ params["in"])
        return jnp.tanh((doubled * signs) @ params["out"])

    rng = np.random.default_rng(0)
    params = {
        "in": jnp.asarray(rng.normal(size=(4, 6))),
        "out": jnp.asarray(rng.normal(size=(6, 2))),
    }
    masks = {name: np.ones(x.shape, np.uint8) for name, x in params.items()}
    masks["in"][:, 2] = masks["out"][2] = 0
    x = jnp.asarray(rng.normal(size=(3, 4)))
    small = shrink(trace(fn, params, x), params, masks)
    assert small.params["in"].shape == (4, 5)
    masked = {name: x * masks[name] for name, x in params.items()}
    large_grads = jax.grad(lambda params: fn(params, x).sum())(masked)
    grads = jax.grad(lambda params: small.apply(params, x).sum())(small.params)
    for name, axis in (("in", 1), ("out", 0)):
        expected = np.delete(large_grads[name], 2, axis)
        np.testing.assert_allclose(grads[name], expected, rtol=1e-5)


def _concatenated(params, x):
    return jnp.concatenate([x @ params["a"], x @ params["b"]], axis=1) @ params["c"]


def _shifted(params, x):
    shift = jax.lax.broadcast_in_dim(x.sum(axis=1), (2, 4), (0,))
    return (x @ params["a"] + shift).sum(axis=1)


def _cut_between_heads(params, x):
    heads = jnp.einsum("bi,ihd->bhd", x, params["a"]).reshape(2, 24)
    return heads[:, :12] @ params["b"] + heads[:, 12:] @ params["c"]


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (_concatenated, {"a": (3, 4), "b": (3, 5), "c": (9, 2)}),
        (_shifted, {"a": (3, 4)}),
        (_cut_between_heads, {"a": (3, 4, 6), "b": (12, 2), "c": (12, 2)}),
    ],
)
def test_channels_that_meet_others_are_cut_exactly(fn, shapes):
    # Integers: all sums are exact.
    params = {name: jnp.arange(float(np.prod(x))).reshape(x) for name, x in shapes.items()}
    masks = {"a": jnp.ones(shapes["a"], jnp.uint8).at[..., 1].set(0)}
    masked = params | {"a": params["a"] * masks["a"]}
    x = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, -6.0]])
    small = shrink(trace(fn, params, x), params, masks)
    assert small.params["a"].shape == (*shapes["a"][:-1], shapes["a"][-1] - 1)
    np.testing.assert_array_equal(small.apply(small.params, x), fn(masked, x))


@pytest.mark.parametrize("place", [1, -2, -9])
def test_a_slice_at_a_computed_place_is_that_of_the_masked_model(place):
    def model(params, x, place):
        rows = jax.lax.dynamic_slice(params["scale"], (place, 0), (2, 6))
        return (x @ params["up"] * rows.sum(0)) @ params["down"]

    rng = np.random.default_rng(0)
    shapes = {"up": (3, 6), "scale": (5, 6), "down": (6, 2)}
    params = {name: jnp.float32(rng.normal(size=shape)) for name, shape in shapes.items()}
    stays = np.array([1, 0, 1, 1, 0, 1])
    params = {"down": params["down"] * stays[:, None]} | {
        k: params[k] * stays for k in ("up", "scale")
    }
    x, place = jnp.float32(rng.normal(size=(4, 3))), jnp.int32(place)
    small = shrink(trace(model, params, x, place), params, jax.tree.map(lambda w: w != 0, params))
    assert small.params["scale"].shape == (5, 4)
    np.testing.assert_allclose(small.apply(small.params, x, place), model(params, x, place), 1e-6)
