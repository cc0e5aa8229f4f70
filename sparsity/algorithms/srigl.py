"""SRigL: RigL with a constant fan-in, which also removes neurons of few salient weights.

An update of a layer moves the mask in five steps. B is the number of weights that the sparsity of
the layer keeps, and K = num_kept(active, drop_fraction) of its active weights.

1. Salient are the K active weights with the highest drop scores, and the active - K other weights
   with the highest grow scores.
2. Neurons with fewer salient weights than max(1, floor(min_salient * (B // neurons))) are removed.
   If fewer than min(neurons, B // inputs + 1) neurons would remain, the bound is lowered until at
   least that many remain.
3. The fan-in becomes min(inputs, B // remaining neurons).
4. Of the active weights in remaining neurons the K with the highest drop scores are candidates.
   Each neuron keeps its highest candidates, at most as many as the fan-in.
5. Each neuron grows the weights with its highest grow scores up to the fan-in.

Source: Lasby et al. 2024, "Dynamic sparse training with structured sparsity", algorithm 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparsity.algorithms.sparse_trainers import RigL
from sparsity.core import sharding, trees
from sparsity.core.arrays import count, use_flat
from sparsity.core.checks import check_fraction, is_traced
from sparsity.core.hashing import generate_random_scores
from sparsity.core.trees import Masks, Params, PyTree, Sparsities
from sparsity.masks import Site, Sites, is_layerwise
from sparsity.patterns import SparsityType
from sparsity.selection import num_kept, topk_mask
from sparsity.training.hooks import KeepsCount, StepInputs
from sparsity.training.state import SparseState


@dataclasses.dataclass(kw_only=True)
class SRigL(RigL):
    """Moves the mask as RigL does, at a constant fan-in: neurons are indices of the last axis.

    The initial masks are random; the module `srigl` describes an update. The published code differs
    in three ways. It never removes neurons of the last layer: set the sparsity of that layer to
    None in `custom_sparsity_map` for the same effect. It counts one neuron too many among the
    neurons that stay, and counts a salient weight twice if both scores choose the weight.

    Attributes:
      min_salient: fraction of the mean fan-in, in [0, 1]; a neuron with fewer salient weights is
        removed. The source uses 0.3, and 0.95 for transformers. `None` removes no neuron, so that
        masks of a compact model can move.

    Source: Lasby et al. 2024, "Dynamic sparse training with structured sparsity", algorithm 1.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> half = sparsity.Uniform(0.5)
      >>> pruner = SRigL(scheduler=sparsity.PeriodicSchedule(100), sparsity_distribution_fn=half)
      >>> state = pruner.wrap_optax(optax.sgd(0.1)).init(jnp.ones((4, 3)))
      >>> state.masks.sum(axis=0).tolist()  # weights of each neuron
      [2, 2, 2]
    """

    keeps_count: ClassVar[KeepsCount] = "at most"  # the fan-in is rounded down
    searches_columns: ClassVar[bool] = True

    min_salient: float | None = 0.3

    def check_fields(self) -> None:
        super().check_fields()
        if self.min_salient is not None:
            check_fraction("min_salient", self.min_salient)
        if isinstance(self.sparsity_type, SparsityType):
            self._check_pattern(self.sparsity_type)
        if self.topk_fn is not None or not is_layerwise(self.scope):
            raise ValueError(
                f"{type(self).__name__} chooses the weights of each neuron itself and needs "
                f"topk_fn = None and scope = Layerwise(), got {self.topk_fn!r} and {self.scope!r}."
            )

    def init_state(self, params: Params, *, sites: Sites | None = None) -> SparseState:
        sites = sites or self.sites(params)
        leaves = trees.leaves_by_path(params)
        targets = self.compute_targets(params, sites)
        for path, target in trees.leaves_by_path(targets).items():
            site = sites[path]
            self._check_pattern(site.pattern, f" for {site.name!r}")
            shape = leaves[path].shape[site.batch_axes :] or (1,)
            kept = 0 if is_traced(target) else num_kept(math.prod(shape), float(target))
            if 0 < kept < shape[-1]:
                raise ValueError(
                    f"{type(self).__name__} keeps a weight of every neuron, but a sparsity of "
                    f"{target} leaves {site.name!r} of shape {leaves[path].shape} fewer than its "
                    f"{shape[-1]} neurons. Lower it with dist_type='erk' or custom_sparsity_map."
                )
        return super().init_state(params, sites=sites)

    def _check_pattern(self, pattern: SparsityType, place: str = "") -> None:
        if not pattern.is_elementwise:
            raise ValueError(
                f"{type(self).__name__} keeps equally many weights in every neuron and needs "
                f"sparsity_type = Unstructured(), got sparsity_type = {pattern!r}{place}. Use RigL."
            )

    def get_initial_masks(
        self, params: Params, target_sparsities: Sparsities, *, sites: Sites | None = None
    ) -> Masks:
        sites = sites or self.sites(params)
        scores = generate_random_scores(params, self.rng_seed)

        def draw(path: trees.KeyPath, score: jax.Array, target: PyTree) -> jax.Array | None:
            if target is None:
                return None
            draw_mask = functools.partial(_draw_fan_in, sites[path].batch_axes)
            return sharding.place_like(score, sharding.shard_like(score, draw_mask, score, target))

        return trees.map_matched(draw, scores, target_sparsities)

    def count_after_move(
        self, site: Site, shape: tuple[int, ...], kept: int, target: chex.Numeric | None
    ) -> int | None:
        if self.min_salient is not None or target is None or is_traced(target):
            return None
        size = math.prod(shape[site.batch_axes :])
        neurons = (shape[site.batch_axes :] or (1,))[-1]
        return neurons * min(size // neurons, num_kept(size, float(target)) // neurons)

    def new_masks(self, sparse_state: SparseState, inputs: StepInputs) -> Masks:
        drop_scores, grow_scores, fraction = self.score_move(sparse_state, inputs)

        def move(
            path: trees.KeyPath, drop: PyTree, grow: PyTree, mask: PyTree, target: PyTree
        ) -> PyTree:
            if mask is None:
                return None
            axes = inputs.sites[path].batch_axes
            update = functools.partial(
                constant_fan_in, min_salient=self.min_salient, batch_axes=axes
            )
            moved = sharding.shard_like(mask, update, mask, drop, grow, fraction, target)
            return sharding.place_like(mask, moved)

        masks, targets = sparse_state.masks, sparse_state.target_sparsities
        return trees.map_matched(move, drop_scores, grow_scores, masks, targets)


def constant_fan_in(
    mask: jax.Array,
    drop_scores: jax.Array,
    grow_scores: jax.Array,
    drop_fraction: chex.Numeric,
    sparsity: chex.Numeric,
    *,
    min_salient: float | None = 0.3,
    batch_axes: int = 0,
) -> jax.Array:
    """Moves the mask of a layer so that all remaining neurons have the same fan-in.

    The module describes the steps. Ties go to the lower index. Removed neurons may return.

    Args:
      mask: [*batch, ..., neurons] uint8, the current mask.
      drop_scores: same shape, |weight|.
      grow_scores: same shape, |gradient|.
      drop_fraction: scalar in [0, 1].
      sparsity: scalar in [0, 1], the target sparsity of the layer.
      min_salient: as in `SRigL`.
      batch_axes: number of leading axes that index separate layers.

    Returns:
      uint8 mask of the same shape.
    """
    if not mask.size:
        return mask
    shape = mask.shape[batch_axes:]
    neurons, inputs = shape[-1], math.prod(shape[:-1])
    input_axes = tuple(range(batch_axes, mask.ndim - 1))
    budget = jnp.asarray(num_kept(neurons * inputs, sparsity))

    count_by_neuron = functools.partial(_count_by_neuron, batch_axes=batch_axes)

    # Step 1: salient weights, of all neurons together
    active = jnp.sum(count_by_neuron(mask), -1, jnp.int32)
    k = jnp.asarray(num_kept(active, drop_fraction))
    kept = topk_mask(drop_scores, k, where=mask, batch_axes=batch_axes)
    grown = topk_mask(grow_scores, active - k, where=1 - kept, batch_axes=batch_axes)
    # Step 2: the neurons that stay
    is_kept = _select_neurons(count_by_neuron(kept | grown), inputs, budget, min_salient)
    # Step 3: the fan-in
    fan_in = jnp.minimum(inputs, budget // jnp.sum(is_kept, -1, jnp.int32))

    # Step 4: candidates, in the neurons that stay
    candidates = mask * jnp.expand_dims(is_kept, input_axes).astype(jnp.uint8)
    kept = lax.cond(  # without a loss the k highest are those of all neurons
        jnp.any(count_by_neuron(candidates) < count_by_neuron(mask)),
        lambda: topk_mask(drop_scores, k, where=candidates, batch_axes=batch_axes),
        lambda: kept,
    )
    # Steps 4 and 5: each neuron keeps its best candidates, then grows
    counts, max_kept = count_by_neuron(kept), jnp.where(is_kept, fan_in[..., None], 0)
    topk = functools.partial(topk_mask, batch_axes=batch_axes, last_axes=1)
    kept = lax.cond(
        jnp.any(counts > max_kept), lambda: topk(drop_scores, max_kept, where=kept), lambda: kept
    )
    return kept | topk(grow_scores, jnp.maximum(max_kept - counts, 0), where=1 - kept)


def _count_by_neuron(mask: jax.Array, batch_axes: int) -> jax.Array:
    """Counts the weights of each neuron, int32[*batch, neurons].

    By tiles of inputs: for sums down complete columns a TPU transposes all that the step carries.
    Tiles of a mask on several devices would gather the mask.
    """
    if not use_flat(mask):
        return count(mask != 0, range(batch_axes, mask.ndim - 1))
    batch, neurons = mask.shape[:batch_axes], mask.shape[-1]
    rows = (mask != 0).reshape(*batch, -1, neurons)
    padding = [(0, 0)] * batch_axes + [(0, -rows.shape[-2] % 16), (0, 0)]
    tiles = jnp.pad(rows, padding).reshape(*batch, -1, 16, neurons)
    return jnp.sum(count(tiles, [batch_axes + 1]), batch_axes, jnp.int32)


def _select_neurons(
    counts: jax.Array, inputs: int, budget: jax.Array, min_salient: float | None
) -> jax.Array:
    """Returns the neurons that stay, bool[*batch, neurons], by their numbers of salient weights."""
    neurons = counts.shape[-1]
    if min_salient is None:
        return counts >= 0
    # Products from numpy: a compiled product may round to another integer.
    bounds = np.maximum(np.floor(min_salient * np.arange(inputs + 1)), 1).astype(np.int32)
    # With so many neurons the fan-in stays below `inputs`.
    fewest = jnp.minimum(neurons, budget // inputs + 1)
    highest_counts = jnp.take(jnp.sort(counts, descending=True), fewest - 1, axis=-1)
    return counts >= jnp.minimum(jnp.asarray(bounds)[budget // neurons], highest_counts)[..., None]


def _draw_fan_in(batch_axes: int, scores: jax.Array, sparsity: chex.Numeric) -> jax.Array:
    """Returns the mask of the highest scores of each neuron, with the largest fan-in in budget."""
    # Each neuron becomes a slice, so that a search per slice keeps the fan-in.
    rows = jnp.moveaxis(scores, -1, batch_axes)
    budget: Any = num_kept(math.prod(rows.shape[batch_axes:]), sparsity)  # traced or not
    fan_in = budget // max(rows.shape[batch_axes], 1)
    mask = topk_mask(rows, fan_in, batch_axes=batch_axes + 1)
    return jnp.moveaxis(mask, batch_axes, -1)
