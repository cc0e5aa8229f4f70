"""Global pruning: one threshold for all layers, exact in total."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from tests import helpers

_PARAMS = {
    "a": jnp.array([[1.0, -8.0], [3.0, 6.0]]),
    "b": jnp.array([[0.5, 2.0, -4.0], [7.0, 0.1, -5.0]]),
    "bias": jnp.array([100.0, 200.0]),
}


@pytest.mark.slow
def test_all_layers_share_one_threshold_and_keep_exactly_the_target_in_total():
    # 10 weights in matrices; 0.6 keeps the 4 largest of all: 8, 7, 6, 5.
    updater = sparsity.GlobalMagnitudePruning(sparsity=0.6)
    pruned, masks = updater.instant_sparsify(_PARAMS)
    np.testing.assert_array_equal(masks["a"], [[0, 1], [0, 1]])
    np.testing.assert_array_equal(masks["b"], [[0, 0, 0], [1, 0, 1]])
    assert masks["bias"] is None
    np.testing.assert_array_equal(pruned["b"], [[0, 0, 0], [7, 0, -5]])
    np.testing.assert_array_equal(pruned["bias"], [100, 200])


def test_magnitudes_are_divided_by_the_norm_of_their_layer_unless_asked_not_to():
    params = {
        "large": jnp.array([[100.0, 200.0, 300.0, 400.0]]),
        "small": jnp.array([[1.0, 2.0, 3.0, 4.0]]),
    }
    kept = {True: ([[0, 0, 1, 1]], [[0, 0, 1, 1]]), False: ([[1, 1, 1, 1]], [[0, 0, 0, 0]])}
    for divides, (large, small) in kept.items():
        updater = sparsity.GlobalMagnitudePruning(sparsity=0.5, use_normalization=divides)
        masks = updater.instant_sparsify(params)[1]
        assert (masks["large"].tolist(), masks["small"].tolist()) == (large, small)


@pytest.mark.slow
def test_a_layer_of_small_weights_may_vanish_though_every_layer_is_counted():
    updater = sparsity.GlobalMagnitudePruning(sparsity=0.5)
    params = {"large": jnp.full((2, 2), 10.0), "small": jnp.full((2, 2), 0.1)}
    masks = updater.instant_sparsify(params)[1]
    assert int(masks["large"].sum()) == 4
    assert int(masks["small"].sum()) == 0


@pytest.mark.slow
def test_ties_across_layers_are_kept_in_tree_order():
    updater = sparsity.GlobalMagnitudePruning(sparsity=0.5)
    masks = updater.instant_sparsify([jnp.ones((2, 3)), jnp.ones((3, 2)), jnp.ones((2, 4))])[1]
    np.testing.assert_array_equal(masks[0], np.ones((2, 3)))
    np.testing.assert_array_equal(masks[1], [[1, 1], [1, 1], [0, 0]])
    np.testing.assert_array_equal(masks[2], np.zeros((2, 4)))


@pytest.mark.slow
def test_saliency_ranks_products_with_gradients_across_layers():
    updater = sparsity.GlobalSaliencyPruning(sparsity=0.5)
    params = {"a": jnp.array([[1.0, 2.0]]), "b": jnp.array([[3.0, 4.0]])}
    grads = {"a": jnp.array([[9.0, -1.0]]), "b": jnp.array([[-2.0, 0.1]])}
    masks = updater.instant_sparsify(params, grads)[1]  # products 9, 2 and 6, 0.4
    np.testing.assert_array_equal(masks["a"], [[1, 0]])
    np.testing.assert_array_equal(masks["b"], [[1, 0]])
    with pytest.raises(ValueError, match="GlobalSaliencyPruning scores weights by their gradients"):
        updater.instant_sparsify(params)


def test_normalized_scores_give_each_layer_its_share():
    # Norms 5 and 0.05: normalized 0.6, 0.8 in both.
    params = {"a": jnp.array([[3.0, 4.0]]), "b": jnp.array([[0.03, 0.04]])}
    plain = sparsity.GlobalMagnitudePruning(sparsity=0.5, use_normalization=False)
    plain = plain.instant_sparsify(params)[1]
    np.testing.assert_array_equal(np.concatenate([plain["a"], plain["b"]]), [[1, 1], [0, 0]])
    equal = sparsity.GlobalMagnitudePruning(sparsity=0.5)
    masks = equal.instant_sparsify(params)[1]
    np.testing.assert_array_equal(np.concatenate([masks["a"], masks["b"]]), [[0, 1], [0, 1]])


@pytest.mark.slow
def test_many_weights_are_ranked_in_a_step_that_is_not_compiled():
    updater = sparsity.GlobalMagnitudePruning(
        sparsity=0.5, scheduler=sparsity.OneShotSchedule(0), use_normalization=True
    )
    params = {"a": jnp.arange(1.0, 3001).reshape(60, 50)}  # the search sorts up to 2048 scores
    tx = updater.wrap_optax(optax.sgd(0.1))
    masks = tx.update(params, tx.init(params), params)[1].masks
    np.testing.assert_array_equal(np.ravel(masks["a"]), np.arange(3000) >= 1500)


def test_a_layer_of_zeros_can_be_normalized():
    updater = sparsity.GlobalMagnitudePruning(sparsity=0.5, use_normalization=True)
    masks = updater.instant_sparsify([jnp.zeros((2, 2)), jnp.ones((2, 2))])[1]
    assert [int(mask.sum()) for mask in masks] == [0, 4]


def test_layers_of_several_dtypes_are_ranked_together():
    updater = sparsity.GlobalMagnitudePruning(sparsity=0.5)
    params = [jnp.array([[1.0, 4.0]], jnp.bfloat16), jnp.array([[2.0, 3.0]], jnp.float32)]
    masks = updater.instant_sparsify(params)[1]
    np.testing.assert_array_equal(np.concatenate(masks), [[0, 1], [0, 1]])


def test_overrides_are_pruned_alone_and_not_ranked_with_the_others():
    updater = sparsity.GlobalMagnitudePruning(
        sparsity=0.5,
        custom_sparsity_map={"own": 0.75, "dense": None, "bias": 0.5},
        use_normalization=False,
    )
    params = {
        "a": jnp.array([[1.0, 2.0]]),
        "b": jnp.array([[3.0, 4.0]]),
        "own": jnp.array([[100.0, 200.0], [300.0, 400.0]]),
        "dense": jnp.array([[1000.0, 0.0]]),
        "bias": jnp.array([1.0, 2.0]),
    }
    masks = updater.instant_sparsify(params)[1]
    np.testing.assert_array_equal(masks["own"], [[0, 0], [0, 1]])
    np.testing.assert_array_equal(masks["bias"], [0, 1])
    assert masks["dense"] is None
    np.testing.assert_array_equal(masks["a"], [[0, 0]])
    np.testing.assert_array_equal(masks["b"], [[1, 1]])


@pytest.mark.slow
def test_an_override_with_the_sparsity_of_the_others_is_still_pruned_alone():
    updater = sparsity.GlobalMagnitudePruning(sparsity=0.5, custom_sparsity_map={"own": 0.5})
    params = {"a": jnp.array([[1.0, 2.0]]), "own": jnp.array([[3.0, 4.0]])}
    masks = updater.instant_sparsify(params)[1]
    np.testing.assert_array_equal(masks["a"], [[0, 1]])
    np.testing.assert_array_equal(masks["own"], [[0, 1]])


@pytest.mark.slow
def test_a_filter_selects_the_layers_that_are_ranked():
    updater = sparsity.GlobalMagnitudePruning(
        sparsity=0.5, filter_fn=lambda path, param: path == ("b",)
    )
    masks = updater.instant_sparsify(_PARAMS)[1]
    assert masks["a"] is None
    np.testing.assert_array_equal(masks["b"], [[0, 0, 1], [1, 0, 1]])


def test_an_override_that_matches_nothing_is_an_error_at_init():
    updater = sparsity.GlobalMagnitudePruning(sparsity=0.5, custom_sparsity_map={"kernle": 0.5})
    with pytest.raises(ValueError, match="kernle"):
        updater.wrap_optax(optax.sgd(0.1)).init(_PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_a_ramp_reaches_the_exact_total_and_stays_nested(packed):
    updater = sparsity.GlobalMagnitudePruning(
        sparsity=0.6,
        scheduler=sparsity.PolynomialSchedule(2, 0, 4, power=1),
        custom_sparsity_map={"bias": 0.5},
        use_packed_masks=packed,
    )
    tx = updater.wrap_optax(optax.sgd(0.0))
    params = _PARAMS
    state = tx.init(params)
    update = jax.jit(tx.update)
    totals, separate = [], []
    for _ in range(6):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
        totals.append(int(np.count_nonzero(params["a"]) + np.count_nonzero(params["b"])))
        separate.append(int(np.count_nonzero(params["bias"])))
    # Sparsities 0, 0.3 and 0.6 of 10 weights, and 0, 0.25, 0.5 of 2 (1.5 rounds to even: 2).
    assert totals == [10, 10, 7, 7, 4, 4]
    assert separate == [2, 2, 2, 2, 1, 1]
    assert np.flatnonzero(params["b"]).tolist() == [3, 5]


def test_create_masks_takes_one_scalar_for_all_layers():
    updater = sparsity.GlobalMagnitudePruning()
    scores = {"a": jnp.array([[1.0, 4.0]]), "b": jnp.array([[3.0, 2.0]])}
    masks = updater.create_masks(scores, 0.5)
    np.testing.assert_array_equal(masks["a"], [[0, 1]])
    np.testing.assert_array_equal(masks["b"], [[1, 0]])
    bare = updater.create_masks(jnp.array([[1.0, 4.0]]), 0.5)
    np.testing.assert_array_equal(bare, [[0, 1]])


@pytest.mark.parametrize("cls", [sparsity.GlobalMagnitudePruning, sparsity.GlobalSaliencyPruning])
def test_create_masks_takes_the_keyword_of_jaxpruner(cls):
    scores = {"a": jnp.array([[1.0, 4.0]]), "b": jnp.array([[3.0, 2.0]])}
    for create_masks in (cls().create_masks, cls(sparsity=0.25).create_masks):
        masks = create_masks(scores, target_sparsity=0.5)
        assert jax.tree.map(np.ndarray.tolist, jax.device_get(masks)) == {
            "a": [[0, 1]],
            "b": [[1, 0]],
        }
        jax.tree.map(np.testing.assert_array_equal, masks, create_masks(scores, sparsities=0.5))
    with pytest.raises(TypeError, match="sparsities"):
        cls().create_masks(scores, 0.5, target_sparsity=0.5)


def test_one_scalar_is_for_the_leaves_of_the_distribution_without_a_sparsity_of_their_own():
    updater = sparsity.GlobalMagnitudePruning(custom_sparsity_map={"c": 0.75})
    scores = {name: jnp.array([[1.0, 4.0, 3.0, 2.0]]) for name in "abc"} | {"bias": jnp.ones(2)}
    masks = updater.create_masks(scores, 0.5)
    assert [int(masks[name].sum()) for name in "abc"] == [2, 2, 1]
    assert masks["bias"] is None
    layerwise = sparsity.MagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.9))
    assert layerwise.create_masks(scores, 0.25)["c"].tolist() == [[0, 1, 1, 1]]
    with pytest.raises(ValueError, match="Set sparsity_distribution_fn"):
        sparsity.MagnitudePruning().create_masks(scores, 0.5)  # all leaves stay dense


def test_a_sparsity_with_nothing_to_rank_is_an_error():
    updater = sparsity.GlobalMagnitudePruning(sparsity=0.5)
    with pytest.raises(ValueError, match="nothing to remove"):
        updater.instant_sparsify({"b": jnp.ones(3)})


@pytest.mark.slow
def test_a_subclass_changes_the_score_alone():
    @dataclasses.dataclass
    class Smallest(sparsity.GlobalMagnitudePruning):
        def calculate_scores(self, params, sparse_state=None, grads=None):
            return jax.tree.map(lambda param: -jnp.abs(param), params)

    masks = Smallest(sparsity=0.8).instant_sparsify(_PARAMS)[1]
    np.testing.assert_array_equal(masks["b"], [[1, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize("cls", [sparsity.GlobalMagnitudePruning, sparsity.GlobalSaliencyPruning])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sparsity_distribution_fn": helpers.half},
            "no sparsity_distribution_fn.*sparsity, filter_fn and custom_sparsity_map",
        ),
        ({"sparsity_type": sparsity.NByM(2, 4)}, r"Unstructured\(\).*NByM"),
        ({"sparsity_type": sparsity.Block((2, 2))}, r"Unstructured\(\).*Block"),
        ({"sparsity_type": sparsity.Channel(0)}, r"Unstructured\(\).*Channel"),
        ({"topk_fn": lambda scores, sparsity_: scores}, "topk_fn = None"),
        ({"sparsity": 1.5}, "sparsity = 1.5"),
        ({"sparsity": float("nan")}, "sparsity = nan"),
        ({"sparsity": -0.1}, "sparsity = -0.1"),
    ],
)
def test_what_global_pruning_cannot_do_is_an_error_when_it_is_made(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**options)


def test_a_class_declares_the_scope_of_its_instances():
    cls = sparsity.GlobalMagnitudePruning
    declared = {field.name: field.default for field in dataclasses.fields(cls)}
    assert declared["scope"] == cls(sparsity=0.5).scope == sparsity.Global()
