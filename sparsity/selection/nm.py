"""Masks of the n highest of every m consecutive scores: comparisons within the group rank them."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.core.checks import check_int, is_traced
from sparsity.selection.keys import readable, to_keys


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
