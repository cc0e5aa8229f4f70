"""Exact selection, against stable argsorts in numpy and numbers worked by hand."""

import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsity import selection

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
    "float8_e8m0fnu",
    "float4_e2m1fn",
]
INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32", "int4", "uint4", "bool"]
WIDE = ["float64", "int64", "uint64"]


def ranks(scores):
    """Integers in the order of the scores: exact, NaN lowest, -0.0 equal to 0.0."""
    scores = np.asarray(scores).ravel()
    if jnp.issubdtype(scores.dtype, jnp.floating):
        with np.errstate(invalid="ignore"):
            scores = scores.astype(np.float64)
    elif scores.dtype.kind not in "iu":
        scores = scores.astype(np.int32)
    nan = scores != scores
    _, rank = np.unique(np.where(nan, scores.dtype.type(0), scores), return_inverse=True)
    return np.where(nan, -1, rank)


def best(scores, k, where=None):
    """Mask of the k highest by a stable sort."""
    rank = ranks(scores)
    if where is not None:
        rank = np.where(np.asarray(where).ravel() != 0, rank, -2)
        k = min(k, int(np.sum(rank > -2)))
    mask = np.zeros(rank.size, np.uint8)
    mask[np.argsort(-rank, kind="stable")[:k]] = 1
    return mask.reshape(np.shape(scores))


def any_bits(dtype, n, seed=0):
    """Scores of any bit patterns, with ties, both zeros and the extremes among them."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return rng.random(n) < 0.4
    if jnp.issubdtype(dtype, jnp.integer):
        lowest, highest = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        wide = np.int64 if lowest < 0 else np.uint64
        x = rng.integers(lowest, highest, n, endpoint=True, dtype=wide).astype(dtype)
        x[-1], x[0] = highest, lowest
    else:
        bits = rng.integers(0, 16 if dtype == jnp.float4_e2m1fn else 256, n * dtype.itemsize)
        x = bits.astype(np.uint8).view(dtype)
        x[1::7], x[2::7] = 0.0, -0.0
    x[::5] = x[0]
    return x


@functools.partial(jax.jit, static_argnames=("flat", "fixed"))
def select(scores, k, where=None, flat=True, fixed=False):
    """Mask and passes of one variant of the search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_use_flat", lambda x: flat)
        patch.setattr(selection, "_loops_wait_on_host", lambda: fixed)
        leaf = selection._Leaf(scores, where)
        masks, info = selection._select([leaf], (jnp.uint32(0), k.astype(jnp.uint32)))
    return masks[0], info.passes


# ------------------------------------------------------------------ topk_mask
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_keeps_exactly_the_k_best_of_every_dtype(dtype):
    scores = any_bits(dtype, 300)
    for k in (0, 1, 60, 150, 299, 300):
        np.testing.assert_array_equal(selection.topk_mask(scores, k), best(scores, k))


@pytest.mark.parametrize("dtype", WIDE)
def test_keeps_exactly_the_k_best_of_64_bit_dtypes(dtype):
    with jax.enable_x64(True):
        scores = any_bits(dtype, 300)
        for k in (0, 1, 60, 150, 299, 300):
            np.testing.assert_array_equal(selection.topk_mask(scores, k), best(scores, k))


@pytest.mark.parametrize("dtype", ["float32", "float8_e5m2", "int8", "uint32", "bool"])
def test_where_limits_the_choice_whatever_the_other_scores_are(dtype):
    scores = any_bits(dtype, 300)
    where = (np.random.default_rng(1).random(300) < 0.4).astype(np.uint8)
    for k in (0, 1, 60, int(where.sum()), 300):
        mask = selection.topk_mask(scores, k, where=where)
        np.testing.assert_array_equal(mask, best(scores, k, where))
    np.testing.assert_array_equal(selection.topk_mask(scores, 300, where=where != 0), where)


@pytest.mark.parametrize("fixed", [False, True], ids=["looking", "fixed"])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "natural"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
def test_flat_and_natural_looking_and_fixed_searches_agree(dtype, flat, fixed):
    scores = any_bits(dtype, 70_001 if flat else 70_000).reshape((-1,) if flat else (70, 1000))
    where = (np.random.default_rng(2).random(scores.shape) < 0.9).astype(np.uint8)
    for k in (1, 7_000, 50_000, scores.size):
        mask, _ = select(scores, jnp.int32(k), None, flat, fixed)
        np.testing.assert_array_equal(mask, best(scores, k))
    mask, _ = select(scores, jnp.int32(20_000), where, flat, fixed)
    np.testing.assert_array_equal(mask, best(scores, 20_000, where))


@given(
    scores=st.lists(st.floats(width=32), min_size=1, max_size=40),
    fraction=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_any_float32_values_are_ordered_exactly(scores, fraction):
    scores = np.resize(np.array(scores, np.float32), 40)  # one shape: compiled once
    k = round(fraction * 40)
    np.testing.assert_array_equal(selection.topk_mask(scores, k), best(scores, k))


def test_ties_go_to_the_lowest_index_and_nan_ranks_last():
    tiny = np.float32(1e-45)
    scores = jnp.array([0.0, np.nan, -0.0, tiny, -tiny, -np.inf, np.nan, np.inf])
    for k, kept in enumerate([[], [7], [3, 7], [0, 3, 7], [0, 2, 3, 7], [0, 2, 3, 4, 7]]):
        assert np.flatnonzero(selection.topk_mask(scores, k)).tolist() == kept
    assert np.flatnonzero(selection.topk_mask(scores, 7)).tolist() == [0, 1, 2, 3, 4, 5, 7]


def test_empty_and_scalar_scores():
    assert selection.topk_mask(jnp.zeros((0, 3)), 0).shape == (0, 3)
    assert selection.topk_mask(jnp.zeros((2, 0)), 0, batch_axes=1).shape == (2, 0)
    assert selection.topk_mask(jnp.float32(3.0), 1) == 1
    assert selection.topk_mask(jnp.float32(3.0), 0) == 0
    assert selection.topk_mask(2.0, 1, where=0) == 0


def test_mask_is_uint8_of_the_same_shape():
    mask = selection.topk_mask(np.arange(24.0).reshape(2, 3, 4), 5)
    assert (mask.shape, mask.dtype) == ((2, 3, 4), jnp.uint8)


def test_concrete_k_out_of_range_is_refused():
    for k in (-1, 5, np.int64(7), jnp.int32(-2), [1, 5]):
        with pytest.raises(ValueError, match="k must be in"):
            selection.topk_mask(jnp.arange(4.0), k)


def test_traced_k_is_clamped():
    mask = jax.jit(selection.topk_mask)
    assert int(mask(jnp.arange(4.0), -3).sum()) == 0
    assert int(mask(jnp.arange(4.0), 9).sum()) == 4
    np.testing.assert_array_equal(mask(jnp.arange(4.0), 1), [0, 0, 0, 1])


def test_complex_scores_are_refused_with_advice():
    with pytest.raises(ValueError, match=r"jnp\.abs"):
        selection.topk_mask(jnp.ones(3, jnp.complex64), 1)
    with pytest.raises(ValueError, match=r"jnp\.abs"):
        selection.nm_mask(jnp.ones(4, jnp.complex64), 2, 4)


def test_wrong_shapes_and_batch_axes_are_refused():
    with pytest.raises(ValueError, match="where must have shape"):
        selection.topk_mask(jnp.ones(3), 1, where=jnp.ones(4))
    with pytest.raises(ValueError, match="batch_axes must be in"):
        selection.topk_mask(jnp.ones(3), 1, batch_axes=2)
    with pytest.raises(ValueError, match="broadcast"):
        selection.topk_mask(jnp.ones((3, 4)), np.ones(2, int), batch_axes=1)


def test_batch_axes_select_in_every_slice():
    scores = np.round(np.random.default_rng(0).normal(size=(3, 2, 5, 4)), 1)
    for k in (7, np.array([[1, 20], [0, 3], [9, 10]])):
        mask = selection.topk_mask(scores.astype(np.float32), k, batch_axes=2)
        for i, j in np.ndindex(3, 2):
            kept = int(np.broadcast_to(k, (3, 2))[i, j])
            np.testing.assert_array_equal(mask[i, j], best(scores[i, j], kept))


def test_vmap_and_scan_give_what_a_loop_gives():
    scores = np.round(np.random.default_rng(0).normal(size=(4, 6, 10)), 1).astype(np.float32)
    where = (np.random.default_rng(1).random(scores.shape) < 0.7).astype(np.uint8)
    k = np.array([0, 7, 30, 60], np.int32)
    expected = np.stack([best(*x) for x in zip(scores, k, where, strict=True)])

    def masks(x, k, w):
        return selection.topk_mask(x, k, where=w)

    np.testing.assert_array_equal(jax.vmap(masks)(scores, k, where), expected)
    _, scanned = jax.lax.scan(lambda _, a: (None, masks(*a)), None, (scores, k, where))
    np.testing.assert_array_equal(scanned, expected)
    shared = jax.vmap(lambda k: selection.topk_mask(scores[0], k))(k)
    np.testing.assert_array_equal(shared, np.stack([best(scores[0], j) for j in k]))


def test_eager_calls_compile_once_for_all_k():
    scores = jnp.arange(37.0)
    selection.topk_mask(scores, 1)
    before = selection._topk_mask._cache_size()
    for k in (2, 3, np.int32(4), jnp.int32(5)):
        selection.topk_mask(scores, k)
    assert selection._topk_mask._cache_size() == before


# ------------------------------------------------------------------ passes
def hostile(n):
    """Float scores on which guesses fail, by name."""
    rng = np.random.default_rng(0)
    normal = np.abs(rng.normal(size=n))
    far = np.where(rng.random(n) < 0.5, 1e-20, 1e20) * (1 + 1e-3 * rng.random(n))
    doubly = np.floor(2.0 ** (rng.random(n) * 30.9)).astype(np.int32).view(np.float32)
    return {
        "normal": normal,
        "four fifths zeros": np.where(rng.random(n) < 0.8, 0, normal),
        "zeros, then a gap": np.where(normal < 1.28, 0, normal),
        "log-uniform": np.exp(rng.uniform(-85, 85, n)),
        "heavy ties": np.round(2 * normal) / 2,
        "bfloat16 grid": np.asarray(jnp.asarray(normal, jnp.bfloat16)),
        "two clusters": far,
        "powers of two": 2.0 ** -(np.arange(n) % 120).astype(float),
        "subnormals": rng.integers(0, 999, n).astype(np.int32).view(np.float32),
        "exponential keys": doubly,
        "negated exponential keys": -doubly,
        "constant": np.ones(n),
        "mostly nan": np.where(rng.random(n) < 0.7, np.nan, normal),
    }


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "natural"])
def test_float32_takes_at_most_24_passes_whatever_the_scores(flat):
    n = 65_600
    for name, scores in hostile(n).items():
        scores = np.asarray(scores, np.float32).reshape(-1, 100)
        nonzero = int(np.sum(scores > 0))
        ks = {1, n // 100, n // 5, n // 2, n - 10, nonzero - nonzero // 20, nonzero - 5, nonzero}
        for k in ks & set(range(1, n)):
            mask, passes = select(scores, jnp.int32(k), None, flat)
            assert int(passes) <= 24, (name, k)
            np.testing.assert_array_equal(mask, best(scores, k), err_msg=f"{name}, {k}")


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "natural"])
def test_float64_takes_at_most_44_passes_whatever_the_scores(flat):
    n = 10_000
    with jax.enable_x64(True):
        for name, scores in hostile(n).items():
            scores = np.asarray(scores, np.float64).reshape(-1, 100)
            for k in (1, n // 5, n - 10):
                mask, passes = select(scores, jnp.int32(k), None, flat)
                assert int(passes) <= 44, (name, k)
                np.testing.assert_array_equal(mask, best(scores, k), err_msg=f"{name}, {k}")


def worst_counts(pivots, low, high):
    """Counts of a liar: between which pivots the k-th key lies, so that most keys stay."""
    edges = [low, *sorted({int(p) + 1 for p in pivots}), high + 1]
    return max(itertools.pairwise(edges), key=lambda e: e[1] - e[0])


@pytest.mark.parametrize("max_misses", [0, 2, 8])
def test_the_search_keeps_its_bound_against_an_adversary(max_misses):
    # The adversary answers every pass so that the largest part of the bracket remains.
    narrow = jax.jit(selection._narrow)
    even = jax.jit(functools.partial(selection._even_pivots, log2_parts=3))
    guess = jax.jit(functools.partial(selection._guessed_pivots, is_float=True))
    _, low, high = selection._order(np.dtype(np.float32))
    k = (jnp.uint32(0), jnp.uint32(2**29))
    bracket = selection._Bracket(
        jnp.int32(low), jnp.int32(high), jnp.array([2**30]), jnp.array([0]),
        jnp.float32(selection._SPREAD), jnp.int32(0), jnp.int32(0),
    )  # fmt: skip
    pivots = even(bracket)
    while int(bracket.low) < int(bracket.high):
        low, high = int(bracket.low), int(bracket.high)
        pivots = np.clip(np.asarray(pivots), low, high - 1)
        start, end = worst_counts(pivots, low, high)
        above = int(bracket.above[0])
        outside = (above + 2**29) // 2, (int(bracket.at_least[0]) + 2**29 + 1) // 2
        counts = np.where(pivots + 1 <= start, outside[1], outside[0]).astype(np.int32)
        assert end > start
        bracket = narrow(bracket, jnp.asarray(pivots), jnp.asarray(counts)[None], k)
        pivots = guess(bracket, k) if int(bracket.misses) < max_misses else even(bracket)
    assert int(bracket.passes) <= max_misses + 11


def test_fixed_search_takes_eight_passes_and_those_for_ties():
    scores = any_bits("float32", 4096)
    assert int(select(scores, jnp.int32(5), None, False, True)[1]) <= 8 + 3
    assert int(select(scores, jnp.int32(900), None, True, True)[1]) <= 8 + 1


@pytest.mark.parametrize("data", ["normal", "heavy ties"])
def test_temporaries_stay_below_a_twentieth_of_a_byte_a_weight(data):
    scores = jnp.asarray(hostile(10**6)[data], jnp.float32)
    k = (np.uint32(0), np.uint32(200_000))
    compiled = selection._topk_mask.lower(scores, k, None, 0).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 0.05 * scores.size


# ------------------------------------------------------------------ global_topk_mask
def test_one_threshold_for_all_leaves_with_ties_in_tree_order():
    tree = {"a": jnp.array([3, 1, 3]), "b": [jnp.array([[3, 2]]), None, jnp.int32(3)]}
    for k, kept in [(0, [[0, 0, 0], [[0, 0]], 0]), (2, [[1, 0, 1], [[0, 0]], 0])]:
        mask = selection.global_topk_mask(tree, k)
        assert jax.tree.structure(mask) == jax.tree.structure(tree)
        assert [x.tolist() for x in jax.tree.leaves(mask)] == kept
    mask = selection.global_topk_mask(tree, 5)
    assert [x.tolist() for x in jax.tree.leaves(mask)] == [[1, 0, 1], [[1, 1]], 1]


@pytest.mark.parametrize("fixed", [False, True], ids=["looking", "fixed"])
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "natural"])
def test_a_tree_is_masked_like_its_concatenation(monkeypatch, flat, fixed):
    monkeypatch.setattr(selection, "_use_flat", lambda x: flat)
    monkeypatch.setattr(selection, "_loops_wait_on_host", lambda: fixed)
    rng = np.random.default_rng(0)
    shapes = [(5,), (300, 230), (0, 3), (), (17, 3), (70_000,), (2, 2)]
    leaves = [np.round(rng.normal(size=s), 1).astype(np.float32) for s in shapes]
    joined = np.concatenate([x.ravel() for x in leaves])
    masks = jax.jit(lambda *a: selection._global_topk_masks.__wrapped__(*a))
    filled = [jnp.asarray(x) for x in leaves if x.size]
    for k in (0, 3, 30_000, 80_000, joined.size):
        found = np.concatenate([x.ravel() for x in masks(filled, selection._split(k))])
        np.testing.assert_array_equal(found, best(joined, k))


def test_global_k_may_be_two_words_traced_or_clamped():
    tree = [jnp.array([4.0, 1.0]), jnp.array([3.0])]
    two = (jnp.uint32(0), jnp.uint32(2))
    for k in (2, np.int64(2), two):
        assert [x.tolist() for x in selection.global_topk_mask(tree, k)] == [[1, 0], [1]]
    traced = jax.jit(selection.global_topk_mask)
    assert [x.tolist() for x in traced(tree, two)] == [[1, 0], [1]]
    assert [x.tolist() for x in traced(tree, -1)] == [[0, 0], [0]]
    assert [x.tolist() for x in traced(tree, (jnp.uint32(1), jnp.uint32(0)))] == [[1, 1], [1]]
    with pytest.raises(ValueError, match="k must be in"):
        selection.global_topk_mask(tree, (jnp.uint32(1), jnp.uint32(0)))


def test_global_refuses_mixed_dtypes_and_accepts_no_leaves():
    with pytest.raises(ValueError, match="float32, int32"):
        selection.global_topk_mask([jnp.ones(2), jnp.ones(2, jnp.int32)], 1)
    assert selection.global_topk_mask({"a": None}, 0) == {"a": None}
    assert selection.global_topk_mask([jnp.zeros((0, 2))], 0)[0].shape == (0, 2)


def test_totals_beyond_32_bits_are_exact():
    counts = np.array([2**31 - 1, 2**31 - 1, 2**31 - 5, 65_535, 65_536], np.int32)
    high, low = jax.jit(selection._total)(counts)
    assert (int(high) << 32) + int(low) == counts.astype(np.int64).sum()
    high, low = jax.jit(selection._totals_before)(counts)
    before = np.cumsum(counts.astype(np.int64)) - counts
    np.testing.assert_array_equal((np.asarray(high, np.int64) << 32) + np.asarray(low), before)


def test_a_search_over_more_than_2_to_32_weights_finds_the_key():
    # Three leaves of a thousand distinct keys, each of which stands for 2**21 equal weights.
    keys = np.sort(np.random.default_rng(0).integers(-(2**30), 2**30, (3, 1000)).astype(np.int32))
    _, low, high = selection._order(np.dtype(np.int32))

    def count(pivots):
        above = [1000 - jnp.searchsorted(row, pivots, side="right") for row in jnp.asarray(keys)]
        return jnp.stack(above).astype(jnp.int32) * 2**21

    @jax.jit
    def search(k):
        whole = jnp.full(3, 1000 * 2**21, jnp.int32)
        zero = jnp.int32(0)
        b = selection._Bracket(
            zero + low, zero + high, whole, whole * 0, jnp.float32(0.1), zero, zero
        )
        return selection._search(count, k, b, bits=32, max_misses=2)

    for place in (1, 700, 2_100, 2_999):  # the last of them beyond 2**32
        k = place * 2**21 + 7
        found = search((jnp.uint32(k >> 32), jnp.uint32(k % 2**32)))
        assert int(found.high) == np.sort(keys.ravel())[::-1][place]
        assert int(found.passes) <= 13


# ------------------------------------------------------------------ nm_mask
def nm_oracle(scores, n, m, axis, keep=None):
    moved = np.moveaxis(np.asarray(scores), axis, -1)
    rank = ranks(moved).reshape(-1, m)
    if keep is not None:
        rank = rank + 10**6 * (np.moveaxis(keep, axis, -1).reshape(-1, m) != 0)
    mask = np.zeros(rank.shape, np.uint8)
    np.put_along_axis(mask, np.argsort(-rank, axis=1, kind="stable")[:, :n], 1, axis=1)
    return np.moveaxis(mask.reshape(moved.shape), -1, axis)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (0, 3), (3, 3), (5, 16)])
def test_nm_keeps_the_n_best_of_every_m(dtype, n, m):
    scores = any_bits(dtype, 2 * 48 * 48).reshape(2, 48, 48)
    for axis in (-1, -2, 1):
        mask = selection.nm_mask(scores, n, m, axis=axis)
        np.testing.assert_array_equal(mask, nm_oracle(scores, n, m, axis))


def test_nm_entries_to_keep_outrank_the_others_of_their_group():
    scores = jnp.array([4.0, 3.0, 2.0, 1.0, 9.0, 8.0, 7.0, 6.0])
    keep = jnp.array([0, 0, 0, 1, 1, 1, 1, 0])
    assert selection.nm_mask(scores, 2, 4, keep=keep).tolist() == [1, 0, 0, 1, 1, 1, 0, 0]
    scores = any_bits("float32", 960).reshape(20, 48)
    keep = np.random.default_rng(0).integers(0, 2, (20, 48))
    mask = selection.nm_mask(scores, 3, 8, keep=keep)
    np.testing.assert_array_equal(mask, nm_oracle(scores, 3, 8, -1, keep))


def test_nm_takes_a_traced_n_and_works_under_vmap():
    scores = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    masks = jax.jit(lambda n: selection.nm_mask(scores, n, 4))
    for n in range(-1, 6):
        np.testing.assert_array_equal(masks(n), nm_oracle(scores, min(max(n, 0), 4), 4, -1))
    mapped = jax.vmap(lambda x: selection.nm_mask(x, 2, 4))(scores)
    np.testing.assert_array_equal(mapped, nm_oracle(scores, 2, 4, -1))


def test_nm_refuses_groups_that_do_not_fit():
    for n, m, axis in [(2, 3, -1), (5, 4, -1), (-1, 4, -1), (2, 4, 2), (0, 0, -1)]:
        with pytest.raises(ValueError, match="must"):
            selection.nm_mask(jnp.ones((6, 8)), n, m, axis=axis)
    assert selection.nm_mask(jnp.ones((0, 8)), 2, 4).shape == (0, 8)


# ------------------------------------------------------------------ num_kept
def kept_exactly(n, sparsity):
    exact = n * (1 - Fraction(float(np.float32(sparsity))))
    return min(n, max(1, round(exact)))


SPARSITIES = [0.0, 0.5, 0.25, 0.1, 0.9, 0.8, 1.0, 1e-9, 1e-45, 0.99999, 0.75, 1 - 2.0**-24]


def test_num_kept_rounds_half_to_even_and_keeps_one():
    assert [selection.num_kept(n, 0.5) for n in (0, 1, 2, 3, 5, 7)] == [0, 1, 1, 2, 2, 4]
    assert selection.num_kept(10, 1.0) == 1
    assert type(selection.num_kept(np.int32(10), np.float32(0.3))) is int


@pytest.mark.parametrize("n", [0, 1, 5, 1000, 2**24 + 1, 2**31 - 1, 2**31, 2**33 + 3, 2**40])
def test_num_kept_is_the_same_traced_and_concrete(n):
    traced = jax.jit(selection.num_kept, static_argnums=0)
    some = np.random.default_rng(n % 1000).random(20).astype(np.float32)
    for sparsity in [*SPARSITIES, *some]:
        k = traced(n, jnp.float32(sparsity))
        k = int(k) if n < 2**31 else (int(k[0]) << 32) + int(k[1])
        assert k == selection.num_kept(n, sparsity) == kept_exactly(n, sparsity)


@given(st.integers(0, 2**31 - 1), st.floats(0, 1, width=32))
@settings(max_examples=200, deadline=None)
def test_num_kept_of_a_traced_n_is_exact(n, sparsity):
    assert int(NUM_KEPT(jnp.uint32(n), sparsity)) == kept_exactly(n, sparsity)


NUM_KEPT = jax.jit(selection.num_kept)


def test_num_kept_refuses_concrete_and_clamps_traced_sparsities():
    for sparsity in (-0.1, 1.1, float("nan"), jnp.float32(2)):
        with pytest.raises(ValueError, match="sparsity must be in"):
            selection.num_kept(10, sparsity)
    assert [int(NUM_KEPT(10, s)) for s in (-1.0, 2.0, float("nan"))] == [10, 1, 10]
    with pytest.raises(ValueError, match="n must be in"):
        selection.num_kept(2**41, 0.5)


def test_num_kept_words_are_a_k_for_a_global_mask():
    with pytest.raises(ValueError, match="k must be in"):
        selection.global_topk_mask([jnp.ones(3)], selection.num_kept(2**32, jnp.float32(0)))


# ------------------------------------------------------------------ hash_scores
def test_hash_scores_are_uniform_in_every_byte():
    scores = np.asarray(selection.hash_scores((1 << 18,), 7, 3))
    assert scores.dtype == np.uint32
    for byte in range(4):
        counts = np.bincount(scores >> (8 * byte) & 255, minlength=256)
        chi_square = np.sum((counts - 1024) ** 2 / 1024)
        assert 255 - 5 * 22.6 < chi_square < 255 + 5 * 22.6  # five deviations
    assert np.unique(scores).size > 0.9999 * scores.size


def bits_that_differ(a, b):
    """Fraction of pairs that differ, for each of 32 bits."""
    return np.unpackbits((a ^ b).view(np.uint8).reshape(-1, 4), axis=1).mean(0)


def test_hash_scores_do_not_depend_on_neighbours_steps_seeds_or_leaves():
    shape = (1 << 16,)
    base = np.asarray(selection.hash_scores(shape, 0, 0, 0))
    others = [selection.hash_scores(shape, *words) for words in np.eye(3, dtype=int).tolist()]
    others += [np.roll(base, by) for by in (1, 2, 256)]
    others += [selection.hash_scores(shape, 0, 0), selection.hash_scores(shape, 2**31, 0, 0)]
    for other in others:
        differ = bits_that_differ(base, np.asarray(other))
        assert np.all(np.abs(differ - 0.5) < 5 * 0.5 / 2**8)  # five deviations


def test_hash_scores_do_not_shift_with_the_words():
    streams = [np.asarray(selection.hash_scores((4096,), 0, step)) for step in range(8)]
    assert np.unique(np.concatenate(streams)).size > 8 * 4096 - 5


def test_hash_scores_follow_the_flat_index_and_take_traced_words():
    flat = selection.hash_scores((24,), 5, 9)
    np.testing.assert_array_equal(selection.hash_scores((2, 3, 4), 5, 9).ravel(), flat)
    traced = jax.jit(lambda seed, step: selection.hash_scores((24,), seed, step))
    np.testing.assert_array_equal(traced(jnp.uint32(5), jnp.int32(9)), flat)
    negative = selection.hash_scores((24,), -1)
    np.testing.assert_array_equal(negative, selection.hash_scores((24,), 2**32 - 1))
    assert selection.hash_scores((), 1).shape == ()
    assert selection.hash_scores((0, 2), 1).shape == (0, 2)
