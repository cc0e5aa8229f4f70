"""Masks of the k best of several leaves by both searches: ties, hostile scores, passes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsity import selection
from sparsity.core import exact as exact_counts
from sparsity.selection import search as portable
from sparsity.selection.cpu import key_search, sorting, threshold, visits
from sparsity.selection.kept_counts import RemovedFraction
from sparsity.selection.scores import Ranked
from tests import helpers
from tests.selection_oracle import best, best_first

SEARCHES = pytest.mark.parametrize("search", ["portable", "mesh", "cpu"])


@functools.partial(jax.jit, static_argnames="name", compiler_options=helpers.OPTIMIZED)
def select(leaves, k, name):
    """Masks by a search of that name, and its passes, which the portable one does not count."""
    k = tuple(jnp.asarray(word).reshape(1) for word in k)
    all_ranked = [make_ranked(*leaf) for leaf in leaves]
    if name != "cpu":
        find = key_search.find_by_guesses if name == "mesh" else portable.find_by_digits
        masks, _ = portable.select_by_counting(all_ranked, k, together=True, find_thresholds=find)
        return masks, 0
    selected = threshold.select_by_thresholds(all_ranked, k, together=True)
    return selected.masks, selected.passes


def make_ranked(scores, where=None):
    return Ranked.wrap(scores, where)


def check(leaves, ks, search, *, at_most=None, name=""):
    """Masks must be those of the concatenation, found in at most so many passes."""
    joined = [np.concatenate([x.ravel() for x in arrays]) for arrays in zip(*leaves, strict=True)]
    order = best_first(*joined)
    for k in ks:
        expected = np.zeros(joined[0].size, np.uint8)
        expected[order[:k]] = 1
        masks, passes = select(leaves, exact_counts.split(k), search)
        mask = np.concatenate([np.ravel(x) for x in masks])
        np.testing.assert_array_equal(mask, expected, err_msg=f"{name}, {k}")
        assert at_most is None or int(passes) <= at_most, (name, k)


@pytest.mark.slow
@SEARCHES
def test_leaves_are_masked_like_their_concatenation(search):
    rng = np.random.default_rng(0)
    shapes = [(5,), (257, 256), (), (17, 3), (1100,), (2, 2)]
    where = [(rng.random(s) < 0.9).astype(np.uint8) for s in shapes]
    total = sum(int(x.sum()) for x in where)
    scores = [np.round(rng.normal(size=s), 1).astype(np.float32) for s in shapes]
    ks = (0, 1, 3, 30_000, 50_000, total - 2, total, total + 9)
    check(list(zip(scores, where, strict=True)), ks, search)
    # Ties are cut anywhere in any leaf: of constant scores the first k are kept.
    ks = (0, 1, 4, 5, 6, 300, *range(total - 1100, total, 137), *range(total - 60, total, 7))
    scores = [np.ones(s, np.float32) for s in shapes]
    check(list(zip(scores, where, strict=True)), ks, search)


@pytest.mark.slow
@SEARCHES
def test_masks_are_those_of_sorting_where_few_rows_are_read_again(search):
    rng = np.random.default_rng(0)
    scores = [rng.normal(size=(1024, 1024)).astype(np.float32) for _ in range(2)]
    where = [(rng.random(x.shape) < 0.9).astype(np.uint8) for x in scores]
    where[0][5:] = 0  # few rows from the start
    check(
        list(zip(scores, where, strict=True)),
        (1, 4000, 105_000, 900_000) if search == "cpu" else (4000,),
        search,
    )
    rounded = [np.round(x, 3) for x in scores]
    check(
        list(zip(rounded, where, strict=True)),
        (4000, 105_000) if search == "cpu" else (4000,),
        search,
    )


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


def split(scores, leaves):
    """The scores as one leaf, or as three of different shapes."""
    if leaves == 1:
        return [(scores.reshape(-1, 100),)]
    first, last = scores.size // 5, scores.size - 777
    return [(scores[:first],), (scores[first:last],), (scores[last:].reshape(-1, 7),)]


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [1, 3])
@SEARCHES
def test_float32_takes_at_most_20_passes_whatever_the_scores(search, leaves):
    n = 65_600
    for name, scores in hostile(n).items():
        scores = np.asarray(scores, np.float32)
        nonzero = int(np.sum(scores > 0))
        ks = {1, n // 100, n // 5, n // 2, n - 10, nonzero - nonzero // 20, nonzero - 5, nonzero}
        check(split(scores, leaves), ks & set(range(n)), search, at_most=20, name=name)


@pytest.mark.slow
def test_k_just_below_the_number_of_nonzeros_takes_at_most_six_passes():
    for seed in range(3):
        rng = np.random.default_rng(seed)
        scores = np.abs(rng.normal(size=300_000)).astype(np.float32)
        scores[rng.random(scores.size) < 0.8] = 0
        nonzero = int(np.sum(scores > 0))
        check([(scores,)], [nonzero - 5, nonzero - 425, nonzero], "cpu", at_most=6, name=str(seed))


@pytest.mark.slow
@SEARCHES
def test_float64_takes_at_most_30_passes_whatever_the_scores(search):
    n = 10_000
    with jax.enable_x64(True):
        for name, scores in hostile(n).items():
            leaves = split(np.asarray(scores, np.float64), 3)
            check(leaves, (1, n // 5, n - 10), search, at_most=30, name=name)


@pytest.mark.slow
@SEARCHES
def test_leaves_of_any_size_ask_for_at_most_26_passes(monkeypatch, search):
    # Guesses that may fail, and thirds of the bits of keys; or fourths of those, and of an index.
    asked = []

    def guessed(*args, max_misses, **options):
        asked.append(max_misses + -(-32 // 3))
        return by_guesses(*args, max_misses=max_misses, **options)

    def on_mesh(above, k, lowest, keys):
        asked.append(
            (2 if search == "mesh" else 0) + -(-keys.bits // (3 if search == "mesh" else 4))
        )
        return find(above, k, lowest, keys)

    by_guesses = key_search.search
    find = key_search.find_by_guesses if search == "mesh" else portable.find_by_digits
    if search == "cpu":
        monkeypatch.setattr(key_search, "search", guessed)
    most = visits.MAX_ENTRIES if search == "cpu" else 2**31 - 1
    big = jax.ShapeDtypeStruct((most,), jnp.float32)
    small = jax.ShapeDtypeStruct((2**30,), jnp.float32)
    k = jax.ShapeDtypeStruct((1,), jnp.uint32)
    select = functools.partial(portable.select_by_counting, find_thresholds=on_mesh)
    select = threshold.select_by_thresholds if search == "cpu" else select
    for leaves in ([big], [small], [big, small], [small] * 3):
        asked.clear()

        def fresh(leaves, k):  # not a cached trace
            return select([make_ranked(x) for x in leaves], k, together=True)[0]

        jax.eval_shape(fresh, leaves, (k, k))
        assert sum(asked) <= 26
        assert len(asked) == (1 if search == "cpu" else 2)


@pytest.mark.parametrize(
    "search",
    [portable.select_by_counting, threshold.select_by_thresholds, sorting.select_by_sorting],
)
def test_a_fraction_to_remove_is_one_of_the_eligible_entries_of_each_slice(search):
    rng = np.random.default_rng(0)
    scores = np.round(rng.normal(size=(3, 40)), 1).astype(np.float32)
    where = (rng.random((3, 40)) < [[0.2], [0.5], [0.9]]).astype(np.uint8)
    ranked = Ranked.wrap(scores, jnp.asarray(where), batch_axes=1)
    run = jax.jit(lambda ranked, x: search([ranked], RemovedFraction(x), together=False)[:2])
    ([mask], (_, eligible)) = run(ranked, jnp.float32(0.3))
    counts = where.sum(axis=1)
    np.testing.assert_array_equal(eligible, counts)
    kept = [helpers.num_kept(int(count), 0.3) for count in counts]
    expected = [best(*slice_) for slice_ in zip(scores, kept, where, strict=True)]
    np.testing.assert_array_equal(mask, expected)


@helpers.ON_CPU
def test_masks_of_leaves_of_one_shape_are_traced_once():
    leaves = [jax.ShapeDtypeStruct((60, 50), jnp.float32)] * 3
    search = jax.make_jaxpr(lambda tree: selection.global_topk_mask(tree, jnp.int32(900)))(leaves)
    (compiled,) = (x for x in search.eqns if x.params.get("name") == "_topk_masks")
    calls = [x for x in compiled.params["jaxpr"].eqns if x.params.get("name") == "mask_entries"]
    assert len(calls) == 3
    assert len({id(x.params["jaxpr"]) for x in calls}) == 1


def test_a_mask_of_ones_is_no_constant_that_xla_counts_as_it_compiles():
    tree = {name: jax.ShapeDtypeStruct((70, 300), jnp.float32) for name in "ab"}
    where = {"a": jax.ShapeDtypeStruct((70, 300), jnp.uint8), "b": None}
    search = jax.jit(lambda tree, where: selection.global_topk_mask(tree, 900, where=where))
    text = search.lower(tree, where).as_text()
    one = re.search(r"(%\w+) = stablehlo.optimization_barrier %\w+ : tensor<ui8>", text)[1]
    assert re.search(rf"broadcast_in_dim {one}, .* -> tensor<70x300xui8>", text)
