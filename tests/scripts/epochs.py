"""Epoch strategies of sharded weights: masks of one device, sharded as the weights."""

import jax
import jax.numpy as jnp
import optax

from sparsity import EpochStrategy, pruning
from tests.epochs.epoch_oracle import assert_masks, grouped, parameters, ranked, strategy
from tests.scripts.devices import Devices


def masks_are_those_of_one_device_and_sharded_as_the_weights(devices):
    devices = Devices(devices.kind, (4, 2))
    params = {name: parameters()[name] for name in ("Dense_0", "Dense_1")}
    sharded = jax.tree.map(
        lambda w: devices.put(w, "a", "b") if w.ndim == 2 else devices.put(w), params
    )
    schedule = strategy(0, "unstr_global", 0.5) | strategy(1, "str_unified_local", (1, 4))
    with jax.set_mesh(devices.mesh):
        masks = jax.jit(lambda p: pruning(p, 0, None, schedule)[1])(sharded)
        assert_masks(masks, ranked(params, 0.5))
        tx = EpochStrategy(schedule, 1).wrap_optax(optax.sgd(0.0))
        step = jax.jit(tx.update)
        state = tx.init(sharded)
        for expected in (ranked(params, 0.5), grouped(params, 1, 4)):
            state = state._replace(masks=jax.tree.map(jnp.ones_like, state.masks))
            _, state = step(sharded, state, sharded)
            assert_masks(state.masks, expected)
            mask, weights = state.masks["Dense_0"]["kernel"], sharded["Dense_0"]["kernel"]
            assert mask.sharding.is_equivalent_to(weights.sharding, 2), mask.sharding


_BOTH = [masks_are_those_of_one_device_and_sharded_as_the_weights]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
