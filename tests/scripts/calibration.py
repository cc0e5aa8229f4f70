"""Pruning by statistics on a mesh: masks and weights of one device, placed as the weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import sparsity
from sparsity.calibration import prune, relative_error
from sparsity.calibration.statistics.grams import factor_damped_inverse
from tests.calibration import oracles
from tests.scripts.devices import same

RUNS = {
    "sparsegpt": (sparsity.SparseGPTPruning, None),
    "least squares": (sparsity.WandaPruning, sparsity.LeastSquares()),
    "admm": (sparsity.RIAPruning, sparsity.ADMM(gradual=4)),
}


def half(params):
    return jax.tree.map(lambda _: 0.5, params)


def layer():
    """Experts [2, 16, 32], with their statistic."""
    made = [oracles.layer(16, 32, 64, seed=seed, dtype=np.float32)[:2] for seed in range(2)]
    gram = np.stack([x.T @ x for _, x in made])
    axes = {"contracting": (1,), "output": (2,), "batch": (0,)}
    statistic = sparsity.Statistic(gram=gram, count=64, **axes)
    return {"w": np.stack([w.T for w, _ in made])}, {("w",): statistic}


def placed(devices):
    params, statistics = layer()
    return {"w": devices.put(params["w"], "a", None, "b")}, jax.tree.map(devices.put, statistics)


def every_method_gives_what_one_device_gives(devices):
    for name, (pruner, refit) in RUNS.items():
        updater = pruner(sparsity_distribution_fn=half)
        expected, masks = prune(updater, *jax.tree.map(jnp.asarray, layer()), refit)
        with jax.set_mesh(devices.mesh):
            params, statistics = placed(devices)
            compiled = [jax.jit(prune, static_argnums=(0, 3))] if name == "sparsegpt" else []
            for run in (prune, *compiled):
                actual, actual_masks = run(updater, params, statistics, refit)
                same(actual_masks["w"], masks["w"], params["w"])
                np.testing.assert_allclose(actual["w"], expected["w"], atol=1e-4, err_msg=name)
                assert actual["w"].sharding.is_equivalent_to(params["w"].sharding, 3), name


def training_updates_masks_by_statistics(devices):
    updater = sparsity.WandaPruning(
        sparsity_distribution_fn=half, scheduler=sparsity.OneShotSchedule(0)
    )
    tx = updater.wrap_optax(optax.sgd(0.0))

    def train(params, statistics):
        state, step = tx.init(params), jax.jit(tx.update)
        return step(params, state, params, statistics=statistics)[1].masks

    expected = train(*jax.tree.map(jnp.asarray, layer()))
    with jax.set_mesh(devices.mesh):
        params, statistics = placed(devices)
        masks = train(params, statistics)
        jax.tree.map(same, masks, expected, params)


def statistics_that_are_constants_serve_inside_shard_map(devices):
    params, statistics = jax.tree.map(jnp.asarray, layer())
    squares = statistics[("w",)].sums_of_squares()
    by_squares = {("w",): dataclasses.replace(statistics[("w",)], squares=squares, gram=None)}
    updater = sparsity.WandaPruning(sparsity_distribution_fn=half)
    _, masks = updater.instant_sparsify(params, statistics=by_squares)

    def run(params):
        refitted = prune(updater, params, statistics, sparsity.LeastSquares())[0]
        return updater.instant_sparsify(params, statistics=by_squares)[1], refitted

    expected = prune(updater, params, statistics, sparsity.LeastSquares())[0]
    with jax.set_mesh(devices.mesh):
        mapped = jax.shard_map(run, in_specs=P(), out_specs=P(), check_vma=False)
        inside, refitted = jax.jit(mapped)(params)
    np.testing.assert_array_equal(inside["w"], masks["w"])
    np.testing.assert_allclose(refitted["w"], expected["w"], atol=1e-4)


def network(params, x):
    """A layer, and a scan over two more."""
    h = x @ params["first"]
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params["layers"])[0]


def batches_that_are_sharded_give_what_one_device_gives(devices):
    keys = jax.random.split(jax.random.key(0), 4)
    first, layers = (
        jax.random.normal(k, s) for k, s in zip(keys, [(6, 8), (2, 8, 8)], strict=False)
    )
    params = {"first": first, "layers": layers / 3}
    batches = [jax.random.normal(key, (16, 6)) for key in keys[2:]]
    updater = sparsity.WandaPruning(sparsity_distribution_fn=half)

    def run(params, batches):
        statistics = [sparsity.calibrate(network, params, batches, k) for k in ("squares", "gram")]
        return statistics, sparsity.oneshot(updater, network, params, batches)[:2]

    expected = run(params, batches)
    with jax.set_mesh(devices.mesh):
        # With Explicit axes the model would have to say where a sum over a sharded axis lies.
        stacked = () if devices.is_explicit else (None, None, "b")
        layers = devices.put(params["layers"], *stacked)
        placed = {"first": devices.put(params["first"]), "layers": layers}
        actual = run(placed, [devices.put(x, "a") for x in batches])
    for leaf in (actual[1][0]["layers"], actual[1][1]["layers"]):
        assert leaf.sharding.is_equivalent_to(layers.sharding, 3)
    for ours, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-6, atol=1e-6 * np.abs(other).max())


def blocks_are_refitted_to_what_one_device_gives(devices):
    keys = jax.random.split(jax.random.key(0), 4)
    first, layers = (
        jax.random.normal(k, s) for k, s in zip(keys, [(6, 8), (2, 8, 8)], strict=False)
    )
    params = {"first": first, "layers": layers / 3}
    batches = [jax.random.normal(key, (16, 6)) for key in keys[2:]]
    updater = sparsity.WandaPruning(sparsity_distribution_fn=half)
    refits = (sparsity.ADMM(), sparsity.BlockRefit(steps=8, learning_rate=1e-2))
    expected = sparsity.oneshot(updater, network, params, batches, refits)
    with jax.set_mesh(devices.mesh):
        placed = {name: devices.put(x) for name, x in params.items()}
        sharded = [devices.put(x, "a") for x in batches]
        actual = sparsity.oneshot(updater, network, placed, sharded, refits)
    jax.tree.map(np.testing.assert_array_equal, actual[1], expected[1])
    for name, leaf in actual[0].items():
        np.testing.assert_allclose(leaf, expected[0][name], atol=1e-4)
        assert leaf.sharding.is_equivalent_to(placed[name].sharding, leaf.ndim), name
    assert any(after < before for before, after in expected[2].blocks.values())
    for name, errors in actual[2].blocks.items():
        np.testing.assert_allclose(errors, expected[2].blocks[name], rtol=1e-3)


def multiply(params, x):
    return x @ params


def meshes_that_are_not_in_use_give_what_one_device_gives(devices):
    params, statistics = jax.tree.map(jnp.asarray, layer())
    gram = statistics[("w",)].gram
    x = jax.random.normal(jax.random.key(0), (16, 6))
    expected = sparsity.calibrate(multiply, jnp.ones((6, 4)), [x], "gram")[()]
    placed = devices.put(np.ones((6, 4)), None, "b")
    actual = sparsity.calibrate(multiply, placed, [devices.put(x, "a")], "gram")[()]
    np.testing.assert_allclose(actual.gram, expected.gram, rtol=1e-5)
    assert int(actual.count) == int(expected.count) == 16
    sharded, there = devices.put(gram, "a"), devices.put(params["w"], "a")
    constant = jax.jit(lambda w: factor_damped_inverse(sharded, 0.1, np.float32).sum() + w.sum())
    factors = factor_damped_inverse(gram, 0.1, np.float32)
    np.testing.assert_allclose(factor_damped_inverse(sharded, 0.1, np.float32), factors, atol=1e-5)
    np.testing.assert_allclose(constant(there), factors.sum() + params["w"].sum(), rtol=1e-4)
    pruner = sparsity.SparseGPTPruning(sparsity_distribution_fn=half)
    masks = sparsity.oneshot(pruner, multiply, placed, [devices.put(x, "a")])[1]
    same(masks, sparsity.oneshot(pruner, multiply, jnp.ones((6, 4)), [x])[1], placed)


def each_device_solves_a_part_of_a_weight_that_lies_on_all(devices):
    where = []

    class Recorded(sparsity.WandaPruning):
        def instant_sparsify(self, params, grads=None, **extra):
            where.append(jax.tree.leaves(params)[0].sharding)
            return super().instant_sparsify(params, grads, **extra)

    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(32, 8), (8, 16, 5)]))
    batch = x.reshape(16, 2, 8)

    def run(params, batch):
        updater = Recorded(sparsity_distribution_fn=half)
        fn = lambda params, x: jnp.einsum("bti,ioh->btoh", x, params["w"])  # noqa: E731
        return sparsity.oneshot(updater, fn, params, [batch], refit=sparsity.LeastSquares())

    expected = run({"w": w}, batch)
    with jax.set_mesh(devices.mesh):
        params = {"w": devices.put(w)}
        actual = run(params, devices.put(batch))
    assert where[1].is_equivalent_to(devices.sharding(None, ("a", "b")), 3)
    same(actual[1]["w"], expected[1]["w"], params["w"])
    np.testing.assert_allclose(actual[0]["w"], expected[0]["w"], rtol=1e-5, atol=1e-6)
    assert actual[0]["w"].sharding.is_equivalent_to(params["w"].sharding, 3)
    assert np.isclose(actual[2][("w",)].error, expected[2][("w",)].error, rtol=1e-4)


def experts(params, x):
    run = jax.vmap(lambda up, down: jax.nn.relu(x @ up) @ down)
    return run(params["up"], params["down"]).sum(axis=0)


def experts_give_what_one_device_gives_wherever_they_lie(devices):
    keys, shapes = jax.random.split(jax.random.key(0), 3), [(4, 8, 8), (4, 8, 4), (16, 8)]
    up, down, x = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))
    params, updater = {"up": up, "down": down}, sparsity.WandaPruning(sparsity_distribution_fn=half)
    for refit, specs in {None: [()], sparsity.ADMM(iterations=2): [(), ("b",)]}.items():
        expected = sparsity.oneshot(updater, experts, params, [x], refit)
        for spec in specs:
            with jax.set_mesh(devices.mesh):
                placed = {name: devices.put(leaf, *spec) for name, leaf in params.items()}
                actual = sparsity.oneshot(updater, experts, placed, [devices.put(x)], refit)
            jax.tree.map(same, actual[1], expected[1], placed)
            for name, leaf in placed.items():
                np.testing.assert_allclose(actual[0][name], expected[0][name], atol=1e-4)
                assert actual[0][name].sharding.is_equivalent_to(leaf.sharding, 3)
                shares, expected_shares = (
                    [x[2][name,].error, x[2][name,].unrefitted, x[2][name,].centred]
                    for x in (actual, expected)
                )
                np.testing.assert_allclose(shares, expected_shares, rtol=1e-4)


def a_relative_error_is_that_of_one_device(devices):
    params, statistics = jax.tree.map(jnp.asarray, layer())
    w, statistic = params["w"], statistics["w",]
    expected = relative_error(statistic, w, w.at[:, ::2].set(0))
    with jax.set_mesh(devices.mesh):
        for spec in ((), ("a",), (None, "a", "b")):
            placed, pruned = (devices.put(x, *spec) for x in (w, w.at[:, ::2].set(0)))
            actual = relative_error(jax.tree.map(devices.put, statistic), placed, pruned)
            np.testing.assert_allclose(actual, expected, rtol=1e-5)


_BOTH = [
    every_method_gives_what_one_device_gives,
    training_updates_masks_by_statistics,
    statistics_that_are_constants_serve_inside_shard_map,
    batches_that_are_sharded_give_what_one_device_gives,
    blocks_are_refitted_to_what_one_device_gives,
    meshes_that_are_not_in_use_give_what_one_device_gives,
    each_device_solves_a_part_of_a_weight_that_lies_on_all,
    experts_give_what_one_device_gives_wherever_they_lie,
    a_relative_error_is_that_of_one_device,
]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
