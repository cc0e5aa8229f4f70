"""When masks change and how sparse they are then; the oracle is the source's formula in float64."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.sparsity_schedules import (
    NoUpdateSchedule,
    OneShotSchedule,
    PeriodicSchedule,
    PolynomialSchedule,
    boundary_values,
    check_schedule,
    find_first_update,
    find_last_update,
    has_updates,
)
from tests import helpers

STEPS = 60

# (update_freq, update_start_step, update_end_step): dividing the range or not, a range of one step.
RANGES = [
    (1, 0, 10),
    (5, 0, 20),
    (7, 0, 20),
    (7, 3, 50),
    (10, 4, 33),
    (100, 5, 30),
    (3, 12, 12),
    (1, 0, 0),
    (4, 9, 10),
]


def zhu_gupta(step, target, initial, start, end, power):
    """Equation 1 of Zhu & Gupta 2017 in float64, its step held within the range."""
    if step >= end:
        return np.float64(target)
    progress = (max(step, start) - start) / (end - start)
    return target + (initial - target) * (1.0 - progress) ** power


def update_steps(schedule, steps=STEPS):
    return [step for step in range(steps) if schedule.is_mask_update_iter(step)]


def traced_update_steps(schedule, steps=STEPS):
    is_update = jax.jit(jax.vmap(schedule.is_mask_update_iter))(jnp.arange(steps))
    return np.flatnonzero(is_update).tolist()


# Which steps update masks.


@pytest.mark.parametrize("step", [None, 0, 1, 10**6, jnp.int32(3)])
def test_no_update_schedule_never_updates(step):
    assert not NoUpdateSchedule().is_mask_update_iter(step)


@pytest.mark.parametrize("target_step", [0, 1, 17])
def test_one_shot_updates_once_at_its_step(target_step):
    schedule = OneShotSchedule(target_step)
    assert update_steps(schedule) == [target_step]
    assert traced_update_steps(schedule) == [target_step]


@pytest.mark.parametrize(("freq", "start", "end"), RANGES)
@pytest.mark.parametrize("kind", [PeriodicSchedule, PolynomialSchedule])
def test_updates_come_every_freq_steps_from_start_and_at_end(kind, freq, start, end):
    expected = sorted({*range(start, end + 1, freq), end})
    schedule = kind(freq, start, end)
    assert update_steps(schedule) == expected
    assert traced_update_steps(schedule) == expected


def test_a_periodic_schedule_without_end_goes_on_for_ever():
    schedule = PeriodicSchedule(update_freq=7, update_start_step=3)
    assert update_steps(schedule) == [3, 10, 17, 24, 31, 38, 45, 52, 59]
    assert traced_update_steps(schedule) == update_steps(schedule)
    assert schedule.is_mask_update_iter(3 + 7 * 10**9)


def test_a_periodic_schedule_starts_at_step_zero_by_default():
    assert update_steps(PeriodicSchedule(update_freq=25)) == [0, 25, 50]


def test_the_last_int32_step_is_judged_like_any_other():
    last = 2**31 - 1  # 2**31 - 1 = 1 mod 3 and 1 mod 2, so 0 mod 7
    assert last % 7 == 1
    schedule = PeriodicSchedule(update_freq=7, update_start_step=1)
    assert schedule.is_mask_update_iter(last)
    assert jax.jit(schedule.is_mask_update_iter)(jnp.int32(last))


@pytest.mark.parametrize(
    "schedule",
    [
        NoUpdateSchedule(),
        OneShotSchedule(3),
        PeriodicSchedule(2, 0, 9),
        PolynomialSchedule(2, 0, 9),
    ],
)
def test_python_steps_get_python_answers_so_that_nothing_is_traced(schedule):
    assert all(isinstance(schedule.is_mask_update_iter(step), bool) for step in range(12))


@pytest.mark.parametrize(
    "schedule", [OneShotSchedule(0), PeriodicSchedule(1), PolynomialSchedule(1, 0, 9)]
)
def test_without_a_step_there_is_no_update(schedule):
    assert schedule.is_mask_update_iter(None) is False


# How sparse masks are.


@pytest.mark.parametrize(
    "schedule", [NoUpdateSchedule(), OneShotSchedule(5), PeriodicSchedule(3, 0, 20)]
)
@pytest.mark.parametrize("step", [0, 5, 100])
def test_schedules_without_a_ramp_return_the_targets(schedule, step):
    targets = {"a": 0.5, "b": None, "c": [0.25, 1.0]}
    assert schedule.get_sparsity_at_step(targets, step) == targets


@pytest.mark.slow
@pytest.mark.parametrize(("freq", "start", "end"), RANGES)
@pytest.mark.parametrize("power", [1, 3, 0.5])
@pytest.mark.parametrize("initial", [0.0, 0.3])
def test_polynomial_ramp_follows_its_formula(freq, start, end, power, initial):
    schedule = PolynomialSchedule(freq, start, end, power=power, initial_sparsity=initial)
    steps = range(start, STEPS)
    expected = [zhu_gupta(step, 0.9, initial, start, end, power) for step in steps]
    traced = jax.vmap(lambda step: schedule.get_sparsity_at_step(0.9, step))(jnp.array(steps))
    np.testing.assert_allclose(traced, expected, rtol=0, atol=1e-6)


def test_polynomial_ramp_has_the_values_worked_by_hand():
    # Cubic from 0 to 0.8 in steps 10 .. 50: a quarter of the way leaves (3/4)^3 = 27/64 of 0.8.
    schedule = PolynomialSchedule(10, update_start_step=10, update_end_step=50)
    expected = {0: 0.0, 10: 0.0, 20: 0.4625, 30: 0.7, 40: 0.7875, 50: 0.8, 60: 0.8}
    for step, sparsity in expected.items():
        assert float(schedule.get_sparsity_at_step(0.8, step)) == pytest.approx(sparsity, abs=1e-6)


@pytest.mark.parametrize(("freq", "start", "end"), RANGES)
def test_the_last_update_reaches_the_target_bit_for_bit(freq, start, end):
    targets = [np.float32(value) for value in (0.9, 0.1, 1 / 3, 0.886, 0.0, 1.0, 0.9999999)]
    schedule = PolynomialSchedule(freq, start, end, initial_sparsity=0.05)
    last = update_steps(schedule)[-1]
    assert last == end
    compiled = jax.jit(schedule.get_sparsity_at_step)
    for step in (last, last + 1, 10**9):
        for reached in (schedule.get_sparsity_at_step(targets, step), compiled(targets, step)):
            np.testing.assert_array_equal(np.array(reached), np.array(targets))


@pytest.mark.parametrize("power", [0.5, 1, 3])
@pytest.mark.parametrize("length", [41, 47, 83, 1000, 12_345])
def test_a_compiled_ramp_of_any_length_and_power_starts_and_ends_exactly(length, power):
    # In float32, 47 * (1 / 47) is not 1: compilers turn a division into such a product.
    schedule = PolynomialSchedule(length, 10, 10 + length, power=power)
    compiled = jax.jit(lambda step: schedule.get_sparsity_at_step(0.9, step))
    for step, sparsity in ((3, 0.0), (10, 0.0), (10 + length, 0.9)):
        assert np.float32(compiled(step)) == np.float32(sparsity)


@pytest.mark.parametrize("initial", [0.3, 0.1234567, 1e-9])
def test_the_ramp_starts_at_the_initial_sparsity_bit_for_bit(initial):
    # In float32, 0.9 - (0.9 - 1e-9) is 0.
    schedule = PolynomialSchedule(1, 5, 50, initial_sparsity=initial)
    for step in (0, 5):
        assert schedule.get_sparsity_at_step(0.9, step) == np.float32(initial)


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_narrow_integers_of_numpy_do_not_wrap_around(kind):
    narrow, periodic = PolynomialSchedule(kind(50), kind(2), kind(100)), PeriodicSchedule(kind(50))
    for step in (300, 356):  # 44 and 100 of a uint8
        assert narrow.get_sparsity_at_step(0.8, step) == np.float32(0.8)
        assert narrow.is_mask_update_iter(step) is False
        assert not OneShotSchedule(kind(100)).is_mask_update_iter(jnp.asarray(step))
    assert update_steps(periodic, 301) == [0, 50, 100, 150, 200, 250, 300]


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
    target=st.floats(0, 1, width=32, allow_subnormal=False),
    initial=st.floats(0, 1, width=32, allow_subnormal=False),
    step=st.integers(0, 2**31 - 1),
)
def test_the_ramp_stays_between_its_ends(target, initial, step):
    schedule = PolynomialSchedule(7, 10, 10_000, initial_sparsity=initial)
    reached = float(schedule.get_sparsity_at_step(target, step))
    assert min(initial, target) - 1e-7 <= reached <= target
    assert reached == target or step < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("power", [0.5, 1, 2, 3, 3.5])
def test_every_program_follows_the_same_ramp_bit_for_bit(power):
    schedule = PolynomialSchedule(1, 17, 4321, power=power, initial_sparsity=0.05)
    steps = np.arange(4400, dtype=np.int32)[None]
    targets = np.float32([[0.5], [0.8], [0.9], [0.99]])
    get = schedule.get_sparsity_at_step
    ramp = np.asarray(get(targets, steps))
    compile_ = functools.partial(jax.jit, compiler_options=helpers.OPTIMIZED)
    looped = compile_(lambda targets, steps: jax.lax.map(lambda i: get(targets, i), steps).T)
    constant = compile_(lambda steps: get(targets, steps))(steps)
    for other in (compile_(get)(targets, steps), constant, looped(targets[:, 0], steps[0])):
        np.testing.assert_array_equal(other, ramp)
    # The formula in numpy, which rounds each product, quotient and sum.
    part = np.clip(4321 - steps, 0, 4304).astype(np.float32) / np.float32(4304)
    raised = {0.5: np.sqrt(part), 1: part, 2: part * part, 3: part * part * part}.get(power)
    if raised is not None:
        plain = targets - (targets - np.float32(0.05)) * raised
        np.testing.assert_array_equal(ramp[:, 18:4321], plain[:, 18:4321])


def test_the_ramp_never_becomes_less_sparse():
    schedule = PolynomialSchedule(1, 0, 500, initial_sparsity=0.2)
    ramp = jax.vmap(lambda step: schedule.get_sparsity_at_step(0.95, step))(jnp.arange(600))
    assert np.all(np.diff(np.asarray(ramp)) >= 0)


@pytest.mark.parametrize("step", [0, 3, 50, 99, 100, 101])
def test_a_leaf_whose_target_is_below_the_initial_sparsity_stays_at_its_target(step):
    schedule = PolynomialSchedule(10, 0, 100, initial_sparsity=0.5)
    low, high = schedule.get_sparsity_at_step([0.2, 0.9], step)
    assert np.float32(low) == np.float32(0.2)
    assert float(high) == pytest.approx(zhu_gupta(step, 0.9, 0.5, 0, 100, 3), abs=1e-6)


def test_the_ramp_keeps_the_tree_with_its_dense_leaves():
    targets = {"a": np.float32(0.5), "b": None, "c": (np.float32(1.0), [None])}
    sparsities = PolynomialSchedule(1, 0, 10).get_sparsity_at_step(targets, 5)
    assert jax.tree.structure(sparsities) == jax.tree.structure(targets)
    assert sparsities["b"] is None


@pytest.mark.slow
@pytest.mark.parametrize("target", [0.5, np.float64(0.5), jnp.bfloat16(0.5)])
@pytest.mark.parametrize("x64", [False, True])
def test_ramp_values_are_float32_scalars(target, x64):
    with jax.enable_x64(x64):
        sparsity = PolynomialSchedule(1, 0, 10).get_sparsity_at_step(target, 5)
    assert (sparsity.dtype, sparsity.shape) == (jnp.float32, ())


@pytest.mark.parametrize(("freq", "start", "end"), RANGES)
def test_before_the_start_the_sparsity_is_the_initial_one(freq, start, end):
    schedule = PolynomialSchedule(freq, start, end, initial_sparsity=0.25)
    for step in range(start):
        assert float(schedule.get_sparsity_at_step(0.5, step)) == 0.25


def test_a_range_of_one_step_prunes_at_once():
    schedule = PolynomialSchedule(4, 6, 6)
    assert update_steps(schedule) == [6]
    assert np.float32(schedule.get_sparsity_at_step(0.7, 6)) == np.float32(0.7)


def test_target_is_reached_when_the_frequency_does_not_divide_the_range():
    # Updates at 0, 30, 60, 90 and 100: the one at 90 is at 0.9 * (1 - 0.1 ** 3) = 0.8991.
    schedule = PolynomialSchedule(30, 0, 100)
    assert update_steps(schedule, 300) == [0, 30, 60, 90, 100]
    assert float(schedule.get_sparsity_at_step(0.9, 90)) == pytest.approx(0.8991, abs=1e-6)
    assert np.float32(schedule.get_sparsity_at_step(0.9, 100)) == np.float32(0.9)


# Bad input, and what kind of values schedules are.

NAN = float("nan")
BAD_PERIODIC = [
    ({"update_freq": 0}, "update_freq.*at least 1.*0"),
    ({"update_freq": -3}, "update_freq.*at least 1.*-3"),
    ({"update_freq": 2.0}, "update_freq.*integer.*2.0"),
    ({"update_freq": True}, "update_freq.*integer.*True"),
    ({"update_freq": None}, "update_freq.*integer.*None"),
    ({"update_freq": "5"}, "update_freq.*integer.*'5'"),
    ({"update_start_step": -1}, "update_start_step.*at least 0.*-1"),
    ({"update_start_step": 0.5}, "update_start_step.*integer.*0.5"),
    ({"update_start_step": None}, "update_start_step.*integer.*None"),
    ({"update_start_step": False}, "update_start_step.*integer.*False"),
    ({"update_end_step": 4}, "update_end_step.*before update_start_step.*4.*5"),
    ({"update_end_step": -1}, "update_end_step.*at least 0.*-1"),
    ({"update_end_step": 20.0}, "update_end_step.*integer.*20.0"),
    ({"update_end_step": True}, "update_end_step.*integer.*True"),
]
BAD_POLYNOMIAL = [
    ({"update_end_step": None}, "update_end_step.*None"),
    ({"power": 0}, "power.*positive.*0"),
    ({"power": -1.0}, "power.*positive.*-1.0"),
    ({"power": NAN}, "power.*finite.*nan"),
    ({"power": "3"}, "power.*finite.*'3'"),
    ({"initial_sparsity": True}, "initial_sparsity.*True"),
    ({"initial_sparsity": "0.5"}, "initial_sparsity.*'0.5'"),
    ({"update_end_step": 2**31}, "update_end_step.*at most.*2147483648"),
    ({"initial_sparsity": 1.5}, r"initial_sparsity.*\[0, 1\].*1.5"),
    ({"initial_sparsity": -0.1}, r"initial_sparsity.*\[0, 1\].*-0.1"),
    ({"initial_sparsity": NAN}, r"initial_sparsity.*\[0, 1\].*nan"),
]


@pytest.mark.parametrize(
    ("kind", "bad", "message"),
    [(kind, *case) for kind in (PeriodicSchedule, PolynomialSchedule) for case in BAD_PERIODIC]
    + [(PolynomialSchedule, *case) for case in BAD_POLYNOMIAL],
)
def test_a_bad_value_is_named_when_the_schedule_is_made(kind, bad, message):
    good = {"update_freq": 2, "update_start_step": 5, "update_end_step": 20}
    kind(**good)
    with pytest.raises(ValueError, match=message):
        kind(**(good | bad))


@pytest.mark.parametrize("target_step", [-1, 1.5, None, True, "3", NAN])
def test_one_shot_takes_a_step_number(target_step):
    with pytest.raises(ValueError, match="target_step"):
        OneShotSchedule(target_step)


def test_numpy_integers_are_step_numbers():
    schedule = PolynomialSchedule(np.int64(2), np.int32(1), np.int64(6))
    assert update_steps(schedule) == [1, 3, 5, 6]


@pytest.mark.parametrize(
    "make",
    [
        NoUpdateSchedule,
        lambda: OneShotSchedule(3),
        lambda: PeriodicSchedule(2),
        lambda: PolynomialSchedule(2, 1, 6),
    ],
)
def test_schedules_are_frozen_values(make):
    schedule = make()
    assert schedule == make()
    assert hash(schedule) == hash(make())
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.update_freq = 1


def test_schedules_with_updates_are_no_no_update_schedules():
    assert not isinstance(OneShotSchedule(3), NoUpdateSchedule)
    assert not isinstance(PolynomialSchedule(2, 1, 6), NoUpdateSchedule)


def test_schedules_are_equal_by_all_of_their_fields():
    schedule = PolynomialSchedule(2, 1, 6)
    assert schedule == PolynomialSchedule(2, 1, 6, power=3, initial_sparsity=0.0)
    assert schedule != PolynomialSchedule(2, 1, 6, power=2)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (NoUpdateSchedule(), {0}),
        (OneShotSchedule(3), {0, 3}),
        (PeriodicSchedule(2, 4), {0, 4}),
        (PeriodicSchedule(2, 4, 9), {0, 4, 9}),
    ],
)
def test_functions_of_the_step_are_checked_at_the_ends_of_the_updates(schedule, steps):
    assert boundary_values(lambda step: -step, schedule) == {step: -step for step in steps}


def test_steps_are_as_many_as_the_count_of_a_state_holds():
    last = 2**31 - 1
    for make in (
        OneShotSchedule,
        lambda step: PeriodicSchedule(1, step),
        lambda step: PeriodicSchedule(step),
        lambda step: PolynomialSchedule(1, 0, step),
    ):
        make(last)
        with pytest.raises(ValueError, match=f"must be at most {last}, got .* = {last + 1}"):
            make(last + 1)


@pytest.mark.parametrize("missing", ["is_mask_update_iter", "get_sparsity_at_step"])
def test_a_schedule_without_a_method_is_refused_by_the_name_of_the_method(missing):
    methods = {"is_mask_update_iter", "get_sparsity_at_step"} - {missing}
    schedule = type("Own", (), dict.fromkeys(methods, lambda *_: None))()
    with pytest.raises(ValueError, match=rf"must have a method {missing}, got scheduler = <"):
        check_schedule(schedule)


def test_a_schedule_that_does_not_tell_its_steps_may_update_masks_from_step_0_on():
    class EverySecond:
        def is_mask_update_iter(self, step):
            return step % 2 == 0

        def get_sparsity_at_step(self, target_sparsities, step):
            return target_sparsities

    schedule = EverySecond()
    assert (has_updates(schedule), find_first_update(schedule)) == (True, 0)
    assert find_last_update(schedule) is None
    assert boundary_values(lambda step: step + 3, schedule) == {0: 3}
    never = NoUpdateSchedule()
    assert (has_updates(never), find_first_update(never), find_last_update(never)) == (
        False,
        0,
        None,
    )
