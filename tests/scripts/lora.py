"""Merging adapters into sharded weights: values and shardings are those of the weights."""

import jax
import numpy as np

import sparsity
from tests.helpers import normal
from tests.scripts.devices import same


def merged_weights_lie_where_the_weights_lie(devices):
    weight, a, b = normal(8, 16), normal(8, 2, seed=1), normal(2, 16, seed=2)
    mask = (normal(8, 16, seed=3) > 0).astype(np.uint8)
    expected = sparsity.merge_lora({"w": weight}, {"w": (a, b)}, {"w": mask})["w"]
    with jax.set_mesh(devices.mesh):
        params = {"w": devices.put(weight, "a", "b")}
        lora = {"w": (devices.put(a, "b", None), devices.put(b))}
        masks = {"w": devices.put(mask, "a", "b")}
        eager = sparsity.merge_lora(params, lora, masks)["w"]
        np.testing.assert_array_equal(eager, expected)
        jitted = jax.jit(sparsity.merge_lora)(params, lora, masks)["w"]
        np.testing.assert_allclose(jitted, expected, rtol=1e-6)
        if devices.is_explicit:
            same(eager, expected, params["w"])


_BOTH = [merged_weights_lie_where_the_weights_lie]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
