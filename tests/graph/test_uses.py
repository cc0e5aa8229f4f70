"""What reads each leaf: the same for every framework, loop and layout."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from sparsity.graph import trace
from tests.eight_devices import run


def of(graph, name):
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


def _rest(convs, layers, x):
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
            return _rest(convs, [nn.Dense(6), nn.Dense(2)], x)

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
            return _rest(self.convs, self.layers, x)

    definition, state = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))
    x = jax.ShapeDtypeStruct((2, 5, 5, 3), jnp.float32)
    return trace(lambda state, x: nnx.merge(definition, state)(x), state, x)


def haiku():
    def net(x):
        convs = [hk.Conv2D(8, 3), hk.Conv2D(8, 3), hk.Conv2D(8, 3, feature_group_count=2)]
        return _rest(convs, [hk.Linear(6), hk.Linear(2)], x)

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
        return _rest(
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
    shapes = {leaf.path: leaf.shape for leaf in graph.leaves}

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


def test_the_kernel_after_attention_contracts_heads_and_their_channels():
    model = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8)
    x = jax.ShapeDtypeStruct((1, 5, 8), jnp.float32)
    graph = trace(model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x)
    assert of(graph, "params/out/kernel") == [("dot_general", (0, 1), (2,), (), 5 * 64, 1)]
    assert of(graph, "params/query/kernel") == [("dot_general", (0,), (1, 2), (), 5 * 64, 1)]
    # Scores and values are products of activations.
    assert graph.macs() == 4 * 5 * 64 + 2 * 5 * 5 * 8


def test_layers_of_a_scan_are_batch_axes_and_count_with_their_trips():
    def fn(p, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]

    assert of(traced(fn, X, w=(3, 4, 4)), "w") == [("dot_general", (1,), (2,), (0,), 3 * 80, 3)]


def test_a_scan_within_a_scan_multiplies_the_trips():
    def inner(p, x):
        return lax.scan(lambda x, _: (x @ p["w"], None), x, None, length=2)[0]

    def fn(p, x):
        return lax.scan(lambda x, _: (inner(p, x), None), x, None, length=3)[0]

    assert of(traced(fn, X, w=(4, 4)), "w") == [("dot_general", (0,), (1,), (), 6 * 80, 6)]


def test_of_a_while_the_trips_are_not_known_and_one_counts():
    def fn(p, x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ p["w"], x)

    graph = traced(fn, X, w=(4, 4))
    assert of(graph, "w") == [("dot_general", (0,), (1,), (), 80, None)]
    assert graph.macs() == 80


def test_a_weight_that_a_loop_carries_is_followed():
    def fn(p, x):
        def step(i, carry):
            return carry[0] @ carry[1], carry[1]

        return lax.fori_loop(0, 3, step, (x, p["w"]))[0]

    assert of(traced(fn, X, w=(4, 4)), "w") == [("dot_general", (0,), (1,), (), 3 * 80, 3)]


def test_of_branches_all_uses_are_listed_and_the_costliest_counts():
    def fn(p, x):
        return lax.cond(x.sum() > 0, lambda x: x @ p["one"] @ p["two"], lambda x: x @ p["one"], x)

    graph = traced(fn, X, one=(4, 4), two=(4, 4))
    assert len(of(graph, "one")) == 2
    assert graph.macs() == 2 * 80


def test_embeddings_that_are_tied_are_looked_up_and_multiplied():
    def fn(p, tokens):
        return p["embed"][tokens] @ p["embed"].T

    graph = traced(fn, jax.ShapeDtypeStruct((5,), jnp.int32), embed=(7, 4))
    assert of(graph, "embed") == [
        ("gather", (), (1,), (), 0, 1),
        ("dot_general", (1,), (0,), (), 5 * 4 * 7, 1),
    ]


def test_models_in_a_vmap_are_batch_axes():
    def fn(p, x):
        return jax.vmap(lambda w: x @ w)(p["w"])

    ((primitive, contracting, output, batch, macs, trips),) = of(traced(fn, X, w=(3, 4, 2)), "w")
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
    assert of(graph, "depthwise") == [("conv_general_dilated", (0, 1), (2,), (), 6 * 3 * 4, 1)]
    # Each of 6 inputs meets 2 taps: the zeros between inputs cost nothing.
    assert of(graph, "up") == [("conv_general_dilated", (0, 1), (2,), (), 6 * 2 * 4 * 3, 1)]


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
    assert of(graph, "w") == [("dot_general", (0,), (1,), (), 5 * 24, 1)]
    assert of(graph, "s") == []


def test_activations_that_parameters_scale_are_no_weights():
    graph = traced(lambda p, x: (x * p["s"] + p["b"]) @ p["w"], X, s=(4,), b=(4,), w=(4, 2))
    assert {use.path for use in graph.uses} == {("w",)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_inside_shard_map_each_device_counts_its_part(kind):
    run("graph", kind)
