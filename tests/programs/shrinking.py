"""Models on a mesh become smaller there: the plan, the values and the placement."""

import functools
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec as P

import sparsity
from tests.graph import models

MLP = {"up": P(None, "b"), "bias": P("b"), "down": P(None, "a")}
SCANNED = {
    "embed": P(),
    "head": P(),
    "layers": {"scale": P(), "up": P(None, None, "b"), "down": P(None, None, "a")},
}


def mlp(params, x):
    return jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]


def mlp_params(hidden=16):
    return models.draw({"up": (8, hidden), "bias": (hidden,), "down": (hidden, 8)})


def place(devices, params, specs):
    return jax.tree.map(lambda x, spec: devices.put(x, *spec), params, specs)


def pruned(graph, params, **options):
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph, **options),
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=graph.is_weight),
    )
    return pruner.instant_sparsify(params)


def loss(apply, params, x):
    return jnp.sum(jnp.sin(apply(params, x)))


def check(devices, fn, params, specs, x):
    """Shrinks on one device and on the mesh; returns both."""
    graph = sparsity.trace(fn, params, x)
    alone = sparsity.shrink(graph, *pruned(graph, params))
    expected = jax.value_and_grad(functools.partial(loss, alone.apply))(alone.params, x)
    with jax.set_mesh(devices.mesh):
        params, x = place(devices, params, specs), devices.put(x, "a")
        graph = sparsity.trace(fn, params, x)
        small = sparsity.shrink(graph, *pruned(graph, params))
        assert small.plan == alone.plan
        jax.tree.map(np.testing.assert_array_equal, small.params, alone.params)
        compiled = jax.jit(jax.value_and_grad(functools.partial(loss, small.apply)))
        for rows in (x, jax.device_put(np.tile(x, (2, 1)), x.sharding)):
            found = compiled(small.params, rows)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, 2 * other, rtol=1e-4, atol=1e-4)
        again = sparsity.shrink(small.graph, *pruned(small.graph, small.params))
    assert small.plan.then(again.plan) == alone.plan.then(
        sparsity.shrink(alone.graph, *pruned(alone.graph, alone.params)).plan
    )
    return small


def what_is_left_is_that_of_one_device_and_stays_sharded(devices):
    x = jax.random.normal(jax.random.key(0), (4, 8))
    small = check(devices, mlp, mlp_params(), MLP, x)
    assert jax.tree.map(jnp.shape, small.params) == {"up": (8, 8), "bias": (8,), "down": (8, 8)}
    for name, leaf in small.params.items():
        own = devices.sharding(*MLP[name])
        assert leaf.sharding.is_equivalent_to(own, leaf.ndim), (name, leaf.sharding)
    assert "round_to" not in small.report()


def layers_of_a_scan_keep_channels_of_their_own(devices):
    model = models.scanned(layers=2, width=6, hidden=8)
    small = check(devices, model.fn, models.draw(model.shapes), SCANNED, np.ones((4, 3), "f"))
    up = small.params["layers"]["up"]
    assert up.shape == (2, 3, 4)
    assert up.sharding.is_equivalent_to(devices.sharding(None, None, "b"), 3), up.sharding


def what_no_longer_divides_lies_on_each_device_and_the_report_says_so(devices):
    x = jax.random.normal(jax.random.key(0), (4, 8))
    small = check(devices, mlp, mlp_params(12), MLP, x)
    assert small.params["up"].shape == (8, 6)
    assert small.params["up"].sharding.is_equivalent_to(devices.sharding(), 2)
    assert small.params["down"].sharding.is_equivalent_to(devices.sharding(None, "a"), 2)
    assert "bias:0, up:1: what is left does not divide" in small.report()
    assert "Coupled(round_to=4)" in small.report()
    with jax.set_mesh(devices.mesh):
        params = place(devices, mlp_params(12), MLP)
        rounded = sparsity.shrink(small.before, *pruned(small.before, params, round_to=4))
    assert rounded.params["up"].sharding.is_equivalent_to(devices.sharding(None, "b"), 2)


def a_run_goes_on_from_its_plan_and_its_checkpoint(devices):
    x = jax.random.normal(jax.random.key(0), (4, 8))

    def step(apply, tx, params, state, x):
        grads = jax.grad(lambda p: jnp.sum((apply(p, x) - 1) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def start():
        """A model of which nothing but its code is known."""
        params = place(devices, jax.tree.map(jnp.zeros_like, mlp_params(32)), MLP)
        graph = sparsity.trace(mlp, params, there)
        pruner = sparsity.MagnitudePruning(
            scope=sparsity.Coupled(graph),
            sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=graph.is_weight),
            scheduler=sparsity.OneShotSchedule(1),
            use_packed_masks=True,
        )
        tx = pruner.wrap_optax(optax.adam(0.1))
        return graph, params, tx, tx.init(params)

    with jax.set_mesh(devices.mesh), tempfile.TemporaryDirectory() as folder:
        there = devices.put(x, "a")
        graph, _, tx, state = start()
        params = place(devices, mlp_params(32), MLP)
        for _ in range(3):
            params, state = jax.jit(functools.partial(step, mlp, tx))(params, state, there)
        masks = sparsity.unpack_masks(state.masks, params)
        small = sparsity.shrink(graph, params, masks, state)
        moment = small.opt_state.inner_state[0].mu["up"]
        assert moment.shape == (8, 16)
        assert moment.sharding.is_equivalent_to(devices.sharding(None, "b"), 2), moment.sharding
        run = jax.jit(functools.partial(step, small.apply, tx))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(f"{folder}/run", (small.params, small.opt_state))
        text = small.plan.to_json()
        unbroken = run(small.params, small.opt_state, there)

        graph, params, tx, state = start()
        plan = sparsity.Plan.from_json(text)
        like = sparsity.shrink(graph, params, plan, state)
        with ocp.StandardCheckpointer() as checkpointer:
            saved = checkpointer.restore(f"{folder}/run", (like.params, like.opt_state))
        found = jax.jit(functools.partial(step, like.apply, tx))(*saved, there)
    jax.tree.map(np.testing.assert_array_equal, found, unbroken)
    assert int(found[1].count) == 4


_BOTH = [
    what_is_left_is_that_of_one_device_and_stays_sharded,
    layers_of_a_scan_keep_channels_of_their_own,
    what_no_longer_divides_lies_on_each_device_and_the_report_says_so,
    a_run_goes_on_from_its_plan_and_its_checkpoint,
]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
