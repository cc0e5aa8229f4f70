"""Many leaves in one search: each gets the mask that it would get by itself."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity import selection
from sparsity.core import exact
from sparsity.core.hashing import hash_scores
from sparsity.selection.scores import EntryScores, Ranked
from sparsity.selection.topk import topk_masks
from tests.selection_oracle import best_first

pytestmark = pytest.mark.usefixtures("both_searches")

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


def words(ks):
    """k of every slice of all leaves."""
    return exact.as_words(jnp.concatenate([jnp.ravel(jnp.asarray(k, jnp.int32)) for k in ks]))


def random_ks(rng, sizes):
    return [
        int(np.clip(rng.choice([0, 1, n - 1, n, rng.integers(0, n + 1), n // 10]), 0, n))
        for n in sizes
    ]


@jax.jit
def select_masks(scores, where, ks):
    where = where or [None] * len(scores)
    all_ranked = [Ranked.wrap(x, part) for x, part in zip(scores, where, strict=True)]
    return topk_masks(all_ranked, words(ks))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True])
def test_every_leaf_gets_the_mask_that_sorting_gives(masked, both_searches):
    """Each search meets float32 and one dtype more; `test_selection.py` has all, for one leaf."""
    is_float32 = masked == (both_searches == "cpu")
    other = {"portable": "int32", "cpu": "bfloat16"}[both_searches]
    dtype = "float32" if is_float32 else other
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
def test_slices_of_stacked_leaves_are_ranked_by_themselves():
    rng = np.random.default_rng(2)
    shapes = [(3, 130, 128), (200, 9, 11), (2, 2, 5), (4, 3, 20_011)]  # large; short; small; padded
    axes = [1, 1, 2, 2]
    scores = [np.round(rng.standard_normal(s), 1).astype(np.float32) for s in shapes]
    all_ranked = [Ranked.wrap(x, None, n) for x, n in zip(scores, axes, strict=True)]
    ks = [rng.integers(0, np.prod(s[n:]), s[:n]) for s, n in zip(shapes, axes, strict=True)]
    actual = jax.jit(lambda: topk_masks(all_ranked, words(ks)))()
    for x, n, k, mask in zip(scores, axes, ks, actual, strict=True):
        slices = x.reshape(-1, *x.shape[n:])
        each = [expected(part, count) for part, count in zip(slices, k.ravel(), strict=True)]
        np.testing.assert_array_equal(mask, np.reshape(each, x.shape))


@pytest.mark.slow
def test_lazy_scores_are_those_that_they_compute():
    rng = np.random.default_rng(3)
    shapes = [(300, 300), (70, 9), (5,)]
    weights = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]
    masks = [jnp.asarray(rng.random(s) < 0.5, jnp.uint8) for s in shapes]
    scales = [jnp.float32(x) for x in (1.0, 0.5, 2.0)]

    def masked(weight, mask, scale):
        return jnp.abs(jnp.where(mask > 0, weight, 0)) * scale

    lazy = [
        EntryScores(masked, (w, m), (s,)) for w, m, s in zip(weights, masks, scales, strict=True)
    ]
    ks = [30_000, 500, 2]
    actual = jax.jit(lambda: topk_masks([Ranked.wrap(x) for x in lazy], words(ks)))()
    for x, k, mask in zip(lazy, ks, actual, strict=True):
        np.testing.assert_array_equal(mask, expected(x.compute(), k))
    together = jax.jit(lambda: selection.global_topk_mask(lazy, 20_000))()
    stored = jax.jit(lambda: selection.global_topk_mask([x.compute() for x in lazy], 20_000))()
    jax.tree.map(np.testing.assert_array_equal, together, stored)


@pytest.mark.slow
def test_scores_that_depend_on_the_index_are_those_of_the_whole_leaf():
    shapes = [(5, 130, 128), (200, 9, 11), (64,)]

    def hashed(index, word):
        return (index.astype(jnp.uint32) + word) * jnp.uint32(2654435761)

    all_ranked = [
        Ranked.wrap(EntryScores(hashed, (jnp.zeros(s),), (jnp.uint32(i),), True), None, len(s) > 1)
        for i, s in enumerate(shapes)
    ]
    ks = [np.full(x.batch, 31) for x in all_ranked]
    actual = jax.jit(lambda: topk_masks(all_ranked, words(ks)))()
    for ranked, mask in zip(all_ranked, actual, strict=True):
        scores = np.asarray(ranked.compute()).reshape(ranked.num_slices, -1)
        each = [expected(part, 31) for part in scores]
        np.testing.assert_array_equal(mask, np.reshape(each, mask.shape))


@pytest.mark.slow
def test_a_mapped_search_gives_the_masks_of_each():
    rng = np.random.default_rng(4)
    scores = [jnp.asarray(rng.standard_normal((3, *s)), jnp.bfloat16) for s in SHAPES[::2]]
    ks = jnp.asarray([[x[0].size // (i + 2) for x in scores] for i in range(3)])

    def select_one(scores, ks):
        return topk_masks([Ranked.wrap(x) for x in scores], words(ks))

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
        masks = topk_masks(
            [Ranked.wrap(EntryScores(jnp.abs, (y,))) for y in (x, x + 1)], words([9, 9])
        )
        return jnp.sum(x**2 * masks[0])

    grad = jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(grad, 2 * x * expected(np.abs(x), 9))


@pytest.mark.slow
def test_hashes_are_searched_like_any_scores():
    scores = hash_scores((128, 200), 7)
    mask = selection.topk_mask(scores, 1000)
    np.testing.assert_array_equal(mask, expected(scores, 1000))


@pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="jax 0.8 keeps the structures of the arguments of jit"
)
def test_no_cache_keeps_a_function_that_computes_scores():
    scale = jnp.float32(2)

    def doubled(x):
        return x * scale

    scores = EntryScores(doubled, (jnp.arange(5.0),))
    assert topk_masks([Ranked.wrap(scores)], words([2]))[0].tolist() == [0, 0, 0, 1, 1]
    assert scores.dtype == jnp.float32
    gone = weakref.ref(doubled)
    del doubled, scores
    jax.clear_caches()  # what is compiled of the function is known by it
    gc.collect()
    assert gone() is None


def test_an_array_that_scores_and_their_mask_share_is_one_argument():
    weights, mask = jnp.array([3.0, 2.0, -5.0, 1.0]), jnp.array([1.0, 1, 0, 1])
    scores = EntryScores(lambda weight, mask: -weight * mask, (weights, mask))
    shared = Ranked.wrap(scores, mask)
    separate = Ranked.wrap(scores, mask.copy())
    assert [len(jax.tree.leaves(ranked)) for ranked in (shared, separate)] == [2, 3]
    for ranked in (shared, separate, jax.tree.map(lambda x: x, shared)):
        assert topk_masks([ranked], words([2]))[0].tolist() == [0, 1, 0, 1]
