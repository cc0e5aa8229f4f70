"""The programs of the documents that the library follows, typed as they stand there."""

import dataclasses
import logging

import chex
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

import sparsity as jaxpruner
from sparsity.algorithms import pruners
from tests import helpers


# From the deep dive, section "Implementing new algorithms".
@dataclasses.dataclass
class MagnitudePruning(jaxpruner.BaseUpdater):
    """Implements magnitude based pruning."""

    def calculate_scores(self, params, sparse_state=None, grads=None):
        del sparse_state, grads
        param_magnitudes = jax.tree.map(jnp.abs, params)
        return param_magnitudes  # noqa: RET504


@dataclasses.dataclass
class StaticRandomSparse(jaxpruner.BaseUpdater):
    """Initializes sparsity randomly and optimizes using that sparsity."""

    is_sparse_gradients: bool = True

    def update_state(self, sparse_state, params, grads):
        """Returns sparse_state unmodified."""
        del params, grads
        return sparse_state

    def get_initial_masks(
        self, params: chex.ArrayTree, target_sparsities: chex.ArrayTree
    ) -> chex.ArrayTree:
        """Generate initial mask. This is only used when .wrap_optax() is called."""
        scores = pruners.generate_random_scores(params, self.rng_seed)
        init_masks = self.create_masks(scores, target_sparsities)
        return init_masks  # noqa: RET504

    def instant_sparsify(self, params, grads=None):
        raise RuntimeError("instant_sparsify function is not supported in sparse training methods.")


# From the deep dive, sections "init_state and update_state" and "Other helper functions".
@dataclasses.dataclass
class EveryHook(jaxpruner.BaseUpdater):
    """All hooks with the signatures and bodies that the deep dive shows."""

    def init_state(self, params: chex.ArrayTree):
        """Creates the sparse state."""
        if self.sparsity_distribution_fn is None:
            target_sparsities = None
        else:
            target_sparsities = self.sparsity_distribution_fn(params)
        logging.info("target_sparsities: %s", target_sparsities)
        masks = self.get_initial_masks(params, target_sparsities)
        if self.use_packed_masks:
            masks = jax.tree.map(jnp.packbits, masks)
        return jaxpruner.SparseState(
            masks=masks,
            target_sparsities=target_sparsities,
            count=jnp.zeros([], jnp.int32),
        )

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return jax.tree.map(jnp.abs, params)

    def update_state(self, sparse_state, params, grads):
        """Updates the sparse state."""
        sparsities = self.scheduler.get_sparsity_at_step(
            sparse_state.target_sparsities, sparse_state.count
        )
        scores = self.calculate_scores(params, sparse_state=sparse_state, grads=grads)
        new_masks = self.create_masks(scores, sparsities)
        if self.use_packed_masks:
            new_masks = jax.tree.map(jnp.packbits, new_masks)
        return sparse_state._replace(masks=new_masks)

    def post_gradient_update(self, params, sparse_state):
        return self.apply_masks(params, sparse_state.masks)


_PARAMS = {"kernel": jnp.array([[1.0, -4.0, 3.0, 0.5]]), "bias": jnp.array([0.1, 0.2, 0.3, 0.4])}


def _gradients(params):
    return jax.tree.map(lambda param: param / 2, params)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_the_score_function_of_the_deep_dive_prunes_by_magnitude(jit):
    pruner = MagnitudePruning(
        sparsity_distribution_fn=helpers.half, scheduler=jaxpruner.OneShotSchedule(target_step=1)
    )
    tx = pruner.wrap_optax(optax.sgd(0.5))
    update = jax.jit(tx.update) if jit else tx.update
    params = _PARAMS
    state = tx.init(params)
    for _ in range(2):
        updates, state = update(_gradients(params), state, params)
        params = optax.apply_updates(params, updates)
        params = pruner.post_gradient_update(params, state)
    # Two steps of weight - 0.5 * weight / 2 multiply by 0.75 ** 2.
    np.testing.assert_array_equal(state.masks["kernel"], [[0, 1, 1, 0]])
    np.testing.assert_array_equal(params["kernel"], [[0.0, -2.25, 1.6875, 0.0]])
    np.testing.assert_allclose(params["bias"], 0.5625 * _PARAMS["bias"], rtol=1e-6)


def test_the_score_function_of_the_deep_dive_prunes_at_once():
    pruner = MagnitudePruning(sparsity_distribution_fn=helpers.half)
    pruned, masks = pruner.instant_sparsify(_PARAMS)
    np.testing.assert_array_equal(pruned["kernel"], [[0.0, -4.0, 3.0, 0.0]])
    np.testing.assert_array_equal(masks["kernel"], [[0, 1, 1, 0]])
    assert masks["bias"] is None
    np.testing.assert_array_equal(pruned["bias"], _PARAMS["bias"])


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_the_static_mask_of_the_deep_dive_stays_and_keeps_weights_at_zero(packed):
    pruner = StaticRandomSparse(
        sparsity_distribution_fn=helpers.half,
        scheduler=jaxpruner.PeriodicSchedule(update_freq=1),
        use_packed_masks=packed,
    )
    tx = pruner.wrap_optax(optax.adam(0.1))
    params = _PARAMS
    state = tx.init(params)
    first = state.masks["kernel"]
    assert first.shape == ((1, 1) if packed else (1, 4))
    for _ in range(3):
        updates, state = jax.jit(tx.update)(_gradients(params), state, params)
        params = optax.apply_updates(params, updates)
        params = pruner.post_gradient_update(params, state)
    np.testing.assert_array_equal(state.masks["kernel"], first)
    assert np.count_nonzero(params["kernel"]) == 2


def test_the_static_mask_of_the_deep_dive_refuses_instant_sparsify():
    with pytest.raises(RuntimeError, match="not supported in sparse training"):
        StaticRandomSparse(sparsity_distribution_fn=helpers.half).instant_sparsify(_PARAMS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:EveryHook overrides post_gradient_update or apply_masks")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_an_updater_that_overrides_every_hook_as_shown_trains(packed):
    pruner = EveryHook(
        sparsity_distribution_fn=helpers.half,
        scheduler=jaxpruner.OneShotSchedule(target_step=0),
        use_packed_masks=packed,
    )
    tx = pruner.wrap_optax(optax.sgd(0.5))
    params = _PARAMS | {"wide": jnp.arange(-5.0, 25.0).reshape(3, 10)}
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(_gradients(params), state, params)
    params = pruner.post_gradient_update(optax.apply_updates(params, updates), state)
    np.testing.assert_array_equal(params["kernel"], [[0.0, -3.0, 2.25, 0.0]])
    flat = np.arange(-5.0, 25.0) * 0.75
    np.testing.assert_array_equal(np.ravel(params["wide"]), np.where(flat > 9 * 0.75, flat, 0))
    assert state.masks["wide"].shape == ((3, 2) if packed else (3, 10))
    assert int(state.count) == 1


def test_the_simplified_wrapper_of_the_deep_dive_runs_with_our_hooks():
    pruner = jaxpruner.MagnitudePruning(
        sparsity_distribution_fn=helpers.half, scheduler=jaxpruner.OneShotSchedule(target_step=0)
    )

    def wrap_optax(self, inner):
        def init_fn(params):
            sparse_state = self.init_state(params)
            return sparse_state._replace(inner_state=inner.init(params))

        def update_fn(updates, state, params):
            if self.scheduler.is_mask_update_iter(state.count):
                new_state = self.update_state(state, params, updates)
            else:
                new_state = state
            new_updates, updated_inner_state = inner.update(updates, new_state.inner_state, params)
            new_state = new_state._replace(
                inner_state=updated_inner_state, count=new_state.count + 1
            )
            return new_updates, new_state

        return optax.GradientTransformation(init_fn, update_fn)

    tx = wrap_optax(pruner, optax.sgd(0.5))
    params = _PARAMS
    updates, state = tx.update(_gradients(params), tx.init(params), params)
    params = pruner.post_gradient_update(optax.apply_updates(params, updates), state)
    np.testing.assert_array_equal(params["kernel"], [[0.0, -3.0, 2.25, 0.0]])


def test_only_annotated_variables_of_a_subclass_change_the_default_of_a_field():
    # The deep dive warns that others are class variables, overwritten at initialization.
    @dataclasses.dataclass
    class Annotated(jaxpruner.MagnitudePruning):
        skip_gradients: bool = True

    @dataclasses.dataclass
    class NotAnnotated(jaxpruner.MagnitudePruning):
        skip_gradients = True

    assert Annotated().skip_gradients is True
    assert NotAnnotated().skip_gradients is False


@pytest.mark.slow
def test_two_lines_of_the_readme_wrap_an_existing_optimizer():
    config = {"sparsity_distribution_fn": helpers.half, "scheduler": jaxpruner.OneShotSchedule(0)}
    tx, params = optax.adam(1e-3), _PARAMS
    pruner = jaxpruner.MagnitudePruning(**config)  # Line 1: Create pruner.
    tx = pruner.wrap_optax(tx)  # Line 2: Wrap optimizer.
    updates, _ = tx.update(_gradients(params), tx.init(params), params)
    params = optax.apply_updates(params, updates)
    assert np.count_nonzero(params["kernel"]) == 2


@pytest.mark.parametrize("name", jaxpruner.all_algorithm_names())
def test_the_readmes_is_packed_is_a_type_error_that_names_use_packed_masks(name):
    with pytest.raises(TypeError, match="Did you mean 'use_packed_masks'"):
        jaxpruner.ALGORITHM_REGISTRY[name](is_packed=True)


def test_apply_masks_takes_the_is_packed_argument_of_older_programs():
    pruner = jaxpruner.MagnitudePruning()
    masks = {"kernel": jnp.array([[0, 1, 1, 0]], jnp.uint8), "bias": None}
    packed = {"kernel": jnp.packbits(masks["kernel"], axis=-1), "bias": None}
    plain = pruner.apply_masks(_PARAMS, masks, is_packed=False)
    np.testing.assert_array_equal(plain["kernel"], [[0.0, -4.0, 3.0, 0.0]])
    chex.assert_trees_all_equal(pruner.apply_masks(_PARAMS, packed, is_packed=True), plain)


def test_fields_have_the_documented_defaults():
    pruner = jaxpruner.MagnitudePruning()
    assert pruner.scheduler == jaxpruner.NoUpdateSchedule()
    assert pruner.skip_gradients is False
    assert pruner.is_sparse_gradients is False
    assert pruner.sparsity_type == jaxpruner.sparsity_types.Unstructured()
    assert pruner.sparsity_distribution_fn is jaxpruner.sparsity_distributions.uniform
    assert pruner.rng_seed == 8
    assert pruner.use_packed_masks is False
    # "Default value is uniform distribution with None sparsity": nothing is pruned.
    assert jax.tree.leaves(pruner.init_state(_PARAMS).masks) == []


def test_the_default_hooks_are_the_documented_ones():
    pruner = MagnitudePruning(sparsity_distribution_fn=helpers.half)
    tx = pruner.wrap_optax(optax.sgd(0.1))
    params = _PARAMS
    with pytest.warns(UserWarning, match="training stays dense"):
        state = tx.init(params)
    assert pruner.pre_forward_update(params, state) is params
    with pytest.raises(NotImplementedError, match="calculate_scores"):
        jaxpruner.BaseUpdater().instant_sparsify(params)
    np.testing.assert_array_equal(state.masks["kernel"], np.ones((1, 4)))
    assert state.masks["kernel"].dtype == jnp.uint8
    assert state.count.dtype == jnp.int32


def test_the_algorithms_of_the_readmes_table_are_registered_under_their_names():
    table = {
        "no_prune": "NoPruning",
        "random": "RandomPruning",
        "magnitude": "MagnitudePruning",
        "saliency": "SaliencyPruning",
        "global_magnitude": "GlobalMagnitudePruning",
        "global_saliency": "GlobalSaliencyPruning",
        "magnitude_ste": "SteMagnitudePruning",
        "random_ste": "SteRandomPruning",
        "static_sparse": "StaticRandomSparse",
        "set": "SET",
        "rigl": "RigL",
    }
    registry = jaxpruner.ALGORITHM_REGISTRY
    assert {name: registry[name].__name__ for name in table} == table
    for cls in jaxpruner.ALGORITHM_REGISTRY.values():
        assert getattr(jaxpruner, cls.__name__) is cls


def _config():
    config = ml_collections.ConfigDict()
    config.algorithm = "magnitude"
    config.update_freq = 2
    config.update_end_step = 5
    config.update_start_step = 1
    config.sparsity = 0.5
    config.dist_type = "erk"
    return config


@pytest.mark.parametrize("freeze", [False, True], ids=["ConfigDict", "FrozenConfigDict"])
def test_a_configuration_makes_the_updater_that_trains(freeze):
    config = ml_collections.FrozenConfigDict(_config()) if freeze else _config()
    before = config.to_json()
    pruner = jaxpruner.create_updater_from_config(config)
    assert config.to_json() == before
    assert type(pruner) is jaxpruner.MagnitudePruning
    assert pruner.scheduler == jaxpruner.PolynomialSchedule(2, 1, 5)
    tx = pruner.wrap_optax(optax.sgd(0.5))
    params = _PARAMS
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(6):
        updates, state = update(_gradients(params), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(state.masks["kernel"], [[0, 1, 1, 0]])
    assert np.count_nonzero(params["kernel"]) == 2


@pytest.mark.parametrize("name", jaxpruner.all_algorithm_names())
def test_every_algorithm_of_the_table_comes_from_a_configuration(name):
    config = _config()
    config.algorithm = name
    config.dist_type = "uniform"
    pruner = jaxpruner.create_updater_from_config(config)
    assert type(pruner) is jaxpruner.ALGORITHM_REGISTRY[name]


def test_a_registered_subclass_comes_from_a_configuration(registry):
    jaxpruner.register_algorithm("deep_dive", MagnitudePruning)
    config = _config()
    config.algorithm = "deep_dive"
    assert type(jaxpruner.create_updater_from_config(config)) is MagnitudePruning
    assert "deep_dive" in registry
