"""The mechanics of one step, each on its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.training import hooks, step as steps_lib
from sparsity.training.inner import InnerOptimizer
from sparsity.training.state import SparseState
from tests import helpers

# call_hook


def test_a_hook_gets_only_the_extra_arguments_that_it_names():
    def hook(params, *, value):
        return params, value

    assert hooks.call_hook(hook, 1, extra={"value": 2, "other": 3}) == (1, 2)


def test_a_hook_that_takes_all_keywords_gets_all_extra_arguments():
    def hook(params, **extra):
        return params, extra

    assert hooks.call_hook(hook, 1, extra={"value": 2, "other": 3}) == (
        1,
        {"value": 2, "other": 3},
    )


def test_an_argument_that_both_the_library_and_the_loop_pass_is_refused():
    def hook(params, draw=None):
        return params, draw

    with pytest.raises(TypeError, match=r"hook names 'draw', .* tx\.update\(\.\.\., draw=\.\.\.\)"):
        hooks.call_hook(hook, 1, extra={"draw": 2}, named={"draw": 3})
    assert hooks.call_hook(hook, 1, extra={"other": 2}, named={"draw": 3}) == (1, 3)
    assert hooks.call_hook(lambda params: params, 1, extra={"draw": 2}, named={"draw": 3}) == 1


def test_a_hook_that_takes_all_positions_gets_the_arguments_that_it_names():
    def hook(*args, draw):
        return args, draw

    assert hooks.call_hook(hook, 1, 2, extra={}, named={"draw": 3}) == ((1, 2), 3)


def test_a_hook_that_names_no_extra_argument_gets_none():
    assert hooks.call_hook(lambda params, grads: (params, grads), 1, grads=5, extra={"a": 2}) == (
        1,
        5,
    )


# Step


def _wrap(updater, tx, masks):
    return steps_lib.Step(InnerOptimizer(optax.with_extra_args_support(tx), updater, masks))


@pytest.mark.parametrize(
    ("updater", "answers"),
    [
        # sets zeros, keeps zeros
        (sparsity.MagnitudePruning(), (True, True)),
        (sparsity.SaliencyPruning(), (True, True)),
        (sparsity.MagnitudePruning(is_sparse_updates=False), (False, True)),
        (sparsity.RigL(), (True, True)),
        (sparsity.SteMagnitudePruning(), (False, False)),
        (
            sparsity.SteMagnitudePruning(is_sparse_updates=True, store_masks=True),
            (True, True),
        ),
    ],
)
def test_a_step_answers_once_how_pruned_weights_are_kept(updater, answers):
    step = _wrap(updater, optax.sgd(0.1), None)
    assert (step.zeroes_updates, step.pruned_are_zero) == answers


def test_the_phases_of_a_step_can_be_called_alone():
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5), scheduler=sparsity.OneShotSchedule(0)
    )
    step = _wrap(updater, optax.sgd(0.5), None)
    params, grads = jnp.array([[1.0, -3.0], [2.0, 0.5]]), jnp.ones((2, 2))
    state = step.init(params)
    inputs = step.read_inputs(grads, state, params, {})
    assert step.accumulate(state, inputs) is state
    updated, change = step.maybe_update_masks(state, inputs)
    np.testing.assert_array_equal(updated.masks, [[0, 1], [1, 0]])
    assert change == (True, None)
    assert int(updated.count) == 0
    steps, after = step.transform(updated, inputs, change)
    np.testing.assert_array_equal(steps, [[-1.0, -0.5], [-0.5, -0.5]])
    assert int(after.count) == 1


# make_updates_set_zeros


@pytest.mark.parametrize(
    ("update_dtype", "param_dtype"),
    [
        (jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.float16),
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.float16),
        (jnp.complex64, jnp.complex64),
    ],
)
def test_pruned_weights_land_on_positive_zero_in_every_dtype(update_dtype, param_dtype):
    # 0.1 and 1/3 round in every dtype; a bfloat16 -p would miss a float32 p.
    params = {"w": jnp.array([0.1, -1 / 3, 1e4, -0.0], param_dtype)}
    steps = {"w": jnp.array([0.3, 0.7, 0.2, 0.1], update_dtype)}
    masks = {"w": jnp.array([0, 0, 0, 0], jnp.uint8)}
    landed = steps_lib.make_updates_set_zeros(steps, params, masks)
    assert landed["w"].dtype == jnp.promote_types(update_dtype, param_dtype)
    result = optax.apply_updates(params, landed)
    assert result["w"].dtype == param_dtype
    values = np.asarray(result["w"].astype(jnp.complex64)).view(np.float32)
    assert np.all(helpers.is_positive_zero(values))


def test_updates_of_kept_weights_and_dense_leaves_pass_unchanged():
    steps = {"w": jnp.array([0.3, 0.7]), "b": jnp.array([0.25])}
    params = {"w": jnp.array([1.0, 2.0]), "b": jnp.array([5.0])}
    masks = {"w": jnp.array([1, 0], jnp.uint8), "b": None}
    landed = steps_lib.make_updates_set_zeros(steps, params, masks)
    np.testing.assert_array_equal(landed["w"], np.array([0.3, -2.0], np.float32))
    assert landed["b"] is steps["b"]


def test_a_nan_update_of_a_pruned_weight_does_not_pass():
    steps = {"w": jnp.array([np.nan, np.inf, np.nan])}
    params = {"w": jnp.array([1.0, 2.0, 4.0])}
    masks = {"w": jnp.array([0, 0, 1], jnp.uint8)}
    landed = steps_lib.make_updates_set_zeros(steps, params, masks)
    np.testing.assert_array_equal(landed["w"], [-1.0, -2.0, np.nan])


def test_a_mask_whose_update_is_missing_is_named():
    with pytest.raises(ValueError, match=r"updates have no leaf at 'layer/w'"):
        steps_lib.make_updates_set_zeros(
            {"b": jnp.ones(2)},
            {"layer": {"w": jnp.ones(2)}, "b": jnp.ones(2)},
            {"layer": {"w": jnp.ones(2, jnp.uint8)}, "b": None},
        )


# Step.restart and start_from_zero


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_grown_weights_take_the_fresh_state_and_others_keep_theirs(packed):
    params = {"w": jnp.array([5.0, 6.0, 0.0, 8.0, 0.0])}
    old = {"w": jnp.array([1, 1, 0, 0, 0], jnp.uint8)}
    updater = sparsity.RigL(use_packed_masks=packed)
    tx = optax.chain(optax.add_noise(0.1, 0.1, jax.random.key(0)), optax.trace(0.9))
    step = _wrap(updater, tx, old)
    moments = optax.TraceState({"w": jnp.array([1.0, 2.0, 3.0, 4.0, 5.0])})
    new_masks = {"w": jnp.array([1, 0, 0, 1, 1], jnp.uint8)}
    new = SparseState(new_masks, (tx.init(params)[0]._replace(count=jnp.int32(7)), moments))
    result, grown = step.restart(new, old, updater.make_inputs(params))
    # The last two weights are new: old mask 0, new mask 1. One of them is not 0, and marked.
    np.testing.assert_array_equal(result.inner_state[1].trace["w"], [1.0, 2.0, 3.0, 0.0, 0.0])
    assert int(result.inner_state[0].count) == 7
    if packed:
        np.testing.assert_array_equal(np.unpackbits(np.asarray(grown["w"]))[:5], [0, 0, 0, 1, 0])
    else:
        np.testing.assert_array_equal(result.masks["w"], [1, 0, 0, 2, 1])


def test_updates_of_grown_weights_cancel_the_present_value():
    steps = {"w": jnp.array([0.5, 0.5]), "b": jnp.array([1.0])}
    params = {"w": jnp.array([2.0, 4.0]), "b": jnp.array([3.0])}
    grown = {"w": jnp.array([False, True]), "b": None}
    result = steps_lib.start_from_zero(steps, params, grown)
    np.testing.assert_array_equal(result["w"], [0.5, -3.5])
    assert result["b"] is steps["b"]


# check_resettable


def test_flatten_and_lookahead_inside_a_regrowing_updater_are_refused_by_name():
    params = {"w": jnp.ones((2, 4)), "b": jnp.ones(4)}
    flat = optax.flatten(optax.adam(0.1))
    with pytest.raises(ValueError, match=r"cannot wrap optax\.flatten.*Leave optax\.flatten out"):
        _wrap(sparsity.RigL(), flat, None).inner.check_resettable(params, flat.init(params))
    ahead = optax.lookahead(optax.adam(0.1), 5, 0.5)
    both = optax.LookaheadParams(params, params)
    with pytest.raises(ValueError, match=r"cannot wrap optax\.lookahead"):
        _wrap(sparsity.RigL(), ahead, None).inner.check_resettable(params, ahead.init(both))


def test_moments_in_a_list_of_their_own_are_refused_where_weights_regrow():
    def init(params):
        return {"moments": [jnp.zeros_like(leaf) for leaf in jax.tree.leaves(params)]}

    tx = optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))
    params = {"w": jnp.ones((2, 4)), "b": jnp.ones(4)}
    with pytest.raises(
        ValueError, match=r"cannot wrap arrays such as 'moments/1' outside of trees"
    ):
        sparsity.RigL().wrap_optax(tx).init(params)
    sparsity.StaticRandomSparse().wrap_optax(tx).init(params)


def test_only_updaters_that_never_regrow_take_an_optimizer_of_chosen_entries():
    params, mask = {"w": jnp.array([4.0, 3.0, 2.0])}, {"w": jnp.array([1, 0, 1], jnp.uint8)}
    rigl = sparsity.RigL(scheduler=sparsity.PeriodicSchedule(2))
    chosen = sparsity.train_only(optax.sgd(0.5), {"w": jnp.array([1, 1, 0])})
    for tx in (chosen, optax.chain(chosen)):
        with pytest.raises(ValueError, match=r"cannot wrap sparsity\.train_only"):
            rigl.wrap_optax(tx, masks=mask).init(params)
        tx = sparsity.StaticRandomSparse().wrap_optax(tx, masks=mask)
        updates, _ = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
        np.testing.assert_array_equal(updates["w"], [-0.5, -3.0, 0.0])
    every = sparsity.train_only(optax.sgd(0.5), {"w": jnp.ones(3)})  # has the state of parameters
    rigl.wrap_optax(every, masks=mask).init(params)


@pytest.mark.parametrize(
    "params",
    [{"w": jnp.ones(4)}, {"w": jnp.ones((2, 4)), "b": jnp.ones(4)}, jnp.ones((2, 3)), {}],
    ids=["one vector", "matrix and bias", "bare array", "no leaf"],
)
def test_ordinary_states_are_resettable(params):
    for tx in (optax.sgd(0.1), optax.adam(0.1), optax.adafactor(0.1)):
        _wrap(sparsity.RigL(), tx, None).inner.check_resettable(params, tx.init(params))


@pytest.mark.parametrize(("count", "first"), [(None, 0), (0, 0), (7, 7)])
def test_a_hook_may_give_the_first_count_as_a_number_or_leave_it_out(count, first):
    class Custom(sparsity.MagnitudePruning):
        def init_state(self, params):
            return super().init_state(params)._replace(count=count)

    state = Custom().wrap_optax(optax.sgd(0.1)).init({"w": jnp.ones((2, 3))})
    assert (int(state.count), state.count.dtype) == (first, jnp.int32)
