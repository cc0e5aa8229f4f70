"""Models of real packages, trained sparse on real digits: flax linen, flax nnx, haiku, equinox."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import sparsity
from sparsity.core import trees
from tests import helpers

pytestmark = pytest.mark.slow


_EPOCHS, _BATCH, _RATE = 10, 128, 0.01
_SPARSITY = 0.8
_KERNELS = {(64, 64): 819, (64, 10): 128, (10, 64): 128}  # weights kept of 4096 and 640


@functools.cache
def _digits():
    from sklearn.datasets import load_digits  # here: every worker imports this module to collect it
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(np.float32(images / 16), labels, random_state=0, test_size=0.25)
    return [jnp.asarray(part) for part in split]


def _batches():
    x, _, y, _ = _digits()
    rng = np.random.default_rng(0)
    for _ in range(_EPOCHS):
        order = rng.permutation(len(x))
        for start in range(0, len(x) - _BATCH + 1, _BATCH):
            chosen = order[start : start + _BATCH]
            yield x[chosen], y[chosen]


def _updater(name):
    steps = len(list(_batches()))
    ramp = {"update_freq": 10, "update_start_step": 10, "update_end_step": steps // 2}
    return sparsity.create_updater_from_config({"algorithm": name, "sparsity": _SPARSITY} | ramp)


def _loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _train_linen(updater):
    model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
    params = model.init(jax.random.key(0), _digits()[0][:1])["params"]
    tx = updater.wrap_optax(optax.adam(_RATE))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    state = state.replace(step=jnp.int32(0))  # a Python int would compile the step twice

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x, y):
        def loss(params):
            seen = updater.pre_forward_update(params, state.opt_state)
            return _loss(state.apply_fn({"params": seen}, x), y)

        return state.apply_gradients(grads=jax.grad(loss)(state.params))

    for x, y in _batches():
        state = step(state, x, y)
    assert step._cache_size() == 1
    seen = updater.pre_forward_update(state.params, state.opt_state)
    return seen, state.opt_state, lambda x: model.apply({"params": seen}, x)


def _train_nnx(updater):
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs))
    optimizer = nnx.Optimizer(model, updater.wrap_optax(optax.adam(_RATE)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model):
            return _loss(model(x), y)

        optimizer.update(model, nnx.grad(loss)(model))

    for x, y in _batches():
        step(model, optimizer, x, y)
    return nnx.state(model, nnx.Param), optimizer.opt_state, model


def _train_by_optax(updater, params, apply):
    tx = updater.wrap_optax(optax.adam(_RATE))
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x, y):
        loss = lambda p: _loss(apply(updater.pre_forward_update(p, state), x), y)  # noqa: E731
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for x, y in _batches():
        params, state = step(params, state, x, y)
    assert step._cache_size() == 1
    seen = updater.pre_forward_update(params, state)
    return seen, state, functools.partial(apply, seen)


def _train_haiku(updater):
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([64, 10])(x)))
    params = model.init(jax.random.key(0), _digits()[0][:1])
    return _train_by_optax(updater, params, model.apply)


def _train_equinox(updater):
    model = eqx.nn.MLP(64, 10, 64, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    apply = lambda params, x: jax.vmap(eqx.combine(params, static))(x)  # noqa: E731
    return _train_by_optax(updater, params, apply)


@pytest.mark.parametrize(
    ("train", "name"),
    [
        (_train_linen, "magnitude_ste"),
        (_train_nnx, "rigl"),
        (_train_haiku, "magnitude"),
        (_train_equinox, "rigl"),
    ],
)
def test_a_model_learns_digits_at_the_target_sparsity(train, name):
    updater = _updater(name)
    params, opt_state, apply = train(updater)
    kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 2]
    assert len(kernels) == 2
    for kernel in kernels:
        kept = int(np.count_nonzero(kernel))
        # Weights that have grown in the last update may still be zero where the input is.
        assert kept <= _KERNELS[kernel.shape] if name == "rigl" else kept == _KERNELS[kernel.shape]
    masks = jax.tree.leaves(sparsity.get_sparse_state(opt_state).masks)
    if name != "magnitude_ste":
        assert sorted(int(mask.sum()) for mask in masks) == [128, 819]
    jax.tree.map(
        np.testing.assert_array_equal, updater.post_gradient_update(params, opt_state), params
    )
    assert "0.8" in sparsity.sparsity_table(params, opt_state, updater)
    _, x, _, y = _digits()
    assert np.mean(np.argmax(apply(x), axis=-1) == y) > 0.9


# Leaves that pass through.


def test_leaves_that_are_no_weights_pass_through_training_and_shapes():
    params = {
        "kernel": jnp.ones((4, 8)),
        "nothing": None,
        "frozen": optax.MaskedNode(),
        "table": jnp.arange(32).reshape(4, 8),
        "flags": jnp.ones((4, 8), bool),
    }
    half = helpers.half
    for algorithm in (sparsity.RigL, sparsity.MagnitudePruning, sparsity.SteMagnitudePruning):
        updater = algorithm(
            sparsity_distribution_fn=half, scheduler=sparsity.OneShotSchedule(0), batch_axes=0
        )
        tx = updater.wrap_optax(optax.sgd(0.1))
        state = tx.init(params)
        grads = jax.tree.map(lambda leaf: jnp.zeros_like(leaf), params)
        grads["kernel"] = jnp.arange(32.0).reshape(4, 8)
        updates, after = jax.jit(tx.update)(grads, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        for name in ("table", "flags"):
            assert not np.any(updates[name])
        if algorithm is not sparsity.SteMagnitudePruning:
            assert list(map(trees.path_string, trees.leaves_by_path(after.masks))) == ["kernel"]
        shapes = jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, params), params)
        assert jax.tree.structure(shapes) == jax.tree.structure((updates, after))
