"""Channels chosen by what reads them on a mesh: masks, weights and biases of one device."""

import jax
import jax.numpy as jnp
import numpy as np

import sparsity
from tests.calibration import oracles
from tests.scripts.devices import same


def mlp(params, x):
    hidden = jax.nn.relu(x @ params["up"] + params["shift"])
    return hidden @ params["down"] + params["bias"]


def channels_are_chosen_as_on_one_device(devices):
    weights, x, _ = oracles.layer(8, 16, 64, dtype=np.float32)
    down = oracles.layer(16, 4, seed=1, dtype=np.float32)[0].T
    bias = np.zeros(4, np.float32)
    params = {"up": weights.T, "shift": weights[:, 0], "down": down, "bias": bias}
    batches, graph = [x[:32], x[32:]], sparsity.trace(mlp, params, x)
    for pruner, kind in (sparsity.FLAPPruning, "moments"), (sparsity.OSSCARPruning, "gram"):
        updater = pruner(
            scope=sparsity.Coupled(graph),
            sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=graph.is_weight),
        )

        def run(params, batches, updater=updater, kind=kind):
            statistics = sparsity.calibrate(mlp, params, batches, kind)
            return updater.instant_sparsify(params, statistics=statistics)

        expected, masks = run(*jax.tree.map(jnp.asarray, (params, batches)))
        with jax.set_mesh(devices.mesh):
            # With Explicit axes the model would have to say where a sum over a sharded axis lies.
            down = (None, "b") if devices.is_explicit else ("b", "a")
            specs = {"up": (None, "b"), "shift": ("b",), "down": down, "bias": down[1:]}
            placed = {name: devices.put(params[name], *spec) for name, spec in specs.items()}
            actual, actual_masks = run(placed, [devices.put(x, "a") for x in batches])
        for name, leaf in placed.items():
            assert (actual_masks[name] is None) == (masks[name] is None), name
            if masks[name] is not None:
                same(actual_masks[name], masks[name], leaf)
            atol = 1e-5 if name == "down" else 1e-6  # least squares in float32
            np.testing.assert_allclose(actual[name], expected[name], atol=atol, err_msg=name)
            assert actual[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), name


_BOTH = [channels_are_chosen_as_on_one_device]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
