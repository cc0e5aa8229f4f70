"""Hooks that are called by hand find the sites of what they are given."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import sparsity
from sparsity.algorithms.pruners import generate_random_scores

PARAMS = {"kernel": jnp.arange(1.0, 9.0).reshape(2, 4), "bias": jnp.ones(4)}
HALF = {"kernel": 0.5, "bias": None}


def test_integer_scores_make_masks_outside_of_a_step():
    updater = sparsity.RandomPruning()
    scores = {"kernel": jnp.array([[7, 1, 5, 3], [2, 8, 4, 6]], jnp.uint32), "bias": jnp.ones(4)}
    masks = updater.create_masks(scores, HALF)
    np.testing.assert_array_equal(masks["kernel"], [[1, 0, 1, 0], [0, 1, 0, 1]])
    assert masks["bias"] is None


def test_update_state_called_by_hand_resolves_types_from_the_parameters():
    def kind(path, param):
        return sparsity.NByM(1, 2) if param.dtype == jnp.float32 else sparsity.Unstructured()

    updater = sparsity.RandomPruning(
        sparsity_distribution_fn=sparsity.Uniform(0.5), sparsity_type=kind
    )
    state = updater.init_state(PARAMS)
    mask = np.asarray(updater.update_state(state, PARAMS, None).masks["kernel"])
    np.testing.assert_array_equal(mask.reshape(-1, 2).sum(axis=1), [1, 1, 1, 1])
    scores = np.asarray(generate_random_scores(PARAMS, 8)["kernel"]).reshape(-1, 2)
    np.testing.assert_array_equal(mask.reshape(-1, 2).argmax(axis=1), scores.argmax(axis=1))


def test_integer_scores_without_sites_keep_the_budget():
    # The masks of `small` cost 1 a weight, those of `large` 3: 24 weights cost 48.
    class Budget(sparsity.masks.MaskBudget):
        def __call__(self, params):
            return {"small": 0.5, "large": 0.5}

        def cost(self, path, param):
            return {"small": 1.0, "large": 3.0}[path[-1]]

    updater = sparsity.RandomPruning(scope=sparsity.Global(), sparsity_distribution_fn=Budget())
    params = {"small": jnp.ones((2, 6)), "large": jnp.ones((2, 6))}
    scores = {name: jnp.arange(12, dtype=jnp.uint32).reshape(2, 6) for name in params}
    by_hand = updater.create_masks(scores, {"small": 0.5, "large": 0.5})
    expected = updater.create_masks(
        scores, {"small": 0.5, "large": 0.5}, sites=updater.sites(params)
    )
    for name in params:
        np.testing.assert_array_equal(by_hand[name], expected[name])
    cost = int(by_hand["small"].sum()) + 3 * int(by_hand["large"].sum())
    assert cost <= 6 + 3 * 6


def test_a_distribution_with_a_field_named_cost_is_no_budget():
    @dataclasses.dataclass(frozen=True)
    class Charged:
        cost: float = 2.0
        total: float = 3.0

        def __call__(self, params):
            return jax.tree.map(lambda _: 0.5, params)

    updater = sparsity.MagnitudePruning(sparsity_distribution_fn=Charged())
    assert updater.instant_sparsify(PARAMS)[1]["kernel"].sum() == PARAMS["kernel"].size // 2
