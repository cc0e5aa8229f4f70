"""Training steps of the wrapper, against an independent implementation in numpy."""

import dataclasses
import functools

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


@functools.cache
def _compiled(algorithm, optimizer, skip, sparse_gradients):
    """The updater, init and the compiled update of a case."""
    updater = _CASES[algorithm][0](
        sparsity_distribution_fn=helpers.uniform(0.7),
        skip_gradients=skip,
        is_sparse_gradients=sparse_gradients,
    )
    inner = optax.sgd(0.1) if optimizer == "sgd" else optax.adamw(0.1, eps=_EPS, weight_decay=0.05)
    tx = updater.wrap_optax(inner)
    return updater, tx.init, jax.jit(tx.update)


def _train_beside_numpy(algorithm, optimizer, skip, sparse_gradients, *, post, spoil=()):
    updater, init, update = _compiled(algorithm, optimizer, skip, sparse_gradients)
    amounts = _CASES[algorithm][1]
    params = helpers.params()
    state = init(params)
    mask = np.ones(helpers.SHAPE, np.uint8)
    if algorithm != "magnitude":
        draw = pruners.generate_random_scores(params, 8)["kernel"]
        mask = best(draw, helpers.num_kept(60, 0.7))
        assert mask.sum() == 18
    np.testing.assert_array_equal(state.masks["kernel"], mask)
    oracle = _Numpy(algorithm, optimizer, skip, sparse_gradients, amounts)
    oracle.init(params, mask)
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


@pytest.mark.parametrize(
    "sparse_gradients",
    helpers.slow_but([False], [False, True]),
    ids=["dense", "sparse gradients"],
)
@pytest.mark.parametrize("skip", helpers.slow_but([False], [False, True]), ids=["no skip", "skip"])
@pytest.mark.parametrize("algorithm", helpers.slow_but(["rigl"], _CASES))
def test_training_agrees_with_numpy_under_adam_with_weight_decay(algorithm, skip, sparse_gradients):
    _train_beside_numpy(algorithm, "adamw", skip, sparse_gradients, post=skip)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True], ids=["no skip", "skip"])
@pytest.mark.parametrize("algorithm", _CASES)
def test_training_agrees_with_numpy_under_gradient_descent(algorithm, skip):
    _train_beside_numpy(algorithm, "sgd", skip, skip, post=not skip)


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True], ids=["no skip", "skip"])
@pytest.mark.parametrize("algorithm", _CASES)
def test_nan_and_infinite_gradients_of_pruned_weights_do_not_leak(algorithm, skip):
    # RigL would rightly grow a weight whose gradient is infinite, but none that is no number.
    spoil = (np.nan, np.nan) if algorithm == "rigl" else (np.nan, np.inf, -np.inf)
    _train_beside_numpy(algorithm, "sgd", skip, skip, post=False, spoil=spoil)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["magnitude", "rigl", "static"])
def test_post_gradient_update_changes_no_bit_of_what_apply_updates_gives(name):
    updater = _CASES[name][0](sparsity_distribution_fn=helpers.uniform(0.7))
    without = helpers.train(updater, helpers.params(), _STEPS)
    with_it = helpers.train(updater, helpers.params(), _STEPS, post=True)
    jax.tree.map(np.testing.assert_array_equal, without, with_it)


@pytest.mark.slow
def test_a_loop_without_sparse_updates_relies_on_post_gradient_update():
    updater = _CASES["static"][0](
        sparsity_distribution_fn=helpers.uniform(0.7), is_sparse_updates=False
    )
    dense, state = helpers.train(updater, helpers.params(), 2)
    assert np.count_nonzero(dense["kernel"]) == 60
    sparse = updater.post_gradient_update(dense, state)
    np.testing.assert_array_equal(np.asarray(sparse["kernel"]) != 0, state.masks["kernel"])


@pytest.mark.slow
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
        with pytest.warns(UserWarning, match=".* overrides post_gradient_update"):
            params, _ = helpers.train(updater, helpers.params(), 3, jit=False)
        assert np.count_nonzero(params["kernel"]) == 60
        assert seen == [60, 60, 60]  # the hooks see the weights as they are
