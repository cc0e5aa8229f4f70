"""Training of any tree by any algorithm: zeros, dense leaves, counts, packing, saving."""

import pickle

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import sparsity
from sparsity.core import trees
from tests import helpers
from tests.properties import strategies as draws

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*skips the gradients of steps"),
    pytest.mark.filterwarnings("ignore:.*has target sparsities, but all masks are ones"),
]

STEPS = 5
SHAPES = ((4, 8), (7, 4), (2, 3, 4))
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.125),
    "momentum": lambda: optax.sgd(0.125, momentum=0.5, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.1),
    "lion": lambda: optax.lion(0.01),
    "clipped": lambda: optax.chain(optax.clip(0.5), optax.rmsprop(0.1)),
}
REFUSED = "SRigL keeps a weight of every neuron at least"
EXACT = ("sgd", "momentum")  # without any rounding, which compilers do in their own ways
PATTERNS = (sparsity.Unstructured(), sparsity.NByM(1, 2), sparsity.Block((2, 2)), sparsity.FanIn())
SPARSE = [name for name in helpers.list_names(helpers.prunes) if name != "top_kast"]

algorithms = st.sampled_from(SPARSE)
optimizers = st.sampled_from([*OPTIMIZERS])
schedules = st.sampled_from(
    [
        {"update_freq": 1, "update_start_step": 0, "update_end_step": 4},
        {"update_freq": 2, "update_start_step": 1, "update_end_step": 3},
        {"update_start_step": 2, "update_end_step": 2},
    ]
)


def make(name, target, schedule, **options):
    """Returns the updater of a configuration; the pattern is left out where it does not fit."""
    if not helpers.takes_types(name):
        options.pop("sparsity_type", None)
    config = {"algorithm": name, "sparsity": target} | schedule | options
    return sparsity.create_updater_from_config(config)


@st.composite
def problems(draw):
    """Draws parameters with a masked leaf, dense, integer and missing ones, and gradients."""
    rng = np.random.default_rng(draw(draws.seeds))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))  # epsilon of adam is 0 in float16
    shape = draw(st.sampled_from(SHAPES))

    def tree(seed):
        rng = np.random.default_rng(seed)
        return {
            "layers": [{"w": draws.finite(rng, shape, dtype)}, None],
            "pair": draws.Pair(draws.finite(rng, shape[-1:], dtype), draws.finite(rng, (), dtype)),
        }

    seeds = rng.integers(2**32, size=STEPS + 1)
    return tree(seeds[0]), [tree(seed) for seed in seeds[1:]]


def run(updater, optimizer, problem, mode="jit"):
    """Returns the parameters and states after each step."""
    params, grads = problem
    tx, steps = updater.wrap_optax(OPTIMIZERS[optimizer]()), []
    try:
        state = tx.init(params)
    except ValueError as error:
        assert REFUSED in str(error)  # noqa: PT017
        hypothesis.reject()
    if mode == "scan":

        def body(carry, grads):
            updates, state = tx.update(grads, carry[1], carry[0])
            carry = optax.apply_updates(carry[0], updates), state
            return carry, carry

        stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)
        all_steps = jax.jit(lambda c, g: jax.lax.scan(body, c, g)[1])((params, state), stacked)
        return [jax.tree.map(lambda x, i=i: x[i], all_steps) for i in range(STEPS)]
    update = jax.jit(tx.update) if mode == "jit" else tx.update
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
        steps.append((params, state))
    return steps


@draws.examples(6)
@hypothesis.given(
    problems(), algorithms, optimizers, schedules, draws.sparsities, st.sampled_from(PATTERNS)
)
def test_pruned_weights_are_zero_and_dense_leaves_train_as_without_masks(
    problem, name, optimizer, schedule, target, pattern
):
    hypothesis.assume(draws.fits(pattern, problem[0]["layers"][0]["w"].shape))
    updater = make(name, target, schedule, sparsity_type=pattern, skip_gradients=False)
    params, plain = problem[0], OPTIMIZERS[optimizer]()
    plain_params, plain_state, update = params, plain.init(params), jax.jit(plain.update)
    for grad, (params, state) in zip(problem[1], run(updater, optimizer, problem), strict=True):
        updates, plain_state = update(grad, plain_state, plain_params)
        plain_params = optax.apply_updates(plain_params, updates)
        masks = trees.leaves_by_path(sparsity.get_sparse_state(state).masks)
        reference = trees.leaves_by_path(plain_params)
        for path, leaf in trees.leaves_by_path(params).items():
            if path in masks and not updater.keeps_dense_weights:
                pruned = np.asarray(leaf)[np.asarray(masks[path]) == 0]
                assert helpers.is_positive_zero(pruned).all(), trees.path_string(path)
            if leaf.ndim < 2 and leaf.dtype == np.float32 and optimizer in EXACT:
                assert draws.equal_bits(leaf, reference[path]), trees.path_string(path)


@draws.examples(3)
@hypothesis.given(problems(), algorithms, schedules, draws.sparsities)
def test_packing_changes_no_bit(problem, name, schedule, target):
    runs = [
        run(make(name, target, schedule, use_packed_masks=packed), "adam", problem)
        for packed in (False, True)
    ]
    for (params, state), (packed_params, packed_state) in zip(*runs, strict=True):
        assert draws.equal_bits(params, packed_params)
        state, packed_state = map(sparsity.get_sparse_state, (state, packed_state))
        assert draws.equal_bits(state.inner_state, packed_state.inner_state)
        assert draws.equal_bits(state.masks, sparsity.unpack_masks(packed_state.masks, params))


@pytest.mark.slow
@draws.examples(4)
@hypothesis.given(problems(), algorithms, schedules, st.sampled_from([0.5, 0.9]))
def test_masks_are_the_same_eager_jitted_and_scanned(problem, name, schedule, target):
    updater = make(name, target, schedule, skip_gradients=False)
    runs = [run(updater, "sgd", problem, mode) for mode in ("eager", "jit", "scan")]
    first = [sparsity.get_sparse_state(runs[0][0][1]).masks]
    for steps in runs[1:]:
        assert draws.equal_bits(first, [sparsity.get_sparse_state(steps[0][1]).masks])


@draws.examples(4)
@hypothesis.given(
    problems(),
    st.sampled_from(["set", "rigl"]),
    st.sampled_from([0.25, 0.5, 0.9, 1.0]),
    st.floats(0, 1, width=32),
    st.sampled_from(PATTERNS),
)
def test_regrown_weights_start_at_zero_with_fresh_moments_and_counts_stay(
    problem, name, target, drop, pattern
):
    hypothesis.assume(draws.fits(pattern, problem[0]["layers"][0]["w"].shape))
    schedule = {"update_freq": 2, "update_start_step": 0, "update_end_step": 4}
    updater = make(name, target, schedule, drop_fraction=drop, sparsity_type=pattern)
    tx = updater.wrap_optax(optax.adam(0.1))
    params, before = problem[0], tx.init(problem[0])
    for count, (after_params, state) in enumerate(run(updater, "adam", problem)):
        old, new = (np.asarray(x.masks["layers"][0]["w"]) for x in (before, state))
        units = [pattern.pool(jnp.asarray(mask, jnp.float32)) > 0 for mask in (old, new)]
        assert units[0].sum() == units[1].sum()  # of blocks at an edge, entries may differ
        grown, lost = (new > old), (new < old)
        if count % 2:
            assert not (grown | lost).any()
        weights = np.asarray(after_params["layers"][0]["w"], np.float32)
        mu = np.asarray(state.inner_state[0].mu["layers"][0]["w"], np.float32)
        nu = np.asarray(state.inner_state[0].nu["layers"][0]["w"], np.float32)
        assert not weights[grown].any()
        assert not mu[grown].any()
        assert not nu[grown].any()
        if pattern.is_elementwise:
            weights = np.abs(np.asarray(params["layers"][0]["w"], np.float32))
            active = np.sort(weights[old == 1])[::-1]
            kept = helpers.num_kept(active.size, drop)
            assert weights[lost].max(initial=0) <= active[kept - 1]
        params, before = after_params, state


def restore_by_pickle(saved, folder):
    return jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(jax.device_get(saved))))


def restore_by_orbax(saved, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "step", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "step", jax.eval_shape(lambda: saved))


@draws.examples(4)
@hypothesis.given(
    problems(),
    algorithms,
    optimizers,
    schedules,
    st.integers(0, STEPS - 1),
    st.booleans(),
    st.sampled_from([restore_by_pickle, restore_by_orbax]),
)
def test_saving_and_restoring_at_any_step_changes_nothing(
    tmp_path_factory, problem, name, optimizer, schedule, at, packed, restore
):
    updater = make(name, 0.5, schedule, use_packed_masks=packed)
    tx = updater.wrap_optax(OPTIMIZERS[optimizer]())
    steps = run(updater, optimizer, problem)
    params, state = restore(steps[at], tmp_path_factory.mktemp("run"))
    again = make(name, 0.5, schedule, use_packed_masks=packed).wrap_optax(OPTIMIZERS[optimizer]())
    assert jax.tree.structure(state) == jax.tree.structure(again.init(params))
    update = jax.jit(tx.update)
    for grad in problem[1][at + 1 :]:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    assert draws.equal_bits((params, state), steps[-1])
