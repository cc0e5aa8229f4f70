"""Arguments of an update: parameters, gradients and extra arguments that come and go."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers

# Updates in every step show most in a few steps.
pytestmark = pytest.mark.filterwarnings("ignore:.*skips the gradients of steps")


@pytest.mark.filterwarnings("ignore:.*(training stays dense|never updates)")
@pytest.mark.parametrize("name", [n for n in sparsity.all_algorithm_names() if n != "no_prune"])
def test_missing_parameters_raise_the_message_of_optax(name):
    tx = sparsity.ALGORITHM_REGISTRY[name]().wrap_optax(optax.sgd(0.1))
    params = helpers.params()
    state = tx.init(params)
    decay = optax.add_decayed_weights(0.1)
    with pytest.raises(ValueError, match="params") as optax_error:
        decay.update(helpers.grads(0), decay.init(params), None)
    expected = str(optax_error.value)
    for args in ((), (None,)):
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            tx.update(helpers.grads(0), state, *args)


@pytest.mark.filterwarnings("ignore:.*(training stays dense|never updates)")
@pytest.mark.parametrize("scheduler", [sparsity.NoUpdateSchedule(), sparsity.PeriodicSchedule(1)])
@pytest.mark.parametrize("sparse_gradients", [False, True])
@pytest.mark.parametrize("algorithm", ["magnitude", "saliency", "static_sparse", "rigl"])
def test_gradients_that_do_not_fit_are_a_value_error_that_names_the_path(
    algorithm, sparse_gradients, scheduler
):
    updater = sparsity.ALGORITHM_REGISTRY[algorithm](
        sparsity_distribution_fn=helpers.uniform(0.5),
        scheduler=scheduler,
        is_sparse_gradients=sparse_gradients,
    )
    tx = updater.wrap_optax(optax.sgd(0.1))
    params = {"layer": helpers.params()}
    state = tx.init(params)
    for grads in (
        {"layer": {"bias": jnp.ones(10)}},
        {"layer": {"bias": jnp.ones(10), "kernel": jnp.ones((5, 10))}},
        {"layer": {"bias": jnp.ones(10), "kernel": jnp.ones((10, 6))}},
        {"layer": {"bias": jnp.ones(10), "kernel": None}},
    ):
        with pytest.raises(ValueError, match="layer/kernel"):
            tx.update(grads, state, params)


@pytest.mark.parametrize(
    "algorithm", ["magnitude", "saliency", "global_saliency", "snip", "movement"]
)
def test_gradients_of_another_shape_are_a_value_error_when_pruned_at_once(algorithm):
    config = {"algorithm": algorithm, "sparsity": 0.5}
    updater, params = sparsity.create_updater_from_config(config), {"w": jnp.ones((2, 4))}
    for grad in (jnp.ones((3, 3)), jnp.ones((1, 4)), 1.0, None):  # (1, 4) would be broadcast
        with pytest.raises(ValueError, match="'w'"):
            updater.instant_sparsify(params, {"w": grad})


@pytest.mark.parametrize("options", [{}, {"use_compact_state": True}], ids=["all", "kept"])
@pytest.mark.parametrize("algorithm", ["static_sparse", "rigl"])
def test_a_leaf_more_or_less_is_a_value_error_that_names_the_tree_and_the_path(algorithm, options):
    updater = sparsity.ALGORITHM_REGISTRY[algorithm](
        sparsity_distribution_fn=helpers.uniform(0.5),
        scheduler=sparsity.PeriodicSchedule(9, 9),
        **options,
    )
    tx = updater.wrap_optax(optax.adam(0.1))
    params = {"kernel": jnp.ones((6, 10)), "bias": jnp.ones(10), "empty": {}, "no": None}
    state = tx.init(params)
    assert state.masks["bias"] is None
    less = {key: leaf for key, leaf in params.items() if key != "bias"}
    more = params | {"new": jnp.ones(10)}
    for grads, new_params, message in [
        (less, params, "gradients have nothing for 'bias'. Give the gradients of all parameters"),
        (more, params, "params have no leaf at 'new', which the gradients have"),
        (params, less, "params have no leaf at 'bias', which the masks have"),
        (less, less, "params have no leaf at 'bias', which the masks have"),
        (more, more, "masks have nothing for 'new'. Give an array"),
    ]:
        with pytest.raises(ValueError, match=message):
            tx.update(grads, state, new_params)
    tx.update(params, state, params)


def test_parameters_of_another_model_are_a_value_error_that_names_the_path():
    updater = sparsity.StaticRandomSparse(sparsity_distribution_fn=helpers.uniform(0.5))
    state = updater.wrap_optax(optax.sgd(0.1)).init({"layer": helpers.params()})
    with pytest.raises(ValueError, match=r"'layer/kernel'.*'layer/other'"):
        updater.post_gradient_update({"layer": {"other": jnp.ones(3)}}, state)
    turned = helpers.params() | {"kernel": jnp.ones((10, 6))}
    with pytest.raises(ValueError, match=r"'layer/kernel'.*\(6, 10\).*\(10, 6\)"):
        updater.post_gradient_update({"layer": turned}, state)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "hook"),
    [("static_sparse", "post_gradient_update"), ("magnitude_ste", "pre_forward_update")],
)
def test_hooks_of_the_loop_refuse_params_without_a_dense_leaf(algorithm, hook, packed):
    options = {"store_masks": True} if algorithm == "magnitude_ste" else {}
    updater = sparsity.ALGORITHM_REGISTRY[algorithm](
        sparsity_distribution_fn=helpers.uniform(0.5), use_packed_masks=packed, **options
    )
    params = {"kernel": jnp.ones((6, 10)), "layer": {"bias": jnp.ones(10)}, "no": None}
    state = updater.init_state(params)
    assert state.masks["layer"]["bias"] is None
    for less in ({"kernel": params["kernel"]}, params | {"layer": {}}):
        with pytest.raises(ValueError, match="params have no leaf at 'layer/bias'"):
            getattr(updater, hook)(less, state)
    getattr(updater, hook)(params, state)


@pytest.mark.slow
def test_shapes_are_refused_by_instant_sparsify_with_the_way_to_compute_with_them():
    updater = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.half)
    shapes = jax.eval_shape(helpers.params)
    with pytest.raises(ValueError, match=r"params\['bias'\] has no values yet, .*jax.eval_shape"):
        updater.instant_sparsify(shapes)
    masks = jax.eval_shape(updater.instant_sparsify, shapes)[1]
    assert masks["kernel"].shape == shapes["kernel"].shape


def test_extra_arguments_reach_the_inner_optimizer_and_the_hooks_that_name_them():
    seen = {}

    class ByValue(sparsity.BaseUpdater):
        def calculate_scores(self, params, sparse_state=None, grads=None, value=None):
            seen["scores"] = value
            return jax.tree.map(jnp.abs, params)

        def update_state(self, sparse_state, params, grads, **extra_args):
            seen["state"] = sorted(extra_args)
            return super().update_state(sparse_state, params, grads, **extra_args)

    def init(params):
        del params
        return optax.EmptyState()

    def update(updates, state, params=None, *, value, **extra_args):
        seen["inner"] = value, sorted(extra_args)
        return updates, state

    updater = ByValue(
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.PeriodicSchedule(1)
    )
    tx = updater.wrap_optax(optax.GradientTransformationExtraArgs(init, update))
    params = helpers.params()
    tx.update(helpers.grads(0), tx.init(params), params, value=3.0, loss_scale=2.0)
    assert seen == {
        "scores": 3.0,
        "state": ["loss_scale", "value"],
        "inner": (3.0, ["loss_scale"]),
    }


def test_an_argument_of_the_loop_with_the_name_of_the_targets_is_refused():
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.PeriodicSchedule(1)
    )
    tx = updater.wrap_optax(optax.sgd(0.1))
    params = helpers.params()
    with pytest.raises(TypeError, match="create_masks names 'target_sparsities', which the libra"):
        tx.update(helpers.grads(0), tx.init(params), params, target_sparsities=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sparsity.all_algorithm_names())
def test_every_algorithm_accepts_extra_arguments_that_nobody_knows(name):
    half = {"sparsity_distribution_fn": helpers.uniform(0.5)}
    options = half if helpers.takes_a_distribution(name) else {}
    updater = sparsity.ALGORITHM_REGISTRY[name](scheduler=sparsity.PeriodicSchedule(1), **options)
    tx = updater.wrap_optax(optax.sgd(0.1))
    params = helpers.params()
    tx.update(helpers.grads(0), tx.init(params), params, value=1.0, anything=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["magnitude", "rigl", "static_sparse"])
def test_line_searches_and_plateaus_get_their_arguments(name):
    updater = sparsity.ALGORITHM_REGISTRY[name](
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.OneShotSchedule(1)
    )
    tx = updater.wrap_optax(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    )
    params = helpers.params()
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(helpers.grads(0), state, params, value=1.0)
        params = optax.apply_updates(params, updates)
    assert float(state.inner_state[-1].scale) < 1.0


@pytest.mark.slow
def test_lbfgs_prunes_and_descends():
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.OneShotSchedule(2)
    )
    tx = updater.wrap_optax(optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(5)))
    target = helpers.params(7)

    def loss(params):
        return sum(jnp.sum((params[key] - target[key]) ** 2) for key in params)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=loss)
        return optax.apply_updates(params, updates), state

    params = helpers.params()
    state = tx.init(params)
    for _ in range(4):
        params, state = step(params, state)
    assert np.count_nonzero(params["kernel"]) == 30
    np.testing.assert_allclose(params["bias"], target["bias"], atol=0.1)
