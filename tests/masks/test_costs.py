"""One threshold for leaves whose weights cost differently: what numpy keeps, one by one."""

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.masks.budgets import within_budget


def keep(scores, costs, kept):
    """Masks that cost no more than so many weights of each leaf."""
    arrays = [jnp.asarray(x) for x in scores]
    limit = sum(np.multiply(np.float32(costs), kept))
    return jax.jit(
        lambda: within_budget(arrays, costs, lambda n: jnp.dot(n, jnp.float32(costs)) <= limit)
    )()


def test_the_best_scores_per_cost_are_kept_while_the_budget_lasts():
    rng = np.random.default_rng(0)
    scores = [rng.random((6, 5), np.float32), rng.random(40, np.float32)]
    costs, kept = [9.0, 1.0], [10, 20]
    masks = keep(scores, costs, kept)
    each = np.concatenate(
        [np.full(x.size, c, np.float32) for x, c in zip(scores, costs, strict=True)]
    )
    values = np.concatenate([x.ravel() for x in scores]) / each
    order = np.argsort(-values)
    affordable = np.cumsum(each[order]) <= 10 * 9 + 20
    expected = np.zeros(values.size, np.uint8)
    expected[order[affordable]] = 1
    np.testing.assert_array_equal(np.concatenate([np.ravel(mask) for mask in masks]), expected)


def test_of_weights_that_tie_at_the_threshold_the_first_are_kept():
    ones = np.ones(8, np.float32)
    (mask,) = keep([np.concatenate([2 * ones, ones]).reshape(4, 4)], [1.0], [11])
    assert mask.ravel().tolist() == [1] * 11 + [0] * 5
    first, second = keep([ones, 3 * ones], [1.0, 3.0], [2, 2])
    assert first.tolist() == second.tolist() == [1, 1] + [0] * 6


def test_a_budget_for_all_weights_keeps_all():
    rng = np.random.default_rng(1)
    masks = keep([rng.random(7), rng.random((3, 3))], [0.1, 0.7], [7, 9])
    assert all(np.all(mask == 1) for mask in masks)


def test_what_costs_nothing_stays_and_nan_goes_first():
    free = np.full(3, 1e-3, np.float32)
    masks = keep([free, np.array([1, np.nan, 2, 3], np.float32)], [0.0, 2.0], [3, 3])
    assert masks[0].tolist() == [1, 1, 1]
    assert masks[1].tolist()[1] == 0
