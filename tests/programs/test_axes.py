"""Axes that are bound together, by their entries."""

import numpy as np
import pytest

from sparsity.programs.axes import (
    Axis,
    Reason,
    count_entries,
    find_kept_indices,
    join_axes,
    label_entries,
    list_variables,
    unify,
)

REASON = Reason(None, "a test", "input")


def test_a_product_that_a_sum_cuts_repeats_its_faster_factor_in_both_parts():
    channels, first, second, last = Axis(2), Axis(2), Axis(4), Axis(5)
    repeated = join_axes("product", [Axis(3), channels])
    unify(join_axes("sum", [repeated, last]), join_axes("sum", [first, second, Axis(5)]), REASON)
    assert first.root is channels.root
    assert label_entries(second, channels.root).tolist() == [0, 1, 0, 1]
    assert second.root.size == 4
    assert count_entries(second, {channels.root: 1}) == 2
    assert last.pin is None


@pytest.mark.parametrize(("times", "other_times"), [(4, 2), (2, 4), (3, 2)])
def test_repetitions_of_no_entries_are_pinned(times, other_times):
    one, other = (join_axes("product", [Axis(n), Axis(0)]) for n in (times, other_times))
    unify(one, other, REASON)
    assert all(variable.pin for axis in (one, other) for variable in list_variables(axis))


def test_entries_that_stay_along_joined_axes_have_a_row_for_each_layer_that_differs():
    one, other = Axis(2), Axis(3)
    layers = np.array([[0, 2], [1, 2]])
    product, total = join_axes("product", [one, other]), join_axes("sum", [one, other])
    for kept, along_product, along_sum in (
        ({one: np.array([1])}, [3, 4, 5], [1, 2, 3, 4]),
        ({one: np.array([1]), other: np.array([0, 2])}, [3, 5], [1, 2, 4]),
        ({other: layers}, [[0, 2, 3, 5], [1, 2, 4, 5]], [[0, 1, 2, 4], [0, 1, 3, 4]]),
        ({one: np.array([1]), other: layers}, [[3, 5], [4, 5]], [[1, 2, 4], [1, 3, 4]]),
        ({one: np.array([[0], [1]]), other: layers}, [[0, 2], [4, 5]], [[0, 2, 4], [1, 3, 4]]),
    ):
        assert find_kept_indices(product, kept).tolist() == along_product
        assert find_kept_indices(total, kept).tolist() == along_sum
    assert find_kept_indices(product, {}) is None
