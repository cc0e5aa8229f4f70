"""Sparse activations of sharded arrays: values and gradients are those of one device."""

import jax
import numpy as np

from sparsity import prune_act_struct, prune_act_unstruct
from tests.helpers import normal
from tests.scripts.devices import Devices
from tests.selection_oracle import largest, n_of_m


def values_and_gradients_are_those_of_one_device(devices):
    devices = Devices(devices.kind, (4, 2))
    x = normal(8, 6, 12)
    sharded = devices.put(x, "a", None, "b")
    each = np.stack([largest(y, 0.3) for y in x])
    cases = [
        (lambda x: prune_act_unstruct(x, 0.3), largest(x, 0.3)),
        (lambda x: prune_act_unstruct(x, 0.3, batch_axes=1), each),
        (lambda x: prune_act_struct(x, (2, 4)), n_of_m(x, 2, 4)),
        (lambda x: prune_act_struct(x, (2, 5), 0), n_of_m(x, 2, 5, 0)),
    ]
    with jax.set_mesh(devices.mesh):
        for prune, expected in cases:

            def loss(x, prune=prune):
                out = prune(x)
                return (out**2).sum(), out

            grad, out = jax.jit(jax.grad(loss, has_aux=True))(sharded)
            np.testing.assert_array_equal(out, expected)
            if devices.is_explicit:
                assert out.sharding.is_equivalent_to(sharded.sharding, 3), out.sharding
            np.testing.assert_array_equal(grad, 2 * expected)


_BOTH = [values_and_gradients_are_those_of_one_device]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
