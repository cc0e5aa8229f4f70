"""Masks of one tensor, against oracles in numpy that label each entry with its unit and sort."""

import math
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra import numpy as hnp

from sparsity import masks
from sparsity.sparsity_types import Block, Channel, NByM, Unstructured
from tests import helpers
from tests.selection_oracle import best_first

NAN, INF = float("nan"), float("inf")
ALL_TYPES = [Unstructured(), NByM(1, 3), Block((3, 3), use_avg_pooling=False), Channel()]


# Oracles: whole slices, one after the other.


def unit_of_entry(shape, kind):
    """For each entry of a slice, the number of its unit, in the order of the units' first entry."""
    index = np.indices(shape).reshape(len(shape), -1)
    if isinstance(kind, Channel):
        index = index[[kind.axis]]
    elif isinstance(kind, Block):
        sizes = (*[1] * (len(shape) - 2), *kind.block_shape)[-len(shape) :]
        index = index // np.array(sizes)[:, None]
    return np.unique(index, axis=1, return_inverse=True)[1].reshape(shape)


def pooled(scores, units, kind):
    scores = np.asarray(scores).astype(np.float64)
    if isinstance(kind, Channel):
        pool = np.sum
    else:
        pool = np.mean if getattr(kind, "use_avg_pooling", False) else np.max
    return np.array([pool(scores[units == unit]) for unit in range(units.max() + 1)])


def expected_slice(scores, sparsity, kind):
    if isinstance(kind, NByM):
        return expected_groups(scores, kind, keep=np.zeros(scores.shape))
    units = unit_of_entry(scores.shape, kind)
    values = pooled(scores, units, kind)
    kept = best_first(values)[: helpers.num_kept(values.size, sparsity)]
    return np.isin(units, kept).astype(np.uint8)


def expected_groups(scores, kind, keep):
    """n of every m along the axis: those to keep first, then the best."""
    scores = np.moveaxis(np.asarray(scores, np.float64), kind.axis, -1)
    keep = np.moveaxis(keep, kind.axis, -1)
    mask = np.zeros(scores.shape, np.uint8)
    for row in np.ndindex(scores.shape[:-1]):
        for start in range(0, scores.shape[-1], kind.m):
            group = slice(start, start + kind.m)
            order = best_first(scores[row][group])
            order = sorted(order, key=lambda i, kept=keep[row][group]: kept[i] == 0)
            mask[row][group][order[: kind.n]] = 1
    return np.moveaxis(mask, -1, kind.axis)


def expected_drop_and_grow(mask, drop, grow, fraction, kind):
    if isinstance(kind, NByM):
        active = np.flatnonzero(mask)
        kept = active[best_first(drop.ravel()[active])][: helpers.num_kept(active.size, fraction)]
        keep = np.isin(np.arange(mask.size), kept).reshape(mask.shape)
        return expected_groups(grow, kind, keep)
    units = unit_of_entry(mask.shape, kind)
    on = pooled(mask, units, kind) > 0
    active = np.flatnonzero(on)
    kept = active[best_first(pooled(drop, units, kind)[active])][
        : helpers.num_kept(active.size, fraction)
    ]
    others = np.setdiff1d(np.arange(on.size), kept)
    grown = others[best_first(pooled(grow, units, kind)[others])][: active.size - kept.size]
    return np.isin(units, [*kept, *grown]).astype(np.uint8)


def by_slice(oracle, batch_axes, arrays, *rest):
    shape = arrays[0].shape
    result = np.empty(shape, np.uint8)
    for place in np.ndindex(shape[:batch_axes]):
        result[place] = oracle(*(array[place] for array in arrays), *rest)
    return result


def draw(shape, seed=0):
    """Scores with exact sums and a few ties."""
    return np.random.default_rng(seed).integers(-4000, 4000, shape).astype(np.float32) / 8


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
    mask = masks.create_mask(draw(40), sparsity, Unstructured())
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
    mask = masks.create_mask(scores, sparsity, Unstructured())
    np.testing.assert_array_equal(mask, expected_slice(scores, sparsity, Unstructured()))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(sparsity=st.floats(0, 1, width=32))
def test_a_traced_sparsity_gives_the_same_mask(sparsity):
    mask = TRACED(draw(40), sparsity)
    np.testing.assert_array_equal(mask, expected_slice(draw(40), sparsity, Unstructured()))


TRACED = jax.jit(lambda scores, sparsity: masks.create_mask(scores, sparsity, Unstructured()))


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
        mask = masks.create_mask(scores, sparsity, Unstructured())
        expected = expected_slice(scores.astype(np.float64), sparsity, Unstructured())
        np.testing.assert_array_equal(mask, expected)


def test_a_scalar_is_always_kept():
    mask = masks.create_mask(np.float32(-3.0), 1.0, Unstructured())
    assert (mask.shape, int(mask)) == ((), 1)


@pytest.mark.parametrize("kind", ALL_TYPES[:3], ids=repr)
def test_empty_arrays_get_empty_masks(kind):
    assert masks.create_mask(np.zeros((0, 6), np.float32), 0.5, kind).shape == (0, 6)


@pytest.mark.parametrize("kind", ALL_TYPES, ids=repr)
@pytest.mark.parametrize("sparsity", [1.5, -0.1, NAN, 80])
def test_a_sparsity_outside_zero_to_one_is_an_error(kind, sparsity):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        masks.create_mask(draw(6), sparsity, kind)


# Blocks and channels.

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


@pytest.mark.parametrize(("shape", "kind", "batch_axes"), UNITS, ids=str)
def test_units_are_kept_or_removed_as_a_whole(shape, kind, batch_axes):
    scores = draw(shape)
    create = jax.jit(lambda *args: masks.create_mask(*args, kind, batch_axes=batch_axes))
    for sparsity in (0.0, 0.3, 0.5, 0.8, 1.0):
        mask = create(scores, sparsity)
        expected = by_slice(expected_slice, batch_axes, [scores], sparsity, kind)
        assert mask.dtype == jnp.uint8
        np.testing.assert_array_equal(mask, expected)


def test_blocks_lie_on_the_last_two_axes_of_a_convolution():
    scores = draw((3, 3, 64, 64))
    mask = np.asarray(masks.create_mask(scores, 0.9, Block((16, 16))))
    np.testing.assert_array_equal(mask, expected_slice(scores, 0.9, Block((16, 16))))
    # 3 * 3 * 4 * 4 = 144 blocks; a tenth of them is 14.4.
    assert mask.sum() == 14 * 16 * 16


def test_ragged_blocks_have_the_mask_worked_by_hand():
    # Blocks of 2 x 2 in 3 x 3: means 1 | 3 over 4 | 2; the two best are kept.
    scores = np.array([[1, 1, 3], [1, 1, 3], [4, 4, 2]], np.float32)
    expected = [[0, 0, 1], [0, 0, 1], [1, 1, 0]]
    np.testing.assert_array_equal(masks.create_mask(scores, 0.5, Block((2, 2))), expected)


def test_the_mean_of_a_block_is_of_its_own_entries_and_its_maximum_too():
    # Of the ragged edge (two blocks of -1) nothing but its own entries may count, not a padding.
    scores = np.array([[-2, -2, -1], [-2, -2, -1], [-3, 9, -9]], np.float32)
    mean = masks.create_mask(scores, 0.75, Block((2, 2)))  # means -2, -1, 3, -9
    np.testing.assert_array_equal(mean, [[0, 0, 0], [0, 0, 0], [1, 1, 0]])
    scores[2] = -9
    most = masks.create_mask(scores, 0.75, Block((2, 2), use_avg_pooling=False))
    np.testing.assert_array_equal(most, [[0, 0, 1], [0, 0, 1], [0, 0, 0]])


def test_channel_sums_of_float16_scores_do_not_overflow():
    # Sums 110000, 120000, 130000 and three of 2: as float16 the first three would all be infinite.
    scores = np.array([[60000, 60000, 65000, 1, 1, 1], [50000, 60000, 65000, 1, 1, 1]], np.float16)
    mask = masks.create_mask(scores, 5 / 6, Channel())
    np.testing.assert_array_equal(mask, [[0, 0, 1, 0, 0, 0]] * 2)
    mask = masks.create_mask(scores, 4 / 6, Channel())
    np.testing.assert_array_equal(mask, [[0, 1, 1, 0, 0, 0]] * 2)


def test_channel_sums_of_bfloat16_scores_keep_small_terms():
    # 256 + 1 is 256 in bfloat16.
    scores = np.array([[256, 256, 256, 0, 0, 0], [0, 1, 0, 0, 0, 0]]).astype(jnp.bfloat16)
    mask = masks.create_mask(scores, 5 / 6, Channel())
    np.testing.assert_array_equal(mask, [[0, 1, 0, 0, 0, 0]] * 2)


def test_channel_sums_of_uint32_scores_do_not_wrap():
    scores = np.array([[1, 2**31, 0, 0, 0, 0], [1, 2**31, 0, 0, 0, 0]], np.uint32)
    mask = masks.create_mask(scores, 5 / 6, Channel())
    np.testing.assert_array_equal(mask, [[0, 1, 0, 0, 0, 0]] * 2)


def test_channel_sums_of_float64_scores_are_float64():
    with jax.enable_x64(True):
        scores = jnp.array([[1.0, 1.0, 1.0, 0, 0, 0], [0, 1e-12, 0, 0, 0, 0]])
        assert scores.dtype == jnp.float64
        mask = masks.create_mask(scores, 5 / 6, Channel())
    np.testing.assert_array_equal(mask, [[0, 1, 0, 0, 0, 0]] * 2)


@pytest.mark.parametrize("scale", [1e-33, 1e-12, 1.0, 1e12, 1e37])
@pytest.mark.parametrize("kind", [Channel(), Block((2, 1))], ids=repr)
def test_units_are_ordered_at_any_scale(kind, scale):
    scores = np.array([[1, 2, 6, 3, 5, 4], [1, 2, 6, 3, 5, 4]], np.float32) * np.float32(scale)
    mask = masks.create_mask(scores, 0.5, kind)
    np.testing.assert_array_equal(mask, [[0, 0, 1, 0, 1, 1]] * 2)


@pytest.mark.parametrize("kind", [Channel(), Block((2, 1))], ids=repr)
def test_one_large_unit_does_not_blur_the_order_of_the_others(kind):
    scores = np.array([[1e30, 1e-9, 3e-9, 2e-9, 5e-9, 4e-9]] * 2, np.float32)
    mask = masks.create_mask(scores, 0.5, kind)
    np.testing.assert_array_equal(mask, [[1, 0, 0, 0, 1, 1]] * 2)


def test_slices_of_other_magnitudes_do_not_matter():
    kind = Channel()
    scores = np.array([[[1, 2, 6, 3, 5, 4]] * 2, [[3, 5, 4, 6, 1, 2]] * 2], np.float32)
    scores[1] *= 1e-25
    mask = jax.jit(lambda scores: masks.create_mask(scores, 0.5, kind, batch_axes=1))(scores)
    np.testing.assert_array_equal(mask, [[[0, 0, 1, 0, 1, 1]] * 2, [[0, 1, 1, 1, 0, 0]] * 2])


@pytest.mark.parametrize("kind", [Channel(), Block((2, 1)), Block((2, 1), use_avg_pooling=False)])
def test_units_with_nan_are_lowest(kind):
    scores = np.array([[9, NAN, 1, 1, 1, 1], [9, 9, -8, 1, 1, 1]], np.float32)
    mask = np.asarray(masks.create_mask(scores, 1 / 6, kind))
    np.testing.assert_array_equal(mask, [[1, 0, 1, 1, 1, 1]] * 2)


# N:M.

GROUPS = [
    ((8,), NByM(2, 4), 0),
    ((3, 8), NByM(2, 4), 0),
    ((8, 3), NByM(1, 4, axis=0), 0),
    ((8, 3), NByM(3, 8, axis=-2), 0),
    ((2, 6, 3), NByM(1, 3, axis=1), 0),
    ((4, 8, 3), NByM(2, 4, axis=0), 1),
    ((4, 3, 8), NByM(2, 4, axis=-1), 1),
    ((3, 8), NByM(0, 4), 0),
    ((3, 8), NByM(4, 4), 0),
]


@pytest.mark.parametrize(("shape", "kind", "batch_axes"), GROUPS, ids=str)
def test_n_of_every_m_are_kept(shape, kind, batch_axes):
    scores = np.random.default_rng(1).integers(-3, 3, shape).astype(np.float32)
    scores.flat[2] = NAN
    mask = masks.create_mask(scores, 0.5, kind, batch_axes=batch_axes)
    expected = by_slice(expected_slice, batch_axes, [scores], 0.5, kind)
    assert mask.dtype == jnp.uint8
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize(("sparsity", "kept"), [(0.0, 8), (1e-6, 4), (0.1, 4), (0.9, 4), (1.0, 4)])
def test_any_sparsity_above_zero_selects_n_of_m(sparsity, kept):
    assert int(masks.create_mask(draw(8), sparsity, NByM(2, 4)).sum()) == kept
    traced = jax.jit(lambda s: masks.create_mask(draw(8), s, NByM(2, 4)))(sparsity)
    assert int(traced.sum()) == kept


@pytest.mark.parametrize("m", range(1, 17))
def test_a_ramp_ends_at_exactly_n_of_m(m, monkeypatch):
    # What is asked of the selection, which would have to be compiled for every m.
    monkeypatch.setattr(masks.create.selection, "nm_mask", lambda scores, n, m, axis: (int(n), m))
    for n in range(m + 1):
        target = 1 - n / m if n < m else 0.5
        for sparsity in (np.float32(target), jnp.float32(target), target):
            asked = masks.create_mask(draw(m), sparsity, NByM(n, m), target=jnp.float32(target))
            assert asked == (n, m)


@pytest.mark.parametrize("target", [0.1, 0.7, 1.0, 1e-3])
def test_a_ramp_ends_at_exactly_n_of_m_whatever_the_target(target):
    for n in (0, 1, 5, 12, 15):
        assert int(masks.create_mask(draw(16), target, NByM(n, 16), target=target).sum()) == n


@pytest.mark.parametrize(("n", "m"), [(2, 4), (3, 7), (0, 6), (7, 16)])
def test_a_ramp_keeps_what_its_formula_says(n, m):
    scores = draw(m)
    target = np.float32(1 - n / m)
    for sparsity in np.linspace(0, target, 15, dtype=np.float32):
        reached = Fraction(float(sparsity)) / Fraction(float(target))
        exact = m * (1 - reached * (1 - Fraction(n, m)))
        if 0 < abs(exact - round(exact)) < Fraction(1, 100_000):
            continue  # float32 may round it either way
        mask = masks.create_mask(scores, sparsity, NByM(n, m), target=target)
        assert int(mask.sum()) == max(n, math.ceil(exact))


def test_a_ramp_has_the_counts_worked_by_hand():
    # 2:4 on the way to 0.5: none removed, then one from half of the way, two at its end.
    counts = {0.0: 4, 0.1: 4, 0.2499: 4, 0.25: 3, 0.49: 3, 0.5: 2}
    make = lambda s, t: masks.create_mask(np.arange(4.0), s, NByM(2, 4), target=t)  # noqa: E731
    compiled = jax.jit(make)
    for sparsity, count in counts.items():
        assert int(make(sparsity, 0.5).sum()) == count
        assert int(compiled(sparsity, 0.5).sum()) == count


def test_a_ramp_towards_zero_stays_dense():
    assert int(masks.create_mask(draw(8), 0.0, NByM(2, 4), target=jnp.float32(0)).sum()) == 8


def test_a_ramp_is_nested():
    scores, kept = draw((5, 16)), np.ones((5, 16))
    for sparsity in np.linspace(0, 0.75, 13):
        mask = np.asarray(masks.create_mask(scores, sparsity, NByM(4, 16), target=0.75))
        assert np.all(mask <= kept)
        kept = mask


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
    mask = masks.create_mask(
        np.zeros(shape, np.float32), 0.5, kind, batch_axes=batch_axes, topk_fn=keep_first
    )
    assert mask.dtype == jnp.uint8
    np.testing.assert_array_equal(mask, expected)


def test_topk_fn_gets_the_sparsity():
    above = lambda scores, sparsity: scores > sparsity  # noqa: E731
    scores = np.array([[0.1, 0.6], [0.9, 0.2]], np.float32)
    for batch_axes in (0, 1):
        mask = masks.create_mask(scores, 0.5, Unstructured(), batch_axes=batch_axes, topk_fn=above)
        np.testing.assert_array_equal(mask, [[0, 1], [1, 0]])


# Dropping and growing.

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


@pytest.mark.parametrize(("shape", "kind", "batch_axes"), MOVES, ids=str)
def test_the_lowest_are_dropped_and_the_highest_of_all_others_grow(shape, kind, batch_axes):
    drop, grow = np.abs(draw(shape, 1)), np.abs(draw(shape, 2))
    mask = by_slice(expected_slice, batch_axes, [draw(shape, 3)], 0.5, kind)
    for fraction in (0.0, 0.3, 1.0):
        moved = masks.drop_and_grow(mask, drop, grow, fraction, kind, batch_axes=batch_axes)
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


def test_a_move_worked_by_hand():
    mask = np.array([1, 1, 1, 1, 0, 0, 0, 0], np.uint8)
    drop = np.array([4, 1, 3, 2, 9, 9, 9, 9], np.float32)
    grow = np.array([9, 0, 9, 5, 1, 8, 2, 0], np.float32)
    # Half of four: the weights 1 and 3 go. Of all but 0 and 2, the best to grow are 5 and 3: the
    # dropped weight 3 comes back.
    moved = masks.drop_and_grow(mask, drop, grow, 0.5, Unstructured())
    np.testing.assert_array_equal(moved, [1, 0, 1, 1, 0, 1, 0, 0])


def test_kept_weights_stay_however_large_the_scores_for_growing():
    mask = np.array([1, 1, 0, 0, 0, 0, 0, 0], np.uint8)
    drop = np.array([1e30, 1e-30, 0, 0, 0, 0, 0, 0], np.float32)
    grow = np.array([0, 0, 3e38, INF, 1, 1, 1, 1], np.float32)
    moved = masks.drop_and_grow(mask, drop, grow, 0.5, Unstructured())
    np.testing.assert_array_equal(moved, [1, 0, 0, 1, 0, 0, 0, 0])


def test_all_equal_scores_drop_the_last_and_grow_the_first():
    mask = np.array([0, 0, 1, 1, 1, 1, 0, 0], np.uint8)
    same = np.zeros(8, np.float32)
    moved = masks.drop_and_grow(mask, same, same, 0.5, Unstructured())
    np.testing.assert_array_equal(moved, [1, 1, 1, 1, 0, 0, 0, 0])


def test_a_group_of_n_by_m_grows_as_many_as_it_lost():
    mask = np.array([1, 1, 0, 0, 1, 1, 0, 0], np.uint8)
    drop = np.array([1, 2, 0, 0, 8, 9, 0, 0], np.float32)
    grow = np.array([0, 0, 1, 2, 9, 9, 9, 9], np.float32)
    # Both weights of the first group are dropped, none of the second.
    moved = masks.drop_and_grow(mask, drop, grow, 0.5, NByM(2, 4))
    np.testing.assert_array_equal(moved, [0, 0, 1, 1, 1, 1, 0, 0])


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", [Unstructured(), NByM(2, 4)], ids=repr)
def test_a_mask_of_ones_stays(kind, fraction):
    ones = np.ones(8, np.uint8)
    moved = masks.drop_and_grow(ones, draw(8, 1), draw(8, 2), fraction, kind)
    np.testing.assert_array_equal(moved, ones)


def test_a_mask_of_zeros_stays():
    zeros = np.zeros(8, np.uint8)
    moved = masks.drop_and_grow(zeros, draw(8, 1), draw(8, 2), 0.5, Unstructured())
    np.testing.assert_array_equal(moved, zeros)


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


TRACED_MOVE = jax.jit(lambda *args: masks.drop_and_grow(*args, Unstructured()))


def test_scores_for_growing_may_be_hashes():
    mask = np.array([1, 1, 0, 0, 0, 0, 0, 0], np.uint8)
    drop = np.array([1, 2, 0, 0, 0, 0, 0, 0], np.float32)
    grow = np.array([0, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 5, 2**30], np.uint32)
    moved = masks.drop_and_grow(mask, drop, grow, 0.5, Unstructured())
    np.testing.assert_array_equal(moved, [0, 1, 0, 0, 0, 1, 0, 0])


# Packing to bits.

SHAPES = [(), (1,), (7,), (8,), (3, 1), (5, 9), (2, 3, 17), (3, 0)]


def random_mask(shape):
    return np.random.default_rng(7).integers(0, 2, shape).astype(np.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("value", ["random", "ones"])
def test_packing_is_undone_by_unpacking(shape, value):
    mask = {"random": random_mask, "ones": np.ones}[value](shape)
    mask = jnp.asarray(mask, jnp.uint8)
    param = jnp.zeros(shape)
    packed = masks.pack(mask, param)
    assert packed.shape == masks.packed_shape(shape)
    assert packed.dtype == jnp.uint8
    restored = masks.unpack(packed, param)
    assert (restored.shape, restored.dtype) == (shape, jnp.uint8)
    np.testing.assert_array_equal(restored, mask)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_and_unpacking_twice_change_nothing(shape):
    mask, param = jnp.asarray(random_mask(shape)), jnp.zeros(shape)
    packed = masks.pack(mask, param)
    np.testing.assert_array_equal(masks.pack(packed, param), packed)
    np.testing.assert_array_equal(masks.unpack(mask, param), mask)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 1), (5, 9), (2, 3, 17)], ids=str)
def test_rows_are_packed_to_whole_bytes_highest_bit_first(shape):
    mask = random_mask(shape)
    rows = mask.reshape(-1, shape[-1])
    bits = ["".join(map(str, row)).ljust(-(-shape[-1] // 8) * 8, "0") for row in rows]
    expected = [[int(row[i : i + 8], 2) for i in range(0, len(row), 8)] for row in bits]
    packed = masks.pack(jnp.asarray(mask), jnp.zeros(shape))
    np.testing.assert_array_equal(packed, np.reshape(expected, packed.shape))


def test_a_packed_mask_takes_one_bit_a_weight():
    assert masks.pack(jnp.ones((100, 64), jnp.uint8), jnp.zeros((100, 64))).nbytes == 100 * 8


def test_masks_that_are_not_uint8_can_be_packed():
    packed = masks.pack(jnp.array([True, False, True]), jnp.zeros(3))
    np.testing.assert_array_equal(packed, [0b10100000])
    restored = masks.unpack(jnp.array([True, False, True]), jnp.zeros(3))
    assert restored.dtype == jnp.uint8
    np.testing.assert_array_equal(restored, [1, 0, 1])


def test_a_shape_and_dtype_is_enough_to_pack_and_unpack():
    like = jax.ShapeDtypeStruct((2, 9), jnp.bfloat16)
    mask = jnp.asarray(random_mask((2, 9)))
    np.testing.assert_array_equal(masks.unpack(masks.pack(mask, like), like), mask)


# Applying masks.

MASK = np.array([1, 0, 1, 0, 0], np.uint8)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1.5, 2, -3, 4, 5], jnp.float32),
        ([1.5, 2, -3, 4, 5], jnp.bfloat16),
        ([1.5, 2, -3, 4, 5], jnp.float16),
        ([1, 2, -3, 4, 5], jnp.int32),
        ([1, 2, 3, 4, 5], jnp.uint8),
        ([1, 1, 1, 1, 0], jnp.bool_),
        ([1 + 2j, 3j, -4, 5, 6j], jnp.complex64),
    ],
    ids=str,
)
def test_kept_entries_pass_and_others_are_zero_in_the_same_dtype(values, dtype, packed):
    param = jnp.asarray(values, dtype)
    mask = masks.pack(jnp.asarray(MASK), jnp.zeros(5)) if packed else MASK
    masked = masks.apply_mask(param, mask)
    assert masked.dtype == param.dtype
    np.testing.assert_array_equal(masked, jnp.asarray([values[0], 0, values[2], 0, 0], dtype))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64], ids=str)
def test_nan_inf_and_minus_zero_become_plus_zero_where_pruned(dtype, packed):
    param = jnp.array([NAN, NAN, -INF, INF, -0.0], dtype)
    mask = masks.pack(jnp.asarray(MASK), jnp.zeros(5)) if packed else MASK
    masked = np.asarray(masks.apply_mask(param, mask)).astype(np.complex64)
    assert np.isnan(masked[0])
    assert masked[2] == -INF
    np.testing.assert_array_equal(masked[[1, 3, 4]], 0)
    assert not np.signbit(masked[[1, 3, 4]].real).any()
    assert not np.signbit(masked[[1, 3, 4]].imag).any()


def test_a_kept_minus_zero_stays():
    assert np.signbit(masks.apply_mask(jnp.array([-0.0]), np.ones(1, np.uint8)))[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_and_unpacked_masks_do_the_same(shape):
    param = jnp.asarray(draw(shape)) + 1000
    mask = jnp.asarray(random_mask(shape))
    packed = jax.jit(masks.apply_mask)(param, masks.pack(mask, param))
    np.testing.assert_array_equal(packed, masks.apply_mask(param, mask))
    np.testing.assert_array_equal(packed, np.where(mask, param, 0))


def test_without_a_mask_the_parameter_itself_is_returned():
    param = object()
    assert masks.apply_mask(param, None) is param


STRAIGHT_THROUGH = masks.apply_mask_straight_through


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_straight_through_masks_values_and_passes_gradients(packed, compiled):
    param = jnp.array([1.0, NAN, 3.0, INF, 5.0])
    weights = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0])
    mask = masks.pack(jnp.asarray(MASK), jnp.zeros(5)) if packed else jnp.asarray(MASK)
    wrap = jax.jit if compiled else lambda f: f

    forward = wrap(STRAIGHT_THROUGH)(param, mask)
    np.testing.assert_array_equal(forward, [1, 0, 3, 0, 0])

    backward = wrap(jax.grad(lambda p, m: jnp.vdot(weights, STRAIGHT_THROUGH(p, m))))(param, mask)
    np.testing.assert_array_equal(backward, weights)

    out, tangent = wrap(lambda p, m, t: jax.jvp(lambda p: STRAIGHT_THROUGH(p, m), (p,), (t,)))(
        param, mask, weights
    )
    np.testing.assert_array_equal(out, [1, 0, 3, 0, 0])
    np.testing.assert_array_equal(tangent, weights)

    _, pull = jax.vjp(lambda p: STRAIGHT_THROUGH(p, mask), param)
    np.testing.assert_array_equal(wrap(pull)(weights)[0], weights)


def test_the_gradient_flows_through_the_masked_value():
    # d/dp (mask * p)^2, straight through, is 2 * (mask * p): zero where pruned.
    grad = jax.grad(lambda p: jnp.sum(STRAIGHT_THROUGH(p, MASK) ** 2))(jnp.arange(1.0, 6.0))
    np.testing.assert_array_equal(grad, [2, 0, 6, 0, 0])


def test_straight_through_without_a_mask_is_the_identity():
    value, grad = jax.value_and_grad(lambda p: jnp.sum(STRAIGHT_THROUGH(p, None)))(jnp.ones(3))
    assert value == 3
    np.testing.assert_array_equal(grad, np.ones(3))


# Types that do not fit.


@pytest.mark.parametrize(
    ("kind", "shape", "batch_axes"),
    [
        (Unstructured(), (), 0),
        (Unstructured(), (3, 5), 1),
        (NByM(2, 4), (3, 8), 0),
        (NByM(2, 4, axis=-2), (8, 3), 0),
        (NByM(2, 4, axis=0), (3, 8, 5), 1),
        (NByM(2, 4), (0,), 0),
        (Block((3, 3)), (7, 7), 0),
        (Block((30, 30)), (7,), 0),
        (Channel(), (3,), 0),
        (Channel(1), (3, 4, 5), 1),
        (Channel(-2), (3, 4, 5), 1),
    ],
    ids=str,
)
def test_types_that_fit_pass(kind, shape, batch_axes):
    masks.check_type(kind, shape, batch_axes, "net/kernel")


@pytest.mark.parametrize(
    ("kind", "shape", "batch_axes", "why"),
    [
        (NByM(2, 4), (3, 6), 0, "axis -1.*6 entries.*m = 4"),
        (NByM(2, 4, axis=0), (6, 4), 0, "axis 0.*6 entries.*m = 4"),
        (NByM(2, 4, axis=-2), (6, 4), 0, "axis -2.*6 entries.*m = 4"),
        (NByM(2, 4, axis=0), (4, 6, 4), 1, "1 leading.*axis.*|axis 0.*6 entries"),
        (NByM(2, 4, axis=-2), (4,), 0, "no axis -2"),
        (NByM(2, 4, axis=2), (4, 4), 0, "no axis 2"),
        (NByM(2, 4), (), 0, "no axis -1"),
        (NByM(2, 4, axis=-2), (4, 4), 1, "1 leading.*no axis -2"),
        (Channel(1), (4,), 0, "no axis 1"),
        (Channel(-3), (4, 4), 0, "no axis -3"),
        (Channel(), (), 0, "no axis -1"),
        (Channel(1), (4, 4), 1, "1 leading.*no axis 1"),
        (Block((2, 2)), (), 0, "at least one axis"),
        (Block((2, 2)), (4,), 1, "1 leading"),
    ],
    ids=str,
)
def test_types_that_do_not_fit_are_errors_with_parameter_shape_and_remedy(
    kind, shape, batch_axes, why
):
    with pytest.raises(ValueError, match=why) as error:
        masks.check_type(kind, shape, batch_axes, "net/kernel")
    message = str(error.value)
    for part in (repr(kind), "'net/kernel'", str(shape), "filter_fn", "custom_sparsity_map"):
        assert part in message


@pytest.mark.parametrize("kind", ["nm_2,4", None, 4, NByM], ids=repr)
def test_what_is_no_type_is_an_error_with_the_parameter(kind):
    with pytest.raises(ValueError, match="Unstructured, NByM, Block or Channel") as error:
        masks.check_type(kind, (3, 4), 0, "net/kernel")
    assert repr(kind) in str(error.value)
    assert "'net/kernel'" in str(error.value)
