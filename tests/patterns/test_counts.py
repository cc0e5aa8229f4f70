"""Counts that a pattern gives without scores are those of masks of random scores."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.patterns import Block, Channel, FanIn, NByM, SparsityType, Unstructured
from sparsity.patterns.base import entry_counter

# Patterns, shapes, batch axes; edges of blocks and of groups of outputs that are smaller.
CASES = [
    (Unstructured(), (3, 7), 0),
    (Unstructured(), (2, 3, 7), 1),
    (NByM(1, 4), (3, 8), 0),
    (NByM(3, 7), (3, 14), 0),  # 1 - 3 / 7 lies below 4 / 7 as a float
    (NByM(2, 3, axis=0), (2, 6, 5), 1),
    (Channel(), (2, 5, 7), 1),
    (Channel(0), (5, 0), 0),
    (Channel(), (5, 0), 0),
    (Block((2, 3)), (4, 9), 0),
    (Block((2, 3)), (2, 5, 7), 1),
    (Block((2, 3), use_avg_pooling=False), (2, 5, 7), 0),
    (FanIn(), (2, 6, 5), 1),
    (FanIn(3), (6, 5), 0),
]


@pytest.mark.parametrize(("pattern", "shape", "batch_axes"), CASES)
def test_counts_without_scores_are_those_of_masks(pattern, shape, batch_axes):
    scores = jnp.asarray(np.random.default_rng(0).random(shape, np.float32))
    count_entries = entry_counter(pattern, shape, batch_axes)
    for target in (0.0, 0.3, 0.75, 1.0):
        mask = np.asarray(pattern.select(scores, target, batch_axes=batch_axes))
        kept = mask.sum(axis=tuple(range(batch_axes, mask.ndim)))
        count = pattern.count_kept(shape, target, batch_axes)
        if count is None:  # blocks, with smaller ones at an edge
            assert isinstance(pattern, Block)
            assert shape == (2, 5, 7)
            assert mask.sum() <= count_entries(target) <= mask.size
        else:
            assert np.all(kept == count)
            assert mask.sum() == count_entries(target)


def test_batch_axes_of_a_count_are_none_by_default():
    for pattern in (Unstructured(), NByM(2, 4), Block((2, 2)), Channel(), FanIn()):
        assert pattern.count_kept((4, 8), 0.5) == 16


@pytest.mark.parametrize(("shape", "batch_axes"), [((0, 8), 0), ((2, 0, 8), 1), ((0, 4, 8), 1)])
def test_a_parameter_without_entries_keeps_none(shape, batch_axes):
    patterns = Unstructured(), NByM(2, 4), Channel(), Block((2, 3)), FanIn()
    for pattern in patterns:
        assert [entry_counter(pattern, shape, batch_axes)(target) for target in (0, 0.5)] == [0, 0]


def test_ragged_blocks_count_as_full_ones():
    count_entries = entry_counter(Block((2, 3)), (2, 5, 7), 1)  # 9 blocks a slice, of up to 6
    assert [count_entries(target) for target in (0.0, 0.5, 0.8, 1.0)] == [70, 48, 24, 12]


def test_a_pattern_that_selects_by_itself_counts_the_entries_of_its_final_sparsity():
    class Halves(SparsityType):
        def select(self, scores, sparsity, batch_axes=0, **options):
            return Unstructured().select(scores, self.final_sparsity(sparsity), batch_axes)

        def final_sparsity(self, target):
            return round(2 * target) / 2

    count_entries = entry_counter(Halves(), (3, 5, 7), 1)
    assert [count_entries(target) for target in (0.1, 0.4, 0.9)] == [105, 53, 0]
