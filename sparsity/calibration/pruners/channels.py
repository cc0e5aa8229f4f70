"""Channels scored by the products that read them: a scope, and a base of pruners."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.pruners.base import Problems, StatisticsPruning
from sparsity.core import trees
from sparsity.core.checks import is_traced, warn
from sparsity.core.trees import KeyPath, Masks, Params, Path, ScoreTree, Sparsities
from sparsity.graph import Coupled, Graph

_FEW = 20  # a group that keeps fewer than one of so many channels is worth a warning


@dataclasses.dataclass(frozen=True)
class ReaderChannels(Coupled):
    """Scope of coupled channels in which only the parameters that read a channel score it.

    With `across`, importance is standardized within each group, or each of its layers: groups
    differ in scale by far. Channels without any importance stay out.
    """

    def is_scored(self, graph: Graph, path: Path, axis: int) -> bool:
        return any(use.path == path and axis in use.contracting for use in graph.uses)

    def rank_across(
        self, importance: Sequence[jax.Array], costs: Sequence[Fraction]
    ) -> list[jax.Array]:
        standardized = [_standardize(x) for x in importance]
        joined = jnp.concatenate(standardized)
        # Ranks from 1 replace scores, some of which are negative; 0 is for channels that stay out.
        order = jnp.argsort(jnp.argsort(joined, stable=True, descending=True), stable=True)
        ranks = len(joined) - order
        ends = [*itertools.accumulate(len(x) for x in standardized)]
        return [
            jnp.where(x > -jnp.inf, group_ranks, 0).astype(jnp.float32)
            for x, group_ranks in zip(standardized, jnp.split(ranks, ends[:-1]), strict=True)
        ]

    def select_tree(self, scores: ScoreTree, sparsities: Sparsities) -> Masks:
        masks = super().select_tree(scores, sparsities)
        if self.across:
            self._warn_of_few(masks, sparsities)
        return masks

    def _warn_of_few(self, masks: Masks, sparsities: Sparsities) -> None:
        """Warns of groups that keep less than a twentieth of their channels in some layer."""
        by_path = trees.leaves_by_path(masks)
        for group in self.place_groups(masks, sparsities):
            (key_path, axis, positions), layers = group.members[0], group.channels.layers
            if is_traced(by_path[key_path]):
                continue
            rows = np.moveaxis(np.asarray(by_path[key_path]), axis, -1)
            is_kept = rows.reshape(layers or 1, -1, rows.shape[-1]).max(axis=1)[:, positions]
            num_kept, size = int(is_kept.max(axis=-1).sum(axis=-1).min()), group.full.size
            if num_kept * _FEW < size:
                warn(
                    f"The group {group.channels.name!r} keeps {num_kept} of {size} channels, as "
                    "others matter more. Raise min_channels of Coupled, or leave it out with "
                    "filter_fn."
                )


@dataclasses.dataclass(kw_only=True)
class ChannelPruning(StatisticsPruning):
    """Removes coupled channels by statistics of the products that read them."""

    def check_scope(self) -> None:
        if not isinstance(self.scope, Coupled):
            raise ValueError(
                f"{type(self).__name__} removes channels and needs scope = "
                f"Coupled(sparsity.trace(fn, params, batch)), got scope = {self.scope!r}."
            )

    @property
    def readers(self) -> ReaderChannels:
        """Coupled channels, scored by the products that read them."""
        names = [field.name for field in dataclasses.fields(ReaderChannels) if field.init]
        return ReaderChannels(**{name: getattr(self.scope, name) for name in names})

    def calibrated_paths(self, params: Params, targets: Sparsities) -> Iterable[KeyPath]:
        """Returns the paths of the parameters that read channels with a sparsity.

        Raises:
          ValueError: a parameter with a sparsity has no channels.
        """
        readers = self.readers.bind(self.sites(params), None)
        groups = readers.place_groups(params, targets)
        readers.check_grouped(readers.list_groups(params, targets), targets)
        scored = {key_path for group in groups for key_path, _, _ in group.scored}
        # The order of a set differs by process.
        return [key_path for key_path in trees.leaves_by_path(params) if key_path in scored]


def check_offsets(pruner: ChannelPruning, problems: Problems) -> None:
    """Raises a ValueError for a parameter that products read with an offset."""
    for problem in problems.values():
        if problem.statistic.offset is not None:
            raise ValueError(
                f"{type(pruner).__name__}: products read {problem.site.name!r} plus an array, "
                "which still reads channels that are removed. Add the array to the parameter, or "
                "leave its channels out with filter_fn."
            )


def _standardize(importance: jax.Array) -> jax.Array:
    """Returns (x - mean) / deviation, [channels]; for layers, the means of each rank in order.

    Args:
      importance: [channels] or [layers, channels]; entries of 0 or NaN become -inf.
    """
    layers = jnp.atleast_2d(importance)
    count = layers.shape[1]
    mean = jnp.sum(layers, axis=1)[:, None] / count
    variance = jnp.sum(jnp.square(layers - mean), axis=1)[:, None] / max(count - 1, 1)
    scores = (layers - mean) * jnp.where(variance > 0, jax.lax.rsqrt(variance), 0)
    # The comparison is false for NaN, too.
    scores = jnp.where(layers > 0, scores, -jnp.inf)
    if importance.ndim == 1:
        return scores[0]
    # Layers keep equally many channels: the j-th best channels of all layers go together.
    return jnp.mean(-jnp.sort(-scores, axis=1), axis=0)
