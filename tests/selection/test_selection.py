"""Exact selection, against stable argsorts in numpy and numbers worked by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sparsity import selection
from tests.helpers import ON_CPU, counted_programs
from tests.selection_oracle import any_bits, best, ranks

# ------------------------------------------------------------------ topk_mask
# test_keys.py covers the order of every dtype: here, each way to find the k best.
_SLOW = ["float8_e8m0fnu", "float4_e2m1fn", "uint32", "int4", "bool", "float64", "uint64"]


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(x, marks=pytest.mark.slow) for x in _SLOW)]
)
def test_keeps_exactly_the_k_best(dtype, every_search):
    with jax.enable_x64("64" in dtype):
        scores = any_bits(dtype, 300)
        for k in (0, 1, 60, 150, 299, 300):
            np.testing.assert_array_equal(selection.topk_mask(scores, k), best(scores, k))


@pytest.mark.slow
def test_where_limits_the_choice_whatever_the_other_scores_are(every_search):
    scores = any_bits("float32", 300)
    where = (np.random.default_rng(1).random(300) < 0.4).astype(np.uint8)
    for k in (0, 1, 60, int(where.sum()), 300):
        mask = selection.topk_mask(scores, k, where=where)
        np.testing.assert_array_equal(mask, best(scores, k, where))
    np.testing.assert_array_equal(selection.topk_mask(scores, 300, where=where != 0), where)


@pytest.mark.slow
@given(
    scores=st.lists(st.floats(width=32), min_size=1, max_size=40),
    fraction=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_any_float32_values_are_ordered_exactly(every_search, scores, fraction):
    scores = np.resize(np.array(scores, np.float32), 40)  # one shape: compiled once
    k = round(fraction * 40)
    np.testing.assert_array_equal(selection.topk_mask(scores, k), best(scores, k))


@pytest.mark.slow
def test_ties_go_to_the_lowest_index_and_nan_ranks_last(every_search):
    tiny = np.float32(1e-45)
    scores = jnp.array([0.0, np.nan, -0.0, tiny, -tiny, -np.inf, np.nan, np.inf])
    for k, kept in enumerate([[], [7], [3, 7], [0, 3, 7], [0, 2, 3, 7], [0, 2, 3, 4, 7]]):
        assert np.flatnonzero(selection.topk_mask(scores, k)).tolist() == kept
    assert np.flatnonzero(selection.topk_mask(scores, 7)).tolist() == [0, 1, 2, 3, 4, 5, 7]


@pytest.mark.slow
def test_empty_and_scalar_scores(every_search):
    assert selection.topk_mask(jnp.zeros((0, 3)), 0).shape == (0, 3)
    assert selection.topk_mask(jnp.zeros((2, 0)), 0, batch_axes=1).shape == (2, 0)
    assert selection.topk_mask(jnp.float32(3.0), 1) == 1
    assert selection.topk_mask(jnp.float32(3.0), 0) == 0
    assert selection.topk_mask(2.0, 1, where=0) == 0


@pytest.mark.slow
def test_mask_is_uint8_of_the_same_shape(every_search):
    mask = selection.topk_mask(np.arange(24.0).reshape(2, 3, 4), 5)
    assert (mask.shape, mask.dtype) == ((2, 3, 4), jnp.uint8)


def test_concrete_k_out_of_range_is_refused():
    for k in (-1, 5, np.int64(7), jnp.int32(-2), [1, 5]):
        with pytest.raises(ValueError, match="k must be in"):
            selection.topk_mask(jnp.arange(4.0), k)


@pytest.mark.slow
def test_traced_k_is_clamped(every_search):
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
    with pytest.raises(ValueError, match="batch_axes must be at most 1, got batch_axes = 2"):
        selection.topk_mask(jnp.ones(3), 1, batch_axes=2)
    for k in (np.ones(2, int), np.ones((2, 3), int), jnp.ones((3, 1), int)):
        for topk in (
            selection.topk_mask,
            jax.jit(selection.topk_mask, static_argnames="batch_axes"),
        ):
            with pytest.raises(
                ValueError, match=r"k must broadcast against \(3,\), got k.shape = "
            ):
                topk(jnp.ones((3, 4)), k, batch_axes=1)


@pytest.mark.slow
def test_batch_axes_select_in_every_slice(every_search):
    scores = np.round(np.random.default_rng(0).normal(size=(3, 2, 5, 4)), 1)
    mask = selection.topk_mask(scores.astype(np.float32), np.array([7, 20]), batch_axes=2)
    for i, j in np.ndindex(3, 2):
        np.testing.assert_array_equal(mask[i, j], best(scores[i, j], (7, 20)[j]))


@pytest.mark.slow
def test_vmap_and_scan_give_what_a_loop_gives(every_search):
    scores = np.round(np.random.default_rng(0).normal(size=(4, 6, 10)), 1).astype(np.float32)
    where = (np.random.default_rng(1).random(scores.shape) < 0.7).astype(np.uint8)
    k = np.array([0, 7, 30, 60], np.int32)
    expected = np.stack([best(*x) for x in zip(scores, k, where, strict=True)])

    def masks(x, k, w):
        return selection.topk_mask(x, k, where=w)

    pairs = [x.reshape(2, 2, *x.shape[1:]) for x in (scores, k, where)]
    _, scanned = jax.lax.scan(lambda _, pair: (None, jax.vmap(masks)(*pair)), None, pairs)
    np.testing.assert_array_equal(scanned.reshape(expected.shape), expected)
    shared = jax.vmap(lambda k: selection.topk_mask(scores[0], k))(k)
    np.testing.assert_array_equal(shared, np.stack([best(scores[0], j) for j in k]))


@ON_CPU
def test_eager_calls_compile_nothing():
    scores, ks = jnp.arange(37.0), (1, 2, np.int32(4), jnp.int32(5))
    with counted_programs() as count:
        for k in ks:
            selection.topk_mask(scores, k)
    assert count == [0]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("kind", ["normal", "ties", "heavy ties", "nan", "sorted"])
def test_large_leaves_of_numpy_keep_the_k_best(kind, share):
    draw = np.random.default_rng(0)
    scores = draw.normal(size=(300, 100)).astype(np.float32)
    if kind == "ties":
        scores = np.round(scores, 1)
    elif kind == "heavy ties":
        scores = np.where(scores < 1, 0, scores)
    elif kind == "nan":
        scores[draw.random(scores.shape) < 0.4] = np.nan
    elif kind == "sorted":
        scores = np.sort(scores.ravel()).reshape(scores.shape)
    where = (draw.random(scores.shape) < 0.5).astype(np.uint8)
    k = round(share * scores.size)
    np.testing.assert_array_equal(selection.topk_mask(jnp.asarray(scores), k), best(scores, k))
    masked = selection.topk_mask(jnp.asarray(scores), k, where=jnp.asarray(where))
    np.testing.assert_array_equal(masked, best(scores, k, where))
    halves = {"a": jnp.asarray(scores[:100]), "b": jnp.asarray(scores[100:])}
    joined = np.concatenate([*selection.global_topk_mask(halves, k).values()])
    np.testing.assert_array_equal(joined, best(scores, k))


# ------------------------------------------------------------------ global_topk_mask
@pytest.mark.slow
def test_one_threshold_for_all_leaves_with_ties_in_tree_order(every_search):
    tree = {"a": jnp.array([3, 1, 3]), "b": [jnp.array([[3, 2]]), None, jnp.int32(3)]}
    for k, kept in [(0, [[0, 0, 0], [[0, 0]], 0]), (2, [[1, 0, 1], [[0, 0]], 0])]:
        mask = selection.global_topk_mask(tree, k)
        assert jax.tree.structure(mask) == jax.tree.structure(tree)
        assert [x.tolist() for x in jax.tree.leaves(mask)] == kept
    mask = selection.global_topk_mask(tree, 5)
    assert [x.tolist() for x in jax.tree.leaves(mask)] == [[1, 0, 1], [[1, 1]], 1]


@pytest.mark.slow
def test_a_tree_is_masked_like_its_concatenation(every_search):
    rng = np.random.default_rng(0)
    shapes = [(5,), (300, 230), (0, 3), (), (17, 3), (70_000,), (2, 2)]  # some are merged
    tree = [np.round(rng.normal(size=s), 1).astype(np.float32) for s in shapes]
    joined = np.concatenate([x.ravel() for x in tree])
    for k in (0, 3, 30_000, 80_000, joined.size - 2, joined.size):
        masks = selection.global_topk_mask(tree, k)
        assert [x.shape for x in masks] == shapes
        np.testing.assert_array_equal(np.concatenate([x.ravel() for x in masks]), best(joined, k))


@pytest.mark.slow
def test_global_k_may_be_traced_and_is_clamped_then(every_search):
    tree = [jnp.array([4.0, 1.0]), jnp.array([3.0])]
    for k in (2, np.int64(2)):
        assert [x.tolist() for x in selection.global_topk_mask(tree, k)] == [[1, 0], [1]]
    traced = jax.jit(selection.global_topk_mask)
    assert [x.tolist() for x in traced(tree, 2)] == [[1, 0], [1]]
    assert [x.tolist() for x in traced(tree, -1)] == [[0, 0], [0]]
    assert [x.tolist() for x in traced(tree, 2**31 - 1)] == [[1, 1], [1]]
    with pytest.raises(ValueError, match="k must be in"):
        selection.global_topk_mask(tree, 2**32)


def test_global_refuses_mixed_dtypes_and_accepts_no_leaves(every_search):
    with pytest.raises(ValueError, match="float32, int32"):
        selection.global_topk_mask([jnp.ones(2), jnp.ones(2, jnp.int32)], 1)
    assert selection.global_topk_mask({"a": None}, 0) == {"a": None}
    assert selection.global_topk_mask([jnp.zeros((0, 2))], 0)[0].shape == (0, 2)


# ------------------------------------------------------------------ nm_mask
def nm_oracle(scores, n, m, axis, keep=None):
    moved = np.moveaxis(np.asarray(scores), axis, -1)
    rank = ranks(moved).reshape(-1, m)
    if keep is not None:
        rank = rank + 10**6 * (np.moveaxis(keep, axis, -1).reshape(-1, m) != 0)
    mask = np.zeros(rank.shape, np.uint8)
    np.put_along_axis(mask, np.argsort(-rank, axis=1, kind="stable")[:, :n], 1, axis=1)
    return np.moveaxis(mask.reshape(moved.shape), -1, axis)


@pytest.mark.slow
@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("column", range(6))
def test_nm_keeps_the_n_best_of_every_m(row, column):
    """Each pair of a dtype, of groups and of an axis is in one of the cases."""
    dtype = ("float32", "bfloat16", "uint8")[row]
    n, m = ((2, 4), (1, 4), (4, 8), (0, 3), (3, 3), (5, 16))[column]
    axis = (-1, -2, 1)[(row + column) % 3]
    scores = any_bits(dtype, 2 * 48 * 48).reshape(2, 48, 48)
    mask = selection.nm_mask(scores, n, m, axis=axis)
    np.testing.assert_array_equal(mask, nm_oracle(scores, n, m, axis))


@pytest.mark.slow
@pytest.mark.parametrize("row", range(5))
@pytest.mark.parametrize("column", range(4))
def test_nm_keeps_n_of_a_shorter_last_group_or_all_it_has(row, column):
    """Each dtype and each kind of groups meets entries to keep, and none."""
    dtype = ("float32", "bfloat16", "float8_e4m3fn", "uint8", "bool")[row]
    n, m, size = ((2, 4, 10), (1, 4, 7), (3, 4, 5), (2, 8, 3))[column]
    scores = any_bits(dtype, 5 * size * 3).reshape(5, size, 3)
    keep = np.random.default_rng(0).integers(0, 2, scores.shape) if (row + column) % 2 else None
    groups = [slice(start, min(start + m, size)) for start in range(0, size, m)]
    expected = [
        nm_oracle(scores[:, g], min(n, g.stop - g.start), g.stop - g.start, 1,
                  None if keep is None else keep[:, g])
        for g in groups
    ]  # fmt: skip
    mask = selection.nm_mask(scores, n, m, axis=1, keep=keep)
    np.testing.assert_array_equal(mask, np.concatenate(expected, axis=1))


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
    for n, m, axis in [(5, 4, -1), (-1, 4, -1), (2, 4, 2), (0, 0, -1)]:
        with pytest.raises(ValueError, match="must"):
            selection.nm_mask(jnp.ones((6, 8)), n, m, axis=axis)
    assert selection.nm_mask(jnp.ones((0, 8)), 2, 4).shape == (0, 8)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("n", (1.5, math.nan, None, True, "2", np.array([1, 2]))),
        ("m", (None, 4.0, "4", True)),
        ("axis", (None, 0.0, "0", True)),
        ("keep", ("x", [1, 0])),
    ],
)
def test_nm_refuses_wrong_values_by_the_name_of_their_argument(name, wrong):
    for value in wrong:
        arguments = {"n": 1, "m": 4, name: value}
        with pytest.raises(ValueError, match=f"^{name} must"):
            selection.nm_mask(jnp.ones(8), **arguments)


def test_nm_takes_groups_larger_than_the_axis_and_masks_that_are_lists():
    scores = jnp.array([1.0, 3.0, 2.0])
    assert selection.nm_mask(scores, 2, 2**40).tolist() == [0, 1, 1]
    assert selection.nm_mask(scores, 2**40, 2**40).tolist() == [1, 1, 1]
    assert selection.nm_mask(scores, 1, 3, keep=[0, 0, 1]).tolist() == [0, 0, 1]


# ------------------------------------------------------------------ num_kept
@pytest.mark.slow
def test_num_kept_of_every_slice_is_a_k_of_every_slice(every_search):
    rng = np.random.default_rng(0)
    scores = np.round(rng.normal(size=(3, 2, 20)), 1).astype(np.float32)
    where = (rng.random(scores.shape) < 0.6).astype(np.uint8)

    def masks(scores, where, sparsity):
        kept = selection.num_kept(jnp.sum(where, axis=2, dtype=jnp.int32), sparsity)
        return selection.topk_mask(scores, kept, where=where, batch_axes=2)

    for sparsity in (0.3, 1.0):
        expected = np.zeros_like(where)
        for i in np.ndindex(3, 2):
            kept = selection.num_kept(int(where[i].sum()), sparsity)
            expected[i] = best(scores[i], kept, where[i])
        np.testing.assert_array_equal(masks(scores, where, sparsity), expected)
        np.testing.assert_array_equal(jax.jit(masks)(scores, where, sparsity), expected)


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


@pytest.mark.slow
def test_hash_scores_follow_the_flat_index_and_take_traced_words():
    flat = selection.hash_scores((24,), 5, 9)
    np.testing.assert_array_equal(selection.hash_scores((2, 3, 4), 5, 9).ravel(), flat)
    traced = jax.jit(lambda seed, step: selection.hash_scores((24,), seed, step))
    np.testing.assert_array_equal(traced(jnp.uint32(5), jnp.int32(9)), flat)
    negative = selection.hash_scores((24,), -1)
    np.testing.assert_array_equal(negative, selection.hash_scores((24,), 2**32 - 1))
    assert selection.hash_scores((), 1).shape == ()
    assert selection.hash_scores((0, 2), 1).shape == (0, 2)


# ------------------------------------------------------------------ slices along the last axis
@pytest.mark.parametrize(
    ("dtype", "shape", "batch_axes"),
    [
        ("float32", (40, 9), 0),
        pytest.param("bfloat16", (2, 3, 20, 300), 1, marks=pytest.mark.slow),
        pytest.param("int32", (400, 60), 0, marks=pytest.mark.slow),
    ],
)
def test_columns_keep_their_k_best(dtype, shape, batch_axes, every_search):
    rng = np.random.default_rng(3)
    some = any_bits(dtype, 16)[rng.integers(0, 16, shape)]  # ties, NaN and both zeros
    where = (rng.random(shape) < 0.6).astype(np.uint8)
    rows = [np.moveaxis(x, -1, batch_axes) for x in (some, where)]
    rows = [x.reshape(*x.shape[: batch_axes + 1], -1) for x in rows]
    k = rng.integers(0, rows[0].shape[-1] + 1, rows[0].shape[:-1])
    for limit in (None, where):
        mask = selection.topk_mask(some, k, where=limit, batch_axes=batch_axes, last_axes=1)
        mask_rows = np.moveaxis(np.asarray(mask), -1, batch_axes).reshape(rows[0].shape)
        for at in np.ndindex(k.shape):
            allowed = None if limit is None else rows[1][at]
            np.testing.assert_array_equal(mask_rows[at], best(rows[0][at], k[at], allowed))


def test_columns_of_booleans_keep_their_k_best(every_search):
    some = np.random.default_rng(3).random((40, 9)) < 0.5
    mask = np.asarray(selection.topk_mask(some, 15, last_axes=1))
    for column, kept in zip(some.T, mask.T, strict=True):
        np.testing.assert_array_equal(kept, best(column, 15))


def test_two_last_axes_index_slices():
    some = np.random.default_rng(3).integers(0, 9, (20, 3, 4))  # with ties
    mask = np.asarray(selection.topk_mask(some, 5, last_axes=2))
    for i, j in np.ndindex(3, 4):
        np.testing.assert_array_equal(mask[:, i, j], best(some[:, i, j], 5))


def test_last_axes_that_are_none_are_an_error():
    with pytest.raises(ValueError, match="last_axes must be at most 1, got last_axes = 2"):
        selection.topk_mask(jnp.ones((2, 3)), 1, batch_axes=1, last_axes=2)


@pytest.mark.parametrize("scores", [None, "text", np.array(["text"]), jax.random.key(0), {}])
def test_scores_that_are_no_numbers_are_refused(scores):
    with pytest.raises(ValueError, match="scores must be an array of real numbers"):
        selection.topk_mask(scores, 0)


def test_a_tree_of_eligible_entries_is_checked_by_path():
    tree = {"a": jnp.ones(4), "b": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"where at 'a' must have shape \(4,\)"):
        selection.global_topk_mask(tree, 2, where={"a": jnp.ones(3)})
    with pytest.raises(ValueError, match="where at 'b' must be an array of real numbers"):
        selection.global_topk_mask(tree, 2, where={"b": "all"})
    with pytest.raises(ValueError, match="The scores have no leaf at 'c', which the masks of wh"):
        selection.global_topk_mask(tree, 2, where={"c": jnp.ones(4)})
    with pytest.raises(ValueError, match=r"no leaf at 'a/0', .* Give an array in place of a list"):
        selection.global_topk_mask(tree, 3, where={"a": [1, 0, 1, 1], "b": None})
    masks = selection.global_topk_mask(tree, 3, where={"a": jnp.array([1, 0, 1, 1])})
    assert masks["a"].tolist() == [1, 0, 1, 1]


def test_eligible_entries_of_some_leaves_only_compete_with_all_of_the_others(every_search):
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 9, (2, 30, 20))  # with ties
    where = rng.integers(0, 2, (30, 20))
    masks = selection.global_topk_mask({"a": a, "b": b}, 700, where={"a": where})
    allowed = np.concatenate([where.ravel(), np.ones(600, int)])
    kept = np.concatenate([masks["a"].ravel(), masks["b"].ravel()])
    np.testing.assert_array_equal(kept, best(np.concatenate([a, b]).ravel(), 700, allowed))


@pytest.mark.parametrize("n", ["a", None, 10.5, 1j])
def test_a_number_of_weights_is_an_integer(n):
    with pytest.raises(ValueError, match="n must be an integer in"):
        selection.num_kept(n, 0.5)


@pytest.mark.parametrize("sparsity", ["a", 1j, None])
def test_a_fraction_to_remove_is_a_number(sparsity):
    with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\]"):
        selection.num_kept(10, sparsity)


def test_64_bit_scores_outside_of_x64_are_selected_eagerly_and_refused_in_a_program():
    with jax.enable_x64(True):
        scores = jnp.asarray(np.array([-3, 5, 1, -1], np.int64))
    np.testing.assert_array_equal(selection.topk_mask(scores, 2), [0, 1, 1, 0])
    with pytest.raises(ValueError, match="Cannot rank int64 scores in a compiled program"):
        jax.jit(lambda x: selection.topk_mask(x, 2))(scores)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_stacks_without_entries_have_empty_masks_in_a_program(shape):
    select = jax.jit(lambda x: selection.topk_mask(x, 0, batch_axes=1))
    assert select(jnp.zeros(shape)).shape == shape
    both = jax.jit(lambda x, y: selection.global_topk_mask([x, y], 3))
    assert int(both(jnp.zeros(shape), jnp.arange(9.0))[1].sum()) == 3
