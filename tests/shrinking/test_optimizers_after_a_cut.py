"""`small.tx`: the optimizer with which training continues after a cut, wrapped or not."""

import copy
import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sparsity
from sparsity import Coupled, MagnitudePruning, PolynomialSchedule, Uniform, shrink, trace
from sparsity.base_updater import WrappedOptimizer
from tests.helpers import slow_but

WIDTH, HEADS, CHANNELS = 6, 4, 8
X = np.random.default_rng(0).normal(size=(5, WIDTH)).astype(np.float32)


def draw(**shapes):
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32) for name, shape in shapes.items()
    }


def joined(params, x):
    """Heads and their channels lie on one axis, so that shapes do not tell a cut."""
    q, k, v = ((x @ params[name]).reshape(len(x), HEADS, -1) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    return jnp.einsum("hqk,khd->qhd", scores, v).reshape(len(x), -1) @ params["o"]


def separate(params, x):
    """Heads have an axis of their own."""
    q, k, v = (jnp.einsum("nd,dhk->nhk", x, params[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
    return jnp.einsum("hqk,khd,hdo->qo", scores, v, params["o"])


ATTENTION = nn.MultiHeadDotProductAttention(num_heads=HEADS, qkv_features=HEADS * CHANNELS)


def make_flax():
    params = ATTENTION.init(jax.random.key(0), X)["params"]
    return lambda params, x: ATTENTION.apply({"params": params}, x), params


def make_equinox():
    made = eqx.nn.MultiheadAttention(
        HEADS, WIDTH, qk_size=CHANNELS, vo_size=CHANNELS, use_query_bias=True, key=jax.random.key(0)
    )
    params, static = eqx.partition(made, eqx.is_array)

    def fn(params, x):
        return eqx.combine(params, static)(x, x, x)

    return fn, params


INNER = HEADS * CHANNELS
MODELS = {
    "joined": lambda: (
        joined,
        draw(q=(WIDTH, INNER), k=(WIDTH, INNER), v=(WIDTH, INNER), o=(INNER, WIDTH)),
    ),
    "separate": lambda: (
        separate,
        draw(
            q=(WIDTH, HEADS, CHANNELS),
            k=(WIDTH, HEADS, CHANNELS),
            v=(WIDTH, HEADS, CHANNELS),
            o=(HEADS, CHANNELS, WIDTH),
        ),
    ),
    "flax": make_flax,
    "equinox": make_equinox,
}


@functools.partial(jax.jit, static_argnums=(0, 1))
def train_step(apply, tx, params, opt_state):
    grads = jax.grad(lambda params: jnp.mean((apply(params, X) - X) ** 2))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def train(apply, tx, params, opt_state, steps):
    for _ in range(steps):
        params, opt_state = train_step(apply, tx, params, opt_state)
    return params, opt_state


def make_pruner(graph, end=3, **options):
    return MagnitudePruning(
        scope=Coupled(graph),
        sparsity_distribution_fn=Uniform(0.6),
        scheduler=PolynomialSchedule(1, 0, end),
        **options,
    )


@pytest.mark.parametrize(
    "case", slow_but(["joined 8", "equinox 3"], [f"{x} {end}" for x in MODELS for end in (3, 8)])
)
def test_the_wrapped_optimizer_trains_on_as_on_the_masked_model(case):
    """Cut when the ramp is over, which ends at step 3, or within the ramp."""
    name, end = case.split()
    fn, params = MODELS[name]()
    graph = trace(fn, params, X)
    tx = make_pruner(graph, int(end)).wrap_optax(optax.adam(1e-2))
    params, state = train(fn, tx, params, tx.init(params), 5)
    small = shrink(graph, params, state.masks, state, tx)
    assert small.macs() < graph.macs()
    assert small.tx.inner is tx.inner
    small_params, small_state = train(small.apply, small.tx, small.params, small.opt_state, 5)
    params, state = train(fn, tx, params, state, 5)
    np.testing.assert_allclose(small.apply(small_params, X), fn(params, X), atol=1e-5)
    counts = [jax.tree.map(jnp.sum, x.masks) for x in (state, small_state)]
    jax.tree.map(np.testing.assert_array_equal, *counts)
    assert jax.tree.structure(small.tx.init(small.params)) == jax.tree.structure(small_state)


@pytest.mark.slow
def test_cuts_follow_one_another_with_the_optimizer_of_the_last():
    fn, params = MODELS["joined"]()
    graph = trace(fn, params, X)
    tx = make_pruner(graph, 8).wrap_optax(optax.adam(1e-2))
    params, state = train(fn, tx, params, tx.init(params), 4)
    small = shrink(graph, params, state.masks, state, tx)
    apply, small_params, small_state = small.apply, small.params, small.opt_state
    sizes = [small.params["q"].shape[1]]
    for _ in range(2):
        small_params, small_state = train(apply, small.tx, small_params, small_state, 3)
        small = shrink(small.graph, small_params, small_state.masks, small_state, small.tx)
        apply, small_params, small_state = small.apply, small.params, small.opt_state
        sizes.append(small_params["q"].shape[1])
    assert sizes[0] > sizes[-1] == 12  # 3 heads of 4 channels: 13 of 32
    params, state = train(fn, tx, params, state, 6)
    np.testing.assert_allclose(apply(small_params, X), fn(params, X), atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_the_user_go_on_too(packed):
    fn, params = MODELS["joined"]()
    graph = trace(fn, params, X)
    pruned, masks = make_pruner(graph).instant_sparsify(params)
    entries = np.ones(masks["o"].shape, np.uint8)
    entries[np.flatnonzero(np.asarray(masks["o"])[:, 0])[0], 0] = 0  # in a channel that stays
    masks = masks | {"o": masks["o"] * entries}
    static = sparsity.StaticRandomSparse(use_packed_masks=packed)
    tx = static.wrap_optax(optax.adam(1e-2), masks=masks)
    small = shrink(graph, pruned, masks, tx.init(pruned), tx)
    again = small.tx.init(small.params)
    jax.tree.map(np.testing.assert_array_equal, again.masks, small.opt_state.masks)
    trained, _ = train(small.apply, small.tx, small.params, again, 2)
    assert small.masks["o"] is not None
    jax.tree.map(
        lambda x, mask: mask is None or np.testing.assert_array_equal(x[mask == 0], 0),
        trained, small.masks,
    )  # fmt: skip


def test_an_inner_optimizer_stays_as_it_is():
    fn, params = MODELS["joined"]()
    graph, inner = trace(fn, params, X), optax.adam(1e-2)
    pruner = make_pruner(graph)
    pruned, masks = pruner.instant_sparsify(params)
    small = shrink(graph, pruned, masks, inner.init(pruned), inner)
    assert small.tx is inner
    train(small.apply, small.tx, small.params, small.opt_state, 1)
    wrapped = pruner.wrap_optax(inner).init(pruned)
    small = shrink(graph, pruned, masks, wrapped, inner)
    assert small.tx is inner
    train(small.apply, small.tx, small.params, small.opt_state.inner_state, 1)
    assert shrink(graph, pruned, masks, wrapped).tx is None


@pytest.mark.parametrize("name", ["joined", "separate"])
def test_a_wrapper_whose_masks_move_within_a_chain_is_refused(name):
    fn, params = MODELS[name]()
    graph = trace(fn, params, X)
    chain = optax.chain(make_pruner(graph).wrap_optax(optax.adam(1e-2)), optax.identity())
    params, state = train(fn, chain, params, chain.init(params), 5)
    masks = sparsity.get_sparse_state(state).masks
    with pytest.raises(ValueError, match=r"^Wrap last, as in .*"):
        shrink(graph, params, masks, state, chain)
    small = shrink(graph, params, masks, state)  # without `tx` the user vouches
    if name == "separate":  # shapes tell the cut
        small_params, _ = train(small.apply, chain, small.params, small.opt_state, 2)
        params, _ = train(fn, chain, params, state, 2)
        np.testing.assert_allclose(small.apply(small_params, X), fn(params, X), atol=1e-5)


@pytest.mark.parametrize("name", ["magnitude", "top_kast", "no_prune", "magnitude_ste"])
def test_a_wrapped_optimizer_shows_its_parts(name):
    inner = optax.adam(1e-2)
    updater = sparsity.create_updater_from_config({"algorithm": name, "sparsity": 0.5})
    tx = updater.wrap_optax(inner)
    init, update = tx
    assert (init, update) == (tx.init, tx.update)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert isinstance(tx, WrappedOptimizer)
    assert (tx.updater, tx.inner, tx.masks) == (updater, inner, None)
    assert optax.with_extra_args_support(tx) is tx
    for copied in (copy.copy(tx), copy.deepcopy(tx)):
        assert copied.updater == updater
    assert tx._replace(update=update).updater is None  # another update may do anything


def test_compact_takes_the_inner_of_a_wrapped_optimizer():
    fn, params = MODELS["joined"]()
    graph, inner = trace(fn, params, X), optax.adam(1e-2)
    pruner = MagnitudePruning(sparsity_distribution_fn=Uniform(0.6))
    pruned, masks = pruner.instant_sparsify(params)
    tx = sparsity.StaticRandomSparse().wrap_optax(inner, masks=masks)
    params, state = train(fn, tx, pruned, tx.init(pruned), 2)
    model = sparsity.compact(graph, params, masks, state, tx)
    assert model.tx is inner
    values, _ = train(model.apply, model.tx, model.params, model.opt_state, 2)
    params, _ = train(fn, tx, params, state, 2)
    np.testing.assert_allclose(model.apply(values, X), fn(params, X), atol=1e-5)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 16, rngs=rngs)
        self.down = nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


@nnx.jit
def step_nnx(model, optimizer):
    grads = nnx.grad(lambda model: jnp.mean((model(X) - X) ** 2))(model)
    optimizer.update(model, grads)


def train_nnx(model, optimizer, steps):
    for _ in range(steps):
        step_nnx(model, optimizer)


def start_nnx(tx):
    """(definition, model, optimizer, graph) of a network of nnx after two steps."""
    definition, params = nnx.split(Network(nnx.Rngs(0)), nnx.Param)
    graph = trace(lambda params, x: nnx.merge(definition, params)(x), params, X)
    model = nnx.merge(definition, params)
    tx = tx if tx is not None else make_pruner(graph, 2).wrap_optax(optax.adam(1e-2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    train_nnx(model, optimizer, 3)
    return definition, model, optimizer, graph


@pytest.mark.parametrize("is_wrapped", [True, False])
def test_the_state_of_an_nnx_optimizer_goes_on(is_wrapped):
    definition, model, optimizer, graph = start_nnx(None if is_wrapped else optax.adam(1e-2))
    masks = make_pruner(graph).instant_sparsify(nnx.state(model, nnx.Param))[1]
    if is_wrapped:
        masks = sparsity.get_sparse_state(optimizer.opt_state).masks
    params = nnx.state(model, nnx.Param)
    small = shrink(graph, params, masks, optimizer.opt_state, optimizer.tx)
    smaller = nnx.merge(definition, small.params)
    assert smaller.up.kernel.shape == (WIDTH, 6)  # 0.4 of 16
    small_optimizer = nnx.Optimizer(smaller, small.tx, wrt=nnx.Param)
    small_optimizer.opt_state = small.opt_state
    train_nnx(smaller, small_optimizer, 2)
    if is_wrapped:
        train_nnx(model, optimizer, 2)
        np.testing.assert_allclose(smaller(X), model(X), atol=1e-5)


def test_compact_takes_the_state_of_an_nnx_optimizer():
    _, model, optimizer, graph = start_nnx(None)
    params, masks = nnx.state(model, nnx.Param), optimizer.opt_state.masks
    compact = sparsity.compact(graph, params, masks, optimizer.opt_state, optimizer.tx)
    values, state = map(nnx.as_pure, (compact.params, compact.opt_state))
    values, _ = train(compact.apply, compact.tx, values, state, 2)
    train_nnx(model, optimizer, 2)
    np.testing.assert_allclose(compact.apply(values, X), model(X), atol=1e-5)


@pytest.mark.parametrize("cut", [shrink, sparsity.compact])
@pytest.mark.parametrize("around", [nnx.state, lambda optimizer: {"all": nnx.state(optimizer)}])
def test_a_state_around_that_of_optax_is_refused_where_it_could_not_train(cut, around):
    _, model, optimizer, graph = start_nnx(None)
    params, masks = nnx.state(model, nnx.Param), optimizer.opt_state.masks
    match = r"at '(all/)?opt_state'. Give that: optimizer.opt_state of nnx.Optimizer"
    with pytest.raises(ValueError, match=match):
        cut(graph, params, masks, around(optimizer), optimizer.tx)


def test_nnx_state_of_a_model_and_its_optimizer_is_cut_as_a_whole():
    _, model, optimizer, graph = start_nnx(None)
    params, masks = nnx.state(model, nnx.Param), optimizer.opt_state.masks
    small = shrink(graph, params, masks, nnx.state((model, optimizer)))
    assert small.opt_state[0]["up"]["kernel"].get_value().shape == (WIDTH, 6)
    inner_state = small.opt_state[1]["opt_state"]["inner_state"]
    assert inner_state[0]["mu"]["up"]["kernel"].get_value().shape == (WIDTH, 6)
    with pytest.raises(ValueError, match=r"optimizer.opt_state of nnx.Optimizer"):
        sparsity.compact(graph, params, masks, nnx.state((model, optimizer)))
