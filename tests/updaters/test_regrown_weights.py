"""Weights that RigL and SET regrow start at zero, with the state that init gives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers

_INNER = {
    "adam": optax.adam(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "yogi": optax.yogi(0.1),
    "adagrad": optax.adagrad(0.1),
    "rmsprop": optax.rmsprop(0.1, initial_scale=0.25, momentum=0.9),
    "lion": optax.lion(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "rprop": optax.rprop(0.1),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(0.1),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1), optax.scale(0.5)),
    "masked": optax.masked(optax.adagrad(0.1), {"kernel": True, "bias": False}),
    "multi_transform": optax.multi_transform(
        {"one": optax.adagrad(0.1), "two": optax.adam(0.1)}, {"kernel": "one", "bias": "two"}
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _INNER)
def test_grown_weights_start_at_zero_with_the_state_that_init_gives(name):
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.7),
        scheduler=sparsity.OneShotSchedule(3),
        is_sparse_gradients=False,  # so that pruned weights have a state that is not fresh
    )
    params, before = helpers.train(updater, helpers.params(), 3, _INNER[name], jit=False)
    tx = updater.wrap_optax(_INNER[name])
    updates, after = tx.update(helpers.grads(3), before, params)
    moved = optax.apply_updates(params, updates)

    old, new = np.asarray(before.masks["kernel"]), np.asarray(after.masks["kernel"])
    grown = (new == 1) & (old == 0)
    # 18 are active and round(18 * 0.7) = 13 kept; of the 5 that grow some were active before.
    assert 1 <= grown.sum() <= 5
    assert old.sum() == new.sum() == 18
    assert np.all(helpers.is_positive_zero(moved["kernel"])[grown | (new == 0)])
    kept = (old == 1) & (new == 1)
    np.testing.assert_array_equal(np.asarray(moved["kernel"])[kept], params["kernel"][kept])
    np.testing.assert_array_equal(moved["bias"], params["bias"])

    zero = {"kernel": jnp.where(old, params["kernel"], 0), "bias": params["bias"]}
    fresh = _INNER[name].init(zero)
    reset = 0
    for (path, was), now, init in zip(
        jax.tree_util.tree_leaves_with_path(before.inner_state),
        jax.tree.leaves(after.inner_state),
        jax.tree.leaves(fresh),
        strict=True,
    ):
        assert was.dtype == now.dtype, path
        if was.shape == helpers.SHAPE:
            expected = np.where(grown, init, was)
            reset += bool(np.any(expected != np.asarray(was)))
        else:
            expected = was
        np.testing.assert_array_equal(now, expected, err_msg=jax.tree_util.keystr(path))
    assert reset  # otherwise the test shows nothing


@pytest.mark.slow
def test_factored_second_moments_stay_as_they_are():
    inner = optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9)
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.7),
        scheduler=sparsity.OneShotSchedule(2),
        is_sparse_gradients=False,
    )
    params, before = helpers.train(updater, helpers.params(), 2, inner, jit=False)
    _, after = updater.wrap_optax(inner).update(helpers.grads(2), before, params)
    old, new = np.asarray(before.masks["kernel"]), np.asarray(after.masks["kernel"])
    grown = (new == 1) & (old == 0)
    assert grown.any()
    changed = [
        jax.tree_util.keystr(path)
        for (path, was), now in zip(
            jax.tree_util.tree_leaves_with_path(before.inner_state),
            jax.tree.leaves(after.inner_state),
            strict=True,
        )
        if not np.array_equal(was, now)
    ]
    # The momentum has the parameter's shape; v_row (6,) and v_col (10,) have not.
    assert len(changed) == 1
    assert changed[0].endswith("['kernel']")


@pytest.mark.slow
def test_square_factors_and_lookalike_names_are_not_taken_for_a_parameters_state():
    # 'mu/a' of the parameters and Adam's field mu of 'a' have the same names, not the same path.
    params = {"a": jnp.ones((4, 4)), "mu": {"a": jnp.ones((4, 4))}}
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.5, custom_sparsity_map={"mu/a": None}),
        scheduler=sparsity.OneShotSchedule(1),
    )
    tx = updater.wrap_optax(optax.adam(0.1))
    state = tx.init(params)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    _, after = tx.update(jax.tree.map(lambda g: -g[::-1], grads), state, params)
    grown = (after.masks["a"] == 1) & (state.masks["a"] == 0)
    assert grown.any()
    before, now = state.inner_state[0], after.inner_state[0]
    np.testing.assert_array_equal(now.mu["a"], np.where(grown, 0, before.mu["a"]))
    np.testing.assert_array_equal(now.mu["mu"]["a"], before.mu["mu"]["a"])
    np.testing.assert_array_equal(now.nu["mu"]["a"], before.nu["mu"]["a"])


KERNEL = jnp.ones((4, 3))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("flatten", helpers.params()),
        ("flatten", {"kernel": KERNEL}),
        ("flatten", KERNEL),
        ("lookahead", optax.LookaheadParams(helpers.params(), helpers.params())),
    ],
)
def test_an_optimizer_that_hides_its_parameters_is_refused_at_init(name, params):
    updater = helpers.make_updater("rigl")
    inner = optax.adam(0.1)
    inner = optax.flatten(inner) if name == "flatten" else optax.lookahead(inner, 5, 0.5)
    with pytest.raises(ValueError, match=f"optax.{name}"):
        updater.wrap_optax(inner).init(params)


@pytest.mark.parametrize("params", [{"kernel": KERNEL}, KERNEL, {"kernel": KERNEL, "bias": None}])
def test_an_optimizer_of_one_parameter_hides_nothing(params):
    updater = helpers.make_updater("rigl")
    state = updater.wrap_optax(optax.adam(0.1)).init(params)
    assert jax.tree.structure(state.inner_state[0].mu) == jax.tree.structure(params)


@pytest.mark.slow
def test_a_state_without_arrays_of_the_parameters_needs_no_reset():
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.7), scheduler=sparsity.PeriodicSchedule(2)
    )
    schedule = optax.linear_schedule(0.1, 0.0, 10)
    for inner in (
        optax.sgd(0.1),
        optax.sgd(schedule),
        optax.inject_hyperparams(optax.sgd)(schedule),
    ):
        params, state = helpers.train(updater, helpers.params(), 4, inner, jit=False)
        assert np.count_nonzero(params["kernel"]) <= 18
        assert int(np.sum(state.masks["kernel"])) == 18


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_weights_that_a_falling_sparsity_brings_back_restart(packed):
    class Falling(sparsity.PeriodicSchedule):
        def get_sparsity_at_step(self, target_sparsities, step):
            return jax.tree.map(lambda _: jnp.where(step < 2, 0.75, 0.25), target_sparsities)

    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5, filter_fn=lambda *_: True),
        scheduler=Falling(2),
        use_packed_masks=packed,
    )
    tx = updater.wrap_optax(optax.sgd(0.5, momentum=0.5))
    params = jnp.array([8.0, 4.0, 2.0, 1.0])
    state = tx.init(params)
    for _ in range(3):  # the first and the third move the masks
        updates, state = jax.jit(tx.update)(jnp.ones(4), state, params)
        params = optax.apply_updates(params, updates)
    # The first weight is kept throughout: steps of 0.5, 0.75 and 0.875.
    np.testing.assert_allclose(params, [8 - 2.125, -0.5, -0.5, 0.0])
    np.testing.assert_allclose(state.inner_state[0].trace, [1.75, 1.0, 1.0, 1.75])
