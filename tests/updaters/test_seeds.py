"""Seeds of the random algorithms: integers, keys of either style, traced keys."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.algorithms import pruners
from tests import helpers


def _stores_masks(name):
    return not helpers.is_straight_through(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", helpers.list_names(helpers.draws_masks, _stores_masks))
def test_seeds_may_be_integers_and_keys_of_either_style(name):
    cls = sparsity.ALGORITHM_REGISTRY[name]

    def mask(seed):
        updater = cls(
            sparsity_distribution_fn=helpers.uniform(0.5),
            rng_seed=seed,
            scheduler=sparsity.OneShotSchedule(0),
        )
        _, state = helpers.train(updater, helpers.params(), 1, jit=False)
        return np.asarray(state.masks["kernel"])

    new, old = jax.random.key(5), jax.random.PRNGKey(5)
    np.testing.assert_array_equal(mask(new), mask(old))
    different = [mask(8), mask(9), mask(8 + 2**32), mask(-1), mask(new), mask(jax.random.key(6))]
    assert len({m.tobytes() for m in different}) == len(different)
    assert all(m.sum() == 30 for m in different)
    np.testing.assert_array_equal(mask(8), mask(8))


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_an_integer_of_numpy_is_the_same_seed_as_one_of_python(kind):
    want = pruners.generate_random_scores(helpers.params(), 8)
    got = pruners.generate_random_scores(helpers.params(), kind(8))
    np.testing.assert_array_equal(got["kernel"], want["kernel"])


@pytest.mark.slow
@pytest.mark.parametrize("name", helpers.list_names(helpers.draws_masks))
def test_a_traced_key_gives_every_run_of_a_vmap_its_own_masks_and_keeps_the_condition(name):
    cls = sparsity.ALGORITHM_REGISTRY[name]
    ste = helpers.is_straight_through(name)

    def train(key):
        updater = cls(
            sparsity_distribution_fn=helpers.uniform(0.5),
            rng_seed=key,
            scheduler=sparsity.PeriodicSchedule(2),
            **({"store_masks": True} if ste else {}),
        )
        tx = updater.wrap_optax(optax.sgd(0.1))
        params = helpers.params()

        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(helpers.grads, range(4)))
        (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), grads)
        return state.masks["kernel"]

    keys = jax.random.split(jax.random.key(0), 3)
    if name != "static_sparse":
        # A select would compute new masks in every step.
        body = _body_of_scan(jax.make_jaxpr(jax.vmap(train))(keys).jaxpr)
        conditions = [x.params["cond_jaxpr"] for x in body.eqns if x.primitive.name == "while"]
        assert [condition.out_avals[0].shape for condition in conditions] == [()]
    masks = np.asarray(jax.jit(jax.vmap(train))(keys))
    assert len({mask.tobytes() for mask in masks}) == 3
    np.testing.assert_array_equal(masks.sum(axis=(1, 2)), [30, 30, 30])
    np.testing.assert_array_equal(masks[1], train(keys[1]))


def _body_of_scan(jaxpr):
    (body,) = (eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return body
