"""Keys in the order of scores, and the search among them, of which passes are counted."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity.core import exact as exact_counts
from sparsity.selection import search as portable
from sparsity.selection.cpu import key_search, rows, visits
from sparsity.selection.keys import KeyRange, key_range, to_keys
from sparsity.selection.scores import Ranked
from tests.selection_oracle import any_bits, ranks

FLOATS = [
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e4m3b11fnuz",
    "float8_e3m4",
    "float8_e4m3",
]
INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32", "int4", "uint4", "bool"]
WIDE = ["float64", "int64", "uint64"]


# ------------------------------------------------------------------ keys
@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + WIDE)
def test_keys_are_in_the_order_of_scores_of_every_dtype(dtype):
    with jax.enable_x64(dtype in WIDE):
        scores = any_bits(dtype, 3000)
        keys = np.asarray(to_keys(jnp.asarray(scores)))
        key, low, top, _ = key_range(np.dtype(scores.dtype))
    rank = ranks(scores)
    order = np.argsort(rank, kind="stable")
    np.testing.assert_array_equal(np.argsort(keys, kind="stable"), order)
    np.testing.assert_array_equal(np.diff(keys[order]) != 0, np.diff(rank[order]) != 0)
    assert keys.dtype == key
    assert keys.min() >= low
    assert keys.max() <= top
    nan = rank < 0
    if nan.any():
        np.testing.assert_array_equal(keys == low, nan)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_range_of_keys_is_from_nan_to_the_highest_score(dtype):
    dtype = jnp.dtype(dtype)
    _, low, top, _ = key_range(dtype)
    highest = np.full(1, np.inf).astype(dtype)
    if not np.isinf(highest.astype(np.float32)):
        highest = np.full(1, jnp.finfo(dtype).max, dtype)
    scores = np.concatenate([np.full(1, np.nan).astype(dtype), -highest, highest])
    keys = np.asarray(to_keys(jnp.asarray(scores))).tolist()
    assert keys[0] == low < keys[1] < keys[2] == top


# ------------------------------------------------------------------ counting
@pytest.mark.slow
def test_counts_are_of_eligible_keys_strictly_above():
    rng = np.random.default_rng(0)
    # Padded together; in whole rows; in rows of another number; padded itself; many short slices.
    shapes = [(3, 5), (1, 1200), (4, 65_536), (257, 300), (1, 49_999), (300, 70)]
    pivots = np.array([-10, -3, 0, 8], np.int32)
    for masked in (False, True):
        scores = [rng.integers(-9, 9, s).astype(np.int32) for s in shapes]
        where = [rng.integers(0, 2, s).astype(np.uint8) if masked else None for s in shapes]
        all_ranked = [
            Ranked.wrap(x, None if leaf_mask is None else jnp.asarray(leaf_mask), batch_axes=1)
            for x, leaf_mask in zip(scores, where, strict=True)
        ]
        parts, first = visits.arrange(all_ranked)
        segments = sum(part.num_segments for part in parts)
        assert segments == sum(len(x) for x in scores)

        @jax.jit
        def count(parts=parts):
            actual = []
            for part in parts:
                pivot_rows = jnp.broadcast_to(pivots, (part.num_segments, 4))
                busy, all_keys = jnp.ones(part.num_segments, bool), part.count_eligible()
                counts = part.count_above(pivot_rows, busy, all_keys, all_keys * 0)
                actual.append([jnp.sum(counts, 1), jnp.sum(all_keys, 1)])
            return [jnp.concatenate(x) for x in zip(*actual, strict=True)]

        above, eligible = count()
        natural = [portable.SliceCounter(ranked) for ranked in all_ranked]
        for start, part, x, leaf_mask in zip(first, natural, scores, where, strict=True):
            leaf_mask = np.ones_like(x) if leaf_mask is None else leaf_mask
            expected = [
                [np.sum((x > p) & (leaf_mask > 0), 1) for p in pivots],
                np.sum(leaf_mask, 1),
            ]
            here = slice(start, start + len(x))
            np.testing.assert_array_equal(above[here].T, expected[0])
            np.testing.assert_array_equal(eligible[here], expected[1])
            alike = part.count_above(jnp.broadcast_to(pivots, (len(x), 4)))
            np.testing.assert_array_equal(alike.T, expected[0])
            np.testing.assert_array_equal(part.count_eligible(), expected[1])


def test_padding_is_not_eligible_where_zeros_are():
    rng = np.random.default_rng(0)
    all_ranked, expected = [], []
    for shape in [(3, 5), (2, 1200), (1, 49_999)]:
        where = rng.integers(0, 2, shape).astype(np.uint8)
        ranked = Ranked.wrap(rng.random(shape, np.float32), batch_axes=1)
        all_ranked.append(ranked.restrict_to(jnp.asarray(where), eligible_is_zero=True))
        expected += np.sum(where == 0, axis=1).tolist()
    parts, _ = visits.arrange(all_ranked)
    assert any(rows.sizes is not None for part in parts for rows in part.all_rows)
    counted = [jnp.sum(part.count_eligible(), axis=1).tolist() for part in parts]
    assert [count for part in counted for count in part] == expected


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2], ids=["one leaf", "in turn"])
def test_only_rows_with_keys_of_the_bracket_are_read_if_these_are_few(count):
    scores = np.random.default_rng(0).integers(0, 1000, (1024, 1024)).astype(np.int32)
    all_ranked = [Ranked.wrap(x) for x in (scores, scores[::-1])[:count]]
    (part,), _ = visits.arrange(all_ranked)
    pivots = np.array([100, 500, 997], np.int32)
    for few in (32, 256, 257):
        at_least = np.zeros((count, 1024), np.int32)
        at_least[:, 30 : 30 + few] = 1024
        above = np.zeros_like(at_least)
        above[:, :30] = at_least[:, :30] = 7  # not so, but no key of the bracket is there

        @jax.jit
        def counts(at_least, above):
            pivot_rows = jnp.broadcast_to(pivots, (count, 3))
            return part.count_above(pivot_rows, jnp.ones(count, bool), at_least, above)

        for actual, ranked in zip(counts(at_least, above), all_ranked, strict=True):
            expected = np.sum(np.asarray(ranked.arrays[0])[..., None] > pivots, axis=1)
            if few <= 256:
                expected[:30], expected[30 + few :] = 7, 0
            np.testing.assert_array_equal(actual, expected)


# ------------------------------------------------------------------ the search
def worst_counts(pivots, low, high):
    """Counts of a liar: between which pivots the k-th key lies, so that most keys stay."""
    edges = [low, *sorted({int(p) + 1 for p in pivots}), high + 1]
    return max(itertools.pairwise(edges), key=lambda e: e[1] - e[0])


def find_key(count, low, high, rows, k):
    """The key that a search of one bracket ends with, and its passes."""
    brackets = portable.SliceBrackets((len(rows[0]),), together=True)
    k = tuple(jnp.asarray(word).reshape(1) for word in k)
    bracket = key_search.Bracket.begin(
        *(jnp.array([x], jnp.int32) for x in (low, high)),
        brackets.totals(key_search.sum_rows(rows)),
    )
    first = jax.vmap(key_search.even_pivots)(bracket)

    def read(state):
        counts = count(state.pivots)
        return brackets.totals(key_search.sum_rows(counts)), counts

    start = key_search.SearchState(bracket, rows, [x & 0 for x in rows], first)
    end = key_search.search(read, brackets, k, start, max_misses=2, is_float=False)
    return end.bracket.high[0], end.bracket.passes[0]


@pytest.mark.slow
@pytest.mark.parametrize("max_misses", [0, 2, 8])
def test_the_search_keeps_its_bound_against_an_adversary(max_misses):
    # The adversary answers every pass so that the largest part of the bracket remains.
    narrow = jax.jit(key_search.narrow)
    even = jax.jit(key_search.even_pivots)
    guess = jax.jit(functools.partial(key_search.guessed_pivots, is_float=True))
    _, low, high, _ = key_range(np.dtype(np.float32))
    k = (jnp.uint32(0), jnp.uint32(2**29))
    bracket = key_search.Bracket.begin(
        jnp.int32(low), jnp.int32(high), (jnp.uint32(0), jnp.uint32(2**30))
    )
    pivots = even(bracket)
    while int(bracket.low) < int(bracket.high):
        low, high = int(bracket.low), int(bracket.high)
        pivots = np.clip(np.asarray(pivots), low, high - 1)
        start, end = worst_counts(pivots, low, high)
        above = int(bracket.above[1])
        outside = (above + 2**29) // 2, (int(bracket.at_least[1]) + 2**29 + 1) // 2
        counts = np.where(pivots + 1 <= start, outside[1], outside[0]).astype(np.uint32)
        assert end > start
        bracket, *_ = narrow(bracket, jnp.asarray(pivots), (counts & 0, counts), k)
        pivots = guess(bracket, k) if int(bracket.misses) < max_misses else even(bracket)
        assert int(bracket.passes) <= max_misses + 11


@pytest.mark.slow
def test_a_search_over_more_than_2_to_32_weights_finds_the_key():
    # Three leaves of a thousand distinct keys, each of which stands for 2**21 equal weights.
    keys = np.sort(np.random.default_rng(0).integers(-(2**30), 2**30, (3, 1000)).astype(np.int32))
    _, low, high, _ = key_range(np.dtype(np.int32))

    def count(pivots):
        above = [1000 - jnp.searchsorted(row, pivots[0], side="right") for row in jnp.asarray(keys)]
        return [jnp.stack(above)[:, None].astype(jnp.int32) * 2**21]

    def above(pivots):
        return portable.SliceBrackets((3,), together=True).totals(
            key_search.sum_rows(count(pivots))
        )

    @jax.jit
    def both(k):
        words = tuple(jnp.asarray(word).reshape(1) for word in k)
        all_keys, lowest = key_range(np.dtype(np.int32)), jnp.array([low], jnp.int32)
        fixed = portable.find_by_digits(above, words, lowest, all_keys)
        return fixed[0], *find_key(count, low, high, [jnp.full((3, 1), 1000 * 2**21, jnp.int32)], k)

    for place in (1, 700, 2_100, 2_999):  # the last of them beyond 2**32
        fixed, guessed, passes = both(exact_counts.split(place * 2**21 + 7))
        assert int(fixed) == int(guessed) == np.sort(keys.ravel())[::-1][place]
        assert int(passes) <= 13


@pytest.mark.parametrize("bits", [1, 4, 13, 16, 31])
def test_the_portable_search_takes_a_pass_for_every_four_bits(bits):
    # The keys -2**bits to -1; as pivots are no higher than the dtype holds, no count is wrong.
    keys = np.unique(np.random.default_rng(0).integers(-(2**bits) + 1, 0, 1000))
    asked = []

    def above(pivots):
        asked.append(np.asarray(pivots, np.int64))
        counts = np.sum(keys > asked[-1][..., None], axis=-1)
        return jnp.zeros(counts.shape, jnp.uint32), jnp.asarray(counts, jnp.uint32)

    for k in {1, len(keys) // 3 + 1, len(keys)}:
        asked.clear()
        words = jnp.zeros(1, jnp.uint32), jnp.full(1, k, jnp.uint32)
        with jax.disable_jit():
            lowest = jnp.full(1, -(2**bits), jnp.int32)
            all_keys = KeyRange(np.dtype(np.int32), -(2**bits), -1)
            key = int(portable.find_by_digits(above, words, lowest, all_keys)[0])
        assert np.sum(keys > key) <= k <= np.sum(keys >= key)
        assert len(asked) <= -(-bits // 4)
        assert all(pivots.min() >= -(2**bits) and np.all(np.diff(pivots) > 0) for pivots in asked)


def test_even_pivots_cut_a_bracket_into_equal_eighths():
    # Seven pivots leave eight parts; the keys above the last pivot are the eighth.
    widths = np.array([*range(40), 1000, 2**31 - 1, 2**32 - 1], np.uint64)
    low = np.where(widths < 2**31, -7, -(2**31)).astype(np.int32)
    high = (low.astype(np.int64) + widths.astype(np.int64)).astype(np.int32)
    no_keys = jnp.zeros(len(low), jnp.uint32), jnp.zeros(len(low), jnp.uint32)
    bracket = key_search.Bracket.begin(jnp.asarray(low), jnp.asarray(high), no_keys)
    pivots = np.asarray(jax.jit(jax.vmap(key_search.even_pivots))(bracket), np.int64)
    ends = np.column_stack([low.astype(np.int64) - 1, pivots, high])
    parts, num_keys = np.diff(ends, axis=1), widths.astype(np.int64) + 1
    assert parts.shape[1] == 8
    assert np.all(parts >= 0)
    np.testing.assert_array_equal(parts.max(1), -(-num_keys // 8))
    assert np.all(parts.max(1) - parts.min(1) <= 1)


@pytest.mark.parametrize("keys", [np.arange(-600, 401) ** 3, np.arange(1001) // 70 * 2**20])
def test_thresholds_on_a_mesh_are_keys_of_rank_k_in_few_passes(keys):
    keys, passes = np.array(keys, np.int32), []
    all_keys = KeyRange(np.dtype(np.int32), -(2**30), 2**30 - 1)
    ks = np.array([0, 1, 2, 500, 1000, 1001], np.uint32)

    def count(pivots):
        passes.append(pivots)
        return np.sum(keys > pivots[..., None], axis=-1).astype(np.uint32)

    def above(pivots):
        shape = jax.ShapeDtypeStruct(pivots.shape, jnp.uint32)
        counts = jax.pure_callback(count, shape, pivots)
        return counts & 0, counts

    @jax.jit
    def find(k):
        lowest = jnp.full(len(ks), all_keys.low, jnp.int32)
        return key_search.find_by_guesses(above, (k & 0, k), lowest, all_keys)

    key = np.asarray(find(ks))
    assert key[0] >= keys.max()  # k = 0 keeps none
    num_above = np.sum(keys > key[1:, None], axis=1)
    at_least = np.sum(keys >= key[1:, None], axis=1)
    assert np.all((num_above <= ks[1:]) & (ks[1:] <= at_least))
    assert len(passes) <= 2 + 11


@pytest.mark.parametrize("width", [4, 5], ids=["no padding", "padding"])
def test_samples_are_every_stride_th_entry_of_each_segment(width):
    scores = np.random.default_rng(0).permutation(36).reshape(3, 12).astype(np.int32)
    part = rows.cut_rows([Ranked.wrap(scores, batch_axes=1)], 3, width)
    for stride in (1, 5):
        expected = scores[:, ::stride].ravel()
        np.testing.assert_array_equal(rows.sample_every([part], stride), expected)
