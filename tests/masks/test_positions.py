"""Positions of kept entries, against numpy."""

import jax
import numpy as np
import pytest

from sparsity.masks.slice_layout import kept_positions, scatter
from tests.helpers import list_scatters


@pytest.mark.slow
def test_kept_positions_are_those_of_numpy_under_vmap() -> None:
    masks = (np.random.default_rng(0).random((3, 2500)) < 0.3).astype(np.uint8)
    k = int(masks.sum(axis=1).max())
    positions = jax.vmap(lambda mask: kept_positions(mask, k))(masks)
    for mask, row in zip(masks, np.asarray(positions), strict=True):
        kept = np.flatnonzero(mask)
        np.testing.assert_array_equal(row[: len(kept)], kept)
        np.testing.assert_array_equal(row[len(kept) :], 2500 + np.arange(k - len(kept)))


def test_unused_slots_of_a_slice_write_nothing_in_the_next_slice() -> None:
    """XLA on GPUs with deterministic operations needs the promise that no position comes twice."""
    mask = np.zeros((3, 80), np.uint8)
    mask[[0, 1, 1, 1], [5, 0, 33, 79]] = 1
    locate = jax.vmap(lambda row: kept_positions(row, 3))
    np.testing.assert_array_equal(locate(mask), [[5, 80, 81], [0, 33, 79], [80, 81, 82]])
    spread = jax.vmap(lambda positions: scatter(80, positions, np.uint8(1)))
    np.testing.assert_array_equal(spread(locate(mask)), mask)
    padded = np.array([[5, 80, 80], [0, 33, 79], [80, 80, 80]], np.uint16)
    np.testing.assert_array_equal(spread(padded), mask)
    for fn, rows, promises in ((locate, mask, []), (spread, padded, [True])):
        assert [x.params["unique_indices"] for x in list_scatters(fn, rows)] == promises
