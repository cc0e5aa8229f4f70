"""Pruning by statistics on a mesh: masks and weights of one device, placed as the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsity
from sparsity.calibration import prune
from tests.calibration import oracles
from tests.programs.devices import same

RUNS = {
    "ria": (sparsity.RIAPruning, sparsity.Unstructured(), None),
    "sparsegpt": (sparsity.SparseGPTPruning, sparsity.Unstructured(), None),
    "least squares": (sparsity.WandaPruning, sparsity.Unstructured(), sparsity.LeastSquares()),
    "admm": (sparsity.WandaPruning, sparsity.Unstructured(), sparsity.ADMM(gradual=4)),
}


def half(params):
    return jax.tree.map(lambda _: 0.5, params)


def layers():
    """A kernel [16, 32] and experts [2, 16, 32], with their statistics."""
    made = [oracles.layer(16, 32, 64, seed=seed, dtype=np.float32) for seed in range(3)]
    (kernel, x, _), *experts = made
    params = {"experts": np.stack([w.T for w, _, _ in experts]), "kernel": np.asarray(kernel.T)}
    of_experts = [oracles.of_kernel(x) for _, x, _ in experts]
    statistics = {
        ("kernel",): oracles.of_kernel(x),
        ("experts",): sparsity.Statistic(
            gram=np.stack([s.gram for s in of_experts]),
            squares=np.stack([s.squares for s in of_experts]),
            count=64, contracting=(1,), output=(2,), batch=(0,),
        ),
    }  # fmt: skip
    return params, statistics


def placed(devices):
    params, statistics = layers()
    params = {
        "experts": devices.put(params["experts"], "a", None, "b"),
        "kernel": devices.put(params["kernel"], "b", "a"),
    }
    return params, jax.tree.map(devices.put, statistics)


def every_method_gives_what_one_device_gives(devices):
    for name, (pruner, kind, refit) in RUNS.items():
        updater = pruner(sparsity_distribution_fn=half, sparsity_type=kind)
        expected, masks = prune(updater, *jax.tree.map(jnp.asarray, layers()), refit)
        with jax.set_mesh(devices.mesh):
            params, statistics = placed(devices)
            compiled = [jax.jit(prune, static_argnums=(0, 3))] if name == "sparsegpt" else []
            for run in (prune, *compiled):
                found, found_masks = run(updater, params, statistics, refit)
                for leaf, like in params.items():
                    same(found_masks[leaf], masks[leaf], like)
                    np.testing.assert_allclose(found[leaf], expected[leaf], atol=1e-4, err_msg=name)
                    assert found[leaf].sharding.is_equivalent_to(like.sharding, like.ndim), name


def training_updates_masks_by_statistics(devices):
    updater = sparsity.WandaPruning(
        sparsity_distribution_fn=half, scheduler=sparsity.PolynomialSchedule(1, 0, 2)
    )
    tx = updater.wrap_optax(optax.sgd(0.0))

    def train(params, statistics):
        state, step = tx.init(params), jax.jit(tx.update)
        for _ in range(3):
            updates, state = step(params, state, params, statistics=statistics)
            params = optax.apply_updates(params, updates)
        return state.masks

    expected = train(*jax.tree.map(jnp.asarray, layers()))
    with jax.set_mesh(devices.mesh):
        params, statistics = placed(devices)
        masks = train(params, statistics)
        jax.tree.map(same, masks, expected, params)


_BOTH = [every_method_gives_what_one_device_gives, training_updates_masks_by_statistics]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
