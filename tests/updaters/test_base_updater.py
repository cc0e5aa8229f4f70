"""Training steps of the wrapper, against an independent implementation in numpy."""

import dataclasses
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.algorithms import pruners
from tests import helpers
from tests.selection_oracle import best, drop_and_grow

# Large enough that the first updates of regrown weights differ: they would tie without it.
_EPS = 0.05


# The independent implementation: one step in numpy.


@dataclasses.dataclass
class _Numpy:
    """The step of one kernel (masked) and one bias (dense), with SGD or AdamW."""

    algorithm: str
    optimizer: str
    skip: bool
    sparse_gradients: bool
    updates_at: dict[int, float]  # step -> sparsity (magnitude) or drop fraction (SET, RigL)
    learning_rate: float = 0.1
    weight_decay: float = 0.05

    def init(self, params, mask):
        zeros = {name: np.zeros_like(value) for name, value in params.items()}
        self.weights = {name: np.array(value) for name, value in params.items()}
        self.mu, self.nu = zeros, {name: value.copy() for name, value in zeros.items()}
        self.mask, self.count, self.inner_count = np.array(mask), 0, 0

    def step(self, grads, random_scores):
        grads = {name: np.array(value) for name, value in grads.items()}
        is_update = self.count in self.updates_at
        grown = np.zeros_like(self.mask)
        if is_update:
            seen = np.where(self.mask, self.weights["kernel"], 0)
            amount = self.updates_at[self.count]
            new = self.mask
            if self.algorithm == "magnitude":
                kept = helpers.num_kept(self.mask.size, amount)
                new = best(np.abs(seen), kept)
            elif self.algorithm in ("set", "rigl"):
                scores = random_scores if self.algorithm == "set" else np.abs(grads["kernel"])
                new = drop_and_grow(self.mask, np.abs(seen), scores, amount)
                grown = new & (1 - self.mask)
                self.mu["kernel"][grown == 1] = 0
                self.nu["kernel"][grown == 1] = 0
                self.weights["kernel"][grown == 1] = 0
            self.mask = new
        if self.sparse_gradients:
            grads["kernel"] = np.where(self.mask, grads["kernel"], 0)
        if not (is_update and self.skip):
            self.inner_count += 1
            for name, weight in self.weights.items():
                weight += self._inner_update(name, grads[name], weight)
        self.weights["kernel"] = np.where(self.mask, self.weights["kernel"], np.float32(0))
        self.count += 1

    def _inner_update(self, name, grad, weight):
        if self.optimizer == "sgd":
            return -np.float32(self.learning_rate) * grad
        mu = self.mu[name] = np.float32(0.9) * self.mu[name] + np.float32(0.1) * grad
        nu = self.nu[name] = np.float32(0.999) * self.nu[name] + np.float32(0.001) * grad**2
        mu_hat = mu / np.float32(1 - 0.9**self.inner_count)
        nu_hat = nu / np.float32(1 - 0.999**self.inner_count)
        step = mu_hat / (np.sqrt(nu_hat) + np.float32(_EPS)) + self.weight_decay * weight
        return (-self.learning_rate * step).astype(np.float32)


_STEPS = 7
_PERIODIC = sparsity.PeriodicSchedule(update_freq=2, update_start_step=1, update_end_step=6)
_UPDATES = (1, 3, 5, 6)  # the end step is always one
# Zhu & Gupta 2017, equation 1: 0.7 - 0.7 (1 - progress)^3, progress (step - 1) / 5.
_RAMP = {step: 0.7 - 0.7 * (1 - (step - 1) / 5) ** 3 for step in _UPDATES}
# Cosine from 0.4 to zero at step 8.
_COSINE = {step: 0.4 * 0.5 * (1 + np.cos(np.pi * step / 8)) for step in _UPDATES}

_CASES = {
    "magnitude": (
        lambda **kwargs: sparsity.MagnitudePruning(
            scheduler=sparsity.PolynomialSchedule(2, 1, 6), **kwargs
        ),
        _RAMP,
    ),
    "static": (
        lambda **kwargs: sparsity.StaticRandomSparse(scheduler=_PERIODIC, **kwargs),
        dict.fromkeys(_UPDATES, 0.0),
    ),
    "set": (
        lambda **kwargs: sparsity.SET(scheduler=_PERIODIC, **kwargs),
        dict.fromkeys(_UPDATES, 0.3),
    ),
    "rigl": (
        lambda **kwargs: sparsity.RigL(
            scheduler=_PERIODIC,
            drop_fraction_fn=optax.cosine_decay_schedule(0.4, 8),
            **kwargs,
        ),
        _COSINE,
    ),
}


def _train_beside_numpy(algorithm, optimizer, skip, sparse_gradients, *, post, spoil=()):
    make, amounts = _CASES[algorithm]
    updater = make(
        sparsity_distribution_fn=helpers.uniform(0.7),
        skip_gradients=skip,
        is_sparse_gradients=sparse_gradients,
    )
    inner = optax.sgd(0.1) if optimizer == "sgd" else optax.adamw(0.1, eps=_EPS, weight_decay=0.05)
    tx = updater.wrap_optax(inner)
    params = helpers.params()
    state = tx.init(params)
    mask = np.ones(helpers.SHAPE, np.uint8)
    if algorithm != "magnitude":
        draw = pruners.generate_random_scores(params, 8)["kernel"]
        mask = best(draw, helpers.num_kept(60, 0.7))
        assert mask.sum() == 18
    np.testing.assert_array_equal(state.masks["kernel"], mask)
    oracle = _Numpy(algorithm, optimizer, skip, sparse_gradients, amounts)
    oracle.init(params, mask)
    update = jax.jit(tx.update)
    for step in range(_STEPS):
        grads, before = helpers.grads(step), oracle.mask
        oracle.step(grads, pruners.generate_random_scores(params, 8, jnp.int32(step + 1))["kernel"])
        if spoil:
            pruned = np.flatnonzero((before == 0) & (oracle.mask == 0))[: len(spoil)]
            kernel = np.array(grads["kernel"]).ravel()
            kernel[pruned] = spoil[: len(pruned)]
            grads = grads | {"kernel": jnp.asarray(kernel.reshape(helpers.SHAPE))}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if post:
            params = updater.post_gradient_update(params, state)
        np.testing.assert_array_equal(state.masks["kernel"], oracle.mask, f"step {step}")
        pruned = oracle.mask == 0
        assert np.all(helpers.is_positive_zero(params["kernel"])[pruned])
        for name, weight in oracle.weights.items():
            np.testing.assert_allclose(
                params[name], weight, rtol=1e-4, atol=1e-5, err_msg=f"{name}, step {step}"
            )
        if optimizer == "adamw":
            adam = state.inner_state[0]
            assert int(adam.count) == oracle.inner_count
            for name in oracle.weights:
                np.testing.assert_allclose(adam.mu[name], oracle.mu[name], rtol=1e-5, atol=1e-7)
                np.testing.assert_allclose(adam.nu[name], oracle.nu[name], rtol=1e-5, atol=1e-9)
        assert int(state.count) == step + 1


@pytest.mark.parametrize("sparse_gradients", [False, True], ids=["dense", "sparse gradients"])
@pytest.mark.parametrize("skip", [False, True], ids=["no skip", "skip"])
@pytest.mark.parametrize("algorithm", _CASES)
def test_training_agrees_with_numpy_under_adam_with_weight_decay(algorithm, skip, sparse_gradients):
    _train_beside_numpy(algorithm, "adamw", skip, sparse_gradients, post=skip)


@pytest.mark.parametrize("skip", [False, True], ids=["no skip", "skip"])
@pytest.mark.parametrize("algorithm", _CASES)
def test_training_agrees_with_numpy_under_gradient_descent(algorithm, skip):
    _train_beside_numpy(algorithm, "sgd", skip, not skip, post=not skip)


@pytest.mark.parametrize("skip", [False, True], ids=["no skip", "skip"])
@pytest.mark.parametrize("algorithm", _CASES)
def test_nan_and_infinite_gradients_of_pruned_weights_do_not_leak(algorithm, skip):
    # RigL would rightly grow a weight whose gradient is infinite, but none that is no number.
    spoil = (np.nan, np.nan) if algorithm == "rigl" else (np.nan, np.inf, -np.inf)
    _train_beside_numpy(algorithm, "sgd", skip, skip, post=False, spoil=spoil)


@pytest.mark.parametrize("name", ["magnitude", "rigl", "static"])
def test_post_gradient_update_changes_no_bit_of_what_apply_updates_gives(name):
    updater = _CASES[name][0](sparsity_distribution_fn=helpers.uniform(0.7))
    without = helpers.train(updater, helpers.params(), _STEPS)
    with_it = helpers.train(updater, helpers.params(), _STEPS, post=True)
    jax.tree.map(np.testing.assert_array_equal, without, with_it)


def test_a_loop_without_sparse_updates_relies_on_post_gradient_update():
    updater = _CASES["static"][0](
        sparsity_distribution_fn=helpers.uniform(0.7), is_sparse_updates=False
    )
    dense, state = helpers.train(updater, helpers.params(), 2)
    assert np.count_nonzero(dense["kernel"]) == 60
    sparse = updater.post_gradient_update(dense, state)
    np.testing.assert_array_equal(np.asarray(sparse["kernel"]) != 0, state.masks["kernel"])


def test_an_updater_with_its_own_post_gradient_update_keeps_dense_weights():
    class Soft(sparsity.MagnitudePruning):
        def post_gradient_update(self, params, sparse_state):
            del sparse_state
            return params

    class Halving(sparsity.MagnitudePruning):
        def apply_masks(self, params, masks, is_packed=None):
            return params

    for cls in (Soft, Halving):
        seen = []

        class Watched(cls):
            def calculate_scores(self, params, sparse_state=None, grads=None):
                seen.append(int(np.count_nonzero(params["kernel"])))  # noqa: B023
                return super().calculate_scores(params)

        updater = Watched(
            sparsity_distribution_fn=helpers.uniform(0.7), scheduler=sparsity.PeriodicSchedule(1)
        )
        params, _ = helpers.train(updater, helpers.params(), 3, jit=False)
        assert np.count_nonzero(params["kernel"]) == 60
        assert seen == [60, 60, 60]  # the hooks see the weights as they are


# Regrown weights.

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


@pytest.mark.parametrize("name", ["flatten", "lookahead"])
def test_an_optimizer_that_hides_its_parameters_is_refused_at_init(name):
    updater = sparsity.RigL(sparsity_distribution_fn=helpers.uniform(0.5))
    if name == "flatten":
        inner, params = optax.flatten(optax.adam(0.1)), helpers.params()
    else:
        inner = optax.lookahead(optax.adam(0.1), 5, 0.5)
        params = optax.LookaheadParams(helpers.params(), helpers.params())
    with pytest.raises(ValueError, match=f"optax.{name}"):
        updater.wrap_optax(inner).init(params)


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


# The first step.


def _dyadic():
    """Weights whose sums and halves are exact in float32."""
    return {"kernel": jnp.asarray(np.arange(1, 17).reshape(2, 8) / 4, jnp.float32)}


@pytest.mark.parametrize("skip", [False, True], ids=["no skip", "skip"])
@pytest.mark.parametrize("optimizer", ["sgd", "decayed"])
def test_weights_that_grow_in_the_first_step_land_on_their_update_alone(skip, optimizer):
    # The parameters are dense at step 0: a weight that grows had a value, which is no part of it.
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.5),
        scheduler=sparsity.PeriodicSchedule(1),
        skip_gradients=skip,
        drop_fraction_fn=optax.constant_schedule(0.5),
    )
    inner = optax.sgd(0.5)
    if optimizer == "decayed":
        inner = optax.chain(optax.add_decayed_weights(0.5), inner)
    tx = updater.wrap_optax(inner)
    params = _dyadic()
    state = tx.init(params)
    grads = {"kernel": jnp.asarray(np.arange(16, 0, -1).reshape(2, 8) / 2, jnp.float32)}
    updates, after = jax.jit(tx.update)(grads, state, params)
    moved = optax.apply_updates(params, updates)
    old, new = np.asarray(state.masks["kernel"]), np.asarray(after.masks["kernel"])
    weights, slopes = np.asarray(params["kernel"]), np.asarray(grads["kernel"])
    np.testing.assert_array_equal(new, drop_and_grow(old, np.where(old, weights, 0), slopes, 0.5))
    grown = (new == 1) & (old == 0)
    kept = (new == 1) & (old == 1)
    assert grown.any()
    decay = 0.5 * weights if optimizer == "decayed" else 0.0
    expected = np.where(kept, weights if skip else weights - 0.5 * (slopes + decay), 0)
    expected = np.where(grown, 0 if skip else -0.5 * slopes, expected)
    np.testing.assert_array_equal(moved["kernel"], expected)


def test_hooks_see_masked_parameters_from_the_first_step_on():
    seen = []

    class Watched(sparsity.SET):
        def get_drop_scores(self, sparse_state, params, grads):
            seen.append((np.asarray(params["kernel"]), np.asarray(sparse_state.masks["kernel"])))
            return super().get_drop_scores(sparse_state, params, grads)

    for packed in (False, True):
        updater = Watched(
            sparsity_distribution_fn=helpers.uniform(0.5),
            scheduler=sparsity.PeriodicSchedule(1),
            use_packed_masks=packed,
        )
        helpers.train(updater, helpers.params(), 2, jit=False)
    assert len(seen) == 4
    for kernel, mask in seen:
        assert mask.shape == helpers.SHAPE  # hooks never see packed masks
        assert np.all(helpers.is_positive_zero(kernel)[mask == 0])
        assert mask.sum() == 30


def test_pruned_weights_that_were_not_numbers_are_zero_after_the_masks_are_applied():
    updater = sparsity.MagnitudePruning()
    values = jnp.array([np.nan, np.inf, -np.inf, -0.0, 2.0])
    masks = {"w": jnp.array([0, 0, 0, 0, 1], jnp.uint8)}
    applied = updater.apply_masks({"w": values}, masks)
    assert np.all(helpers.is_positive_zero(applied["w"])[:4])
    assert float(applied["w"][4]) == 2.0


def test_a_nan_among_the_scores_does_not_empty_a_layer():
    updater = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.5))
    pruned, masks = updater.instant_sparsify(jnp.array([[1.0, np.nan, 3.0, 2.0]]))
    np.testing.assert_array_equal(masks, [[0, 0, 1, 1]])
    np.testing.assert_array_equal(pruned, [[0, 0, 3, 2]])


# Skipped steps.


def test_a_skipped_step_keeps_the_counts_and_the_state_of_the_inner_optimizer():
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5),
        scheduler=sparsity.OneShotSchedule(1),
        skip_gradients=True,
    )
    inner = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: -0.1 * count))
    tx = updater.wrap_optax(inner)
    params = helpers.params()
    update = jax.jit(tx.update)
    updates, before = update(helpers.grads(0), tx.init(params), params)
    params = optax.apply_updates(params, updates)
    updates, after = update(helpers.grads(1), before, params)
    jax.tree.map(np.testing.assert_array_equal, before.inner_state, after.inner_state)
    moved = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(
        moved["kernel"], np.where(after.masks["kernel"], params["kernel"], 0)
    )
    np.testing.assert_array_equal(moved["bias"], params["bias"])
    assert int(after.count) == 2
    _, later = update(helpers.grads(2), after, moved)
    assert int(later.inner_state[0].count) == 2
    assert int(later.inner_state[1].count) == 2


# Arguments that come and go.


@pytest.mark.parametrize("name", sparsity.all_algorithm_names())
def test_missing_parameters_raise_the_message_of_optax(name):
    tx = sparsity.ALGORITHM_REGISTRY[name]().wrap_optax(optax.sgd(0.1))
    params = helpers.params()
    state = tx.init(params)
    decay = optax.add_decayed_weights(0.1)
    with pytest.raises(ValueError, match="params") as of_optax:
        decay.update(helpers.grads(0), decay.init(params), None)
    expected = str(of_optax.value)
    for args in ((), (None,)):
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            tx.update(helpers.grads(0), state, *args)


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


def test_parameters_of_another_model_are_a_value_error_that_names_the_path():
    updater = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.5))
    state = updater.wrap_optax(optax.sgd(0.1)).init({"layer": helpers.params()})
    with pytest.raises(ValueError, match=r"'layer/kernel'.*'layer/other'"):
        updater.post_gradient_update({"layer": {"other": jnp.ones(3)}}, state)
    with pytest.raises(ValueError, match=r"'layer/kernel'.*\(6, 10\).*\(10, 6\)"):
        updater.post_gradient_update({"layer": {"kernel": jnp.ones((10, 6))}}, state)


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


@pytest.mark.parametrize("name", sparsity.all_algorithm_names())
def test_every_algorithm_accepts_extra_arguments_that_nobody_knows(name):
    options = (
        {} if name.startswith("global") else {"sparsity_distribution_fn": helpers.uniform(0.5)}
    )
    updater = sparsity.ALGORITHM_REGISTRY[name](scheduler=sparsity.PeriodicSchedule(1), **options)
    tx = updater.wrap_optax(optax.sgd(0.1))
    params = helpers.params()
    tx.update(helpers.grads(0), tx.init(params), params, value=1.0, anything=2)


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


# One tensor at a time: topk_fn, sparsity_type, batch_axes.


def test_topk_fn_is_called_for_each_slice_and_may_be_traced():
    shapes = []

    def threshold(scores, sparsity_):
        shapes.append(scores.shape)
        return scores > sparsity_

    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5, batch_axes=1), topk_fn=threshold, batch_axes=1
    )
    params = {"stack": jnp.array([[[0.1, 0.9], [0.6, 0.4]], [[0.0, 0.0], [0.7, 2.0]]])}
    masks = jax.jit(lambda params: updater.instant_sparsify(params)[1])(params)
    assert set(shapes) == {(2, 2)}
    assert masks["stack"].dtype == jnp.uint8
    np.testing.assert_array_equal(masks["stack"], [[[0, 1], [1, 0]], [[0, 0], [1, 1]]])


def test_topk_fn_gets_the_blocks_of_a_block_type():
    shapes = []

    def everything(scores, sparsity_):
        shapes.append(scores.shape)
        return jnp.ones_like(scores)

    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5),
        topk_fn=everything,
        sparsity_type=sparsity.Block((2, 5)),
    )
    masks = updater.instant_sparsify(helpers.params())[1]
    assert shapes == [(3, 2)]
    np.testing.assert_array_equal(masks["kernel"], np.ones(helpers.SHAPE))


def test_types_and_batch_axes_may_be_functions_of_path_and_parameter():
    asked = []

    def kind(path, param):
        asked.append((path, param.shape))
        return {
            "nm": sparsity.NByM(1, 2),
            "channel": sparsity.Channel(0),
            "stack": sparsity.Unstructured(),
        }[path[-1]]

    def axes(path, param):
        return 1 if path[-1] == "stack" else 0

    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5, batch_axes=axes),
        sparsity_type=kind,
        batch_axes=axes,
    )
    params = {
        "layer": {
            "nm": jnp.array([[1.0, 2.0], [4.0, 3.0]]),
            "channel": jnp.array([[1.0, 2.0], [4.0, 3.0]]),
            "stack": jnp.array([[[1.0, 2.0], [4.0, 3.0]], [[50.0, 60.0], [70.0, 80.0]]]),
        }
    }
    masks = updater.instant_sparsify(params)[1]["layer"]
    np.testing.assert_array_equal(masks["nm"], [[0, 1], [1, 0]])
    np.testing.assert_array_equal(masks["channel"], [[0, 0], [1, 1]])
    np.testing.assert_array_equal(masks["stack"], [[[0, 0], [1, 1]], [[0, 0], [1, 1]]])
    assert (("layer", "nm"), (2, 2)) in asked


def test_stacked_layers_are_ranked_by_themselves_so_that_none_vanishes():
    stack = jnp.stack([jnp.full((4, 4), 0.01), jnp.full((4, 4), 100.0)])
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5, batch_axes=1), batch_axes=1
    )
    masks = updater.instant_sparsify({"stack": stack})[1]["stack"]
    np.testing.assert_array_equal(np.sum(masks, axis=(1, 2)), [8, 8])


@pytest.mark.parametrize("name", ["magnitude", "random", "static_sparse", "set", "rigl"])
def test_an_axis_that_m_does_not_divide_names_the_parameter_at_init(name):
    updater = sparsity.ALGORITHM_REGISTRY[name](
        sparsity_distribution_fn=helpers.uniform(0.5), sparsity_type=sparsity.NByM(2, 4)
    )
    params = {"fine": jnp.ones((4, 8)), "layer": {"kernel": jnp.ones((4, 10))}}
    with pytest.raises(ValueError, match=r"'layer/kernel' of shape \(4, 10\).*10 entries.*m = 4"):
        updater.wrap_optax(optax.sgd(0.1)).init(params)


def test_a_leaf_that_stays_dense_need_not_fit_the_type():
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5, custom_sparsity_map={"odd": None}),
        sparsity_type=sparsity.NByM(2, 4),
    )
    masks = updater.instant_sparsify({"fine": jnp.ones((4, 8)), "odd": jnp.ones((4, 10))})[1]
    assert masks["odd"] is None
    assert int(masks["fine"].sum()) == 16


def test_a_target_that_an_n_of_m_pattern_cannot_reach_is_logged(caplog):
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.8), sparsity_type=sparsity.NByM(2, 4)
    )
    with caplog.at_level(logging.WARNING, "sparsity"):
        updater.init_state({"layer": {"kernel": jnp.ones((4, 8))}})
    (record,) = caplog.records
    message = record.getMessage()
    assert "0.5" in message
    assert "0.8" in message
    assert "layer/kernel" in message
    caplog.clear()
    exact = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.5), sparsity_type=sparsity.NByM(2, 4)
    )
    exact.init_state({"layer": {"kernel": jnp.ones((4, 8))}})
    assert not caplog.records


def test_a_ramp_of_n_of_m_removes_entries_one_by_one():
    # kept of 4 = max(1, ceil(4 * (1 - s_t / s_T * 3 / 4))), s_t / s_T = 0, 0.5, 1 by a linear ramp.
    updater = sparsity.MagnitudePruning(
        sparsity_distribution_fn=helpers.uniform(0.75),
        sparsity_type=sparsity.NByM(1, 4),
        scheduler=sparsity.PolynomialSchedule(1, 0, 4, power=1),
    )
    tx = updater.wrap_optax(optax.sgd(0.0))
    params = {"w": jnp.array([[1.0, 2.0, 3.0, 4.0, 8.0, 7.0, 6.0, 5.0]])}
    state = tx.init(params)
    kept = []
    for _ in range(5):
        _, state = tx.update(params, state, params)
        kept.append(np.asarray(state.masks["w"]).reshape(2, 4).sum(axis=1).tolist())
    # 4 * (1 - 0.75 * (0, 1/4, 1/2, 3/4, 1)) = 4, 3.25, 2.5, 1.75, 1; rounded up.
    assert kept == [[4, 4], [4, 4], [3, 3], [2, 2], [1, 1]]


def test_leaves_that_are_no_floating_arrays_stay_dense():
    params = {
        "w": jnp.ones((4, 4)),
        "table": jnp.ones((4, 4), jnp.int32),
        "flags": jnp.ones((4, 4), bool),
        "none": None,
        "masked": optax.MaskedNode(),
    }
    updater = sparsity.MagnitudePruning(sparsity_distribution_fn=lambda params: {"w": 0.5})
    masks = updater.instant_sparsify(params)[1]
    assert [mask.shape for mask in jax.tree.leaves(masks)] == [(4, 4)]
    every = sparsity.MagnitudePruning(
        sparsity_distribution_fn=lambda params: {"w": 0.5, "table": 0.5, "flags": 0.5}
    )
    state = every.init_state(params)
    assert len(jax.tree.leaves(state.masks)) == 1


# Parameters of every kind.


@pytest.mark.parametrize(
    "build",
    [
        lambda k, b: [k, b],
        lambda k, b: (k, (b, k)),
        lambda k, b: helpers.Pair(k, b),
        lambda k, b: helpers.Layer(k, b),
        lambda k, b: {"deep": [helpers.Pair(k, b), None, {"x": k}]},
        lambda k, b: {1: k, 2: b},
        lambda k, b: k,
    ],
    ids=["list", "tuple", "NamedTuple", "dataclass", "nested", "integer keys", "bare array"],
)
@pytest.mark.parametrize("name", ["magnitude", "rigl"])
def test_parameters_may_be_any_pytree(name, build):
    base = helpers.params()
    params = build(base["kernel"], base["bias"])
    updater = sparsity.ALGORITHM_REGISTRY[name](
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.OneShotSchedule(1)
    )
    grads = build(helpers.grads(0)["kernel"], helpers.grads(0)["bias"])
    params, state = helpers.train(updater, params, 2, grads=lambda _: grads, jit=False)
    matrices = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    assert [int(mask.sum()) for mask in jax.tree.leaves(state.masks)] == [30] * len(matrices)
    for leaf, mask in zip(matrices, jax.tree.leaves(state.masks), strict=True):
        assert np.all(helpers.is_positive_zero(leaf)[np.asarray(mask) == 0])


def test_flax_and_equinox_models_keep_their_containers():
    nnx = pytest.importorskip("flax.nnx")
    eqx = pytest.importorskip("equinox")
    frozen = pytest.importorskip("flax.core").freeze({"d": helpers.params()})
    linear = nnx.state(nnx.Linear(6, 10, rngs=nnx.Rngs(0)), nnx.Param)
    module = eqx.filter(eqx.nn.Linear(6, 10, key=jax.random.key(0)), eqx.is_array)
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.OneShotSchedule(1)
    )
    for params in (frozen, linear, module):
        grads = jax.tree.map(jnp.ones_like, params)
        after, state = helpers.train(updater, params, 2, grads=lambda _, g=grads: g, jit=False)
        assert jax.tree.structure(after) == jax.tree.structure(params)
        assert [int(mask.sum()) for mask in jax.tree.leaves(state.masks)] == [30]
        assert updater.post_gradient_update(after, state) is not None


def test_a_frozen_subtree_of_masked_nodes_stays_dense():
    # As optax.masked and optax.multi_transform hand them to the wrapper.
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.uniform(0.5), scheduler=sparsity.PeriodicSchedule(1)
    )
    tx = optax.multi_transform(
        {"sparse": updater.wrap_optax(optax.adam(0.1)), "frozen": optax.set_to_zero()},
        {"a": "sparse", "b": "frozen"},
    )
    params = {"a": helpers.params(), "b": helpers.params()}
    state = tx.init(params)
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    moved = optax.apply_updates(params, updates)
    assert np.count_nonzero(moved["b"]["kernel"]) == 60
    assert (
        np.all(np.asarray(moved["a"]["kernel"]) == 0)
        or np.count_nonzero(moved["a"]["kernel"]) <= 30
    )
    sparse = sparsity.get_sparse_state(state)
    assert int(sparse.masks["a"]["kernel"].sum()) == 30
    jax.tree.map(
        np.testing.assert_array_equal, updater.post_gradient_update(moved, state)["b"], moved["b"]
    )


# instant_sparsify.


@pytest.mark.parametrize("name", ["magnitude", "random", "saliency"])
def test_instant_sparsify_prunes_trees_and_bare_arrays_exactly(name):
    updater = sparsity.ALGORITHM_REGISTRY[name](sparsity_distribution_fn=helpers.uniform(0.75))
    params = helpers.params()
    pruned, masks = updater.instant_sparsify(params, grads=helpers.grads(0))
    assert int(masks["kernel"].sum()) == 15
    assert masks["bias"] is None
    np.testing.assert_array_equal(pruned["kernel"], np.where(masks["kernel"], params["kernel"], 0))
    bare, mask = updater.instant_sparsify(params["kernel"], grads=helpers.grads(0)["kernel"])
    assert int(mask.sum()) == 15
    np.testing.assert_array_equal(bare, np.where(mask, params["kernel"], 0))


def test_instant_sparsify_returns_packed_masks_on_demand():
    plain = sparsity.MagnitudePruning(sparsity_distribution_fn=helpers.uniform(0.75))
    packed = dataclasses.replace(plain, use_packed_masks=True)
    want, masks = plain.instant_sparsify(helpers.params())
    got, bits = packed.instant_sparsify(helpers.params())
    np.testing.assert_array_equal(got["kernel"], want["kernel"])
    assert bits["kernel"].shape == (6, 2)
    np.testing.assert_array_equal(bits["kernel"], np.packbits(masks["kernel"], axis=-1))


def test_no_pruning_returns_everything_as_it_is():
    updater = sparsity.NoPruning()
    params = helpers.params()
    pruned, masks = updater.instant_sparsify(params)
    assert pruned is params
    assert jax.tree.leaves(masks) == []
    with_it, _ = helpers.train(updater, params, 3, optax.adam(0.1))
    tx = optax.adam(0.1)
    state = tx.init(params)
    for step in range(3):
        updates, state = jax.jit(tx.update)(helpers.grads(step), state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(np.testing.assert_array_equal, with_it, params)


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


@pytest.mark.parametrize("name", _nestings())
def test_the_state_is_found_and_replaced_in_every_nesting(name):
    tx = _nestings()[name]
    params = helpers.params()
    updates, state = jax.jit(tx.update)(helpers.grads(0), tx.init(params), params)
    found = sparsity.get_sparse_state(state)
    assert isinstance(found, sparsity.SparseState)
    assert int(found.count) == 1
    assert int(found.masks["kernel"].sum()) == 30
    assert np.count_nonzero(optax.apply_updates(params, updates)["kernel"]) == 30
    pruned = sparsity.MagnitudePruning().post_gradient_update(params, state)
    assert np.count_nonzero(pruned["kernel"]) == 30
    replaced = sparsity.set_sparse_state(state, found._replace(count=jnp.int32(41)))
    assert int(sparsity.get_sparse_state(replaced).count) == 41
    assert jax.tree.structure(replaced) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, sparsity.set_sparse_state(replaced, found), state)


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
    inside = sparsity.RigL().wrap_optax(wrapped).init(params)
    with pytest.raises(ValueError, match=r"holds 2, at 'the root', '\.inner_state'"):
        sparsity.get_sparse_state(inside)


# Seeds of the random algorithms.


@pytest.mark.parametrize("name", ["random", "static_sparse", "set"])
def test_seeds_may_be_integers_and_keys_of_either_style(name):
    cls = sparsity.ALGORITHM_REGISTRY[name]

    def mask(seed):
        updater = cls(
            sparsity_distribution_fn=helpers.uniform(0.5),
            rng_seed=seed,
            scheduler=sparsity.OneShotSchedule(0),
        )
        _, state = helpers.train(updater, helpers.params(), 1, jit=False)
        return np.asarray(state.masks["kernel"])

    new, old = jax.random.key(5), jax.random.PRNGKey(5)
    np.testing.assert_array_equal(mask(new), mask(old))
    different = [mask(8), mask(9), mask(8 + 2**32), mask(-1), mask(new), mask(jax.random.key(6))]
    assert len({m.tobytes() for m in different}) == len(different)
    assert all(m.sum() == 30 for m in different)
    np.testing.assert_array_equal(mask(8), mask(8))


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_an_integer_of_numpy_is_the_same_seed_as_one_of_python(kind):
    want = pruners.generate_random_scores(helpers.params(), 8)
    got = pruners.generate_random_scores(helpers.params(), kind(8))
    np.testing.assert_array_equal(got["kernel"], want["kernel"])


@pytest.mark.parametrize("name", ["random", "static_sparse", "set", "random_ste"])
def test_a_traced_key_gives_every_run_of_a_vmap_its_own_masks_and_keeps_the_conditional(name):
    cls = sparsity.ALGORITHM_REGISTRY[name]
    ste = name == "random_ste"

    def train(key):
        updater = cls(
            sparsity_distribution_fn=helpers.uniform(0.5),
            rng_seed=key,
            scheduler=sparsity.PeriodicSchedule(2),
            **({"store_masks": True} if ste else {}),
        )
        tx = updater.wrap_optax(optax.sgd(0.1))
        params = helpers.params()

        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(helpers.grads, range(4)))
        (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), grads)
        return state.masks["kernel"]

    keys = jax.random.split(jax.random.key(0), 3)
    if name != "static_sparse":
        # A select would compute new masks in every step.
        body = _body_of_scan(jax.make_jaxpr(jax.vmap(train))(keys).jaxpr)
        conditionals = [eqn for eqn in body.eqns if eqn.primitive.name == "cond"]
        assert [eqn.invars[0].aval.shape for eqn in conditionals] == [()]
    masks = np.asarray(jax.jit(jax.vmap(train))(keys))
    assert len({mask.tobytes() for mask in masks}) == 3
    np.testing.assert_array_equal(masks.sum(axis=(1, 2)), [30, 30, 30])
    np.testing.assert_array_equal(masks[1], train(keys[1]))


def _body_of_scan(jaxpr):
    (body,) = (eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return body


# The state itself.


def test_the_state_holds_arrays_only_and_init_works_under_eval_shape():
    updater = sparsity.RigL(sparsity_distribution_fn=helpers.uniform(0.5))
    tx = updater.wrap_optax(optax.adam(0.1))
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
        tx = cls(**options).wrap_optax(optax.adam(0.1))
        state = tx.init(helpers.params())
        doubled = optax.tree.map_params(tx, lambda leaf: leaf + 1, state)
        np.testing.assert_array_equal(doubled.inner_state[0].mu["kernel"], np.ones(helpers.SHAPE))
        assert int(doubled.inner_state[0].count) == 0


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
        ({"sparsity_distribution_fn": 0.5}, "sparsity_distribution_fn must be a function"),
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
    with pytest.raises(ValueError, match=r"'nm_2,4' for parameter 'kernel'"):
        updater.init_state(helpers.params())


@pytest.mark.parametrize("seed", [1.5, "8", None], ids=repr)
def test_a_seed_that_is_neither_integer_nor_key_is_refused_when_the_updater_is_made(seed):
    with pytest.raises((ValueError, TypeError), match="rng_seed"):
        sparsity.RandomPruning(rng_seed=seed)
