"""Training of chosen entries of sharded parameters, against the same on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparsity.finetuning.train_only import train_only
from tests.helpers import normal

SPECS = {"rows": ("a", None), "both": ("b", "a"), "layers": (None, None, "b"), "plain": ()}
SHAPES = {"rows": (8, 6), "both": (8, 6), "layers": (3, 2, 8), "plain": (5,)}


def draw(devices=None):
    arrays = {name: normal(*shape, seed=len(name)) for name, shape in SHAPES.items()}
    masks = {name: (array > 0.5).astype(np.uint8) for name, array in arrays.items()}
    arrays |= {"frozen": normal(8, 8, seed=9)}
    if devices is not None:
        specs = SPECS | {"frozen": ("a", "b")}
        arrays, masks = (
            {name: devices.put(leaf, *specs[name]) for name, leaf in tree.items()}
            for tree in (arrays, masks)
        )
    return arrays, masks


def train(params, masks):
    tx = train_only(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), masks)

    @jax.jit
    def step(params, state):
        grads = jax.tree.map(lambda x: jnp.sin(3 * x), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(3):
        params, state = step(params, state)
    return params, state


def parts_train_as_on_one_device_and_hold_their_own_state(devices):
    expected, _ = train(*draw())
    with jax.set_mesh(devices.mesh):
        start, masks = draw(devices)
        params, state = train(start, masks)
    for name, leaf in params.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-6)
        assert leaf.sharding.is_equivalent_to(start[name].sharding, leaf.ndim), name
        mask = np.asarray(masks.get(name, np.zeros_like(leaf)))
        np.testing.assert_array_equal(np.where(mask, start[name], leaf), start[name])
    moments = state.state[1][0].mu
    halves = np.asarray(masks["rows"]).reshape(2, -1).sum(1)
    assert moments["rows"].shape == (2, 1, halves.max())
    assert halves.min() < halves.max()
    assert moments["both"].shape[:2] == (4, 2)
    assert moments["plain"].ndim == 1
    for array in (state.positions["both"], moments["both"]):
        assert len({str(shard.index) for shard in array.addressable_shards}) == 8, array.sharding


def a_mask_that_is_sharded_otherwise_is_refused(devices):
    with jax.set_mesh(devices.mesh):
        params, masks = draw(devices)
        tx = train_only(optax.sgd(0.1), masks | {"rows": np.asarray(masks["rows"])})
        with pytest.raises(ValueError, match=r"'rows'.*\(2, 1\) parts.*param.sharding"):
            tx.init(params)
        replicated = devices.put(np.asarray(params["rows"]))
        with pytest.raises(ValueError, match=r"'rows'.*in \(1, 1\) parts, its mask in \(2, 1\)"):
            train_only(optax.sgd(0.1), masks).init(params | {"rows": replicated})


def a_mask_of_all_entries_fits_any_sharding(devices):
    with jax.set_mesh(devices.mesh):
        params, _ = draw(devices)
        masks = dict.fromkeys(params) | {"both": np.ones(SHAPES["both"], np.uint8)}
        tx = train_only(optax.sgd(0.1, momentum=0.9), masks)
        (moments, *_) = jax.tree.leaves(tx.init(params))
        assert moments.shape == SHAPES["both"]


_BOTH = [
    a_mask_of_all_entries_fits_any_sharding,
    parts_train_as_on_one_device_and_hold_their_own_state,
    a_mask_that_is_sharded_otherwise_is_refused,
]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
