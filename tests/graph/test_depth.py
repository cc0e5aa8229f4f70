"""Blocks and branches that may go: against the same model written without them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import sparsity
from tests.graph.models import LLAMA_TOKENS as TOKENS, draw_llama, llama


@pytest.fixture(scope="module")
def model():
    params = draw_llama()
    return params, sparsity.trace(llama, params, TOKENS)


def test_blocks_have_their_branches_in_order(model):
    blocks = model[1].blocks
    assert [block.name for block in blocks] == ["model.layers.0", "model.layers.1"]
    assert [branch.name for block in blocks for branch in block.branches] == [
        f"model.layers.{i}.{name}.weight"
        for i in range(2)
        for name in ("self_attn.o_proj", "mlp.down_proj")
    ]


@pytest.mark.parametrize("keys", ["model.layers.0", ["*attn*"], ["*layers.1.mlp*", "*0.self*"]])
def test_dropped_branches_vanish_from_the_smaller_model(model, keys):
    params, graph = model
    masks = graph.drop(params, keys)
    masked = sparsity.masks.apply_masks(params, masks)
    tx = optax.adam(1e-2)
    state = tx.init(params)
    small = sparsity.shrink(graph, params, masks, state, tx)
    expected = llama(masked, TOKENS)
    np.testing.assert_allclose(small.apply(small.params, TOKENS), expected, atol=1e-5)
    empty = [name for name, array in small.params.items() if not array.size]
    dropped = [name for name, mask in masks.items() if mask is not None]
    assert {*dropped} < {*empty}
    compiled = jax.jit(small.apply).lower(small.params, TOKENS).compile().as_text()
    num_products = {"attn": 6, "mlp": 3}
    gone = sum(num_products["attn" if "attn" in name else "mlp"] for name in dropped)
    assert compiled.count(" dot(") == 19 - gone
    # Gradients and the next step are those of the masked model.
    loss = lambda fn: lambda params: jnp.sum(fn(params, TOKENS) ** 2)  # noqa: E731
    grads = jax.grad(loss(small.apply))(small.params)
    reference = jax.grad(loss(llama))(masked)
    for name, array in grads.items():
        if array.shape == reference[name].shape:
            np.testing.assert_allclose(array, reference[name], rtol=1e-3, atol=1e-4)
    updates, _ = small.tx.update(grads, small.opt_state, small.params)
    optax.apply_updates(small.params, updates)
    again = sparsity.shrink(graph, params, sparsity.Plan.from_json(small.plan.to_json()))
    assert jax.tree.map(jnp.shape, again.params) == jax.tree.map(jnp.shape, small.params)
    assert small.graph.macs() == small.macs() < graph.macs()
    assert len(small.graph.blocks) <= len(graph.blocks)


def test_a_dropped_block_is_the_model_without_it(model):
    params, graph = model
    small = sparsity.shrink(graph, params, graph.drop(params, "model.layers.0"))

    def one_layer(params, tokens):
        shifted = {name.replace("layers.1", "layers.0"): x for name, x in params.items()}
        zeros = {name: 0 * x for name, x in params.items() if "layers.1" in name}
        return llama({**shifted, **zeros}, tokens)

    np.testing.assert_allclose(
        small.apply(small.params, TOKENS), one_layer(params, TOKENS), atol=1e-5
    )


class PostNorm(nn.Module):
    """With biases, and norms after the sums."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        for i in range(2):
            x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(2, name=f"attention_{i}")(x))
            h = nn.gelu(nn.Dense(20, name=f"up_{i}")(x))
            x = nn.LayerNorm()(x + 0.5 * nn.Dense(8, name=f"down_{i}")(h))
        return nn.Dense(3)(x)


def test_biases_go_with_their_branch():
    module, x = PostNorm(), jax.random.normal(jax.random.key(1), (2, 5, 4))
    params = module.init(jax.random.key(0), x)["params"]
    params = jax.tree.map(lambda p: p + 0.1, params)  # biases of zeros would hide in the sums
    fn = lambda params, x: module.apply({"params": params}, x)  # noqa: E731
    graph = sparsity.trace(fn, params, x)
    names = [branch.name for block in graph.blocks for branch in block.branches]
    assert names == [
        f"{n}_{i}/{end}"
        for i in range(2)
        for n, end in (("attention", "out/kernel"), ("down", "kernel"))
    ]
    masks = graph.drop(params, "down_0/*")
    assert masks["down_0"]["bias"] is not None
    small = sparsity.shrink(graph, params, masks)
    assert small.params["up_0"]["kernel"].shape == (8, 0)
    masked = sparsity.masks.apply_masks(params, masks)
    np.testing.assert_allclose(small.apply(small.params, x), fn(masked, x), atol=1e-5)


def test_parallel_branches_and_low_ranks_are_branches_and_other_sums_are_not():
    def model(params, x):
        h = jnp.tanh(x @ params["up"])
        x = x + h @ params["down"] + h @ params["a"] @ params["b"]  # in parallel
        x = x + jax.nn.sigmoid(x @ params["gate"]) * 3.0  # not 0 without its weight
        x = x + params["shift"]
        return x + jnp.tanh(x) @ params["last"]

    shapes = {"up": (4, 6), "down": (6, 4), "a": (6, 2), "b": (2, 4), "gate": (4, 4)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    params |= {"shift": jnp.ones(4), "last": jnp.eye(4)}
    graph = sparsity.trace(model, params, jnp.ones((3, 4)))
    assert [branch.name for block in graph.blocks for branch in block.branches] == [
        "down",
        "b",
        "last",
    ]


def test_a_branch_with_a_norm_inside_is_cut_as_far_as_the_norm_allows():
    def model(params, x):
        h = x @ params["up"]
        h = (h - h.mean(-1, keepdims=True)) / (1 + h.std(-1, keepdims=True))
        return (x + h @ params["down"]) @ params["head"]

    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (4, 6)),
        "down": jax.random.normal(keys[1], (6, 4)),
        "head": jax.random.normal(keys[2], (4, 2)),
    }
    x = jax.random.normal(keys[3], (3, 4))
    graph = sparsity.trace(model, params, x)
    masks = graph.drop(params, "down")
    small = sparsity.shrink(graph, params, masks)
    expected = model(sparsity.masks.apply_masks(params, masks), x)
    np.testing.assert_allclose(small.apply(small.params, x), expected, atol=1e-5)


def test_scores_are_those_of_the_streams_and_of_the_outputs(model):
    params, graph = model
    batches = [TOKENS, TOKENS + 5]
    errors = {}
    for i in range(2):
        masked = sparsity.masks.apply_masks(params, graph.drop(params, f"model.layers.{i}"))
        pairs = [(llama(masked, x), llama(params, x)) for x in batches]
        errors[f"model.layers.{i}"] = np.mean(
            [jnp.sum((y - z) ** 2) / jnp.sum(z**2) for y, z in pairs]
        )
    ranked = sparsity.rank_groups(graph, params, batches, by="error")
    assert [*ranked] == sorted(ranked, key=ranked.get)
    for name, error in errors.items():
        np.testing.assert_allclose(ranked[name], error, rtol=1e-4)
    stream = params["embed"][TOKENS]
    masked = sparsity.masks.apply_masks(params, graph.drop(params, "model.layers.1"))
    # The stream after the first block, by the inverse of what follows it.
    after = llama({**masked, "embed": params["embed"]}, TOKENS) @ np.linalg.pinv(params["embed"]).T
    cosine = jnp.sum(stream * after, -1) / (
        jnp.linalg.norm(stream, axis=-1) * jnp.linalg.norm(after, axis=-1)
    )
    scores = sparsity.rank_groups(graph, params, [TOKENS], "cosine")
    np.testing.assert_allclose(scores["model.layers.0"], 1 - cosine.mean(), rtol=1e-3)


def test_unknown_names_and_models_without_blocks_are_refused(model):
    params, graph = model
    with pytest.raises(ValueError, match=r"'model\.layers\.7' is no block"):
        graph.drop(params, "model.layers.7")
    with pytest.raises(ValueError, match="by must be"):
        sparsity.rank_groups(graph, params, [TOKENS], by="size")
    with pytest.raises(ValueError, match="no batch"):
        sparsity.rank_groups(graph, params, [], "cosine")
    plain = sparsity.trace(lambda w, x: x @ w, jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert plain.blocks == []
    with pytest.raises(ValueError, match="no residual blocks"):
        sparsity.rank_groups(plain, jnp.ones((4, 4)), [jnp.ones((2, 4))], "cosine")


# Arrays without entries.


def attend(params, x):
    q, k, v = ((x @ params[name]).reshape(*x.shape[:2], 4, 4) for name in "qkv")
    if "norm" in params:
        q, k = (
            y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6) * params["norm"] for y in (q, k)
        )
    shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(*x.shape[:2], -1)
    return (x + mixed @ params["o"]) @ params["head"]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
def test_a_projection_of_heads_without_weights_takes_what_it_alone_reads(name, norm):
    keys = jax.random.split(jax.random.key(0), 6)
    params = {n: jax.random.normal(k, (16, 16)) for n, k in zip("qkvo", keys, strict=False)}
    params["head"] = jax.random.normal(keys[4], (16, 3))
    params |= {"norm": jnp.ones(4)} if norm else {}
    x = jax.random.normal(keys[5], (2, 5, 16))
    graph = sparsity.trace(attend, params, x)
    masks = dict.fromkeys(params) | {name: np.zeros((16, 16), np.uint8)}
    small = sparsity.shrink(graph, params, masks)
    expected = attend(sparsity.masks.apply_masks(params, masks), x)
    np.testing.assert_allclose(small.apply(small.params, x), expected, atol=1e-5)
    np.testing.assert_allclose(small.graph.model.fn(small.params, x[:1]), expected[:1], atol=1e-5)
    assert small.params[name].size == 0 or norm
    small.report()


def test_an_updater_goes_on_without_the_groups_that_are_gone(model):
    params, graph = model
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph, groups="hidden"),
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.PolynomialSchedule(1, 0, 3),
    )
    small = sparsity.shrink(graph, params, graph.drop(params, "*layers.0.mlp*"))
    for updater in (small.updater(pruner), pruner):
        masks = updater.instant_sparsify(small.params)[1]
        assert masks["model.layers.0.mlp.up_proj.weight"].shape == (0, 16)
        assert masks["model.layers.1.mlp.up_proj.weight"][:, 0].sum() == 12


def test_a_budget_and_a_ramp_go_on_after_a_drop(model):
    params, graph = model
    scope = sparsity.Coupled(graph, groups="hidden")
    ramp = sparsity.MagnitudePruning(
        scope=scope,
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.PolynomialSchedule(1, 0, 3),
    )
    state = ramp.wrap_optax(optax.sgd(0.0)).init(params)
    small = sparsity.shrink(graph, params, graph.drop(params, "*layers.0.mlp*"), state)
    tx, state = small.updater(ramp).wrap_optax(optax.sgd(0.0)), small.opt_state
    for _ in range(4):
        _, state = tx.update(jax.tree.map(jnp.zeros_like, small.params), state, small.params)
    masks = sparsity.get_sparse_state(state).masks
    assert masks["model.layers.1.mlp.up_proj.weight"][:, 0].sum() == 12
    for across in (False, True):
        pruner = sparsity.MagnitudePruning(
            scope=sparsity.Coupled(graph, groups="hidden", across=across),
            sparsity_distribution_fn=sparsity.budget(graph, macs=0.65),
        )
        pruned, masks = small.updater(pruner).instant_sparsify(small.params)
        macs = sparsity.shrink(small.graph, pruned, masks).macs()
        assert 0.55 * graph.macs() < macs <= 0.65 * graph.macs()


FUNCTIONS = {
    "joined": lambda p, x: x @ (p["w"] + p["a"] @ p["b"]),
    "shifted": lambda p, x: x @ (1 + p["w"]),
    "softmax": lambda p, x: x @ jax.nn.softmax(p["w"], 0),
    "weight norm": lambda p, x: x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0)),
    "ratio": lambda p, x: (y := x @ p["w"]) / jnp.linalg.norm(y, axis=-1, keepdims=True),
    "norm": lambda p, x: (y := x @ p["w"]) * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True)),
    "sums": lambda p, x: lax.cumlogsumexp(x @ p["w"], 1),
    "places": lambda p, x: lax.top_k(x @ p["w"], 8)[1].astype(jnp.float32),
    "tied": lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_are_not_0_without_their_weight_are_no_branches(name):
    shapes = {"w": (8, 8), "a": (8, 2), "b": (2, 8), "head": (8, 3)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    branch = FUNCTIONS[name]
    model = lambda params, x: (x + branch(params, jnp.tanh(x))) @ params["head"]  # noqa: E731
    assert sparsity.trace(model, params, jnp.ones((4, 8))).blocks == []


def convolve(x, kernel, groups=1):
    return lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@pytest.mark.parametrize("masked", [["c1"], ["c2"], ["d"], ["c1", "c2", "d"]], ids=str)
@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_before_a_flatten_and_in_groups_vanish(masked, groups):
    def model(params, x):
        x = jax.nn.relu(convolve(x, params["c1"]))
        x = jax.nn.relu(convolve(x, params["c2"], groups))
        return x.reshape(len(x), -1) @ params["d"] + 1.0

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"c1": (1, 1, 3, 8), "c2": (3, 3, 8 // groups, 8), "d": (8 * 16, 5)}
    params = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=False)}
    x = jax.random.normal(keys[3], (2, 4, 4, 3))
    graph = sparsity.trace(model, params, x)
    masks = dict.fromkeys(params) | {n: np.zeros(shapes[n], np.uint8) for n in masked}
    small = sparsity.shrink(graph, params, masks)
    expected = model(sparsity.masks.apply_masks(params, masks), x)
    np.testing.assert_allclose(jax.jit(small.apply)(small.params, x), expected, atol=1e-5)
    assert small.graph.macs() == small.macs() < graph.macs()


@pytest.mark.parametrize(
    "make",
    [
        lambda graph: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        lambda graph: sparsity.MagnitudePruning(
            scope=sparsity.Coupled(graph, groups="hidden"),
            sparsity_distribution_fn=sparsity.Uniform(0.5),
            scheduler=sparsity.PolynomialSchedule(1, 0, 9),
        ).wrap_optax(optax.adam(1e-2)),
    ],
    ids=["clip", "wrapped"],
)
def test_training_goes_on_with_the_optimizer_after_a_drop(model, make):
    params, graph = model
    masks = graph.drop(params, "*layers.0.mlp*")
    tx = make(graph)
    loss = lambda fn: lambda params: jnp.mean(fn(params, TOKENS) ** 2)  # noqa: E731

    def step(fn, tx, params, state, masks):
        grads = sparsity.masks.apply_masks(jax.grad(loss(fn))(params), masks)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    masked = sparsity.masks.apply_masks(params, masks)
    state = tx.init(masked)
    small = sparsity.shrink(graph, masked, masks, state, tx)
    none = dict.fromkeys(params)
    for _ in range(3):
        masked, state = step(llama, tx, masked, state, masks)
        masked = sparsity.masks.apply_masks(masked, masks)
    trained, small_state = small.params, small.opt_state
    for _ in range(3):
        trained, small_state = step(small.apply, small.tx, trained, small_state, none)
    np.testing.assert_allclose(
        small.apply(trained, TOKENS), llama(masked, TOKENS), rtol=1e-3, atol=1e-4
    )
