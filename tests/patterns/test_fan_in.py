"""Constant fan-in: masks, moves and runs against a sort of each group in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.sparsity_types import FanIn
from tests import helpers
from tests.masks.mask_oracles import draw
from tests.selection_oracle import best

NAN = float("nan")


def by_group(choose, kind, *arrays, batch_axes=0):
    """The mask whose group of outputs keeps the inputs that `choose` marks, given their scores."""
    shape = arrays[0].shape[batch_axes:]
    inputs = sorted(axis % len(shape) for axis in np.atleast_1d(kind.axis))
    outputs = [axis for axis in range(len(shape)) if axis not in inputs]
    count = int(np.prod([shape[axis] for axis in outputs]))
    result = np.empty(arrays[0].shape, np.uint8)
    for place in np.ndindex(arrays[0].shape[:batch_axes]):
        each = [np.asarray(array[place], np.float64) for array in arrays]
        rows = [array.transpose(*outputs, *inputs).reshape(count, -1) for array in each]
        mask = np.empty(rows[0].shape, np.uint8)
        for start in range(0, count, kind.group):
            group = slice(start, start + kind.group)
            mask[group] = choose(*(row[group].sum(axis=0) for row in rows))
        mask = mask.reshape([shape[axis] for axis in (*outputs, *inputs)])
        result[place] = mask.transpose(np.argsort([*outputs, *inputs]))
    return result


def selected(scores, share, kind, batch_axes=0):
    return by_group(
        lambda units: best(units, helpers.num_kept(units.size, share)),
        kind,
        scores,
        batch_axes=batch_axes,
    )


def moved(mask, drop, grow, fraction, kind, batch_axes=0):
    def move(active, drop, grow):
        n = np.count_nonzero(active)
        k = helpers.num_kept(n, fraction)
        kept = best(drop, k, where=active)
        return kept | best(grow, n - k, where=1 - kept)

    return by_group(move, kind, mask, drop, grow, batch_axes=batch_axes)


CASES = [
    ((6, 8), FanIn(), 0),
    ((6, 8), FanIn(4), 0),
    ((6, 8), FanIn(3), 0),  # the last group has two outputs
    ((6, 8), FanIn(100), 0),  # one group
    ((7, 9), FanIn(2, axis=-1), 0),
    ((12,), FanIn(4, axis=0), 0),  # one output
    ((3, 3, 4, 10), FanIn(4, (0, 1, 2)), 0),  # a convolution of flax
    ((10, 4, 3, 3), FanIn(4, (-3, -2, -1)), 0),  # one of torch
    ((3, 5, 2, 7), FanIn(4, (1, 3)), 0),  # inputs and outputs by turns; groups cross an axis
    ((6, 2, 5), FanIn(3, 0), 0),  # heads
    ((3, 6, 8), FanIn(4), 1),
    ((2, 2, 5, 4, 6), FanIn(5, (0, 2)), 2),
    ((2, 3, 6), FanIn(1, -1), 2),
]


@pytest.mark.parametrize(("shape", "kind", "batch_axes"), CASES, ids=str)
def test_each_group_keeps_its_best_inputs(shape, kind, batch_axes):
    scores = draw(shape)
    kind.check(shape, batch_axes)
    create = jax.jit(lambda *args: kind.select(*args, batch_axes=batch_axes))
    for share in (0.0, 0.3, 0.5, 0.8, 1.0):
        expected = selected(scores, share, kind, batch_axes)
        mask = create(scores, share)
        assert mask.dtype == jnp.uint8
        np.testing.assert_array_equal(mask, expected)
    eager = kind.select(scores, 0.8, batch_axes=batch_axes)
    np.testing.assert_array_equal(eager, selected(scores, 0.8, kind, batch_axes))


@pytest.mark.parametrize(("shape", "kind", "batch_axes"), CASES, ids=str)
def test_each_group_drops_and_grows_by_itself(shape, kind, batch_axes):
    drop, grow = np.abs(draw(shape, 1)), np.abs(draw(shape, 2))
    mask = selected(draw(shape, 3), 0.6, kind, batch_axes)
    for fraction in (0.0, 0.3, 1.0):
        result = kind.move(mask, drop, grow, fraction, batch_axes=batch_axes)
        assert result.dtype == jnp.uint8
        expected = moved(mask, drop, grow, fraction, kind, batch_axes)
        np.testing.assert_array_equal(result, expected)


def test_a_mask_worked_by_hand():
    # Groups: outputs 0 and 1 with sums 6, 2, 3; output 2 with scores 1, 3, 2. One of three stays.
    scores = np.array([[1, 5, 1], [2, 0, 3], [3, 0, 2]], np.float32)
    mask = FanIn(2).select(scores, 2 / 3)
    np.testing.assert_array_equal(mask, [[1, 1, 0], [0, 0, 1], [0, 0, 0]])


def test_ties_go_to_the_lowest_input_and_nan_is_lowest():
    tied = FanIn(2).select(np.ones((4, 3), np.float32), 0.5)
    np.testing.assert_array_equal(tied, [[1] * 3, [1] * 3, [0] * 3, [0] * 3])
    scores = np.array([[9, NAN, 1], [-5, -9, NAN], [-8, -8, -8], [-9, -7, -9]], np.float32)
    # Sums NaN, -14, -16, -16 and scores 1, NaN, -8, -9: two of each stay.
    np.testing.assert_array_equal(
        FanIn(2).select(scores, 0.5), [[0, 0, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]]
    )
    np.testing.assert_array_equal(
        FanIn().select(scores, 0.5), [[1, 0, 1], [1, 0, 0], [0, 1, 1], [0, 1, 0]]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "uint32"])
def test_sums_of_narrow_and_of_integer_scores_neither_overflow_nor_wrap(dtype):
    high = 60_000 if dtype == "float16" else 2**30
    scores = jnp.array([[high, high], [high, 0], [high, 4], [0, 0]]).astype(dtype)
    mask = FanIn(2).select(scores, 0.75)
    np.testing.assert_array_equal(mask, [[1, 1], [0, 0], [0, 0], [0, 0]])


def test_single_outputs_rank_integers_that_no_float32_tells_apart():
    scores = np.array([[2**31, 7], [2**31 + 1, 7]], np.uint32)
    np.testing.assert_array_equal(FanIn().select(scores, 0.5), [[0, 1], [1, 0]])


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("group", [1, 3])
def test_empty_leaves_have_empty_masks(shape, group):
    empty = np.zeros(shape, np.float32)
    assert FanIn(group).select(empty, 0.5).shape == shape
    assert FanIn(group).move(empty.astype(np.uint8), empty, empty, 0.3).shape == shape


def test_masks_under_vmap_and_scan_are_those_of_each_leaf():
    scores = draw((4, 6, 8))
    expected = np.stack([selected(each, 0.5, FanIn(3)) for each in scores])
    create = lambda each: FanIn(3).select(each, 0.5)  # noqa: E731
    np.testing.assert_array_equal(jax.vmap(create)(scores), expected)
    scanned = jax.lax.scan(lambda carry, each: (carry, create(each)), 0, scores)[1]
    np.testing.assert_array_equal(scanned, expected)


def test_a_selection_of_ones_own_gets_the_inputs_of_a_group():
    shapes = []

    def first_two(scores, share):
        shapes.append(scores.shape)
        return jnp.arange(scores.size) < 2

    pruner = sparsity.MagnitudePruning(
        sparsity_type=FanIn(4), batch_axes=1, sparsity_distribution_fn=helpers.half,
        topk_fn=first_two,
    )  # fmt: skip
    mask = pruner.instant_sparsify({"w": jnp.ones((2, 5, 8))})[1]["w"]
    np.testing.assert_array_equal(mask.sum(axis=1), np.full((2, 8), 2))
    assert set(shapes) == {(5,)}


def _fan_ins(mask, kind):
    """Fan-ins of a kernel [inputs, outputs]; outputs of a group read the same inputs."""
    mask = np.asarray(mask)
    for start in range(0, mask.shape[1], kind.group):
        group = mask[:, start : start + kind.group]
        assert np.all(group == group[:, :1])
    return {*mask.sum(axis=0, dtype=int).tolist()}


def _train(updater, steps=7, shape=(20, 11), dtype=jnp.float32):
    tx = updater.wrap_optax(optax.adam(0.1))
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=shape), dtype)}
    grads = jnp.asarray(rng.normal(size=(steps, *shape)), dtype)

    def step(carry, grad):
        params, state = carry
        updates, state = tx.update({"w": grad}, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), sparsity.active_masks(params, state)["w"]

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, grads), donate_argnums=0)
    (params, state), history = run((params, tx.init(params)))
    assert not np.any(np.asarray(params["w"])[np.asarray(history[-1]) == 0])
    return history, state


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
@pytest.mark.parametrize("kind", [FanIn(), FanIn(4)], ids=repr)
@pytest.mark.parametrize("cls", [sparsity.SET, sparsity.RigL])
def test_every_update_moves_inputs_and_keeps_every_fan_in(cls, kind, packed, dtype):
    trainer = cls(
        sparsity_type=kind,
        scheduler=sparsity.PeriodicSchedule(2),
        sparsity_distribution_fn=helpers.uniform(0.8),
        use_packed_masks=packed,
    )
    history, state = _train(trainer, dtype=dtype)
    for mask in history:
        assert _fan_ins(mask, kind) == {4}
    assert len({np.asarray(mask).tobytes() for mask in history}) >= 3
    assert state.masks["w"].nbytes == (20 * 2 if packed else 220)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FanIn(), FanIn(4)], ids=repr)
def test_a_ramp_keeps_equally_many_inputs_and_ends_at_the_target(kind):
    pruner = sparsity.MagnitudePruning(
        sparsity_type=kind,
        scheduler=sparsity.PolynomialSchedule(2, 0, 4, power=1),
        sparsity_distribution_fn=helpers.uniform(0.8),
    )
    history, _ = _train(pruner)
    # Of 20 inputs 0 %, 40 % from step 2 on, and 80 % from step 4.
    assert [_fan_ins(mask, kind) for mask in history] == [
        {20}, {20}, {12}, {12}, {4}, {4}, {4}
    ]  # fmt: skip


@pytest.mark.slow
def test_rigl_moves_each_group_to_its_largest_gradients():
    trainer = sparsity.RigL(
        sparsity_type=FanIn(3),
        scheduler=sparsity.PeriodicSchedule(2),
        sparsity_distribution_fn=helpers.half,
        drop_fraction_fn=optax.constant_schedule(0.4),
    )
    tx = trainer.wrap_optax(optax.sgd(0.1))
    params, grads = jnp.asarray(draw((10, 8), 1)), jnp.asarray(draw((10, 8), 2))
    state = tx.init(params)
    before = np.asarray(state.masks)
    drop, grow = np.abs(np.asarray(params)) * before, np.abs(np.asarray(grads))
    _, state = tx.update(grads, state, params)
    np.testing.assert_array_equal(state.masks, moved(before, drop, grow, 0.4, FanIn(3)))


def test_a_configuration_names_the_pattern():
    updater = sparsity.create_updater_from_config(
        {"algorithm": "magnitude", "sparsity": 0.75, "sparsity_type": "fanin_16,-2"}
    )
    assert updater.sparsity_type == sparsity.FanIn(16, axis=-2)


def test_no_scope_of_single_weights_and_no_srigl_take_it():
    for make in (
        lambda: sparsity.GlobalMagnitudePruning(sparsity=0.5, sparsity_type=FanIn()),
        lambda: sparsity.SRigL(sparsity_type=FanIn()),
    ):
        with pytest.raises(ValueError, match=r"sparsity_type = FanIn\(group=1, axis=-2\)"):
            make()
