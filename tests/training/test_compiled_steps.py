"""What a compiled step must not contain, and what it must not trip over."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers

_SHAPE = (96, 128)


def _training_step(updater, optimizer=None):
    tx = updater.wrap_optax(optax.adam(1e-2) if optimizer is None else optimizer)
    params = {"w": jnp.ones(_SHAPE), "b": jnp.zeros(_SHAPE[1])}

    def step(params, state, x):
        loss = lambda params: jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)  # noqa: E731
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step, params, tx.init(params)


def _computations(text):
    """HLO text -> ({name: lines}, name of the entry)."""
    bodies, entry, name = {}, None, None
    for line in text.splitlines():
        start = re.match(r"(ENTRY )?%(\S+) \(.*\{$", line)
        if start:
            name = start[2]
            entry = name if start[1] else entry
            bodies[name] = []
        elif line.startswith("}"):
            name = None
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _large_copies(text, *, least):
    """Copies of `least` elements or more in every step without a mask update."""
    bodies, entry = _computations(text)
    actual, seen, todo = [], set(), [entry]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in bodies[name]:
            loop = " while(" in line and name == entry  # the update of masks
            called = re.findall(r"(?:calls|to_apply|body|condition)=%([\w.\-]+)", line)
            todo += [] if loop else called
            copied = re.search(r"= \(?\w+\[([\d,]*)\]\S* copy(?:-start)?\(", line)
            if copied and math.prod(map(int, filter(None, copied[1].split(",")))) >= least:
                actual.append(line.strip())
    return actual


def _compiled(updater, donate):
    step, params, state = _training_step(updater)
    step = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    return step.lower(params, state, jnp.ones((4, _SHAPE[0]))).compile().as_text()


_SCHEDULE = sparsity.PeriodicSchedule(3)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "bits"])
@pytest.mark.parametrize("algorithm", [sparsity.MagnitudePruning, sparsity.RigL])
def test_a_donated_step_without_a_mask_update_copies_no_moment(algorithm, packed):
    # Where gradients are skipped, XLA:CPU copies the moments that it selects.
    updater = algorithm(
        sparsity_distribution_fn=helpers.half,
        scheduler=_SCHEDULE,
        skip_gradients=False,
        use_packed_masks=packed,
    )
    text = _compiled(updater, donate=True)
    bodies, entry = _computations(text)
    assert sum(" while(" in line for line in bodies[entry]) == 1
    copies = _large_copies(text, least=math.prod(_SHAPE) // 8)
    # XLA:CPU clears the marks of grown weights in a copy of the mask, a byte a weight.
    assert [line for line in copies if packed or " = u8[" not in line] == []


@pytest.mark.slow
def test_the_search_for_copies_finds_those_of_a_step_that_is_not_donated():
    updater = sparsity.RigL(sparsity_distribution_fn=helpers.half, scheduler=_SCHEDULE)
    assert _large_copies(_compiled(updater, donate=False), least=math.prod(_SHAPE) // 8)


@pytest.mark.slow
def test_the_inner_update_is_outside_of_the_loop():
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.half, scheduler=_SCHEDULE, skip_gradients=False
    )
    sine = optax.stateless(lambda updates, params: jax.tree.map(jnp.sin, updates))
    step, params, state = _training_step(updater, sine)
    jaxpr = jax.make_jaxpr(step)(params, state, jnp.ones((4, _SHAPE[0]))).jaxpr
    top = [equation.primitive.name for equation in jaxpr.eqns]
    assert top.count("while") == 1
    assert top.count("sin") == 2  # both leaves
    assert len(re.findall("= sin ", str(jaxpr))) == 2


@pytest.mark.slow
def test_without_a_schedule_the_step_has_no_loop_at_all():
    updater = sparsity.StaticRandomSparse(sparsity_distribution_fn=helpers.half)
    step, params, state = _training_step(updater)
    assert "while" not in str(jax.make_jaxpr(step)(params, state, jnp.ones((4, _SHAPE[0]))))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [sparsity.MagnitudePruning, sparsity.RigL])
def test_the_second_call_compiles_nothing(algorithm):
    step, params, state = _training_step(
        algorithm(sparsity_distribution_fn=helpers.half, scheduler=sparsity.PeriodicSchedule(2))
    )
    step = jax.jit(step)
    x = jnp.ones((4, _SHAPE[0]))
    for _ in range(3):
        params, state = step(params, state, x)
    assert step._cache_size() == 1


@pytest.mark.slow
def test_a_training_step_leaks_no_tracer():
    with helpers.checking_leaks():
        for algorithm in (sparsity.RigL, sparsity.SteMagnitudePruning):
            step, params, state = _training_step(
                algorithm(sparsity_distribution_fn=helpers.half, scheduler=_SCHEDULE)
            )
            jax.jit(step)(params, state, jnp.ones((4, _SHAPE[0])))


@pytest.mark.slow
def test_a_training_step_makes_no_nan_on_the_way():
    with jax.debug_nans(True):
        for algorithm in (
            sparsity.MagnitudePruning,
            sparsity.RigL,
            sparsity.GlobalMagnitudePruning,
        ):
            where = (
                {"sparsity": 0.5}
                if algorithm is sparsity.GlobalMagnitudePruning
                else {"sparsity_distribution_fn": helpers.half}
            )
            step, params, state = _training_step(algorithm(scheduler=_SCHEDULE, **where))
            params, state = jax.jit(step)(params, state, jnp.ones((4, _SHAPE[0])))
            assert int(state.masks["w"].sum()) == math.prod(_SHAPE) // 2
            assert not np.any(np.asarray(params["w"])[np.asarray(state.masks["w"]) == 0])


@pytest.mark.slow
@pytest.mark.parametrize("name", sparsity.all_algorithm_names())
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_arrays_without_entries_train_like_others(name, packed):
    config = {"algorithm": name, "sparsity": 0.5, "use_packed_masks": packed}
    updater = sparsity.create_updater_from_config(
        config | {"scheduler": sparsity.PeriodicSchedule(2)}
    )
    shapes = [(0, 4), (4, 0), (2, 0, 3), (4, 4)]
    params = {str(shape): jnp.arange(1.0, 1 + math.prod(shape)).reshape(shape) for shape in shapes}
    tx = updater.wrap_optax(optax.adam(0.1))
    state = tx.init(params)
    update = tx.update if packed else jax.jit(tx.update)
    updates, state = update(params, state, params)
    params = optax.apply_updates(params, updates)
    assert {name: str(leaf.shape) for name, leaf in params.items()} == {s: s for s in params}
    if helpers.prunes(name) and not helpers.is_straight_through(name):
        assert jnp.count_nonzero(state.masks["(4, 4)"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [bool, jnp.int32, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("regrows", [False, True])
def test_masks_from_a_hook_may_have_any_dtype(dtype, regrows):
    class Positive(sparsity.BaseUpdater):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return params

        def create_masks(self, scores, sparsities):
            return jax.tree.map(lambda score: (score > 0).astype(dtype), scores)

    Positive.regrows = regrows
    updater = Positive(
        sparsity_distribution_fn=helpers.half,
        scheduler=sparsity.OneShotSchedule(0),
    )
    tx = updater.wrap_optax(optax.adam(0.1))
    params = {"w": jnp.array([[1.0, -1.0, 2.0]])}
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert state.masks["w"].dtype == jnp.uint8
    np.testing.assert_array_equal(state.masks["w"], [[1, 0, 1]])


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_hook_that_masks_a_dense_leaf_is_told_which_one(jit):
    class Positive(sparsity.BaseUpdater):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return params

        def create_masks(self, scores, sparsities):
            return jax.tree.map(lambda score: score > 0, scores)

    updater = Positive(
        sparsity_distribution_fn=helpers.half,
        scheduler=sparsity.OneShotSchedule(0),
    )
    tx = updater.wrap_optax(optax.sgd(0.1))
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"'b' differ.*target_sparsities"):
        (jax.jit(tx.update) if jit else tx.update)(params, state, params)
