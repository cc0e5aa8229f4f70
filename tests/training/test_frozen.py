"""Parameters that the optimizer never moves stay dense, with a warning."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.graph import Coupled, trace
from tests import helpers

SHAPES = {"base": (6, 12), "bias": (12,), "head": (12, 4)}
_RNG = np.random.default_rng(0)
PARAMS = {name: jnp.asarray(_RNG.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}
GRADS = jax.tree.map(jnp.cos, PARAMS)
IS_FROZEN = {"base": True, "bias": False, "head": False}
ADAM = optax.adam(0.1)


def partition(is_frozen):
    labels = {name: "frozen" if x else "trained" for name, x in is_frozen.items()}
    return optax.partition({"frozen": optax.set_to_zero(), "trained": ADAM}, labels)


FREEZING = {
    "freeze": optax.chain(ADAM, optax.freeze(IS_FROZEN)),
    "freeze first": optax.chain(optax.freeze(IS_FROZEN), ADAM),
    "partition": partition(IS_FROZEN),
    "masked": optax.chain(ADAM, optax.masked(optax.set_to_zero(), IS_FROZEN)),
    "steps": optax.MultiSteps(partition(IS_FROZEN), 2).gradient_transformation(),
    "finite": optax.apply_if_finite(partition(IS_FROZEN), 3),
}
MOVING = {
    "warm-up": optax.adam(optax.linear_schedule(0.0, 0.1, 5)),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.0),
    "late": optax.conditionally_transform(optax.sgd(0.1), lambda step: step > 3),
    "by labels": optax.partition({"a": ADAM, "b": optax.sgd(0.1)}, dict.fromkeys(SHAPES, "a")),
}


def train(updater, inner, steps=3):
    tx = updater.wrap_optax(inner)
    params, state = updater.init(tx, PARAMS)
    for _ in range(steps):
        updates, state = jax.jit(tx.update)(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params, sparsity.get_sparse_state(state)


@pytest.mark.parametrize("algorithm", ["magnitude", "rigl"])
@pytest.mark.parametrize("name", FREEZING)
def test_what_is_frozen_stays_dense_with_a_warning_that_names_it(name, algorithm):
    updater = helpers.make_updater(algorithm, sparsity=0.5, update_start_step=0)
    with pytest.warns(UserWarning, match="Prune 'base' outside of training") as caught:
        params, state = train(updater, FREEZING[name])
    assert len(caught) == 1
    assert state.masks["base"] is None
    np.testing.assert_array_equal(params["base"], PARAMS["base"])
    assert 0 < jnp.count_nonzero(params["head"]) < 48


@pytest.mark.parametrize("name", MOVING)
def test_what_may_move_is_pruned_without_a_warning(name):
    updater = helpers.make_updater("static_sparse", sparsity=0.5)
    _, state = train(updater, MOVING[name], steps=1)
    assert {key: mask is None for key, mask in state.masks.items()} == {
        "base": False,
        "bias": True,
        "head": False,
    }


def test_init_does_not_warn_of_a_parameter_that_the_distribution_leaves_out():
    uniform = sparsity.Uniform(0.5, custom_sparsity_map={"base": None})
    _, state = train(
        sparsity.StaticRandomSparse(sparsity_distribution_fn=uniform), partition(IS_FROZEN)
    )
    assert state.masks["base"] is None
    assert int(state.masks["head"].sum()) == 24


@pytest.mark.parametrize("scope", [sparsity.Layerwise(), sparsity.Global()], ids=repr)
def test_a_model_whose_matrices_all_are_frozen_trains_its_biases(scope):
    inner = partition({"base": True, "bias": False, "head": True})
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.OneShotSchedule(0),
        scope=scope,
    )
    with pytest.warns(UserWarning, match="'base', 'head' outside of training") as caught:
        params, state = train(updater, inner)
    assert len(caught) == 1
    assert jax.tree.leaves(state.masks) == []
    jax.tree.map(np.testing.assert_array_equal, params, PARAMS | {"bias": params["bias"]})
    assert np.all(params["bias"] != PARAMS["bias"])


@pytest.mark.parametrize("frozen", ["base", "bias", "head"])
def test_channels_of_a_frozen_parameter_stay(frozen):
    def model(params, x):
        return jax.nn.relu(x @ params["base"] + params["bias"]) @ params["head"]

    graph = trace(model, PARAMS, jnp.ones((2, 6)))
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5),
        scheduler=sparsity.OneShotSchedule(0),
        scope=Coupled(graph),
    )
    with pytest.warns(UserWarning, match=f"'{frozen}'") as caught:
        params, state = train(updater, partition({name: name == frozen for name in SHAPES}))
    assert len(caught) == 1
    assert jax.tree.leaves(state.masks) == []
    assert all(np.all(leaf != 0) for leaf in jax.tree.leaves(params))


def test_masks_of_a_frozen_parameter_may_not_move():
    masks = jax.tree.map(lambda x: (x > 0).astype(jnp.uint8), PARAMS)
    rigl = sparsity.RigL(scheduler=sparsity.PeriodicSchedule(2))
    with pytest.raises(ValueError, match=r"^Give None in the masks of wrap_optax for 'base'"):
        rigl.wrap_optax(partition(IS_FROZEN), masks=masks).init(PARAMS)
    fixed = sparsity.StaticRandomSparse().wrap_optax(partition(IS_FROZEN), masks=masks)
    assert fixed.init(PARAMS).masks["base"] is not None
