"""The state: found in every nesting, made of arrays; and fields that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers

# Updates in every step show most in a few steps.
pytestmark = pytest.mark.filterwarnings("ignore:.*skips the gradients of steps")

# Finding the state.


def _nestings():
    wrapped = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.OneShotSchedule(0)
    ).wrap_optax(optax.adam(0.1))
    labels = {"kernel": "sparse", "bias": "dense"}

    def injected(rate):
        return sparsity.MagnitudePruning(
            sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.OneShotSchedule(0)
        ).wrap_optax(optax.adam(rate))

    return {
        "itself": wrapped,
        "chain": optax.chain(optax.clip(1.0), wrapped),
        "named_chain": optax.named_chain(("clip", optax.clip(1.0)), ("sparse", wrapped)),
        "multi_transform": optax.multi_transform(
            {"sparse": wrapped, "dense": optax.sgd(0.1)}, labels
        ),
        "masked": optax.masked(wrapped, {"kernel": True, "bias": False}),
        "MultiSteps": optax.MultiSteps(wrapped, 1).gradient_transformation(),
        "inject_hyperparams": optax.inject_hyperparams(injected)(0.1),
        "apply_if_finite": optax.apply_if_finite(wrapped, 3),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", _nestings())
def test_the_state_is_found_and_replaced_in_every_nesting(name):
    tx = _nestings()[name]
    params = helpers.params()
    updates, state = jax.jit(tx.update)(helpers.grads(0), tx.init(params), params)
    actual = sparsity.get_sparse_state(state)
    assert isinstance(actual, sparsity.SparseState)
    assert int(actual.count) == 1
    assert int(actual.masks["kernel"].sum()) == 30
    assert np.count_nonzero(optax.apply_updates(params, updates)["kernel"]) == 30
    pruned = sparsity.MagnitudePruning().post_gradient_update(params, state)
    assert np.count_nonzero(pruned["kernel"]) == 30
    replaced = sparsity.set_sparse_state(state, actual._replace(count=jnp.int32(41)))
    assert int(sparsity.get_sparse_state(replaced).count) == 41
    assert jax.tree.structure(replaced) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, sparsity.set_sparse_state(replaced, actual), state)


def test_no_state_and_two_states_are_value_errors():
    params = helpers.params()
    wrapped = sparsity.MagnitudePruning().wrap_optax(optax.sgd(0.1))
    for state in (optax.adam(0.1).init(params), None, ()):
        for call in (
            sparsity.get_sparse_state,
            lambda state: sparsity.set_sparse_state(state, sparsity.SparseState()),
            lambda state: sparsity.MagnitudePruning().post_gradient_update(params, state),
        ):
            with pytest.raises(ValueError, match="holds none"):
                call(state)
    twice = optax.chain(wrapped, optax.clip(1.0), wrapped).init(params)
    with pytest.raises(ValueError, match=r"holds 2, at '\[0\]', '\[2\]'"):
        sparsity.get_sparse_state(twice)


def test_an_optimizer_is_wrapped_once():
    params, wrapped = helpers.params(), helpers.make_updater("rigl").wrap_optax(optax.adam(0.1))
    for inner in (wrapped, optax.chain(optax.clip(1.0), wrapped)):
        for updater in (sparsity.MagnitudePruning(), sparsity.NoPruning()):
            with pytest.raises(ValueError, match=r"^Wrap an optimizer once.* optax\.adam\(1e-3\)"):
                updater.wrap_optax(inner).init(params)


# The state itself.


def test_the_state_holds_arrays_only_and_init_works_under_eval_shape():
    tx = helpers.make_updater("rigl").wrap_optax(optax.adam(0.1))
    state = tx.init(helpers.params())
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    shapes = jax.eval_shape(tx.init, helpers.params())
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert [(s.shape, s.dtype) for s in jax.tree.leaves(shapes)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)
    ]
    assert state.target_sparsities["kernel"].dtype == jnp.float32
    assert state.target_sparsities["bias"] is None


def test_init_takes_the_placeholder_of_optax_tree_map_params():
    for cls in (sparsity.MagnitudePruning, sparsity.RigL, sparsity.GlobalMagnitudePruning):
        options = (
            {"sparsity": 0.5}
            if cls is sparsity.GlobalMagnitudePruning
            else {"sparsity_distribution_fn": helpers.uniform(0.5)}
        )
        schedule = sparsity.PeriodicSchedule(2)
        tx = cls(scheduler=schedule, **options).wrap_optax(optax.adam(0.1))
        state = tx.init(helpers.params())
        doubled = optax.tree.map_params(tx, lambda leaf: leaf + 1, state)
        np.testing.assert_array_equal(doubled.inner_state[0].mu["kernel"], np.ones(helpers.SHAPE))
        assert int(doubled.inner_state[0].count) == 0


@pytest.mark.slow
def test_the_count_stops_at_the_largest_integer():
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5),
        scheduler=sparsity.PolynomialSchedule(1, 0, 5),
    )
    tx = updater.wrap_optax(optax.sgd(0.1))
    params = helpers.params()
    state = tx.init(params)._replace(count=jnp.int32(2**31 - 1))
    _, state = tx.update(helpers.grads(0), state, params)
    assert int(state.count) == 2**31 - 1


def test_an_updater_without_a_distribution_prunes_nothing():
    for cls in (sparsity.MagnitudePruning, sparsity.RigL, sparsity.SteMagnitudePruning):
        updater = cls(sparsity_distribution_fn=None, scheduler=sparsity.PeriodicSchedule(1))
        params, state = helpers.train(updater, helpers.params(), 2, jit=False)
        assert np.count_nonzero(params["kernel"]) == 60
        assert jax.tree.leaves(state.masks) == []


# Bad values.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity_type": "nm_2,4"}, "sparsity_type must be"),
        ({"scheduler": 5}, "scheduler must have a method is_mask_update_iter"),
        ({"scheduler": None}, "scheduler must have a method"),
        (
            {"scheduler": sparsity.PeriodicSchedule},
            "scheduler must have a method .*got scheduler =",
        ),
        ({"sparsity_distribution_fn": 0.5}, "sparsity_distribution_fn must be a function"),
        ({"sparsity_distribution_fn": sparsity.Uniform}, "function of params .*Uniform.0.8., got"),
        ({"topk_fn": 3}, "topk_fn must be a function"),
        ({"batch_axes": -1}, "batch_axes must be at least 0, got batch_axes = -1"),
        ({"batch_axes": 1.5}, "batch_axes must be an integer, got batch_axes = 1.5"),
        ({"sparsity_type": sparsity.Block}, "sparsity_type must be .*Block"),
        ({"use_packed_masks": "yes"}, "use_packed_masks must be True or False.*'yes'"),
        ({"is_sparse_updates": 1}, "is_sparse_updates must be True or False.*1"),
    ],
)
def test_a_bad_field_is_a_value_error_when_the_updater_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        sparsity.MagnitudePruning(**options)


def test_shapes_have_no_first_state_and_the_error_says_how_to_get_its_shapes():
    tx = helpers.make_updater("rigl").wrap_optax(optax.sgd(0.1))
    shapes = jax.eval_shape(helpers.params)
    with pytest.raises(
        ValueError, match=r"params\['kernel'\] has no values yet.*eval_shape.tx.init"
    ):
        tx.init(shapes)
    jax.eval_shape(tx.init, shapes)


def test_a_state_in_place_of_masks_is_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"masks must be a tree .*SparseState.*get_sparse_state"):
        sparsity.StaticRandomSparse().wrap_optax(optax.sgd(0.1), sparsity.SparseState({}))


@pytest.mark.parametrize("value", [1.5, -0.1, float("nan"), 80])
def test_a_sparsity_outside_its_range_names_the_leaf(value):
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=lambda params: {"kernel": value, "bias": None}
    )
    with pytest.raises(ValueError, match="'kernel'"):
        updater.wrap_optax(optax.sgd(0.1)).init(helpers.params())
    with pytest.raises(ValueError, match="'kernel'"):
        updater.instant_sparsify(helpers.params())


def test_a_distribution_for_other_parameters_names_the_leaf():
    updater = sparsity.MagnitudePruning(sparsity_distribution_fn=lambda params: {"kernle": 0.5})
    with pytest.raises(ValueError, match="'kernle'"):
        updater.init_state(helpers.params())


def test_a_function_that_returns_no_sparsity_type_names_the_leaf():
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5), sparsity_type=lambda path, param: "nm_2,4"
    )
    with pytest.raises(ValueError, match=r"sparsity_type of 'kernel' must be .*'nm_2,4'"):
        updater.init_state(helpers.params())


@pytest.mark.parametrize("seed", [1.5, "8"], ids=repr)
def test_a_seed_that_is_neither_integer_nor_key_is_refused_when_the_updater_is_made(seed):
    with pytest.raises((ValueError, TypeError), match="rng_seed"):
        sparsity.RandomPruning(rng_seed=seed)


@pytest.mark.parametrize("name", ["magnitude", "rigl"])
def test_update_refuses_a_state_that_no_wrapped_optimizer_made(name):
    params = {"kernel": jnp.ones((4, 8))}
    tx = helpers.make_updater(name).wrap_optax(optax.adam(0.1))
    state = tx.init(params)
    for wrong in (None, (), state.inner_state, (state,), {"masks": state.masks}):
        with pytest.raises(ValueError, match=f"SparseState.* of type {type(wrong).__name__}"):
            tx.update(params, wrong, params)
