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
from typing import overload

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core import sharding, trees
from sparsity.core.checks import check_int, check_real_array, is_real, is_traced
from sparsity.core.trees import PyTree
from sparsity.selection.keys import Candidates, readable, to_keys
from sparsity.selection.search import select

_MAX_SLICES = 4096  # that numpy searches; more are searched by a compiled program


def topk_mask(
    scores: chex.Array,
    k: chex.Numeric,
    *,
    where: chex.Array | None = None,
    batch_axes: int = 0,
    last_axes: int = 0,
) -> jax.Array:
    """Returns the mask of the k highest scores of every slice along the leading axes.

    Args:
      scores: real scores or booleans of any shape and dtype, fewer than 2**31 in a slice.
      k: number of entries to keep of each slice, in [0, slice size]; broadcasts against
        the shape of the slices' axes. A traced k is clamped.
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
    where = _read_where("where", where, scores.shape)
    last, first = range(ndim - last_axes, ndim), range(batch_axes, batch_axes + last_axes)
    candidates = Candidates(scores, where, batch_axes + last_axes)
    if last_axes:
        candidates = jax.tree.map(lambda x: jnp.moveaxis(x, last, first), candidates)
    [mask] = topk_masks([candidates], _read_k(k, candidates.slice_size, candidates.batch))
    return jnp.moveaxis(mask, first, last) if last_axes else mask


def topk_masks(
    all_candidates: Sequence[Candidates], k: jax.Array | np.ndarray, *, together: bool = False
) -> list[jax.Array]:
    """Returns masks of the k highest scores of every slice of many parameters, by one search.

    Args:
      all_candidates: parameters of any shapes and dtypes.
      k: number of entries to keep of each slice, int32[slices] in the order of `all_candidates`,
        or [1] for one number. With `together` of all entries, [1].
      together: whether all entries compete; their scores have one dtype then.

    Returns:
      uint8 masks, each of its parameter's shape and sharding, 1 = keep.
    """
    likes = [x.scores for x in all_candidates]
    if not is_traced(k) and is_on_host(all_candidates):
        masks = _select_on_host(all_candidates, np.asarray(k), together)
        placed = [x.sharding if x.committed else None for x in likes]
        return [jax.device_put(*x) for x in zip(masks, placed, strict=True)]
    topk = functools.partial(_select, together=together)
    with jax.transfer_guard("allow"):  # of a constant k; to send it before takes 0.1 ms
        return sharding.shard_like(likes, topk, all_candidates, k)


@functools.partial(jax.jit, static_argnames="together")
def _select(
    all_candidates: Sequence[Candidates], k: jax.Array, *, together: bool
) -> list[jax.Array]:
    slices = 1 if together else sum(x.num_slices for x in all_candidates)
    k = jnp.broadcast_to(k.astype(jnp.int32), (slices,))
    return select(all_candidates, k, together=together)[0]


def global_topk_mask(tree: PyTree, k: chex.Numeric, *, where: PyTree | None = None) -> PyTree:
    """Returns masks of the k highest scores of all leaves together, by one threshold.

    >>> global_topk_mask({"a": jnp.array([5, 1]), "b": jnp.array([[5, 5]])}, 2)
    {'a': Array([1, 0], dtype=uint8), 'b': Array([[1, 0]], dtype=uint8)}

    Args:
      tree: leaves of real scores of one dtype, of any shapes, fewer than 2**31 in total. None
        stands for no leaf.
      k: number of entries to keep, an integer in [0, total size]. A traced k is clamped.
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
    k = _read_k(k, sum(x.scores.size for x in all_candidates), (1,))
    masks = topk_masks(all_candidates, k, together=True)
    return jax.tree.unflatten(jax.tree.structure(tree), masks)


# ------------------------------------------------------------------ arguments
def _read_where(name: str, where: chex.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    if where is None:
        return None
    where = where if hasattr(where, "dtype") else np.asarray(where)
    check_real_array(name, where, shape)
    return jnp.asarray(where)


def _read_k(k: chex.Numeric, n: int, shape: tuple[int, ...]) -> jax.Array | np.ndarray:
    """Returns k, [slices], or [1] if slices of this shape and n entries have one k.

    A concrete k is checked, a traced one is clamped.
    """
    if isinstance(k, int) and 0 <= k <= n:  # the checks of numpy take as long as a small search
        return np.array([k])
    if not is_traced(k):
        k = np.asarray(k)
        if k.dtype.kind not in "biuf" or not np.all((k >= 0) & (k <= n) & (k % 1 == 0)):
            raise ValueError(f"k must be in [0, {n}] and an integer, got k = {k}.")
    with contextlib.suppress(ValueError):
        if np.broadcast_shapes(np.shape(k), shape) == shape:
            xp = jnp if is_traced(k) else np
            clamped: jax.Array | np.ndarray = xp.clip(k, 0, min(n, 2**31 - 1)).astype(np.int32)
            return xp.broadcast_to(clamped, shape).reshape(-1)
    raise ValueError(f"k must broadcast against {shape}, got k.shape = {np.shape(k)}.")


# ------------------------------------------------------------------ on the host
def is_on_host(all_candidates: Sequence[Candidates]) -> bool:
    """Returns whether concrete arrays of one CPU hold the scores, in few slices."""
    arrays = jax.tree.leaves(all_candidates)
    if any(map(is_traced, arrays)) or not jax.sharding.get_abstract_mesh().empty:
        return False
    devices = {device for x in arrays for device in x.devices()}
    is_here = all(x.is_fully_addressable for x in arrays)
    is_few = sum(x.num_slices for x in all_candidates) <= _MAX_SLICES
    return is_few and is_here and len(devices) == 1 and next(iter(devices)).platform == "cpu"


def _select_on_host(
    all_candidates: Sequence[Candidates], k: np.ndarray, together: bool
) -> list[np.ndarray]:
    """Returns the masks of `search.select` as arrays of numpy."""
    keys, where = list[np.ndarray](), list[np.ndarray]()
    for x in all_candidates:
        shape = x.num_slices, x.slice_size
        with np.errstate(invalid="ignore"):  # comparisons of NaN
            keys.append(to_keys(np.asarray(x.scores)).reshape(shape))
        where.append((np.ones(shape) if x.where is None else np.asarray(x.where)).reshape(shape))
    masks: Sequence[object]
    if together:
        joined = (np.concatenate([x.reshape(-1) for x in arrays]) for arrays in (keys, where))
        masks = np.split(_mask_best(k[0], *joined), np.cumsum([x.size for x in keys])[:-1])
    else:
        counts = iter(np.broadcast_to(k, sum(map(len, keys))))
        slices = [zip(*pair, strict=True) for pair in zip(keys, where, strict=True)]
        masks = [[_mask_best(next(counts), *row) for row in rows] for rows in slices]
    pairs = zip(all_candidates, masks, strict=True)
    return [np.asarray(mask, np.uint8).reshape(x.shape) for x, mask in pairs]


def _mask_best(k: int, keys: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Returns uint8[n] with ones at the k highest keys[n] where[n] is not 0, the first of ties."""
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


# ------------------------------------------------------------------ numbers of entries
@overload
def num_kept(n: int, sparsity: float) -> int: ...
@overload
def num_kept(n: chex.Numeric, sparsity: chex.Numeric) -> int | jax.Array: ...
def num_kept(n: chex.Numeric, sparsity: chex.Numeric) -> int | jax.Array:
    """Returns k = max(1, round_half_even(n * (1 - float32(sparsity)))), exact; 0 for n = 0.

    Args:
      n: number of weights: an int, or an array of integers below 2**31.
      sparsity: fraction to remove, in [0, 1]. Traced: clamped, and NaN removes nothing.

    Returns:
      An int if both arguments are concrete scalars, else int32 of the shape to which they
      broadcast.

    Raises:
      ValueError: if a concrete sparsity is outside [0, 1], or a concrete n outside its range.

    Example:
      >>> num_kept(5, 0.5), num_kept(7, 0.5), num_kept(10, 1.0)
      (2, 4, 1)
    """
    if not is_traced(sparsity):
        sparsity = np.asarray(jax.device_get(sparsity))
        if not is_real(sparsity.dtype) or not np.all((sparsity >= 0) & (sparsity <= 1)):
            raise ValueError(f"sparsity must be in [0, 1], got sparsity = {sparsity}.")
    if not is_traced(n):
        n = np.asarray(jax.device_get(n))
        is_number = n.ndim == 0 and not is_traced(sparsity) and np.ndim(sparsity) == 0
        if n.dtype.kind not in "iu" or np.any(n < 0) or (np.any(n >= 2**31) and not is_number):
            raise ValueError(f"n must be an integer in [0, {2**31 - 1}], got n = {n}.")
        if is_number:
            n, share = int(n), 1 - Fraction(float(np.float32(sparsity)))
            return min(n, max(1, round(n * share)))
    return count_kept(jnp.asarray(n), sparsity)


@jax.jit
def count_kept(n: jax.Array, sparsity: chex.Numeric) -> jax.Array:
    """Returns `num_kept` of traced numbers, int32."""
    n, sparsity = n.astype(jnp.uint32), jnp.asarray(sparsity, jnp.float32)
    sparsity = jnp.where(sparsity > 0, jnp.minimum(sparsity, 1), 0)
    bits = lax.bitcast_convert_type(sparsity, jnp.uint32)
    # sparsity = mantissa / 2**(shift + 1); from 2**55 on nothing is removed, as at zero.
    mantissa, shift = (bits & 0x7FFFFF) | 0x800000, jnp.minimum(149 - (bits >> 23), 63)
    # n * mantissa = high * 2**32 + low, by halves of 16 bits
    x, y, u, v = n & 0xFFFF, n >> 16, mantissa & 0xFFFF, mantissa >> 16
    middle = y * u + (x * u >> 16)
    high, low = y * v + (middle >> 16) + (x * v + (middle & 0xFFFF) >> 16), n * mantissa
    # Twice the number to remove, rounded down, and whether there is a remainder.
    near, far = jnp.minimum(shift, 31), jnp.maximum(shift, 32) - 32
    doubled = jnp.where(shift < 32, (low >> near) | (high << (32 - near)), high >> far)
    is_low_cut = (low & ((jnp.uint32(1) << near) - 1)) > 0
    is_cut = jnp.where(shift < 32, is_low_cut, (low > 0) | (high != (high >> far) << far))
    kept = n - (doubled >> 1)
    is_rounded_down = ((doubled & 1) == 1) & (is_cut | ((kept & 1) == 1))
    kept = kept - is_rounded_down.astype(jnp.uint32)
    return jnp.maximum(kept, jnp.minimum(n, 1)).astype(jnp.int32)


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


# ------------------------------------------------------------------ moves
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
    kept, lost = select(drop, lambda n: count_kept(n, fraction), together=together)
    pairs = zip(grow, kept, strict=True)
    free = [dataclasses.replace(x, where=mask == 0) for x, mask in pairs]
    grown, _ = select(free, lost, together=together)
    return [a | b for a, b in zip(kept, grown, strict=True)]


# ------------------------------------------------------------------ groups
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
    check_int("axis", axis, -scores.ndim, scores.ndim - 1)
    check_int("m", m, 1)
    keep = _read_where("keep", keep, scores.shape)
    axis = int(axis) % scores.ndim
    size = min(int(m), max(scores.shape[axis], 1))  # a larger group holds no other entries
    if is_traced(n):
        return _nm_mask_traced(scores, n, keep, size, axis)
    n = n.item() if isinstance(n, jax.Array) else n
    check_int("n", n, 0, m)
    return _nm_mask(scores, min(int(n), size), keep, size, axis)


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
