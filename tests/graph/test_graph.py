"""Costs, tables, and what a graph tells pruners."""

import functools

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
import pytest

import sparsity
from sparsity.graph import trace
from tests.graph import models

mpl.use("Agg")


@functools.cache
def resnet18():
    model = models.resnet18()
    return trace(model.fn, models.abstract(model.shapes), *model.inputs)


@functools.cache
def resnet50():
    model = models.resnet50()
    return trace(model.fn, models.abstract(model.shapes), *model.inputs)


@functools.cache
def language_model():
    model = models.language_model()
    return trace(model.fn, models.abstract(model.shapes), *model.inputs)


def select(graph, fn):
    """The names of the leaves for which a function of path and parameter is true."""
    return {leaf.name for leaf in graph.parameters if fn(leaf.path, leaf)}


def make_tree(graph, fn):
    """A tree of what a function of path and parameter returns for each leaf."""
    tree = {}
    for leaf in graph.parameters:
        node = tree
        for name in leaf.path[:-1]:
            node = node.setdefault(name, {})
        node[leaf.path[-1]] = fn(leaf.path, leaf)
    return tree


# Costs.


def test_resnet18_costs_what_is_published_to_the_digit():
    assert resnet18().macs() == 1_814_073_344


def test_resnet50_costs_4_0892_billion():
    assert resnet50().macs() == pytest.approx(4.0892e9, rel=1e-3)
    assert sum(use.macs for use in resnet50().uses) == resnet50().macs()


def test_zeros_that_a_transposed_convolution_inserts_cost_nothing():
    def fn(params, x):
        return jax.lax.conv_transpose(
            x, params["w"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    params, x = models.abstract([(2, 2, 3, 8), (1, 4, 5, 3)])
    graph = trace(fn, {"w": params}, x)
    # Each of 4 x 5 entries meets a kernel of 2 x 2, for 3 inputs and 8 outputs.
    assert graph.macs() == graph.costs.count_small_macs({}) == 4 * 5 * 2 * 2 * 3 * 8


@pytest.mark.parametrize(("rate", "published"), [(0.8, 0.414), (0.9, 0.242)])
def test_erk_leaves_of_resnet50_what_is_published(rate, published):
    # Evci et al. 2020, table 1: 0.42 and 0.24 of the operations of ResNet-50, in whose masks the
    # first layer counts, and no norm.
    graph = resnet50()
    model = models.resnet50()
    params = models.abstract(model.shapes)
    rates = sparsity.ERK(rate, filter_fn=graph.is_weight)(params)
    density = {
        leaf.path: 1 - rates_at for leaf, rates_at in zip(
            graph.parameters, jax.tree.leaves(rates, is_leaf=lambda x: x is None), strict=True
        ) if rates_at is not None
    }  # fmt: skip
    assert float(graph.costs.count_sparse_macs(density)) / graph.macs() == pytest.approx(
        published, abs=1e-3
    )


def test_a_masked_product_costs_its_density():
    model = models.mlp()
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    masks = {"up": np.zeros((3, 8)), "middle": np.eye(8, 6), "bias": None, "down": np.ones((6, 2))}
    assert graph.macs(masks) == 4 * (0 + 6 + 12)


def test_masks_without_entries_are_named():
    graph = trace(lambda p, x: x @ p["w"], {"w": jnp.ones((4, 3))}, jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"masks\['w'\] has no values yet"):
        jax.jit(lambda mask: graph.macs({"w": mask}))(jnp.ones((4, 3)))
    with pytest.raises(ValueError, match=r"masks\['w'\] has no values yet"):
        graph.table({"w": jax.ShapeDtypeStruct((4, 3), jnp.uint8)})
    with pytest.raises(ValueError, match=r"macs has no values yet"):
        jax.jit(lambda share: sparsity.budget(graph, macs=share))(0.5)


def test_masks_of_another_model_are_named():
    graph = language_model()
    with pytest.raises(ValueError, match=r"masks have 'other' of shape \(2,\).*'embed'"):
        graph.macs({"other": np.ones(2)})
    with pytest.raises(ValueError, match=r"masks have shape \(2, 2\) at 'embed'.*\(11, 8\)"):
        graph.macs({"embed": np.ones((2, 2))})


@pytest.mark.slow
def test_tracing_and_grouping_4_000_equations_allocates_no_array():
    def fn(params, x):
        for _ in range(40):
            for p in params:
                x = jax.nn.gelu(x @ p["up"] + p["b"]) @ p["down"]
        return x

    params = models.abstract([{"up": (8, 16), "b": (16,), "down": (16, 8)} for _ in range(9)])
    before = {id(array) for array in jax.live_arrays()}
    graph = trace(fn, params, jax.ShapeDtypeStruct((2, 8), jnp.float32))
    assert len(graph.groups) == 9 + 8  # in each pair of layers, and from one pair to the next
    assert graph.macs() == 40 * 9 * 2 * 2 * 8 * 16
    assert sum(1 for _ in graph.model.program.flat_equations()) > 4000
    assert {id(array) for array in jax.live_arrays()} <= before


# Shown.


def test_the_table_lists_each_leaf_with_its_product_cost_and_groups():
    model = models.mlp()
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    rows = {line.split()[0]: line.split() for line in graph.table().splitlines() if line.strip()}
    assert rows["up"] == ["up", "3x8", "dot", "0", "96", "28.6%", "1:", "1"]
    assert rows["middle"] == ["middle", "8x6", "dot", "0", "192", "57.1%", "0:", "1,", "1:", "0"]
    assert rows["bias"] == ["bias", "6", "no", "product", "0", "0.0%", "0:", "0"]
    assert rows["dots"][3:] == ["336", "100.0%"]


def test_with_masks_the_table_shows_what_is_left_and_activations_are_listed():
    graph = language_model()
    table = graph.table({"layer0": {"down": np.tri(6, 8)}})
    (row,) = [line.split() for line in table.splitlines() if "layer0/down" in line]
    assert row[:6] == ["layer0/down", "6x8", "dot", "0", "480", "210"]
    assert "products of activations" in table


def test_the_picture_has_a_light_and_a_dark_bar_for_each_product():
    model = models.mlp()
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    ax = graph.plot({"up": np.zeros((3, 8))})
    assert [text.get_text() for text in ax.get_yticklabels()] == ["down", "middle", "up"]
    assert [patch.get_width() * 1e6 for patch in ax.patches] == pytest.approx(
        [48, 192, 96, 48, 192, 0]
    )
    mpl.pyplot.close(ax.figure)


def test_a_model_without_products_has_a_table_and_a_picture_without_bars():
    graph = trace(lambda p, x: x * p["scale"], {"scale": jnp.ones(4)}, jnp.ones((2, 4)))
    assert graph.macs() == graph.macs({"scale": np.ones(4)}) == 0
    rows = [line.split() for line in graph.table({"scale": np.ones(4)}).splitlines()]
    assert ["scale", "4", "no", "product", "0", "0", "0.0%"] in rows
    assert ["dots", "and", "convolutions", "0", "0", "0.0%"] in rows
    ax = graph.plot()
    assert not ax.patches
    mpl.pyplot.close(ax.figure)


def test_a_graph_says_what_it_is():
    assert repr(language_model()).startswith("Graph(10 parameters, 8 uses, 7,760 MACs, 6 groups of")


# For pruners.


def test_weights_are_what_products_contract_whatever_their_number_of_axes():
    model = models.mobilenet()
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    kernels = {f"{name}/kernel" for name in ("stem", "wide", "depthwise", "narrow")}
    assert select(graph, graph.is_weight) == kernels | {"squeeze", "excite", "head"}
    # A table that is only looked up, a norm and a position are none, an outer product is none.
    params = {"table": (7, 4), "norm": (4,), "position": (5, 4), "w": (4,), "outer": (1, 3)}

    def fn(p, tokens):
        x = p["table"][tokens] * p["norm"] + p["position"]
        return (x @ p["w"])[:, None] * p["outer"]

    graph = trace(fn, models.abstract(params), jax.ShapeDtypeStruct((5,), jnp.int32))
    assert select(graph, graph.is_weight) == {"w"}


def test_a_pruner_of_params_alone_uses_a_graph_of_all_variables():
    variables = models.abstract(
        {"params": {"a": {"w": (4, 6)}, "b": {"w": (6, 2)}}, "stats": {"w": (2,)}}
    )
    fn = lambda v, x: x @ v["params"]["a"]["w"] @ v["params"]["b"]["w"] + v["stats"]["w"]  # noqa: E731
    graph = trace(fn, variables, jax.ShapeDtypeStruct((3, 4), jnp.float32))
    params = {"a": {"w": jnp.ones((4, 6))}, "b": {"w": jnp.ones((6, 2))}}
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=graph.is_weight),
        sparsity_type=graph.nm(2, 4),
    )
    with pytest.raises(ValueError, match=r"4 divides none.*'params/b/w'.*axis 0 of size 6"):
        pruner.instant_sparsify(params)


def test_of_paths_that_end_alike_the_shortest_is_meant_and_two_are_an_error():
    shapes = {
        "params": {"w": (4, 4), "layer": {"w": (4, 6)}},
        "other": {"b": (6,)},
        "last": {"b": (6,)},
    }
    params = models.abstract(shapes)
    fn = lambda p, x: x @ p["params"]["w"] @ p["params"]["layer"]["w"]  # noqa: E731
    graph = trace(fn, params, jax.ShapeDtypeStruct((3, 4), jnp.float32))
    assert graph.parameters.find(("w",), jnp.ones((4, 4))).path == ("params", "w")
    assert graph.parameters.find(("layer", "w"), jnp.ones((4, 6))).path == (
        "params",
        "layer",
        "w",
    )
    with pytest.raises(ValueError, match=r"have 'b' of shape \(6,\), of which the graph has 2"):
        graph.is_weight(("b",), jnp.ones(6))


def test_nm_runs_along_the_contracted_axis_of_each_layout():
    def fn(p, x):
        x = jnp.einsum("bi,oi->bo", x, p["rows"]) @ p["columns"]
        x = models._conv(x[:, None, None], p["image"])[:, 0, 0] * p["scale"]
        return jnp.einsum("bhd,hdo->bo", x.reshape(-1, 2, 6), p["heads"])

    shapes = {
        "rows": (8, 4),
        "columns": (8, 8),
        "image": (2, 2, 8, 12),
        "scale": (12,),
        "heads": (2, 6, 3),
    }
    graph = trace(fn, models.abstract(shapes), jax.ShapeDtypeStruct((3, 4), jnp.float32))
    axes = make_tree(graph, lambda path, leaf: getattr(graph.nm(1, 2)(path, leaf), "axis", None))
    assert axes == {"rows": -1, "columns": -2, "image": -2, "scale": None, "heads": -2}
    # 3 divides only the 6 channels of a head.
    assert graph.nm(1, 3)(("heads",), jax.ShapeDtypeStruct((2, 6, 3), jnp.float32)).axis == -2


def test_fan_in_runs_along_all_axes_that_each_layout_contracts():
    def fn(p, x):
        x = jnp.einsum("bi,oi->bo", x, p["rows"]) @ p["columns"]
        x = models._conv(x[:, None, None], p["image"])[:, 0, 0] * p["scale"]
        x = jnp.einsum("bi,ihd->bhd", x, p["split"])
        return jnp.einsum("bhd,hdo->bo", x, p["heads"])

    shapes = {
        "rows": (8, 4),
        "columns": (8, 8),
        "image": (2, 2, 8, 12),
        "scale": (12,),
        "split": (12, 2, 6),
        "heads": (2, 6, 3),
    }
    graph = trace(fn, models.abstract(shapes), jax.ShapeDtypeStruct((3, 4), jnp.float32))
    assert make_tree(graph, graph.fan_in(16)) == {
        "rows": sparsity.FanIn(16, axis=-1),
        "columns": sparsity.FanIn(16, axis=-2),
        "image": sparsity.FanIn(16, axis=(-4, -3, -2)),
        "scale": sparsity.Unstructured(),
        "split": sparsity.FanIn(16, axis=-3),
        "heads": sparsity.FanIn(16, axis=(-3, -2)),
    }
    assert graph.fan_in() == graph.fan_in(1)
    with pytest.raises(ValueError, match=r"FanIn\.group must be at least 1, got FanIn\.group = 0"):
        graph.fan_in(0)


def test_masks_of_fan_in_hold_along_the_inputs_of_a_convolution():
    def fn(p, x):
        return jax.lax.conv_general_dilated(x, p["w"], (1, 1), "SAME")  # NCHW, OIHW

    params = models.draw({"w": (8, 5, 3, 3)})
    graph = trace(fn, params, jnp.ones((1, 5, 7, 7)))
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.8), sparsity_type=graph.fan_in(4)
    )
    mask = np.asarray(pruner.instant_sparsify(params)[1]["w"]).reshape(2, 4, 45)
    assert (mask == mask[:, :1]).all()
    sums = np.abs(np.asarray(params["w"], np.float64)).reshape(2, 4, 45).sum(axis=1)
    for group, scores in zip(mask[:, 0], sums, strict=True):
        assert {*np.flatnonzero(group)} == {*np.argsort(-scores)[:9]}


@pytest.mark.parametrize("batch_axes", [0, 1])
def test_fan_in_of_stacked_layers_runs_along_the_same_axis_with_batch_axes(batch_axes):
    params = models.draw({"layers": (3, 4, 6)})

    def fn(x, w):
        return (x @ w)[:, :4], 0

    graph = trace(lambda p, x: jax.lax.scan(fn, x, p["layers"])[0], params, jnp.ones((2, 4)))
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        sparsity_type=graph.fan_in(3),
        batch_axes=batch_axes,
    )
    mask = pruner.instant_sparsify(params)[1]["layers"]
    assert (mask.sum(axis=1) == 2).all()
    groups = mask.reshape(3, 4, 2, 3)
    assert (groups == groups[..., :1]).all()


def test_no_fan_in_serves_products_of_different_axes_or_of_a_part_of_an_axis():
    params = models.abstract({"tied": (4, 4)})
    graph = trace(lambda p, x: x @ p["tied"] @ p["tied"].T, params, jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"different axes \[\(0,\), \(1,\)\] of 'tied'.*filter_fn"):
        graph.fan_in(2)(("tied",), params["tied"])
    params = models.draw({"w": (8, 3)})
    for fn, inputs in ((parts((0, 1, 2), 1), 2), (parts((0, 1, 2), 0), 4)):
        graph = trace(fn, params, jnp.ones((5, inputs)))
        with pytest.raises(
            ValueError, match=r"a part of axis 0 of 'w' of shape \(8, 3\).*filter_fn"
        ):
            graph.fan_in(2)(("w",), params["w"])


@pytest.mark.parametrize("batch_axes", [0, 1])
def test_nm_of_stacked_layers_runs_along_the_same_axis_with_batch_axes(batch_axes):
    params = models.draw({"layers": (3, 4, 6)})

    def fn(p, x):
        return jax.lax.scan(lambda x, w: ((x @ w)[:, :4], 0), x, p)[0]

    graph = trace(lambda p, x: fn(p["layers"], x), params, jnp.ones((2, 4)))
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        sparsity_type=graph.nm(1, 2),
        batch_axes=batch_axes,
    )
    _, masks = pruner.instant_sparsify(params)
    assert (masks["layers"].reshape(3, 2, 2, 6).sum(axis=2) == 1).all()


def test_no_pattern_serves_products_that_contract_different_axes():
    params = models.abstract({"tied": (4, 4)})
    graph = trace(lambda p, x: x @ p["tied"] @ p["tied"].T, params, jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"different axes \[\(0,\), \(1,\)\] of 'tied'.*filter_fn"):
        graph.nm(2, 4)(("tied",), params["tied"])


@pytest.mark.slow
def test_masks_of_nm_hold_along_the_contraction():
    params = models.draw({"up": (8, 6), "down": (4, 6)})
    graph = trace(lambda p, x: x @ p["up"] @ p["down"].T, params, jnp.ones((2, 8)))
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=graph.is_weight),
        sparsity_type=graph.nm(1, 2),
    )
    _, masks = pruner.instant_sparsify(params)
    assert (masks["up"].reshape(4, 2, 6).sum(1) == 1).all()
    assert (masks["down"].reshape(4, 3, 2).sum(2) == 1).all()


# Leaves that stay dense.


def test_weights_with_few_inputs_can_stay_dense():
    model = models.mobilenet()  # 3 x 3 x 3 inputs of the stem, 3 x 3 of a depthwise output
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    assert select(graph, graph.is_weight(min_inputs=1)) == select(graph, graph.is_weight)
    assert select(graph, graph.is_weight(min_inputs=9)) == {"stem/kernel", "depthwise/kernel"}
    assert select(graph, graph.is_weight(min_inputs=10)) == {"stem/kernel"}
    assert select(graph, graph.is_weight(min_inputs=28)) == set()
    assert select(graph, functools.partial(graph.is_weight, min_inputs=10)) == {"stem/kernel"}
    assert graph.is_weight(min_inputs=9) == graph.is_weight(min_inputs=9)
    with pytest.raises(ValueError, match="min_inputs must be at least 1, got min_inputs = 0"):
        graph.is_weight(min_inputs=0)
    with pytest.raises(ValueError, match="give both path and param, or min_inputs"):
        graph.is_weight(("stem", "kernel"))


def mixed(p, x):
    """A product of 6 inputs, of 8, a leaf contracted along both axes, and a table."""
    x = jax.nn.relu(x @ p["six"]) @ p["eight"]
    return x @ p["both"] @ p["both"].T + p["table"][jnp.array([0, 1])]


MIXED = {"six": (6, 8), "eight": (8, 12), "both": (12, 4), "table": (5, 12)}


@pytest.mark.parametrize(
    ("make", "pruned"),
    [
        (lambda graph: graph.nm(2, 4, otherwise="dense"), {"eight"}),
        (lambda graph: graph.fan_in(4, otherwise="dense"), {"six", "eight"}),
    ],
    ids=["nm", "fan_in"],
)
def test_leaves_that_cannot_have_the_pattern_stay_dense_if_the_user_says_so(make, pruned):
    params = models.draw(MIXED)
    graph = trace(mixed, params, x := jnp.ones((2, 6)))
    pruner = sparsity.MagnitudePruning(
        sparsity_type=make(graph),
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.OneShotSchedule(0),
    )
    sparse, masks = pruner.instant_sparsify(params)
    assert {name for name, mask in masks.items() if mask is not None} == pruned
    assert all(np.mean(np.asarray(masks[name])) == 0.5 for name in pruned)
    assert all(sparse[name] is params[name] for name in params.keys() - pruned)
    state = pruner.wrap_optax(optax.sgd(0.1)).init(params)
    assert {name for name, mask in state.masks.items() if mask is not None} == pruned
    assert {name for name, s in state.target_sparsities.items() if s is not None} == pruned
    assert "eight" in sparsity.sparsity_table(params, state, pruner)
    small = sparsity.compact(graph, sparse, masks)
    np.testing.assert_allclose(small.apply(small.params, x), mixed(sparse, x), rtol=1e-5)
    _, shot, report = sparsity.oneshot(pruner, mixed, params, [x + jnp.eye(2, 6)])
    assert {path for (path,) in report} == pruned
    assert {name for name, mask in shot.items() if mask is not None} == pruned


def test_an_error_of_a_pattern_names_the_leaf_and_the_way_to_keep_it_dense():
    params = models.draw(MIXED)
    graph = trace(mixed, params, jnp.ones((2, 6)))
    with pytest.raises(ValueError, match=r"different axes .* of 'both'.*otherwise='dense'"):
        graph.fan_in()(("both",), params["both"])
    with pytest.raises(ValueError, match="otherwise must be None or 'dense', got otherwise = 'x'"):
        graph.nm(2, 4, otherwise="x")
    with pytest.raises(
        ValueError, match=r"'six' of shape .* dense, so that it can have no sparsity"
    ):
        sparsity.MagnitudePruning(
            sparsity_type=graph.nm(2, 4, otherwise="dense"),
            sparsity_distribution_fn=sparsity.Uniform(0.5, custom_sparsity_map={"six": 0.5}),
        ).instant_sparsify(params)


def test_a_distribution_counts_no_leaf_that_its_pattern_keeps_dense():
    params = {"a": np.ones((10, 10)), "b": np.ones((50, 50)), "dense": np.ones((20, 20))}

    def pattern(path, param):
        return None if path == ("dense",) else sparsity.Unstructured()

    pruner = sparsity.MagnitudePruning(
        sparsity_type=pattern, sparsity_distribution_fn=sparsity.ERK(0.5)
    )
    masks = pruner.instant_sparsify(jax.tree.map(jnp.asarray, params))[1]
    assert masks["dense"] is None
    # 2600 weights at 50 % are 1300: 100 of the dense leaf `a`, and 1200 of `b`.
    assert (int(masks["a"].sum()), int(masks["b"].sum())) == (100, 1200)


# N:M where only a part of an axis is contracted: groups of m lie along a product, or are refused.


def parts(order, contracted):
    """x times a leaf of [8, 3], whose 8 rows are 4 x 2; one of the two is contracted."""

    def fn(p, x):
        weight = p["w"].reshape(4, 2, 3).transpose(order)
        return jax.lax.dot_general(x, weight, (((1,), (contracted,)), ((), ())))

    return fn


@pytest.mark.parametrize(
    ("fn", "inputs", "m", "fits"),
    [
        (parts((0, 1, 2), 1), 2, 2, True),  # 2 neighbours are summed together
        (parts((1, 2, 0), 0), 2, 2, True),
        (parts((0, 1, 2), 1), 2, 4, False),
        (parts((0, 1, 2), 0), 4, 2, False),  # every second row is
        (parts((2, 1, 0), 2), 4, 4, False),
        (lambda p, x: jax.lax.map(lambda w: x @ w, p["w"].reshape(4, 2, 3)), 2, 2, True),
        (lambda p, x: jax.lax.map(lambda w: x @ w, p["w"].reshape(4, 2, 3)), 2, 4, False),
        (lambda p, x: x @ p["w"].reshape(4, 2, 3)[:, 0], 4, 2, False),
        (lambda p, x: x @ p["w"].reshape(4, 2, 3)[1], 2, 2, True),
    ],
    ids=["fast", "moved", "fast 4", "slow", "slow moved", "layers", "layers 4", "one", "layer"],
)
def test_groups_of_nm_lie_along_the_part_of_an_axis_that_is_contracted(fn, inputs, m, fits):
    params = models.draw({"w": (8, 3)})
    graph = trace(fn, params, jnp.ones((5, inputs)))
    if fits:
        assert graph.nm(1, m)(("w",), params["w"]) == sparsity.NByM(1, m, axis=-2)
    else:
        with pytest.raises(ValueError, match=r"'w' of shape \(8, 3\) \(axis 0 of size 8\) lie"):
            graph.nm(1, m)(("w",), params["w"])


def test_windows_of_a_convolution_are_no_input_channels():
    params = models.draw({"stem": (512, 1, 128)})

    def fn(p, x):
        return jax.lax.conv_general_dilated(
            x, p["stem"], (64,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        )

    graph = trace(fn, params, jnp.ones((1, 4096, 1)))
    with pytest.raises(
        ValueError, match=r"2 divides none of the input channels of 'stem'.*: axis 1 of size 1\."
    ):
        graph.nm(1, 2)(("stem",), params["stem"])


def test_a_model_is_traced_again_once_for_each_kind_of_arguments():
    traces = []

    def fn(params, x):
        traces.append(x.shape)
        return x @ params["w"]

    params = {"w": jnp.ones((3, 2))}
    graph = trace(fn, params, jnp.ones((1, 3)))
    assert graph.retrace(params, jnp.zeros((1, 3))) is graph
    retraced = [graph.retrace(params, jnp.ones((batch, 3))) for batch in (2, 3)]
    assert [each.macs() for each in retraced] == [12, 18]
    assert [graph.retrace(params, jnp.zeros((batch, 3))) for batch in (2, 3)] == retraced
    assert len(traces) == 3


@pytest.mark.parametrize("length", [0, 1, 3])
def test_each_step_of_a_scan_counts(length):
    def fn(p, x):
        return jax.lax.scan(lambda c, _: (c @ p["w"], None), x @ p["in"], length=length)[0]

    graph = trace(fn, {"in": jnp.ones((2, 6)), "w": jnp.ones((6, 6))}, jnp.ones((1, 2)))
    assert graph.macs() == 12 + 36 * length


@pytest.mark.parametrize("size", [3, 4])
def test_a_dilated_convolution_costs_the_same_in_a_model_that_lost_nothing(size):
    def fn(p, x):
        return jax.lax.conv_general_dilated(x, p["w"], (1, 1), [(0, 0)] * 2, lhs_dilation=(2, 1))

    params = {"w": jnp.ones((1, 1, 3, 1))}
    graph = trace(fn, params, jnp.ones((1, 1, size, 1)))
    small = sparsity.shrink(graph, params, {"w": jnp.ones((1, 1, 3, 1))})
    assert small.macs() == small.macs(("w",)) == graph.macs() == {3: 4, 4: 8}[size]
