"""Masks of every algorithm on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import sparsity
from tests import helpers
from tests.scripts.devices import same
from tests.scripts.updates import on, place, tree


def every_second_algorithm_gives_bit_equal_masks(devices):
    """Axes of both kinds take turns; one algorithm of each scope runs without jit."""
    for name in sparsity.all_algorithm_names()[devices.is_explicit :: 2]:
        # One layer is enough where each is ranked by itself.
        alone = {"custom_sparsity_map": {"out/kernel": None}}
        updater = helpers.make_updater(name, **({} if helpers.ranks_all_layers(name) else alone))
        tx = updater.wrap_optax(optax.identity())

        def update(state, params, grads, name=name, updater=updater):
            state = updater.accumulate(state._replace(count=jnp.int32(3)), params, grads)
            if not helpers.is_straight_through(name):
                return updater.update_state(state, params, grads).masks
            seen = updater.pre_forward_update(params, state)
            return jax.tree.map(lambda w: w != 0, seen)

        # XLA would place random masks, which depend on no array, wherever it likes.
        is_eager, masks = name in ("random", "global_magnitude"), {}
        for layout in (None, "both"):
            with on(devices, layout):
                params, grads = (place(devices, tree(seed), layout) for seed in (0, 1))
                shardings = sparsity.sharding_like(params, jax.eval_shape(tx.init, params))
                init = tx.init if is_eager else jax.jit(tx.init, out_shardings=shardings)
                run = update if is_eager else jax.jit(update)
                masks[layout] = run(init(params), params, grads)
        if not helpers.is_straight_through(name):
            layers = params["in"], params["out"]
            for mask, layer in zip(jax.tree.leaves(masks["both"]), layers, strict=False):
                like = layer["kernel"]
                assert mask.sharding.is_equivalent_to(like.sharding, 2), (name, mask)
        for mask, expected in zip(*map(jax.tree.leaves, masks.values()), strict=True):
            np.testing.assert_array_equal(mask, expected, err_msg=name)


def groups_of_outputs_share_their_inputs_as_on_one_device(devices):
    # Groups within a device, along the first axis or the last, and across devices.
    cases = {"magnitude": "fanin_1,0", "rigl": "fanin_24,0"}
    if devices.is_explicit:
        cases = {"magnitude": "fanin_24,0", "rigl": "fanin_4,1"}
    for name, kind in cases.items():
        updater = helpers.make_updater(name, sparsity_type=kind)
        tx, masks = updater.wrap_optax(optax.identity()), {}
        for layout in (None, "both"):
            with on(devices, layout):
                params, grads = (place(devices, tree(seed), layout) for seed in (0, 1))
                state = jax.jit(tx.init)(params)._replace(count=jnp.int32(3))
                masks[layout] = jax.jit(tx.update)(grads, state, params)[1].masks
        for layer in ("in", "out"):
            both = [masks[layout][layer]["kernel"] for layout in ("both", None)]
            same(*both, params[layer]["kernel"])


def a_marked_hook_that_joins_entries_makes_the_masks_of_one_device(devices):
    def normalize(self, params, sparse_state=None, grads=None):
        return jax.tree.map(lambda w: jnp.abs(w - jnp.max(w, -1, keepdims=True)), params)

    masks = {}
    for mark in (lambda hook: hook, sparsity.elementwise):
        cls = type("Marked", (sparsity.MagnitudePruning,), {"calculate_scores": mark(normalize)})
        updater = cls(sparsity_distribution_fn=sparsity.Uniform(0.5))
        for layout in (None, "both"):
            with on(devices, layout):
                params = place(devices, tree(0), layout)
                state = jax.jit(updater.init_state)(params)
                masks[mark, layout] = jax.jit(updater.update_state)(state, params, params).masks
    expected, *marked_or_placed = masks.values()
    for actual in marked_or_placed:
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def initial_weights_are_pruned_as_on_one_device(devices):
    def loss(params, x):
        return sum(jnp.sum(w**2 * jnp.abs(w) * x) for w in jax.tree.leaves(params))

    for name in ("grasp",) if devices.is_explicit else ("snip", "synflow"):
        data = {"fn": loss, "inputs": jnp.ones(())}
        if name != "synflow":
            data = {"loss_fn": loss, "batches": [1.0, 2.0]}
        masks = {}
        for layout in (None, "both"):
            with on(devices, layout):
                params = place(devices, tree(0), layout)
                masks[layout] = sparsity.prune_at_init(name, params, 0.8, **data)[1]
        jax.tree.map(np.testing.assert_array_equal, masks["both"], masks[None])
        for layer, layer_mask in masks["both"].items():
            assert layer_mask["kernel"].sharding.spec == params[layer]["kernel"].sharding.spec


def budgets_and_rounded_groups_start_inside_shard_map(devices):
    """Each device makes the masks of replicated parameters."""
    params = {"in": jnp.ones((4, 8)), "out": jnp.ones((8, 4))}
    graph = sparsity.trace(lambda p, x: x @ p["in"] @ p["out"], params, jnp.ones((1, 4)))
    pruners = (
        sparsity.MagnitudePruning(
            sparsity_distribution_fn=sparsity.budget(graph, nbytes=0.3),
            sparsity_type=sparsity.Block((2, 2)),
        ),
        sparsity.MagnitudePruning(
            sparsity_distribution_fn=sparsity.Uniform(0.5),
            scope=sparsity.Coupled(graph, round_to=3),
        ),
    )
    for pruner in pruners:

        def prune(params, pruner=pruner):
            return pruner.instant_sparsify(params)[1]

        expected = jax.tree.map(np.asarray, prune(params))
        with jax.set_mesh(devices.mesh):
            mapped = jax.shard_map(prune, in_specs=P(), out_specs=P(), check_vma=False)
            jax.tree.map(np.testing.assert_array_equal, jax.jit(mapped)(params), expected)


_BOTH = [
    every_second_algorithm_gives_bit_equal_masks,
    groups_of_outputs_share_their_inputs_as_on_one_device,
    a_marked_hook_that_joins_entries_makes_the_masks_of_one_device,
    initial_weights_are_pruned_as_on_one_device,
    budgets_and_rounded_groups_start_inside_shard_map,
]
CASES = {"Auto": _BOTH, "Explicit": _BOTH}
