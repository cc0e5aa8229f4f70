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
from tests import helpers
from tests.graph import models

MLP = {"up": P(None, "b"), "bias": P("b"), "down": P()}
SCANNED = {
    "embed": P(),
    "head": P(),
    "layers": {"scale": P(), "up": P(None, None, "b"), "down": P()},
}


def mlp(params, x):
    return jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]


def mlp_params(hidden=16):
    return models.draw({"up": (8, hidden), "bias": (hidden,), "down": (hidden, 8)})


def place(devices, params, specs):
    return jax.tree.map(lambda x, spec: devices.put(x, *spec), params, specs)


def halves(graph, params):
    """Masks that keep every second channel."""
    masks = jax.tree.map(jnp.ones_like, params)
    for group in graph.groups:
        for (path, axis), places in zip(group.members, group.positions, strict=True):
            inner = masks if len(path) == 1 else masks[path[0]]
            gone = (slice(None),) * axis + (places[1::2].reshape(-1),)
            inner[path[-1]] = inner[path[-1]].at[gone].set(0)
    return masks


def mask(params, masks):
    return jax.tree.map(lambda x, mask: x * mask, params, masks)


def check(devices, fn, params, specs, x, masks=None):
    """Shrinks on one device and on the mesh, by halves or by masks; returns the latter."""
    graph = sparsity.trace(fn, params, x)
    masks = halves(graph, params) if masks is None else masks
    alone = sparsity.shrink(graph, mask(params, masks), masks)
    expected = jax.grad(lambda params: jnp.sum(jnp.sin(fn(params, x))))(mask(params, masks))
    with jax.set_mesh(devices.mesh):
        there = [place(devices, tree, specs) for tree in (mask(params, masks), masks)]
        x = devices.put(x, "a")
        small = sparsity.shrink(sparsity.trace(fn, there[0], x), *there)
        assert small.plan == alone.plan
        assert helpers.bits(small.params) == helpers.bits(alone.params)  # -0.0 stays, too
        jax.tree.map(np.testing.assert_array_equal, small.masks, alone.masks)
        actual = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(small.apply(p, x)))))(small.params)
    expected = sparsity.shrink(graph, expected, alone.plan).params
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, actual, expected)
    return small


def what_is_left_is_that_of_one_device_and_stays_sharded(devices):
    x = jax.random.normal(jax.random.key(0), (4, 8))
    params = jax.tree.map(jnp.round, mlp_params())
    assert np.signbit(params["up"])[params["up"] == 0].any()
    small = check(devices, mlp, params, MLP, x)
    assert jax.tree.map(jnp.shape, small.params) == {"up": (8, 8), "bias": (8,), "down": (8, 8)}
    for name, leaf in small.params.items():
        leaf_sharding = devices.sharding(*MLP[name])
        assert leaf.sharding.is_equivalent_to(leaf_sharding, leaf.ndim), (name, leaf.sharding)
    assert "round_to" not in small.report()
    with jax.set_mesh(devices.mesh):  # another batch size
        x = devices.put(np.tile(x, (2, 1)), "a")
        assert jax.jit(small.apply)(small.params, x).shape == (8, 8)


def masks_of_single_weights_leave_what_they_leave_on_one_device(devices):
    x = jax.random.normal(jax.random.key(0), (4, 8))
    masks = {
        name: jnp.asarray(np.random.default_rng(0).random(leaf.shape) < 0.7, jnp.uint8)
        for name, leaf in mlp_params().items()
    }
    masks["down"] = masks["down"].at[:8].set(0)
    small = check(devices, mlp, mlp_params(), MLP, x, masks)
    assert small.masks["up"].shape == (8, 8)
    for name in ("up", "bias"):
        mask, leaf = small.masks[name], small.params[name]
        assert leaf.sharding.is_equivalent_to(devices.sharding(*MLP[name]), leaf.ndim)
        assert mask.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), mask.sharding
        assert not jnp.any(jnp.where(mask, 0, leaf))


def layers_of_a_scan_stay_sharded(devices):
    model = models.scanned(layers=2, width=6, hidden=8)
    small = check(devices, model.fn, models.draw(model.shapes), SCANNED, np.ones((4, 3), "f"))
    up = small.params["layers"]["up"]
    assert up.shape == (2, 3, 4)
    assert up.sharding.is_equivalent_to(devices.sharding(None, None, "b"), 3), up.sharding


def a_norm_over_channels_on_several_devices_counts_removed_ones(devices):
    def model(params, x):
        x = x @ params["up"]
        centred = x - x.mean(-1, keepdims=True)
        spread = jnp.square(centred).mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(spread + 1) * params["scale"] @ params["down"]

    params = models.draw({"up": (8, 16), "scale": (16,), "down": (16, 8)})
    specs, x = MLP | {"scale": P("b")}, jax.random.normal(jax.random.key(0), (4, 8))
    specs.pop("bias")
    small = check(devices, model, params, specs, x)
    assert small.params["scale"].shape == (8,)


def what_no_longer_divides_lies_on_each_device_and_the_report_says_so(devices):
    x = jax.random.normal(jax.random.key(0), (4, 8))
    small = check(devices, mlp, mlp_params(12), MLP, x)
    assert small.params["up"].shape == (8, 6)
    assert small.params["up"].sharding.is_equivalent_to(devices.sharding(), 2)
    assert "'bias:0', 'up:1': the remaining entries do not divide" in small.report()
    assert "Coupled(round_to=4)" in small.report()


def coupled_masks_are_those_of_one_device_and_lie_as_their_parameters(devices):
    params = mlp_params(12)
    x = jnp.ones((4, 8))

    def prune(params, x):
        graph = sparsity.trace(mlp, params, x)
        updater = sparsity.RigL(
            scope=sparsity.Coupled(graph, round_to=4),
            sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=graph.is_weight),
            scheduler=sparsity.PeriodicSchedule(1, 1, 9),
        )

        @jax.jit
        def first_and_moved(params):
            state = updater.init_state(params)
            later = state._replace(count=jnp.int32(3))
            return state.masks, updater.update_state(later, params, params).masks

        return first_and_moved(params)

    expected = prune(params, x)
    assert int(expected[0]["bias"].sum()) == 8
    with jax.set_mesh(devices.mesh):
        params = place(devices, params, MLP)
        actual = prune(params, devices.put(x, "a"))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    for masks in actual:
        for name, leaf in params.items():
            assert masks[name].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), masks[name]


def competing_channels_are_those_of_one_device(devices):
    def model(params, x):
        return mlp({name: params[name] for name in MLP}, x) @ params["more"]

    x, specs = jnp.ones((4, 8)), MLP | {"more": P("b", None)}
    params = mlp_params(24) | {"more": models.draw({"more": (8, 4)}, seed=1)["more"]}
    across, kind = ("nbytes", "nbytes") if devices.is_explicit else (True, "macs")

    def prune(params, x):
        graph = sparsity.trace(model, params, x)
        pruner = sparsity.MagnitudePruning(
            scope=sparsity.Coupled(graph, across=across),
            sparsity_distribution_fn=sparsity.budget(graph, **{kind: 0.5}),
        )
        return jax.jit(lambda params: pruner.instant_sparsify(params)[1])(params)

    expected = prune(params, x)
    assert expected["bias"].sum() * 2 != 24  # what one group gives up another one has
    with jax.set_mesh(devices.mesh):
        masks = prune(place(devices, params, specs), devices.put(x, "a"))
    jax.tree.map(np.testing.assert_array_equal, masks, expected)


def a_run_goes_on_from_its_plan_and_its_checkpoint(devices):
    x = jax.random.normal(jax.random.key(0), (4, 8))

    def start(params):
        masks = halves(sparsity.trace(mlp, params, x), params)
        params, masks = place(devices, params, MLP), place(devices, masks, MLP)
        graph = sparsity.trace(mlp, params, there)
        updater = sparsity.StaticRandomSparse(use_packed_masks=True)
        tx = updater.wrap_optax(optax.adam(0.1), masks=masks)
        shardings = sparsity.sharding_like(params, jax.eval_shape(tx.init, params))
        return graph, tx, params, jax.jit(tx.init, out_shardings=shardings)(params)

    def stepped(apply, tx, params, state):
        @jax.jit
        def step(params, state):
            grads = jax.grad(lambda p: jnp.sum((apply(p, there) - 1) ** 2))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return step(params, state)

    with jax.set_mesh(devices.mesh), tempfile.TemporaryDirectory() as folder:
        there = devices.put(x, "a")
        graph, tx, *run = start(mlp_params(64))
        params, state = stepped(mlp, tx, *run)
        small = sparsity.shrink(graph, params, sparsity.unpack_masks(state.masks, params), state)
        bits, moment = small.opt_state.masks["up"], small.opt_state.inner_state[0].mu["up"]
        assert (bits.shape, moment.shape) == ((8, 4), (8, 32))
        for leaf in (bits, moment):
            assert leaf.sharding.is_equivalent_to(devices.sharding(None, "b"), 2), leaf.sharding
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(f"{folder}/run", (small.params, small.opt_state))
        text = small.plan.to_json()
        unbroken = stepped(small.apply, tx, small.params, small.opt_state)

        # From here on nothing is known but the code, the plan and the checkpoint.
        graph, tx, *run = start(jax.tree.map(jnp.zeros_like, mlp_params(64)))
        like = sparsity.shrink(graph, run[0], sparsity.Plan.from_json(text), run[1])
        with ocp.StandardCheckpointer() as checkpointer:
            saved = checkpointer.restore(f"{folder}/run", (like.params, like.opt_state))
        actual = stepped(like.apply, tx, *saved)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, actual, unbroken)
    assert int(actual[1].count) == 2


def masks_that_are_constants_cut_inside_shard_map(devices):
    params = mlp_params()
    graph = sparsity.trace(mlp, params, jnp.ones((4, 8)))
    masks = halves(graph, params)
    expected = sparsity.shrink(graph, params, masks).params
    with jax.set_mesh(devices.mesh):
        for constants in (masks, jax.tree.map(np.asarray, masks)):

            def cut(params, masks=constants):
                return sparsity.shrink(graph, params, masks).params

            mapped = jax.shard_map(cut, in_specs=P(), out_specs=P())
            jax.tree.map(np.testing.assert_array_equal, jax.jit(mapped)(params), expected)


_BOTH = [
    masks_that_are_constants_cut_inside_shard_map,
    what_is_left_is_that_of_one_device_and_stays_sharded,
    masks_of_single_weights_leave_what_they_leave_on_one_device,
    layers_of_a_scan_stay_sharded,
    a_norm_over_channels_on_several_devices_counts_removed_ones,
    what_no_longer_divides_lies_on_each_device_and_the_report_says_so,
    coupled_masks_are_those_of_one_device_and_lie_as_their_parameters,
    competing_channels_are_those_of_one_device,
    a_run_goes_on_from_its_plan_and_its_checkpoint,
]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
