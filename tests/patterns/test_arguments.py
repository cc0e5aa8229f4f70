"""Wrong arguments of `select` and `move`, each refused by its name."""

import jax
import numpy as np
import pytest

from sparsity import Block, Channel, FanIn, NByM, Unstructured

PATTERNS = pytest.mark.parametrize(
    "pattern", [Unstructured(), NByM(2, 4), Block((2, 2)), Channel(), FanIn(2, 0)], ids=str
)
SCORES = np.arange(32, dtype=np.float32).reshape(4, 8)


@PATTERNS
@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"scores": None}, "scores must be an array of real numbers, got scores = None"),
        ({"scores": [[1.0]]}, r"scores must be an array .* \[\[1.0\]\]"),
        ({"scores": SCORES + 1j}, "scores must be an array of real numbers"),
        ({"sparsity": "0.5"}, r"sparsity must be in \[0, 1\] .* '0.5'"),
        ({"sparsity": 1.5}, r"sparsity must be in \[0, 1\] .* 1.5"),
        ({"sparsity": float("nan")}, r"sparsity must be in \[0, 1\] .* nan"),
        ({"sparsity": [0.5]}, r"sparsity must be in \[0, 1\] .* \[0.5\]"),
        ({"batch_axes": "1"}, "batch_axes must be an integer, got batch_axes = '1'"),
        ({"batch_axes": -1}, "batch_axes must be at least 0"),
        ({"batch_axes": 3}, "batch_axes must be at most 2"),
    ],
)
def test_select_names_the_wrong_argument(pattern, changed, error):
    arguments = {"scores": SCORES, "sparsity": 0.5} | changed
    with pytest.raises(ValueError, match=error):
        pattern.select(**arguments)


@PATTERNS
@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"mask": None}, "mask must be an array of real numbers, got mask = None"),
        ({"drop_scores": SCORES[0]}, r"drop_scores must have shape \(4, 8\), .* \(8,\)"),
        ({"grow_scores": None}, "grow_scores must be an array"),
        ({"drop_fraction": -0.1}, r"drop_fraction must be in \[0, 1\]"),
        ({"batch_axes": 3}, "batch_axes must be at most 2"),
    ],
)
def test_move_names_the_wrong_argument(pattern, changed, error):
    arguments = {
        "mask": pattern.select(SCORES, 0.5),
        "drop_scores": SCORES,
        "grow_scores": SCORES,
        "drop_fraction": 0.5,
    } | changed
    with pytest.raises(ValueError, match=error):
        pattern.move(**arguments)


@PATTERNS
def test_no_axis_indexes_slices_by_default(pattern):
    pattern.check((4, 8))
    for scores in (SCORES, SCORES.reshape(2, 2, 8)):
        shape = scores.shape
        pooled = pattern.pool(scores, 0)
        np.testing.assert_array_equal(pattern.pool(scores), pooled)
        units = np.arange(pooled.size).reshape(pooled.shape) % 2
        np.testing.assert_array_equal(pattern.expand(units, shape), pattern.expand(units, shape, 0))
        assert pattern.count_kept(shape, 0.5) == pattern.count_kept(shape, 0.5, 0)


@pytest.mark.parametrize("batch_axes", [0, 1, 3])
@pytest.mark.parametrize(
    ("pattern", "least"),
    [
        (Unstructured(), 0),
        (Block((2, 2)), 1),
        (Channel(), 1),
        (Channel(1), 2),
        (Channel(-3), 3),
        (NByM(1, 2), 1),
        (NByM(1, 2, axis=2), 3),
        (FanIn(2), 2),
        (FanIn(2, 0), 1),
        (FanIn(1, (0, -2)), 3),
    ],
    ids=str,
)
def test_a_slice_needs_the_axes_that_a_pattern_names(pattern, least, batch_axes):
    pattern.check((2,) * (batch_axes + least), batch_axes, "layer/w")
    if least:
        shape = (2,) * (batch_axes + least - 1)
        batch = f" (of which {batch_axes} leading are batch axes)" if batch_axes else ""
        with pytest.raises(ValueError, match="filter_fn or custom_sparsity_map") as error:
            pattern.check(shape, batch_axes, "layer/w")
        assert f"parameter 'layer/w' of shape {shape}{batch}" in str(error.value)


@PATTERNS
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (3, 0, 4), (0, 4, 8)])
def test_arrays_without_entries_have_empty_masks_and_counts_of_zero(pattern, shape):
    batch_axes = len(shape) - 2
    empty = np.zeros(shape, np.float32)
    mask = pattern.select(empty, 0.5, batch_axes=batch_axes)
    assert (mask.shape, mask.dtype) == (shape, np.uint8)
    assert pattern.move(mask, empty, empty, 0.5, batch_axes=batch_axes).shape == shape
    if 0 in shape[batch_axes:]:
        assert pattern.count_kept(shape, 0.5, batch_axes) == 0


@pytest.mark.parametrize("target", [0.044, 0.169, 0.346])
def test_nm_keeps_n_of_m_at_a_target_whose_reciprocal_rounds_below(target):
    # A compiler turns a division by a constant into a product with the rounded reciprocal.
    target = np.float32(target)
    assert target * (np.float32(1) / target) < 1
    at = jax.jit(lambda sparsity: NByM(1, 4).select(SCORES, sparsity, target=target))
    np.testing.assert_array_equal(at(target).reshape(-1, 4).sum(axis=1), [1] * 8)
    np.testing.assert_array_equal(at(target * 0.99).reshape(-1, 4).sum(axis=1), [2] * 8)


def test_nm_keeps_all_where_the_sparsity_is_0_as_a_float32():
    for sparsity, kept in ((0.0, 32), (1e-60, 32), (1e-30, 16)):
        assert NByM(2, 4).count_kept((4, 8), sparsity) == kept
        assert NByM(2, 4).select(SCORES, sparsity).sum() == kept
