"""SET, RigL and static masks: what is dropped, what grows, and what never changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.algorithms.pruners import generate_random_scores
from sparsity.algorithms.sparse_trainers import DropAndGrow
from tests import helpers

# Updates in every step show most in a few steps.
pytestmark = pytest.mark.filterwarnings("ignore:.*skips the gradients of steps")


def _move(updater, weights, grads, mask, jit=False):
    """One mask update of the updater, from a given mask."""
    tx = updater.wrap_optax(optax.sgd(0.0))
    params = {"w": jnp.asarray(weights, jnp.float32)}
    state = tx.init(params)._replace(masks={"w": jnp.asarray(mask, jnp.uint8)})
    update = jax.jit(tx.update) if jit else tx.update
    updates, state = update({"w": jnp.asarray(grads, jnp.float32)}, state, params)
    return np.asarray(optax.apply_updates(params, updates)["w"]), np.asarray(state.masks["w"])


def _rigl(fraction=0.5, **kwargs):
    return sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.5),
        scheduler=sparsity.PeriodicSchedule(1),
        drop_fraction_fn=optax.constant_schedule(fraction),
        **kwargs,
    )


# RigL, by hand


def test_rigl_drops_the_smallest_weights_and_grows_the_largest_gradients():
    # Active: 4, -1, 0.5, 3. Half of them go: -1 and 0.5. The gradients 9 and -8 grow.
    weights, mask = _move(
        _rigl(),
        [[4.0, -1.0, 0.5, 3.0, 0.0, 0.0, 0.0, 0.0]],
        [[9.9, 0.1, 0.2, 9.9, 9.0, 1.0, -8.0, 2.0]],
        [[1, 1, 1, 1, 0, 0, 0, 0]],
    )
    np.testing.assert_array_equal(mask, [[1, 0, 0, 1, 1, 0, 1, 0]])
    np.testing.assert_array_equal(weights, [[4, 0, 0, 3, 0, 0, 0, 0]])


def test_a_dropped_weight_may_grow_again_and_keeps_its_value():
    # 0.5 and -1 are dropped, and 0.5 has the largest gradient of all that were not kept.
    weights, mask = _move(
        _rigl(),
        [[4.0, -1.0, 0.5, 3.0, 0.0, 0.0, 0.0, 0.0]],
        [[0.0, 0.1, 9.0, 0.0, 5.0, 1.0, 1.0, 1.0]],
        [[1, 1, 1, 1, 0, 0, 0, 0]],
    )
    np.testing.assert_array_equal(mask, [[1, 0, 1, 1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(weights, [[4, 0, 0.5, 3, 0, 0, 0, 0]])


def test_a_kept_weight_is_not_evicted_by_a_huge_gradient_nor_by_scores_too_large_for_an_epsilon():
    # min - eps and max + eps vanish at 1e30, and at infinity there is nothing beyond.
    weights, mask = _move(
        _rigl(),
        [[2e30, 1e30, 1e30, 3e30, 0.0, 0.0, 0.0, 0.0]],
        [[1e38, 1e38, 1e38, 1e38, np.inf, np.inf, np.inf, 1e38]],
        [[1, 1, 1, 1, 0, 0, 0, 0]],
    )
    np.testing.assert_array_equal(mask, [[1, 0, 0, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(weights[0, [0, 3]], np.array([2e30, 3e30], np.float32))


def test_nan_gradients_do_not_grow_and_nan_weights_are_dropped_first():
    updater = _rigl()
    weights, mask = _move(
        updater,
        [[4.0, np.nan, 0.5, 3.0, 0.0, 0.0, 0.0, 0.0]],
        [[0.0, 0.0, 0.0, 0.0, np.nan, 1.0, 2.0, np.nan]],
        [[1, 1, 1, 1, 0, 0, 0, 0]],
    )
    np.testing.assert_array_equal(mask, [[1, 0, 0, 1, 0, 1, 1, 0]])
    # An update cannot cancel NaN; applying the masks does.
    applied = updater.apply_masks({"w": jnp.asarray(weights)}, {"w": jnp.asarray(mask)})
    np.testing.assert_array_equal(applied["w"], [[4, 0, 0, 3, 0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("fraction", "kept"),
    # 8 active: round(8 (1 - f)), ties to even, and never fewer than one.
    [(0.0, 8), (0.1, 7), (0.25, 6), (0.3125, 6), (0.4375, 4), (0.9, 1), (1.0, 1)],
)
def test_the_drop_fraction_counts_active_weights_exactly(fraction, kept):
    weights = np.zeros((4, 4))
    weights[:2] = np.arange(1, 9).reshape(2, 4)
    grads = np.zeros((4, 4))
    grads[2:] = 1 + np.arange(8).reshape(2, 4)
    mask = np.repeat([1, 1, 0, 0], 4).reshape(4, 4)
    _, moved = _move(_rigl(fraction), weights, grads, mask)
    assert moved.sum() == 8
    assert moved[:2].sum() == kept
    # The largest stay, the largest grow.
    np.testing.assert_array_equal(moved[:2].ravel(), np.arange(8) >= 8 - kept)
    np.testing.assert_array_equal(moved[2:].ravel(), np.arange(8) >= kept)


@pytest.mark.slow
def test_a_full_mask_and_an_update_of_nothing_stay_as_they_are():
    weights, mask = _move(_rigl(), [[1.0, 2.0]], [[1.0, 1.0]], [[1, 1]])
    np.testing.assert_array_equal(mask, [[1, 1]])
    np.testing.assert_array_equal(weights, [[1, 2]])


def test_rigl_without_gradients_says_what_it_needs():
    for pruner, name in ((_rigl(), "RigL"), (sparsity.GlobalRigL(), "GlobalRigL")):
        with pytest.raises(ValueError, match=rf"^{name} grows weights by their gradients.*None"):
            pruner.get_grow_scores(None, {"w": jnp.ones((2, 2))}, None)


# SET, by the library's random numbers


def test_set_grows_the_highest_random_scores_among_all_that_were_not_kept():
    updater = sparsity.SET(
        sparsity_distribution_fn=helpers.uniform(0.5),
        scheduler=sparsity.PeriodicSchedule(1),
        drop_fraction_fn=optax.constant_schedule(0.5),
    )
    weights = np.array([[4.0, -1.0, 0.5, 3.0, 0.0, 0.0, 0.0, 0.0]])
    moved, mask = _move(updater, weights, np.ones((1, 8)), [[1, 1, 1, 1, 0, 0, 0, 0]])
    scores = np.array(generate_random_scores({"w": weights}, 8, 1)["w"]).astype(np.int64)
    scores[0, [0, 3]] = -1  # kept
    expected = np.zeros(8)
    expected[[0, 3]] = 1
    expected[np.argsort(-scores[0], kind="stable")[:2]] = 1
    np.testing.assert_array_equal(mask[0], expected)
    np.testing.assert_array_equal(moved[0], np.where(expected, weights[0], 0))


@pytest.mark.slow
def test_set_draws_other_weights_at_every_update():
    updater = sparsity.SET(
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.PeriodicSchedule(1)
    )
    tx = updater.wrap_optax(optax.sgd(0.0))
    params = {"w": jnp.ones((8, 8))}
    state = tx.init(params)
    masks = [np.asarray(state.masks["w"]).tobytes()]
    for _ in range(3):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
        masks.append(np.asarray(state.masks["w"]).tobytes())
    assert len(set(masks)) == 4


# Both


def _schedules():
    return {
        "constant": (optax.constant_schedule(0.3), [0.3] * 6),
        "cosine": (
            optax.cosine_decay_schedule(0.5, 6),
            [0.25 * (1 + np.cos(np.pi * step / 6)) for step in range(6)],
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("cls", [sparsity.SET, sparsity.RigL])
def test_every_layer_keeps_its_number_of_weights_and_drops_what_the_schedule_says(cls, schedule):
    fraction, values = _schedules()[schedule]
    kept_counts = []

    class Watched(cls):
        def get_grow_scores(self, sparse_state, params, grads):
            # What grows is new everywhere: nothing that is dropped comes back.
            return jax.tree.map(
                lambda mask, score: jnp.where(mask == 1, 0, score).astype(score.dtype),
                sparse_state.masks,
                super().get_grow_scores(sparse_state, params, grads),
            )

    updater = Watched(
        sparsity_distribution_fn=helpers.uniform(0.8, custom_sparsity_map={"b": 0.5}),
        scheduler=sparsity.PeriodicSchedule(1),
        drop_fraction_fn=fraction,
    )
    tx = updater.wrap_optax(optax.sgd(0.1))
    rng = np.random.default_rng(0)

    def draw():
        return {
            name: jnp.asarray(rng.normal(size=shape), jnp.float32)
            for name, shape in {"a": (10, 25), "b": (8, 16)}.items()
        }

    params = draw()
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(6):
        before = state.masks
        updates, state = update(draw(), state, params)
        params = optax.apply_updates(params, updates)
        assert int(state.masks["a"].sum()) == 50
        assert int(state.masks["b"].sum()) == 64
        kept_counts.append(int((before["a"] & state.masks["a"]).sum()))
    assert kept_counts == [round(50 * (1 - value)) for value in values]


@pytest.mark.parametrize("cls", [sparsity.SET, sparsity.RigL])
def test_defaults_are_those_of_the_papers(cls):
    updater = cls()
    assert float(updater.drop_fraction_fn(100)) == pytest.approx(0.3)
    assert updater.skip_gradients is True
    assert updater.is_sparse_gradients is True
    assert isinstance(updater, DropAndGrow)


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("cls", [sparsity.SET, sparsity.RigL])
def test_a_drop_fraction_outside_its_range_is_an_error_at_init(cls, fraction):
    updater = cls(
        sparsity_distribution_fn=helpers.uniform(0.5),
        drop_fraction_fn=optax.constant_schedule(fraction),
    )
    for init in (
        updater.wrap_optax(optax.sgd(0.1)).init,
        jax.jit(updater.wrap_optax(optax.sgd(0.1)).init),
    ):
        with pytest.raises(ValueError, match=r"drop_fraction_fn\(0\) must be in \[0, 1\]"):
            init({"w": jnp.ones((4, 4))})


def test_a_drop_fraction_is_checked_at_the_ends_of_the_schedule_too():
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.5),
        scheduler=sparsity.PeriodicSchedule(10, update_end_step=30),
        drop_fraction_fn=lambda step: 0.1 * step,
    )
    with pytest.raises(ValueError, match=r"drop_fraction_fn\(30\) must be in \[0, 1\].*3\.0"):
        updater.init_state({"w": jnp.ones((4, 4))})


@pytest.mark.parametrize("cls", [sparsity.SET, sparsity.RigL])
def test_a_drop_fraction_that_is_no_function_is_an_error_when_the_updater_is_made(cls):
    with pytest.raises(ValueError, match=r"drop_fraction_fn must be a function.*got.*0\.3"):
        cls(drop_fraction_fn=0.3)


@pytest.mark.parametrize("name", helpers.list_names(helpers.is_sparse_training))
def test_sparse_trainers_have_no_instant_sparsify(name):
    updater = sparsity.ALGORITHM_REGISTRY[name](sparsity_distribution_fn=helpers.uniform(0.5))
    with pytest.raises(RuntimeError, match=f"{type(updater).__name__}.*wrap_optax"):
        updater.instant_sparsify({"w": jnp.ones((4, 4))})


_FREE = [
    name
    for name in helpers.list_names(helpers.is_sparse_training)
    if not helpers.has_constant_fan_in(name)
]


@pytest.mark.parametrize("name", _FREE)
def test_training_starts_from_random_masks_of_the_exact_sparsity(name):
    updater = helpers.make_updater(name, sparsity=0.9)
    params = {"w": jnp.ones((10, 10)), "b": jnp.ones(10)}
    state = updater.wrap_optax(optax.sgd(0.1)).init(params)
    scores = np.asarray(generate_random_scores(params, 8)["w"]).ravel()
    expected = np.zeros(100)
    expected[np.argsort(-scores.astype(np.int64), kind="stable")[:10]] = 1
    np.testing.assert_array_equal(np.asarray(state.masks["w"]).ravel(), expected)
    assert state.masks["b"] is None


# Structured patterns


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        sparsity.NByM(1, 4),
        sparsity.NByM(2, 4, axis=-2),
        sparsity.Block((2, 4)),
        sparsity.Block((3, 5)),
        sparsity.Channel(-1),
        sparsity.Channel(0),
        sparsity.FanIn(1),
        sparsity.FanIn(5),
        sparsity.FanIn(4, axis=-1),
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", [sparsity.SET, sparsity.RigL])
def test_a_pattern_holds_after_every_update_and_the_mask_moves(cls, kind):
    updater = cls(
        sparsity_distribution_fn=helpers.uniform(0.75 if kind == sparsity.NByM(1, 4) else 0.5),
        scheduler=sparsity.PeriodicSchedule(1),
        sparsity_type=kind,
        drop_fraction_fn=optax.constant_schedule(0.5),
    )
    tx = updater.wrap_optax(optax.sgd(0.1))
    rng = np.random.default_rng(0)
    draw = lambda: {"w": jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)}  # noqa: E731
    params = draw()
    state = tx.init(params)
    units = _units(kind, np.asarray(state.masks["w"]))
    moved = 0
    for _ in range(4):
        before = np.asarray(state.masks["w"])
        updates, state = tx.update(draw(), state, params)
        params = optax.apply_updates(params, updates)
        mask = np.asarray(state.masks["w"])
        assert _units(kind, mask) == units
        assert np.count_nonzero(np.asarray(params["w"])[mask == 0]) == 0
        moved += int(np.any(mask != before))
    assert moved >= 2


def _units(kind, mask):
    """Checks the pattern; returns how many units are kept."""
    if isinstance(kind, sparsity.NByM):
        groups = np.moveaxis(mask, kind.axis, -1).reshape(-1, kind.m)
        assert np.all(groups.sum(axis=1) == kind.n)
        return int(mask.sum())
    if isinstance(kind, sparsity.Channel):
        rows = np.moveaxis(mask, kind.axis, 0)
        assert np.all(rows == rows[:, :1])
        return int(rows[:, 0].sum())
    if isinstance(kind, sparsity.FanIn):
        rows = np.moveaxis(mask, kind.axis, -1)
        for start in range(0, len(rows), kind.group):
            assert np.all(rows[start : start + kind.group] == rows[start])
        (fan_in,) = {*rows.sum(axis=1).tolist()}
        return fan_in
    height, width = kind.block_shape
    kept = 0
    for row in range(0, mask.shape[0], height):
        for column in range(0, mask.shape[1], width):
            block = mask[row : row + height, column : column + width]
            assert block.min() == block.max()
            kept += int(block[0, 0])
    return kept


@pytest.mark.slow
def test_rigl_of_n_by_m_by_hand():
    # 1:2 along the last axis. Active: 4, -1, 0.5, 3; half are dropped: -1 and 0.5. Their groups
    # regrow one each, by the gradient: the second entry of both.
    updater = _rigl(sparsity_type=sparsity.NByM(1, 2))
    weights, mask = _move(
        updater,
        [[4.0, 0.0, -1.0, 0.0], [0.5, 0.0, 0.0, 3.0]],
        [[1.0, 99.0, 1.0, 2.0], [1.0, 2.0, 99.0, 1.0]],
        [[1, 0, 1, 0], [1, 0, 0, 1]],
    )
    np.testing.assert_array_equal(mask, [[1, 0, 0, 1], [0, 1, 0, 1]])
    np.testing.assert_array_equal(weights, [[4, 0, 0, 0], [0, 0, 0, 3]])


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_every_slice_of_a_stack_moves_by_itself(jit):
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.5, batch_axes=1),
        scheduler=sparsity.PeriodicSchedule(1),
        drop_fraction_fn=optax.constant_schedule(0.5),
        batch_axes=1,
    )
    # The first slice's weights are 100 times those of the second.
    weights = [[[400.0, 100.0, 0.0, 0.0]], [[4.0, 1.0, 0.0, 0.0]]]
    grads = [[[0.0, 0.0, 1.0, 2.0]], [[0.0, 0.0, 200.0, 100.0]]]
    moved, mask = _move(updater, weights, grads, [[[1, 1, 0, 0]], [[1, 1, 0, 0]]], jit)
    np.testing.assert_array_equal(mask, [[[1, 0, 0, 1]], [[1, 0, 1, 0]]])
    np.testing.assert_array_equal(moved, [[[400, 0, 0, 0]], [[4, 0, 0, 0]]])


# Static


def test_the_static_mask_never_moves():
    updater = sparsity.StaticRandomSparse(
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.PeriodicSchedule(1)
    )
    tx = updater.wrap_optax(optax.adam(0.1))
    params = {"w": jnp.ones((4, 4))}
    state = tx.init(params)
    first = state.masks["w"]
    for _ in range(3):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_array_equal(state.masks["w"], first)
        np.testing.assert_array_equal(np.asarray(params["w"]) != 0, first)


def test_gradients_of_pruned_weights_stay_out_of_the_moments():
    updater = sparsity.StaticRandomSparse(sparsity_distribution_fn=helpers.uniform(0.5))
    tx = updater.wrap_optax(optax.adam(0.1))
    params = {"w": jnp.ones((4, 4))}
    _, state = tx.update(params, tx.init(params), params)
    np.testing.assert_array_equal(state.inner_state[0].mu["w"] != 0, state.masks["w"])


# Writing one


@pytest.mark.slow
def test_a_new_sparse_trainer_is_a_grow_score():
    @dataclasses.dataclass
    class GrowFirst(DropAndGrow):
        def get_grow_scores(self, sparse_state, params, grads):
            return jax.tree.map(lambda p: -jnp.arange(p.size).reshape(p.shape), params)

    updater = GrowFirst(
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.PeriodicSchedule(1)
    )
    _, mask = _move(updater, [[0.0, 0.0, 1.0, 2.0]], [[0.0] * 4], [[0, 0, 1, 1]])
    # 2 active and a fraction of 0.3: round(1.4) = 1 is kept, one grows from the left.
    np.testing.assert_array_equal(mask, [[1, 0, 0, 1]])
    with pytest.raises(NotImplementedError, match="get_grow_scores"):
        DropAndGrow().get_grow_scores(None, None, None)
