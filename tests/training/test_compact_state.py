"""`use_compact_state` trains as the wrapped optimizer does, and keeps the state of kept weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import NamedSharding, PartitionSpec as P

import sparsity
from sparsity.compacting.state import densify_kept_states
from sparsity.masks.slice_layout import (
    kept_positions,
    scatter,
    slots_of_positions,
)
from sparsity.training.inner import KeptState
from tests.helpers import slow_but

SHAPES = {"kernel": (16, 24), "stack": (3, 8, 10), "bias": (24,)}
LABELS = {"kernel": "a", "stack": "b", "bias": "a"}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.01),
    "lion": lambda: optax.lion(0.01),
    "rmsprop": lambda: optax.rmsprop(0.01, momentum=0.9),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.01), 3),
    "chain": lambda: optax.chain(optax.clip(0.5), optax.ema(0.9), optax.sgd(0.1)),
    "masked": lambda: optax.masked(optax.adam(0.01), {"kernel": True, "stack": True, "bias": 0}),
    "partition": lambda: optax.partition({"a": optax.adam(0.01), "b": optax.sgd(0.1)}, LABELS),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.0, 30)),
}
REFUSED = {
    "adafactor": lambda: optax.adafactor(0.01),
    "muon": lambda: optax.contrib.muon(0.01),
    "means over parameters": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "a mask by the number of axes": lambda: optax.adamw(
        0.01, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    ),
    "sums along axes": lambda: optax.adaptive_grad_clip(0.1),
    "a flat vector": lambda: optax.flatten(optax.adam(0.1)),
    "a search along lines": lambda: optax.lbfgs(),
}


def arrays(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}


def updater(algorithm, is_compact=True, **options):
    moving = {"scheduler": sparsity.PeriodicSchedule(4, 2, 28)}
    config = {} if algorithm == "static_sparse" else moving
    config |= {"batch_axes": lambda path, _: int(path[-1] == "stack"), **options}
    return sparsity.create_updater_from_config(
        {"algorithm": algorithm, "sparsity": 0.7, "use_compact_state": is_compact, **config}
    )


def train(algorithm, optimizer, is_compact, steps=30, dtype=jnp.float32, jit=False, **options):
    tx = updater(algorithm, is_compact, **options).wrap_optax(optimizer)
    params = arrays(0, dtype)
    state = tx.init(params)
    update = jax.jit(tx.update, donate_argnums=1) if jit else tx.update
    for step in range(steps):
        updates, state = update(arrays(step + 1, dtype), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def check_bits(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        x, y = (np.atleast_1d(leaf).view(np.uint8) for leaf in (x, y))
        np.testing.assert_array_equal(x, y)


# Compiled programs round x * y + z once or twice, as loops are fused; these run by operation.
@pytest.mark.parametrize("name", slow_but(["adam"], OPTIMIZERS))
def test_weights_are_bit_equal_to_those_of_the_wrapped_optimizer(name):
    results = [train("rigl", OPTIMIZERS[name](), is_compact, 12) for is_compact in (True, False)]
    check_bits(results[0][0], results[1][0])
    check_bits(results[0][1].masks, results[1][1].masks)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("static_sparse", {"dtype": jnp.bfloat16}),
        *(
            pytest.param(algorithm, options, marks=pytest.mark.slow)
            for algorithm, options in (
                ("set", {"skip_gradients": False, "use_packed_masks": True, "dtype": jnp.bfloat16}),
                ("srigl", {"skip_gradients": False}),
                ("rigl", {"sparsity_type": "fanin_4", "use_packed_masks": True}),
                ("set", {"sparsity_type": "channel_-1"}),
            )
        ),
        # Masks move in the first step, in which weights outside the masks are not 0 yet.
        ("set", {"skip_gradients": False, "scheduler": sparsity.PeriodicSchedule(4)}),
    ],
)
def test_every_algorithm_of_a_constant_number_trains_to_the_same_bits(algorithm, options):
    train_adam = functools.partial(train, algorithm, optax.adam(0.01), jit=True)
    params, state = train_adam(True, **options)
    dense, dense_state = train_adam(False, **options)
    check_bits(params, dense)
    check_bits(state.masks, dense_state.masks)


@pytest.mark.slow
def test_moments_are_those_of_the_wrapped_optimizer_at_the_kept_entries():
    _, state = train("rigl", optax.adam(0.01), True, 12)
    _, dense = train("rigl", optax.adam(0.01), False, 12)
    mask = np.asarray(state.masks["kernel"])
    kept = np.asarray(dense.inner_state[0].nu["kernel"])[mask > 0]
    np.testing.assert_array_equal(state.inner_state.state[0].nu["kernel"], kept)
    layers = zip(dense.inner_state[0].mu["stack"], state.masks["stack"], strict=True)
    kept = [np.asarray(moment)[np.asarray(mask) > 0] for moment, mask in layers]
    np.testing.assert_array_equal(state.inner_state.state[0].mu["stack"], kept)


def test_the_state_holds_arrays_of_kept_values_by_slice_and_dense_leaves_as_they_are():
    tx = updater("rigl").wrap_optax(optax.adam(0.01))
    for init in (tx.init, jax.jit(tx.init), functools.partial(jax.eval_shape, tx.init)):
        state = init(arrays(0))
        assert isinstance(state.inner_state, KeptState)
        shapes = jax.tree.map(jnp.shape, state.inner_state.state[0].mu)
        # 30 % of 384 and, in each of three layers, of 80.
        assert shapes == {"kernel": (115,), "stack": (3, 24), "bias": (24,)}
        assert state.inner_state.positions["kernel"].dtype == jnp.int32


def test_the_global_norm_of_gradients_is_that_of_kept_gradients():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    params, dense = (train("rigl", clipped, kind, jit=True)[0] for kind in (True, False))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), params, dense)


@pytest.mark.slow
def test_gradients_that_are_not_finite_leave_pruned_weights_at_exact_zeros():
    mask = jnp.array([[1, 0, 0, 0]], jnp.uint8)
    params = jnp.array([[1.0, -0.0, 3e38, -2.0]])
    trainer = sparsity.StaticRandomSparse(use_compact_state=True)
    tx = trainer.wrap_optax(optax.sgd(0.5), masks=mask)
    grads = jnp.array([[2.0, jnp.nan, jnp.inf, 1.0]])
    updates, _ = tx.update(grads, tx.init(params), params)
    landed = np.asarray(optax.apply_updates(params, updates))
    np.testing.assert_array_equal(landed, [[0.0, 0.0, 0.0, 0.0]])
    assert not np.signbit(landed).any()


def test_masks_of_the_user_may_keep_other_numbers_in_each_slice():
    masks = {"kernel": None, "stack": np.zeros((3, 8, 10), np.uint8), "bias": None}
    masks["stack"].reshape(3, -1)[[0, 1, 1, 1], [5, 0, 33, 79]] = 1
    results = []
    for is_compact in (True, False):
        pruner = sparsity.MagnitudePruning(
            use_compact_state=is_compact, is_sparse_gradients=True, batch_axes=1
        )
        tx = pruner.wrap_optax(optax.adam(0.1), masks=masks)
        params, state = arrays(0), tx.init(arrays(0))
        for step in range(3):
            updates, state = jax.jit(tx.update)(arrays(step), state, params)
            params = optax.apply_updates(params, updates)
        results.append(params)
        if is_compact:
            assert state.inner_state.state[0].mu["stack"].shape == (3, 3)
    check_bits(*results)


@pytest.mark.slow
def test_updates_run_under_vmap_scan_and_an_outer_multi_steps():
    tx = optax.MultiSteps(updater("rigl", use_packed_masks=True).wrap_optax(optax.adam(0.1)), 2)

    def run(params, seeds):
        def step(carry, scale):
            params, state = carry
            grads = jax.tree.map(lambda x: x * scale, params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), seeds)
        return params

    two = jax.tree.map(lambda *x: jnp.stack(x), arrays(0), arrays(1))
    scales = jnp.array([[1.0, 0.5, -1.0, 2.0, 1.0, 1.0, 3.0, 1.0]] * 2)
    mapped = jax.jit(jax.vmap(run))(two, scales)
    alone = jax.jit(run)(arrays(1), scales[1])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y, rtol=1e-6), mapped, alone)


def test_a_restored_state_trains_on_to_the_same_bits():
    tx = updater("rigl").wrap_optax(optax.adam(0.01))
    params, state = train("rigl", optax.adam(0.01), True, steps=5)
    saved = serialization.msgpack_restore(serialization.to_bytes(state))
    empty = jax.tree.map(jnp.zeros_like, tx.init(arrays(7)))
    restored = serialization.from_state_dict(empty, saved)
    check_bits(tx.update(arrays(9), restored, params), tx.update(arrays(9), state, params))


def test_map_params_maps_the_state_of_kept_weights():
    tx = updater("rigl").wrap_optax(optax.adam(0.01))
    _, state = train("rigl", optax.adam(0.01), True, steps=1)
    mapped = optax.tree.map_params(tx.init, lambda x: x + 1, state)
    moments = (each.inner_state.state[0].mu for each in (mapped, state))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y + 1), *moments)
    check_bits(mapped.inner_state.positions, state.inner_state.positions)


@pytest.mark.slow
def test_a_state_of_kept_weights_is_not_cut_with_channels():
    params = {"in": jnp.ones((8, 12)), "out": jnp.ones((12, 4))}
    graph = sparsity.trace(lambda p, x: jnp.tanh(x @ p["in"]) @ p["out"], params, jnp.ones((2, 8)))
    pruner = sparsity.MagnitudePruning(
        scope=sparsity.Coupled(graph), sparsity_distribution_fn=sparsity.Uniform(0.5)
    )
    _, masks = pruner.instant_sparsify(params)
    trainer = sparsity.StaticRandomSparse(use_compact_state=True)
    state = trainer.wrap_optax(optax.adam(0.1), masks=masks).init(params)
    with pytest.raises(ValueError, match=r"use_compact_state=True.*tx.init\(small.params\)"):
        sparsity.shrink(graph, params, masks, state)


def test_reports_read_a_compact_state():
    params, state = train("rigl", optax.adam(0.01), True, steps=3, use_packed_masks=True)
    assert sparsity.get_sparse_state((state,)) is state
    assert "48" in sparsity.sparsity_table(params, state, updater("rigl", use_packed_masks=True))
    assert int(sparsity.active_masks(params, state)["kernel"].sum()) == 115


def test_each_of_two_states_side_by_side_is_spread_over_the_parameters():
    params, mask = {"w": jnp.array([1.0, 2.0, 4.0])}, {"w": jnp.array([0, 1, 1], jnp.uint8)}
    once = sparsity.train_only(optax.trace(0.5), mask)
    tx = optax.chain(once, once)
    _, state = tx.update(params, tx.init(params), params)
    for trace in densify_kept_states(state, params):
        np.testing.assert_array_equal(trace.trace["w"], [0.0, 2.0, 4.0])


def test_a_dense_parameter_may_have_no_gradient():
    params, mask = {"w": jnp.array([1.0, 2.0]), "b": jnp.ones(1)}, jnp.array([0, 1], jnp.uint8)
    trainer = sparsity.StaticRandomSparse(use_compact_state=True)
    tx = trainer.wrap_optax(optax.sgd(0.5, momentum=0.9), masks={"w": mask, "b": None})
    updates, _ = tx.update({"w": jnp.ones(2), "b": None}, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], [-1.0, -0.5])
    assert updates["b"] is None


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_read_more_than_entries_are_refused(name):
    with pytest.raises(ValueError, match="entry by entry"):
        updater("static_sparse").wrap_optax(REFUSED[name]()).init(arrays(0))


@pytest.mark.parametrize("change", [lambda x: x.at[0].set(0), lambda x: x.at[0].add(1)])
def test_optimizers_that_change_an_entry_by_its_place_are_refused(change):
    inner = optax.stateless(lambda updates, _: jax.tree.map(change, updates))
    pruner = sparsity.StaticRandomSparse(use_compact_state=True)
    tx = pruner.wrap_optax(inner, masks=jnp.array([0, 1, 1, 0], jnp.uint8))
    with pytest.raises(ValueError, match=r"scatter.* joins entries"):
        tx.init(jnp.arange(4.0))


def test_a_ramp_is_refused_with_the_field_the_schedule_and_the_remedy():
    ramp = {"update_freq": 2, "update_start_step": 0, "update_end_step": 8}
    config = {"algorithm": "magnitude", "sparsity": 0.5, "is_sparse_gradients": True, **ramp}
    with pytest.raises(ValueError, match=r"use_compact_state.*PolynomialSchedule.*masks=masks"):
        sparsity.create_updater_from_config({**config, "use_compact_state": True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"algorithm": "magnitude", "is_sparse_gradients": True},
            r"keeps_count = 'any'.*masks=masks",
        ),
        ({"algorithm": "magnitude"}, "is_sparse_gradients = False"),
        ({"algorithm": "magnitude_ste"}, "keeps_dense_weights"),
        ({"algorithm": "set", "is_sparse_updates": False}, "is_sparse_updates = False"),
        ({"algorithm": "global_rigl", "scheduler": sparsity.PeriodicSchedule(5)}, r"Global\("),
        ({"algorithm": "static_sparse", "scope": "global"}, r"Global.*masks=masks"),
        ({"algorithm": "set", "sparsity_type": "block_5,5", "update_freq": 5}, r"'kernel'.*Block"),
        ({"algorithm": "rigl", "use_compact_state": 1}, "use_compact_state"),
    ],
)
def test_updaters_whose_numbers_change_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        _start({"sparsity": 0.5, "use_compact_state": True, **options})


class Alone:
    """Scope of a user that does not state that it keeps the numbers of its targets."""

    def check(self, pattern, batch_axes, topk_fn):
        pass

    keeps_targets = False

    def select(self, leaves, topk_fn):
        return sparsity.Layerwise().select(leaves, topk_fn)

    def move(self, leaves, drop_fraction):
        return sparsity.Layerwise().move(leaves, drop_fraction)


@pytest.mark.parametrize("algorithm", ["static_sparse", "rigl"])
def test_a_scope_that_states_no_numbers_is_refused(algorithm):
    config = {"algorithm": algorithm, "sparsity": 0.5, "use_compact_state": True}
    updater = dataclasses.replace(sparsity.create_updater_from_config(config), scope=Alone())
    with pytest.raises(ValueError, match=r"scope = .*Alone.*keeps_targets.*masks=masks"):
        updater.wrap_optax(optax.adam(0.1)).init(arrays(0))


def test_a_class_that_drops_the_checks_of_fields_is_refused_when_it_wraps():
    @dataclasses.dataclass(kw_only=True)
    class Unchecked(sparsity.RigL):
        def check_fields(self):
            pass

    updater = Unchecked(
        scope=sparsity.Global(), scheduler=sparsity.PeriodicSchedule(5), use_compact_state=True
    )
    with pytest.raises(ValueError, match=r"scope = Global"):
        updater.wrap_optax(optax.adam(0.1), masks={"a": np.eye(2)})


class LowFirst:
    """Scope of a user, no subclass of `Layerwise`: the lowest scores of each slice stay."""

    keeps_targets = True

    def check(self, pattern, batch_axes, topk_fn):
        pass

    def select(self, leaves, topk_fn):
        leaves = [leaf._replace(scores=-leaf.scores) for leaf in leaves]
        return sparsity.Layerwise().select(leaves, topk_fn)

    def move(self, leaves, drop_fraction):
        leaves = [leaf._replace(drop_scores=-leaf.drop_scores) for leaf in leaves]
        return sparsity.Layerwise().move(leaves, drop_fraction)


def test_a_scope_that_states_keeps_targets_has_a_compact_state():
    results, params = [], {"kernel": arrays(0)["kernel"]}
    for is_compact in (True, False):
        pruner = dataclasses.replace(updater("set", is_compact), scope=LowFirst())
        pruner = dataclasses.replace(pruner, scheduler=sparsity.PeriodicSchedule(2, 0, 28))
        tx = pruner.wrap_optax(optax.sgd(0.1))
        updates, state = jax.jit(tx.update)(params, tx.init(params), params)
        results.append((updates, state.masks))
    check_bits(*results)


def _start(config):
    return sparsity.create_updater_from_config(config).wrap_optax(optax.adam(0.1)).init(arrays(0))


def test_moves_under_a_pattern_need_the_first_masks_of_the_updater():
    options = {"sparsity_type": "channel_-1", "scheduler": sparsity.PeriodicSchedule(5)}
    tx = updater("set", **options).wrap_optax(optax.sgd(0.1), masks=arrays(0))
    with pytest.raises(ValueError, match="no fixed number"):
        tx.init(arrays(0))


# Positions, by numpy.


@pytest.mark.parametrize("density", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 31, 32, 1000])
def test_positions_words_and_slots_are_those_of_numpy(n, density):
    rng = np.random.default_rng(n)
    mask, new = ((rng.random(n) < density).astype(np.uint8) for _ in range(2))
    kept, values = np.flatnonzero(mask), np.arange(100, 102 + n)
    at = np.full(n + 1, n, np.int32)
    at[: new.sum()] = np.flatnonzero(new)
    positions, dense, slots, stays = map(np.asarray, read_mask(mask, values, at))
    np.testing.assert_array_equal(positions, [*kept, *range(n, 2 * n + 2 - len(kept))])
    np.testing.assert_array_equal(dense[kept], values[: len(kept)])
    np.testing.assert_array_equal(stays, np.append(mask, 0)[at])
    np.testing.assert_array_equal(kept[slots[stays]], at[stays])


@jax.jit
def read_mask(mask, values, at):
    positions = kept_positions(mask, mask.size + 2)
    return positions, scatter(mask.size, positions, values), *slots_of_positions(mask, at)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a")])
def test_parameters_that_one_device_of_a_mesh_holds_have_a_compact_state(spec):
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    kernel = jax.device_put(arrays(0)["kernel"], NamedSharding(mesh, spec))
    tx = updater("static_sparse").wrap_optax(optax.adam(0.1))
    state = tx.init({"kernel": kernel})
    expected = tx.init({"kernel": arrays(0)["kernel"]})
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("is_compact", [True, False])
def test_a_state_of_the_other_kind_is_refused_by_the_name_of_the_option(is_compact):
    params = {"w": jnp.arange(12.0).reshape(3, 4)}

    def wrap(value):
        pruner = sparsity.StaticRandomSparse(
            sparsity_distribution_fn=sparsity.Uniform(0.5), use_compact_state=value
        )
        return pruner.wrap_optax(optax.adam(0.1))

    state = wrap(not is_compact).init(params)
    message = f"use_compact_state={is_compact}, and the state was made with use_compact_state="
    with pytest.raises(ValueError, match=message):
        wrap(is_compact).update(params, state, params)


def resume(is_compact, before, after, name="kernel"):
    """Trains three steps from the state of one updater by another one; returns the last masks."""
    params, masks = {name: arrays(0)[name]}, []
    often = {"is_compact": is_compact, "scheduler": sparsity.PeriodicSchedule(2, 1, 9)}
    state = updater("rigl", **often, **before).wrap_optax(optax.adam(0.01)).init(params)
    step = jax.jit(updater("rigl", **often, **after).wrap_optax(optax.adam(0.01)).update)
    for seed in range(1, 4):
        updates, state = step({name: arrays(seed)[name]}, state, params)
        params = optax.apply_updates(params, updates)
        masks.append(state.masks[name])
    return params, masks


@pytest.mark.parametrize("sparsities", [(0.5, 0.8), (0.8, 0.5)])
def test_the_saved_sparsity_stays_in_force_in_another_updater(sparsities):
    before, after = ({"sparsity": sparsity} for sparsity in sparsities)
    jax.tree.map(
        np.testing.assert_array_equal, *(resume(kind, before, after) for kind in (True, False))
    )
