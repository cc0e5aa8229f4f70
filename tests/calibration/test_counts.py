"""Rows are counted exactly, also beyond what an int32 holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsity
from sparsity.calibration import Count
from tests import helpers

LARGE = [0, 1, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 3 * 2**32 + 5, 2**61]


@pytest.mark.parametrize("number", LARGE)
def test_counts_are_exact_through_jit_and_leaf_by_leaf_sums(number):
    count = Count.from_number(number)
    assert int(count) == int(jax.jit(lambda x: x)(count)) == number
    assert int(count + count) == int(jax.jit(lambda x: x + x)(count)) == 2 * number
    assert int(jax.tree.map(jnp.add, count, count)) == 2 * number
    many = jax.tree.map(lambda digits: jnp.sum(jnp.stack([digits] * 1000), axis=0), count)
    if number < 2**50:
        assert int(many) == int(many + Count.from_number(0)) == 1000 * number
    np.testing.assert_allclose(jax.jit(Count.as_float)(count), float(number), rtol=3e-7)


def test_counts_compare_and_divide_as_numbers():
    count = Count.from_number(2**31)
    assert count == 2**31
    assert count != 3
    np.testing.assert_array_equal(count, 2**31)
    np.testing.assert_array_equal(jnp.full(2, 2.0**33) / count, [4, 4])
    rows = Count.from_number(np.array([[1, 2**40]]))
    assert np.asarray(rows).tolist() == [[1, 2**40]]
    assert repr(count) == "Count(2147483648)"


def test_rows_beyond_31_bits_are_counted_in_a_loop_and_over_batches():
    # Each of 300 steps has 2**24 rows, which are never made.
    def model(w, x):
        rows = jnp.broadcast_to(x, (2**24, 2))
        step = lambda total, _: (total + jnp.sum(rows @ w), None)  # noqa: E731
        return jax.lax.scan(step, 0.0, None, length=300)[0]

    batches = [jnp.ones(2), jnp.ones(2)]
    statistic = sparsity.calibrate(model, jnp.ones((2, 1)), batches)[()]
    assert int(statistic.count) == 2 * 300 * 2**24 > 2**33
    both = jax.tree.map(jnp.add, statistic, statistic)
    assert int(both.count) == 4 * 300 * 2**24
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=helpers.half)
    mask = pruner.instant_sparsify(jnp.array([[1.0], [2.0]]), statistics={(): both})[1]
    assert mask.tolist() == [[0], [1]]


def test_layers_whose_branches_differ_have_counts_of_their_own():
    params = {"even": jnp.ones((4, 3, 3)), "odd": jnp.ones((4, 3, 3))}

    def model(params, x):
        def layer(h, inputs):
            index, even, odd = inputs
            return jax.lax.cond(index % 2 == 0, lambda: h @ even, lambda: h @ odd), None

        return jax.lax.scan(layer, x, (jnp.arange(4), params["even"], params["odd"]))[0]

    statistics = sparsity.calibrate(model, params, [jnp.ones((5, 3))])
    assert np.asarray(statistics["even",].count).tolist() == [5, 0, 5, 0]
    assert np.asarray(statistics["odd",].count).tolist() == [0, 5, 0, 5]


@pytest.mark.parametrize("count", [-1, jnp.int32(-5), 1.5, float("nan"), True, "9", [3, -1]])
def test_a_count_that_is_none_of_rows_is_refused_with_its_leaf(count):
    statistic = sparsity.Statistic(squares=jnp.ones(4), count=count, contracting=(0,), output=(1,))
    pruner = sparsity.WandaPruning(sparsity_distribution_fn=helpers.half)
    with pytest.raises(ValueError, match=r"'params' must count rows by integers >= 0, got count ="):
        pruner.instant_sparsify(jnp.ones((4, 2)), statistics={(): statistic})
