"""Which k entries of a tensor, or of a whole tree, score highest: exact, without sorting.

A mask keeps exactly k entries. Ties go to the lowest flat index (across leaves: tree order), NaN
ranks below every number, -0.0 equals 0.0, and subnormals keep their order. Scores are read through
integer keys of the same order. A search narrows a bracket of keys around the k-th one: a pass over
the data counts how many keys lie above each of a few pivots. No pass stores anything, and only its
counts leave a device, so that sharded scores stay where they are.

The speed on XLA:CPU rests on four facts. A reduction of two or more operands compiles to one fused
loop, where a single integer sum stores an intermediate as large as the data. A reduction to rows
uses every thread, one to a scalar does not. Strict comparisons of integers vectorise best. Pivots
and data meet in a barrier within the loop, or the keys are hoisted out of it and stored.
"""

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Words = tuple[jax.Array, jax.Array]  # uint32 (high, low): an integer below 2**64
Masks = Callable[[jax.Array], Sequence[jax.Array]]  # scores -> boolean masks of their shape

_ROWS = 32  # rows of a flat reduction, for threads to share
_MERGE_BELOW = 65_536  # smaller neighbouring leaves are counted as one when flat
_SPREAD = np.float32(
    1 / 12
)  # of guessed pivots at first, in brackets; wider, and eighths are better


def topk_mask(
    scores: chex.Array,
    k: chex.Numeric,
    *,
    where: chex.Array | None = None,
    batch_axes: int = 0,
) -> jax.Array:
    """Mask of the k highest scores, of every slice along the leading batch_axes axes.

    >>> topk_mask(jnp.array([1.0, 3.0, 2.0, 3.0]), 2)
    Array([0, 1, 0, 1], dtype=uint8)
    >>> topk_mask(jnp.array([1.0, 3.0, 2.0, 3.0]), 2, where=jnp.array([1, 0, 1, 1]))
    Array([0, 0, 1, 1], dtype=uint8)

    Args:
        scores: Real scores or booleans of any shape and dtype, fewer than 2**31.
        k: How many to keep of each slice, in [0, slice size]; broadcasts against
            `scores.shape[:batch_axes]`. A traced k is clamped.
        where: Optional bool or integer mask of the scores' shape. Only entries that are not zero
            there may be kept; if there are fewer than k, all of them are.
        batch_axes: How many leading axes index separate slices.

    Returns:
        uint8 mask of the scores' shape and sharding, 1 = keep.

    Raises:
        ValueError: If scores are complex, if a concrete k is out of range, or if shapes differ.
    """
    scores = _readable(scores)
    shape = scores.shape
    if not 0 <= batch_axes <= scores.ndim:
        raise ValueError(
            f"batch_axes must be in [0, {scores.ndim}], got batch_axes = {batch_axes}."
        )
    if where is not None and jnp.shape(where) != shape:
        raise ValueError(f"where must have shape {shape}, got where.shape = {jnp.shape(where)}.")
    words = _k_words(k, math.prod(shape[batch_axes:]))
    if np.broadcast_shapes(np.shape(words[1]), shape[:batch_axes]) != shape[:batch_axes]:
        raise ValueError(
            f"k must broadcast against {shape[:batch_axes]}, got k.shape = {np.shape(words[1])}."
        )
    if not scores.size:
        return jnp.zeros(shape, jnp.uint8)
    return _topk_mask(scores, words, where, batch_axes)


def global_topk_mask(tree: chex.ArrayTree, k: chex.Numeric | Words) -> chex.ArrayTree:
    """Masks of the k highest scores of all leaves together: one threshold, nothing concatenated.

    >>> global_topk_mask({"a": jnp.array([5, 1]), "b": jnp.array([[5, 5]])}, 2)
    {'a': Array([1, 0], dtype=uint8), 'b': Array([[1, 0]], dtype=uint8)}

    Args:
        tree: Leaves of real scores of one dtype, of any shapes, fewer than 2**31 each; their total
            may be larger. None stands for no leaf.
        k: How many to keep, in [0, total size]: an integer, or two uint32 words (high, low) as
            `num_kept` returns them. A traced k is clamped.

    Returns:
        Tree of uint8 masks, 1 = keep, each of its leaf's shape and sharding.

    Raises:
        ValueError: If leaves are complex or of several dtypes, or if a concrete k is out of range.
    """
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [_readable(x) for x in leaves]
    dtypes = sorted({str(x.dtype) for x in leaves})
    if len(dtypes) > 1:
        raise ValueError(
            f"Cannot rank scores of dtypes {', '.join(dtypes)} together. Cast the leaves to one."
        )
    words = _k_words(k, sum(x.size for x in leaves))
    masks = [jnp.zeros(x.shape, jnp.uint8) for x in leaves if not x.size]
    if any(x.size for x in leaves):
        filled = iter(_global_topk_masks([x for x in leaves if x.size], words))
        empty = iter(masks)
        masks = [next(filled) if x.size else next(empty) for x in leaves]
    return jax.tree.unflatten(treedef, masks)


def nm_mask(
    scores: chex.Array,
    n: chex.Numeric,
    m: int,
    *,
    axis: int = -1,
    keep: chex.Array | None = None,
) -> jax.Array:
    """Mask of the n highest of every m consecutive scores along an axis.

    >>> nm_mask(jnp.array([4, 3, 2, 1, 0, 7, 0, 0]), 2, 4)
    Array([1, 1, 0, 0, 1, 1, 0, 0], dtype=uint8)

    Args:
        scores: Real scores or booleans of any shape and dtype.
        n: How many to keep of each group, in [0, m]. A traced n is clamped.
        m: Size of a group.
        axis: The axis whose consecutive entries form the groups.
        keep: Optional mask of the scores' shape; entries that are not zero there outrank all
            others of their group.

    Returns:
        uint8 mask of the scores' shape and sharding, 1 = keep.

    Raises:
        ValueError: If m does not divide the axis, if n or axis are out of range, if shapes differ,
            or if scores are complex.
    """
    scores = _readable(scores)
    if not -scores.ndim <= axis < scores.ndim:
        raise ValueError(f"axis must name one of {scores.ndim} axes, got axis = {axis}.")
    axis %= scores.ndim
    if m < 1 or scores.shape[axis] % m:
        raise ValueError(
            f"m must divide the size of axis {axis}, got m = {m} for shape {scores.shape}."
        )
    if not _is_traced(n) and not 0 <= int(n) <= m:
        raise ValueError(f"n must be in [0, {m}], got n = {n}.")
    if keep is not None and jnp.shape(keep) != scores.shape:
        raise ValueError(f"keep must have shape {scores.shape}, got {jnp.shape(keep)}.")
    if _is_traced(n):
        return _nm_mask_of_traced_n(scores, n, keep, m, axis)
    return _nm_mask(scores, int(n), keep, m, axis)


def num_kept(n: chex.Numeric, sparsity: chex.Numeric) -> int | jax.Array | Words:
    """k = max(1, round_half_even(n * (1 - float32(sparsity)))), exact; 0 for n = 0.

    >>> num_kept(5, 0.5), num_kept(7, 0.5), num_kept(10, 1.0)
    (2, 4, 1)

    Args:
        n: How many weights there are: an int up to 2**40, or an integer scalar below 2**31.
        sparsity: Fraction to remove, in [0, 1]. Traced: clamped, and NaN removes nothing.

    Returns:
        An int if both arguments are concrete, else an int32 scalar; for an n of 2**31 and more
        two uint32 scalars (high, low).

    Raises:
        ValueError: If a concrete sparsity is outside [0, 1], or a concrete n outside [0, 2**40].
    """
    if not _is_traced(n) and not 0 <= int(n) <= 2**40:
        raise ValueError(f"n must be in [0, 2**40], got n = {n}.")
    if not _is_traced(sparsity):
        fraction = float(np.asarray(sparsity).astype(np.float32))
        if not 0 <= fraction <= 1:
            raise ValueError(f"sparsity must be in [0, 1], got sparsity = {sparsity}.")
        if not _is_traced(n):
            return min(int(n), max(1, round(int(n) * (1 - Fraction(fraction)))))
    if _is_traced(n) or int(n) < 2**31:
        return _num_kept((jnp.uint32(0), jnp.asarray(n).astype(jnp.uint32)), sparsity)[1].astype(
            jnp.int32
        )
    return _num_kept(_split(int(n)), sparsity)


def hash_scores(shape: Sequence[int], *words: chex.Numeric) -> jax.Array:
    """Pseudo-random uint32 scores: a hash of the words and of each entry's flat index.

    The same words give the same scores, whatever the sharding.

    >>> bool((hash_scores((4,), 0, 1) == hash_scores((4,), 0, 1)).all())
    True

    Args:
        shape: Shape of the scores, fewer than 2**31 entries.
        *words: Integers (of which 32 bits count) or integer scalars, traced or not: a seed, a
            step, the number of a leaf.

    Returns:
        uint32 scores of that shape.
    """
    state = jnp.uint32(_GOLDEN)
    for word in words:
        word = jnp.uint32(word & _U32) if isinstance(word, int) else jnp.asarray(word)
        state = _mix(state ^ word.astype(jnp.uint32)) + jnp.uint32(_GOLDEN)
    index = _flat_index(tuple(shape)).astype(jnp.uint32)
    return _mix(_mix(index ^ state) + _mix(~state))


_U32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio


def _mix(x: jax.Array) -> jax.Array:
    """Bijection of uint32 whose every output bit depends on every input bit (murmur3's fmix32)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


# ------------------------------------------------------------------ arguments
def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _readable(scores: chex.Array) -> jax.Array:
    scores = jnp.asarray(scores)
    if jnp.issubdtype(scores.dtype, jnp.complexfloating):
        raise ValueError(
            f"Cannot rank {scores.dtype} scores. This is because complex numbers have no order; "
            "pass magnitudes (jnp.abs) instead."
        )
    if scores.size >= 2**31:
        raise ValueError(f"An array may hold fewer than 2**31 scores, got shape {scores.shape}.")
    if scores.dtype in (jnp.float4_e2m1fn, jnp.float8_e8m0fnu):  # not a byte; no sign bit
        return scores.astype(jnp.float32)
    return scores


def _split(k: int) -> tuple[Any, Any]:
    return np.uint32(k >> 32), np.uint32(k & _U32)


def _k_words(k: Any, n: int) -> tuple[Any, Any]:
    """k, checked if concrete, else clamped from below (selection clamps it from above)."""
    if isinstance(k, tuple):
        if not any(_is_traced(word) for word in k):
            return _k_words((int(k[0]) << 32) + int(k[1]), n)
        return k[0].astype(jnp.uint32), k[1].astype(jnp.uint32)
    if not _is_traced(k):
        k = np.asarray(k)
        if np.any(k < 0) or np.any(k > n):
            raise ValueError(f"k must be in [0, {n}], got k = {k}.")
        if k.ndim == 0:
            return _split(int(k))
        return np.zeros(k.shape, np.uint32), k.astype(np.uint32)
    k = jnp.maximum(k, 0).astype(jnp.uint32)
    return k & 0, k


# ------------------------------------------------------------------ two-word arithmetic
def _carry(low: jax.Array, high: jax.Array) -> Words:
    """high * 2**16 + low."""
    return (high + (low >> 16)) >> 16, (high << 16) + low


def _total(counts: jax.Array) -> Words:
    """Exact sum of fewer than 2**16 counts (int32) along the first axis."""
    counts = counts.astype(jnp.uint32)
    return _carry(*(jnp.sum(x, 0, dtype=jnp.uint32) for x in (counts & 0xFFFF, counts >> 16)))


def _totals_before(counts: jax.Array) -> Words:
    """Exact sums of the counts (int32[leaves]) before each."""
    counts = counts.astype(jnp.uint32)
    return _carry(*(jnp.cumsum(x, dtype=jnp.uint32) - x for x in (counts & 0xFFFF, counts >> 16)))


def _minus(a: Words, b: Words) -> Words:
    return a[0] - b[0] - (a[1] < b[1]).astype(jnp.uint32), a[1] - b[1]


def _at_least(a: Words, b: Words) -> jax.Array:
    return (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] >= b[1]))


def _equal(a: Words, b: Words) -> jax.Array:
    return (a[0] == b[0]) & (a[1] == b[1])


def _choose(condition: jax.Array, a: Words, b: Words) -> Words:
    return jnp.where(condition, a[0], b[0]), jnp.where(condition, a[1], b[1])


def _to_float(a: Words) -> jax.Array:
    return a[0].astype(jnp.float32) * jnp.float32(2.0**32) + a[1].astype(jnp.float32)


def _product(a: Words, b: jax.Array) -> Words:
    """a * b, below 2**64, by halves of 16 bits."""
    x, y, u, v = a[1] & 0xFFFF, a[1] >> 16, b & 0xFFFF, b >> 16
    middle = y * u + (x * u >> 16)
    other = x * v + (middle & 0xFFFF)
    return a[0] * b + y * v + (middle >> 16) + (other >> 16), a[1] * b


def _shift_right(a: Words, by: jax.Array) -> Words:
    """a // 2**by for by in [1, 64]."""
    small, large = jnp.clip(by, 1, 31), jnp.clip(by, 32, 63) - 32
    near = (a[0] >> small, (a[1] >> small) | (a[0] << (32 - small)))
    far = (a[0] & 0, jnp.where(by > 63, 0, a[0] >> large))
    return _choose(by < 32, near, far)


@jax.jit
def _num_kept(n: Words, sparsity: chex.Numeric) -> Words:
    sparsity = jnp.asarray(sparsity, jnp.float32)
    sparsity = jnp.where(sparsity > 0, jnp.minimum(sparsity, 1), 0)
    bits = lax.bitcast_convert_type(sparsity, jnp.uint32)
    # sparsity = mantissa / 2**exponent; from 2**65 on nothing is removed, as at zero.
    mantissa = (bits & 0x7FFFFF) | 0x800000
    shift = jnp.minimum(149 - (bits >> 23), 64)
    removed = _product(n, mantissa)
    doubled = _shift_right(removed, shift)
    # Some bit below the half is set just if one less has the same quotient.
    rest = _equal(_shift_right(_minus(removed, (n[0] & 0, n[1] & 0 | 1)), shift), doubled)
    kept = _minus(n, (doubled[0] >> 1, (doubled[1] >> 1) | (doubled[0] << 31)))
    down = ((doubled[1] & 1) == 1) & (rest | ((kept[1] & 1) == 1))
    kept = _minus(kept, (n[0] & 0, down.astype(jnp.uint32)))
    one = (n[0] & 0, jnp.minimum(n[0] | n[1], 1))
    return _choose(_at_least(kept, one), kept, one)


# ------------------------------------------------------------------ keys
class _Order(NamedTuple):
    """Integer keys that order a dtype: their dtype, the key of NaN or the lowest, the top key."""

    key: np.dtype
    low: int
    top: int


@functools.lru_cache
def _order(dtype: np.dtype) -> _Order:
    if dtype == jnp.bool_:
        return _Order(np.dtype(np.int8), 0, 1)
    floating = jnp.issubdtype(dtype, jnp.floating)
    bits = jnp.finfo(dtype).bits if floating else max(8, jnp.iinfo(dtype).bits)
    key = np.dtype(f"int{bits}")
    if not floating:
        return _Order(key, int(np.iinfo(key).min), int(np.iinfo(key).max))
    top = np.full(1, np.inf).astype(dtype)
    if not np.isinf(top.astype(np.float32))[0]:  # a format without inf
        top = np.full(1, jnp.finfo(dtype).max, dtype)
    return _Order(key, int(np.iinfo(key).min), int(top.view(key)[0]))


def _keys(scores: jax.Array) -> jax.Array:
    """Signed integers in the order of the scores."""
    dtype = scores.dtype
    key, low, top = _order(dtype)
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        unsigned = np.dtype(f"uint{key.itemsize * 8}")
        return lax.bitcast_convert_type(scores.astype(unsigned) ^ jnp.array(-low, unsigned), key)
    if not jnp.issubdtype(dtype, jnp.floating):
        return scores.astype(key)
    raw = lax.bitcast_convert_type(scores, key)
    magnitude = raw & jnp.array(-low - 1, key)
    signed = jnp.where(raw < 0, -magnitude, magnitude)
    if int(np.full(1, -0.0).astype(dtype).view(key)[0]) == low:
        nan = magnitude > jnp.array(top, key)
    else:  # a format without -0, whose bits mean NaN
        nan = raw == jnp.array(low, key)
    return jnp.where(nan, jnp.array(low, key), signed)


def _flat_index(shape: tuple[int, ...], strides: Sequence[Any] = ()) -> jax.Array:
    strides = strides or [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    index = jnp.zeros(shape, jnp.int32)
    for axis, stride in enumerate(strides):
        index += lax.broadcasted_iota(jnp.int32, shape, axis) * stride
    return index


# ------------------------------------------------------------------ counting
class _Leaf(NamedTuple):
    scores: jax.Array
    where: jax.Array | None = None  # not zero: eligible

    def masks(self, masks: Masks) -> list[jax.Array]:
        """The masks of the scores, eligible entries only."""
        found = masks(self.scores)
        return [m if self.where is None else m & (self.where != 0) for m in found]

    def map(self, f: Callable[[jax.Array], jax.Array]) -> "_Leaf":
        return _Leaf(f(self.scores), None if self.where is None else f(self.where))


def _use_flat(x: jax.Array) -> bool:
    """Whether x may be reshaped freely: all of it lies on one device, as far as its type tells."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh.are_all_axes_manual if not mesh.empty else jax.device_count() == 1


def _loops_wait_on_host() -> bool:
    """Whether a loop that looks at its data makes the device wait on the host."""
    return jax.default_backend() not in ("cpu", "tpu")


def _sums(masks: Sequence[jax.Array], axes: Sequence[int]) -> list[jax.Array]:
    """int32 sums of two or more masks, or of partial sums, in one fused loop."""
    return lax.reduce(
        [mask.astype(jnp.int32) for mask in masks],
        [np.int32(0)] * len(masks),
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
        tuple(axes),
    )


def _count(leaf: _Leaf, masks: Masks) -> list[jax.Array]:
    """int32 scalars: how many eligible entries are in each of masks(scores)."""
    if not _use_flat(leaf.scores):
        return _sums(leaf.masks(masks), range(leaf.scores.ndim))
    leaf = leaf.map(lambda x: x.reshape(-1))
    size = leaf.scores.size
    whole = size // _ROWS * _ROWS if size >= 2**16 else 0
    rest = _sums(leaf.map(lambda x: x[whole:]).masks(masks), [0])
    if not whole:
        return rest
    body = leaf.map(lambda x: x[:whole].reshape(_ROWS, -1))
    return [x + y for x, y in zip(rest, _sums(_sums(body.masks(masks), [1]), [0]), strict=True)]


# ------------------------------------------------------------------ the search
class _Bracket(NamedTuple):
    """Keys from low to high, the wanted one among them. Counts are int32[leaves].

    The search is for the k-th highest key, or for any with exactly k keys above it.
    """

    low: jax.Array
    high: jax.Array
    at_least: jax.Array  # keys >= low
    above: jax.Array  # keys > high
    spread: jax.Array  # float32: how far off a guess may be, as a fraction of the bracket
    misses: jax.Array  # int32: passes that left more than an eighth of the bracket
    passes: jax.Array  # int32


def _width(low: jax.Array, high: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(high - low, np.dtype(f"uint{low.dtype.itemsize * 8}"))


def _even_pivots(b: _Bracket, log2_parts: int) -> jax.Array:
    """Pivots that cut the bracket into equal parts of at most ceil(keys / 2**log2_parts)."""
    width = _width(b.low, b.high)
    parts = 1 << log2_parts
    j = jnp.arange(1, parts, dtype=width.dtype)
    offset = (width >> log2_parts) * j + (((width & (parts - 1)) + 1) * j >> log2_parts)
    return b.low + lax.bitcast_convert_type(offset, b.low.dtype) - 1


def _guessed_pivots(b: _Bracket, k: Words, is_float: bool) -> jax.Array:
    """Seven pivots around the place where linear interpolation sees the k-th key."""
    real = np.dtype(f"float{b.low.dtype.itemsize * 8}")
    at_least = _total(b.at_least)
    inside = _to_float(_minus(at_least, _total(b.above)))
    centre = (_to_float(_minus(at_least, k)) + 0.5) / inside
    noise = jnp.sqrt(jnp.maximum(centre * (1 - centre), 0.25 / inside) / inside)
    spread = jnp.maximum(noise, b.spread)
    teeth = np.array([-5, -1, 0, 1, 5], np.float32)
    places = jnp.clip(centre + spread * teeth, 0, 1).astype(real)
    width = _width(b.low, b.high)
    bits = width.dtype.itemsize * 8
    span = jnp.minimum(width.astype(real), real.type(2.0**bits * (1 - 2.0**-20)))
    offsets = (places * span).astype(width.dtype)
    # After a miss the k-th key may well be close to an end, beyond a gap.
    ends = jnp.stack([width >> 8, *offsets[1:4], width - (width >> 8)])
    offsets = jnp.where(b.misses % 2 == 1, ends, offsets)
    pivots = b.low + lax.bitcast_convert_type(offsets, b.low.dtype)
    if is_float:  # first linear in the value, after a miss in the key: about its logarithm
        ends = jnp.stack([b.low, b.high])
        sign = jnp.array(np.iinfo(ends.dtype).min, ends.dtype)
        ends = lax.bitcast_convert_type(jnp.where(ends < 0, sign - ends, ends), real)
        by_value = jnp.all(jnp.isfinite(ends)) & (b.misses % 2 == 0)
        values = ends[0] + places * (ends[1] - ends[0])
        pivots = jnp.where(by_value, _keys(values), pivots)
    # Scores on a grid end in zero bits: the key with most of them may hold many ties.
    differing = lax.bitcast_convert_type(b.high ^ (b.low - 1), width.dtype)
    tail = (width.dtype.type(1) << (bits - 1 - lax.clz(differing))) - 1
    roundest = b.high & ~lax.bitcast_convert_type(tail, b.high.dtype)
    pivots = jnp.concatenate([pivots, jnp.stack([roundest - 1, roundest])])
    return jnp.where(spread > _SPREAD, _even_pivots(b, 3), pivots)


def _narrow(b: _Bracket, pivots: jax.Array, counts: jax.Array, k: Words) -> _Bracket:
    """The part of the bracket that holds the k-th key, by the counts above the pivots."""
    total = _total(counts)
    enough, exact = _at_least(total, k), _equal(total, k)
    hit = jnp.any(exact)
    low = jnp.max(jnp.where(enough, pivots + 1, b.low))
    high = jnp.min(jnp.where(enough, b.high, pivots))
    low = jnp.where(hit, jnp.max(jnp.where(exact, pivots, b.low)), low)
    high = jnp.where(hit, low, high)

    def counts_at(chosen: jax.Array, otherwise: jax.Array) -> jax.Array:
        return jnp.where(jnp.any(chosen), jnp.max(jnp.where(chosen, counts, 0), axis=1), otherwise)

    missed = _width(low, high) > _width(b.low, b.high) >> 3
    return _Bracket(
        low=low,
        high=high,
        at_least=counts_at(enough & (pivots + 1 == low), b.at_least),
        above=counts_at((exact | ~enough) & (pivots == high), b.above),
        spread=jnp.where(missed, _SPREAD, b.spread / 16),
        misses=b.misses + missed.astype(jnp.int32),
        passes=b.passes + 1,
    )


def _search(
    count: Callable[[jax.Array], jax.Array],
    k: Words,
    b: _Bracket,
    *,
    bits: int,
    max_misses: int = 0,
    first: jax.Array | None = None,
    is_float: bool = False,
) -> _Bracket:
    """Narrows a bracket of at most 2**bits keys to one.

    `count` maps pivots to int32[leaves, pivots], the numbers of keys above each, in one pass.
    Where loops may look at their data, a pass that does not leave an eighth of the bracket is a
    miss, and after max_misses of them there are no more guesses: the number of passes is at most
    max_misses + ceil(bits / 3). Elsewhere it is ceil(bits / 4).
    """

    def narrow(b: _Bracket, pivots: jax.Array) -> _Bracket:
        last = jnp.where(b.low < b.high, b.high - 1, b.high)  # the lowest key has none below
        pivots = jnp.clip(pivots, b.low, last)
        return _narrow(b, pivots, count(pivots), k)

    if _loops_wait_on_host():
        one_leaf = b.at_least.size == 1

        def step(_: jax.Array, b: _Bracket) -> _Bracket:
            return narrow(b, _even_pivots(b, 4))

        return lax.fori_loop(0, -(-bits // 4), step, b, unroll=one_leaf)

    def body(state: tuple[_Bracket, jax.Array]) -> tuple[_Bracket, jax.Array]:
        b = narrow(*state)
        guesses = _guessed_pivots(b, k, is_float)
        return b, jnp.where(b.misses < max_misses, guesses, _even_pivots(b, 3))

    first = _even_pivots(b, 3) if first is None else first
    return lax.while_loop(lambda state: state[0].low < state[0].high, body, (b, first))[0]


def _every(stride: int, x: jax.Array) -> jax.Array:
    return x.reshape(-1)[::stride]


def _sampled_pivots(leaves: Sequence[_Leaf], k: Words) -> jax.Array:
    """Seven pivots from the order statistics of every so many-th key."""
    n = sum(leaf.scores.size for leaf in leaves)
    wanted = min(max(n >> 8, 256), 4096)
    parts = []
    for leaf in leaves:
        stride = min(n // wanted | 1, leaf.scores.size)  # odd: not in step with rows
        part = leaf.map(functools.partial(_every, stride))
        keys = _keys(part.scores)
        lowest = jnp.array(_order(part.scores.dtype).low, keys.dtype)
        parts.append(keys if part.where is None else jnp.where(part.where != 0, keys, lowest))
    keys = jnp.sort(jnp.concatenate(parts))
    density = jnp.minimum(_to_float(k) / n, 1)
    noise = jnp.sqrt(keys.size * density * (1 - density)) + 0.5
    ranks = keys.size * (1 - density) + noise * np.array(
        [-3, -0.9, -0.3, 0, 0.3, 0.9, 3], np.float32
    )
    pivots = keys[jnp.clip(ranks, 0, keys.size - 1).astype(jnp.int32)]
    return pivots - np.array([0, 0, 0, 1, 0, 0, 0], keys.dtype)  # ties lie between two pivots


# ------------------------------------------------------------------ ties
def _cut_by_rows(leaf: _Leaf, key: jax.Array, need: jax.Array) -> jax.Array:
    """Flat index after the need-th tie: one pass counts them by row, then one row is read."""
    leaf = leaf.map(lambda x: x.reshape(-1))
    size = leaf.scores.size
    rows = 1 << (size.bit_length() - 1) // 2
    width = size // rows  # at least the number of rows, so that the rest is shorter than a row

    def ties(x: jax.Array) -> list[jax.Array]:
        keys = _keys(x)
        return [keys == key.astype(keys.dtype), keys > key.astype(keys.dtype)]

    def place(counts: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        ends = before + jnp.cumsum(counts)
        passed = ends < need
        return jnp.sum(passed, dtype=jnp.int32), jnp.max(jnp.where(passed, ends, before))

    body = leaf.map(lambda x: x[: rows * width].reshape(rows, width))
    # The barrier keeps the second operand, and with it the fused loop.
    in_rows, _ = lax.optimization_barrier(tuple(_sums(body.masks(ties), [1])))
    row, before = place(in_rows, need & 0)
    start = jnp.minimum(row * width, size - width)
    line = leaf.map(lambda x: lax.dynamic_slice(x, (start,), (width,)))
    fresh = start + lax.iota(jnp.int32, width) >= row * width
    return start + place((line.masks(ties)[0] & fresh).astype(jnp.int32), before)[0] + 1


def _cut_by_search(
    leaves: Sequence[_Leaf], key: jax.Array, ties: jax.Array, own: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Flat index after the last kept tie of the one leaf that keeps some but not all, and passes.

    That is the search, over indices counted from the end, for the own-th of the leaf's ties.
    """
    partial = (own > 0) & (own < ties)
    sizes = [leaf.scores.size for leaf in leaves]
    need, ties, last = (
        jnp.sum(jnp.where(partial, x, 0), dtype=jnp.int32)
        for x in (own, ties, np.array(sizes, np.int32) - 1)
    )

    def count_in(leaf: _Leaf, pivots: jax.Array) -> list[jax.Array]:
        shape = leaf.scores.shape
        strides = [jnp.int32(math.prod(shape[axis + 1 :])) for axis in range(len(shape))]
        leaf, pivots, strides = lax.optimization_barrier((leaf, pivots, strides))

        def early(x: jax.Array) -> list[jax.Array]:
            keys, index = _keys(x), _flat_index(shape, strides)
            return [(keys == key.astype(keys.dtype)) & (index < last - p) for p in pivots]

        return _sums(leaf.masks(early), range(len(shape)))

    counters = [functools.partial(count_in, leaf) for leaf in leaves]

    def count(pivots: jax.Array) -> jax.Array:
        if all(_use_flat(leaf.scores) for leaf in leaves) and not _loops_wait_on_host():
            return jnp.stack(lax.switch(jnp.argmax(partial), counters, pivots))[None]
        counts = jnp.stack([x for f in counters for x in f(pivots)]).reshape(len(leaves), -1)
        return jnp.sum(jnp.where(partial[:, None], counts, 0), 0, dtype=jnp.int32)[None]

    zero = need & 0
    b = _Bracket(
        low=zero,
        high=last,
        at_least=ties[None],
        above=zero[None],
        spread=zero + _SPREAD / 16,
        misses=zero,
        passes=zero,
    )
    bits = (max(sizes) - 1).bit_length()
    words = (zero.astype(jnp.uint32), need.astype(jnp.uint32))
    b = _search(count, words, b, bits=bits, max_misses=1 if bits <= 30 else 0)
    return last - b.high + (b.above[0] < need).astype(jnp.int32), b.passes


# ------------------------------------------------------------------ selection
class _Info(NamedTuple):
    key: jax.Array  # the k-th key, or one with exactly k keys above it
    passes: jax.Array  # int32: passes over the data, those for ties included


def _select(leaves: Sequence[_Leaf], k: Words) -> tuple[list[jax.Array], _Info]:
    """Masks of the k best eligible entries of non-empty leaves of one dtype, or of all if fewer."""
    dtype = leaves[0].scores.dtype
    _, lowest, top = _order(dtype)
    flat = all(_use_flat(leaf.scores) for leaf in leaves)
    # A zero that is batched, sharded and varying as all of the data are, as loops want it.
    zero = k[1].astype(jnp.int32) & 0
    for x in jax.tree.leaves(list(leaves)):
        zero += jnp.sum(_keys(x) & 0, dtype=jnp.int32)
    eligible = jnp.stack(
        [
            zero + (leaf.scores.size if leaf.where is None else _count(leaf, _everything)[0])
            for leaf in leaves
        ]
    )
    n = _total(eligible)
    k = _choose(_at_least(k, n), n, k)
    nothing, everything = (k[0] | k[1]) == 0, _equal(k, n)
    key_zero = zero.astype(np.int64 if dtype.itemsize == 8 else np.int32)
    low, high = key_zero + lowest, key_zero + top
    b = _Bracket(
        low=jnp.where(nothing, high, low),
        high=jnp.where(everything & ~nothing, low, high),
        at_least=eligible,
        above=eligible & 0,
        spread=zero + (_SPREAD / 16 if flat else _SPREAD),
        misses=zero,
        passes=zero,
    )

    def count(pivots: jax.Array) -> jax.Array:
        held, pivots = lax.optimization_barrier((list(leaves), pivots))

        def above(x: jax.Array) -> list[jax.Array]:
            keys = _keys(x)
            return [keys > p.astype(keys.dtype) for p in pivots]

        counts = [x for leaf in held for x in _count(leaf, above)]
        return jnp.stack(counts).reshape(len(leaves), -1)

    b = _search(
        count,
        k,
        b,
        bits=(top - lowest).bit_length(),
        max_misses=8 if flat else 2,
        first=_sampled_pivots(leaves, k).astype(low.dtype) if flat else None,
        is_float=jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4,
    )
    ties = b.at_least - b.above
    before, need = _totals_before(ties), _minus(k, _total(b.above))
    left = _choose(_at_least(need, before), _minus(need, before), (need[0] & 0, need[1] & 0))
    own = jnp.where(
        left[0] > 0, ties, jnp.minimum(left[1], ties.astype(jnp.uint32)).astype(jnp.int32)
    )

    partial = (own > 0) & (own < ties)  # of one leaf at most

    def cut() -> tuple[jax.Array, jax.Array]:
        if flat and len(leaves) == 1:
            return _cut_by_rows(leaves[0], b.high, own[0]), zero + 1
        return _cut_by_search(leaves, b.high, ties, own)

    if flat and not _loops_wait_on_host():
        found, more = lax.cond(jnp.any(partial), cut, lambda: (zero, zero))
    else:  # no cond, which when batched wants its operands sharded alike
        found, more = cut()
    sizes = np.array([leaf.scores.size for leaf in leaves], np.int32)
    ends = jnp.where(partial, found, jnp.where(own > 0, sizes, 0))

    masks = []
    for i, leaf in enumerate(leaves):

        def best(x: jax.Array, end: jax.Array = ends[i]) -> list[jax.Array]:
            keys = _keys(x)
            key = b.high.astype(keys.dtype)
            return [(keys > key) | ((keys == key) & (_flat_index(keys.shape) < end))]

        whole = leaf.map(lambda x: x.reshape(-1)) if flat else leaf
        masks.append(whole.masks(best)[0].astype(jnp.uint8).reshape(leaf.scores.shape))
    return masks, _Info(b.high, b.passes + jnp.where(jnp.any(partial), more, 0))


def _everything(x: jax.Array) -> list[jax.Array]:
    return [jnp.ones(x.shape, bool)] * 2


@functools.partial(jax.jit, static_argnums=3)
def _topk_mask(scores: jax.Array, k: Words, where: jax.Array | None, batch_axes: int) -> jax.Array:
    def select(scores: jax.Array, k: Words, where: jax.Array | None) -> jax.Array:
        return _select([_Leaf(scores, where)], k)[0][0]

    if batch_axes:
        # Explicit axes want all that is mapped over sharded alike: zeros carry the sharding over.
        keys = _keys(scores)
        if where is not None and not _use_flat(scores):
            where = (where != 0) | (keys != keys)
            scores = keys | (where.astype(keys.dtype) & 0)
        zeros = jnp.sum(_keys(scores) & 0, range(batch_axes, scores.ndim), dtype=jnp.uint32)
        k = (k[0] + zeros, k[1] + zeros)
    for _ in range(batch_axes):
        select = jax.vmap(select)
    return select(scores, k, where)


@jax.jit
def _global_topk_masks(leaves: Sequence[jax.Array], k: Words) -> list[jax.Array]:
    if not all(_use_flat(x) for x in leaves):
        return _select([_Leaf(x) for x in leaves], k)[0]
    groups: list[list[jax.Array]] = []
    for x in leaves:
        if groups and max(x.size, *(y.size for y in groups[-1])) < _MERGE_BELOW:
            groups[-1].append(x)
        else:
            groups.append([x])
    merged = [g[0] if len(g) == 1 else jnp.concatenate([x.reshape(-1) for x in g]) for g in groups]
    masks = []
    for group, mask in zip(groups, _select([_Leaf(x) for x in merged], k)[0], strict=True):
        parts = jnp.split(mask.reshape(-1), np.cumsum([x.size for x in group])[:-1])
        masks += [part.reshape(x.shape) for x, part in zip(group, parts, strict=True)]
    return masks


# ------------------------------------------------------------------ N:M
def _grouped_mask(
    scores: jax.Array, n: chex.Numeric, keep: jax.Array | None, m: int, axis: int
) -> jax.Array:
    shape = scores.shape
    groups = (*shape[:axis], shape[axis] // m, m, *shape[axis + 1 :])

    def pairs(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = _with_whole_groups(x, m, axis).reshape(groups)
        return jnp.expand_dims(x, axis + 2), jnp.expand_dims(x, axis + 1)

    own, other = pairs(_keys(scores))
    # Compared iotas vectorise, where a constant table would be read entry by entry.
    row, column = (lax.broadcasted_iota(jnp.int32, (m, m), d) for d in (0, 1))
    earlier = (column < row).reshape(m, m, *[1] * (len(shape) - axis - 1))
    beaten = (other > own) | ((other == own) & earlier)
    if keep is not None:
        own_kept, other_kept = pairs(keep != 0)
        beaten = (other_kept & ~own_kept) | ((other_kept == own_kept) & beaten)
    rank = jnp.sum(beaten, axis=axis + 2, dtype=jnp.int8 if m < 128 else jnp.int32)
    mask = (rank < n).reshape(shape).astype(jnp.uint8)
    explicit = jax.typeof(scores).sharding
    return mask if explicit.mesh.empty else jax.sharding.reshard(mask, explicit)


_nm_mask = jax.jit(_grouped_mask, static_argnums=(1, 3, 4))  # a known n is three times faster
_nm_mask_of_traced_n = jax.jit(_grouped_mask, static_argnums=(3, 4))


def _with_whole_groups(x: jax.Array, m: int, axis: int) -> jax.Array:
    """x, with an explicitly sharded axis gathered if a device holds a part of a group."""
    mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
    names = spec[axis] if axis < len(spec) else None
    shards = math.prod(mesh.shape[name] for name in np.atleast_1d(names or ()))
    if x.shape[axis] // m % shards == 0:
        return x
    whole = jax.sharding.PartitionSpec(*spec[:axis], None, *spec[axis + 1 :])
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, whole))
