"""What a compiled run may not do: compile twice, talk to the host, leak, promote, make a NaN."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from sparsity import selection
from tests import helpers

_TYPES = {
    "unstructured": sparsity.Unstructured(),
    "N:M": sparsity.NByM(1, 4),
    "block": sparsity.Block((2, 3)),
    "channel": sparsity.Channel(-1),
    "fan_in": sparsity.FanIn(5),
}
_PARAMS = helpers.params(shape=(2, 8, 12)) | {"bias": jnp.ones((2, 12))}


def _step_fn(updater):
    # Adam's own bias correction mixes integers and floats, which strict promotion refuses.
    tx = updater.wrap_optax(optax.sgd(0.1, momentum=0.9))

    def step(params, state):
        seen = updater.pre_forward_update(params, state)
        grads = jax.tree.map(lambda w: w - 0.5, seen)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return updater.post_gradient_update(params, state), state

    return step, tx.init


def _axes(name):
    return 0 if helpers.ranks_all_layers(name) else 1


@contextlib.contextmanager
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def _cases():
    """Yields each algorithm, with packed masks and without, and with every second type.

    `test_matrix.py` trains each with all types.
    """
    for row, name in enumerate(helpers.list_names(helpers.prunes)):
        if not helpers.takes_types(name):
            yield from ((name, "unstructured", packed) for packed in (False, True))
            continue
        for column, kind in enumerate(_TYPES):
            packed = (row // 2 + (column + 1) // 2) % 2 == 1
            if column == 0:
                yield name, kind, packed
            elif (row + column) % 2:
                yield pytest.param(name, kind, packed, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "kind", "packed"), [*_cases()])
def test_steps_and_masks_need_no_implicit_promotion_and_leak_nothing(name, kind, packed):
    params = _PARAMS
    with _strict(), helpers.checking_leaks():
        updater = helpers.make_updater(
            name, sparsity_type=_TYPES[kind], batch_axes=_axes(name), use_packed_masks=packed
        )
        step, init = _step_fn(updater)
        state = jax.eval_shape(init, params)
        shapes = jax.eval_shape(step, params, state)
        assert jax.tree.structure(shapes) == jax.tree.structure((params, state))
        for new, old in zip(*map(jax.tree.leaves, (shapes, (params, state))), strict=True):
            assert (new.shape, new.dtype, new.weak_type) == (old.shape, old.dtype, False)
        if not helpers.is_sparse_training(name):
            jax.eval_shape(updater.instant_sparsify, params, params)


def test_steps_of_kept_entries_need_no_implicit_promotion():
    with _strict():
        updater = helpers.make_updater("rigl", batch_axes=1, use_compact_state=True)
        step, init = _step_fn(updater)
        state = init(_PARAMS)
        jax.eval_shape(step, _PARAMS, state)


@pytest.mark.parametrize("dtypes", [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float16)])
@pytest.mark.parametrize("name", ["rigl", "saliency", "global_magnitude", "lamp", "admm"])
def test_parameters_and_gradients_of_two_dtypes_need_no_implicit_promotion(name, dtypes):
    params, grads = (jax.tree.map(lambda x, t=t: x.astype(t), _PARAMS) for t in dtypes)
    with _strict():
        updater = helpers.make_updater(name, batch_axes=_axes(name))
        tx = updater.wrap_optax(optax.sgd(0.1))
        state = jax.eval_shape(tx.init, params)
        updates, _ = jax.eval_shape(tx.update, grads, state, params)
    assert updates["kernel"].dtype == jnp.float32


@pytest.mark.parametrize("kind", [sparsity.SET, sparsity.RigL])
def test_moves_of_compact_models_need_no_implicit_promotion(kind):
    updater = kind(sparsity_distribution_fn=helpers.half, scheduler=sparsity.PeriodicSchedule(10))
    params, x = helpers.params(shape=(8, 12)), jnp.ones((3, 8))
    graph = sparsity.trace(lambda params, x: x @ params["kernel"], params, x)
    masks = updater.wrap_optax(optax.sgd(0.1)).init(params).masks
    model = sparsity.compact(graph, params, masks)
    opt_state = optax.sgd(0.1, momentum=0.9).init(model.params)

    def loss_fn(apply, params):
        return jnp.sum(jnp.square(apply(params, x)))

    def move(model, params, opt_state):
        return model.move(updater, params, opt_state, 0, loss_fn)

    with _strict():
        moved = jax.eval_shape(move, model, model.params, opt_state)
    assert moved[1]["kernel"].shape == (48,)


@pytest.mark.parametrize("jit", [False, True])
def test_bool_masks_select_without_implicit_promotion(jit):
    scores = {"few": helpers.params(shape=(8, 12))["kernel"], "many": jnp.ones((2000, 300))}
    where = jax.tree.map(lambda x: x > 0, scores)

    def select(where):
        one = {key: selection.topk_mask(x, 9, where=where[key]) for key, x in scores.items()}
        nm = selection.nm_mask(scores["few"], 2, 4, keep=where["few"])
        kept = jax.tree.map(sparsity.apply_mask, scores, where)
        return one, selection.global_topk_mask(scores, 9, where=where), nm, kept

    select = jax.jit(select) if jit else select
    with _strict():
        result = select(where)
    chex.assert_trees_all_equal(result, select(jax.tree.map(jnp.uint8, where)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rigl", "set", "magnitude", "global_saliency", "magnitude_ste"])
def test_a_run_compiles_once_and_stays_on_the_device(name):
    updater = helpers.make_updater(name, use_packed_masks=True, batch_axes=_axes(name))
    step, init = _step_fn(updater)
    params = _PARAMS
    state = jax.jit(init)(params)
    step = jax.jit(step, donate_argnums=(0, 1))
    with jax.transfer_guard("disallow"), jax.debug_nans(True):
        for _ in range(5):
            params, state = step(params, state)
    assert step._cache_size() == 1
    assert int(state.count) == 5
    kernel = updater.pre_forward_update(params, state)["kernel"]
    assert np.count_nonzero(kernel) <= 48  # a quarter of 192


def test_masks_cost_a_byte_or_a_bit_a_weight_and_nothing_for_dense_leaves():
    half = helpers.half
    params = {"kernel": jnp.ones((8, 12)), "bias": jnp.ones(1000)}
    for packed, size in ((False, 8 * 12), (True, 8 * 2)):
        updater = sparsity.RigL(sparsity_distribution_fn=half, use_packed_masks=packed)
        state = updater.init_state(params)
        scalars = 4 + 4  # the target sparsity of the kernel, the count
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) == size + scalars
