"""Layers of a scan that go, and branches behind other functions: against loops without them."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import sparsity
from sparsity.masks import apply_masks

LAYERS, WIDTH, HIDDEN = 5, 6, 10
X = jax.random.normal(jax.random.key(9), (7, WIDTH))


def draw(**shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    pairs = zip(keys, shapes.items(), strict=True)
    return {name: jax.random.normal(key, shape) / 2 for key, (name, shape) in pairs}


STACK = draw(
    scale=(LAYERS, WIDTH),
    mix=(LAYERS, WIDTH, WIDTH),
    up=(LAYERS, WIDTH, HIDDEN),
    bias=(LAYERS, HIDDEN),
    down=(LAYERS, HIDDEN, WIDTH),
)
PARAMS = {"layers": STACK, "head": draw(head=(WIDTH, 4))["head"]}
WRITERS = ("mix", "down")


def layer(x, p, i=0.0):
    y = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * p["scale"]
    x = x + jnp.tanh(y) @ p["mix"]
    return x + jax.nn.relu(x @ p["up"] + p["bias"] + 0.1 * i) @ p["down"]


def scanned(params, x, remat=False, reverse=False, numbers=False, cast=False):
    def step(x, layers):
        p, i = layers
        return layer(x, p, i if numbers else 0.0), None

    step = jax.checkpoint(step) if remat else step
    stack = params["layers"]
    if cast:
        stack = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), stack)
    x, _ = lax.scan(step, x, (stack, jnp.arange(LAYERS) * 1.0), reverse=reverse)
    return x @ params["head"]


def unrolled(params, x, numbers, indices=range(LAYERS)):
    """The model of some layers, with the numbers that these had among all."""
    for place, i in enumerate(indices):
        p = {name: w[place] for name, w in params["layers"].items()}
        x = layer(x, p, i * 1.0 if numbers else 0.0)
    return x @ params["head"]


OPTIONS = [
    {},
    {"remat": True},
    {"reverse": True},
    {"numbers": True},
    {"cast": True},
    {"remat": True, "reverse": True, "numbers": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "+".join(x) or "plain")
def test_dropped_layers_leave_a_shorter_scan(options):
    model = functools.partial(scanned, **options)
    graph = sparsity.trace(model, PARAMS, X)
    assert [block.name for block in graph.blocks] == [f"layers/{i}" for i in range(LAYERS)]
    assert [x.name for x in graph.blocks[2].branches] == ["layers/mix/2", "layers/down/2"]
    masks = graph.drop(PARAMS, ["layers/1", "layers/3"])
    tx = optax.adam(1e-2)
    small = sparsity.shrink(graph, PARAMS, masks, tx.init(PARAMS), tx)
    assert {x.shape[0] for x in small.params["layers"].values()} == {3}
    masked = apply_masks(PARAMS, masks)
    np.testing.assert_allclose(small.apply(small.params, X), model(masked, X), atol=1e-6)

    def loss(fn, params):
        return jnp.sum(fn(params, X) ** 2)

    grads = jax.jit(jax.grad(functools.partial(loss, small.apply)))(small.params)
    expected = jax.grad(functools.partial(loss, model))(masked)
    for name, array in grads["layers"].items():
        np.testing.assert_allclose(array, expected["layers"][name][jnp.array([0, 2, 4])], atol=1e-4)
    updates, _ = small.tx.update(grads, small.opt_state, small.params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, small.params)
    if not options.get("cast") and not options.get("reverse"):
        reference = unrolled(small.params, X, options.get("numbers", False), (0, 2, 4))
        np.testing.assert_allclose(small.apply(small.params, X), reference, atol=1e-5)
    (scan,) = [
        x for x in jax.make_jaxpr(small.apply)(small.params, X).eqns if str(x.primitive) == "scan"
    ]
    assert scan.params["length"] == 3


def test_costs_reports_and_stored_plans_count_the_layers_that_stay():
    graph = sparsity.trace(scanned, PARAMS, X)
    small = sparsity.shrink(graph, PARAMS, graph.drop(PARAMS, "layers/[024]"))
    per_layer = 7 * (WIDTH * WIDTH + 2 * WIDTH * HIDDEN)
    assert graph.macs() == LAYERS * per_layer + 7 * WIDTH * 4
    assert small.macs() == small.graph.macs() == 2 * per_layer + 7 * WIDTH * 4
    assert small.macs(("layers", "up")) == 2 * 7 * WIDTH * HIDDEN
    assert "2x6x10" in small.report()
    again = sparsity.shrink(graph, PARAMS, sparsity.Plan.from_json(small.plan.to_json()))
    np.testing.assert_array_equal(
        again.apply(again.params, X[:3]), small.apply(small.params, X[:3])
    )


def prune_hidden(graph, params):
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph, groups="hidden"),
        sparsity_distribution_fn=sparsity.Uniform(0.5),
    )
    return pruner.instant_sparsify(params)[1]


def multiply(one, other):
    return jax.tree.map(
        lambda a, b: b if a is None else a if b is None else a * b,
        one,
        other,
        is_leaf=lambda x: x is None,
    )


@pytest.mark.parametrize("order", ["together", "layers first", "channels first"])
def test_layers_and_the_channels_of_each_layer_go(order):
    graph = sparsity.trace(scanned, PARAMS, X)
    channels = prune_hidden(graph, PARAMS)
    layers = graph.drop(PARAMS, ["layers/0", "layers/3"])
    both = multiply(channels, layers)
    if order == "together":
        plan = sparsity.shrink(graph, PARAMS, both).plan
    else:
        masks = layers if order == "layers first" else channels
        first = sparsity.shrink(graph, PARAMS, masks)
        if order == "layers first":
            later = jax.tree.map(lambda x: x[jnp.array([1, 2, 4])], channels["layers"])
            later = {"layers": later, "head": None}
        else:
            later = first.graph.drop(first.params, ["layers/0", "layers/3"])
        plan = first.plan.then(sparsity.shrink(first.graph, first.params, later).plan)
    small = sparsity.shrink(graph, PARAMS, sparsity.Plan.from_json(plan.to_json()))
    assert small.params["layers"]["up"].shape == (3, WIDTH, HIDDEN // 2)
    expected = scanned(apply_masks(PARAMS, both), X)
    np.testing.assert_allclose(small.apply(small.params, X), expected, atol=1e-5)
    assert small.macs() == small.graph.macs()


def test_a_wrapped_optimizer_and_its_ramp_go_on_without_the_layers():
    graph = sparsity.trace(scanned, PARAMS, X)
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph, groups="hidden"),
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.PolynomialSchedule(1, 0, 3),
    )
    tx = pruner.wrap_optax(optax.sgd(0.0))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    _, state = tx.update(zeros, tx.init(PARAMS), PARAMS)
    masks = multiply(sparsity.get_sparse_state(state).masks, graph.drop(PARAMS, "layers/2"))
    small = sparsity.shrink(graph, PARAMS, masks, state, tx)
    state = small.opt_state
    for _ in range(4):
        zeros = jax.tree.map(jnp.zeros_like, small.params)
        _, state = small.tx.update(zeros, state, small.params)
    masks = sparsity.get_sparse_state(state).masks
    assert masks["layers"]["up"].shape[0] == 4
    np.testing.assert_array_equal(masks["layers"]["bias"].sum(axis=1), HIDDEN // 2)


def test_a_layer_without_one_branch_stays_masked_in_the_stack():
    graph = sparsity.trace(scanned, PARAMS, X)
    masks = graph.drop(PARAMS, ["layers/mix/1", "layers/down/1", "layers/mix/4"])
    small = sparsity.shrink(graph, PARAMS, masks)
    assert small.params["layers"]["mix"].shape[0] == 4
    assert not small.params["layers"]["mix"][3].any()
    expected = scanned(apply_masks(PARAMS, masks), X)
    np.testing.assert_allclose(small.apply(small.params, X), expected, atol=1e-6)


def test_one_layer_stays_where_all_are_dropped():
    graph = sparsity.trace(scanned, PARAMS, X)
    masks = graph.drop(PARAMS, "layers/*")
    small = sparsity.shrink(graph, PARAMS, masks)
    assert small.params["layers"]["up"].shape[0] == 1
    np.testing.assert_allclose(small.apply(small.params, X), X @ PARAMS["head"], atol=1e-6)


def test_scores_of_layers_are_those_of_the_loop():
    graph = sparsity.trace(scanned, PARAMS, X)
    streams = [X]
    for i in range(LAYERS):
        streams.append(layer(streams[-1], {name: w[i] for name, w in STACK.items()}))
    cosines = sparsity.rank_groups(graph, PARAMS, [X], "cosine")
    for i, (x, y) in enumerate(itertools.pairwise(streams)):
        cosine = jnp.sum(x * y, -1) / (jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1))
        np.testing.assert_allclose(cosines[f"layers/{i}"], 1 - cosine.mean(), atol=1e-6)
    errors = sparsity.rank_groups(graph, PARAMS, [X], by="error")
    for i in range(LAYERS):
        others = [j for j in range(LAYERS) if j != i]
        params = {**PARAMS, "layers": {n: w[jnp.array(others)] for n, w in STACK.items()}}
        lost = unrolled(params, X, False, others) - scanned(PARAMS, X)
        expected = jnp.sum(lost**2) / jnp.sum(scanned(PARAMS, X) ** 2)
        np.testing.assert_allclose(errors[f"layers/{i}"], expected, rtol=1e-4)


STEPS = {
    "bias after the sum": lambda x, p: x + jnp.tanh(x @ p["up"]) @ p["down"] + p["scale"],
    "bias before the sum": lambda x, p: p["scale"] + (x + jnp.tanh(x @ p["up"]) @ p["down"]),
    "gain": lambda x, p: x + p["scale"] * (jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"]),
    "one row": lambda x, p: x + jnp.mean(x @ p["mix"], 0, keepdims=True),
    "cast": lambda x, p: (x.astype(jnp.float32) + jnp.tanh(x @ p["up"]) @ p["down"]).astype(
        x.dtype
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_layers_go_however_the_sum_is_written(name):
    dtype = jnp.bfloat16 if name == "cast" else jnp.float32
    stack, x = jax.tree.map(lambda w: w.astype(dtype), (STACK, X))

    def model(stack, x):
        return lax.scan(lambda x, p: (STEPS[name](x, p), None), x, stack)[0]

    graph = sparsity.trace(model, stack, x)
    masks = graph.drop(stack, ["layers/0", "layers/2"])
    small = sparsity.shrink(graph, stack, masks)
    assert small.params["up"].shape[0] == LAYERS - 2
    np.testing.assert_array_equal(small.apply(small.params, x), model(apply_masks(stack, masks), x))


@jax.custom_vjp
def straight_through(x, w):
    return x @ w


straight_through.defvjp(
    lambda x, w: (x @ w, w), lambda w, cotangent: (cotangent, jnp.zeros_like(w))
)


def test_a_layer_stays_whose_rule_passes_gradients_by():
    def model(params, x):
        step = lambda x, w: (x + straight_through(x, w), None)  # noqa: E731
        return lax.scan(step, x @ params["up"], params["mix"])[0]

    params = {"up": STACK["mix"][0], "mix": STACK["mix"]}
    graph = sparsity.trace(model, params, X)
    masks = {"up": None, "mix": np.ones(params["mix"].shape, np.uint8)}
    masks["mix"][1] = 0
    small = sparsity.shrink(graph, params, masks)

    def loss(fn, params):
        return jnp.sum(fn(params, X) ** 2)

    grads = jax.grad(functools.partial(loss, small.apply))(small.params)
    expected = jax.grad(functools.partial(loss, model))(apply_masks(params, masks))
    np.testing.assert_allclose(grads["up"], expected["up"], rtol=1e-5)


def count_steps(params, x):
    def step(carry, p):
        x, i = carry
        return (layer(x, p, i), i + 1.0), None

    return lax.scan(step, (x, 0.0), params["layers"])[0][0] @ params["head"]


def return_streams(params, x):
    def step(x, p):
        x = layer(x, p)
        return x, x

    return lax.scan(step, x, params["layers"])[1]


def scan_twice(params, x):
    for _ in range(2):
        x, _ = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    return x @ params["head"]


def post_norm(params, x):
    def step(x, p):
        x = layer(x, p)
        return x / (1 + jnp.linalg.norm(x)), None

    return lax.scan(step, x, params["layers"])[0] @ params["head"]


@pytest.mark.parametrize("model", [count_steps, return_streams, scan_twice, post_norm])
def test_layers_that_do_more_than_to_add_to_their_carry_stay(model):
    graph = sparsity.trace(model, PARAMS, X)
    assert graph.blocks == []
    with pytest.raises(ValueError, match="no residual blocks"):
        sparsity.rank_groups(graph, PARAMS, [X], "cosine")
    zeros = {"layers": dict.fromkeys(STACK), "head": None}
    for name in WRITERS:
        zeros["layers"][name] = np.ones(STACK[name].shape, np.uint8)
        zeros["layers"][name][1] = 0
    small = sparsity.shrink(graph, PARAMS, zeros)
    assert small.params["layers"]["up"].shape[0] == LAYERS
    expected = model(apply_masks(PARAMS, zeros), X)
    np.testing.assert_allclose(small.apply(small.params, X), expected, atol=1e-5)


def test_a_layer_stays_that_a_sum_over_all_layers_reads():
    def model(params, x):
        return scanned(params, x), jnp.sum(params["layers"]["up"] ** 2, axis=(0, 2))

    graph = sparsity.trace(model, PARAMS, X)
    masks = graph.drop(PARAMS, "layers/2")
    assert sparsity.shrink(graph, PARAMS, masks).params["layers"]["up"].shape[0] == LAYERS
    masks["layers"]["up"] = masks["layers"]["mix"][:, :1, :1] * np.ones(STACK["up"].shape, np.uint8)
    small = sparsity.shrink(graph, PARAMS, masks)
    assert small.params["layers"]["up"].shape[0] == LAYERS - 1
    expected = model(apply_masks(PARAMS, masks), X)
    for x, y in zip(small.apply(small.params, X), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2, deterministic=True)(y)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x)))), None


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return nn.Dense(2)(block(name="blocks")(x, None)[0])


def test_layers_of_flax_go_with_their_biases():
    x = X[None]
    params = Stacked().init(jax.random.key(0), x)
    graph = sparsity.trace(Stacked().apply, params, x)
    first, *_ = sparsity.rank_groups(graph, params, [x], "cosine")
    assert first.startswith("params/blocks/")
    masks = graph.drop(params, first)
    small = sparsity.shrink(graph, params, masks)
    shapes = jax.tree.map(jnp.shape, small.params["params"]["blocks"])
    assert {
        shape[0] for shape in jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple))
    } == {2}
    expected = Stacked().apply(apply_masks(params, masks), x)
    np.testing.assert_allclose(small.apply(small.params, x), expected, atol=1e-5)


# Branches behind other functions.

BRANCH = draw(
    up=(WIDTH, HIDDEN), down=(HIDDEN, WIDTH), gain=(WIDTH,), shift=(WIDTH,), mean=(WIDTH,)
)
CENTRE = jnp.arange(WIDTH) / 7


def find_paths(join, params=BRANCH):
    def model(params, x):
        return join(x, jnp.tanh(x @ params["up"]) @ params["down"], params)

    graph = sparsity.trace(model, params, X)
    branches = [branch for block in graph.blocks for branch in block.branches]
    for branch in branches:
        masks = graph.drop(params, branch.name)
        masked = apply_masks(params, masks)
        np.testing.assert_array_equal(model(masked, X), X)
        small = sparsity.shrink(graph, params, masks)
        np.testing.assert_array_equal(small.apply(small.params, X), X)
        assert small.params["up"].size == 0 or "up" in str(branch.paths)
    return [path for branch in branches for (path,) in branch.paths]


def normalize(f, eps=1e-5):
    return f * lax.rsqrt(jnp.mean(f**2, -1, keepdims=True) + eps)


@pytest.mark.parametrize(
    ("join", "paths"),
    [
        (lambda x, f, p: x + f, ["down"]),
        (lambda x, f, p: x - f, ["down"]),
        (lambda x, f, p: f + x, ["down"]),
        (lambda x, f, p: x + jax.nn.relu(f), ["down"]),
        (lambda x, f, p: x + jnp.tanh(f) * 3, ["down"]),
        (lambda x, f, p: x + p["gain"] * f, ["down"]),
        (lambda x, f, p: x + (f + p["shift"]), ["down", "shift"]),
        (lambda x, f, p: x + jnp.where(x > 0, f, 0.0), ["down"]),
        (lambda x, f, p: x + normalize(f) * p["gain"], ["down"]),
        (lambda x, f, p: x + (normalize(f) * p["gain"] + p["shift"]), ["down", "shift"]),
        (lambda x, f, p: x + ((f - p["mean"]) * p["gain"] + p["shift"]), ["down", "gain", "shift"]),
        (lambda x, f, p: x + jax.nn.sigmoid(x) * f, ["down"]),
        # What is not 0 without the products, or may be NaN.
        (lambda x, f, p: x + jax.nn.softplus(f), []),
        (lambda x, f, p: x + x * jax.nn.sigmoid(f), []),
        (lambda x, f, p: x + normalize(f, eps=0.0), []),
        (lambda x, f, p: f - x, []),
        (lambda x, f, p: x * 2 + f, []),
    ],
)
def test_branches_name_the_fewest_parameters_without_which_they_are_0(join, paths):
    assert find_paths(join) == paths
