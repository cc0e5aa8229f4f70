"""What reads each leaf: the same for every framework, loop and layout."""

import math
import re

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.experimental import pallas as pl

from sparsity.graph import trace
from tests.eight_devices import run


def find_uses(graph, name):
    """(primitive, contracting, output, batch, MACs, trips) of each use of a leaf."""
    return [
        (use.primitive, use.contracting, use.output, use.batch, use.macs, use.trips)
        for use in graph.uses
        if use.path == tuple(name.split("/"))
    ]


def traced(fn, *inputs, **shapes):
    """The graph of a function of parameters of these shapes."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return trace(fn, params, *inputs)


X = jax.ShapeDtypeStruct((5, 4), jnp.float32)


# One model in five frameworks: two convolutions, a residual, a grouped one, and two layers.


def _head(convs, layers, x):
    x = jax.nn.relu(convs[0](x))
    x = x + jax.nn.relu(convs[1](x))
    x = jax.nn.relu(convs[2](x))
    return layers[1](jax.nn.relu(layers[0](x.mean((1, 2)))))


def linen():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            convs = [
                nn.Conv(8, (3, 3)),
                nn.Conv(8, (3, 3)),
                nn.Conv(8, (3, 3), feature_group_count=2),
            ]
            return _head(convs, [nn.Dense(6), nn.Dense(2)], x)

    x = jax.ShapeDtypeStruct((2, 5, 5, 3), jnp.float32)
    variables = jax.eval_shape(Net().init, jax.random.key(0), x)
    return trace(Net().apply, variables, x)


def nnx_():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.convs = nnx.List([
                nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.Conv(8, 8, (3, 3), rngs=rngs),
                nnx.Conv(8, 8, (3, 3), feature_group_count=2, rngs=rngs),
            ])  # fmt: skip
            self.layers = nnx.List([nnx.Linear(8, 6, rngs=rngs), nnx.Linear(6, 2, rngs=rngs)])

        def __call__(self, x):
            return _head(self.convs, self.layers, x)

    definition, state = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    x = jax.ShapeDtypeStruct((2, 5, 5, 3), jnp.float32)
    return trace(lambda state, x: nnx.merge(definition, state)(x), state, x)


def haiku():
    def net(x):
        convs = [hk.Conv2D(8, 3), hk.Conv2D(8, 3), hk.Conv2D(8, 3, feature_group_count=2)]
        return _head(convs, [hk.Linear(6), hk.Linear(2)], x)

    model = hk.without_apply_rng(hk.transform(net))
    x = jax.ShapeDtypeStruct((2, 5, 5, 3), jnp.float32)
    return trace(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x)


def equinox():
    class Net(eqx.Module):
        convs: list
        layers: list

        def __init__(self):
            key = jax.random.key(0)
            self.convs = [
                eqx.nn.Conv2d(3, 8, 3, padding=1, key=key),
                eqx.nn.Conv2d(8, 8, 3, padding=1, key=key),
                eqx.nn.Conv2d(8, 8, 3, padding=1, groups=2, key=key),
            ]  # fmt: skip
            self.layers = [eqx.nn.Linear(8, 6, key=key), eqx.nn.Linear(6, 2, key=key)]

        def __call__(self, x):
            x = jax.nn.relu(self.convs[0](x))
            x = x + jax.nn.relu(self.convs[1](x))
            x = jax.nn.relu(self.convs[2](x)).mean((1, 2))
            return self.layers[1](jax.nn.relu(self.layers[0](x)))

    x = jax.ShapeDtypeStruct((2, 3, 5, 5), jnp.float32)
    return trace(lambda net, x: jax.vmap(net)(x), eqx.filter_eval_shape(Net), x)


def plain():
    def conv(kernel, bias, groups=1):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lambda x: (
            bias
            + lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
            )
        )

    def fn(params, x):
        (a, b, c), layers = params
        return _head(
            [conv(*a), conv(*b), conv(*c, 2)], [lambda x, p=p: x @ p[0] + p[1] for p in layers], x
        )

    shapes = [[((3, 3, 3, 8), (8,)), ((3, 3, 8, 8), (8,)), ((3, 3, 4, 8), (8,))],
              [((8, 6), (6,)), ((6, 2), (2,))]]  # fmt: skip
    is_shape = lambda x: isinstance(x, tuple) and isinstance(x[0], int)  # noqa: E731
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=is_shape)
    return trace(fn, params, jax.ShapeDtypeStruct((2, 5, 5, 3), jnp.float32))


# By hand: 50 positions, 3 x 3 windows.
MACS = [50 * 9 * 3 * 8, 50 * 9 * 8 * 8, 50 * 9 * 4 * 8, 2 * 8 * 6, 2 * 6 * 2]


@pytest.mark.parametrize("make", [linen, nnx_, haiku, equinox, plain])
def test_a_model_has_the_same_products_axes_and_groups_in_every_framework(make):
    graph = make()
    shapes = {leaf.path: leaf.shape for leaf in graph.parameters}

    def sizes(use, axes):
        return sorted(shapes[use.path][axis] for axis in axes)

    assert [use.macs for use in graph.uses] == MACS
    assert graph.macs() == sum(MACS)
    assert [sizes(use, use.contracting) for use in graph.uses] == [
        [3, 3, 3], [3, 3, 8], [3, 3, 4], [8], [6]
    ]  # fmt: skip
    assert [sizes(use, use.output) for use in graph.uses] == [[8], [8], [8], [6], [2]]
    assert [use.groups for use in graph.uses] == [1, 1, 2, 1, 1]
    assert [use.batch for use in graph.uses] == [()] * 5
    # The 8 channels of the residual stream are 2 groups of 4; those after it are 2 of 4, too.
    assert sorted((group.size, len(group.members)) for group in graph.groups) == [
        (2, 8), (4, 3), (4, 6), (6, 3)
    ]  # fmt: skip


# Axes.


@pytest.mark.parametrize("make", [linen, nnx_, haiku, equinox, plain, lambda: gather_and_dot()])
def test_each_use_reads_the_operand_whose_axes_its_view_has(make):
    for use in make().uses:
        sizes = tuple(math.prod(factor.size for factor in axis) for axis in use.view.factors)
        assert sizes == use.equation.inputs[use.operand].shape


def gather_and_dot():
    """A table that is looked up, and the first operand of a product."""
    tokens = jax.ShapeDtypeStruct((5, 1), jnp.int32)
    return traced(lambda p, x: p["head"] @ p["table"][x[:, 0]].T, tokens, table=(9, 4), head=(3, 4))


def test_the_kernel_after_attention_contracts_heads_and_their_channels():
    model = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)
    x = jax.ShapeDtypeStruct((1, 5, 8), jnp.float32)
    graph = trace(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x)
    assert find_uses(graph, "params/out/kernel") == [("dot_general", (0, 1), (2,), (), 5 * 64, 1)]
    assert find_uses(graph, "params/query/kernel") == [("dot_general", (0,), (1, 2), (), 5 * 64, 1)]
    # Scores and values are products of activations.
    assert graph.macs() == 4 * 5 * 64 + 2 * 5 * 5 * 8


def test_layers_of_a_scan_are_batch_axes_and_count_with_their_trips():
    def fn(p, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]

    assert find_uses(traced(fn, X, w=(3, 4, 4)), "w") == [
        ("dot_general", (1,), (2,), (0,), 3 * 80, 3)
    ]


def test_a_scan_within_a_scan_multiplies_the_trips():
    def inner(p, x):
        return lax.scan(lambda x, _: (x @ p["w"], None), x, None, length=2)[0]

    def fn(p, x):
        return lax.scan(lambda x, _: (inner(p, x), None), x, None, length=3)[0]

    assert find_uses(traced(fn, X, w=(4, 4)), "w") == [("dot_general", (0,), (1,), (), 6 * 80, 6)]


def test_of_a_while_the_trips_are_not_known_and_one_counts():
    def fn(p, x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ p["w"], x)

    graph = traced(fn, X, w=(4, 4))
    assert find_uses(graph, "w") == [("dot_general", (0,), (1,), (), 80, None)]
    assert graph.macs() == 80


def test_a_weight_that_a_loop_carries_is_followed():
    def fn(p, x):
        def step(i, carry):
            return carry[0] @ carry[1], carry[1]

        return lax.fori_loop(0, 3, step, (x, p["w"]))[0]

    assert find_uses(traced(fn, X, w=(4, 4)), "w") == [("dot_general", (0,), (1,), (), 3 * 80, 3)]


def test_of_branches_all_uses_are_listed_and_the_costliest_counts():
    def fn(p, x):
        return lax.cond(x.sum() > 0, lambda x: x @ p["one"] @ p["two"], lambda x: x @ p["one"], x)

    graph = traced(fn, X, one=(4, 4), two=(4, 4))
    assert len(find_uses(graph, "one")) == 2
    assert graph.macs() == 2 * 80


def test_embeddings_that_are_tied_are_looked_up_and_multiplied():
    def fn(p, tokens):
        return p["embed"][tokens] @ p["embed"].T

    graph = traced(fn, jax.ShapeDtypeStruct((5,), jnp.int32), embed=(7, 4))
    assert find_uses(graph, "embed") == [
        ("gather", (), (1,), (), 0, 1),
        ("dot_general", (1,), (0,), (), 5 * 4 * 7, 1),
    ]


def test_models_in_a_vmap_are_batch_axes():
    def fn(p, x):
        return jax.vmap(lambda w: x @ w)(p["w"])

    ((primitive, contracting, output, batch, macs, trips),) = find_uses(
        traced(fn, X, w=(3, 4, 2)), "w"
    )
    assert (primitive, contracting, macs, trips) == ("dot_general", (1,), 3 * 5 * 8, 1)
    assert sorted((*output, *batch)) == [0, 2]


def test_depthwise_and_transposed_convolutions():
    def fn(p, x):
        x = lax.conv_general_dilated(
            x, p["depthwise"], (1,), "SAME", feature_group_count=4,
            dimension_numbers=("NWC", "WIO", "NWC"),
        )  # fmt: skip
        return lax.conv_transpose(x, p["up"], (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))

    x = jax.ShapeDtypeStruct((1, 6, 4), jnp.float32)
    graph = traced(fn, x, depthwise=(3, 1, 4), up=(2, 4, 3))
    assert find_uses(graph, "depthwise") == [
        ("conv_general_dilated", (0, 1), (2,), (), 6 * 3 * 4, 1)
    ]
    # Each of 6 inputs meets 2 taps: the zeros between inputs cost nothing.
    assert find_uses(graph, "up") == [("conv_general_dilated", (0, 1), (2,), (), 6 * 2 * 4 * 3, 1)]


# Through what stands between a leaf and its product.


@jax.custom_vjp
def straight_through(w):
    return jnp.round(w)


straight_through.defvjp(lambda w: (jnp.round(w), None), lambda _, g: (g,))


@jax.custom_jvp
def clipped(w):
    return jnp.clip(w, -1, 1)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), tangents[0]))


@pytest.mark.parametrize(
    ("fn", "shapes", "contracting"),
    [
        (lambda p, x: x @ p["w"].astype(jnp.bfloat16).astype(jnp.float32), {}, (0,)),
        (lambda p, x: x @ p["w"].T, {"w": (6, 4)}, (1,)),
        (lambda p, x: jnp.einsum("bi,oi->bo", x, 2 * p["w"]), {"w": (6, 4)}, (1,)),
        (lambda p, x: x @ p["w"].reshape(4, 6), {"w": (4, 2, 3)}, (0,)),
        (lambda p, x: x @ p["w"].reshape(4, 6), {"w": (2, 2, 6)}, (0, 1)),
        (lambda p, x: x @ p["w"][0], {"w": (3, 4, 6)}, (1,)),
        (lambda p, x: x @ jnp.unstack(p["w"])[0], {"w": (3, 4, 6)}, (1,)),
        (lambda p, x: x @ p["w"][:, :3], {}, (0,)),
        (lambda p, x: x @ jnp.where(p["m"] > 0, p["w"], 0), {"m": (4, 6)}, (0,)),
        (lambda p, x: x @ (p["w"] * p["g"] / jnp.linalg.norm(p["w"], axis=0)), {"g": (6,)}, (0,)),
        (lambda p, x: x @ lax.stop_gradient(p["w"]), {}, (0,)),
        (lambda p, x: x @ straight_through(p["w"]), {}, (0,)),
        (lambda p, x: x @ clipped(p["w"]), {}, (0,)),
        (lambda p, x: jax.checkpoint(lambda w: x @ w)(p["w"]), {}, (0,)),
        (lambda p, x: jax.jit(lambda w, x: x @ w)(p["w"], x), {}, (0,)),
        (lambda p, x: x @ jnp.concatenate([p["w"], p["v"]], 1), {"v": (4, 2)}, (0,)),
        (lambda p, x: x @ lax.split(p["w"], (2, 4), 1)[1], {}, (0,)),
    ],
    ids=[
        "cast", "transposed", "scaled", "columns", "rows", "layer", "unstacked", "part", "mask",
        "normed", "stopped", "ste", "clipped", "remat", "jit", "joined", "split",
    ],
)  # fmt: skip
def test_a_leaf_is_followed_to_its_product(fn, shapes, contracting):
    graph = traced(fn, X, **({"w": (4, 6)} | shapes))
    (use,) = [use for use in graph.uses if use.path == ("w",)]
    assert (use.primitive, use.contracting) == ("dot_general", contracting)
    assert "test_uses.py:" in use.source


def test_a_weight_of_8_bits_is_followed_and_its_scale_is_none():
    params = {
        "w": jax.ShapeDtypeStruct((4, 6), jnp.int8),
        "s": jax.ShapeDtypeStruct((6,), jnp.float32),
    }
    graph = trace(lambda p, x: x @ (p["w"].astype(jnp.float32) * p["s"]), params, X)
    assert find_uses(graph, "w") == [("dot_general", (0,), (1,), (), 5 * 24, 1)]
    assert find_uses(graph, "s") == []


def test_activations_that_parameters_scale_are_no_weights():
    graph = traced(lambda p, x: (x * p["s"] + p["b"]) @ p["w"], X, s=(4,), b=(4,), w=(4, 2))
    assert {use.path for use in graph.uses} == {("w",)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_inside_shard_map_each_device_counts_its_part(kind):
    run("graph", kind)


# A product counts once, by what its leaves keep of zeros.


def quantized(w):
    scale = jnp.abs(w).max() / 127
    return w + lax.stop_gradient(jnp.round(w / scale) * scale - w)


def row(shape, at):
    """A mask that keeps one row."""
    return jnp.zeros(shape, jnp.uint8).at[at].set(1)


# Of [4, 6] weights w and v, masks keep row 0 of w and row 1 of v; X has 5 rows: 120 multiply-adds.
DENSITIES = {
    "quantized": (lambda p, x: x @ quantized(p["w"]), 120 // 4),
    "quantized twice": (lambda p, x: x @ quantized(quantized(p["w"])), 120 // 4),
    "normed": (lambda p, x: x @ (p["w"] / (1 + jnp.linalg.norm(p["w"]))), 120 // 4),
    "clipped": (lambda p, x: x @ jnp.clip(p["w"], -1, 1), 120 // 4),
    "masked": (lambda p, x: x @ jnp.where(p["v"] > 0, p["w"], 0), 120 // 4),
    "gated": (lambda p, x: x @ (p["w"] * p["v"]), 120 // 4),
    "filled": (lambda p, x: x @ jnp.where(p["v"] > 0, p["w"], 1), 120),
    "centred": (lambda p, x: x @ (p["w"] - p["w"].mean(0)), 120),
    "exponent": (lambda p, x: x @ jnp.exp(p["w"]), 120),
    "sum": (lambda p, x: x @ (p["w"] + p["v"]), 120),
    "reversed": (lambda p, x: x @ (p["w"] + p["w"][::-1]), 120),
    "halves": (lambda p, x: x @ (p["w"][:, :3] + p["w"][:, 3:]), 60),
    "joined": (lambda p, x: x @ jnp.concatenate([p["w"], p["v"]], 1), 240 // 4),
    "joined with data": (
        lambda p, x: x @ jnp.concatenate([p["w"], jnp.ones((4, 2))], 1), 120 // 4 + 40
    ),
    "twice": (lambda p, x: x @ jnp.concatenate([p["w"], p["w"]], 1), 240 // 4),
    "low rank": (lambda p, x: x @ p["w"] @ p["v"].T, 120 // 4 + 120 // 4),
    "merged": (lambda p, x: x @ (p["w"] @ p["v"].T), 96 // 16 + 80),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSITIES)
def test_a_product_costs_the_part_of_its_weight_that_masks_leave(name):
    fn, expected = DENSITIES[name]
    graph = traced(fn, X, w=(4, 6), v=(4, 6))
    assert graph.macs({"w": row((4, 6), 0), "v": row((4, 6), 1)}) == expected
    table = graph.table()
    assert all(float(share) <= 100 for share in re.findall(r"([\d.]+)%", table))


def test_a_weight_that_is_computed_from_itself_has_one_use():
    graph = traced(lambda p, x: x @ quantized(p["w"]), X, w=(4, 6))
    assert find_uses(graph, "w") == [("dot_general", (0,), (1,), (), 120, 1)]
    graph = traced(lambda p, x: x @ (p["w"] + p["w"].T), X, w=(4, 4))
    assert [use.contracting for use in graph.uses] == [(0,), (1,)]
    assert graph.costs.count_macs(("w",)) == graph.macs() == 80


def test_experts_of_a_ragged_dot_are_weights():
    sizes = jnp.array([2, 3])

    def fn(p, x):
        hidden = jnp.tanh(lax.ragged_dot(x, p["up"], sizes))
        return lax.ragged_dot(hidden, p["down"], sizes)

    graph = traced(fn, X, up=(2, 4, 6), down=(2, 6, 3))
    assert find_uses(graph, "up") == [("ragged_dot_general", (1,), (2,), (0,), 5 * 24, 1)]
    assert graph.macs() == 5 * (24 + 18)
    assert [(group.name, group.size) for group in graph.groups] == [("up:2", 6)]
    assert graph.uncounted == {}


def test_a_ragged_dot_of_rows_has_the_multiply_adds_of_one_product():
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def fn(p, x):
        return lax.ragged_dot_general(x @ p["w"], x, jnp.array([2, 3]), numbers)

    assert traced(fn, X, w=(4, 6)).macs() == 5 * 24 + 5 * 6 * 4


def test_the_table_names_what_is_not_counted():
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    def fn(p, x):
        shape = jax.ShapeDtypeStruct((5, 6), x.dtype)
        y = lax.cond(x.sum() > 0, pl.pallas_call(kernel, shape), lambda x, w: x @ w, x, p["w"])
        y = lax.platform_dependent(y, cpu=jnp.sin, default=jnp.cos)  # a `platform_index`
        return jnp.linalg.cholesky(y.T @ y).at[0].set(1.0)

    graph = traced(fn, X, w=(4, 6))
    assert list(graph.uncounted) == ["cholesky", "pallas_call"]
    table = graph.table()
    assert "\nNot counted: cholesky" in table
    assert "test_uses.py:" in table
    assert "Not counted" not in traced(lambda p, x: x @ p["w"], X, w=(4, 6)).table()


def test_a_composite_is_what_it_decomposes_into():
    def fn(p, x):
        return lax.composite(lambda x, w: x @ w, "own.dot")(jnp.tanh(x @ p["up"]), p["down"])

    graph = traced(fn, X, up=(4, 6), down=(6, 2))
    assert find_uses(graph, "down") == [("dot_general", (0,), (1,), (), 60, 1)]
    assert [group.name for group in graph.groups] == ["up:1"]
