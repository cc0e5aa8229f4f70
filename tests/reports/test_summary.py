"""Summaries of sparse networks: exact fractions, tables, plots."""

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def trained():
    """(params, optimizer state, updater) after a one-shot pruning to different targets."""
    updater = sparsity.MagnitudePruning(
        scheduler=sparsity.OneShotSchedule(0),
        sparsity_distribution_fn=helpers.uniform(0.75, custom_sparsity_map={"b/kernel": 0.5}),
        sparsity_type=lambda path, param: (
            sparsity.NByM(2, 4) if path[0] == "b" else sparsity.Unstructured()
        ),
    )
    params = {
        name: {"kernel": jnp.arange(1.0, 33.0).reshape(4, 8), "bias": jnp.zeros(8)} for name in "ab"
    }
    tx = updater.wrap_optax(optax.sgd(0.0))
    updates, state = tx.update(params, tx.init(params), params)
    return optax.apply_updates(params, updates), state, updater


def test_fractions_are_those_of_zeros():
    tree = {"a": jnp.array([1.0, 0.0, -0.0, 2.0]), "b": [jnp.zeros(3), None], "c": jnp.ones(())}
    assert sparsity.summarize_sparsity(tree) == {
        "a": 0.5,
        "b/0": 1.0,
        "b/1": None,
        "c": 0.0,
        "_total_sparsity": 5 / 8,
        "_nparams": 8,
        "_nparams_nnz": 3,
    }


def test_totals_are_all_that_is_left_on_request():
    masks = {"a": jnp.array([1, 0, 1], jnp.uint8), "b": None}
    assert list(sparsity.summarize_sparsity(masks, only_total_sparsity=True)) == [
        "_total_sparsity",
        "_nparams",
        "_nparams_nnz",
    ]
    assert sparsity.summarize_intersection(masks, masks, only_total_intersection=True) == {
        "_total_intersection": 1.0
    }


def test_an_empty_tree_has_no_zeros():
    assert sparsity.summarize_sparsity({})["_total_sparsity"] == 0
    assert sparsity.summarize_intersection({}, {}) == {"_total_intersection": 0}


def test_leaves_whose_paths_are_spelled_alike_all_count():
    tree = {"a": {"b": jnp.ones(2)}, "a/b": jnp.zeros(4)}
    total = sparsity.summarize_sparsity(tree)
    assert (total["_nparams"], total["_nparams_nnz"]) == (6, 2)
    assert sparsity.summarize_intersection(tree, tree)["_total_intersection"] == 1.0


def test_counts_of_several_leaves_do_not_overflow(monkeypatch):
    monkeypatch.setattr(jnp, "count_nonzero", lambda leaf: np.int32(2**31 - 1))
    total = sparsity.summarize_sparsity([jnp.ones(2)] * 3, only_total_sparsity=True)
    assert total["_nparams_nnz"] == 3 * (2**31 - 1)


def test_intersections_are_shares_of_the_first_masks():
    first = {"a": jnp.array([1, 1, 1, 0]), "b": jnp.zeros(2, int), "c": None}
    second = {"a": jnp.array([0, 1, 1, 1]), "b": jnp.ones(2, int), "c": None}
    assert sparsity.summarize_intersection(first, second) == {
        "a": pytest.approx(2 / 3),
        "b": 0.0,
        "c": None,
        "_total_intersection": pytest.approx(2 / 3),
    }


@pytest.mark.slow
def test_a_leaf_of_more_entries_than_int32_counts_is_counted():
    bits = {"a": jnp.full(2**28, 255, jnp.uint8)}
    assert sparsity.summarize_intersection(bits, bits)["a"] == 1


def test_numbers_are_masks_and_keys_and_text_are_no_leaves_of_intersections():
    tree = {"a": 1.0, "key": jax.random.key(0), "name": "relu", "text": np.array("relu")}
    expected = {"a": 1.0, "_total_intersection": 1.0}
    assert sparsity.summarize_intersection(tree, tree) == expected
    assert sparsity.summarize_sparsity(tree)["_nparams"] == 1


def test_bytes_and_booleans_count_entries():
    first, second = {"a": jnp.array([255, 1], jnp.uint8)}, {"a": jnp.array([True, False])}
    assert sparsity.summarize_intersection(first, second)["a"] == 0.5


def test_trees_that_differ_are_an_error_with_paths_and_shapes():
    first = {"a": jnp.ones((2, 3)), "b": jnp.ones(2)}
    second = {"a": jnp.ones((3, 2)), "b": jnp.ones(2), "c": jnp.ones(1)}
    with pytest.raises(ValueError, match=r"a \(\(2, 3\), \(3, 2\)\)"):
        sparsity.summarize_intersection(first, second)


def test_summaries_work_inside_jit():
    tree = {"a": jnp.array([1.0, 0.0]), "b": jnp.zeros(2)}
    inside = jax.jit(sparsity.summarize_sparsity)(tree)
    np.testing.assert_allclose([inside["a"], inside["_total_sparsity"]], [0.5, 0.75])
    both = jax.jit(sparsity.summarize_intersection)(tree, tree)
    np.testing.assert_allclose([both["a"], both["_total_intersection"]], [1.0, 1.0])


@pytest.mark.slow
def test_layers_are_listed_with_type_target_and_what_was_achieved(trained):
    rows = sparsity.reports.layer_summary(*trained)
    assert [row.path for row in rows] == ["a/bias", "a/kernel", "b/bias", "b/kernel"]
    assert rows[0] == sparsity.reports.LayerSummary(
        path="a/bias", shape=(8,), type="", target=None, achieved=1.0, mask_bytes=0
    )
    assert [rows[i].type for i in (1, 3)] == ["Unstructured", "NByM(n=2, m=4, axis=-1)"]
    assert [(rows[i].target, rows[i].achieved) for i in (1, 3)] == [(0.75, 0.75), (0.5, 0.5)]
    assert rows[1].mask_bytes == 32


def test_the_table_has_a_line_a_leaf_and_a_sum_of_sparse_ones(trained):
    lines = sparsity.sparsity_table(*trained).splitlines()
    cells = [line.split() for line in lines if line.strip()]
    assert cells[0] == ["path", "shape", "type", "target", "achieved", "mask", "bytes"]
    assert ["a/bias", "8", "dense", "0"] in cells
    assert ["a/kernel", "4x8", "Unstructured", "0.7500", "0.7500", "32"] in cells
    assert cells[-1] == ["sparse", "layers", "64", "0.6250", "64"]


def test_the_plot_shows_what_was_achieved_and_the_target(trained):
    ax = sparsity.reports.plot_sparsity(*trained)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a/kernel", "b/kernel"]
    assert [bar.get_width() for bar in ax.patches] == [0.75, 0.5]
    assert ax.lines[0].get_xdata() == pytest.approx([0.75, 0.5])
    assert ax.get_legend() is not None
    user_axes = matplotlib.figure.Figure().subplots()
    assert sparsity.reports.plot_sparsity(*trained, ax=user_axes) is user_axes
    matplotlib.pyplot.close("all")


def test_a_missing_package_is_an_error_that_names_the_extra(trained, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich.table", None)
    with pytest.raises(ImportError, match=r"pip install 'jax-sparsity\[summary\]'"):
        sparsity.sparsity_table(*trained)


# Which weights are in use, however an algorithm keeps its masks.

PARAMS = {"kernel": jnp.array([[3.0, -1.0, 0.5, 2.0, -4.0]]), "bias": jnp.zeros(5)}
KEPT = [[1, 0, 0, 0, 1]]  # of five weights, the two of the largest magnitude


def updated(**options):
    """Updater, parameters in use and optimizer state after a step that made masks."""
    config = {"algorithm": "magnitude", "sparsity": 0.6, "update_start_step": 0}
    updater = sparsity.create_updater_from_config(config | {"update_end_step": 0} | options)
    tx = updater.wrap_optax(optax.sgd(0.0))
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, PARAMS), tx.init(PARAMS), PARAMS)
    params = updater.post_gradient_update(optax.apply_updates(PARAMS, updates), state)
    return updater.pre_forward_update(params, state), state


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_packed_masks": True},
        {"algorithm": "magnitude_ste"},
        {"algorithm": "magnitude_ste", "store_masks": True, "use_packed_masks": True},
    ],
    ids=["stored", "packed", "made anew", "straight-through, stored"],
)
def test_active_masks_are_those_in_use_and_none_for_dense_leaves(options):
    masks = sparsity.active_masks(*updated(**options))
    assert masks["bias"] is None
    assert masks["kernel"].dtype == jnp.uint8
    np.testing.assert_array_equal(masks["kernel"], KEPT)


@pytest.mark.slow
def test_a_weight_in_the_mask_is_active_while_it_is_zero():
    params, state = updated()
    masks = sparsity.active_masks(jax.tree.map(jnp.zeros_like, params), state)
    np.testing.assert_array_equal(masks["kernel"], KEPT)


def test_a_network_without_sparsity_has_no_active_masks():
    state = sparsity.NoPruning().wrap_optax(optax.sgd(0.1)).init(PARAMS)
    assert jax.tree.leaves(sparsity.active_masks(PARAMS, state)) == []


def test_active_masks_are_the_same_under_jit():
    masks = jax.jit(sparsity.active_masks)(*updated(use_packed_masks=True))
    np.testing.assert_array_equal(masks["kernel"], KEPT)
