"""Masks of the k highest scores of a tensor, or of a whole tree: exact, not sorted.

A mask keeps exactly k entries. Ties go to the lowest flat index (across leaves: tree order), NaN
ranks below every number, -0.0 equals 0.0, and subnormals keep their order. This module checks
arguments, selects among concrete arrays of one CPU, and has the masks of groups (N:M). All other
masks come from `search`, compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import exact, sharding, trees
from sparsity.core.checks import check_int, check_real_array, is_real, is_traced
from sparsity.core.exact import Words, zero_like
from sparsity.core.trees import PyTree
from sparsity.selection.keys import Candidates, readable, to_keys
from sparsity.selection.search import select


def topk_mask(
    scores: chex.Array,
    k: chex.Numeric | Words,
    *,
    where: chex.Array | None = None,
    batch_axes: int = 0,
    last_axes: int = 0,
) -> jax.Array:
    """Returns the mask of the k highest scores of every slice along the leading axes.

    Args:
      scores: real scores or booleans of any shape and dtype, fewer than 2**31 in a slice.
      k: number of entries to keep of each slice, in [0, slice size]; broadcasts against
        the shape of the slices' axes. A traced k is clamped. Or its two words,
        as in `global_topk_mask`.
      where: optional bool or integer mask of the scores' shape. Only entries that are not zero
        there may be kept; if there are fewer than k, all of them are.
      batch_axes: number of leading axes that index separate slices.
      last_axes: number of last axes that index separate slices, too; `k` broadcasts against the
        shape of both.

    Returns:
      uint8 mask of the scores' shape and sharding, 1 = keep.

    Raises:
      ValueError: if scores are complex, if a concrete k is out of range, or if shapes differ.

    Example:
      >>> topk_mask(jnp.array([1.0, 3.0, 2.0, 3.0]), 2)
      Array([0, 1, 0, 1], dtype=uint8)
      >>> topk_mask(jnp.array([1.0, 3.0, 2.0, 3.0]), 2, where=jnp.array([1, 0, 1, 1]))
      Array([0, 0, 1, 1], dtype=uint8)
    """
    scores = readable(scores)
    ndim = scores.ndim
    check_int("batch_axes", batch_axes, 0, ndim)
    check_int("last_axes", last_axes, 0, ndim - batch_axes)
    read = _read_where("where", where, scores.shape)
    last, first = range(ndim - last_axes, ndim), range(batch_axes, batch_axes + last_axes)

    def to_front(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, last, first) if last_axes else x

    ordered = None if read is None else to_front(read)
    candidates = Candidates(to_front(scores), ordered, batch_axes + last_axes)
    [mask] = topk_masks([candidates], _k_words(k, candidates.slice_size, candidates.batch))
    return jnp.moveaxis(mask, first, last) if last_axes else mask


def topk_masks(
    all_candidates: Sequence[Candidates], k: Words | np.ndarray, *, together: bool = False
) -> list[jax.Array]:
    """Returns masks of the k highest scores of every slice of many parameters, by one search.

    Args:
      all_candidates: parameters of any shapes and dtypes.
      k: number of entries to keep of each slice, [slices], in the order of `all_candidates`; two
        uint32 words (high, low), or these in one array. With `together` of all entries, [1].
      together: whether all entries compete; their scores have one dtype then.

    Returns:
      uint8 masks, each of its parameter's shape and sharding, 1 = keep.
    """
    likes = [x.scores for x in all_candidates]
    if not any(map(is_traced, k)) and is_on_host(all_candidates):
        high, low = (np.asarray(x).astype(np.int64) for x in k)
        slices = 1 if together else sum(x.num_slices for x in all_candidates)
        counts = np.broadcast_to((high << 32) | low, (slices,)).tolist()
        masks = select_on_host(all_candidates, counts, together=together)
        placed = [x.sharding if x.committed else None for x in likes]
        return [jax.device_put(*x) for x in zip(masks, placed, strict=True)]
    topk = functools.partial(_select, together=together)
    with jax.transfer_guard("allow"):  # of a constant k; to send it before takes 0.1 ms
        return sharding.shard_like(likes, topk, all_candidates, k)


def global_topk_mask(
    tree: PyTree, k: chex.Numeric | Words, *, where: PyTree | None = None
) -> PyTree:
    """Returns masks of the k highest scores of all leaves together, by one threshold.

    >>> global_topk_mask({"a": jnp.array([5, 1]), "b": jnp.array([[5, 5]])}, 2)
    {'a': Array([1, 0], dtype=uint8), 'b': Array([[1, 0]], dtype=uint8)}

    Args:
      tree: leaves of real scores of one dtype, of any shapes, fewer than 2**31 each; their total
        may be larger. None stands for no leaf.
      k: number of entries to keep, in [0, total size]: an integer, or two uint32 words (high,
        low) as `num_kept` returns them. A traced k is clamped.
      where: optional tree of masks like `tree`. Only entries that are not zero there may be
        kept; if there are fewer than k, all of them are.

    Returns:
      Tree of uint8 masks, 1 = keep, each of its leaf's shape and sharding.

    Raises:
      ValueError: if leaves are complex or of several dtypes, or if a concrete k is out of range.
    """
    all_candidates = list[Candidates]()

    def rank(key_path: trees.KeyPath, leaf: chex.Array, mask: chex.Array | None = None) -> None:
        scores, name = readable(leaf), f"where at {trees.path_string(key_path)!r}"
        all_candidates.append(Candidates(scores, _read_where(name, mask, scores.shape)))

    trees.map_matched(rank, tree, where, role="scores", others_role="masks of where")
    dtypes = sorted({str(x.scores.dtype) for x in all_candidates})
    if len(dtypes) > 1:
        raise ValueError(
            f"Cannot rank scores of dtypes {', '.join(dtypes)} together. Cast the leaves to one."
        )
    words = _k_words(k, sum(x.scores.size for x in all_candidates), (1,))
    return jax.tree.unflatten(
        jax.tree.structure(tree), topk_masks(all_candidates, words, together=True)
    )


# ------------------------------------------------------------------ arguments
def _read_where(name: str, where: chex.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    if where is None:
        return None
    where = where if hasattr(where, "dtype") else np.asarray(where)
    check_real_array(name, where, shape)
    return jnp.asarray(where)


def _k_words(k: chex.Numeric | Words, n: int, shape: tuple[int, ...]) -> Words | np.ndarray:
    """Returns the words of k, [slices], or [1] if slices of this shape and n entries have one k.

    A concrete k is checked, a traced one is clamped from below; the search clamps from above.
    """
    if isinstance(k, int) and 0 <= k <= n:  # the checks of numpy take as long as a small search
        return np.array(exact.split(k)).reshape(2, 1)
    if isinstance(k, tuple) and len(k) != 2:
        raise ValueError(f"k must be an integer or two words, got k = {k}.")
    high, low = k if isinstance(k, tuple) else (0, k)
    if is_traced(high) or is_traced(low):
        _check_shape(low, shape)
        words = k if isinstance(k, tuple) else exact.as_words(jnp.maximum(k, 0))
        arrays = [jnp.broadcast_to(jnp.asarray(x, jnp.uint32), shape) for x in words]
        return arrays[0].reshape(-1), arrays[1].reshape(-1)
    counts = np.asarray(low)
    if isinstance(k, tuple):
        counts = (np.asarray(high).astype(np.uint64) << 32) | counts.astype(np.uint64)
    if counts.dtype.kind not in "biuf" or not np.all((counts >= 0) & (counts <= n)):
        raise ValueError(f"k must be in [0, {n}], got k = {counts}.")
    if np.any(counts % 1 != 0):
        raise ValueError(f"k must be an integer, got k = {counts}.")
    _check_shape(counts, shape)
    each = counts.astype(np.uint64)
    each = (np.broadcast_to(each, shape) if each.ndim else each).reshape(-1)
    return np.stack([each >> 32, each & 0xFFFFFFFF]).astype(np.uint32)


def _check_shape(k: chex.Numeric, shape: tuple[int, ...]) -> None:
    with contextlib.suppress(ValueError):
        if np.broadcast_shapes(np.shape(k), shape) == shape:
            return
    raise ValueError(f"k must broadcast against {shape}, got k.shape = {np.shape(k)}.")


@functools.partial(jax.jit, static_argnames="together")
def _select(all_candidates: Sequence[Candidates], k: PyTree, *, together: bool) -> list[jax.Array]:
    slices = 1 if together else sum(x.num_slices for x in all_candidates)
    high, low = (jnp.broadcast_to(word, (slices,)) for word in k)
    return select(all_candidates, (high, low), together=together)[0]


_MAX_SLICES = 4096  # of all parameters; more are searched by a compiled program


def is_on_host(all_candidates: Sequence[Candidates]) -> bool:
    """Returns whether concrete arrays of one CPU hold the scores, in few slices."""
    arrays = jax.tree.leaves(all_candidates)
    if any(map(is_traced, arrays)) or not jax.sharding.get_abstract_mesh().empty:
        return False
    devices = {device for x in arrays for device in x.devices()}
    is_here = all(x.is_fully_addressable for x in arrays)
    is_few = sum(x.num_slices for x in all_candidates) <= _MAX_SLICES
    return is_few and is_here and len(devices) == 1 and next(iter(devices)).platform == "cpu"


def select_on_host(
    all_candidates: Sequence[Candidates], k: Sequence[int], *, together: bool
) -> list[np.ndarray]:
    """Returns the masks of `search.select` as arrays of numpy; `k` are plain numbers."""
    keys, where = list[np.ndarray](), list[np.ndarray]()
    for x in all_candidates:
        shape = x.num_slices, x.slice_size
        with np.errstate(invalid="ignore"):  # comparisons of NaN
            keys.append(to_keys(np.asarray(x.scores)).reshape(shape))
        where.append(np.ones(shape, bool) if x.where is None else np.asarray(x.where) != 0)
    masks: Sequence[object]
    if together:
        joined = (np.concatenate([x.reshape(-1) for x in arrays]) for arrays in (keys, where))
        masks = np.split(_mask_best(k[0], *joined), np.cumsum([x.size for x in keys])[:-1])
    else:
        counts = iter(k)
        slices = [zip(x, w.reshape(x.shape), strict=True) for x, w in zip(keys, where, strict=True)]
        masks = [[_mask_best(next(counts), *row) for row in rows] for rows in slices]
    pairs = zip(all_candidates, masks, strict=True)
    return [np.asarray(mask, np.uint8).reshape(x.shape) for x, mask in pairs]


def _mask_best(k: int, keys: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Returns uint8[n] with ones at the k highest keys[n] where[n] is True, the first of ties."""
    places = np.flatnonzero(where)
    keys, k = keys[places], min(k, len(places))
    kept = np.zeros(len(keys), bool)
    if k:
        threshold = np.partition(keys, len(keys) - k)[len(keys) - k]
        kept = keys > threshold
        kept[np.flatnonzero(keys == threshold)[: k - np.count_nonzero(kept)]] = True
    mask = np.zeros(len(where), np.uint8)
    mask[places[kept]] = 1
    return mask


def num_kept(n: chex.Numeric, sparsity: chex.Numeric) -> int | jax.Array | Words:
    """Returns k = max(1, round_half_even(n * (1 - float32(sparsity)))), exact; 0 for n = 0.

    Args:
      n: number of weights: an int up to 2**40, or an array of integers below 2**31.
      sparsity: fraction to remove, in [0, 1]. Traced: clamped, and NaN removes nothing.

    Returns:
      An int if both arguments are concrete scalars, else int32 of the shape to which they
      broadcast; for an n of 2**31 and more two words of uint32.

    Raises:
      ValueError: if a concrete sparsity is outside [0, 1], or a concrete n outside its range.

    Example:
      >>> num_kept(5, 0.5), num_kept(7, 0.5), num_kept(10, 1.0)
      (2, 4, 1)
    """
    one_n = not is_traced(n) and np.ndim(n) == 0
    if not is_traced(n):
        most = 2**40 if one_n else 2**31 - 1
        counts = np.asarray(jax.device_get(n))
        if counts.dtype.kind not in "iu" or np.any(counts < 0) or np.any(counts > most):
            raise ValueError(f"n must be an integer in [0, {most}], got n = {n!r}.")
    if not is_traced(sparsity):
        fraction = np.asarray(jax.device_get(sparsity))
        if not is_real(fraction.dtype) or not np.all((fraction >= 0) & (fraction <= 1)):
            raise ValueError(f"sparsity must be in [0, 1], got sparsity = {sparsity!r}.")
        if one_n and fraction.ndim == 0:
            n = int(counts)
            return min(n, max(1, round(n * (1 - Fraction(float(np.float32(fraction)))))))
    if one_n and int(counts) >= 2**31:
        return count_kept_words(exact.split(int(counts)), sparsity)
    low = jnp.asarray(n).astype(jnp.uint32)
    return count_kept_words((zero_like(low), low), sparsity)[1].astype(jnp.int32)


def count_kept_int(n: int, sparsity: float) -> int:
    """Returns `num_kept` of Python numbers."""
    kept = num_kept(n, sparsity)
    assert isinstance(kept, int)
    return kept


def lowest_sparsity(fits: Callable[[float], bool]) -> float:
    """Returns the lowest float32 from 0 to 1 that fits, normal numbers and 0 only.

    Args:
      fits: whether a sparsity removes enough; true for 1, and above each one that fits.
    """
    low, high = (int(np.float32(x).view(np.int32)) for x in (np.finfo(np.float32).tiny, 1))
    low -= 1  # floats are ordered as their bits; 0 comes before the smallest normal number
    lowest = low

    def value(bits: int) -> float:
        return float(np.int32(bits).view(np.float32)) if bits > lowest else 0.0

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(value(middle)) else (middle + 1, high)
    return value(low)


@jax.jit
def count_kept_words(n: Words, sparsity: chex.Numeric) -> Words:
    """Returns `num_kept` of a traced number that may be 2**31 and more."""
    sparsity = jnp.asarray(sparsity, jnp.float32)
    sparsity = jnp.where(sparsity > 0, jnp.minimum(sparsity, 1), 0)
    bits = lax.bitcast_convert_type(sparsity, jnp.uint32)
    # sparsity = mantissa / 2**exponent; from 2**65 on nothing is removed, as at zero.
    mantissa = (bits & 0x7FFFFF) | 0x800000
    shift = jnp.minimum(149 - (bits >> 23), 64)
    removed = exact.times(n, mantissa)
    doubled = exact.shift_right(removed, shift)
    # Some bit below the half is set just if one less has the same quotient.
    bit = zero_like(n[0]), zero_like(n[1]) | 1
    is_above_half = exact.equal(exact.shift_right(exact.minus(removed, bit), shift), doubled)
    kept = exact.minus(n, (doubled[0] >> 1, (doubled[1] >> 1) | (doubled[0] << 31)))
    down = ((doubled[1] & 1) == 1) & (is_above_half | ((kept[1] & 1) == 1))
    kept = exact.minus(kept, (zero_like(n[0]), down.astype(jnp.uint32)))
    one = (zero_like(n[0]), jnp.minimum(n[0] | n[1], 1))
    return exact.choose(exact.at_least(kept, one), kept, one)


def nm_mask(
    scores: chex.Array, n: chex.Numeric, m: int, *, axis: int = -1, keep: chex.Array | None = None
) -> jax.Array:
    """Returns the mask of the n highest of every m consecutive scores along an axis.

    If m does not divide the axis, the last group is shorter: it keeps n entries as well, or all.

    Args:
      scores: real scores or booleans of any shape and dtype.
      n: number of entries to keep of each group, in [0, m]. A traced n is clamped.
      m: size of a group.
      axis: the axis whose consecutive entries form the groups.
      keep: optional mask of the scores' shape; entries that are not zero there outrank all
        others of their group.

    Returns:
      uint8 mask of the scores' shape and sharding, 1 = keep.

    Raises:
      ValueError: if n, m or axis are out of range, if shapes differ, or if scores are complex.

    Example:
      >>> nm_mask(jnp.array([4, 3, 2, 1, 0, 7, 0, 0]), 2, 4)
      Array([1, 1, 0, 0, 1, 1, 0, 0], dtype=uint8)
    """
    scores = readable(scores)
    check_int("axis", axis)
    if not -scores.ndim <= axis < scores.ndim:
        raise ValueError(f"axis must name one of {scores.ndim} axes, got axis = {axis}.")
    check_int("m", m, 1)
    _check_n(n, m)
    if keep is not None and np.shape(keep) != scores.shape:
        raise ValueError(f"keep must have shape {scores.shape}, got keep.shape = {np.shape(keep)}.")
    keep = None if keep is None else jnp.asarray(keep)
    axis = int(axis) % scores.ndim
    m = min(int(m), max(scores.shape[axis], 1))  # a larger group holds no other entries
    fn, n = (_nm_mask_traced, n) if is_traced(n) else (_nm_mask, min(int(jax.device_get(n)), m))
    return fn(scores, n, keep, m, axis)


def _check_n(n: chex.Numeric, m: int) -> None:
    count: jax.Array | np.ndarray = n if isinstance(n, jax.core.Tracer) else np.asarray(n)
    is_count = count.shape == () and jnp.issubdtype(count.dtype, np.integer)
    if not is_count or not (is_traced(n) or 0 <= count <= m):
        raise ValueError(f"n must be an integer in [0, {m}], got n = {n!r}.")


def _grouped_mask(
    scores: jax.Array, n: chex.Numeric, keep: jax.Array | None, m: int, axis: int
) -> jax.Array:
    shape = scores.shape
    count = -(-shape[axis] // m)
    groups = (*shape[:axis], count, m, *shape[axis + 1 :])

    def pairs(x: jax.Array, fill: int) -> tuple[jax.Array, jax.Array]:
        x = _gather_groups(x, m, axis)
        missing = [(0, 0)] * axis + [(0, count * m - shape[axis])] + [(0, 0)] * (x.ndim - axis - 1)
        x = jnp.pad(x, missing, constant_values=fill).reshape(groups)
        return jnp.expand_dims(x, axis + 2), jnp.expand_dims(x, axis + 1)

    entry, other = pairs(to_keys(scores), 0)
    # Compared iotas vectorise, where a constant table would be read entry by entry.
    row, column = (lax.broadcasted_iota(jnp.int32, (m, m), d) for d in (0, 1))
    earlier = (column < row).reshape(*[1] * (axis + 1), m, m, *[1] * (len(shape) - axis - 1))
    # The rank of an entry is the number of entries of its group that beat it.
    beaten = (other > entry) | ((other == entry) & earlier)
    if keep is not None:
        entry_kept, other_kept = pairs(keep.astype(bool), False)
        beaten = (other_kept & ~entry_kept) | ((other_kept == entry_kept) & beaten)
    rank = jnp.sum(beaten, axis=axis + 2, dtype=jnp.int8 if m < 128 else jnp.int32)
    if is_traced(n):
        n = jnp.clip(n, 0, m).astype(rank.dtype)
    mask = (rank < n).reshape(*shape[:axis], count * m, *shape[axis + 1 :]).astype(jnp.uint8)
    mask = lax.slice_in_dim(mask, 0, shape[axis], axis=axis)
    explicit = jax.typeof(scores).sharding
    return mask if explicit.mesh.empty else jax.sharding.reshard(mask, explicit)


_nm_mask = jax.jit(_grouped_mask, static_argnums=(1, 3, 4))  # a constant n is three times faster
_nm_mask_traced = jax.jit(_grouped_mask, static_argnums=(3, 4))


def _gather_groups(x: jax.Array, m: int, axis: int) -> jax.Array:
    """Gathers an explicitly sharded axis if a device holds a part of a group."""
    mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
    names = spec[axis] if axis < len(spec) else None
    shards = math.prod(mesh.shape[name] for name in np.atleast_1d(names or ()))
    if shards == 1 or x.shape[axis] % (m * shards) == 0:
        return x
    spec = jax.sharding.PartitionSpec(*spec[:axis], None, *spec[axis + 1 :])
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))


def move_units(
    drop: Sequence[Candidates],
    grow: Sequence[Candidates],
    fraction: chex.Numeric,
    *,
    together: bool = False,
) -> list[jax.Array]:
    """Returns masks with a fraction of their active entries replaced, by two searches.

    Of the n active entries of every slice num_kept(n, fraction) stay, those with the highest drop
    scores. As many entries as were dropped grow: those with the highest grow scores of all others.

    Args:
      drop: drop scores; `where` is the current mask.
      grow: grow scores, without `where`.
      fraction: in [0, 1], a scalar.
      together: whether all parameters compete, under a constant total.

    Returns:
      uint8 masks, each with the shape and sharding of its parameter.
    """
    move = functools.partial(_move_units, together=together)
    return sharding.shard_like([x.scores for x in drop], move, drop, grow, fraction)


@functools.partial(jax.jit, static_argnames="together")
def _move_units(
    drop: Sequence[Candidates],
    grow: Sequence[Candidates],
    fraction: chex.Numeric,
    *,
    together: bool,
) -> list[jax.Array]:
    kept, lost = select(drop, lambda n: count_kept_words(n, fraction), together=together)
    pairs = zip(grow, kept, strict=True)
    free = [dataclasses.replace(x, where=mask == 0) for x, mask in pairs]
    grown, _ = select(free, lost, together=together)
    return [a | b for a, b in zip(kept, grown, strict=True)]
