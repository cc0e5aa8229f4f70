"""Compact models on eight devices: values, gradients, and where the kept values lie."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsity

LAYERS, WIDTH = 4, 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, WIDTH)).astype(np.float32)


def scanned(params, x):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    return jax.lax.scan(layer, x @ params["first"], params["layers"])[0]


def multiplied(params, x):
    return jnp.tanh(x @ params["first"])


def experts(params, x):
    """Multiplies rows, of which each expert has a copy."""
    rows = jnp.stack([x.reshape(2, 4, WIDTH)] * LAYERS)
    return jnp.tanh(jnp.einsum("lsbi,lio->slbo", rows, params["layers"]))


def draw(pattern):
    """Pruned parameters and masks."""
    params = {
        "first": RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        "layers": RNG.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 4,
    }
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.75),
        sparsity_type=pattern,
        batch_axes=lambda path, param: param.ndim - 2,
    )
    return pruner.instant_sparsify(jax.tree.map(jnp.asarray, params))


def gradients(apply, params, x):
    return jax.grad(lambda params: (apply(params, x) ** 2).sum())(params)


def check(devices, pattern, specs, name, fn=scanned):
    """Compares gradients on the mesh with those on one device; returns the model on the mesh."""
    params, masks = draw(pattern)
    params, masks = ({key: tree[key] for key in specs} for tree in (params, masks))
    expected = gradients(fn, params, X)
    with jax.set_mesh(devices.mesh):
        there = {key: devices.put(leaf, *specs[key]) for key, leaf in params.items()}
        x = devices.put(X, "a")
        graph = sparsity.trace(fn, there, x)
        state = optax.adam(0.1).init(there)
        model = sparsity.compact(graph, there, masks, state, optax.adam(0.1))
        assert set(model.formats.values()) == {name}
        np.testing.assert_allclose(
            jax.jit(model.apply)(model.params, x), fn(params, X), rtol=1e-5, atol=1e-5
        )
        # The sharding is a part of the type on Explicit axes.
        assert jax.eval_shape(model.apply, model.params, x) == jax.eval_shape(fn, there, x)
        grads = jax.jit(lambda model, params, x: gradients(model.apply, params, x))(
            model, model.params, x
        )
        dense = model.dense(grads)
    for key, leaf in dense.items():
        kept = expected[key] * masks[key]
        np.testing.assert_allclose(leaf, kept, rtol=1e-4, atol=1e-5)
    return model


def replicated_values_give_the_gradients_of_one_device(devices):
    specs = {"first": (), "layers": ()}
    check(devices, sparsity.Unstructured(), specs, "values")


def stacks_of_values_stay_sharded_by_layer(devices):
    specs = {"first": (), "layers": ("b",)}
    model = check(devices, sparsity.Unstructured(), specs, "values")
    for leaf in (model.params["layers"], model.indices["layers"], model.opt_state[0].mu["layers"]):
        assert leaf.sharding.is_equivalent_to(devices.sharding("b"), leaf.ndim), leaf.sharding


def groups_stay_sharded_by_output(devices):
    specs = {"first": (None, "b")}
    model = check(devices, sparsity.FanIn(4), specs, "grouped", multiplied)
    dense = model.dense(model.params)["first"]
    if devices.is_explicit:
        assert dense.sharding.spec == P(None, "b")
    for leaf in (model.params["first"], model.indices["first"]):
        assert leaf.sharding.is_equivalent_to(devices.sharding("b"), leaf.ndim), leaf.sharding


def models_of_groups_are_mapped_over_rows_that_the_mesh_divides(devices):
    specs = {"first": (None, "b")}
    model = check(devices, sparsity.FanIn(4), specs, "grouped", multiplied)
    with jax.set_mesh(devices.mesh):
        x = devices.put(X, "a")
        mapped = jax.vmap(lambda row: model.apply(model.params, row[None])[0])
        np.testing.assert_allclose(
            jax.jit(mapped)(x), jax.jit(model.apply)(model.params, x), rtol=1e-5, atol=1e-5
        )
        step = jax.jit(jax.grad(lambda x: (mapped(x) ** 2).sum()))
        expected = jax.grad(lambda x: (model.apply(model.params, x) ** 2).sum())(x)
        np.testing.assert_allclose(step(x), expected, rtol=1e-5, atol=1e-5)


def experts_stay_sharded_by_matrix_and_by_output(devices):
    for pattern, name, spec in (
        (sparsity.FanIn(4), "grouped", ("b",)),
        (sparsity.FanIn(4), "grouped", (None, None, "b")),
        (sparsity.Unstructured(), "values", ("b",)),
    ):
        model = check(devices, pattern, {"layers": spec}, name, experts)
        names = ["b"] if spec[0] else [None, "b"]
        for leaf in (model.params["layers"], model.indices["layers"]):
            assert leaf.sharding.is_equivalent_to(devices.sharding(*names), leaf.ndim)


def dense_slices_stay_sharded_as_the_model_reads_them(devices):
    params, masks = draw(sparsity.Unstructured())
    masks = {"first": masks["first"]}
    with jax.set_mesh(devices.mesh):
        there, x = {"first": devices.put(params["first"], None, "b")}, devices.put(X, "a")
        graph = sparsity.trace(multiplied, there, x)
        model = sparsity.compact(
            graph, there, masks, formats={("first",): "dense"}, outside="frozen"
        )
        outputs = jax.jit(model.apply)(model.params, x)
        expected = multiplied(there, x)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    if devices.is_explicit:  # the type of the model's outputs; XLA chooses others
        assert outputs.sharding.is_equivalent_to(expected.sharding, 2), outputs.sharding


def entries_sharded_within_slices_are_refused_with_a_remedy(devices):
    params, masks = draw(sparsity.Unstructured())
    with jax.set_mesh(devices.mesh):
        there = {"first": devices.put(params["first"], None, "b")}
        graph = sparsity.trace(multiplied, there, devices.put(X, "a"))
        with pytest.raises(ValueError, match=r"'first' of shape .*is sharded along axis 1"):
            sparsity.compact(graph, there, {"first": masks["first"]})


def models_run_within_shard_map(devices):
    params, masks = draw(sparsity.Unstructured())
    expected = gradients(scanned, params, X)
    graph = sparsity.trace(scanned, params, X)
    model = sparsity.compact(graph, params, masks)
    small = sparsity.shrink(graph, params, masks)
    with jax.set_mesh(devices.mesh):
        for apply, values in ((model.apply, model.params), (small.apply, small.params)):
            step = jax.shard_map(
                lambda values, x, apply=apply: gradients(apply, values, x),
                in_specs=(P(), P("a")),
                out_specs=P(),
            )
            grads = jax.jit(step)(values, devices.put(X, "a"))
            grads = model.dense(grads) if values is model.params else grads
            for key, leaf in grads.items():
                kept = expected[key] * masks[key]
                np.testing.assert_allclose(leaf * masks[key], kept, rtol=1e-4, atol=1e-5)


def masks_move_as_on_one_device(devices):
    """Compares SET and RigL on a mesh, where groups and values stay sharded, with one device."""
    # Groups and values, one layer and a scan meet axes of both kinds; RigL moves on both.
    cases = [
        (sparsity.RigL, sparsity.FanIn(4), {"first": (None, "b")}, multiplied),
        (sparsity.RigL, sparsity.Unstructured(), {"first": (), "layers": ("b",)}, scanned),
    ]
    if devices.is_explicit:
        cases = [
            (sparsity.RigL, sparsity.FanIn(4), {"first": (), "layers": ()}, scanned),
            (sparsity.SET, sparsity.Unstructured(), {"first": ()}, multiplied),
        ]
    for kind, pattern, specs, fn in cases:
        params, masks = draw(pattern)
        params, masks = ({key: tree[key] for key in specs} for tree in (params, masks))
        pruner = kind(
            scheduler=sparsity.PeriodicSchedule(10),
            sparsity_type=pattern,
            batch_axes=lambda path, param: param.ndim - 2,
        )

        def move(model, values, state, x, pruner=pruner):
            def loss(apply, values):  # groups of two calls are ranked after the backward pass
                y = apply(values, x)
                return jnp.mean(y + apply(values, x) if len(model.layouts) == 2 else y)

            return model.move(pruner, values, state, 0, loss)

        def run(params, x, fn=fn, masks=masks, move=move):
            graph = sparsity.trace(fn, params, x)
            model = sparsity.compact(graph, params, masks)
            state = optax.adam(0.1).init(model.params)
            return model, jax.jit(move)(model, model.params, state, x)

        x = np.round(X)
        _, expected = run(jax.tree.map(jnp.asarray, params), x)
        with jax.set_mesh(devices.mesh):
            there = {key: devices.put(leaf, *specs[key]) for key, leaf in params.items()}
            model, (moved, values, _) = run(there, devices.put(x, "a"))
            moved_masks, dense = moved.masks, moved.dense(values)
        for key, mask in expected[0].masks.items():
            np.testing.assert_array_equal(moved_masks[key], mask)
            np.testing.assert_array_equal(dense[key], expected[0].dense(expected[1])[key])
            assert (moved_masks[key] != masks[key]).any()
        for key, leaf in model.indices.items():
            new = moved.indices[key]
            assert new.sharding == leaf.sharding, (new.sharding, leaf.sharding)  # compiles once


_BOTH = [
    masks_move_as_on_one_device,
    models_run_within_shard_map,
    replicated_values_give_the_gradients_of_one_device,
    groups_stay_sharded_by_output,
    experts_stay_sharded_by_matrix_and_by_output,
    models_of_groups_are_mapped_over_rows_that_the_mesh_divides,
    dense_slices_stay_sharded_as_the_model_reads_them,
    entries_sharded_within_slices_are_refused_with_a_remedy,
]
# Explicit axes cannot divide layers of a scan.
CASES = {"Auto": [*_BOTH, stacks_of_values_stay_sharded_by_layer], "Explicit": _BOTH}
