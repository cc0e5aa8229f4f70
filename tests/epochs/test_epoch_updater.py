"""Epoch strategies within a train step give what the functions give from outside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import EpochStrategy, pruning, pruning_apply
from tests.eight_devices import KINDS, run
from tests.epochs.epoch_oracle import (
    kernels,
    parameters,
    strategy,
)
from tests.helpers import normal

MIXED = (
    strategy(1, "unstr_global", 0.8)
    | strategy(2, "str_unified_local", (2, 4))
    | strategy(3, "unstr_local", {"Dense_0-kernel": 0.3, "Conv_1": 0.4})
    | strategy(4, "unstr_local", {"Dense_0-kernel": 0.1, "Conv_1": 0.2})
    | strategy(5, "str_local", {"Dense_1-kernel": "1:4", "Conv_0-kernel": sparsity.NByM(1, 3, 0)})
    | strategy(7, "unstr_global", 0.5)
)
STEPS_PER_EPOCH = 3
SGD = optax.sgd(0.5, momentum=0.5)  # powers of two: the same bits, however it is compiled


def gradients(params, seed):
    return jax.tree.map(
        lambda w, g: (0.1 * w + 0.3 * g).astype(w.dtype), params, parameters(seed + 1)
    )


def restarted(opt_state, old, new):
    """The optimizer state with the momentum of returning weights at 0."""

    def restart(layer, leaf, trace):
        before, mask = ((tree or {}).get(layer, {}).get(leaf) for tree in (old, new))
        if before is None:
            return trace
        mask = np.ones_like(before) if mask is None else mask
        return jnp.where((np.asarray(mask) > 0) & (np.asarray(before) == 0), 0, trace)

    trace = {
        layer: {leaf: restart(layer, leaf, x) for leaf, x in leaves.items()}
        for layer, leaves in opt_state[0].trace.items()
    }
    return (opt_state[0]._replace(trace=trace), *opt_state[1:])


def trained_by_functions(params, tx, epochs):
    """Masks and parameters after each step of a loop that calls the two functions."""
    opt_state, mask_key, steps = tx.init(params), None, []
    for count in range(epochs * STEPS_PER_EPOCH):
        grads = gradients(params, count)
        if count % STEPS_PER_EPOCH == 0:
            old = mask_key
            _, mask_key = pruning(params, count // STEPS_PER_EPOCH, mask_key, MIXED)
            params, mask_key = pruning_apply(params, mask_key)
            opt_state = restarted(opt_state, old, mask_key)
        updates, opt_state = tx.update(grads, opt_state, params)
        params, mask_key = pruning_apply(optax.apply_updates(params, updates), mask_key)
        steps.append((params, mask_key))
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_updater_gives_the_masks_and_weights_that_the_functions_give(dtype):
    params = jax.tree.map(lambda w: jnp.asarray(w, dtype), parameters())
    expected = trained_by_functions(params, SGD, 8)
    updater = EpochStrategy(MIXED, STEPS_PER_EPOCH)
    tx = updater.wrap_optax(SGD)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    names = jax.tree.structure(opt_state.masks)
    for count, (expected_state, mask_key) in enumerate(expected):
        params, opt_state = step(params, opt_state, gradients(params, count))
        assert jax.tree.structure(opt_state.masks) == names
        jax.tree.map(np.testing.assert_array_equal, params, expected_state)
        for layer, masks in opt_state.masks.items():
            for leaf, mask in masks.items():
                held = None if mask_key is None else mask_key[layer][leaf]
                if mask is None:
                    assert held is None
                else:
                    np.testing.assert_array_equal(
                        mask, np.ones_like(mask) if held is None else held
                    )
    assert step._cache_size() == 1


@pytest.mark.slow
def test_the_updater_works_in_a_scan_with_packed_masks():
    params = jax.tree.map(jnp.asarray, parameters())
    grads = jax.tree.map(lambda *g: jnp.stack(g), *(parameters(seed) for seed in range(6)))
    schedule = {epoch: MIXED[epoch] for epoch in (1, 2)}
    runs = []
    for packed in (False, True):
        updater = EpochStrategy(schedule, 2, use_packed_masks=packed)
        tx = updater.wrap_optax(optax.sgd(0.1))

        def step(carry, grads, tx=tx):
            updates, opt_state = tx.update(grads, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), opt_state), None

        run = jax.jit(lambda params, tx=tx, step=step: jax.lax.scan(
            step, (params, tx.init(params)), grads)[0])  # fmt: skip
        runs.append(run(params))
    jax.tree.map(np.testing.assert_array_equal, runs[0][0], runs[1][0])
    assert runs[1][1].masks["Dense_0"]["kernel"].shape == (24, 2)
    zeros = {name: int((w == 0).sum()) for name, w in kernels(runs[0][0]).items()}
    assert zeros["Dense_0"] == 192  # (2, 4) at step 4


def test_epochs_that_differ_in_density_only_compile_one_selection():
    params = {"kernel": jnp.ones((8, 8))}

    def size(count):
        schedule = {}
        for i in range(count):
            schedule |= strategy(i, "unstr_unified_local", 0.9 - 0.1 * i)
        tx = EpochStrategy(schedule, 10).wrap_optax(optax.sgd(0.1))
        return len(jax.jit(tx.update).lower(params, tx.init(params), params).as_text())

    assert size(8) < 1.2 * size(1)


@pytest.mark.slow
def test_batch_axes_give_every_slice_its_own_mask():
    params = {"stack": jnp.asarray(normal(3, 4, 8) * np.array([[[100.0]], [[1]], [[1]]])),
              "biases": jnp.ones((3, 8))}  # fmt: skip
    updater = EpochStrategy(strategy(1, "unstr_unified_local", 0.25), 1, batch_axes=1)
    masks = updater.instant_sparsify(params)[1]
    assert masks["biases"] is None
    assert masks["stack"].sum(axis=(1, 2)).tolist() == [8, 8, 8]
    updater = EpochStrategy(strategy(1, "str_local", {"stack": sparsity.NByM(1, 4, 0)}), 1,
                            batch_axes=1)  # fmt: skip
    mask = updater.instant_sparsify(params)[1]["stack"]
    assert (np.asarray(mask).sum(axis=1) == 1).all()


@pytest.mark.slow
def test_tables_show_the_last_type_and_target_of_each_layer():
    params = jax.tree.map(jnp.asarray, parameters())
    updater = EpochStrategy(MIXED | strategy(8, "str_local", {"Dense_1-kernel": (2, 4)}), 1)
    rows = sparsity.reports.layer_summary(params, updater.init_state(params), updater)
    actual = {row.path: (row.type, row.target) for row in rows}
    assert actual["Dense_1/kernel"] == ("NByM(n=2, m=4, axis=-1)", 0.5)
    assert actual["Conv_0/kernel"] == ("Unstructured", 0.5)
    assert actual["Conv_1/bias"] == ("Unstructured", pytest.approx(0.8))
    assert actual["Dense_0/bias"] == ("", None)


@pytest.mark.slow
@KINDS
def test_on_eight_devices_masks_are_those_of_one_and_sharded_as_the_weights(kind):
    run("epochs", kind)
