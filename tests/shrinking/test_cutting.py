"""What is left of optimizers' states, and whether they go on as on the masked model."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import Coupled, Uniform, shrink, trace

KEPT = {
    "adam": optax.adam(1e-3),
    "norm of gradients": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "norms by layer": optax.lars(1e-3),
    "sign": optax.lion(1e-3),
    "extra arguments": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
}
CHANGED = {
    "mean": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "mean, every eighth step": optax.MultiSteps(optax.centralize(), 8),
    "noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "factor of the shape": optax.contrib.muon(1e-3),
}
CHANGED_BY = {
    "mean": "clip_by_block_rms",
    "mean, every eighth step": "centralize",
    "noise": "add_noise",
    "factor of the shape": "scale_by_shape",  # a part of muon
}


def mlp(params, x):
    hidden = jnp.tanh(x @ params["first"] + params["bias"])
    return jnp.tanh(hidden @ params["second"]) @ params["last"]


@functools.partial(jax.jit, static_argnums=(0, 2))
def train_step(tx, x, apply, params, state):
    """One step with a model of the inputs, which learns to return ones."""
    grads = jax.grad(lambda p: jnp.mean((apply(p, x) - 1) ** 2))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.fixture
def model():
    """(params, inputs, graph), in float64."""
    draw = np.random.default_rng(0).standard_normal
    with jax.enable_x64(True):
        params = {
            "first": jnp.asarray(draw((5, 20))),
            "bias": jnp.asarray(draw(20)),
            "second": jnp.asarray(draw((20, 12)) / 4),
            "last": jnp.asarray(draw((12, 3)) / 3),
        }
        x = jnp.asarray(draw((16, 5)))
        yield params, x, trace(mlp, params, x)


@pytest.fixture
def pruned(model):
    """(params, graph, masks) of half the channels."""
    params, _, graph = model
    pruner = sparsity.MagnitudePruning(scope=Coupled(graph), sparsity_distribution_fn=Uniform(0.5))
    return params, graph, pruner.instant_sparsify(params)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KEPT, *CHANGED])
def test_a_program_proves_that_an_optimizer_goes_on_as_on_the_masked_model(pruned, name):
    params, graph, masks = pruned
    tx = (KEPT | CHANGED)[name]
    state = tx.init(params)
    assert "not checked" in shrink(graph, params, masks, state).report()
    if name in CHANGED:
        with pytest.raises(ValueError, match=rf"^Leave out tx.*: .* in {CHANGED_BY[name]} "):
            shrink(graph, params, masks, state, tx)
        return
    small = shrink(graph, params, masks, state, tx)
    assert "continues as on the masked model" in small.report()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("sparsity", {}),
        ("MACs", {"normalize": True}),
        ("sparsity", {"across": True}),
        ("MACs", {"across": True}),
        ("MACs", {"round_to": 4}),
    ],
    ids=str,
)
def test_a_ramp_goes_on_in_the_smaller_model_as_it_would_have(model, options, part):
    params, x, graph = model
    half = Uniform(0.5, filter_fn=graph.is_weight)
    pruner = sparsity.MagnitudePruning(
        scope=Coupled(graph, **options),
        sparsity_distribution_fn=half if part == "sparsity" else sparsity.budget(graph, macs=0.5),
        scheduler=sparsity.PolynomialSchedule(2, 0, 10),
    )
    tx = pruner.wrap_optax(optax.adam(1e-2))
    step = functools.partial(train_step, tx, x)
    state = tx.init(params)
    for _ in range(3):
        params, state = step(mlp, params, state)
    small = shrink(graph, params, state.masks, state, tx)
    small_params, small_state, apply = small.params, small.opt_state, small.apply
    for _ in range(8):
        params, state = step(mlp, params, state)
        small_params, small_state = step(apply, small_params, small_state)
    masked = shrink(graph, params, small.plan, state)
    assert sum(map(jnp.sum, jax.tree.leaves(state.masks))) < sum(
        leaf.size for leaf in jax.tree.leaves(small_params)
    )
    jax.tree.map(np.testing.assert_array_equal, small_state.masks, masked.opt_state.masks)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-10), small_params, masked.params
    )


@pytest.mark.slow
def test_a_ramp_goes_on_however_often_channels_are_cut(model):
    params, x, graph = model
    pruner = sparsity.MagnitudePruning(
        scope=Coupled(graph),
        sparsity_distribution_fn=Uniform(0.75, filter_fn=graph.is_weight),
        scheduler=sparsity.PolynomialSchedule(2, 0, 12),
    )
    tx = pruner.wrap_optax(optax.adam(1e-2))
    state = small_state = tx.init(params)
    small_params, apply, widths = params, mlp, []
    for number in range(16):
        params, state = train_step(tx, x, mlp, params, state)
        small_params, small_state = train_step(tx, x, apply, small_params, small_state)
        if number % 4 == 3:
            small = shrink(graph, small_params, small_state.masks, small_state)
            small_params, small_state, apply, graph = (
                small.params,
                small.opt_state,
                small.apply,
                small.graph,
            )
            widths.append(small_params["bias"].size)
    assert widths == [14, 7, 5, 5]
    np.testing.assert_allclose(apply(small_params, x), mlp(params, x), atol=1e-10)


def test_what_is_no_state_of_these_params_is_refused(pruned):
    params, graph, masks = pruned
    tx = optax.adam(1e-3)
    refused = functools.partial(pytest.raises, ValueError)
    with refused(match="give opt_state, too"):
        shrink(graph, params, masks, tx=tx)
    with refused(match="opt_state is an optimizer"):
        shrink(graph, params, masks, tx)
    with refused(match="masks is None"):
        shrink(graph, params, None)
    with refused(match=r"array of shape \(3,\).*state of other params"):
        shrink(graph, params, masks, tx.init({"other": jnp.ones(3)}))
    with refused(match=r"tx must be an optax.GradientTransformation"):
        shrink(graph, params, masks, tx.init(params), optax.adam)
    with refused(match=r"sparsity.unpack_masks\(masks, params\)"):
        shrink(graph, params, sparsity.masks.pack_masks(masks, params))


def attention(params, x):
    queries = jnp.einsum("te,ehd->thd", x, params["q"])
    keys = jnp.einsum("te,ehd->thd", x, params["k"])
    weights = jax.nn.softmax(jnp.einsum("thd,shd->hts", queries, keys))
    values = jnp.einsum("te,ehd->thd", x, params["v"])
    return jnp.einsum("hts,shd,hde->te", weights, values, params["out"])


@pytest.mark.slow
def test_factored_moments_are_cut_along_the_axes_over_which_they_do_not_average():
    draw = np.random.default_rng(0).standard_normal
    with jax.enable_x64(True):
        params = {name: jnp.asarray(draw((16, 4, 8)) / 4) for name in "qkv"}
        params["out"] = jnp.asarray(draw((4, 8, 16)) / 4)
        x = jnp.asarray(draw((6, 16)))
        graph = trace(attention, params, x)
        # Of two heads all is removed; sizes of heads and the width of the model stay.
        stays = jnp.asarray([1, 0, 1, 0], jnp.uint8)[:, None]
        masks = {name: jnp.ones((16, 4, 8), jnp.uint8) * stays for name in "qkv"}
        masks["out"] = jnp.ones((4, 8, 16), jnp.uint8) * stays[..., None]
        tx = sparsity.StaticRandomSparse().wrap_optax(
            optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=2), optax.scale(-1e-2)),
            masks=masks,
        )
        state = tx.init(params)
        step = functools.partial(train_step, tx, x)
        for _ in range(2):
            params, state = step(attention, params, state)
        small = shrink(graph, params, masks, state)
        moments = small.opt_state.inner_state[0]
        assert (moments.v_row["q"].shape, moments.v_col["q"].shape) == ((2, 8), (16, 2))
        small_params, small_state = small.params, small.opt_state
        for _ in range(3):
            params, state = step(attention, params, state)
            small_params, small_state = step(small.apply, small_params, small_state)
        masked = shrink(graph, params, small.plan)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-10), small_params, masked.params
        )
        # The proof does not follow means along axes that stay.
        with pytest.raises(ValueError, match="the state of 'k' has no number for each entry"):
            shrink(graph, params, masks, state, tx)


def test_factored_moments_that_average_over_what_is_removed_are_refused():
    params = {"q": (16, 4, 8), "k": (16, 4, 8), "v": (16, 4, 8), "out": (4, 8, 16)}
    params = {name: jnp.ones(shape) for name, shape in params.items()}
    graph = trace(attention, params, jnp.ones((6, 16)))
    stays = jnp.asarray([1, 1, 1, 0, 1, 0, 1, 0], jnp.uint8)  # of the sizes of values
    masks = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.uint8), params)
    masks |= {"v": masks["v"] * stays, "out": masks["out"] * stays[:, None]}
    state = optax.scale_by_factored_rms(min_dim_size_to_factor=2).init(params)
    with pytest.raises(ValueError, match="factored moments"):
        shrink(graph, params, masks, state)


def test_factored_moments_that_average_over_layers_with_channels_of_their_own_are_refused():
    def scanned(params, x):
        def layer(x, p):
            return x + jnp.tanh(x @ p["up"]) @ p["down"], None

        return jax.lax.scan(layer, x, params)[0]

    # The two longest axes are averaged over, the layers and the width, and not the four channels.
    params = {"up": jnp.ones((9, 8, 4)), "down": jnp.ones((9, 4, 8))}
    graph = trace(scanned, params, jnp.ones((5, 8)))
    stays = jnp.asarray([[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 0, 0]] * 3, jnp.uint8)
    masks = {
        "up": jnp.ones((9, 8, 4), jnp.uint8) * stays[:, None],
        "down": jnp.ones((9, 4, 8), jnp.uint8) * stays[:, :, None],
    }
    state = optax.scale_by_factored_rms(min_dim_size_to_factor=2).init(params)
    assert {*map(jnp.shape, (state.v_row["up"], state.v_col["up"]))} == {(8, 4), (9, 4)}
    with pytest.raises(ValueError, match="factored moments"):
        shrink(graph, params, masks, state)


def test_a_state_of_several_arrays_for_a_parameter_is_refused():
    params = {name: jnp.ones((16, 4, 8)) for name in "qkv"} | {"out": jnp.ones((4, 8, 16))}
    graph = trace(attention, params, jnp.ones((6, 16)))
    pruner = sparsity.MagnitudePruning(scope=Coupled(graph), sparsity_distribution_fn=Uniform(0.5))
    params, masks = pruner.instant_sparsify(params)
    with pytest.raises(ValueError, match=r"array '0/mu/k/0' of shape \(16,\).* for 'k'"):
        shrink(graph, params, masks, optax.sm3(1e-2).init(params))


@pytest.mark.slow
@pytest.mark.parametrize("is_masked", [False, True])
def test_norms_of_moments_go_on_only_where_gradients_are_masked(model, is_masked):
    params, x, graph = model
    pruner = sparsity.MagnitudePruning(
        scope=Coupled(graph),
        sparsity_distribution_fn=Uniform(0.5),
        scheduler=sparsity.OneShotSchedule(0),
        is_sparse_gradients=is_masked,
    )
    tx = pruner.wrap_optax(optax.lamb(1e-3))
    state = tx.init(params)
    for _ in range(2):
        params, state = train_step(tx, x, mlp, params, state)
    if is_masked:
        assert shrink(graph, params, state.masks, state, tx).opt_state is not None
        return
    with pytest.raises(ValueError, match=r"of '.*' in scale_by_trust_ratio returns another number"):
        shrink(graph, params, state.masks, state, tx)


def test_a_leaf_without_an_owner_may_be_the_array_of_a_moment(pruned):
    params, graph, masks = pruned
    entry = jnp.zeros(1)
    state = (optax.TraceState(dict.fromkeys(params, entry)), {"unused": entry})
    chex.assert_trees_all_equal(shrink(graph, params, masks, state).opt_state, state)


@pytest.mark.slow
def test_packed_and_unpacked_masks_of_several_states_are_cut(pruned):
    params, graph, masks = pruned

    def chained(masks):
        packed, unpacked = (
            functools.partial(
                sparsity.StaticRandomSparse(use_packed_masks=pack).wrap_optax, masks=masks
            )
            for pack in (True, False)
        )
        adam, sgd = optax.adam(1e-3), optax.sgd(1.0)
        return optax.chain(packed(adam), unpacked(sgd), packed(sgd))

    small = shrink(graph, params, masks, chained(masks).init(params))
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, jnp.uint8), small.params)
    chex.assert_trees_all_equal_shapes(small.opt_state, chained(ones).init(small.params))
