"""Weights in use, however an algorithm keeps its masks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity

PARAMS = {"kernel": jnp.array([[3.0, -1.0, 0.5, 2.0, -4.0]]), "bias": jnp.zeros(5)}
KEPT = [[1, 0, 0, 0, 1]]  # of five weights, the two of the largest magnitude


def updated(**options):
    """Updater, parameters in use and optimizer state after a step that made masks."""
    config = {"algorithm": "magnitude", "sparsity": 0.6, "update_start_step": 0}
    updater = sparsity.create_updater_from_config(config | {"update_end_step": 0} | options)
    tx = updater.wrap_optax(optax.sgd(0.0))
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, PARAMS), tx.init(PARAMS), PARAMS)
    params = updater.post_gradient_update(optax.apply_updates(PARAMS, updates), state)
    return updater.pre_forward_update(params, state), state


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_packed_masks": True},
        {"algorithm": "magnitude_ste"},
        {"algorithm": "magnitude_ste", "store_masks": True, "use_packed_masks": True},
    ],
    ids=["stored", "packed", "made anew", "straight-through, stored"],
)
def test_active_masks_are_those_in_use_and_none_for_dense_leaves(options):
    masks = sparsity.active_masks(*updated(**options))
    assert masks["bias"] is None
    assert masks["kernel"].dtype == jnp.uint8
    np.testing.assert_array_equal(masks["kernel"], KEPT)


def test_a_weight_in_the_mask_is_active_while_it_is_zero():
    params, state = updated()
    masks = sparsity.active_masks(jax.tree.map(jnp.zeros_like, params), state)
    np.testing.assert_array_equal(masks["kernel"], KEPT)


def test_a_network_without_sparsity_has_no_active_masks():
    state = sparsity.NoPruning().wrap_optax(optax.sgd(0.1)).init(PARAMS)
    assert jax.tree.leaves(sparsity.active_masks(PARAMS, state)) == []


def test_active_masks_are_the_same_under_jit():
    masks = jax.jit(sparsity.active_masks)(*updated(use_packed_masks=True))
    np.testing.assert_array_equal(masks["kernel"], KEPT)
