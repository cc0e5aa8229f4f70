"""Patterns that are found in masks, against masks made by hand and each pattern's definition."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.cli import inspect
from sparsity.sparsity_types import parse_sparsity_type


def detect_pattern(mask):
    return inspect.find_patterns(np.asarray(mask, bool))


@functools.cache
def made(kind, shape):
    """The mask of half the entries that a type selects by random scores."""
    scores = np.random.default_rng(0).random(shape, np.float32)
    return parse_sparsity_type(kind).select(scores, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("nm_2,4,-1", (48, 64)),
        ("nm_2,4,-2", (64, 48)),
        ("nm_1,4,-2", (3, 64, 40)),
        ("nm_2,4,-4", (64, 3, 3, 8)),
        ("nm_1,2,-3", (64, 5, 5)),
        ("nm_16,32,-1", (64, 96)),
        ("nm_4,8,-2", (32, 41)),
        ("channel_-1", (40, 24)),
        ("channel_-2", (40, 24)),
        ("channel_-4", (24, 3, 3, 8)),
        ("block_4,8", (64, 64)),
        ("block_5,3", (50, 31)),  # with ragged columns
        ("block_3,3", (6, 24, 24)),
        ("block_1,6", (96,)),
        ("fanin_1,-2", (33, 40)),
        ("fanin_1,-1", (40, 33)),
        ("fanin_1,-2", (5, 33, 40)),
        ("fanin_1,-4,-3,-2", (3, 3, 8, 41)),
        ("fanin_1,-3,-2,-1", (24, 5, 3, 3)),
    ],
)
def test_the_pattern_of_a_mask_is_found(kind, shape):
    assert detect_pattern(made(kind, shape)) == [kind]


@pytest.mark.parametrize(
    ("kind", "shape", "block"),
    [
        ("fanin_16,-2", (50, 64), "block_1,16"),
        ("fanin_16,-2", (50, 70), "block_1,16"),  # with a smaller last group
        ("fanin_4,-1", (30, 33), "block_4,1"),
        ("fanin_8,-4,-3,-2", (3, 3, 8, 24), "block_1,8"),
        ("fanin_8,-3,-2", (2, 17, 24), "block_1,8"),  # heads that an output joins
        ("fanin_4,-2", (3, 33, 8), "block_1,4"),  # stacked layers
        ("fanin_4,-3", (33, 2, 8), "block_1,4"),  # heads that an input is split to
    ],
)
def test_outputs_that_share_their_inputs_are_found(kind, shape, block):
    assert detect_pattern(made(kind, shape)) == [block, kind]


def test_one_entry_more_is_no_constant_fan_in():
    mask = np.array(made("fanin_1,-2", (33, 40)))
    mask[np.flatnonzero(mask[:, 7] == 0)[0], 7] = 1
    assert detect_pattern(mask) == []


def test_a_mask_of_one_output_reads_no_constant_number_of_inputs():
    assert detect_pattern([[1], [0], [0], [1], [1], [1], [0]]) == ["channel_-2"]


@pytest.mark.parametrize("sparsity", [0.5, 0.8])
@pytest.mark.parametrize("shape", [(64, 64), (64, 33), (3, 3, 32, 32), (512,)])
def test_an_unstructured_mask_has_no_pattern(shape, sparsity):
    assert detect_pattern(np.random.default_rng(0).random(shape) > sparsity) == []


def test_rows_that_change_late_are_seen():
    mask = np.ones((96, 8), np.uint8)
    mask[48:72] = 0
    assert detect_pattern(mask) == ["channel_-2"]
    mask[:, 4:] = 1
    assert detect_pattern(mask) == ["block_24,4"]
    mask[80, :4] = 0  # from now on rows change at steps of 1
    assert detect_pattern(mask) == ["block_1,4"]


@pytest.mark.parametrize("shape", [(), (4,), (4, 8), (0, 4)])
def test_a_dense_leaf_and_one_of_zeros_have_none(shape):
    assert detect_pattern(np.ones(shape, np.uint8)) == []
    assert detect_pattern(np.zeros(shape, np.uint8)) == []


def test_a_pattern_with_some_more_zeros_still_holds():
    mask = np.array(made("nm_2,4,-1", (32, 32)))
    mask[np.nonzero(mask)[0][:3], np.nonzero(mask)[1][:3]] = 0
    assert detect_pattern(mask) == ["nm_2,4,-1"]


def test_the_sparsest_pattern_is_said_and_of_equal_ones_the_smallest_group():
    one_of_eight = [[1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]
    assert detect_pattern(one_of_eight) == ["nm_1,8,-1"]
    assert detect_pattern([[1, 0, 0, 1, 0, 1, 1, 0], [1, 0, 1, 0, 0, 1, 1, 0], [1, 0] * 4]) == [
        "nm_1,2,-1"
    ]


def test_pairs_within_fours_are_blocks_and_2_of_4():
    mask = [[1, 1, 0, 0, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 1, 1]]
    assert detect_pattern(mask) == ["block_1,2", "nm_2,4,-1"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_holds(seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((4, 8)) < rng.choice([0.1, 0.3, 0.5])
    for name in detect_pattern(mask):
        pattern = parse_sparsity_type(name)
        if name.startswith("nm"):
            groups = np.moveaxis(mask, pattern.axis, -1).reshape(-1, pattern.m)
            assert groups.sum(axis=1).max() == pattern.n
            assert mask.sum() > (pattern.n - 1) * len(groups)
        elif name.startswith("fanin"):
            rows = np.moveaxis(mask, pattern.axis, -1)
            assert len({*rows.sum(axis=1).tolist()}) == 1
            assert all(np.array_equal(row, rows[i - i % pattern.group])
                       for i, row in enumerate(rows))  # fmt: skip
        else:
            units = pattern.pool(jnp.asarray(mask)) > 0
            assert np.array_equal(pattern.expand(units, mask.shape), mask)
