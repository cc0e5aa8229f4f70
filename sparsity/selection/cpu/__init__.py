"""Search that is fast on hosts, with the masks of `sparsity.selection.search`.

`threshold` counts parameters that lie on one device as `rows`, large ones in `visits`, with the
pivots of `key_search`; `sorting` sorts small leaves. On a mesh the
portable search counts, and `thresholds` chooses its pivots.
"""

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp

from sparsity.core.exact import Words
from sparsity.core.kernels import use_flat
from sparsity.selection.cpu import sorting, threshold
from sparsity.selection.cpu.key_search import thresholds
from sparsity.selection.cpu.recipe import Recipe
from sparsity.selection.cpu.visits import MAX_ENTRIES
from sparsity.selection.kept_counts import Removed
from sparsity.selection.scores import Ranked, Scores

__all__ = ["MAX_ENTRIES", "Recipe", "select_by_rows", "thresholds", "use_flat"]


def select_by_rows(
    leaves: Sequence[Ranked], k: Words | Removed, *, across_leaves: bool
) -> tuple[list[jax.Array], Words]:
    """Returns the masks of `search.select_by_counting`; counts rows, or sorts small parameters.

    Parameters have one recipe, or compete together. None is empty.
    """
    if len({Recipe.read(leaf) for leaf in leaves}) > 1:
        leaves = [_stored(leaf) for leaf in leaves]
    if sorting.is_small(leaves, across_leaves=across_leaves):
        return sorting.select_by_sorting(leaves, k, across_leaves=across_leaves)
    masks, eligible, _ = threshold.select_by_thresholds(leaves, k, across_leaves=across_leaves)
    return masks, eligible


def _stored(leaf: Ranked) -> Ranked:
    """Returns the parameter with its scores computed."""
    mask = leaf.eligible(leaf.arrays)
    where = None if mask is None else mask.astype(jnp.uint8)
    scores = Scores.wrap(leaf.scores.compute())
    return Ranked(scores, where, leaf.batch_axes, last_axes=leaf.last_axes)
