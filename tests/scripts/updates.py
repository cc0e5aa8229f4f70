"""Whole updates on a mesh: runs, placement, memory."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsity
from tests import helpers
from tests.scripts.devices import same
from tests.selection_oracle import best

SPECS = {  # of the kernels of two layers and of the bias
    "data parallel": (P(), P(), P()),
    "fsdp": (P(("a", "b")), P(("a", "b")), P(("a", "b"))),
    "both": (P("a", "b"), P("b", "a"), P("b")),
}


def tree(seed, rows=16, columns=64):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {
        "in": {"kernel": draw(rows, columns), "bias": draw(columns)},
        "out": {"kernel": draw(columns, rows)},
    }


def place(devices, values, layout):
    """The values on the mesh, or on one device without a layout."""
    if layout is None:
        return jax.tree.map(jnp.asarray, values)
    first, second, bias = SPECS[layout]
    specs = {"in": {"kernel": first, "bias": bias}, "out": {"kernel": second}}
    return jax.tree.map(lambda x, spec: devices.put(x, *spec), values, specs)


def on(devices, layout):
    return jax.set_mesh(devices.mesh) if layout else contextlib.nullcontext()


def a_compact_state_of_stacked_layers_needs_no_communication(devices):
    """State of kept weights is sharded as its layers; other shardings are refused by name.

    RigL runs on Explicit axes, fixed masks on Auto axes, where XLA chooses what communicates.
    """
    algorithm = "rigl" if devices.is_explicit else "static_sparse"

    def start(params, is_compact):
        updater = helpers.make_updater(
            algorithm, batch_axes=1, use_compact_state=is_compact, skip_gradients=False
        )
        tx = updater.wrap_optax(optax.adam(0.1))
        shardings = sparsity.sharding_like(params, jax.eval_shape(tx.init, params))
        return tx, jax.jit(tx.init, out_shardings=shardings)(params)

    draw = np.random.default_rng(0).normal(size=(3, 8, 12, 20)).astype(np.float32)
    spec = ("a", "b"), *[None, None][: 2 * devices.is_explicit]  # as jit returns arrays
    params, *grads = (devices.put(x, *spec) for x in draw)
    with jax.set_mesh(devices.mesh):
        landed = []
        for is_compact in (True, False):
            tx, state = start(params, is_compact)
            first = jax.tree.leaves(state.inner_state)[-1]
            update = jax.jit(tx.update).lower(grads[0], state, params).compile()
            new = params
            for grad in grads:
                updates, state = update(grad, state, new)
                new = optax.apply_updates(new, updates)
            landed.append(new)
            moment = jax.tree.leaves(state.inner_state)[-1]
            assert moment.sharding.spec[0] == ("a", "b"), moment.sharding
            assert not is_compact or first.sharding == moment.sharding, first.sharding
            if algorithm == "static_sparse":
                assert not re.search("all-gather|all-reduce|all-to-all", update.as_text())
        same(*landed, params)
        cut = devices.put(draw[0], None, "a")
        updater = helpers.make_updater("rigl", batch_axes=1, use_compact_state=True)
        with pytest.raises(ValueError, match=r"\(8, 12, 20\).*axes \[1\].*batch_axes"):
            updater.wrap_optax(optax.adam(0.1)).init(cut)


def a_compact_state_moves_inside_shard_map(devices):
    """Each device trains its layer as one device would, on Explicit axes from masks of the user."""
    updater = helpers.make_updater("rigl", use_compact_state=True, batch_axes=1)
    params, *grads = np.random.default_rng(0).normal(size=(3, 8, 1, 6, 5)).astype(np.float32)
    layers = P(("a", "b"))
    placed = jax.tree.map(lambda x: devices.put(x[:, 0], *layers), (params, grads))
    masks = np.arange(30).reshape(1, 6, 5) % 2 if devices.is_explicit else None
    tx = updater.wrap_optax(optax.adam(0.1), masks)

    def train(params, grads):
        state = tx.init(params)
        for grad in grads:
            updates, state = tx.update(grad, state, params)
            params = optax.apply_updates(params, updates)
        return params

    expected = jax.jit(jax.vmap(train))(params, grads)[:, 0]
    with jax.set_mesh(devices.mesh):
        mapped = jax.jit(jax.shard_map(train, in_specs=layers, out_specs=layers))(*placed)
    same(mapped, expected, placed[0])


def _loss(params, x, y, is_explicit):
    if is_explicit:  # where a product would have to name its sharding
        losses = jax.tree.map(lambda w, t: jnp.sum((jnp.tanh(w) - t) ** 2), params, y)
        return sum(jax.tree.leaves(losses))
    hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return jnp.mean((hidden @ params["out"]["kernel"] - y) ** 2)


def _train(devices, layout, x, y):
    params = place(devices, tree(0), layout)
    updater = helpers.make_updater(
        "rigl", use_packed_masks=True, custom_sparsity_map={"out/kernel": None}
    )
    # With a smaller eps regrown weights would all move equally far, and tie in the next update.
    tx = updater.wrap_optax(optax.adam(0.05, eps=0.05))
    shardings = sparsity.sharding_like(params, jax.eval_shape(tx.init, params))
    leaf_sharding = jax.tree.map(lambda leaf: leaf.sharding, params)

    @functools.partial(jax.jit, out_shardings=(leaf_sharding, shardings))
    def step(params, state, x, y):
        grads = jax.grad(_loss)(params, x, y, devices.is_explicit)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init, out_shardings=shardings)(params)
    for _ in range(5):
        params, state = step(params, state, x, y)
    if layout:  # the bytes divide as the entries do
        assert step._cache_size() == 1
        mask, like = state.masks["in"]["kernel"], params["in"]["kernel"]
        assert mask.sharding.is_equivalent_to(like.sharding, 2), (layout, mask.sharding)
    return params, jax.tree.map(np.asarray, state.masks)


def a_run_agrees_with_one_device_compiles_once_and_keeps_its_placement(devices):
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(8, 16)).astype(np.float32) for _ in range(2))
    y = tree(1) if devices.is_explicit else y
    params, masks = _train(devices, None, x, y)
    for layout in ("both",) if devices.is_explicit else ("data parallel", "fsdp", "both"):
        with on(devices, layout):
            there = place(devices, y, layout) if devices.is_explicit else devices.put(y, "a")
            actual, actual_masks = _train(devices, layout, devices.put(x, "a"), there)
        jax.tree.map(np.testing.assert_array_equal, actual_masks, masks)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
        jax.tree.map(close, actual, params)


def a_jitted_init_places_masks_as_their_parameters(devices):
    params = place(devices, tree(0), "both")
    params |= {"narrow": devices.put(np.ones((16, 12), np.float32), "a", "b")}
    with jax.set_mesh(devices.mesh):
        for name in ("magnitude", "rigl"):
            packed = (name == "rigl") != devices.is_explicit
            updater = helpers.make_updater(name, use_packed_masks=packed)
            tx = updater.wrap_optax(optax.sgd(0.1))
            # Eight bytes of 64 entries divide among four devices, two of 12 do not.
            narrow = devices.sharding("a") if packed else devices.sharding("a", "b")
            for init in (tx.init, jax.jit(tx.init)):
                masks = init(params).masks
                wide = masks["in"]["kernel"].sharding
                assert wide.is_equivalent_to(devices.sharding("a", "b"), 2), (name, packed)
                assert masks["narrow"].sharding.is_equivalent_to(narrow, 2), (name, packed)


def masks_of_the_user_are_placed_as_their_parameter(devices):
    draw = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    bits = (draw > 0).astype(np.uint8)
    params, masks = devices.put(draw, "a", "b"), devices.put(bits, "b", "a")
    updater = helpers.make_updater("rigl")
    expected = jax.jit(updater.wrap_optax(optax.sgd(0.1), masks=bits).init)(draw)
    expected = expected._replace(count=jnp.int32(3))
    with jax.set_mesh(devices.mesh):
        tx = updater.wrap_optax(optax.sgd(0.1), masks=masks)
        state = jax.jit(tx.init)(params)._replace(count=jnp.int32(3))
        same(state.masks, bits, params)
        _, moved = jax.jit(tx.update)(params, state, params)
    _, expected = jax.jit(tx.update)(draw, expected, draw)
    same(moved.masks, expected.masks, params)


def packed_masks_on_fewer_devices_than_their_parameters_compile_one_step(devices):
    """The four devices of "b" divide neither 2 bytes nor 6; the two of "a" divide both."""
    specs = {"narrow": P("a", "b"), "both": P(None, ("a", "b"))}
    narrow = P("a", None) if devices.is_explicit else P("a")  # as jit returns arrays
    expected = {"narrow": narrow, "both": P(None, "a")}
    draw = np.random.default_rng(0).normal(size=(4, 48)).astype(np.float32)
    values = {"narrow": draw[:, :12], "both": draw}
    params = {name: devices.put(x, *specs[name]) for name, x in values.items()}
    params["scalar"] = devices.put(np.float32(1))
    expected["scalar"] = P(None) if devices.is_explicit else P()
    options = {"use_packed_masks": True, "filter_fn": lambda path, param: True}
    tx = helpers.make_updater("magnitude", **options).wrap_optax(optax.adam(0.1))
    shardings = sparsity.sharding_like(params, jax.eval_shape(tx.init, params))
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    step = jax.jit(tx.update)
    for _ in range(2):
        placed = {name: mask.sharding.spec for name, mask in state.masks.items()}
        assert placed == expected, placed
        _, state = jax.block_until_ready(step(params, state, params))
    assert step._cache_size() == 1


def arrays_on_explicit_axes_need_no_mesh_in_use(devices):
    params = place(devices, tree(0), "both")
    for name in ("magnitude", "random", "rigl"):
        updater = helpers.make_updater(name, use_packed_masks=name == "rigl")
        tx = updater.wrap_optax(optax.sgd(0.1))
        state = tx.init(params)
        with jax.set_mesh(devices.mesh):
            expected = tx.init(params)
        jax.tree.map(np.testing.assert_array_equal, state.masks, expected.masks)
        if name != "rigl":
            pruned, masks = updater.instant_sparsify(params)
            for layer in ("in", "out"):
                like = params[layer]["kernel"]
                same(pruned[layer]["kernel"], like * (masks[layer]["kernel"] != 0), like)


def a_leaf_off_the_mesh_and_an_empty_one_train_beside_leaves_on_explicit_axes(devices):
    draw = tree(0)
    for name in ("magnitude", "global_magnitude", "rigl", "top_kast"):
        masks = []
        for layout in (None, "both"):
            params = place(devices, draw, layout)
            empty = np.zeros((0, 64), np.float32)
            params["empty"] = devices.put(empty, "a") if layout else jnp.asarray(empty)
            params["off"] = jnp.asarray(draw["in"]["kernel"] ** 3)
            updater = helpers.make_updater(name, use_packed_masks=name == "magnitude")
            tx = updater.wrap_optax(optax.adam(0.1))
            state = tx.init(params)
            # One algorithm of each scope runs without jit. The others start where masks move: a
            # step on the mesh returns scalars of a new type, for which the next would compile.
            is_eager = name in ("magnitude", "global_magnitude")
            state = state if is_eager else state._replace(count=jnp.int32(1))
            update = tx.update if layout and is_eager else jax.jit(tx.update)
            if layout:  # types of both branches of the step agree
                with jax.set_mesh(devices.mesh):
                    jax.eval_shape(tx.update, params, state, params)
            for _ in range(2 if is_eager else 1):
                updates, state = update(params, state, params)
            masks.append(state.masks)
        jax.tree.map(np.testing.assert_array_equal, *masks)
        assert updates["in"]["kernel"].sharding.is_equivalent_to(params["in"]["kernel"].sharding, 2)


def layers_on_several_meshes_are_ranked_alone_and_refused_together(devices):
    draw, kinds = tree(0), devices.mesh.axis_types
    all_devices = np.array(jax.devices())
    meshes = [jax.sharding.Mesh(all_devices[:4].reshape(2, 2), ("a", "b"), axis_types=kinds)]
    for part in (all_devices[4:], all_devices):
        meshes.append(jax.sharding.Mesh(part, ("c",), axis_types=kinds[:1]))

    def put(values, second):
        if second is None:
            return jax.tree.map(jnp.asarray, values)
        first = jax.sharding.NamedSharding(meshes[0], P("a", "b"))
        layers = {"in": values["in"]["kernel"], "out": values["out"]["kernel"]}
        specs = {"in": first, "out": jax.sharding.NamedSharding(second, P("c"))}
        return {key: {"kernel": jax.device_put(layers[key], specs[key])} for key in layers}

    # Masks that move are made as others are, so that one pair of meshes and one kind are enough.
    cases = {"global_magnitude": meshes[1:]}
    cases |= (
        {"rigl": (None, meshes[2])} if devices.is_explicit else {"magnitude": (None, *meshes[1:])}
    )
    for name, seconds in cases.items():
        masks = []
        for second in seconds:
            params = put(draw, second)
            updater = helpers.make_updater(name, skip_gradients=False)
            tx = updater.wrap_optax(optax.sgd(0.5))
            state = tx.init(params)._replace(count=jnp.int32(3))
            if name == "global_magnitude":
                with pytest.raises(
                    ValueError, match=r"'in/kernel' lies on .*'out/kernel' on .*one"
                ):
                    tx.update(params, state, params)
                continue
            state = tx.update(params, state, params)[1]
            masks.append([state.masks[key]["kernel"] for key in ("in", "out")])
        for actual in masks[1:]:
            jax.tree.map(np.testing.assert_array_equal, actual, masks[0])


def a_state_from_the_mesh_in_use_compiles_one_step_and_pruning_again_nothing(devices):
    params, grads = (place(devices, tree(seed), "both") for seed in (0, 1))
    tx = helpers.make_updater("rigl").wrap_optax(optax.adam(0.1))
    pruner = sparsity.GlobalMagnitudePruning(sparsity=0.5)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(devices.mesh):
        weights, state = params, tx.init(params)
        for _ in range(3):
            # On few cores, steps in flight may hold the threads for which a collective waits.
            weights, state = jax.block_until_ready(step(weights, state, grads))
        pruner.instant_sparsify(params)
        with helpers.counted_programs() as count:
            pruner.instant_sparsify(params)
    assert step._cache_size() == 1
    assert count == [0]


def factored_moments_lie_as_the_axes_that_they_keep(devices):
    params = place(devices, tree(0), "both")
    tx = optax.adafactor(0.1, min_dim_size_to_factor=8)
    with jax.set_mesh(devices.mesh):
        shardings = sparsity.sharding_like(params, jax.eval_shape(tx.init, params))
        state = jax.jit(tx.init, out_shardings=shardings)(params)
        _, after = jax.jit(tx.update)(params, state, params)
    assert state[0].v_row["in"]["kernel"].sharding.spec == P("a")
    assert jax.tree.map(lambda leaf: leaf.sharding, after) == shardings


def no_array_has_the_size_of_an_unsharded_parameter(devices):
    params = place(devices, tree(0, 256, 512), "both")
    largest = 256 * 512 // 8
    cases = {"rigl": True, "global_saliency": False}  # with packed masks
    for name, packed in ({"set": True} if devices.is_explicit else cases).items():
        updater = helpers.make_updater(name, use_packed_masks=packed)
        tx = updater.wrap_optax(optax.adam(0.01))

        def step(grads, state, params, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        with jax.set_mesh(devices.mesh):
            shapes = jax.eval_shape(tx.init, params)
            state = jax.tree.map(
                lambda leaf, leaf_sharding: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=leaf_sharding
                ),
                shapes,
                sparsity.sharding_like(params, shapes),
            )
            lowered = jax.jit(step, donate_argnums=(1, 2)).lower(params, state, params)
        shapes = re.findall(r"[a-z]+\d+\[([\d,]+)\]", lowered.compile().as_text())
        sizes = {math.prod(map(int, shape.split(","))) for shape in shapes}
        assert largest in sizes  # what the search must find: a device's part of a kernel
        assert max(sizes) <= 8 * largest - 1, (name, max(sizes) / largest)


def srigl_counts_the_weights_of_neurons_where_masks_lie(devices):
    """No device holds a mask of all inputs, whose number the tiles of one device do not divide."""
    draw = np.random.default_rng(0).normal(size=(2, 3, 1000, 64)).astype(np.float32)
    spec = (None, "b", None) if devices.is_explicit else (None, "b")
    params, grads = (devices.put(x, *spec) for x in draw)
    tx = helpers.make_updater("srigl").wrap_optax(optax.sgd(0.1))
    with jax.set_mesh(devices.mesh):
        state = jax.jit(tx.init)(params)
        update = jax.jit(tx.update).lower(grads, state, params).compile()
    gathered = re.findall(r"(?:pred|u8)\[([\d,]+)\]\S* all-gather", update.as_text())
    assert all(math.prod(map(int, x.split(","))) < draw[0].size for x in gathered), gathered


def updates_inside_shard_map_and_pmap_prune_each_part(devices):
    updater = helpers.make_updater("magnitude", update_start_step=0, update_end_step=0)
    tx = updater.wrap_optax(optax.sgd(0.1))
    w = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)

    def train(w):
        updates, state = tx.update(w, tx.init(w), w)
        return optax.apply_updates(w, updates), state.masks

    spec = P(("a", "b"))
    mapped = jax.jit(jax.shard_map(train, mesh=devices.mesh, in_specs=spec, out_specs=spec))
    actual = [mapped(w)]
    if hasattr(jax, "pmap"):
        actual.append([part[:, 0] for part in jax.pmap(train)(w[:, None])])
    expected = np.stack([best(np.abs(row), 16) for row in w])
    for kept, mask in actual:
        np.testing.assert_array_equal(mask, expected)
        np.testing.assert_array_equal(np.asarray(kept) != 0, expected != 0)


def a_tree_inside_shard_map_gets_the_masks_of_each_part(devices):
    shapes = {"large": (128, 128), "larger": (160, 128), "small": (6, 10)}
    rng = np.random.default_rng(0)
    trees = [
        {key: rng.normal(size=(8, *shape)).astype(np.float32) for key, shape in shapes.items()}
        for _ in range(2)
    ]
    updater = helpers.make_updater("rigl", update_start_step=0, update_end_step=0)
    tx = updater.wrap_optax(optax.sgd(0.1))

    def update_masks(params, grads):
        params, grads = jax.tree.map(lambda x: x[0], (params, grads))
        state = tx.update(grads, tx.init(params), params)[1]
        return jax.tree.map(lambda mask: mask[None], state.masks)

    spec = P(("a", "b"))
    mapped = jax.shard_map(update_masks, mesh=devices.mesh, in_specs=spec, out_specs=spec)
    masks, update_alone = jax.jit(mapped)(*trees), jax.jit(update_masks)
    for i in range(8):
        shards, part = jax.tree.map(lambda x, i=i: x[i : i + 1], (trees, masks))
        jax.tree.map(np.testing.assert_array_equal, part, update_alone(*shards))


_BOTH = [
    a_compact_state_of_stacked_layers_needs_no_communication,
    a_compact_state_moves_inside_shard_map,
    a_run_agrees_with_one_device_compiles_once_and_keeps_its_placement,
    a_jitted_init_places_masks_as_their_parameters,
    masks_of_the_user_are_placed_as_their_parameter,
    packed_masks_on_fewer_devices_than_their_parameters_compile_one_step,
    layers_on_several_meshes_are_ranked_alone_and_refused_together,
    a_state_from_the_mesh_in_use_compiles_one_step_and_pruning_again_nothing,
    factored_moments_lie_as_the_axes_that_they_keep,
    no_array_has_the_size_of_an_unsharded_parameter,
    srigl_counts_the_weights_of_neurons_where_masks_lie,
]
CASES = {
    "Auto": [
        *_BOTH,
        updates_inside_shard_map_and_pmap_prune_each_part,
        a_tree_inside_shard_map_gets_the_masks_of_each_part,
    ],
    "Explicit": [
        *_BOTH,
        arrays_on_explicit_axes_need_no_mesh_in_use,
        a_leaf_off_the_mesh_and_an_empty_one_train_beside_leaves_on_explicit_axes,
    ],
}
