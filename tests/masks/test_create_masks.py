"""Masks of one tensor, against oracles in numpy: how many are kept, and which."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp

from sparsity.sparsity_types import Block, Channel, NByM, Unstructured
from tests.masks.mask_oracles import draw, expected_slice

NAN, INF = float("nan"), float("inf")
ALL_TYPES = [Unstructured(), NByM(1, 3), Block((3, 3), use_avg_pooling=False), Channel()]


# How many are kept, and which.


@pytest.mark.parametrize(
    ("sparsity", "kept"),
    # 40 * (1 - s), the halves to even: 2.5 -> 2, 37.5 -> 38, and never fewer than one.
    [
        (0, 40),
        (0.0625, 38),
        (0.1, 36),
        (0.5, 20),
        (0.9375, 2),
        (0.99, 1),
        (1, 1),
        (np.float64(0.7), 12),
        (jnp.float32(0.25), 30),
    ],
)
def test_exactly_k_entries_are_kept(sparsity, kept):
    mask = Unstructured().select(draw(40), sparsity)
    assert (mask.shape, mask.dtype) == ((40,), jnp.uint8)
    assert int(mask.sum()) == kept


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    scores=hnp.arrays(
        np.float32, 40, elements=st.sampled_from([-INF, -2, -0.0, 0, 1, 2, INF, NAN])
    ),
    sparsity=st.floats(0, 1, width=32),
)
def test_ties_go_to_the_lowest_index_and_nan_is_lowest(scores, sparsity):
    mask = Unstructured().select(scores, sparsity)
    np.testing.assert_array_equal(mask, expected_slice(scores, sparsity, Unstructured()))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(sparsity=st.floats(0, 1, width=32))
def test_a_traced_sparsity_gives_the_same_mask(sparsity):
    mask = TRACED(draw(40), sparsity)
    np.testing.assert_array_equal(mask, expected_slice(draw(40), sparsity, Unstructured()))


TRACED = jax.jit(Unstructured().select)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        (jnp.bfloat16, -300, 300),
        (jnp.float16, -300, 300),
        (np.uint32, 0, 2**32),
        (np.int32, -(2**31), 2**31),
    ],
)
def test_scores_of_other_dtypes_are_ordered(dtype, low, high):
    scores = np.random.default_rng(3).integers(low, high, 40, np.int64)
    scores[[7, 20]] = low, high - 1
    scores = scores.astype(dtype)
    for sparsity in (0.975, 0.5, 0.025):
        mask = Unstructured().select(scores, sparsity)
        expected = expected_slice(scores.astype(np.float64), sparsity, Unstructured())
        np.testing.assert_array_equal(mask, expected)


def test_a_scalar_is_always_kept():
    mask = Unstructured().select(np.float32(-3.0), 1.0)
    assert (mask.shape, int(mask)) == ((), 1)


@pytest.mark.parametrize("kind", ALL_TYPES[:3], ids=repr)
def test_empty_arrays_get_empty_masks(kind):
    assert kind.select(np.zeros((0, 6), np.float32), 0.5).shape == (0, 6)


@pytest.mark.parametrize("kind", ALL_TYPES, ids=repr)
@pytest.mark.parametrize("sparsity", [1.5, -0.1, NAN, 80])
def test_a_sparsity_outside_zero_to_one_is_an_error(kind, sparsity):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        kind.select(draw(6), sparsity)


# A selection of the user's own.


MAX_BLOCK = Block((2, 2), use_avg_pooling=False)


def keep_first(scores, sparsity):
    """Keeps the first half of whatever it gets."""
    del sparsity
    flat = jnp.arange(scores.size) < scores.size // 2
    return flat.reshape(scores.shape)


@pytest.mark.parametrize(
    ("shape", "kind", "batch_axes", "expected"),
    [
        ((4,), Unstructured(), 0, [1, 1, 0, 0]),
        ((2, 2), Unstructured(), 1, [[1, 0], [1, 0]]),
        ((2, 2), Unstructured(), 0, [[1, 1], [0, 0]]),
        ((1, 2, 2), Unstructured(), 2, [[[1, 0], [1, 0]]]),
        ((2, 4), Channel(), 0, [[1, 1, 0, 0], [1, 1, 0, 0]]),
        ((2, 4), MAX_BLOCK, 0, [[1, 1, 0, 0], [1, 1, 0, 0]]),
        ((1, 2, 4), MAX_BLOCK, 1, [[[1, 1, 0, 0], [1, 1, 0, 0]]]),
    ],
)
def test_topk_fn_is_called_for_the_units_of_each_slice(shape, kind, batch_axes, expected):
    mask = kind.select(np.zeros(shape, np.float32), 0.5, batch_axes=batch_axes, topk_fn=keep_first)
    assert mask.dtype == jnp.uint8
    np.testing.assert_array_equal(mask, expected)


def test_a_topk_fn_that_would_not_be_called_is_refused():
    with pytest.raises(ValueError, match=r"NByM\(.*\) ranks .* needs topk_fn = None, got topk_fn"):
        NByM(2, 4).select(np.ones(4, np.float32), 0.5, topk_fn=keep_first)


@pytest.mark.parametrize("kept", [1, 3, 256, 0.3, -1.0])
def test_units_are_kept_where_the_mask_of_topk_fn_is_not_zero(kept):
    def keep_last(scores, sparsity):
        return jnp.where(scores == 2, kept, kept * 0)

    mask = Unstructured().select(np.float32([1, 0, 2]), 0.5, topk_fn=keep_last)
    assert mask.tolist() == [0, 0, 1]


@pytest.mark.parametrize("target", ["x", NAN, 2.0, -0.1])
def test_a_target_that_is_no_fraction_is_refused(target):
    with pytest.raises(ValueError, match=r"^target must be in \[0, 1\]"):
        NByM(2, 4).select(np.ones(4, np.float32), 0.5, target=target)


def test_topk_fn_gets_the_sparsity():
    above = lambda scores, sparsity: scores > sparsity  # noqa: E731
    scores = np.array([[0.1, 0.6], [0.9, 0.2]], np.float32)
    for batch_axes in (0, 1):
        mask = Unstructured().select(scores, 0.5, batch_axes=batch_axes, topk_fn=above)
        np.testing.assert_array_equal(mask, [[0, 1], [1, 0]])
