"""Moves masks: two searches, compiled as one, drop the weakest entries and grow others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp
from jax import lax

from sparsity.core import exact, sharding
from sparsity.core.exact import Words, varying_zero
from sparsity.core.trees import PyTree
from sparsity.masks.bits import are_kept
from sparsity.selection import Ranked
from sparsity.selection.kept_counts import RemovedFraction, count_kept_words
from sparsity.selection.topk import select_best


def move_units(
    drop: Sequence[Ranked],
    grow: Sequence[Ranked],
    fraction: chex.Numeric,
    *,
    together: bool = False,
) -> list[jax.Array]:
    """Returns masks with a fraction of their active entries replaced, by two searches.

    Of the n active entries of every slice num_kept(n, fraction) stay, those with the highest drop
    scores. As many entries as were dropped grow: those with the highest grow scores of all others.

    Args:
      drop: drop scores; `where` is the current mask, in uint8 of zeros and ones.
      grow: grow scores, without `where`.
      fraction: in [0, 1], a scalar.
      together: whether all parameters compete, under a constant total.

    Returns:
      uint8 masks, each with the shape and sharding of its parameter.
    """
    move = functools.partial(_move_units, together=together)
    likes = [ranked.arrays[0] for ranked in drop]
    return sharding.shard_like(likes, move, drop, grow, fraction)


@functools.partial(jax.jit, static_argnames="together")
def _move_units(
    drop: Sequence[Ranked], grow: Sequence[Ranked], fraction: chex.Numeric, *, together: bool
) -> list[jax.Array]:
    drop = jax.tree.map(lax.stop_gradient, drop)  # a mask has no derivatives
    is_moving = jnp.asarray(fraction) > 0
    # Branches must vary over the same axes of a mesh: those of all the data.
    zero = varying_zero([x for ranked in (*drop, *grow) for x in ranked.arrays], is_moving)

    def dropped() -> tuple[list[jax.Array], Words]:
        kept, active = select_best(drop, RemovedFraction(fraction), together=together)
        return kept, exact.minus(active, count_kept_words(active, fraction))

    def unchanged() -> tuple[list[jax.Array], Words]:
        n = jnp.zeros(1 if together else sum(ranked.num_slices for ranked in drop), jnp.uint32)
        masks = [_current_mask(ranked) for ranked in drop]
        # A branch that returns its operands lets XLA write the results of the other over them.
        return [x if x.dtype == jnp.uint8 else are_kept(x) for x in masks], (n, n)

    def varying(branch: Callable[[], PyTree]) -> Callable[[], PyTree]:
        return lambda: jax.tree.map(lambda x: x + zero.astype(x.dtype), branch())

    def grown(kept: list[jax.Array], lost: Words) -> list[jax.Array]:
        pairs = zip(grow, kept, strict=True)
        free = [ranked.restrict_to(mask, eligible_is_zero=True) for ranked, mask in pairs]
        masks, _ = select_best(free, lost, together=together)
        return [a | b for a, b in zip(kept, masks, strict=True)]

    # The results of a branch are stored; otherwise each reader would compute them again.
    kept, lost = lax.cond(is_moving, varying(dropped), varying(unchanged))
    return lax.cond(is_moving, grown, lambda kept, _: kept, kept, lost)


def _current_mask(drop: Ranked) -> jax.Array:
    """Returns the mask under drop scores."""
    assert drop.recipe.where_position is not None  # only a mask moves
    return drop.arrays[drop.recipe.where_position]
