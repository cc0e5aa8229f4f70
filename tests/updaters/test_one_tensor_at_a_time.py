"""topk_fn, sparsity_type and batch_axes: what they are asked for each tensor."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("name", helpers.list_names(helpers.prunes, helpers.takes_types))
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


@pytest.mark.slow
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


@pytest.mark.slow
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
