"""Moves masks: two searches, compiled as one, drop the weakest entries and grow others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import chex
import jax

from sparsity.core import sharding
from sparsity.selection import Candidates
from sparsity.selection.kept_counts import count_kept_words
from sparsity.selection.search import select


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
