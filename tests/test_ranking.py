"""`rank_groups` against the formulas of the papers, and pruning by its numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sparsity
from tests.graph.models import LLAMA_TOKENS as TOKENS, draw_llama, llama

X = jax.random.normal(jax.random.key(5), (3, 7, 6))  # batches, rows, width


def draw(**shapes):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


MLP = draw(up=(6, 10), gate=(6, 10), bias=(10,), down=(10, 4))


def mlp(params, x):
    return (jax.nn.silu(x @ params["gate"]) * (x @ params["up"] + params["bias"])) @ params["down"]


def measure_loss(params, x):
    return jnp.mean(mlp(params, x) ** 2)


def hidden_units():
    """The inputs of `down`, [batches, rows, channels]."""
    gates = jax.nn.silu(X @ MLP["gate"])
    return np.asarray(gates * (X @ MLP["up"] + MLP["bias"]), np.float64)


def expect_mlp(by):
    h, down = hidden_units().reshape(-1, 10), np.asarray(MLP["down"], np.float64)
    if by == "magnitude":
        parts = np.abs(MLP["up"]).sum(0), np.abs(MLP["gate"]).sum(0), np.abs(MLP["bias"])
        return sum(parts) + np.abs(down).sum(1)
    if by == "taylor":  # LLM-Pruner, equation 5: sums of |w g| of the mean loss
        grads = jax.tree.map(
            lambda *g: sum(g) / len(g), *[jax.grad(measure_loss)(MLP, x) for x in X]
        )
        terms = jax.tree.map(lambda w, g: np.abs(w * g), MLP, grads)
        return terms["up"].sum(0) + terms["gate"].sum(0) + terms["bias"] + terms["down"].sum(1)
    if by == "activations":
        return np.sqrt(np.mean(h**2, axis=0))
    if by == "wanda_sp":
        return np.abs(down).sum(1) * np.sqrt(np.sum(h**2, axis=0))
    return np.var(h, axis=0, ddof=1) * (down**2).sum(1)  # FLAP, WIFV


CHANNELS = ["magnitude", "taylor", "activations", "wanda_sp", "flap"]


@pytest.mark.parametrize("by", CHANNELS)
def test_hidden_units_are_ranked_by_the_formulas_of_the_papers(by):
    graph = sparsity.trace(mlp, MLP, X[0])
    ranking = sparsity.rank_groups(graph, MLP, iter(X), by, loss_fn=measure_loss)
    assert list(ranking) == ["gate:1"]
    np.testing.assert_allclose(ranking["gate:1"], expect_mlp(by), rtol=2e-5)


ATTENTION = draw(q=(6, 2, 3), k=(6, 2, 3), v=(6, 2, 4), out=(2, 4, 6))


def attend(params, x, mixed_only=False):
    q, k, v = (jnp.einsum("td,dhk->htk", x, params[name]) for name in "qkv")
    mixed = jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v
    return mixed if mixed_only else jnp.einsum("htk,hkd->td", mixed, params["out"])


def test_heads_are_ranked_by_all_of_their_channels():
    graph = sparsity.trace(attend, ATTENTION, X[0])
    (heads,) = [group.name for group in graph.groups if group.kind == "heads"]
    mixed = np.stack([attend(ATTENTION, x, mixed_only=True) for x in X]).astype(np.float64)
    activations = sparsity.rank_groups(graph, ATTENTION, X, "activations", groups="heads")
    np.testing.assert_allclose(activations[heads], np.sqrt((mixed**2).mean((0, 2, 3))), rtol=1e-5)
    norms = np.sqrt((mixed**2).sum((0, 2)))  # [heads, channels]
    weights = np.abs(ATTENTION["out"]).sum(-1)
    wanda = sparsity.rank_groups(graph, ATTENTION, X, "wanda_sp", groups="heads")
    np.testing.assert_allclose(wanda[heads], (norms * weights).sum(1), rtol=1e-5)


def test_each_layer_of_a_scan_has_a_row():
    stack = draw(up=(3, 6, 10), down=(3, 10, 6))

    def step(x, layer):
        hidden = jnp.tanh(x @ layer["up"])
        return x + hidden @ layer["down"], hidden

    graph = sparsity.trace(lambda params, x: lax.scan(step, x, params)[0], stack, X[0])
    hidden = np.stack([lax.scan(step, x, stack)[1] for x in X], axis=1)  # [layers, batches, ...]
    ranking = sparsity.rank_groups(graph, stack, X, "activations", groups="hidden")
    expected = np.sqrt((hidden.astype(np.float64) ** 2).mean((1, 2)))
    np.testing.assert_allclose(ranking["up:2"], expected, rtol=1e-5)

    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph, importance=ranking),
        sparsity_distribution_fn=sparsity.Uniform(0.4),
    )
    masks = pruner.instant_sparsify(stack)[1]
    best = np.argsort(-expected, axis=1)[:, :6]
    for layer in range(3):
        assert set(np.flatnonzero(masks["up"][layer, 0])) == set(best[layer])


@pytest.mark.parametrize("by", CHANNELS)
def test_the_channels_of_the_highest_importance_stay_within_a_budget(by):
    graph = sparsity.trace(llama, params := draw_llama(), TOKENS)
    ranking = sparsity.rank_groups(
        graph,
        params,
        [TOKENS],
        by,
        groups=("hidden", "heads"),
        loss_fn=lambda p, x: llama(p, x).var(),
    )
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph, importance=ranking, across=True),
        sparsity_distribution_fn=sparsity.budget(graph, macs=0.8),
    )
    pruned, masks = pruner.instant_sparsify(params)
    small = sparsity.shrink(graph, pruned, masks)
    assert 0.7 * graph.macs() < small.macs() <= 0.8 * graph.macs()
    np.testing.assert_allclose(small.apply(small.params, TOKENS), llama(pruned, TOKENS), atol=1e-5)
    assert set(ranking) == {x.name for x in graph.groups if x.kind in ("hidden", "heads")}
    for name, numbers in ranking.items():
        group = next(group for group in graph.groups if group.name == name)
        (path, axis), positions = group.members[0], group.positions[0]
        rows = np.moveaxis(np.asarray(masks["/".join(path)]), axis, 0)[positions]
        stays = rows.reshape(group.size, -1).any(axis=1)
        if not stays.all():
            assert numbers[stays].min() >= numbers[~stays].max()


def test_blocks_are_ranked_by_the_loss_without_them():
    shapes = {f"layers/{i}": (6, 6) for i in range(3)}
    params = {name: 0.1 * w for name, w in draw(**shapes).items()}

    def model(params, x, skipped=None):
        for name, w in params.items():
            x = x if name == skipped else x + jnp.tanh(x) @ w
        return x

    def loss(params, x, skipped=None):
        return jnp.mean((model(params, x, skipped) - 1) ** 2)

    graph = sparsity.trace(model, params, X[0])
    ranking = sparsity.rank_groups(graph, params, X, "loss", loss_fn=loss)
    full = np.mean([loss(params, x) for x in X])
    for name, rise in ranking.items():
        expected = np.mean([loss(params, x, name) for x in X]) - full
        np.testing.assert_allclose(rise, expected, atol=1e-6)
    assert list(ranking.values()) == sorted(ranking.values())
    small = sparsity.shrink(graph, params, graph.drop(params, next(iter(ranking))))
    expected = model(params, X[0], next(iter(ranking)))
    np.testing.assert_allclose(small.apply(small.params, X[0]), expected, atol=1e-6)


def test_branches_are_ranked_by_their_names():
    graph = sparsity.trace(llama, params := draw_llama(), TOKENS)

    def loss(params, tokens):
        return jnp.mean(llama(params, tokens) ** 2)

    ranking = sparsity.rank_groups(graph, params, [TOKENS], "loss", groups="*o_proj*", loss_fn=loss)
    assert {*ranking} == {f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)}
    for name, rise in ranking.items():
        masked = {**params, name: 0 * params[name]}
        np.testing.assert_allclose(rise, loss(masked, TOKENS) - loss(params, TOKENS), atol=1e-6)
    with pytest.raises(ValueError, match="is a branch, and 'cosine' compares blocks"):
        sparsity.rank_groups(graph, params, [TOKENS], "cosine", groups="*o_proj*")


def test_a_table_shows_the_importance_of_groups():
    graph = sparsity.trace(mlp, MLP, X[0])
    row = graph.group_table({"gate:1": np.arange(10.0)}).splitlines()[-1].split()
    assert row[-3:] == ["0", "4.5", "9"]


GRAPH = sparsity.trace(mlp, MLP, X[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "size"}, "by must be one of"),
        ({"by": "taylor"}, "loss_fn"),
        ({"by": "loss"}, "loss_fn"),
        ({"by": "flap"}, "batch"),
        ({"by": "flap", "groups": "heads"}, "'heads' is no group"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sparsity.rank_groups(GRAPH, MLP, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance": {"gate": np.ones(10)}}, "no group"),
        ({"importance": {"gate:1": np.ones(9)}}, r"shape \(10,\)"),
        ({"importance": {"gate:1": [1] * 10}}, "array"),
        ({"importance": {}, "groups": "hidden"}, "has none of the chosen group 'gate:1'"),
        ({"importance": {"gate:1": np.ones(10)}, "order": 2}, "order"),
    ],
)
def test_importance_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sparsity.Coupled(GRAPH, **options)


def test_importance_of_the_model_before_a_cut_is_refused():
    scope = sparsity.Coupled(GRAPH, importance={"gate:1": np.arange(10.0)})
    pruner = sparsity.MagnitudePruning(scope=scope, sparsity_distribution_fn=sparsity.Uniform(0.5))
    small = sparsity.shrink(GRAPH, *pruner.instant_sparsify(MLP))
    assert small.params["up"].shape == (6, 5)
    with pytest.raises(ValueError, match="10 channels, of which 5"):
        small.updater(pruner).instant_sparsify(small.params)
