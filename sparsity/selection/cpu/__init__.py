"""Search that is fast on hosts, with the masks of `sparsity.selection.search`.

`threshold` counts parameters that lie on one device as `rows`, large ones in `visits`, with the
pivots of `key_search`; `sorting` sorts small leaves. On a mesh the
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
from sparsity.selection.kept_counts import Removed
from sparsity.selection.scores import Ranked


def select_by_rows(
    leaves: Sequence[Ranked], k: Words | Removed, *, across_leaves: bool
) -> tuple[list[jax.Array], Words]:
    """Returns the masks of `search.select_by_counting`; counts rows, or sorts small parameters.

    Parameters are of one kind, or compete together. No parameter is empty.
    """
    if len({leaf.kind for leaf in leaves}) > 1:
        leaves = _store(leaves)
    if sorting.is_small(leaves, across_leaves=across_leaves):
        return sorting.select_by_sorting(leaves, k, across_leaves=across_leaves)
    masks, eligible, _ = threshold.select_by_thresholds(leaves, k, across_leaves=across_leaves)
    return masks, eligible


def _store(leaves: Sequence[Ranked]) -> list[Ranked]:
    """Computes the scores of parameters; all of them get masks of entries, or none does."""
    masks = [leaf.eligible() for leaf in leaves]
    is_limited = any(mask is not None for mask in masks)
    stored = list[Ranked]()
    for leaf, mask in zip(leaves, masks, strict=True):
        if mask is None and is_limited:
            # Behind the barrier, or XLA would count a mask of ones as it compiles.
            one = lax.optimization_barrier(jnp.uint8(1))
            mask = jnp.broadcast_to(one, leaf.shape)
        where = None if mask is None else mask.astype(jnp.uint8)
        stored.append(Ranked.wrap(leaf.compute(), where, leaf.batch_axes, leaf.last_axes))
    return stored
