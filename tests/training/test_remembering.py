"""Algorithms that remember: their state, the order of a step, and that others pay nothing."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import sparsity

_SHAPE = (4, 8)
_HALF = sparsity.Uniform(0.5)


def _params(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return {"w": draw(*_SHAPE), "b": draw(8)}


def _grads(step=0, dtype=jnp.float32):
    rng = np.random.default_rng(100 + step)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return {"w": draw(*_SHAPE), "b": draw(8)}


@dataclasses.dataclass(kw_only=True)
class Movement(sparsity.BaseUpdater):
    """Keeps the weights with the largest sum of -weight * gradient, and doubles all gradients."""

    decay: float = 0.5

    def init_algorithm_state(self, params, masks):
        return jax.tree.map(jnp.zeros_like, params)

    def accumulate(self, sparse_state, params, grads):
        add = lambda old, w, g: self.decay * old - w * g  # noqa: E731
        new = jax.tree.map(add, sparse_state.algorithm_state, params, grads)
        return sparse_state._replace(algorithm_state=new)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        return sparse_state.algorithm_state

    def modify_gradients(self, grads, params, sparse_state):
        return jax.tree.map(lambda g: 2 * g, grads)


def _make(cls=Movement, **options):
    options = {"scheduler": sparsity.OneShotSchedule(1)} | options
    return cls(sparsity_distribution_fn=_HALF, **options)


def _make_step(updater, dtype=jnp.float32):
    tx = updater.wrap_optax(optax.sgd(0.5))

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, tx.init(_params(dtype))


def _oracle(steps):
    """Weights, sums and mask by numpy; masks change at step 1."""
    params = {k: np.asarray(v) for k, v in _params().items()}
    sums = {k: np.zeros_like(v) for k, v in params.items()}
    mask = np.ones(_SHAPE, np.uint8)
    for index in range(steps):
        grads = {k: np.asarray(v) for k, v in _grads(index).items()}
        sums = {k: np.float32(0.5) * sums[k] - params[k] * grads[k] for k in params}
        if index == 1:
            mask = np.zeros(sums["w"].size, np.uint8)
            mask[np.argsort(-sums["w"].ravel(), kind="stable")[:16]] = 1
            mask = mask.reshape(_SHAPE)
        params = {k: params[k] - grads[k] for k in params}  # 0.5 * 2
        params["w"] = params["w"] * mask
    return params, sums, mask


def _check(params, state, steps):
    expected, sums, mask = _oracle(steps)
    np.testing.assert_array_equal(sparsity.active_masks(params, state)["w"], mask)
    for name in expected:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.algorithm_state[name], sums[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "jit", "donated", "packed", "scan"])
def test_sums_grow_in_every_step_and_decide_at_the_update(way):
    updater = _make(use_packed_masks=way == "packed")
    step, state = _make_step(updater)
    params = _params()
    if way == "scan":
        grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(_grads, range(4)))
        run = lambda carry, grads: (step(*carry, grads), None)  # noqa: E731
        (params, state), _ = jax.jit(lambda carry: jax.lax.scan(run, carry, grads))((params, state))
    else:
        if way != "eager":
            step = jax.jit(step, donate_argnums=(0, 1) if way == "donated" else ())
        for index in range(4):
            params, state = step(params, state, _grads(index))
    _check(params, state, 4)


@pytest.mark.slow
def test_runs_are_mapped_over_their_states():
    step, state = _make_step(_make())
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), (_params(), state))
    for index in range(2):
        grads = jax.tree.map(lambda g: jnp.stack([g, -g]), _grads(index))
        stacked = jax.vmap(step)(*stacked, grads)
    _check(*jax.tree.map(lambda leaf: leaf[0], stacked), 2)
    assert np.any(stacked[1].masks["w"][0] != stacked[1].masks["w"][1])


@pytest.mark.slow
def test_sums_of_bfloat16_stay_bfloat16():
    step, state = _make_step(_make(), jnp.bfloat16)
    params, state = jax.jit(step)(_params(jnp.bfloat16), state, _grads(0, jnp.bfloat16))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(state.algorithm_state))
    assert params["w"].dtype == jnp.bfloat16


def test_what_most_algorithms_remember_is_nothing():
    state = _make_step(_make(sparsity.MagnitudePruning))[1]
    assert state.algorithm_state is None


# The order of a step.


@dataclasses.dataclass(kw_only=True)
class Ordered(sparsity.MagnitudePruning):
    """Notes which hook runs when, and how many weights its masks keep."""

    calls: Any = dataclasses.field(default_factory=list)

    def init_algorithm_state(self, params, masks):
        self.calls.append(("init", int(masks["w"].sum())))
        return {"seen": jnp.zeros([])}

    def accumulate(self, sparse_state, params, grads):
        self._note("accumulate", sparse_state, params)
        seen = sparse_state.algorithm_state["seen"] + 1
        # Only algorithm_state counts; the masks of this result do not.
        masks = jax.tree.map(jnp.zeros_like, sparse_state.masks)
        return sparse_state._replace(algorithm_state={"seen": seen}, masks=masks)

    def calculate_scores(self, params, sparse_state=None, grads=None):
        self._note("scores", sparse_state, params)
        return jax.tree.map(jnp.abs, params)

    def modify_gradients(self, grads, params, sparse_state):
        self._note("modify", sparse_state, params)
        return jax.tree.map(jnp.ones_like, grads)

    def _note(self, name, state, params):
        kept, weights = int(state.masks["w"].sum()), int(jnp.count_nonzero(params["w"]))
        assert state.masks["w"].shape == _SHAPE  # never packed
        self.calls.append((name, float(state.algorithm_state["seen"]), kept, weights))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
def test_a_step_accumulates_then_refreshes_then_modifies_under_the_new_masks(packed):
    updater = _make(Ordered, use_packed_masks=packed, is_sparse_gradients=True)
    seen = []

    def update(updates, state, params=None):
        seen.append(updates)
        return jax.tree.map(lambda u: -u, updates), state

    tx = updater.wrap_optax(optax.GradientTransformation(lambda params: (), update))
    params = _params()
    state = tx.init(params)
    seen.clear()  # `init` traces the optimizer
    for index in range(3):
        updates, state = tx.update(_grads(index), state, params)
        params = optax.apply_updates(params, updates)
    assert updater.calls == [
        ("init", 32),
        ("accumulate", 0, 32, 32),
        ("modify", 1, 32, 32),
        ("accumulate", 1, 32, 32),
        ("scores", 2, 32, 32),
        ("modify", 2, 16, 16),
        ("accumulate", 2, 16, 16),
        ("modify", 3, 16, 16),
    ]
    # The masks are applied to what modify_gradients returned, and to the masked leaf only.
    sums = [(float(grads["w"].sum()), float(grads["b"].sum())) for grads in seen]
    assert sums == [(32, 8), (16, 8), (16, 8)]


def test_leaves_that_cannot_be_pruned_keep_their_gradients():
    updater = _make(Movement, scheduler=sparsity.OneShotSchedule(9))
    params = {**_params(), "n": jnp.int32(3)}
    tx = updater.wrap_optax(optax.identity())
    state = tx.init(params)
    assert state.algorithm_state["n"] is None
    updates, _ = tx.update({**_grads(), "n": jnp.int32(1)}, state, params)
    assert int(updates["n"]) == 1
    np.testing.assert_array_equal(updates["b"], 2 * _grads()["b"])


# Extra arguments.


@dataclasses.dataclass(kw_only=True)
class Curious(sparsity.RigL):
    """Every hook asks for another extra argument."""

    got: Any = dataclasses.field(default_factory=dict)

    def init_algorithm_state(self, params, masks):
        return jnp.zeros([])

    def accumulate(self, sparse_state, params, grads, *, loss):
        return sparse_state._replace(algorithm_state=loss)

    def modify_gradients(self, grads, params, sparse_state, scale=1.0):
        return jax.tree.map(lambda g: g * scale, grads)

    def get_drop_scores(self, sparse_state, params, grads, hessian):
        self.got["drop"] = hessian
        return jax.tree.map(jnp.abs, params)

    def get_grow_scores(self, sparse_state, params, grads, **extra):
        self.got["grow"] = sorted(extra)
        return jax.tree.map(jnp.abs, grads)


@pytest.mark.slow
def test_extra_arguments_reach_the_hooks_that_name_them():
    updater = _make(Curious, scheduler=sparsity.PeriodicSchedule(2), skip_gradients=False)
    tx = updater.wrap_optax(optax.sgd(1.0))
    params = _params()
    extra = {"loss": jnp.float32(3), "scale": 5.0, "hessian": "h", "other": 1}
    updates, state = tx.update(_grads(), tx.init(params), params, **extra)
    assert updater.got == {"drop": "h", "grow": ["hessian", "loss", "other", "scale"]}
    assert float(state.algorithm_state) == 3
    np.testing.assert_allclose(updates["b"], -5 * _grads()["b"], rtol=1e-6)


@dataclasses.dataclass(kw_only=True)
class Weighted(sparsity.MagnitudePruning):
    def calculate_scores(self, params, sparse_state=None, grads=None, *, weights=None):
        return weights

    def create_masks(self, scores, sparsities, target_sparsities=None, *, flip=False):
        masks = super().create_masks(scores, sparsities, target_sparsities)
        return jax.tree.map(lambda mask: 1 - mask, masks) if flip else masks


def test_extra_arguments_reach_scores_and_masks_of_both_entry_points():
    updater = _make(Weighted, scheduler=sparsity.OneShotSchedule(0))
    params = _params()
    weights = jax.tree.map(lambda p: -jnp.abs(p), params)  # keeps the smallest
    smallest = np.abs(params["w"]) <= np.sort(np.abs(params["w"]).ravel())[15]
    _, masks = updater.instant_sparsify(params, weights=weights, other=1)
    np.testing.assert_array_equal(masks["w"], smallest)
    _, masks = updater.instant_sparsify(params, None, weights=weights, flip=True)
    np.testing.assert_array_equal(masks["w"], ~smallest)
    tx = updater.wrap_optax(optax.sgd(0.1))
    for flip in (False, True):
        _, state = tx.update(_grads(), tx.init(params), params, weights=weights, flip=flip)
        np.testing.assert_array_equal(state.masks["w"], smallest ^ flip)


# Where the state lives.


def test_the_state_is_sharded_as_the_parameters():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = jax.device_put(_params(), rows)
    tx = _make().wrap_optax(optax.adam(0.1))
    shardings = sparsity.sharding_like(params, jax.eval_shape(tx.init, params))
    assert {leaf_sharding.spec for leaf_sharding in jax.tree.leaves(shardings.algorithm_state)} == {
        rows.spec
    }
    assert shardings.count.spec == jax.sharding.PartitionSpec()
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    assert state.algorithm_state["w"].sharding.spec == rows.spec


def test_params_of_the_state_are_found_by_optax():
    tx = _make().wrap_optax(optax.adam(0.1))
    state = tx.init(_params())
    marked = optax.tree.map_params(
        tx, lambda leaf: "param", state, transform_non_params=lambda leaf: "other"
    )
    assert marked.algorithm_state == {"w": "param", "b": "param"}
    assert (marked.masks, marked.count) == ("other", "other")


def _orbax(saved, fresh, folder, **options):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", saved)
        arguments = ocp.checkpoint_utils.construct_restore_args(fresh)
        restore = ocp.args.PyTreeRestore(item=fresh, restore_args=arguments, **options)
        return checkpointer.restore(folder / "run", args=restore)


def _standard(saved, fresh, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "run", fresh)


def _bytes(saved, fresh, folder):
    return serialization.from_bytes(fresh, serialization.to_bytes(saved))


def _dictionary(saved, fresh, folder):
    return serialization.from_state_dict(fresh, serialization.to_state_dict(saved))


_WAYS = {"orbax": _orbax, "standard": _standard, "bytes": _bytes, "dictionary": _dictionary}


def _saved_and_fresh(cls, packed):
    step, state = _make_step(_make(cls, use_packed_masks=packed))
    saved = step(_params(), step(_params(), state, _grads())[1], _grads(1))[1]
    return saved, jax.tree.map(jnp.zeros_like, state)


@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
@pytest.mark.parametrize("way", _WAYS)
def test_a_state_that_remembers_is_restored(way, packed, tmp_path):
    saved, fresh = _saved_and_fresh(Movement, packed)
    actual = _WAYS[way](saved, fresh, tmp_path)
    assert type(actual) is type(saved)
    assert jax.tree.structure(actual) == jax.tree.structure(saved)
    jax.tree.map(np.testing.assert_array_equal, actual, saved)
    assert np.any(actual.algorithm_state["w"])


# What hooks cost.


class Same(sparsity.MagnitudePruning):
    """A class without hooks of its own."""


class Idle(sparsity.MagnitudePruning):
    """A class whose hooks change nothing."""

    def accumulate(self, sparse_state, params, grads):
        return sparse_state

    def modify_gradients(self, grads, params, sparse_state):
        return grads


@dataclasses.dataclass(kw_only=True)
class Remembers(sparsity.MagnitudePruning):
    """A class that remembers what does not change its masks."""

    def init_algorithm_state(self, params, masks):
        return jax.tree.map(jnp.zeros_like, params)

    def accumulate(self, sparse_state, params, grads):
        return sparse_state._replace(algorithm_state=grads)


class Doubles(sparsity.MagnitudePruning):
    def modify_gradients(self, grads, params, sparse_state):
        return jax.tree.map(lambda g: 2 * g, grads)


def _instructions(cls):
    """The optimized program of an update, without the places of the source."""
    tx = _make(cls, scheduler=sparsity.PeriodicSchedule(3)).wrap_optax(optax.adam(0.1))
    params = _params()
    text = jax.jit(tx.update).lower(_grads(), tx.init(params), params).compile().as_text()
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    body = text[text.index("\n%") if "\n%" in text else text.index("ENTRY") :]
    lines = [line for line in body.splitlines() if " = " in line or line.startswith(("%", "ENTRY"))]
    assert any(" while(" in line for line in lines)
    return lines


@pytest.mark.slow
def test_hooks_that_are_not_overridden_cost_no_instruction():
    plain = _instructions(sparsity.MagnitudePruning)
    assert len(plain) > 50
    assert _instructions(Same) == plain
    assert _instructions(Idle) == plain
    # The controls: the comparison sees what hooks compute.
    assert _instructions(Remembers) != plain
    assert _instructions(Doubles) != plain


def test_a_state_that_remembers_nothing_has_no_more_arrays_than_before():
    updater = _make(sparsity.MagnitudePruning)
    state = _make_step(updater)[1]
    # A mask, a target and the count.
    assert len(jax.tree.leaves(state._replace(inner_state=None))) == 3
