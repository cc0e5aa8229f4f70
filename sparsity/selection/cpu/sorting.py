"""Masks of the k best entries of a few small parameters, by sorting them.

For a vector of 256 entries this program takes 0.25 CPU-seconds to compile and 0.17 ms to run; that
of `threshold` 1.0 s and 0.29 ms. The masks are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.core.exact import Words, zero_like
from sparsity.selection.kept_counts import RemovedFraction, limit_kept
from sparsity.selection.keys import mask_by_sorting
from sparsity.selection.scores import Ranked

MAX_SORTED = 2048  # entries, once slices are padded to one size: from there on counting is faster


def is_small(all_ranked: Sequence[Ranked], *, together: bool) -> bool:
    """Returns whether parameters should be sorted."""
    if together:
        return sum(ranked.size for ranked in all_ranked) <= MAX_SORTED
    most = max(x.slice_size for x in all_ranked)
    return sum(x.num_slices for x in all_ranked) * most <= MAX_SORTED


def select_by_sorting(
    all_ranked: Sequence[Ranked], k: Words | RemovedFraction, *, together: bool
) -> tuple[list[jax.Array], Words]:
    """Returns the masks of `search.select_by_counting`, by sorting."""
    keys, allowed = (_in_rows(x, together) for x in zip(*map(_keys, all_ranked), strict=True))
    n = jnp.sum(allowed, axis=1, dtype=jnp.uint32)
    words = zero_like(n), n
    rank = limit_kept(words, k)[1].astype(jnp.int32)
    best = mask_by_sorting(keys, allowed, rank[:, None])
    return _split(best.astype(jnp.uint8), all_ranked, together), words


def _keys(ranked: Ranked) -> tuple[jax.Array, jax.Array]:
    """Returns keys of a parameter and the mask of the eligible ones, both [slices, size]."""
    keys, allowed = ranked.keys(), ranked.eligible()
    allowed = jnp.ones(keys.shape, bool) if allowed is None else allowed
    return ranked.to_slices(keys), ranked.to_slices(allowed)


def _in_rows(slices: Sequence[jax.Array], together: bool) -> jax.Array:
    """Returns slices as rows of one size, padded by entries that are never kept, or as one row."""
    if together:
        return jnp.concatenate([x.reshape(1, -1) for x in slices], axis=1)
    size = max(x.shape[1] for x in slices)
    least = 0 if slices[0].dtype == bool else np.iinfo(slices[0].dtype).min
    return jnp.concatenate(
        [jnp.pad(x, [(0, 0), (0, size - x.shape[1])], constant_values=least) for x in slices]
    )


def _split(best: jax.Array, all_ranked: Sequence[Ranked], together: bool) -> list[jax.Array]:
    if together:
        ends = np.cumsum([ranked.size for ranked in all_ranked])[:-1]
        slices = jnp.split(best[0], ends)
    else:
        ends = np.cumsum([ranked.num_slices for ranked in all_ranked])[:-1]
        slices = [
            x[:, : ranked.slice_size]
            for x, ranked in zip(jnp.split(best, ends), all_ranked, strict=True)
        ]
    return [ranked.from_slices(x) for x, ranked in zip(slices, all_ranked, strict=True)]
