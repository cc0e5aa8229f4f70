"""Derivatives through steps of a wrapped optimizer: masks are constants."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.training.state import SparseState

_RNG = np.random.default_rng(0)
_PARAMS = {"w": jnp.asarray(_RNG.normal(size=(6, 8)), jnp.float32)}
_DATA = jnp.asarray(_RNG.normal(size=(3, 4, 6)), jnp.float32)
_MASKS = {"w": jnp.asarray(_RNG.permutation(np.repeat([1, 0], 24)).reshape(6, 8), jnp.uint8)}


def _loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)


def _train(tx, params, rate):
    """Returns the loss after three steps, the first of which gets gradients times `rate`."""
    state, masks = tx.init(params), []
    for step, x in enumerate(_DATA):
        grads = jax.tree.map(
            lambda g, s=step: g * (rate if s == 0 else 1), jax.grad(_loss)(params, x)
        )
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        masks.append(state.masks["w"])
    return _loss(params, _DATA[0]), masks


def _train_by_hand(params, rate, masks):
    """The same with momentum, under masks that are chosen before."""
    w, trace, old = params["w"] * _MASKS["w"], jnp.zeros((6, 8)), _MASKS["w"]
    for step, (x, mask) in enumerate(zip(_DATA, masks, strict=True)):
        grad = jax.grad(_loss)({"w": w}, x)["w"] * (rate if step == 0 else 1)
        trace = jnp.where((mask > 0) & (old == 0), 0, trace)
        trace = grad + 0.9 * trace
        w, old = (w - trace) * mask, mask
    return _loss({"w": w}, _DATA[0])


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
@pytest.mark.parametrize(
    "algorithm", [sparsity.MagnitudePruning, sparsity.RigL], ids=lambda cls: cls.__name__
)
def test_derivatives_are_those_of_training_under_constant_masks(algorithm, packed):
    updater = algorithm(
        sparsity_distribution_fn=sparsity.Uniform(0.7),
        scheduler=sparsity.PeriodicSchedule(1),
        skip_gradients=False,
        use_packed_masks=packed,
    )
    tx = updater.wrap_optax(optax.sgd(1.0, momentum=0.9), masks=_MASKS)
    params, _ = updater.init(tx, _PARAMS)
    loss, masks = _train(tx, params, 2.0)
    if packed:
        masks = [jnp.unpackbits(mask, axis=-1) for mask in masks]
    assert any(np.any(mask != _MASKS["w"]) for mask in masks)
    np.testing.assert_allclose(loss, _train_by_hand(params, 2.0, masks), rtol=1e-5)
    actual = jax.grad(lambda *args: _train(tx, *args)[0], argnums=(0, 1))(params, 2.0)
    expected = jax.grad(_train_by_hand, argnums=(0, 1))(params, 2.0, masks)
    kept = masks[0] * _MASKS["w"]  # the derivatives of others depend on how they are set to 0
    np.testing.assert_allclose(actual[0]["w"] * kept, expected[0]["w"] * kept, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-4)


def test_a_state_that_passes_through_a_loop_keeps_its_derivatives():
    class Sums(sparsity.MagnitudePruning):
        """Adds up gradients, and halves the sums when the masks move."""

        def init_algorithm_state(self, params, masks):
            return jax.tree.map(jnp.zeros_like, params)

        def accumulate(self, sparse_state, params, grads):
            sums = jax.tree.map(jnp.add, sparse_state.algorithm_state, grads)
            return sparse_state._replace(algorithm_state=sums)

        def update_state(self, sparse_state, params, grads, **kwargs):
            state = super().update_state(sparse_state, params, grads, **kwargs)
            halves = jax.tree.map(lambda x: x / 2, state.algorithm_state)
            return state._replace(algorithm_state=halves)

    updater = Sums(
        sparsity_distribution_fn=sparsity.Uniform(0.5), scheduler=sparsity.PeriodicSchedule(2)
    )
    tx = updater.wrap_optax(optax.sgd(0.1))

    def total(scale, steps):
        state: SparseState = tx.init(_PARAMS)._replace(count=jnp.int32(1))
        for _ in range(steps):
            _, state = jax.jit(tx.update)(
                jax.tree.map(lambda w: w * scale, _PARAMS), state, _PARAMS
            )
        return jnp.sum(jnp.abs(state.algorithm_state["w"]))

    one = float(jnp.sum(jnp.abs(_PARAMS["w"])))
    assert jax.grad(total)(1.0, 1) == pytest.approx(one, rel=1e-5)
    # The second step moves the masks: what that writes is constant.
    assert total(1.0, 2) == pytest.approx(one, rel=1e-5)
    assert jax.grad(total)(1.0, 2) == 0
