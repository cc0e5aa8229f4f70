"""Search that is fast on hosts, with the masks of `sparsity.selection.search`.

`threshold` counts parameters that lie on one device as `rows`, large ones in `visits`, with the
pivots of `key_search`; `sorting` sorts small parameters. On a mesh the
portable search counts, and `find_by_guesses` chooses its pivots.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from sparsity.core.exact import Words
from sparsity.core.kernels import use_flat as use_flat
from sparsity.selection.cpu import sorting, threshold
from sparsity.selection.cpu.key_search import find_by_guesses as find_by_guesses
from sparsity.selection.cpu.visits import MAX_ENTRIES as MAX_ENTRIES
from sparsity.selection.kept_counts import RemovedFraction
from sparsity.selection.scores import Ranked


def select_by_rows(
    all_ranked: Sequence[Ranked], k: Words | RemovedFraction, *, together: bool
) -> tuple[list[jax.Array], Words]:
    """Returns the masks of `search.select_by_counting`; counts rows, or sorts small parameters.

    Parameters have one `program_key`, or compete together. No parameter is empty.
    """
    if len({ranked.program_key for ranked in all_ranked}) > 1:
        all_ranked = _store(all_ranked)
    if sorting.is_small(all_ranked, together=together):
        return sorting.select_by_sorting(all_ranked, k, together=together)
    masks, eligible, _ = threshold.select_by_thresholds(all_ranked, k, together=together)
    return masks, eligible


def _store(all_ranked: Sequence[Ranked]) -> list[Ranked]:
    """Computes the scores of parameters; all of them get masks of entries, or none does."""
    masks = [ranked.eligible() for ranked in all_ranked]
    is_limited = any(mask is not None for mask in masks)
    stored = list[Ranked]()
    for ranked, mask in zip(all_ranked, masks, strict=True):
        if mask is None and is_limited:
            # Behind the barrier, or XLA would count a mask of ones as it compiles.
            one = lax.optimization_barrier(jnp.uint8(1))
            mask = jnp.broadcast_to(one, ranked.shape)
        where = None if mask is None else mask.astype(jnp.uint8)
        stored.append(Ranked.wrap(ranked.compute(), where, ranked.batch_axes, ranked.last_axes))
    return stored
