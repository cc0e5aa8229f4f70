"""Warnings about settings under which nothing is pruned, or nothing is trained."""

import jax
import jax.numpy as jnp
import optax
import pytest

import sparsity
from tests import helpers

_PARAMS = {"w": jnp.arange(1.0, 33.0).reshape(4, 8), "b": jnp.ones(8)}
_HALF = sparsity.Uniform(0.5)
_NAMES = sparsity.all_algorithm_names()
_STE = ("magnitude_ste", "random_ste", "sr_ste")
# Others make their masks before they train, or in the first step.
_WAITS = [name for name in helpers.list_names(helpers.starts_dense) if name not in (*_STE, "snip")]
_MOVES = ["set", "rigl", "srigl", "global_rigl", "top_kast"]
_WITH_MASKS = [name for name in _NAMES if name not in (*_WAITS, *_STE)]


def _init(updater, **options):
    return updater.wrap_optax(optax.sgd(0.1), **options).init(_PARAMS)


def _make(name, **options):
    return sparsity.create_updater_from_config({"algorithm": name, "sparsity": 0.5} | options)


@pytest.mark.parametrize("name", _WAITS)
def test_a_target_without_a_schedule_is_warned_of(name):
    updater = _make(name)
    with pytest.warns(UserWarning, match="training stays dense") as caught:
        state = _init(updater)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith(f"{type(updater).__name__} has target sparsities, but all masks are one")
    assert "scheduler = NoUpdateSchedule() never updates them" in text
    for remedy in ("PolynomialSchedule(", "update_start_step", "wrap_optax(tx, masks=masks)"):
        assert remedy in text
    assert state.masks["w"].all()


@pytest.mark.parametrize("kind", [sparsity.MagnitudePruning, sparsity.RigL])
def test_init_warns_of_a_schedule_without_a_target_sparsity(kind):
    once = sparsity.OneShotSchedule(0)
    with pytest.warns(UserWarning, match="no parameter has a target sparsity") as caught:
        state = _init(kind(scheduler=once))
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith(f"{kind.__name__} has scheduler = {once!r}")
    assert "Uniform(0.8)" in text
    assert state.masks == {"w": None, "b": None}


def test_init_accepts_dense_baselines_masks_of_users_and_vectors_without_a_warning():
    once = sparsity.OneShotSchedule(0)
    _init(sparsity.NoPruning(scheduler=once))
    _init(sparsity.MagnitudePruning(scheduler=once, sparsity_distribution_fn=None))
    masks = {"w": jnp.ones((4, 8), bool).at[0].set(False), "b": None}
    _init(sparsity.MagnitudePruning(scheduler=once), masks=masks)
    sparsity.MagnitudePruning(scheduler=once).wrap_optax(optax.sgd(0.1)).init({"b": jnp.ones(8)})
    for batch_axes in (1, lambda path, param: param.ndim - 1):
        stacked = sparsity.MagnitudePruning(scheduler=once, batch_axes=batch_axes)
        stacked.wrap_optax(optax.sgd(0.1)).init({"b": jnp.ones((3, 8))})


def test_the_schedule_that_the_text_proposes_is_one():
    with pytest.warns(UserWarning, match="Set a scheduler") as caught:
        _init(_make("magnitude"))
    text = str(caught[0].message)
    proposed = text[text.index("PolynomialSchedule(") :].partition(")")[0] + ")"
    schedule = eval(proposed, {"PolynomialSchedule": sparsity.PolynomialSchedule})
    _init(sparsity.MagnitudePruning(sparsity_distribution_fn=_HALF, scheduler=schedule))


def test_straight_through_with_stored_masks_is_warned_of_and_without_is_not():
    for name in _STE:
        with pytest.warns(UserWarning, match="training stays dense"):
            _init(_make(name, store_masks=True))
        _init(_make(name))


@pytest.mark.parametrize("name", [x for x in _WITH_MASKS if x not in _MOVES])
def test_algorithms_with_masks_from_the_start_are_not_warned_of(name):
    _init(_make(name))


@pytest.mark.parametrize("name", _MOVES)
def test_an_algorithm_that_moves_masks_is_warned_of_without_a_schedule(name):
    updater = _make(name)
    with pytest.warns(UserWarning, match="moves masks") as caught:
        _init(updater)
    assert len(caught) == 1
    assert "PeriodicSchedule(update_freq=100)" in str(caught[0].message)
    _init(_make(name, update_freq=100))
    _init(_make(name, sparsity=0.0))


@pytest.mark.parametrize("name", [*_WAITS, *_STE])
@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 0.0},
        {"update_freq": 2, "update_start_step": 0, "update_end_step": 10},
        {"update_start_step": 5, "update_end_step": 5},
    ],
    ids=["sparsity 0", "a ramp", "one shot"],
)
def test_what_becomes_sparse_or_shall_not_is_not_warned_of(name, options):
    _init(_make(name, **options))


def test_dense_models_and_given_masks_are_not_warned_of():
    _init(sparsity.MagnitudePruning())
    _init(sparsity.MagnitudePruning(sparsity_distribution_fn=None))
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=_HALF)
    masks = pruner.instant_sparsify(_PARAMS)[1]
    _init(pruner, masks=masks)
    # But of given masks without a zero.
    with pytest.warns(UserWarning, match="training stays dense"):
        _init(pruner, masks={"w": jnp.ones((4, 8)), "b": None})


@pytest.mark.parametrize("cls", [sparsity.SET, sparsity.RigL])
@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (sparsity.PeriodicSchedule(1), "in every step from 0 on: no weight"),
        (sparsity.PeriodicSchedule(1, 5), "in every step from 5 on: no weight"),
        (sparsity.PeriodicSchedule(1, 5, 90), "in every step from 5 to 90: no weight"),
    ],
)
def test_updates_in_every_step_that_skip_all_gradients_are_warned_of(cls, schedule, text):
    with pytest.warns(UserWarning, match=text) as caught:
        _init(cls(sparsity_distribution_fn=_HALF, scheduler=schedule))
    message = str(caught[0].message)
    assert len(caught) == 1
    assert message.startswith(f"{cls.__name__} skips the gradients of steps that update masks")
    assert "Set a larger update_freq, or skip_gradients=False" in message


@pytest.mark.parametrize("cls", [sparsity.SET, sparsity.RigL])
@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": sparsity.PeriodicSchedule(2)},
        {"scheduler": sparsity.PeriodicSchedule(1), "skip_gradients": False},
        {"scheduler": sparsity.PeriodicSchedule(1, 3, 3)},
        {"scheduler": sparsity.OneShotSchedule(3)},
    ],
    ids=repr,
)
def test_updates_that_leave_steps_to_train_are_not_warned_of(cls, options):
    _init(cls(sparsity_distribution_fn=_HALF, **options))


def test_a_pruner_that_skips_is_warned_of_too():
    options = {"sparsity_distribution_fn": _HALF, "scheduler": sparsity.PeriodicSchedule(1)}
    with pytest.warns(UserWarning, match="MagnitudePruning skips the gradients"):
        _init(sparsity.MagnitudePruning(skip_gradients=True, **options))
    _init(sparsity.MagnitudePruning(**options))


@pytest.mark.parametrize(
    "call",
    [
        lambda tx: tx.init(_PARAMS),
        lambda tx: optax.chain(tx).init(_PARAMS),
        lambda tx: jax.jit(tx.init)(_PARAMS),
        lambda tx: jax.eval_shape(tx.init, _PARAMS),
    ],
    ids=["plain", "chain", "jit", "eval_shape"],
)
def test_the_warning_names_the_line_of_the_user(call):
    options = {"scheduler": sparsity.OneShotSchedule(0)}
    tx = sparsity.MagnitudePruning(**options).wrap_optax(optax.sgd(0.1))
    with pytest.warns(UserWarning, match="no parameter has a target sparsity") as caught:
        call(tx)
    assert (caught[0].filename, caught[0].lineno) == (__file__, call.__code__.co_firstlineno)
