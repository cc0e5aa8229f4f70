"""The first step, steps whose gradients are skipped, and what is no number."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers
from tests.selection_oracle import drop_and_grow

# Updates in every step show most in a few steps.
pytestmark = pytest.mark.filterwarnings("ignore:.*skips the gradients of steps")

# The first step.


def _dyadic():
    """Weights whose sums and halves are exact in float32."""
    return {"kernel": jnp.asarray(np.arange(1, 17).reshape(2, 8) / 4, jnp.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True], ids=["no skip", "skip"])
@pytest.mark.parametrize("optimizer", ["sgd", "decayed"])
def test_weights_that_grow_in_the_first_step_land_on_their_update_alone(skip, optimizer):
    # The parameters are dense at step 0: a weight that grows had a value, which is no part of it.
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.5),
        scheduler=sparsity.PeriodicSchedule(1),
        skip_gradients=skip,
        drop_fraction_fn=optax.constant_schedule(0.5),
    )
    inner = optax.sgd(0.5)
    if optimizer == "decayed":
        inner = optax.chain(optax.add_decayed_weights(0.5), inner)
    tx = updater.wrap_optax(inner)
    params = _dyadic()
    state = tx.init(params)
    grads = {"kernel": jnp.asarray(np.arange(16, 0, -1).reshape(2, 8) / 2, jnp.float32)}
    updates, after = jax.jit(tx.update)(grads, state, params)
    moved = optax.apply_updates(params, updates)
    old, new = np.asarray(state.masks["kernel"]), np.asarray(after.masks["kernel"])
    weights, slopes = np.asarray(params["kernel"]), np.asarray(grads["kernel"])
    np.testing.assert_array_equal(new, drop_and_grow(old, np.where(old, weights, 0), slopes, 0.5))
    grown = (new == 1) & (old == 0)
    kept = (new == 1) & (old == 1)
    assert grown.any()
    decay = 0.5 * weights if optimizer == "decayed" else 0.0
    expected = np.where(kept, weights if skip else weights - 0.5 * (slopes + decay), 0)
    expected = np.where(grown, 0 if skip else -0.5 * slopes, expected)
    np.testing.assert_array_equal(moved["kernel"], expected)


@pytest.mark.slow
def test_hooks_see_masked_parameters_from_the_first_step_on():
    seen = []

    class Watched(sparsity.SET):
        def get_drop_scores(self, sparse_state, params, grads):
            seen.append((np.asarray(params["kernel"]), np.asarray(sparse_state.masks["kernel"])))
            return super().get_drop_scores(sparse_state, params, grads)

    for packed in (False, True):
        updater = Watched(
            sparsity_distribution_fn=helpers.uniform(0.5),
            scheduler=sparsity.PeriodicSchedule(1),
            use_packed_masks=packed,
        )
        helpers.train(updater, helpers.params(), 2, jit=False)
    assert len(seen) == 4
    for kernel, mask in seen:
        assert mask.shape == helpers.SHAPE  # hooks never see packed masks
        assert np.all(helpers.is_positive_zero(kernel)[mask == 0])
        assert mask.sum() == 30


def test_pruned_weights_that_were_not_numbers_are_zero_after_the_masks_are_applied():
    updater = sparsity.MagnitudePruning()
    values = jnp.array([np.nan, np.inf, -np.inf, -0.0, 2.0])
    masks = {"w": jnp.array([0, 0, 0, 0, 1], jnp.uint8)}
    applied = updater.apply_masks({"w": values}, masks)
    assert np.all(helpers.is_positive_zero(applied["w"])[:4])
    assert float(applied["w"][4]) == 2.0


def test_a_nan_among_the_scores_does_not_empty_a_layer():
    updater = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.5))
    pruned, masks = updater.instant_sparsify(jnp.array([[1.0, np.nan, 3.0, 2.0]]))
    np.testing.assert_array_equal(masks, [[0, 0, 1, 1]])
    np.testing.assert_array_equal(pruned, [[0, 0, 3, 2]])


# Skipped steps.


@pytest.mark.slow
def test_a_skipped_step_keeps_the_counts_and_the_state_of_the_inner_optimizer():
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5),
        scheduler=sparsity.OneShotSchedule(1),
        skip_gradients=True,
    )
    inner = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: -0.1 * count))
    tx = updater.wrap_optax(inner)
    params = helpers.params()
    update = jax.jit(tx.update)
    updates, before = update(helpers.grads(0), tx.init(params), params)
    params = optax.apply_updates(params, updates)
    updates, after = update(helpers.grads(1), before, params)
    jax.tree.map(np.testing.assert_array_equal, before.inner_state, after.inner_state)
    moved = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(
        moved["kernel"], np.where(after.masks["kernel"], params["kernel"], 0)
    )
    np.testing.assert_array_equal(moved["bias"], params["bias"])
    assert int(after.count) == 2
    _, later = update(helpers.grads(2), after, moved)
    assert int(later.inner_state[0].count) == 2
    assert int(later.inner_state[1].count) == 2
