"""An update that may be skipped, whatever the state of its optimizer is made of."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparsity.training.inner import update_unless


class _Pair(NamedTuple):
    first: jax.Array
    second: jax.Array


def _transformation(update):
    """A stateful update: the state is a `_Pair`, initially (1, 2) for every weight."""

    def init(params):
        return jax.tree.map(lambda p: _Pair(jnp.full_like(p, 1), jnp.full_like(p, 2)), params)

    return optax.GradientTransformation(init, update)


def _by_pairs(fn):
    def update(updates, state, params=None):
        out = jax.tree.map(fn, updates, state, params, is_leaf=lambda node: isinstance(node, _Pair))
        is_out = lambda node: isinstance(node, tuple) and not isinstance(node, _Pair)  # noqa: E731
        steps = jax.tree.map(lambda o: o[0], out, is_leaf=is_out)
        return steps, jax.tree.map(lambda o: o[1], out, is_leaf=is_out)

    return _transformation(update)


# Updates whose new state is not simply computed from the old one.
_AWKWARD = {
    "both leaves get one array": _by_pairs(lambda u, s, p: (-u, _Pair(u, u))),
    "both leaves get one result": _by_pairs(lambda u, s, p: (-u, _Pair(u * 2, u * 2))),
    "one result twice": _by_pairs(lambda u, s, p: (lambda r: (r, _Pair(r, r)))(u * s.first)),
    "a shift register": _by_pairs(lambda u, s, p: (-u * s.second, _Pair(u, s.first))),
    "a copy of the other leaf": _by_pairs(lambda u, s, p: (-u, _Pair(s.first, s.first))),
    "swapped leaves": _by_pairs(lambda u, s, p: (u * s.first, _Pair(s.second, s.first))),
    "the parameters": _by_pairs(lambda u, s, p: (u - p, _Pair(p, p))),
    "the updates, also returned": _by_pairs(lambda u, s, p: (u, _Pair(u, s.first))),
    "constants": _by_pairs(lambda u, s, p: (u, _Pair(jnp.zeros_like(u), jnp.full_like(u, 3)))),
    "the state as the update": _by_pairs(lambda u, s, p: (s.first, _Pair(s.first + u, s.second))),
    "nothing changes": _by_pairs(lambda u, s, p: (s.first * u, s)),
    "read again after it is set": _by_pairs(
        lambda u, s, p: (lambda m: (m * 3, _Pair(m, m + s.second)))(s.first + u)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True], ids=["go on", "skip"])
@pytest.mark.parametrize("name", _AWKWARD)
def test_a_skipped_update_changes_nothing_whatever_the_state_is_made_of(name, skip):
    tx = _AWKWARD[name]
    params = {"a": jnp.array([5.0, 6.0]), "b": jnp.array([7.0])}
    grads = {"a": jnp.array([0.5, -0.25]), "b": jnp.array([4.0])}
    state = tx.init(params)
    steps, new_state = jax.jit(functools.partial(update_unless, update=tx.update))(
        jnp.bool_(skip), grads=grads, state=state, params=params
    )
    if skip:
        expected = jax.tree.map(jnp.zeros_like, grads), state
    else:
        expected = tx.update(grads, state, params)
    assert jax.tree.structure((steps, new_state)) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, (steps, new_state), expected)


def _loss(params):
    return sum(jnp.sum((leaf - 0.5) ** 2 * (1 + leaf**2)) for leaf in jax.tree.leaves(params))


def _with_value(tx):
    def extra(params, grads):
        return {"value": _loss(params), "grad": grads, "value_fn": _loss}

    return tx, extra


def _without(tx):
    return tx, lambda params, grads: {}


_OPTIMIZERS = {
    "sgd": _without(optax.sgd(0.1)),
    "sgd with a schedule": _without(optax.sgd(optax.linear_schedule(0.1, 0.0, 4))),
    "momentum": _without(optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "adamw": _without(optax.adamw(1e-2)),
    "lion": _without(optax.lion(1e-2)),
    "adafactor": _without(optax.adafactor(1e-2, min_dim_size_to_factor=2)),
    "noisy_sgd": _without(optax.noisy_sgd(0.1, key=0)),
    "noise from a typed key": _without(
        optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.scale(-0.1))
    ),
    "MultiSteps": _without(optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()),
    "apply_if_finite": _without(optax.apply_if_finite(optax.adam(1e-2), 3)),
    "inject_hyperparams": _without(
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 4))
    ),
    "masked": _without(optax.masked(optax.adam(1e-2), {"w": True, "b": False})),
    "multi_transform": _without(
        optax.multi_transform(
            {"one": optax.adam(1e-2), "two": optax.sgd(0.1)}, {"w": "one", "b": "two"}
        )
    ),
    "schedule_free": _without(optax.contrib.schedule_free_adamw(1e-2)),
    "muon": _without(optax.contrib.muon(1e-2)),
    "lbfgs": _with_value(optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(4))),
    "reduce_on_plateau": _with_value(
        optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau(patience=1))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_skipping_agrees_with_selecting_between_the_states_of_any_optimizer(name):
    tx, extra = _OPTIMIZERS[name]
    tx = optax.with_extra_args_support(tx)
    params = {"w": jnp.array([[1.0, -2.0, 0.5], [0.3, 0.1, 2.0]]), "b": jnp.array([0.3, 1.5])}
    skips = [False, True, False, False, True]

    @jax.jit
    def both(skip, params, state):
        grads = jax.grad(_loss)(params)
        update = functools.partial(tx.update, **extra(params, grads))
        steps, new_state = update(grads, state, params)
        steps = jax.tree.map(lambda step: jnp.where(skip, jnp.zeros_like(step), step), steps)
        new_state = jax.tree.map(functools.partial(jnp.where, skip), state, new_state)
        return (steps, new_state), update_unless(skip, update, grads, state, params)

    state = tx.init(params)
    for skip in skips:
        expected, actual = both(skip, params, state)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        for (path, want), got in zip(
            jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(actual), strict=True
        ):
            assert got.dtype == want.dtype, path
            if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
                got, want = jax.random.key_data(got), jax.random.key_data(want)
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6, err_msg=str(path))
        steps, state = actual
        params = optax.apply_updates(params, steps)


def test_a_choice_known_when_the_code_is_traced_leaves_nothing_in_the_program():
    tx = optax.adam(0.1)
    params = jnp.ones(3)
    args = (params, tx.init(params), params)
    plain = str(jax.make_jaxpr(tx.update)(*args))
    assert str(jax.make_jaxpr(functools.partial(_unless, False, tx.update))(*args)) == plain
    skipped = jax.make_jaxpr(functools.partial(_unless, True, tx.update))(*args)
    assert [equation.primitive.name for equation in skipped.eqns] == ["broadcast_in_dim"]


def _unless(skip, update, grads, state, params):
    return update_unless(skip, update, grads, state, params)
