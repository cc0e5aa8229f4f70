"""Parameters in any containers: trained, frozen, pruned at once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers
from tests.selection_oracle import drop_and_grow

# Parameters of every kind.


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        lambda k, b: [k, b],
        lambda k, b: (k, (b, k)),
        lambda k, b: helpers.Pair(k, b),
        lambda k, b: helpers.Layer(k, b),
        lambda k, b: {"deep": [helpers.Pair(k, b), None, {"x": k}]},
        lambda k, b: {1: k, 2: b},
        lambda k, b: k,
    ],
    ids=["list", "tuple", "NamedTuple", "dataclass", "nested", "integer keys", "bare array"],
)
@pytest.mark.parametrize("name", ["magnitude", "rigl"])
def test_parameters_may_be_any_pytree(name, build):
    base = helpers.params()
    params = build(base["kernel"], base["bias"])
    updater = sparsity.ALGORITHM_REGISTRY[name](
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.OneShotSchedule(1)
    )
    grads = build(helpers.grads(0)["kernel"], helpers.grads(0)["bias"])
    params, state = helpers.train(updater, params, 2, grads=lambda _: grads, jit=False)
    matrices = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    assert [int(mask.sum()) for mask in jax.tree.leaves(state.masks)] == [30] * len(matrices)
    for leaf, mask in zip(matrices, jax.tree.leaves(state.masks), strict=True):
        assert np.all(helpers.is_positive_zero(leaf)[np.asarray(mask) == 0])


@pytest.mark.slow
def test_flax_and_equinox_models_keep_their_containers():
    nnx = pytest.importorskip("flax.nnx")
    eqx = pytest.importorskip("equinox")
    frozen = pytest.importorskip("flax.core").freeze({"d": helpers.params()})
    linear = nnx.state(nnx.Linear(6, 10, rngs=nnx.Rngs(0)), nnx.Param)
    module = eqx.filter(eqx.nn.Linear(6, 10, key=jax.random.key(0)), eqx.is_array)
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.OneShotSchedule(1)
    )
    for params in (frozen, linear, module):
        grads = jax.tree.map(jnp.ones_like, params)
        after, state = helpers.train(updater, params, 2, grads=lambda _, g=grads: g, jit=False)
        assert jax.tree.structure(after) == jax.tree.structure(params)
        assert [int(mask.sum()) for mask in jax.tree.leaves(state.masks)] == [30]
        applied = updater.post_gradient_update(after, state)
        assert jax.tree.structure(applied) == jax.tree.structure(params)
        jax.tree.map(np.testing.assert_array_equal, applied, after)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*skips the gradients of steps")
def test_a_frozen_subtree_of_masked_nodes_stays_dense():
    # As optax.masked and optax.multi_transform hand them to the wrapper.
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.PeriodicSchedule(1)
    )
    tx = optax.multi_transform(
        {"sparse": updater.wrap_optax(optax.adam(0.1)), "frozen": optax.set_to_zero()},
        {"a": "sparse", "b": "frozen"},
    )
    params = {"a": helpers.params(), "b": helpers.params()}
    state = tx.init(params)
    before = sparsity.get_sparse_state(state).masks["a"]["kernel"]
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    moved = optax.apply_updates(params, updates)
    after = sparsity.get_sparse_state(state).masks["a"]["kernel"]
    kernel = params["a"]["kernel"]
    drop, grow = np.abs(np.where(before, kernel, 0)), np.ones(helpers.SHAPE)
    np.testing.assert_array_equal(after, drop_and_grow(before, drop, grow, 0.3))
    assert int(after.sum()) == 30
    # The step is skipped: weights that stay keep their values, those that grow start at zero.
    np.testing.assert_array_equal(moved["a"]["kernel"], np.where(before & after, kernel, 0))
    np.testing.assert_array_equal(moved["a"]["bias"], params["a"]["bias"])
    jax.tree.map(np.testing.assert_array_equal, moved["b"], params["b"])
    jax.tree.map(
        np.testing.assert_array_equal, updater.post_gradient_update(moved, state)["b"], moved["b"]
    )


# instant_sparsify.


@pytest.mark.parametrize("name", ["magnitude", "random", "saliency"])
def test_instant_sparsify_prunes_trees_and_bare_arrays_exactly(name):
    updater = sparsity.ALGORITHM_REGISTRY[name](sparsity_distribution_fn=helpers.uniform(0.75))
    params = helpers.params()
    pruned, masks = updater.instant_sparsify(params, grads=helpers.grads(0))
    assert int(masks["kernel"].sum()) == 15
    assert masks["bias"] is None
    np.testing.assert_array_equal(pruned["kernel"], np.where(masks["kernel"], params["kernel"], 0))
    bare, mask = updater.instant_sparsify(params["kernel"], grads=helpers.grads(0)["kernel"])
    assert int(mask.sum()) == 15
    np.testing.assert_array_equal(bare, np.where(mask, params["kernel"], 0))


def test_instant_sparsify_returns_packed_masks_on_demand():
    plain = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.75))
    packed = dataclasses.replace(plain, use_packed_masks=True)
    want, masks = plain.instant_sparsify(helpers.params())
    got, bits = packed.instant_sparsify(helpers.params())
    np.testing.assert_array_equal(got["kernel"], want["kernel"])
    assert bits["kernel"].shape == (6, 2)
    np.testing.assert_array_equal(bits["kernel"], np.packbits(masks["kernel"], axis=-1))


@pytest.mark.slow
def test_no_pruning_returns_everything_as_it_is():
    updater = sparsity.NoPruning()
    params = helpers.params()
    pruned, masks = updater.instant_sparsify(params)
    assert pruned is params
    assert jax.tree.leaves(masks) == []
    with_it, _ = helpers.train(updater, params, 3, optax.adam(0.1))
    tx = optax.adam(0.1)
    state = tx.init(params)
    for step in range(3):
        updates, state = jax.jit(tx.update)(helpers.grads(step), state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(np.testing.assert_array_equal, with_it, params)


@pytest.mark.parametrize("option", ["use_packed_masks", "use_compact_state"])
def test_regrowth_trains_a_complete_equinox_model_as_its_arrays(option):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(6, 3, 12, 1, key=jax.random.key(0))  # holds functions and numbers
    arrays = eqx.filter(model, eqx.is_inexact_array)
    updater = sparsity.RigL(
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.PeriodicSchedule(2),
        **{option: True},
    )
    tx = updater.wrap_optax(optax.adamw(0.01))
    grads = jax.tree.map(jnp.sin, arrays)
    results = []
    for params in (model, arrays):
        state = tx.init(arrays)
        for _ in range(3):
            updates, state = tx.update(grads, state, params)
            params = eqx.apply_updates(params, updates)
        results.append((eqx.filter(params, eqx.is_inexact_array), state))
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    jax.tree.map(np.testing.assert_array_equal, *results)
