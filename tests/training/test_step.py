"""The mechanics of one step, each on its own, and what a compiled step must not contain."""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity.training import step as step_lib
from sparsity.training.state import SparseState
from tests import helpers

# call_hook


def test_a_hook_gets_only_the_extra_arguments_that_it_names():
    def hook(params, *, value):
        return params, value

    assert step_lib.call_hook(hook, 1, extra={"value": 2, "other": 3}) == (1, 2)


def test_a_hook_that_takes_all_keywords_gets_all_extra_arguments():
    def hook(params, **extra):
        return params, extra

    assert step_lib.call_hook(hook, 1, extra={"value": 2, "other": 3}) == (
        1,
        {"value": 2, "other": 3},
    )


def test_a_hook_that_names_no_extra_argument_gets_none():
    assert step_lib.call_hook(
        lambda params, grads: (params, grads), 1, grads=5, extra={"a": 2}
    ) == (
        1,
        5,
    )


# land_on_zeros


@pytest.mark.parametrize(
    ("update_dtype", "param_dtype"),
    [
        (jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.float16),
        (jnp.bfloat16, jnp.float32),
        (jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.float16),
        (jnp.complex64, jnp.complex64),
    ],
)
def test_pruned_weights_land_on_positive_zero_in_every_dtype(update_dtype, param_dtype):
    # 0.1 and 1/3 round in every dtype; a bfloat16 -p would miss a float32 p.
    params = {"w": jnp.array([0.1, -1 / 3, 1e4, -0.0], param_dtype)}
    steps = {"w": jnp.array([0.3, 0.7, 0.2, 0.1], update_dtype)}
    masks = {"w": jnp.array([0, 0, 0, 0], jnp.uint8)}
    landed = step_lib.land_on_zeros(steps, params, masks)
    assert landed["w"].dtype == jnp.promote_types(update_dtype, param_dtype)
    result = optax.apply_updates(params, landed)
    assert result["w"].dtype == param_dtype
    values = np.asarray(result["w"].astype(jnp.complex64)).view(np.float32)
    assert np.all(helpers.is_positive_zero(values))


def test_updates_of_kept_weights_and_dense_leaves_pass_unchanged():
    steps = {"w": jnp.array([0.3, 0.7]), "b": jnp.array([0.25])}
    params = {"w": jnp.array([1.0, 2.0]), "b": jnp.array([5.0])}
    masks = {"w": jnp.array([1, 0], jnp.uint8), "b": None}
    landed = step_lib.land_on_zeros(steps, params, masks)
    np.testing.assert_array_equal(landed["w"], np.array([0.3, -2.0], np.float32))
    assert landed["b"] is steps["b"]


def test_a_nan_update_of_a_pruned_weight_does_not_pass():
    steps = {"w": jnp.array([np.nan, np.inf, np.nan])}
    params = {"w": jnp.array([1.0, 2.0, 4.0])}
    landed = step_lib.land_on_zeros(steps, params, {"w": jnp.array([0, 0, 1], jnp.uint8)})
    np.testing.assert_array_equal(landed["w"], [-1.0, -2.0, np.nan])


def test_packed_masks_land_as_plain_ones_do():
    params = {"w": jnp.arange(1.0, 11.0)}
    steps = {"w": jnp.ones(10)}
    mask = np.array([1, 0, 1, 1, 0, 0, 1, 0, 1, 0], np.uint8)
    plain = step_lib.land_on_zeros(steps, params, {"w": jnp.array(mask)})
    packed = step_lib.land_on_zeros(steps, params, {"w": jnp.array(np.packbits(mask))})
    np.testing.assert_array_equal(plain["w"], packed["w"])
    np.testing.assert_array_equal(plain["w"], np.where(mask, 1, -np.arange(1, 11)))


def test_a_mask_whose_update_is_missing_is_named():
    with pytest.raises(ValueError, match=r"updates have no leaf at 'layer/w'"):
        step_lib.land_on_zeros(
            {"b": jnp.ones(2)},
            {"layer": {"w": jnp.ones(2)}, "b": jnp.ones(2)},
            {"layer": {"w": jnp.ones(2, jnp.uint8)}, "b": None},
        )


# restart_regrown and start_from_zero


def test_grown_weights_take_the_fresh_state_and_others_keep_theirs():
    old = SparseState(
        masks={"w": jnp.array([1, 1, 0, 0], jnp.uint8)},
        inner_state={"trace": {"w": jnp.array([1.0, 2.0, 3.0, 4.0])}, "count": jnp.int32(7)},
    )
    new = old._replace(masks={"w": jnp.array([1, 0, 0, 1], jnp.uint8)})
    fresh = {"trace": {"w": jnp.full(4, 0.5)}, "count": jnp.int32(0)}
    result, grown = step_lib.restart_regrown(old, new, fresh)
    # Only the last weight is new: old mask 0, new mask 1.
    np.testing.assert_array_equal(result.inner_state["trace"]["w"], [1.0, 2.0, 3.0, 0.5])
    assert int(result.inner_state["count"]) == 7
    np.testing.assert_array_equal(np.unpackbits(np.asarray(grown["w"]))[:4], [0, 0, 0, 1])
    np.testing.assert_array_equal(np.unpackbits(np.asarray(result.masks["w"]))[:4], [1, 0, 0, 1])


def test_updates_of_grown_weights_cancel_the_present_value():
    steps = {"w": jnp.array([0.5, 0.5]), "b": jnp.array([1.0])}
    params = {"w": jnp.array([2.0, 4.0]), "b": jnp.array([3.0])}
    grown = {"w": jnp.array([0b01000000], jnp.uint8), "b": None}
    result = step_lib.start_from_zero(steps, params, grown)
    np.testing.assert_array_equal(result["w"], [0.5, -3.5])
    assert result["b"] is steps["b"]


# update_unless


class _Pair(NamedTuple):
    first: jax.Array
    second: jax.Array


def _transformation(update):
    """A stateful update: the state is a `_Pair`, initially (1, 2) for every weight."""

    def init(params):
        return jax.tree.map(lambda p: _Pair(jnp.full_like(p, 1), jnp.full_like(p, 2)), params)

    return optax.GradientTransformation(init, update)


def _of_pairs(fn):
    def update(updates, state, params=None):
        out = jax.tree.map(fn, updates, state, params, is_leaf=lambda node: isinstance(node, _Pair))
        is_out = lambda node: isinstance(node, tuple) and not isinstance(node, _Pair)  # noqa: E731
        steps = jax.tree.map(lambda o: o[0], out, is_leaf=is_out)
        return steps, jax.tree.map(lambda o: o[1], out, is_leaf=is_out)

    return _transformation(update)


# Updates whose new state is not simply computed from the old one.
_AWKWARD = {
    "both leaves get one array": _of_pairs(lambda u, s, p: (-u, _Pair(u, u))),
    "both leaves get one result": _of_pairs(lambda u, s, p: (-u, _Pair(u * 2, u * 2))),
    "one result twice": _of_pairs(lambda u, s, p: (lambda r: (r, _Pair(r, r)))(u * s.first)),
    "a shift register": _of_pairs(lambda u, s, p: (-u * s.second, _Pair(u, s.first))),
    "a copy of the other leaf": _of_pairs(lambda u, s, p: (-u, _Pair(s.first, s.first))),
    "swapped leaves": _of_pairs(lambda u, s, p: (u * s.first, _Pair(s.second, s.first))),
    "the parameters": _of_pairs(lambda u, s, p: (u - p, _Pair(p, p))),
    "the updates, also returned": _of_pairs(lambda u, s, p: (u, _Pair(u, s.first))),
    "constants": _of_pairs(lambda u, s, p: (u, _Pair(jnp.zeros_like(u), jnp.full_like(u, 3)))),
    "the state as the update": _of_pairs(lambda u, s, p: (s.first, _Pair(s.first + u, s.second))),
    "nothing changes": _of_pairs(lambda u, s, p: (s.first * u, s)),
    "read again after it is set": _of_pairs(
        lambda u, s, p: (lambda m: (m * 3, _Pair(m, m + s.second)))(s.first + u)
    ),
}


@pytest.mark.parametrize("skip", [False, True], ids=["go on", "skip"])
@pytest.mark.parametrize("name", _AWKWARD)
def test_a_skipped_update_changes_nothing_whatever_the_state_is_made_of(name, skip):
    tx = _AWKWARD[name]
    params = {"a": jnp.array([5.0, 6.0]), "b": jnp.array([7.0])}
    grads = {"a": jnp.array([0.5, -0.25]), "b": jnp.array([4.0])}
    state = tx.init(params)
    steps, new_state = jax.jit(functools.partial(step_lib.update_unless, update=tx.update))(
        jnp.bool_(skip), updates=grads, state=state, params=params
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
        return (steps, new_state), step_lib.update_unless(skip, update, grads, state, params)

    state = tx.init(params)
    for skip in skips:
        expected, found = both(skip, params, state)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for (path, want), got in zip(
            jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found), strict=True
        ):
            assert got.dtype == want.dtype, path
            if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
                got, want = jax.random.key_data(got), jax.random.key_data(want)
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6, err_msg=str(path))
        steps, state = found
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
    return step_lib.update_unless(skip, update, grads, state, params)


# check_resettable


def test_flatten_and_lookahead_inside_a_regrowing_updater_are_refused_by_name():
    params = {"w": jnp.ones((2, 4)), "b": jnp.ones(4)}
    flat = optax.flatten(optax.adam(0.1))
    with pytest.raises(ValueError, match=r"cannot wrap optax\.flatten.*around the wrapped"):
        step_lib.check_resettable(params, flat.init(params))
    ahead = optax.lookahead(optax.adam(0.1), 5, 0.5)
    both = optax.LookaheadParams(params, params)
    with pytest.raises(ValueError, match=r"cannot wrap optax\.lookahead"):
        step_lib.check_resettable(params, ahead.init(both))


@pytest.mark.parametrize(
    "params",
    [{"w": jnp.ones(4)}, {"w": jnp.ones((2, 4)), "b": jnp.ones(4)}, jnp.ones((2, 3)), {}],
    ids=["one vector", "matrix and bias", "bare array", "no leaf"],
)
def test_ordinary_states_are_resettable(params):
    for tx in (optax.sgd(0.1), optax.adam(0.1), optax.adafactor(0.1)):
        step_lib.check_resettable(params, tx.init(params))


# What a compiled step contains.

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
    found, seen, todo = [], set(), [entry]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in bodies[name]:
            called = re.findall(r"(?:calls|to_apply|body|condition)=%([\w.\-]+)", line)
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            if branches:
                branches = re.findall(r"%([\w.\-]+)", branches[1])
                # Of the update of masks (the conditional in the entry), only the branch without.
                called += branches[:1] if name == entry else branches
            todo += called
            copied = re.search(r"= \(?\w+\[([\d,]*)\]\S* copy(?:-start)?\(", line)
            if copied and math.prod(map(int, filter(None, copied[1].split(",")))) >= least:
                found.append(line.strip())
    return found


def _compiled(updater, donate):
    step, params, state = _training_step(updater)
    step = jax.jit(step, donate_argnums=(0, 1) if donate else ())
    return step.lower(params, state, jnp.ones((4, _SHAPE[0]))).compile().as_text()


_SCHEDULE = sparsity.PeriodicSchedule(3)


@pytest.mark.parametrize(
    ("algorithm", "skip", "packed"),
    [
        (sparsity.MagnitudePruning, False, False),
        (sparsity.MagnitudePruning, True, False),
        (sparsity.MagnitudePruning, False, True),
        (sparsity.RigL, False, False),
        (sparsity.RigL, True, False),
        (sparsity.RigL, True, True),
        (sparsity.SET, True, False),
    ],
)
def test_a_donated_step_without_a_mask_update_copies_no_mask_and_no_moment(algorithm, skip, packed):
    updater = algorithm(
        sparsity_distribution_fn=helpers.half,
        scheduler=_SCHEDULE,
        skip_gradients=skip,
        use_packed_masks=packed,
    )
    text = _compiled(updater, donate=True)
    bodies, entry = _computations(text)
    assert sum(" conditional(" in line for line in bodies[entry]) == 1
    # An eighth of the weights: a packed mask counts, too.
    assert _large_copies(text, least=math.prod(_SHAPE) // 8) == []


def test_the_search_for_copies_finds_those_of_a_step_that_is_not_donated():
    updater = sparsity.RigL(sparsity_distribution_fn=helpers.half, scheduler=_SCHEDULE)
    assert _large_copies(_compiled(updater, donate=False), least=math.prod(_SHAPE) // 8)


def test_without_skip_gradients_the_inner_update_is_in_no_conditional():
    updater = sparsity.RigL(
        sparsity_distribution_fn=helpers.half, scheduler=_SCHEDULE, skip_gradients=False
    )
    sine = optax.stateless(lambda updates, params: jax.tree.map(jnp.sin, updates))
    step, params, state = _training_step(updater, sine)
    jaxpr = jax.make_jaxpr(step)(params, state, jnp.ones((4, _SHAPE[0]))).jaxpr
    top = [equation.primitive.name for equation in jaxpr.eqns]
    assert top.count("cond") == 1
    assert top.count("sin") == 2  # both leaves
    assert len(re.findall("= sin ", str(jaxpr))) == 2


def test_without_a_schedule_the_step_has_no_conditional_at_all():
    updater = sparsity.StaticRandomSparse(sparsity_distribution_fn=helpers.half)
    step, params, state = _training_step(updater)
    assert "cond" not in str(jax.make_jaxpr(step)(params, state, jnp.ones((4, _SHAPE[0]))))


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


def test_a_training_step_leaks_no_tracer():
    with jax.checking_leaks():
        for algorithm in (sparsity.RigL, sparsity.SteMagnitudePruning):
            step, params, state = _training_step(
                algorithm(sparsity_distribution_fn=helpers.half, scheduler=_SCHEDULE)
            )
            jax.jit(step)(params, state, jnp.ones((4, _SHAPE[0])))


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


@pytest.mark.parametrize("name", sparsity.all_algorithm_names())
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_arrays_without_entries_train_like_others(name, packed):
    config = {"algorithm": name, "sparsity": 0.5, "use_packed_masks": packed}
    updater = sparsity.create_updater_from_config(
        config | {"scheduler": sparsity.PeriodicSchedule(1)}
    )
    shapes = [(0, 4), (4, 0), (2, 0, 3), (4, 4)]
    params = {str(shape): jnp.arange(1.0, 1 + math.prod(shape)).reshape(shape) for shape in shapes}
    tx = updater.wrap_optax(optax.adam(0.1))
    state = tx.init(params)
    updates, state = jax.jit(tx.update)(params, state, params)
    params = optax.apply_updates(params, updates)
    assert {name: str(leaf.shape) for name, leaf in params.items()} == {s: s for s in params}
    if name not in ("no_prune", "magnitude_ste", "random_ste"):
        assert jnp.count_nonzero(state.masks["(4, 4)"]) > 0


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
    with pytest.raises(ValueError, match=r"\['b'\].*target_sparsities"):
        (jax.jit(tx.update) if jit else tx.update)(params, state, params)
