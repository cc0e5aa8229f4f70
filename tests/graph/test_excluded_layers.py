"""Layers that a user leaves out of a distribution keep all channels, and so do their groups."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import Coupled, MagnitudePruning, Uniform, budget, shrink, trace

WIDTH, HIDDEN = 6, 16
TOKENS = np.arange(4)[None]


def draw(**shapes):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=x), jnp.float32) for name, x in shapes.items()}


BLOCK = {
    "scale": (WIDTH,),
    "up": (WIDTH, HIDDEN),
    "bias": (HIDDEN,),
    "down": (HIDDEN, WIDTH),
}


def block(p, x):
    normed = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"]
    return x + jax.nn.relu(normed @ p["up"] + p["bias"]) @ p["down"]


def transformer(params, tokens):
    x = params["embed"][tokens] + params["positions"]
    for p in params["blocks"]:
        x = block(p, x)
    return x @ params["head"]


def scanned(params, tokens):
    x = params["embed"][tokens] + params["positions"]
    x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])
    return x @ params["head"]


def make_params(is_scanned):
    blocks = [draw(**BLOCK) for _ in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *blocks)
    tables = draw(embed=(20, WIDTH), positions=(4, WIDTH), head=(WIDTH, 1))
    return tables | {"blocks": stacked if is_scanned else blocks}


@functools.cache
def case(is_scanned):
    params = make_params(is_scanned)
    return params, trace(scanned if is_scanned else transformer, params, TOKENS)


def sizes_after(distribution, is_scanned=False, cls=MagnitudePruning, **options):
    """Channels of the stream, and hidden units of the two blocks, after the cut."""
    params, graph = case(is_scanned)
    pruner = cls(scope=Coupled(graph), sparsity_distribution_fn=distribution, **options)
    small = shrink(graph, *pruner.instant_sparsify(params))
    stream = small.params["embed"].shape[1]
    if is_scanned:
        return stream, small.params["blocks"]["up"].shape[-1]
    return stream, *(p["up"].shape[1] for p in small.params["blocks"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"embed": None, "head": None}, (WIDTH, 8, 8)),
        ({"positions": None}, (WIDTH, 8, 8)),
        ({"blocks/0/.*": None}, (WIDTH, HIDDEN, 8)),
        ({"blocks/0/bias": None}, (3, HIDDEN, 8)),  # names a vector
        ({"blocks/1/scale": None}, (WIDTH, 8, 8)),
        ({"embed": 0.0, "head": 0.0, "positions": 0.0}, (3, 8, 8)),  # others may cut these
    ],
)
def test_none_in_a_map_keeps_all_groups_of_a_parameter(overrides, expected):
    assert sizes_after(Uniform(0.5, custom_sparsity_map=overrides)) == expected


def hidden_only(path, param):
    return path[-1] in ("up", "down")


@pytest.mark.parametrize(
    ("filter_fn", "expected"),
    [
        (None, (3, 8, 8)),
        (hidden_only, (WIDTH, 8, 8)),
        (lambda path, _: path[0] != "head", (WIDTH, 8, 8)),  # of one column
        (lambda path, _: path[0] != "positions", (WIDTH, 8, 8)),
        (lambda path, _: path[:2] != ("blocks", "1"), (WIDTH, 8, HIDDEN)),
        (lambda path, param: param.ndim > 1, (3, 8, 8)),  # what the default selects
        (lambda path, _: path[-1] not in ("scale", "bias"), (3, 8, 8)),
    ],
)
def test_a_filter_keeps_the_layers_that_the_default_would_select(filter_fn, expected):
    assert sizes_after(Uniform(0.5, filter_fn=filter_fn)) == expected


def test_the_weights_of_a_graph_keep_tables_and_leave_no_norm_and_no_bias_out():
    _, graph = case(False)
    assert sizes_after(Uniform(0.5, filter_fn=graph.is_weight)) == (WIDTH, 8, 8)
    _, graph = case(True)
    everything = Uniform(0.5, filter_fn=lambda path, _: path[-1] not in ("scale", "bias"))
    assert sizes_after(everything, is_scanned=True) == (3, 8)
    assert sizes_after(Uniform(0.5, filter_fn=graph.is_weight), is_scanned=True) == (WIDTH, 8)


@pytest.mark.parametrize("make", [dict, functools.partial], ids=["function", "partial"])
def test_functions_that_return_none_for_a_matrix_keep_the_matrix(make):
    def choose(params):
        def rate(path, param):
            is_chosen = path[-1].key in ("up", "down")
            return 0.5 if is_chosen else None

        return jax.tree_util.tree_map_with_path(rate, params)

    if make is functools.partial:
        choose = functools.partial(
            sparsity.sparsity_distributions.uniform, sparsity=0.5, filter_fn=hidden_only
        )
    assert sizes_after(choose) == (WIDTH, 8, 8)
    uniform = functools.partial(sparsity.sparsity_distributions.uniform, sparsity=0.5)
    assert sizes_after(uniform) == (3, 8, 8)


def test_a_parameter_that_sparsity_type_keeps_dense_keeps_its_groups():
    def pattern(path, param):
        return None if path[-1] == "embed" else sparsity.Unstructured()

    assert sizes_after(Uniform(0.5), sparsity_type=pattern) == (WIDTH, 8, 8)


def test_biases_with_an_axis_for_heads_go_with_their_kernels():
    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x + nn.MultiHeadDotProductAttention(num_heads=4)(x))

    x = np.ones((2, 5, 8), np.float32)
    params = Attention().init(jax.random.key(0), x)["params"]
    graph = trace(lambda params, x: Attention().apply({"params": params}, x), params, x)
    kernels = Uniform(0.5, filter_fn=lambda path, _: path[-1] == "kernel")
    pruner = MagnitudePruning(scope=Coupled(graph), sparsity_distribution_fn=kernels)
    small = shrink(graph, *pruner.instant_sparsify(params))
    bias = small.params["MultiHeadDotProductAttention_0"]["query"]["bias"]
    assert bias.shape == (2, 1)  # of 4 heads with 2 channels each


@pytest.mark.parametrize(
    "distribution",
    [
        Uniform(0.5, filter_fn=lambda path, _: path[-1] == "up"),
        Uniform(0.5, custom_sparsity_map={".*up": None, "head": None}),
        sparsity.ERK(0.5, filter_fn=lambda path, _: path[-1] == "down"),
    ],
)
@pytest.mark.parametrize("cls", [MagnitudePruning, sparsity.RigL])
def test_nothing_left_to_cut_is_an_error_that_names_the_excluded_layers(cls, distribution):
    params, graph = case(False)
    schedule = sparsity.PeriodicSchedule(2)
    updater = cls(scope=Coupled(graph), sparsity_distribution_fn=distribution, scheduler=schedule)
    match = r"No channels can go: .*'(blocks/0/up|blocks/0/down)'.* left out by filter_fn, custom_"
    with pytest.raises(ValueError, match=match):
        updater.wrap_optax(optax.sgd(0.1)).init(params)


def test_a_sparsity_of_zero_needs_no_channels():
    params, graph = case(False)
    dense = Uniform(0.0, custom_sparsity_map={".*": None})
    pruner = MagnitudePruning(scope=Coupled(graph), sparsity_distribution_fn=dense)
    assert jax.tree.leaves(pruner.wrap_optax(optax.sgd(0.1)).init(params).masks) == []


@pytest.mark.parametrize("across", [False, True])
def test_a_budget_takes_excluded_layers_as_they_are(across):
    params, graph = case(False)
    uniform = Uniform(custom_sparsity_map={"embed": None, "head": None})
    for distribution, keeps_stream in ((None, across), (uniform, True)):
        pruner = MagnitudePruning(
            scope=Coupled(graph, across=across),
            sparsity_distribution_fn=budget(graph, macs=0.6, distribution=distribution),
        )
        small = shrink(graph, *pruner.instant_sparsify(params))
        assert 0.5 * graph.macs() < small.macs() <= 0.6 * graph.macs()
        assert (small.params["embed"].shape == (20, WIDTH)) == keeps_stream
    filtered = budget(graph, macs=0.6, distribution=Uniform(filter_fn=graph.is_weight))
    assert sizes_after(filtered)[0] == WIDTH  # a filter of the user


@pytest.mark.parametrize(
    ("cls", "scheduler"),
    [
        (MagnitudePruning, sparsity.PolynomialSchedule(1, 0, 3)),
        (sparsity.SteMagnitudePruning, sparsity.OneShotSchedule(0)),
        (sparsity.RigL, sparsity.PeriodicSchedule(2)),
        (sparsity.SET, sparsity.PeriodicSchedule(2)),
        (sparsity.algorithms.ADMMPruning, sparsity.PeriodicSchedule(1, 0, 2)),
    ],
)
def test_excluded_layers_stay_whole_as_a_network_trains(cls, scheduler):
    params, graph = case(False)
    updater = cls(
        scope=Coupled(graph),
        sparsity_distribution_fn=Uniform(0.5, filter_fn=hidden_only),
        scheduler=scheduler,
    )
    tx = updater.wrap_optax(optax.sgd(0.01))
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(4):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
    masks = state.masks
    if not jax.tree.leaves(masks):  # straight-through: masks are made in each forward pass
        used = updater.pre_forward_update(params, state)
        masks = jax.tree.map(lambda x: np.asarray(x != 0), used)
    assert masks["embed"] is None or masks["embed"].all()
    for p in masks["blocks"]:
        assert p["scale"] is None or p["scale"].all()
        assert p["up"].any(axis=0).sum() == p["bias"].sum() == p["down"].any(axis=1).sum() == 8
        assert p["up"].any(axis=1).all()  # no channel of the stream


def test_the_table_says_which_layers_keep_a_group_whole():
    params, graph = case(False)
    pruner = MagnitudePruning(
        scope=Coupled(graph),
        sparsity_distribution_fn=Uniform(0.5, custom_sparsity_map={"embed": None, "head": None}),
        scheduler=sparsity.OneShotSchedule(0),
    )
    state = pruner.wrap_optax(optax.sgd(0.1)).init(params)
    lines = [line.split() for line in sparsity.sparsity_table(params, state, pruner).splitlines()]
    stream = next(line for line in lines if "whole" in line)
    assert {"'embed',", "'head'"} < set(stream)
    assert stream[-2:] == [str(WIDTH), str(WIDTH)]
    assert ["blocks/0/up:1", "16", "8"] in lines
    rows = {row.path: row for row in sparsity.reports.layer_summary(params, state, pruner)}
    assert (rows["embed"].type, rows["embed"].target) == ("", None)
    assert (rows["blocks/0/up"].type, rows["blocks/0/up"].target) == ("channels", 0.5)
    assert (rows["blocks/0/bias"].type, rows["blocks/0/bias"].target) == ("channels", None)
