"""What channels are, by the program; and choices of groups by kind, name, pattern or function."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import sparsity
from tests.graph.models import LLAMA_TOKENS as TOKENS, draw_llama, llama

STREAM = "layers.0.mlp.down_proj.weight:0"


@pytest.fixture(scope="module")
def language_model():
    params = draw_llama()
    return llama, params, sparsity.trace(llama, params, TOKENS)


def find_kinds(fn, params, *args):
    """{name of the group: kind}."""
    return {group.name: group.kind for group in sparsity.trace(fn, params, *args).groups}


def test_a_language_model_has_a_stream_hidden_units_and_heads_that_share_keys(language_model):
    kinds = {group.name.removeprefix("model."): group.kind for group in language_model[2].groups}
    assert kinds.pop(STREAM) == "stream"
    assert kinds == {
        f"layers.{i}.{name}.weight:0{end}": kind
        for i in range(2)
        for name, end, kind in (
            ("mlp.gate_proj", "", "hidden"),
            ("self_attn.k_proj", "", "heads"),  # with their queries and values
            ("self_attn.k_proj", ".2", "head_channels"),
            ("self_attn.q_proj", "", "heads"),  # queries that share a key
            ("self_attn.v_proj", "", "head_channels"),
        )
    }


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return x + nn.Dense(8)(nn.gelu(nn.Dense(20)(nn.LayerNorm()(x)))), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(5)(scan()(nn.Dense(8)(x), None)[0])


class Image(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3))(x)
        x = x + nn.Conv(8, (3, 3))(nn.relu(nn.Conv(6, (3, 3))(x)))
        return nn.Dense(3)(nn.relu(nn.Dense(10)(x.mean((1, 2)))))


@pytest.mark.parametrize(
    ("module", "x", "expected"),
    [
        (Scanned(), jnp.ones((2, 4, 3)), {"stream", "hidden", "heads", "head_channels"}),
        (Image(), jnp.ones((2, 6, 6, 3)), {"stream", "hidden", "channels"}),
    ],
)
def test_layers_of_a_scan_and_convolutions_have_kinds(module, x, expected):
    params = module.init(jax.random.key(0), x)["params"]
    kinds = find_kinds(lambda params, x: module.apply({"params": params}, x), params, x)
    assert {*kinds.values()} == expected
    by_kind = {kind: name for name, kind in kinds.items()}
    assert "Conv_2" in by_kind.get("channels", "Conv_2")
    assert by_kind["hidden"].endswith(("Dense_1/kernel:1", "Dense_1/kernel:2"))


def test_states_and_low_ranks_are_told_apart():
    def recurrent(params, x):
        def step(h, x):
            return jnp.tanh(h @ params["h"] + x @ params["x"]), None

        return lax.scan(step, jnp.zeros((2, 6)), x)[0] @ params["out"]

    shapes = {"h": jnp.ones((6, 6)), "x": jnp.ones((3, 6)), "out": jnp.ones((6, 2))}
    assert {*find_kinds(recurrent, shapes, jnp.ones((4, 2, 3))).values()} == {"stream"}
    shapes = {"w": (6, 9), "a": (6, 2), "b": (2, 9), "down": (9, 3)}
    arrays = {name: jnp.ones(shape) for name, shape in shapes.items()}
    low_rank = lambda p, x: jax.nn.relu(x @ p["w"] + x @ p["a"] @ p["b"]) @ p["down"]  # noqa: E731
    assert {*find_kinds(low_rank, arrays, jnp.ones((4, 6))).values()} == {"hidden"}


# Choices.


def prune(language_model, **options):
    """Returns {group: channels that stay}, and the largest difference of small and masked model."""
    model, params, graph = language_model
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph, **options), sparsity_distribution_fn=sparsity.Uniform(0.5)
    )
    pruned, masks = pruner.instant_sparsify(params)
    small = sparsity.shrink(graph, pruned, masks)
    difference = small.apply(small.params, TOKENS) - model(pruned, TOKENS)
    kept = {}
    for group in graph.groups:
        (path, axis), positions = group.members[0], group.positions[0]
        mask = masks[path[0]]
        rows = np.ones(group.size) if mask is None else np.asarray(mask).max(1 - axis)[positions]
        kept[group.name.removeprefix("model.")] = int((np.atleast_2d(rows.T).max(0) > 0).sum())
    return kept, float(jnp.abs(difference).max())


@pytest.mark.parametrize(
    ("groups", "cut"),
    [
        ("hidden", ["layers.0.mlp.gate_proj.weight:0", "layers.1.mlp.gate_proj.weight:0"]),
        (
            "model.layers.*.mlp.gate_proj",
            ["layers.0.mlp.gate_proj.weight:0", "layers.1.mlp.gate_proj.weight:0"],
        ),
        (["model.layers.1.mlp"], ["layers.1.mlp.gate_proj.weight:0"]),
        (
            lambda group: group.size == 24 and "layers.0" in group.name,
            ["layers.0.mlp.gate_proj.weight:0"],
        ),
        ("stream", ["layers.0.mlp.down_proj.weight:0"]),
    ],
    ids=["kind", "pattern", "names", "function", "stream"],
)
def test_only_chosen_groups_lose_channels(language_model, groups, cut):
    kept, difference = prune(language_model, groups=groups)
    sizes = {group.name.removeprefix("model."): group.size for group in language_model[2].groups}
    assert kept == {name: n // 2 if name in cut else n for name, n in sizes.items()}
    assert difference < 1e-5


def test_heads_go_by_key_or_by_query(language_model):
    for name in ("k_proj", "q_proj"):
        kept, difference = prune(language_model, groups=f"model.layers.*.self_attn.{name}.weight:0")
        assert kept[f"layers.0.self_attn.{name}.weight:0"] == 1
        assert kept["layers.0.mlp.gate_proj.weight:0"] == 24
        assert difference < 1e-5


def test_rates_by_kind_replace_the_sparsity(language_model):
    kept, difference = prune(language_model, rates={"hidden": 0.25, "model.layers.1.mlp": 0.75})
    assert kept["layers.0.mlp.gate_proj.weight:0"] == 18
    assert kept["layers.1.mlp.gate_proj.weight:0"] == 6
    assert kept["layers.0.mlp.down_proj.weight:0"] == 16  # the stream stays whole
    assert difference < 1e-5
    kept, _ = prune(language_model, groups=["hidden", "stream"], rates={"hidden": 0.75})
    assert kept["layers.0.mlp.gate_proj.weight:0"] == 6
    assert kept["layers.0.mlp.down_proj.weight:0"] == 8


def test_rates_rise_along_a_ramp(language_model):
    _, params, graph = language_model
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph, rates={"hidden": 0.75}),
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.PolynomialSchedule(1, 0, 4),
    )
    tx = pruner.wrap_optax(optax.sgd(0.0))
    state, step = tx.init(params), jax.jit(tx.update)
    counts = []
    for _ in range(5):
        _, state = step(jax.tree.map(jnp.zeros_like, params), state, params)
        mask = sparsity.get_sparse_state(state).masks["model.layers.0.mlp.up_proj.weight"]
        counts.append(int(mask[:, 0].sum()))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[-1] == 6


def test_a_budget_counts_what_the_chosen_groups_leave(language_model):
    _, params, graph = language_model
    scope = sparsity.Coupled(graph, groups="hidden")
    pruner = sparsity.MagnitudePruning(
        scope=scope, sparsity_distribution_fn=sparsity.budget(graph, macs=0.8)
    )
    pruned, masks = pruner.instant_sparsify(params)
    small = sparsity.shrink(graph, pruned, masks)
    macs = sparsity.trace(small.apply, small.params, TOKENS).macs()
    assert 0.7 * graph.macs() < macs <= 0.8 * graph.macs()
    with pytest.raises(ValueError, match="cannot be met"):
        sparsity.MagnitudePruning(
            scope=scope, sparsity_distribution_fn=sparsity.budget(graph, macs=0.2)
        ).instant_sparsify(params)


def test_keys_that_name_nothing_are_errors(language_model):
    graph = language_model[2]
    with pytest.raises(ValueError, match=r"groups: 'hiden' is no group.*kinds are"):
        sparsity.Coupled(graph, groups="hiden")
    with pytest.raises(ValueError, match="rates: 'layers/9' is no group"):
        sparsity.Coupled(graph, rates={"layers/9": 0.5})
    with pytest.raises(ValueError, match=r"rates\['hidden'\]"):
        sparsity.Coupled(graph, rates={"hidden": 1.5})
    with pytest.raises(ValueError, match="each key of groups"):
        sparsity.Coupled(graph, groups=[3])


def test_the_table_tells_kinds_and_what_half_of_the_channels_save(language_model):
    _, params, graph = language_model
    lines = graph.group_table().splitlines()
    (row,) = [line.split() for line in lines if "model.layers.0.mlp.gate_proj" in line]
    assert row[0] == "hidden"
    masks = dict.fromkeys(params) | {
        f"model.layers.0.mlp.{name}_proj.weight": mask
        for name, mask in {
            "gate": np.repeat([1, 0], 12)[:, None] * np.ones((24, 16)),
            "up": np.repeat([1, 0], 12)[:, None] * np.ones((24, 16)),
            "down": np.ones((16, 24)) * np.repeat([1, 0], 12),
        }.items()
    }
    small = sparsity.shrink(graph, sparsity.masks.apply_masks(params, masks), masks)
    macs = sparsity.trace(small.apply, small.params, TOKENS).macs()
    assert row[4] == f"{1 - macs / graph.macs():.1%}"


def test_choices_that_contradict_or_choose_nothing_are_errors(language_model):
    graph = language_model[2]
    for options in ({"groups": []}, {"groups": lambda group: False}, {"rates": {}}):
        with pytest.raises(ValueError, match="choose no group"):
            sparsity.Coupled(graph, **options)
    with pytest.raises(ValueError, match="groups must be"):
        sparsity.Coupled(graph, groups=(name for name in ["hidden"]))
    with pytest.raises(ValueError, match="across lets groups compete"):
        sparsity.Coupled(graph, rates={"hidden": 0.5}, across=True)
    with pytest.raises(ValueError, match="rates: 'stream' names no group that `groups` chooses"):
        sparsity.Coupled(graph, groups="hidden", rates={"stream": 0.5})


def test_the_name_of_a_layer_does_not_choose_the_stream(language_model):
    kept, _ = prune(language_model, groups="model.layers.0.mlp")
    assert kept[STREAM] == 16
    assert kept["layers.0.mlp.gate_proj.weight:0"] == 12


@pytest.mark.parametrize("sparsity_of_others", [0.0, 0.5])
def test_rates_hold_along_a_ramp_where_parameters_have_a_sparsity_of_0(
    language_model, sparsity_of_others
):
    _, params, graph = language_model
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph, rates={"hidden": 0.5}),
        sparsity_distribution_fn=sparsity.Uniform(sparsity_of_others),
        scheduler=sparsity.PolynomialSchedule(1, 0, 3),
    )
    tx = pruner.wrap_optax(optax.sgd(0.0))
    state = tx.init(params)
    for _ in range(5):
        _, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    mask = sparsity.get_sparse_state(state).masks["model.layers.0.mlp.up_proj.weight"]
    assert mask[:, 0].sum() == 12
