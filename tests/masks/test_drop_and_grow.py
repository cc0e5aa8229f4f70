"""Dropping the lowest and growing the highest, of every type."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp

from sparsity.sparsity_types import Block, Channel, NByM, Unstructured
from tests.masks.mask_oracles import (
    by_slice,
    draw,
    expected_drop_and_grow,
    expected_slice,
    unit_of_entry,
)

INF = float("inf")


MOVES = [
    ((40,), Unstructured(), 0),
    ((2, 3, 3), Unstructured(), 1),
    ((7, 7), Block((3, 3)), 0),
    ((4, 6), Channel(), 0),
    ((2, 6, 5), Channel(0), 1),
    ((3, 8), NByM(2, 4), 0),
    ((8, 3), NByM(3, 8, axis=0), 0),
    ((2, 3, 8), NByM(1, 4), 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kind", "batch_axes"), MOVES, ids=str)
def test_the_lowest_are_dropped_and_the_highest_of_all_others_grow(shape, kind, batch_axes):
    drop, grow = np.abs(draw(shape, 1)), np.abs(draw(shape, 2))
    mask = by_slice(expected_slice, batch_axes, [draw(shape, 3)], 0.5, kind)
    for fraction in (0.0, 0.3, 1.0):
        moved = kind.move(mask, drop, grow, fraction, batch_axes=batch_axes)
        expected = by_slice(expected_drop_and_grow, batch_axes, [mask, drop, grow], fraction, kind)
        assert moved.dtype == jnp.uint8
        np.testing.assert_array_equal(moved, expected)
        # Some blocks at a ragged edge have fewer entries than others: count units instead.
        units = [
            len(np.unique(unit_of_entry(m.shape, kind)[m > 0]))
            for array in (np.asarray(moved), mask)
            for m in array.reshape(-1, *shape[batch_axes:])
        ]
        assert units[: len(units) // 2] == units[len(units) // 2 :]


@pytest.mark.slow
def test_a_move_worked_by_hand():
    mask = np.array([1, 1, 1, 1, 0, 0, 0, 0], np.uint8)
    drop = np.array([4, 1, 3, 2, 9, 9, 9, 9], np.float32)
    grow = np.array([9, 0, 9, 5, 1, 8, 2, 0], np.float32)
    # Half of four: the weights 1 and 3 go. Of all but 0 and 2, the best to grow are 5 and 3: the
    # dropped weight 3 comes back.
    moved = Unstructured().move(mask, drop, grow, 0.5)
    np.testing.assert_array_equal(moved, [1, 0, 1, 1, 0, 1, 0, 0])


def test_kept_weights_stay_however_large_the_scores_for_growing():
    mask = np.array([1, 1, 0, 0, 0, 0, 0, 0], np.uint8)
    drop = np.array([1e30, 1e-30, 0, 0, 0, 0, 0, 0], np.float32)
    grow = np.array([0, 0, 3e38, INF, 1, 1, 1, 1], np.float32)
    moved = Unstructured().move(mask, drop, grow, 0.5)
    np.testing.assert_array_equal(moved, [1, 0, 0, 1, 0, 0, 0, 0])


def test_all_equal_scores_drop_the_last_and_grow_the_first():
    mask = np.array([0, 0, 1, 1, 1, 1, 0, 0], np.uint8)
    same = np.zeros(8, np.float32)
    moved = Unstructured().move(mask, same, same, 0.5)
    np.testing.assert_array_equal(moved, [1, 1, 1, 1, 0, 0, 0, 0])


def test_a_group_of_n_by_m_grows_as_many_as_it_lost():
    mask = np.array([1, 1, 0, 0, 1, 1, 0, 0], np.uint8)
    drop = np.array([1, 2, 0, 0, 8, 9, 0, 0], np.float32)
    grow = np.array([0, 0, 1, 2, 9, 9, 9, 9], np.float32)
    # Both weights of the first group are dropped, none of the second.
    moved = NByM(2, 4).move(mask, drop, grow, 0.5)
    np.testing.assert_array_equal(moved, [0, 0, 1, 1, 1, 1, 0, 0])


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", [Unstructured(), NByM(2, 4)], ids=repr)
def test_a_mask_of_ones_stays(kind, fraction):
    ones = np.ones(8, np.uint8)
    moved = kind.move(ones, draw(8, 1), draw(8, 2), fraction)
    np.testing.assert_array_equal(moved, ones)


def test_a_mask_of_zeros_stays():
    zeros = np.zeros(8, np.uint8)
    moved = Unstructured().move(zeros, draw(8, 1), draw(8, 2), 0.5)
    np.testing.assert_array_equal(moved, zeros)


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    mask=hnp.arrays(np.uint8, 40, elements=st.integers(0, 1)),
    seed=st.integers(0, 1000),
    fraction=st.floats(0, 1, width=32),
)
def test_a_traced_move_agrees_with_the_oracle(mask, seed, fraction):
    rng = np.random.default_rng(seed)
    drop, grow = (rng.integers(0, 6, 40).astype(np.float32) for _ in range(2))
    moved = TRACED_MOVE(mask, drop, grow, fraction)
    expected = expected_drop_and_grow(mask, drop, grow, fraction, Unstructured())
    np.testing.assert_array_equal(moved, expected)
    assert moved.sum() == mask.sum()


TRACED_MOVE = jax.jit(Unstructured().move)


def test_scores_for_growing_may_be_hashes():
    mask = np.array([1, 1, 0, 0, 0, 0, 0, 0], np.uint8)
    drop = np.array([1, 2, 0, 0, 0, 0, 0, 0], np.float32)
    grow = np.array([0, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 5, 2**30], np.uint32)
    moved = Unstructured().move(mask, drop, grow, 0.5)
    np.testing.assert_array_equal(moved, [0, 1, 0, 0, 0, 1, 0, 0])
