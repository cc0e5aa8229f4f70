"""Blocks and channels are kept or removed as a whole, ranked by exact pools of their entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.sparsity_types import Block, Channel, Unstructured
from tests.masks.mask_oracles import by_slice, draw, expected_slice

NAN = float("nan")


UNITS = [
    # Blocks: ragged, larger than the array, one axis, in slices.
    ((7, 7), Block((3, 3)), 0),
    ((7, 7), Block((3, 3), use_avg_pooling=False), 0),
    ((2, 5), Block((8, 2)), 0),
    ((7,), Block((2, 3)), 0),
    ((2, 7, 7), Block((3, 3)), 1),
    # Channels: one axis, positive and negative, in slices.
    ((4, 6), Channel(-1), 0),
    ((6, 4), Channel(0), 0),
    ((3, 6, 2), Channel(-2), 0),
    ((2, 6, 5), Channel(0), 1),
    # And single entries in slices.
    ((2, 3, 6), Unstructured(), 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "kind", "batch_axes"), UNITS, ids=str)
def test_units_are_kept_or_removed_as_a_whole(shape, kind, batch_axes):
    scores = draw(shape)
    create = jax.jit(lambda *args: kind.select(*args, batch_axes=batch_axes))
    for sparsity in (0.0, 0.3, 0.5, 0.8, 1.0):
        mask = create(scores, sparsity)
        expected = by_slice(expected_slice, batch_axes, [scores], sparsity, kind)
        assert mask.dtype == jnp.uint8
        np.testing.assert_array_equal(mask, expected)


@pytest.mark.slow
def test_blocks_lie_on_the_last_two_axes_of_a_convolution():
    scores = draw((3, 3, 64, 64))
    mask = np.asarray(Block((16, 16)).select(scores, 0.9))
    np.testing.assert_array_equal(mask, expected_slice(scores, 0.9, Block((16, 16))))
    # 3 * 3 * 4 * 4 = 144 blocks; a tenth of them is 14.4.
    assert mask.sum() == 14 * 16 * 16


@pytest.mark.slow
def test_ragged_blocks_have_the_mask_worked_by_hand():
    # Blocks of 2 x 2 in 3 x 3: means 1 | 3 over 4 | 2; the two best are kept.
    scores = np.array([[1, 1, 3], [1, 1, 3], [4, 4, 2]], np.float32)
    expected = [[0, 0, 1], [0, 0, 1], [1, 1, 0]]
    np.testing.assert_array_equal(Block((2, 2)).select(scores, 0.5), expected)


def test_the_mean_of_a_block_is_of_its_own_entries_and_its_maximum_too():
    # Of the ragged edge (two blocks of -1) nothing but its own entries may count, not a padding.
    scores = np.array([[-2, -2, -1], [-2, -2, -1], [-3, 9, -9]], np.float32)
    mean = Block((2, 2)).select(scores, 0.75)  # means -2, -1, 3, -9
    np.testing.assert_array_equal(mean, [[0, 0, 0], [0, 0, 0], [1, 1, 0]])
    scores[2] = -9
    most = Block((2, 2), use_avg_pooling=False).select(scores, 0.75)
    np.testing.assert_array_equal(most, [[0, 0, 1], [0, 0, 1], [0, 0, 0]])


@pytest.mark.slow
def test_channel_sums_of_float16_scores_do_not_overflow():
    # Sums 110000, 120000, 130000 and three of 2: as float16 the first three would all be infinite.
    scores = np.array([[60000, 60000, 65000, 1, 1, 1], [50000, 60000, 65000, 1, 1, 1]], np.float16)
    mask = Channel().select(scores, 5 / 6)
    np.testing.assert_array_equal(mask, [[0, 0, 1, 0, 0, 0]] * 2)
    mask = Channel().select(scores, 4 / 6)
    np.testing.assert_array_equal(mask, [[0, 1, 1, 0, 0, 0]] * 2)


def test_channel_sums_of_bfloat16_scores_keep_small_terms():
    # 256 + 1 is 256 in bfloat16.
    scores = np.array([[256, 256, 256, 0, 0, 0], [0, 1, 0, 0, 0, 0]]).astype(jnp.bfloat16)
    mask = Channel().select(scores, 5 / 6)
    np.testing.assert_array_equal(mask, [[0, 1, 0, 0, 0, 0]] * 2)


def test_channel_sums_of_uint32_scores_do_not_wrap():
    scores = np.array([[1, 2**31, 0, 0, 0, 0], [1, 2**31, 0, 0, 0, 0]], np.uint32)
    mask = Channel().select(scores, 5 / 6)
    np.testing.assert_array_equal(mask, [[0, 1, 0, 0, 0, 0]] * 2)


@pytest.mark.slow
def test_channel_sums_of_float64_scores_are_float64():
    with jax.enable_x64(True):
        scores = jnp.array([[1.0, 1.0, 1.0, 0, 0, 0], [0, 1e-12, 0, 0, 0, 0]])
        assert scores.dtype == jnp.float64
        mask = Channel().select(scores, 5 / 6)
    np.testing.assert_array_equal(mask, [[0, 1, 0, 0, 0, 0]] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-33, 1e-12, 1.0, 1e12, 1e37])
@pytest.mark.parametrize("kind", [Channel(), Block((2, 1))], ids=repr)
def test_units_are_ordered_at_any_scale(kind, scale):
    scores = np.array([[1, 2, 6, 3, 5, 4], [1, 2, 6, 3, 5, 4]], np.float32) * np.float32(scale)
    mask = kind.select(scores, 0.5)
    np.testing.assert_array_equal(mask, [[0, 0, 1, 0, 1, 1]] * 2)


@pytest.mark.parametrize("kind", [Channel(), Block((2, 1))], ids=repr)
def test_one_large_unit_does_not_blur_the_order_of_the_others(kind):
    scores = np.array([[1e30, 1e-9, 3e-9, 2e-9, 5e-9, 4e-9]] * 2, np.float32)
    mask = kind.select(scores, 0.5)
    np.testing.assert_array_equal(mask, [[1, 0, 0, 0, 1, 1]] * 2)


def test_slices_of_other_magnitudes_do_not_matter():
    kind = Channel()
    scores = np.array([[[1, 2, 6, 3, 5, 4]] * 2, [[3, 5, 4, 6, 1, 2]] * 2], np.float32)
    scores[1] *= 1e-25
    mask = jax.jit(lambda scores: kind.select(scores, 0.5, batch_axes=1))(scores)
    np.testing.assert_array_equal(mask, [[[0, 0, 1, 0, 1, 1]] * 2, [[0, 1, 1, 1, 0, 0]] * 2])


@pytest.mark.parametrize("kind", [Channel(), Block((2, 1)), Block((2, 1), use_avg_pooling=False)])
def test_units_with_nan_are_lowest(kind):
    scores = np.array([[9, NAN, 1, 1, 1, 1], [9, 9, -8, 1, 1, 1]], np.float32)
    mask = np.asarray(kind.select(scores, 1 / 6))
    np.testing.assert_array_equal(mask, [[1, 0, 1, 1, 1, 1]] * 2)
