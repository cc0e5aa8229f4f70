"""OSSCAR: removes the channels whose readers can be reconstructed best from those that stay."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity import masks as masks_lib
from sparsity.base_updater import BaseUpdater
from sparsity.calibration.exchange import Reader, choose
from sparsity.calibration.pruners import check_prunes_at_once
from sparsity.calibration.readers import Readers
from sparsity.calibration.refits import LeastSquares
from sparsity.calibration.statistics import (
    Statistic,
    Statistics,
    check_real,
    is_finite,
    statistic_of,
    warn_of_few_rows,
)
from sparsity.core import trees
from sparsity.core.checks import check_int, check_number
from sparsity.core.sharding import place_like
from sparsity.core.trees import KeyPath, PyTree
from sparsity.graph import Use
from sparsity.graph.channels import PlacedGroup
from sparsity.training.hooks import ExtraArg


@dataclasses.dataclass(kw_only=True)
class OSSCARPruning(BaseUpdater):
    """Chooses channels together, so that what reads them can make up for those that go.

    The channels that stay are to minimize sum((X W - X B)^2) over all weights B that read no
    others, summed over all products that read the group. Channels go one after the other, always
    the one that then costs least; then some are exchanged while that helps. What reads them gets
    its exact least-squares weights on those that stay, as `LeastSquares` finds them.
    `scope=Coupled(graph)` says which channels there are; groups are chosen by themselves, each as
    if the others stayed whole. `sparsity.shrink` then cuts what is gone.

    It changes weights as well as masks, so it prunes at once and not along a schedule:
    `instant_sparsify(params, statistics=sparsity.calibrate(fn, params, batches, "gram"))`.

    Attributes:
      swap: channels that are exchanged at once; halved while that does not help, down to 1. 0
        leaves it at removing one after the other.
      damping: added to the diagonal of the Gram matrices while channels are chosen, in units of its
        mean over the inputs that were not always 0.

    Source: Meng et al. 2024, "OSSCAR: One-Shot Structured Pruning in Vision and Language Models
    with Combinatorial Optimization". Its code keeps the damping in the weights that it returns.

    Example:
      >>> import sparsity
      >>> params = {"up": jnp.eye(3), "down": jnp.array([[3.0], [2.0], [1.0]])}
      >>> def model(params, x):
      ...     return jax.nn.relu(x @ params["up"]) @ params["down"]
      >>> x = jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 2.0, 2.0]])
      >>> pruner = OSSCARPruning(
      ...     scope=sparsity.Coupled(sparsity.trace(model, params, x)),
      ...     sparsity_distribution_fn=sparsity.Uniform(0.3),
      ... )
      >>> seen = sparsity.calibrate(model, params, [x], "gram")
      >>> pruned, masks = pruner.instant_sparsify(params, statistics=seen)
      >>> pruned["down"].T  # the last two channels are alike: one does for both
      Array([[3., 3., 0.]], dtype=float32)
    """

    swap: int = 8
    damping: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("swap", self.swap, 0)
        check_number("damping", self.damping, 0)
        check_prunes_at_once(self, "weights")
        scope = Readers.of(self)
        if scope.across or scope.normalize or scope.order != 1:
            raise ValueError(
                "OSSCARPruning compares whole sets of channels, which have no scores: leave order, "
                f"normalize and across of Coupled as they are, got scope = {self.scope!r}."
            )

    def instant_sparsify(
        self,
        params: PyTree,
        grads: PyTree | None = None,
        *,
        statistics: Statistics | None = None,
        **extra_args: ExtraArg,
    ) -> tuple[PyTree, PyTree]:
        """Prunes and refits at once.

        Args:
          params: tree of parameters.
          grads: not used.
          statistics: `{path: Statistic}` with a Gram matrix for each leaf that reads channels.
          **extra_args: not used.

        Returns:
          (pruned and refitted params, masks); the masks are packed with `use_packed_masks`.

        Raises:
          ValueError: a statistic is missing or has no Gram matrix, or a leaf that reads channels
            does more than that; the leaf is named.
        """
        table, scope = self.sites(params), Readers.of(self)
        targets = self._target_sparsities(params, table)
        readers = scope.scored(params, targets)
        seen: dict[KeyPath, Statistic] = {}
        for path, leaf in trees.leaves_by_path(params).items():
            if path not in readers:
                continue
            shape, name = leaf.shape, table[path].name
            check_real(name, leaf)
            if not is_finite(leaf):
                raise ValueError(
                    f"{name!r} has weights that are not finite, and cannot be refitted."
                )
            seen[path] = statistic_of(statistics, table[path], shape, "gram", "OSSCARPruning")
            remedy = f"What the data do not say, damping = {self.damping} decides."
            warn_of_few_rows(seen[path], seen[path].inputs(shape), name, remedy)
            for use in scope.graph.uses:
                if use.path == trees.path_names(path):
                    _check_use(use, seen[path], name)
        choose = functools.partial(_choose, list(seen), self.swap, self.damping)
        masks = scope.masks_by(choose, params, targets, list(seen.values()))
        pruned = masks_lib.apply_masks(params, masks)

        def refit(path: KeyPath, dense: Any, before: Any, mask: Any) -> Any:
            if path not in seen:
                return before
            after = LeastSquares()(dense, before, mask, seen[path], None)[0]
            return place_like(dense, after)

        pruned = trees.map_matched(refit, params, pruned, masks)
        return pruned, masks_lib.pack_masks(masks, params) if self.use_packed_masks else masks


def _check_use(use: Use, statistic: Statistic, name: str) -> None:
    """Raises a ValueError if a leaf that is refitted for one product is read otherwise, too."""
    if sorted(use.contracting) != sorted(statistic.contracting):
        raise ValueError(
            f"{name!r} reads channels along axes {statistic.contracting}, and a {use.primitive} at "
            f"{use.source} reads it along {use.contracting}: weights that are refitted for the one "
            "would change the other. Leave its channels out with filter_fn, or use FLAPPruning."
        )


def _choose(
    paths: Sequence[KeyPath],
    swap: int,
    damping: float,
    groups: Sequence[PlacedGroup],
    leaves: Mapping[KeyPath, jax.Array],
    kept: Sequence[chex.Numeric],
    statistics: Sequence[Statistic],
) -> list[jax.Array]:
    """The masks of the channels of each group, from the statistics of leaves."""
    seen = dict(zip(paths, statistics, strict=True))
    masks = []
    for group, count in zip(groups, kept, strict=True):
        readers = [_reader(group, place, leaves, seen) for place in group.scored]
        count = jnp.minimum(count, group.channels.size)  # fewer, after the model was shrunken
        mask = choose(readers, count, swap, damping).astype(jnp.uint8)
        masks.append(mask if group.channels.layers else mask[0])
    return masks


def _reader(
    group: PlacedGroup,
    place: tuple[KeyPath, int, np.ndarray],
    leaves: Mapping[KeyPath, jax.Array],
    statistics: Mapping[KeyPath, Statistic],
) -> Reader:
    """A leaf as the matrices that read a group along one of its axes."""
    path, axis, positions = place
    if [path for path, _, _ in group.scored].count(path) > 1:
        raise ValueError(
            f"{trees.path_string(path)!r} reads the channels of the group {group.channels.name!r} "
            "along several axes, so that no channel has inputs of its own. Leave it out with "
            "filter_fn, or use FLAPPruning."
        )
    leaf, own, layers = leaves[path], statistics[path], group.channels.layers
    weights, grams = own.matrices(leaf), own.real_grams()
    if layers:
        weights, grams = (jnp.moveaxis(x, own.batch.index(0), 0) for x in (weights, grams))
    sizes = [leaf.shape[x] for x in own.contracting]
    inputs = np.moveaxis(np.arange(grams.shape[-1]).reshape(sizes), own.contracting.index(axis), 0)
    weights, grams = (x.reshape(layers or 1, -1, *x.shape[-2:]) for x in (weights, grams))
    dtype = jnp.promote_types(weights.dtype, grams.dtype)
    places = jnp.asarray(inputs[positions].reshape(len(positions), -1))
    return Reader(weights.astype(dtype), grams.astype(dtype), places)
