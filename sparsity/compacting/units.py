"""Drops stored units and grows others, without dense arrays for the stored ones.

A unit is an entry, or an input of a group of outputs.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from sparsity.selection import Ranked, Scores, num_kept, topk


def move_units(
    drop: jax.Array, grow: jax.Array | Scores, positions: jax.Array, drop_fraction: chex.Numeric
) -> jax.Array:
    """Returns the mask of each row after an update; see `sparsity.masks.drop_and_grow`.

    Args:
      drop: [rows, k] scores of the stored units; those with the lowest are dropped.
      grow: [rows, units] scores; of all units that are not kept, those with the highest grow.
      positions: [rows, k] places of the stored units, `units` or more for padding.
      drop_fraction: scalar in [0, 1].

    Returns:
      uint8[rows, units].
    """
    is_stored = positions < grow.shape[1]
    stored = jnp.sum(is_stored, axis=1, dtype=jnp.int32)
    stay = jnp.asarray(num_kept(stored, drop_fraction))
    flags = _select(drop, stay, is_stored)
    # Zeros that wait for the positions: XLA would make those of all parameters at once.
    zero = jnp.min(positions, axis=1, keepdims=True, initial=0)
    empty = jnp.broadcast_to(zero.astype(jnp.uint8), grow.shape)
    kept = jax.vmap(lambda row, at, flag: row.at[at].set(flag, mode="drop"))(
        empty, positions, flags
    )
    mask: jax.Array = kept | _select(grow, stored - stay, kept == 0)
    return mask


def _select(scores: jax.Array | Scores, k: jax.Array, where: jax.Array) -> jax.Array:
    """Returns the mask of the k highest scores of each row, uint8[rows, n]."""
    leaf = Ranked(Scores.wrap(scores), where, batch_axes=1)
    counts = k.astype(jnp.uint32)
    masks, _ = topk.select([leaf], (counts & 0, counts), together=False)
    mask: jax.Array = masks[0]
    return mask
