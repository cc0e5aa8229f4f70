"""Wrong arguments of `select` and `move`, each refused by its name."""

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
