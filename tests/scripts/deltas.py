"""Deltas of sharded models: values and shardings are those of the base."""

import jax
import numpy as np

from sparsity import Delta
from tests.helpers import normal
from tests.scripts.devices import same


def a_delta_of_sharded_weights_is_that_of_the_host(devices):
    weights = {"w": normal(8, 16), "half": normal(16).astype("bfloat16"), "same": normal(8, seed=1)}
    tuned = {"w": weights["w"].copy(), "half": 2 * weights["half"], "same": weights["same"]}
    tuned["w"][3, 5:9] += 1
    specs = {"w": ("a", "b"), "half": ("b",), "same": ()}
    host = Delta.between(weights, tuned)
    with jax.set_mesh(devices.mesh):
        base, params = (
            {name: devices.put(array, *specs[name]) for name, array in tree.items()}
            for tree in (weights, tuned)
        )
        delta = Delta.between(base, params)
        assert delta.base == host.base
        assert delta.nbytes == host.nbytes
        for name, array in host.apply(base).items():
            same(array, tuned[name], base[name])
        for name, array in Delta.merge([delta, host], [0.5, 0.5]).apply(base).items():
            np.testing.assert_array_equal(np.asarray(array), tuned[name])
            assert array.sharding == base[name].sharding


_BOTH = [a_delta_of_sharded_weights_is_that_of_the_host]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
