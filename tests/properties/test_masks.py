"""Masks of any tree: exact counts, ties by index, monotone ramps, whole units."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

import sparsity
from sparsity.core import trees
from tests import helpers
from tests.properties import strategies as draws


def keep_highest(scores, k):
    """The mask of the k highest scores: ties to the lower index, NaN lowest."""
    scores = np.asarray(scores, np.float64).reshape(-1)
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    order = np.lexsort((np.arange(scores.size), -ranked, np.isnan(scores)))
    mask = np.zeros(scores.size, np.uint8)
    mask[order[:k]] = 1
    return mask


def magnitudes(leaf):
    # Of complex numbers, the library's own rounding.
    return np.asarray(jnp.abs(leaf)).astype(np.float64)


@draws.examples(15)
@hypothesis.given(draws.trees(), draws.sparsities)
def test_each_leaf_keeps_its_exact_count_of_the_largest(params, target):
    pruner = sparsity.MagnitudePruning(sparsity_distribution_fn=draws.everything(target))
    pruned, masks = pruner.instant_sparsify(params)
    assert jax.tree.structure(masks) == jax.tree.structure(params)
    for leaf, mask, after in zip(*map(jax.tree.leaves, (params, masks, pruned)), strict=True):
        expected = keep_highest(magnitudes(leaf), helpers.num_kept(leaf.size, target))
        assert (mask.dtype, mask.shape) == (np.uint8, leaf.shape)
        np.testing.assert_array_equal(np.asarray(mask).reshape(-1), expected)
        kept = np.where(np.asarray(mask) > 0, np.asarray(leaf), np.zeros((), leaf.dtype))
        assert np.asarray(after).tobytes() == kept.tobytes()


@draws.examples(15)
@hypothesis.given(draws.trees(dtypes=draws.DTYPES[:3]), draws.sparsities)
def test_all_leaves_together_keep_the_exact_count_of_the_largest(params, target):
    pruner = sparsity.MagnitudePruning(
        sparsity_distribution_fn=draws.everything(target),
        scope=sparsity.Global(use_normalization=False),
    )
    masks = jax.tree.leaves(pruner.instant_sparsify(params)[1])
    leaves = jax.tree.leaves(params)
    scores = np.concatenate([magnitudes(leaf).reshape(-1) for leaf in leaves])
    expected = keep_highest(scores, helpers.num_kept(scores.size, target))
    np.testing.assert_array_equal(np.concatenate([np.ravel(mask) for mask in masks]), expected)


@draws.examples(8)
@hypothesis.given(
    draws.seeds,
    st.sampled_from(draws.SHAPES),
    st.sampled_from(draws.DTYPES[:3]),
    st.sampled_from(draws.PATTERNS),
    st.lists(draws.sparsities, min_size=2, max_size=5),
)
def test_masks_shrink_along_a_ramp_of_frozen_scores(seed, shape, dtype, pattern, ramp):
    hypothesis.assume(draws.fits(pattern, shape))
    scores = jnp.abs(draws.values(np.random.default_rng(seed), shape, dtype))
    ramp = sorted(ramp)
    masks = [np.asarray(pattern.select(scores, s, target=ramp[-1])) for s in ramp]
    for before, after in itertools.pairwise(masks):
        assert not (after > before).any()
    for s, mask in zip(ramp, masks, strict=True):
        jitted = jax.jit(lambda x, s: pattern.select(x, s, target=ramp[-1]))
        np.testing.assert_array_equal(mask, jitted(scores, jnp.float32(s)))


@draws.examples(15)
@hypothesis.given(
    draws.seeds,
    st.sampled_from(draws.SHAPES),
    st.sampled_from(draws.PATTERNS),
    draws.sparsities,
)
def test_a_pattern_keeps_whole_units_and_the_count_that_it_states(seed, shape, pattern, target):
    hypothesis.assume(draws.fits(pattern, shape))
    scores = jnp.abs(draws.values(np.random.default_rng(seed), shape, "float32"))
    mask = np.asarray(pattern.select(scores, target, target=target))
    count = pattern.count_kept(shape, target)
    assert count is None or mask.sum() == count
    if not pattern.is_elementwise and not isinstance(pattern, sparsity.NByM) and mask.size:
        units = pattern.pool(jnp.asarray(mask, jnp.float32))
        rebuilt = pattern.expand(jnp.asarray(units > 0, jnp.uint8), shape)
        np.testing.assert_array_equal(mask, rebuilt)
        groups = np.asarray(units).reshape(*units.shape[: pattern.group_axes], -1)
        n = groups.shape[-1]
        assert ((groups > 0).sum(-1) == helpers.num_kept(n, target)).all()


@draws.examples(5)
@hypothesis.given(draws.trees(dtypes=draws.DTYPES[:3]), draws.sparsities, st.booleans())
def test_packed_masks_are_the_same_masks(params, target, is_global):
    options = {
        "sparsity_distribution_fn": draws.everything(target),
        "scope": sparsity.Global() if is_global else sparsity.Layerwise(),
    }
    plain = sparsity.MagnitudePruning(**options).instant_sparsify(params)
    packed = sparsity.MagnitudePruning(**options, use_packed_masks=True).instant_sparsify(params)
    assert draws.equal_bits(plain[0], packed[0])
    assert draws.equal_bits(plain[1], sparsity.unpack_masks(packed[1], params))


@draws.examples(5)
@hypothesis.given(
    draws.seeds,
    st.sampled_from([shape for shape in draws.SHAPES if len(shape) > 1]),
    st.sampled_from(draws.PATTERNS),
    draws.sparsities,
    draws.sparsities,
    st.sampled_from(draws.DTYPES[:3]),
)
def test_a_move_keeps_the_number_of_units_and_drops_the_smallest(
    seed, shape, pattern, target, drop, dtype
):
    hypothesis.assume(draws.fits(pattern, shape))
    rng = np.random.default_rng(seed)
    start, lows, highs = (jnp.abs(draws.values(rng, shape, dtype)) for _ in range(3))
    mask = pattern.select(start, target, target=target)
    moved = np.asarray(pattern.move(mask, lows, highs, drop))
    before = np.asarray(mask)
    units = [pattern.pool(jnp.asarray(x, jnp.float32)) > 0 for x in (before, moved)]
    assert units[0].sum() == units[1].sum()
    if pattern.is_elementwise:
        kept = helpers.num_kept(int(before.sum()), drop) if before.any() else 0
        scores = np.where(before > 0, np.asarray(lows, np.float64), -1).reshape(-1)
        scores[np.isnan(scores)] = -0.5
        stays = keep_highest(scores, kept)
        assert (moved.reshape(-1) >= stays).all()
        grow = np.asarray(highs, np.float64).reshape(-1)
        grow[np.isnan(grow)] = -0.5
        grow[stays > 0] = -1
        grown = keep_highest(grow, int(before.sum()) - kept)
        np.testing.assert_array_equal(moved.reshape(-1), stays | grown)


@draws.examples(6)
@hypothesis.given(draws.trees(), draws.sparsities)
def test_a_distribution_with_overrides_keeps_them(params, target):
    leaves = trees.leaves_by_path(params)
    path = next(path for path, leaf in leaves.items() if leaf.size)
    name = trees.path_names(path)
    masks = sparsity.MagnitudePruning(
        sparsity_distribution_fn=sparsity.Uniform(
            target, filter_fn=lambda path, param: True, custom_sparsity_map={name: 0.25}
        )
    ).instant_sparsify(params)[1]
    mask = trees.leaves_by_path(masks)[path]
    assert int(mask.sum()) == helpers.num_kept(mask.size, 0.25)


def test_a_constant_target_is_reached_in_a_compiled_program():
    target = 0.8769266605377197
    select = jax.jit(lambda x, s: sparsity.NByM(2, 4).select(x, s, target=target))
    mask = select(jnp.arange(32.0).reshape(4, 8), jnp.float32(target))
    assert int(mask.sum()) == 16
