"""The residual stream under norms: channels that are 0 in all writers go, norms stay exact."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import sparsity
from sparsity import shrink, trace
from tests.shrinking import oracles

WIDTH, HIDDEN, WORDS, LAYERS = 8, 6, 7, 2
TOKENS = np.random.default_rng(0).integers(0, WORDS, (2, 3))


def mean(x):
    return jnp.mean(x, -1, keepdims=True)


# Norms as people write them: functions of {name: parameter of a shape}, and the names.
SPELLINGS = {
    "mean of x * x": lambda p, x: x * lax.rsqrt(mean(x * x) + 1e-6) * p["scale"],
    "sum / shape": lambda p, x: x / jnp.sqrt(
        jnp.sum(x**2, -1, keepdims=True) / x.shape[-1] + 1e-6) * p["scale"],
    "norm": lambda p, x: x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6) * p["scale"],
    "offset scale": lambda p, x: x * lax.rsqrt(mean(jnp.square(x)) + 1e-6) * (1 + p["scale"]),
    "squared difference": lambda p, x: (x - mean(x)) * lax.rsqrt(
        mean((x - mean(x)) ** 2) + 1e-6) * p["scale"] + p["bias"],
    "var": lambda p, x: (x - mean(x)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6) * p["scale"],
    "std of n - 1": lambda p, x: (x - mean(x)) / (
        x.std(-1, keepdims=True, ddof=1) + 1e-6) * p["scale"] + p["bias"],
    "standardize": lambda p, x: jax.nn.standardize(x, -1) * p["scale"] + p["bias"],
    "one row at a time": lambda p, x: jax.vmap(jax.vmap(
        lambda row: (row - row.mean()) * lax.rsqrt(row.var() + 1e-6)))(x) * p["scale"],
    "no scale": lambda p, x: (x - mean(x)) / mean((x - mean(x)) ** 2),
    "no scale but a bias": lambda p, x: (x - mean(x)) / mean((x - mean(x)) ** 2) + p["bias"],
    "mean deviation": lambda p, x: (x - mean(x)) / mean(jnp.abs(x - mean(x))) * p["scale"],
}  # fmt: skip
LAYER_NORM = SPELLINGS["squared difference"]
TABLE = np.sin(np.arange(3 * WIDTH)).reshape(3, WIDTH)  # of positions, which is no parameter
SPELLINGS["sinusoids"] = lambda p, x: LAYER_NORM(p, x + TABLE)


def make_packaged():
    """{name: (norm, its parameters)} of the norms of four packages."""
    x = jnp.ones((1, 1, WIDTH))
    norms = {}
    for name, module in {
        "linen LayerNorm": nn.LayerNorm(use_fast_variance=False),
        "linen LayerNorm, fast": nn.LayerNorm(),
        "linen LayerNorm, scale": nn.LayerNorm(use_fast_variance=False, use_bias=False),
        "linen RMSNorm": nn.RMSNorm(),
    }.items():
        norms[name] = module.apply, module.init(jax.random.key(0), x)
    for name, make in {
        "haiku LayerNorm": lambda: hk.LayerNorm(-1, True, True),
        "haiku RMSNorm": lambda: hk.RMSNorm(-1),
    }.items():
        module = hk.without_apply_rng(hk.transform(lambda x, make=make: make()(x)))
        norms[name] = module.apply, module.init(jax.random.key(0), x)
    for name, module in {
        "nnx LayerNorm": nnx.LayerNorm(WIDTH, use_fast_variance=False, rngs=nnx.Rngs(0)),
        "nnx RMSNorm": nnx.RMSNorm(WIDTH, rngs=nnx.Rngs(0)),
    }.items():
        definition, state = nnx.split(module)
        norms[name] = (lambda p, x, d=definition: nnx.merge(d, p)(x)), state
    for name, module in {
        "equinox LayerNorm": eqx.nn.LayerNorm(WIDTH),
        "equinox RMSNorm": eqx.nn.RMSNorm(WIDTH),
    }.items():
        params, static = eqx.partition(module, eqx.is_array)
        norms[name] = (lambda p, x, s=static: jax.vmap(jax.vmap(eqx.combine(p, s)))(x)), params
    return norms


def block(norm, x, p):
    """A layer of a stream: two products after a norm, added to what they read."""
    return x + jnp.tanh(norm(p["norm"], x) @ p["up"]) @ p["down"]


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def layer(norm_params, seed):
    """The parameters of a layer; those of the norm at random values."""
    norm = jax.tree.map(lambda x: jnp.asarray(draw(seed, *x.shape) + 1), norm_params)
    return {
        "norm": norm,
        "up": draw(seed + 1, WIDTH, HIDDEN),
        "down": draw(seed + 2, HIDDEN, WIDTH),
    }


def named(*names):
    return {name: jnp.ones(WIDTH) for name in names}


def stream(graph):
    """The groups of the stream."""
    return [group for group in graph.groups if (("embed",), 1) in group.members]


def chain(norms):
    """A stream through a layer with each of these norms: (function, parameters)."""

    def fn(params, tokens):
        x = jnp.take(params["embed"], tokens, axis=0)
        for (norm, _), p in zip(norms, params["layers"], strict=True):
            x = block(norm, x, p)
        return x @ params["embed"].T

    layers = [layer(p, 3 * i) for i, (_, p) in enumerate(norms)]
    return fn, jax.tree.map(jnp.asarray, {"embed": draw(9, WORDS, WIDTH), "layers": layers})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["spellings", "packages"])
def test_a_stream_is_cut_under_every_norm_with_or_without_a_scale(kind):
    with jax.enable_x64(True):
        norms = list(make_packaged().values())
        if kind == "spellings":
            norms = [(norm, named("scale", "bias")) for norm in SPELLINGS.values()]
        fn, params = chain(norms)
        assert len(stream(trace(fn, params, TOKENS))) == 1
        oracles.check(fn, params, (TOKENS,), 1e-10, is_each_alone=False)


REFUSED = {
    "a dot": (lambda p, x: (x - mean(x)) / jnp.einsum("btc,btc->bt", x - mean(x), x - mean(x))[
        ..., None] * p["scale"], "a product along the channels"),
    "a variance in a call of its own": (lambda p, x: (x - mean(x)) / jax.checkpoint(
        lambda c: mean(c**2))(x - mean(x)) * p["scale"], "sum over the channels"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_stream_is_refused_under_norms_whose_removed_entries_are_not_known(name):
    norm, words = REFUSED[name]
    fn, params = chain([(norm, named("scale", "bias"))])
    graph = trace(fn, params, TOKENS)
    assert stream(graph) == []
    (reason,) = {r.reason for r in graph.refused if (r.path, r.axis) == (("embed",), 1)}
    assert reason.startswith(words)


def test_hidden_units_of_layers_with_sinusoids_are_cut_layer_by_layer():
    def fn(params, x):
        def step(x, p):
            angles = jnp.arange(x.shape[1])[:, None] * jnp.arange(1.0 * WIDTH)
            hidden = x @ p["up"] + jnp.sin(angles)
            return x + LAYER_NORM({"scale": p["scale"], "bias": 0.0}, hidden) @ p["down"], None

        return lax.scan(step, x, params)[0]

    shapes = {"up": (2, 4, WIDTH), "scale": (2, WIDTH), "down": (2, WIDTH, 4)}
    with jax.enable_x64(True):
        params = {name: jnp.asarray(draw(i, *x)) for i, (name, x) in enumerate(shapes.items())}
        x, mask = jnp.asarray(draw(9, 1, 3, 4)), np.ones((2, WIDTH))
        mask[[0, 0, 1, 1], [1, 5, 2, 3]] = 0
        masks = {"up": np.ones((2, 4, 1)) * mask[:, None], "scale": mask}
        masks["down"] = masks["up"].transpose(0, 2, 1)
        small = shrink(trace(fn, params, x), params, masks)
        assert small.params["scale"].shape == (2, WIDTH - 2)
        masked = {name: params[name] * masks[name] for name in params}
        np.testing.assert_allclose(small.apply(small.params, x), fn(masked, x), atol=1e-10)


def test_a_stream_is_cut_under_a_norm_with_a_rule_for_derivatives():
    @jax.custom_jvp
    def norm(x, scale):
        return LAYER_NORM({"scale": scale, "bias": 0.0}, x)

    @norm.defjvp
    def rule(inputs, tangents):
        return jax.jvp(lambda *x: LAYER_NORM({"scale": x[1], "bias": 0.0}, x[0]), inputs, tangents)

    with jax.enable_x64(True):
        fn, params = chain([(lambda p, x: norm(x, p["scale"]), named("scale"))])
        assert len(stream(trace(fn, params, TOKENS))) == 1
        oracles.check(fn, params, (TOKENS,), 1e-10, is_each_alone=False)


# Layers in a scan.


def scanned(norm, params, tokens):
    """Layers in a scan, computed again in the backward pass, with a norm at the end."""

    @jax.checkpoint
    def step(x, p):
        return block(norm, x, p), None

    x, _ = lax.scan(step, params["embed"][tokens], params["layers"])
    return norm(params["last"], x) @ params["head"]


def draw_scanned():
    layers = [layer(named("scale", "bias"), 3 * i) for i in range(LAYERS)]
    params = {
        "embed": draw(9, WORDS, WIDTH), "head": draw(8, WIDTH, 3), "last": layers[0]["norm"],
        "layers": jax.tree.map(lambda *x: jnp.stack(x), *layers),
    }  # fmt: skip
    return jax.tree.map(jnp.asarray, params)


def layer_norm_scanned(params, tokens):
    return scanned(LAYER_NORM, params, tokens)


@pytest.mark.slow
def test_a_scanned_stream_is_cut_along_a_ramp_within_a_budget():
    with jax.enable_x64(True):
        params = draw_scanned()
        graph = trace(layer_norm_scanned, params, TOKENS)
        oracles.check(layer_norm_scanned, params, (TOKENS,), 1e-10, is_each_alone=False)
        pruner = sparsity.MagnitudePruning(
            scope=sparsity.Coupled(graph),
            sparsity_distribution_fn=sparsity.budget(graph, macs=0.3),
            scheduler=sparsity.PolynomialSchedule(1, 0, 2),
        )
        tx = pruner.wrap_optax(optax.sgd(0.0))
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(params, state, params)
            params = optax.apply_updates(params, updates)
        masks = sparsity.get_sparse_state(state).masks
        small = shrink(graph, params, masks, state)
        assert 3 < small.params["embed"].shape[1] < WIDTH
        rows = small.apply(small.params, TOKENS)
        np.testing.assert_allclose(rows, layer_norm_scanned(params, TOKENS), atol=1e-10)
        # The ramp ends in the smaller model as in the larger one.
        tx = small.updater(pruner).wrap_optax(optax.sgd(0.0))
        _, state = tx.update(small.params, small.opt_state, small.params)
        ended = shrink(small.graph, small.params, sparsity.get_sparse_state(state).masks)
        assert ended.params["embed"].shape[1] < small.params["embed"].shape[1]
        macs = ended.macs()
        assert (
            macs == ended.graph.macs() == small.graph.macs(sparsity.get_sparse_state(state).masks)
        )
        assert macs <= 0.3 * graph.macs()


def normalize_rows(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def normalize_image(x):
    """As in GroupNorm of one group: over positions and channels, joined in one axis."""
    return normalize_rows(x.reshape(x.shape[0], -1)).reshape(x.shape)


def merge_patches(x):
    """As in Swin: over the channels of two neighbours, one after the other."""
    return normalize_rows(jnp.concatenate([x[:, ::2], x[:, 1::2]], axis=-1))


@pytest.mark.parametrize("norm", [normalize_image, merge_patches])
def test_channels_go_that_a_norm_joins_with_positions_or_with_each_other(norm):
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (2, 4, 5))
    params = {"stem": jax.random.normal(keys[1], (5, 8)), "up": jax.random.normal(keys[2], (8, 8))}
    width = norm(jnp.ones((2, 4, 8))).shape[-1]
    for name, key in zip(("scale", "shift"), keys[3:], strict=True):
        params[name] = jax.random.normal(key, (width,))
    params["head"] = jax.random.normal(keys[4], (width, 3))

    def model(params, x):
        y = x @ params["stem"]
        y = y + jnp.tanh(y) @ params["up"]
        return (norm(y) * params["scale"] + params["shift"]) @ params["head"]

    graph = sparsity.trace(model, params, x)
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph), sparsity_distribution_fn=sparsity.Uniform(0.5)
    )
    pruned, masks = pruner.instant_sparsify(params)
    small = sparsity.shrink(graph, pruned, masks)
    assert small.params["stem"].shape == (5, 4)
    for rows in (x, x[:1]):
        np.testing.assert_allclose(
            small.apply(small.params, rows), model(pruned, rows), rtol=1e-5, atol=1e-5
        )
    grads = jax.grad(lambda p: jnp.sum(small.apply(p, x) ** 2))(small.params)
    expected = jax.grad(lambda p: jnp.sum(model(p, x) ** 2))(pruned)
    kept = np.flatnonzero(np.asarray(masks["stem"])[0])
    np.testing.assert_allclose(grads["stem"], expected["stem"][:, kept], rtol=1e-4, atol=1e-4)
