"""Groups of channels: removing them leaves what masking them gives; all others are refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sparsity
from sparsity.graph import trace
from tests.graph import models, removal


@pytest.mark.slow
@pytest.mark.parametrize("name", models.SMALL)
def test_removing_any_group_and_all_together_leaves_what_masking_gives(name):
    with jax.enable_x64(True):
        model = models.SMALL[name]()
        params = models.draw(model.shapes, jnp.float64)
        rng = np.random.default_rng(1)
        args = [
            rng.integers(0, 9, x.shape) if x.dtype == jnp.int32 else rng.normal(size=x.shape)
            for x in model.inputs
        ]
        graph = trace(model.fn, params, *args)
        assert len(graph.groups) == model.num_groups
        removal.check(graph, model.fn, params, args, 1e-10)


@pytest.mark.parametrize("make", [models.resnet18, models.resnet50])
def test_every_channel_of_a_resnet_between_image_and_classes_is_in_a_group(make):
    model = make()
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    assert len(graph.groups) == model.num_groups
    free = {(path, axis) for group in graph.groups for path, axis in group.members}
    outer = {("stem", "kernel"): 2, ("head", "kernel"): 1, ("head", "bias"): 0}
    for leaf in graph.parameters:
        for axis in range(len(leaf.shape)):
            is_space = len(leaf.shape) == 4 and axis < 2
            assert ((leaf.path, axis) in free) == (not is_space and outer.get(leaf.path) != axis)


# What goes together.


def test_heads_of_grouped_queries_go_with_the_rows_of_out_that_read_them():
    model = models.language_model(heads=4, shared=2, inner=4)
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    (value,) = [group for group in graph.groups if group.name == "layer0/value:1"]
    assert value.members == ((("layer0", "out"), 0), (("layer0", "value"), 1))
    rows, columns = value.positions
    # Channel 0 of a head: in both heads of v, and where the four heads of q put it.
    assert columns[0].tolist() == [0, 4]
    assert rows[0].tolist() == [0, 4, 8, 12]


def test_both_halves_that_rotate_and_all_that_scores_contract_go_together():
    model = models.language_model(heads=4, shared=2, inner=4)
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    (inner,) = [group for group in graph.groups if group.name == "layer0/key:1.2"]
    assert inner.members == ((("layer0", "key"), 1), (("layer0", "query"), 1))
    assert inner.positions[0][0].tolist() == [0, 2, 4, 6]


def test_channels_that_are_rounded_to_fewer_bits_are_removed():
    def fn(params, x):
        up, down = (lax.reduce_precision(params[name], 4, 3) for name in ("up", "down"))
        return lax.reduce_precision(jax.nn.relu(x @ up), 4, 3) @ down

    params, x = models.draw({"up": (3, 6), "down": (6, 2)}), jnp.ones((2, 3))
    graph = trace(fn, params, x)
    assert [group.members for group in graph.groups] == [((("down",), 0), (("up",), 1))]
    removal.check(graph, fn, params, (x,), 1e-6)


def test_a_gate_goes_with_what_it_gates():
    model = models.language_model(hidden=6)
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    (hidden,) = [group for group in graph.groups if group.name == "layer0/gate_and_up:1"]
    assert hidden.positions[hidden.members.index((("layer0", "gate_and_up"), 1))][2].tolist() == [
        2,
        8,
    ]


@pytest.mark.slow
def test_parts_that_are_unstacked_have_the_channels_of_the_whole():
    def fn(params, x):
        q, k, v = jnp.unstack((x @ params["qkv"]).reshape(5, 3, 4), axis=1)
        return jax.nn.softmax(q @ k.T) @ v @ params["out"]

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"out": (4, 2), "qkv": (2, 12)}
    params = {
        name: jax.random.normal(key, shapes[name])
        for name, key in zip(shapes, keys[:2], strict=True)
    }
    x = jax.random.normal(keys[2], (5, 2))
    graph = trace(fn, params, x)
    (inner,) = graph.groups
    assert inner.members == ((("out",), 0), (("qkv",), 1))
    assert inner.positions[1].tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    removal.check(graph, fn, params, (x,), 1e-6)


def test_what_is_concatenated_keeps_its_places_in_what_reads_it():
    model = models.densenet()
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    (second,) = [group for group in graph.groups if group.name == "layer1/kernel:3"]
    assert second.positions[second.members.index((("head",), 0))][:, 0].tolist() == [10, 11, 12, 13]


def test_equal_channels_of_a_grouped_convolution_are_removed_in_all_groups():
    def fn(params, x):
        x = models._conv(x, params["in"])
        return models._conv(x, params["grouped"], groups=2).mean((1, 2)) @ params["out"]

    shapes = {"in": (1, 1, 3, 6), "grouped": (3, 3, 3, 4), "out": (4, 2)}
    with jax.enable_x64(True):
        params, x = (
            models.draw(shapes, jnp.float64),
            np.random.default_rng(0).normal(size=(1, 3, 3, 3)),
        )
        graph = trace(fn, params, x)
        assert sorted(group.size for group in graph.groups) == [2, 2, 3]
        removal.check(graph, fn, params, (x,), 1e-10)


# State.


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, is_training):
        x = nn.BatchNorm(use_running_average=not is_training)(nn.Dense(6)(x))
        return nn.Dense(2)(nn.relu(x))


def in_training(variables, x):
    return Normed().apply(variables, x, True, mutable=["batch_stats"])


def batch_norm():
    shapes = jax.eval_shape(lambda: Normed().init(jax.random.key(0), jnp.ones((8, 3)), False))
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda x: jnp.asarray(rng.uniform(1, 2, x.shape)), shapes)
    return variables, jnp.asarray(rng.normal(size=(8, 3)))


STATISTICS = {
    ("1", "batch_stats", "BatchNorm_0", name): ("batch_stats", "BatchNorm_0", name)
    for name in ("mean", "var")
}


@pytest.mark.parametrize("state", [None, {("1",): ()}, {"1/batch_stats": "batch_stats"}])
def test_statistics_for_the_next_step_shrink_with_their_channels(state):
    with jax.enable_x64(True):
        variables, x = batch_norm()
        graph = trace(in_training, variables, x, state=state)
        assert graph.state == STATISTICS
        assert removal.names(graph) == [("params/Dense_0/kernel:1", 6)]
        removal.check(graph, in_training, variables, (x,), 1e-10)


def test_statistics_that_are_not_a_state_are_outputs_and_keep_their_channels():
    variables, x = batch_norm()
    graph = trace(in_training, variables, x, state={})
    assert (graph.groups, graph.state) == ([], {})
    (refusal,) = [r for r in graph.refused if r.path[-1] == "mean"]
    assert (refusal.primitive, refusal.reason) == ("output", "an output of the model")


def test_parameters_that_are_returned_as_they_came_are_masked_like_others():
    def fn(params, x):
        return jnp.tanh(x @ params["up"]) @ params["down"], params

    shapes = {"up": (3, 4), "down": (4, 2)}
    with jax.enable_x64(True):
        params, x = models.draw(shapes, jnp.float64), np.ones((2, 3))
        graph = trace(fn, params, x)
        assert graph.state == {("1", "down"): ("down",), ("1", "up"): ("up",)}
        assert removal.names(graph) == [("up:1", 4)]
        removal.check(graph, fn, params, (x,), 1e-10)


# Refusals.


def centred(x):
    return x - x.mean(-1, keepdims=True)


# What is between two products, what refuses it, and why.
REFUSED = {
    "softmax": (jax.nn.softmax, "reduce_max",
                "max over the channels, where removed entries are 0, not -inf"),
    "variance": (lambda x: jax.checkpoint(lambda x: x + x.sum(-1, keepdims=True))(x).sum(-1),
                 "reduce_sum", "entries are not known, not 0"),
    "cosine": (lambda x: jnp.cos(x).sum(-1), "reduce_sum", "entries are 1, not 0"),
    "argmax": (lambda x: x * x.argmax(-1, keepdims=True), "argmax", "over the channels"),
    "argmin": (lambda x: x * x.argmin(-1, keepdims=True), "argmin", "over the channels"),
    "cumsum": (lambda x: x.cumsum(-1), "cumsum", "needs all entries of the axis, in order"),
    "sort": (lambda x: jnp.sort(x), "sort", "needs all entries of the axis, in order"),
    "top_k": (lambda x: lax.top_k(x, 2)[0], "top_k", "needs all entries of the axis, in order"),
    "flip": (lambda x: x[:, ::-1], "rev", "needs all entries of the axis, in order"),
    "stride": (lambda x: lax.slice(x, (0, 0), x.shape, (1, 2)), "slice", "a slice with a stride"),
    "lookup": (lambda x: x[:, jnp.array([1, 1])], "gather",
               "a lookup along axis 1 of an array of shape (4, 6)"),
    "update": (lambda x: x.at[:, 0].set(1.0), "scatter",
               "an update of some entries along axis 1 of an array of shape (4, 6)"),
    "permuted": (lambda x: lax.reshape(x, (4, 6), (1, 0)), "reshape", "takes channels apart"),
    "any": (lambda x: x * (x < 1).all(-1, keepdims=True) * (x >= 1).all(-1, keepdims=True),
            "reduce_and", "and over the channels, where removed entries are 0, not 1"),
    "and": (lambda x: ((x.astype(jnp.int32) + 1 & 3) - 3).sum(-1), "reduce_sum",
            "entries are -2, not 0"),
    "cast": (lambda x: jnp.where(x == 0, -jnp.inf, x).astype(jnp.int32).sum(-1),
             "reduce_sum", "entries are not known, not 0"),
    "not zero": (lambda x: (x + 1) @ jnp.ones((6, 2)), "dot_general",
                 "along the channels of 1 and 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_removed_is_refused_with_leaf_axis_primitive_line_and_reason(name):
    between, primitive, reason = REFUSED[name]
    params = {"up": jax.ShapeDtypeStruct((3, 6), jnp.float32)}
    graph = trace(lambda p, x: between(x @ p["up"]).sum(), params, jnp.ones((4, 3)))
    assert graph.groups == []
    (refusal,) = [refusal for refusal in graph.refused if refusal.axis == 1]
    assert refusal.path == ("up",)
    assert reason in refusal.reason
    assert refusal.primitive == primitive
    assert "test_groups.py:" in refusal.source


def test_windows_and_flattened_positions_are_no_refused_channels():
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def fn(p, x):
        x = jax.lax.conv_general_dilated(x, p["conv"], (1, 1), "SAME", **layout)
        x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jax.nn.relu(x).reshape(len(x), -1) @ p["dense"]

    params = models.abstract({"conv": (3, 3, 2, 5), "dense": (2 * 2 * 5, 7)})
    graph = trace(fn, params, jnp.ones((1, 4, 4, 2)))
    refused = [(r.path, r.axis, r.reason) for r in graph.refused]
    assert refused == [
        (("conv",), 2, "an input of the model"),
        (("dense",), 1, "an output of the model"),
    ]
    (group,) = graph.groups
    assert group.members == ((("conv",), 3), (("dense",), 0))
    np.testing.assert_array_equal(group.positions[1], np.arange(20).reshape(4, 5).T)


def test_tokens_that_are_flattened_positions_alone_stay_refused():
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def fn(p, x):
        x = jax.lax.conv_general_dilated(x, p["conv"], (2, 2), "VALID", **layout)
        return jnp.einsum("btc,to->boc", x.reshape(1, 4, 5), p["tokens"])

    params = models.abstract({"conv": (2, 2, 2, 5), "tokens": (4, 3)})
    graph = trace(fn, params, jnp.ones((1, 4, 4, 2)))
    assert {(r.path, r.axis): r.reason for r in graph.refused}[("tokens",), 0] == "an axis of space"


def test_a_refused_part_of_an_axis_says_that_other_entries_can_go():
    def fn(p, x):
        return jnp.concatenate([x, jax.nn.relu(x @ p["up"])], axis=-1) @ p["down"]

    graph = trace(fn, models.abstract({"up": (3, 6), "down": (9, 2)}), jnp.ones((4, 3)))
    reasons = {r.reason for r in graph.refused if (r.path, r.axis) == (("down",), 0)}
    assert reasons == {"an input of the model; other entries of the axis can go"}


def test_an_axis_that_runs_over_pairs_of_one_axis_is_refused():
    def fn(params, x):
        x = x @ params["up"]
        return (x[:, :, None] * x[:, None]).reshape(4, -1) @ params["pairs"]

    params = {"up": jnp.ones((3, 6)), "pairs": jnp.ones((36, 2))}
    graph = trace(fn, params, jnp.ones((4, 3)))
    assert graph.groups == []
    reasons = {r.reason for r in graph.refused if (r.path, r.axis) == (("up",), 1)}
    assert reasons == {"an axis of pairs of its own entries"}


def test_channels_that_two_views_share_are_cut_into_factors_of_both():
    def fn(params, x):
        views = [(x @ params[name]).reshape(shape) for name, shape in shapes.items()]
        return sum(jax.nn.relu(view).reshape(5, 12) for view in views) @ params["down"]

    shapes = {"up": (5, 6, 2), "other": (5, 2, 6)}
    params = models.abstract({"up": (2, 12), "other": (2, 12), "down": (12, 3)})
    graph = trace(fn, params, jnp.ones((5, 2)))
    entries = np.arange(12).reshape(2, 3, 2)
    expected = [
        entries.reshape(2, 6),
        entries.transpose(1, 0, 2).reshape(3, 4),
        entries.reshape(6, 2).T,
    ]
    assert [group.size for group in graph.groups] == [2, 3, 2]
    for group, each in zip(graph.groups, expected, strict=True):
        assert all((positions == each).all() for positions in group.positions)


def test_a_sum_over_parts_whose_removed_entries_differ_is_refused():
    def model(params, x):
        # Where channels are masked, the parts are 1 and 0 times a mean.
        parts = jnp.exp(x @ params["one"]), x @ params["other"]
        return (jnp.concatenate(parts, -1) * x.mean(-1, keepdims=True)).sum(-1)

    shapes = {"one": (3, 4), "other": (3, 5)}
    params, x = models.draw(shapes), np.random.default_rng(0).normal(size=(2, 3))
    graph = trace(model, params, x)
    assert removal.names(graph) == [("other:1", 5)]
    removal.check(graph, model, params, (x,), 1e-6)


@pytest.mark.parametrize(("size", "can_go"), [(2, True), (1, False)])
def test_a_refused_part_says_that_others_can_go_if_they_have_entries_to_lose(size, can_go):
    def model(params, x):
        parts = lax.sort(x @ params["sorted"]), jnp.tanh(x @ params["other"])
        return jnp.concatenate(parts, -1) @ params["last"]

    params = {"sorted": jnp.ones((4, 5)), "other": jnp.ones((4, size))}
    params["last"] = jnp.ones((5 + size, 3))
    refused = trace(model, params, jnp.ones((2, 4))).refused
    (reason,) = [each.reason for each in refused if (each.path, each.axis) == (("last",), 0)]
    assert reason.endswith("other entries of the axis can go") == can_go


def test_an_axis_that_meets_itself_shifted_is_refused():
    def fn(params, x):
        x = x @ params["up"]
        return (x + jnp.roll(x, 1, axis=-1)) @ params["down"]

    graph = trace(fn, {"up": jnp.ones((3, 6)), "down": jnp.ones((6, 2))}, jnp.ones((4, 3)))
    assert graph.groups == []
    refused = {(r.path, r.axis): r.reason for r in graph.refused}
    assert refused[("up",), 1] == refused[("down",), 0] == "an axis that is cut into single entries"


def test_inputs_outputs_and_layers_of_a_scan_are_refused():
    model = models.scanned()
    graph = trace(model.fn, models.abstract(model.shapes), *model.inputs)
    actual = {(r.path[-1], r.axis): (r.primitive, r.reason) for r in graph.refused}
    assert actual["embed", 0] == ("input", "an input of the model")
    assert actual["head", 1] == ("output", "an output of the model")
    assert actual["up", 0] == ("scan", "the layers, or steps, of a scan")


def test_leaves_that_nobody_reads_are_refused():
    params = {"used": jnp.ones((3, 4)), "lost": jnp.ones((5, 2))}
    graph = trace(lambda p, x: x @ p["used"], params, jnp.ones((1, 3)))
    reasons = {r.reason for r in graph.refused if r.path == ("lost",)}
    assert reasons == {"no operation reads it"}


# Offered, as masked channels change nothing.


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x * (x >= 0).all(-1, keepdims=True),
        lambda x: jnp.where(x == 0, -jnp.inf, x).max(-1, initial=-jnp.inf),
        lambda x: lax.expand_dims(x, (1,)).sum((1, 2)),
        lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6),
        lambda x: centred(x) * lax.rsqrt((centred(x) ** 2).mean(-1, keepdims=True) + 1e-6),
        lambda x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[
            1
        ],
        lambda x: lax.cond(x.sum() > 0, jnp.tanh, lambda x: -x, x),
        lambda x: jax.jit(jax.checkpoint(jax.nn.relu))(x),
        lambda x: jax.random.normal(jax.random.key(0), x.shape) * x,
        lambda x: x * jnp.arange(6),
        lambda x: jnp.repeat(x, 2, -1) @ jnp.arange(24.0).reshape(12, 2),
        lambda x: jnp.tile(x, (1, 2)) @ jnp.arange(24.0).reshape(12, 2),
        lambda x: lax.dynamic_slice(x, (1, 0), (2, 6)),
        lambda x: lax.dynamic_update_slice(x, 2 * x[:1], (1, 0)),
        lambda x: jnp.pad(x, ((1, 0), (0, 0))),
        lambda x: x.cumsum(0) + jnp.sort(x, 0),
        lambda x: x.at[jnp.array([1, 0, 4])].set(2 * x[:3]).at[0].apply(jnp.cos),
        lambda x: jax.ops.segment_sum(x, jnp.array([0, 2, 2, 1]), 3).sum(-1, keepdims=True) + x[:3],
        lambda x: jnp.square(centred(x) + jnp.arange(6)).sum(-1),
        lambda x: x.at[0].apply(jnp.cos).sum(-1),
        lambda x: lax.reduce_window(x, -1.0, lax.max, (1, 1), (1, 1), ((1, 1), (0, 0))).sum(-1),
    ],
    ids=[
        "all",
        "max",
        "expand_dims",
        "rms",
        "norm",
        "while",
        "cond",
        "jit",
        "dropout",
        "iota",
        "repeat",
        "tile",
        "slice",
        "update",
        "pad",
        "axis",
        "scatter",
        "segments",
        "constants",
        "applied",
        "padded",
    ],
)
def test_channels_that_change_nothing_can_be_removed(between):
    def fn(params, x):
        x = between(x @ params["up"])
        return x @ params["down"] if x.shape[-1:] == (6,) and x.ndim > 1 else x

    with jax.enable_x64(True):
        params = models.draw({"up": (3, 6), "down": (6, 2)}, jnp.float64)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
        graph = trace(fn, params, x)
        assert removal.names(graph) == [("up:1", 6)]
        removal.check(graph, fn, params, (x,), 1e-10)


ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])  # are summed
SIZES = jnp.array([2, 3])
RAGGED = {
    "experts that a result has": (
        (2, 3),
        lambda w, x: jnp.einsum("eab,eo->abo", lax.ragged_dot_general(x, x, SIZES, ROWS), w),
    ),
    "experts that an input has": (
        (2, 3),
        lambda w, x: lax.ragged_dot(x, jnp.tensordot(w, jnp.ones((3, 4, 6)), 1), SIZES),
    ),
    "rows": ((5, 3), lambda w, _: lax.ragged_dot(w, jnp.ones((2, 3, 6)), SIZES).sum(0)),
}


@pytest.mark.parametrize("name", RAGGED)
def test_rows_and_experts_of_a_ragged_dot_are_refused(name):
    shape, fn = RAGGED[name]
    graph = trace(fn, jax.ShapeDtypeStruct(shape, jnp.float32), jnp.ones((5, 4)))
    (refusal,) = [refusal for refusal in graph.refused if refusal.axis == 0]
    assert refusal.primitive == "ragged_dot_general"
    assert refusal.reason == "rows in the order of their experts"
    assert "params:0" not in [group.name for group in graph.groups]


@pytest.mark.parametrize("across", [False, True])
def test_masks_of_channels_are_refused_where_no_weight_has_any(across):
    params, x = {"w": jnp.ones((2, 3))}, jnp.ones((1, 2))
    scope = sparsity.Coupled(sparsity.trace(lambda p, x: x @ p["w"], params, x), across=across)
    updater = sparsity.MagnitudePruning(scope=scope, sparsity_distribution_fn=sparsity.Uniform(0.5))
    with pytest.raises(ValueError, match=r"'w', which has .*axis 1: an output of the model. Keep"):
        updater.instant_sparsify(params)
