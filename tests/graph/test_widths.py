"""One sparsity is the part of an axis that goes, also where several groups are its factors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparsity import (
    Coupled,
    MagnitudePruning,
    PolynomialSchedule,
    Uniform,
    budget,
    shrink,
    sparsity_table,
    trace,
)
from sparsity.selection import num_kept

SIZE = 6


def draw(**shapes):
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(size=x), jnp.float32) for name, x in shapes.items()}


def attend(params, x, heads):
    """Attention whose heads and head channels lie on one axis, as in PyTorch and Equinox."""

    def project(name):
        return (x @ params[name]).reshape(len(x), heads, -1)

    scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", project("q"), project("k")))
    return jnp.einsum("hqk,khd->qhd", scores, project("v")).reshape(len(x), -1) @ params["o"]


@functools.cache
def attention(heads, channels):
    width = heads * channels
    params = draw(q=(SIZE, width), k=(SIZE, width), v=(SIZE, width), o=(width, SIZE))
    return params, trace(functools.partial(attend, heads=heads), params, jnp.ones((3, SIZE)))


def count(graph, params, sparsity, **options):
    """Channels that stay of each group."""
    sparsities = jax.tree.map(lambda _: sparsity, params)
    scope = Coupled(graph, **options)
    return scope.count_by_sparsity(scope.place_groups(params, sparsities))


@pytest.mark.parametrize(
    ("heads", "channels", "sparsity", "expected"),
    [
        (4, 16, 0.5, [3, 11, 11]),  # 4 / sqrt(2) = 2.8, 32 / 3 = 10.7
        (4, 16, 0.0, [4, 16, 16]),
        (4, 16, 1.0, [1, 1, 1]),
        (2, 64, 0.5, [1, 64, 64]),
        (16, 4, 0.75, [8, 2, 2]),  # the smaller factor is rounded first
        (8, 8, 0.25, [7, 7, 7]),  # 6.9, 48 / 7 = 6.9
    ],
)
def test_heads_and_their_channels_share_what_remains_of_an_axis(
    heads, channels, sparsity, expected
):
    params, graph = attention(heads, channels)
    assert [group.size for group in graph.groups] == [heads, channels, channels]
    assert count(graph, params, sparsity) == expected


def conv(x, kernel, stride=1, groups=1):
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def test_stages_that_double_their_channels_keep_half_of_each_width():
    def model(params, x):
        x = jax.nn.relu(conv(x, params["stem"]))
        for i in range(3):  # depthwise convolutions with two outputs for each input
            x = conv(x, params[f"depthwise{i}"], 2, groups=x.shape[-1])
            x = jax.nn.relu(x + conv(x, params[f"point{i}"]))
        return x.mean((1, 2)) @ params["head"]

    shapes = {"stem": (3, 3, 3, 16), "head": (128, 10)}
    for i, n in enumerate((32, 64, 128)):
        shapes |= {f"depthwise{i}": (3, 3, 1, n), f"point{i}": (1, 1, n, n)}
    params, x = draw(**shapes), np.ones((1, 16, 16, 3), np.float32)
    graph = trace(model, params, x)
    assert [group.size for group in graph.groups] == [16, 2, 2, 2]
    pruner = MagnitudePruning(scope=Coupled(graph), sparsity_distribution_fn=Uniform(0.5))
    small = shrink(graph, *pruner.instant_sparsify(params))
    widths = [small.params[name].shape[-1] for name in ("stem", "point0", "point1", "point2")]
    assert widths == [8, 16, 32, 64]


def test_groups_of_a_convolution_share_the_width_with_their_channels():
    """32 groups of 2 inputs and 2 outputs, between two convolutions of one pixel."""

    def model(params, x):
        x = jax.nn.relu(conv(x, params["enter"]))
        return conv(jax.nn.relu(conv(x, params["grouped"], groups=32)), params["leave"])

    params = draw(enter=(1, 1, 16, 64), grouped=(3, 3, 2, 64), leave=(1, 1, 64, 16))
    graph = trace(model, params, np.ones((1, 4, 4, 16), np.float32))
    assert count(graph, params, 0.5) == [32, 1, 1]
    pruner = MagnitudePruning(scope=Coupled(graph), sparsity_distribution_fn=Uniform(0.5))
    small = shrink(graph, *pruner.instant_sparsify(params))
    assert small.params["enter"].shape[-1] == small.params["leave"].shape[-2] == 32


def test_a_group_that_is_all_of_another_axis_is_counted_first():
    """A scale for the channels of all heads is no weight and decides nothing; a matrix does."""

    def model(params, x):
        y = (x @ params["up"]).reshape(len(x), 4, 16)
        if "mix" in params:
            y = y @ params["mix"]
        elif "scale" in params:
            y = y * params["scale"]
        return jnp.tanh(y).reshape(len(x), -1) @ params["down"]

    shapes = {"up": (SIZE, 64), "down": (64, 3)}
    for other, expected in (
        ({}, [3, 11]),
        ({"scale": (16,)}, [3, 11]),
        ({"mix": (16, 16)}, [4, 8, 8]),
    ):
        params = draw(**shapes, **other)
        graph = trace(model, params, np.ones((2, SIZE), np.float32))
        sizes = {16: expected[-1], 4: expected[0]}
        assert count(graph, params, 0.5) == [sizes[group.size] for group in graph.groups], other


@pytest.mark.parametrize(("heads", "channels"), [(4, 16), (2, 64), (3, 5), (12, 64)])
def test_traced_counts_are_those_of_numbers_and_close_to_the_width(heads, channels):
    params, graph = attention(heads, channels)
    traced = jax.jit(lambda sparsity: count(graph, params, sparsity))
    for sparsity in np.linspace(0, 1, 31, dtype=np.float32):
        kept = count(graph, params, float(sparsity))
        assert kept == [int(n) for n in traced(sparsity)]
        width = num_kept(heads * channels, float(sparsity))
        ideal = heads * math.sqrt(width / (heads * channels))
        assert abs(kept[0] - max(ideal, 1)) < 0.5001
        assert abs(kept[0] * kept[1] - width) <= kept[0] / 2 or kept[1] in (1, channels)


@pytest.mark.parametrize("across", [False, True])
def test_masks_only_shrink_along_a_ramp_and_end_at_the_counts_of_its_target(across):
    params, graph = attention(4, 16)
    pruner = MagnitudePruning(
        scope=Coupled(graph, across=across),
        sparsity_distribution_fn=Uniform(0.6),
        scheduler=PolynomialSchedule(1, 0, 8),
    )
    tx = pruner.wrap_optax(optax.sgd(0.01))
    state, update, previous = tx.init(params), jax.jit(tx.update), None
    widths = []
    for _ in range(9):
        updates, new_state = update(params, state, params)
        if len(widths) in (2, 8):  # without jit
            _, eager_state = tx.update(params, state, params)
            jax.tree.map(np.testing.assert_array_equal, new_state.masks, eager_state.masks)
        state = new_state
        if previous is not None:
            jax.tree.map(
                lambda new, old: np.testing.assert_array_less(new, old + 1), state.masks, previous
            )
        params, previous = optax.apply_updates(params, updates), state.masks
        widths.append(int(state.masks["q"].any(axis=0).sum()))
    assert widths[0] == 64
    assert sorted({*widths}, reverse=True)[1] > widths[-1]  # several steps
    if not across:
        assert widths[-1] == 27  # 3 of 4 heads, and 9 of 16 channels for a width of 26


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("macs", [0.3, 0.55, 0.8])
def test_a_budget_holds_where_groups_share_widths(macs, across):
    params, graph = attention(4, 16)
    pruner = MagnitudePruning(
        scope=Coupled(graph, across=across), sparsity_distribution_fn=budget(graph, macs=macs)
    )
    small = shrink(graph, *pruner.instant_sparsify(params))
    assert (macs - 0.1) * graph.macs() < small.macs() <= macs * graph.macs()


def test_layers_of_a_scan_share_widths_too():
    def model(params, x):
        return jax.lax.scan(lambda x, p: (x + attend(p, x, 4), None), x, params["layers"])[0]

    width = 64
    shapes = {"q": (2, SIZE, width), "k": (2, SIZE, width), "v": (2, SIZE, width)}
    params = {"layers": draw(**shapes, o=(2, width, SIZE))}
    graph = trace(model, params, jnp.ones((3, SIZE)))
    pruner = MagnitudePruning(scope=Coupled(graph), sparsity_distribution_fn=Uniform(0.5))
    small = shrink(graph, *pruner.instant_sparsify(params))
    assert small.params["layers"]["q"].shape == (2, SIZE, 33)


def test_limits_of_one_factor_are_made_up_for_by_the_other():
    params, graph = attention(32, 128)
    assert count(graph, params, 0.5, round_to=8) == [24, 88, 88]  # 22.6; 2048 / 24 = 85.3
    params, graph = attention(4, 16)
    assert count(graph, params, 0.75, min_channels=4) == [4, 4, 4]


def test_the_table_shows_the_factors_of_a_width():
    params, graph = attention(4, 16)
    pruner = MagnitudePruning(scope=Coupled(graph), sparsity_distribution_fn=Uniform(0.5))
    with pytest.warns(UserWarning, match="all masks are ones"):
        state = pruner.wrap_optax(optax.sgd(0.1)).init(params)
    table = sparsity_table(params, state, pruner)
    lines = [line.split() for line in table.splitlines() if "factor" in line]
    assert [line[-6:] for line in lines] == [
        ["of", "4", "x", "16", "4", "3"],
        ["of", "4", "x", "16", "16", "11"],
        ["of", "4", "x", "16", "16", "11"],
    ]
