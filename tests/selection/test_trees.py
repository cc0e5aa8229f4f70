"""Many leaves in one search: each gets the mask that it would get by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity import selection
from sparsity.core.hashing import hash_scores
from sparsity.selection import Candidates, topk_masks
from sparsity.selection.search import select
from sparsity.selection.topk import count_kept
from tests import helpers
from tests.selection_oracle import best, best_first

pytestmark = pytest.mark.usefixtures("every_search")

# Padded to each of three sizes; whole rows; rows of another number; padded itself.
SHAPES = [(7,), (), (1, 64), (33, 31), (4096,), (90, 100), (128, 130), (20_011,), (300, 70)]
KINDS = ["normal", "ties", "zeros", "constant", "wild"]


def draw(rng, shape, kind):
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "ties":
        return np.round(x * 2) / 2
    if kind == "zeros":
        return np.where(rng.random(shape) < 0.9, np.float32(0) * np.sign(x), x)
    if kind == "constant":
        return np.full(shape, rng.choice([0.0, -0.0, 1.5, np.nan, np.inf, -np.inf]), np.float32)
    if kind == "wild":
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, -1e-42, 2e-45, 1], np.float32)
        return np.where(rng.random(shape) < 0.5, rng.choice(odd, shape), x)
    return x


def expected(scores, k, where=None):
    """By sorting: NaN last, ties by index."""
    flat = np.ravel(np.asarray(scores))
    order = best_first(flat) if where is None else best_first(flat, np.ravel(where))
    mask = np.zeros(flat.size, np.uint8)
    mask[order[: int(k)]] = 1
    return mask.reshape(np.shape(scores))


def join(ks):
    """k of every slice of all leaves."""
    return jnp.concatenate([jnp.ravel(jnp.asarray(k, jnp.int32)) for k in ks])


def random_ks(rng, sizes):
    return [
        int(np.clip(rng.choice([0, 1, n - 1, n, rng.integers(0, n + 1), n // 10]), 0, n))
        for n in sizes
    ]


@jax.jit
def select_masks(scores, where, ks):
    where = where or [None] * len(scores)
    pairs = zip(scores, where, strict=True)
    return topk_masks([Candidates(x, part) for x, part in pairs], join(ks))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
def test_every_leaf_gets_the_mask_that_sorting_gives(dtype, masked):
    """`test_selection.py` has all dtypes, for one leaf."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        scores = [draw(rng, s, rng.choice(KINDS)) for s in SHAPES]
        if dtype == "int32":
            low = np.iinfo(np.int32).min
            scores = [np.where(np.isfinite(x) & (x < 1.5), x, low).astype(np.int32) for x in scores]
        scores = [jnp.asarray(x).astype(dtype) for x in scores]
        where = [(rng.random(s) < 0.7).astype(np.uint8) for s in SHAPES] if masked else None
        sizes = [int(part.sum()) for part in where] if where else [x.size for x in scores]
        ks = random_ks(rng, sizes)
        actual = select_masks(scores, where, ks)
        for i, (x, mask) in enumerate(zip(scores, actual, strict=True)):
            part = where[i] if where else None
            error = f"seed {seed}, leaf {i}, k {ks[i]}"
            np.testing.assert_array_equal(mask, expected(x, ks[i], part), err_msg=error)


@pytest.mark.slow
def test_nan_of_a_leaf_without_a_mask_is_eligible_beside_leaves_with_one():
    scores = [jnp.full((40, 40), jnp.nan), jnp.arange(1600.0).reshape(40, 40)]
    where = [None, jnp.arange(1600).reshape(40, 40) % 2]
    masks = select_masks(scores, where, [1500, 800])
    assert [int(mask.sum()) for mask in masks] == [1500, 800]
    joined = jax.jit(lambda a, b, w: selection.global_topk_mask([a, b], 2300, where=[None, w]))
    assert [int(mask.sum()) for mask in joined(*scores, where[1])] == [1500, 800]


@pytest.mark.slow
def test_slices_of_stacked_leaves_are_ranked_by_themselves():
    rng = np.random.default_rng(2)
    shapes = [(3, 130, 128), (200, 9, 11), (2, 2, 5), (4, 3, 20_011)]  # large; short; small; padded
    axes = [1, 1, 2, 2]
    scores = [np.round(rng.standard_normal(s), 1).astype(np.float32) for s in shapes]
    pairs = zip(scores, axes, strict=True)
    all_candidates = [Candidates(jnp.asarray(x), None, n) for x, n in pairs]
    ks = [rng.integers(0, np.prod(s[n:]), s[:n]) for s, n in zip(shapes, axes, strict=True)]
    actual = jax.jit(lambda: topk_masks(all_candidates, join(ks)))()
    for x, n, k, mask in zip(scores, axes, ks, actual, strict=True):
        slices = x.reshape(-1, *x.shape[n:])
        each = [expected(part, count) for part, count in zip(slices, k.ravel(), strict=True)]
        np.testing.assert_array_equal(mask, np.reshape(each, x.shape))


@pytest.mark.slow
def test_a_mapped_search_gives_the_masks_of_each():
    rng = np.random.default_rng(4)
    scores = [jnp.asarray(rng.standard_normal((3, *s)), jnp.bfloat16) for s in SHAPES[::2]]
    ks = jnp.asarray([[x[0].size // (i + 2) for x in scores] for i in range(3)])

    def select_one(scores, ks):
        return topk_masks([Candidates(x) for x in scores], join(ks))

    mapped = jax.jit(jax.vmap(select_one))(scores, ks)
    for i in range(3):
        alone = jax.jit(select_one)([x[i] for x in scores], ks[i])
        jax.tree.map(np.testing.assert_array_equal, [x[i] for x in mapped], alone)
    shared = jax.jit(jax.vmap(select_one, in_axes=(None, 0)))([x[0] for x in scores], ks)
    jax.tree.map(np.testing.assert_array_equal, [x[0] for x in shared], [x[0] for x in mapped])


@pytest.mark.slow
def test_a_search_may_stand_in_a_function_that_is_differentiated():
    x = jnp.linspace(-1, 1, 20_000)

    def loss(x):
        masks = topk_masks([Candidates(jnp.abs(y)) for y in (x, x + 1)], join([9, 9]))
        return jnp.sum(x**2 * masks[0])

    grad = jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(grad, 2 * x * expected(np.abs(x), 9))


@pytest.mark.slow
def test_hashes_are_searched_like_any_scores():
    scores = hash_scores((128, 200), 7)
    mask = selection.topk_mask(scores, 1000)
    np.testing.assert_array_equal(mask, expected(scores, 1000))


@pytest.mark.slow
def test_a_number_to_keep_may_depend_on_the_number_of_eligible_entries():
    rng = np.random.default_rng(0)
    shapes = [(3, 40), (1, 2000)]
    scores = [np.round(rng.normal(size=x), 1).astype(np.float32) for x in shapes]
    where = [(rng.random(x) < 0.5).astype(np.uint8) for x in shapes]
    pairs = zip(scores, where, strict=True)
    all_candidates = [Candidates(jnp.asarray(x), jnp.asarray(w), 1) for x, w in pairs]

    def keep_some(n):
        return count_kept(n, jnp.float32(0.3))

    masks, removed = jax.jit(lambda x: select(x, keep_some, together=False))(all_candidates)
    counts = np.concatenate([x.sum(axis=1) for x in where])
    kept = [helpers.num_kept(int(count), 0.3) for count in counts]
    np.testing.assert_array_equal(removed, counts - kept)
    each = [row for x in scores for row in x], [row for x in where for row in x]
    expected = [best(x, k, w) for x, w, k in zip(*each, kept, strict=True)]
    for row, mask in zip(expected, [row for x in masks for row in x], strict=True):
        np.testing.assert_array_equal(mask, row)


@pytest.mark.slow
def test_parameters_with_keys_of_32_and_of_64_bits_are_searched_together():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        scores = [jnp.asarray(rng.normal(size=(40, 50)).astype(x)) for x in ("f4", "f8", "f4")]
        masks = jax.jit(lambda x: topk_masks([Candidates(y) for y in x], join([7, 8, 9])))(scores)
    for x, k, mask in zip(scores, (7, 8, 9), masks, strict=True):
        np.testing.assert_array_equal(mask, expected(x, k))


@pytest.mark.slow
def test_no_pass_of_a_search_stores_an_integer_of_each_entry():
    leaves = [jax.ShapeDtypeStruct((512, 500), jnp.float32)] * 4
    k = jax.ShapeDtypeStruct((4,), jnp.int32)
    program = jax.jit(lambda x, k: topk_masks([Candidates(y) for y in x], k))
    temporaries = program.lower(leaves, k).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 10 * 4 * 512 * 500  # keys, ties and masks
