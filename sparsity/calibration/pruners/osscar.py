"""OSSCAR: removes the channels whose readers the kept channels can reconstruct best."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.pruners.base import Problem, Problems
from sparsity.calibration.pruners.channels import ChannelPruning, check_offsets
from sparsity.calibration.pruners.exchange import ReaderMatrices, choose_channels
from sparsity.calibration.refits.least_squares import LeastSquares
from sparsity.calibration.statistics.statistic import Statistic
from sparsity.calibration.statistics.validation import check_solvable, is_finite
from sparsity.core import sharding, trees
from sparsity.core.arrays import promote
from sparsity.core.checks import check_int, check_number
from sparsity.core.trees import Grads, KeyPath, Masks, Params, PyTree, Sparsities
from sparsity.graph.coupled import Member, PlacedGroup
from sparsity.masks import apply_masks
from sparsity.training.hooks import ExtraArg


@dataclasses.dataclass(kw_only=True)
class OSSCARPruning(ChannelPruning):
    """Chooses channels together, so that their readers can make up for the removed ones.

    The kept channels minimize sum((X W - X B)^2) over all weights B that read no other channels,
    summed over all products that read the group. Channels go one after the other, each time the
    one that costs least; then some are exchanged while that helps. Their readers get the exact
    least-squares weights on the kept channels, as `LeastSquares` computes them.
    `scope=Coupled(graph)` names the channels; each group is pruned as if all other groups kept
    all channels. `sparsity.shrink` then cuts out the removed channels.

    This pruner changes weights as well as masks, so it prunes at once and not along a schedule:
    `instant_sparsify(params, statistics=sparsity.calibrate(fn, params, batches, "gram"))`.

    Attributes:
      swap: number of channels that are exchanged at once; halved while that does not help, down
        to 1. 0 exchanges none.
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

    def check_fields(self) -> None:
        super().check_fields()
        check_int("swap", self.swap, 0)
        check_number("damping", self.damping, 0)
        scope = self.readers
        if scope.across or scope.normalize or scope.order != 1:
            raise ValueError(
                f"{type(self).__name__} compares whole sets of channels, which have no scores: "
                f"leave order, normalize and across of Coupled as they are, got scope = "
                f"{self.scope!r}."
            )

    def solve_tree(
        self,
        params: Params,
        targets: Sparsities,
        problems: Problems,
        grads: Grads | None = None,
        **extra_args: ExtraArg,
    ) -> tuple[Params, Masks]:
        check_offsets(self, problems)
        for problem in problems.values():
            self._check_reader(problem)
        readers = self.readers.bind(self.sites(params), None)
        groups = readers.place_groups(params, targets)

        def choose(leaves: Mapping[KeyPath, jax.Array], extra: PyTree) -> list[jax.Array]:
            counts, statistics = extra
            by_key = dict(zip(problems, statistics, strict=True))
            pairs = zip(groups, counts, strict=True)
            return [self._choose_group(group, count, leaves, by_key) for group, count in pairs]

        counts = readers.count_by_sparsity(groups)
        statistics = [problem.statistic for problem in problems.values()]
        masks = readers.make_masks(groups, choose, [params], (counts, statistics))

        def refit(key_path: KeyPath, pruned: jax.Array, mask: jax.Array | None) -> jax.Array:
            if key_path not in problems or mask is None:
                return pruned
            _, dense, statistic, _ = problems[key_path]
            weights, _ = LeastSquares()(dense, pruned, mask, statistic)
            return sharding.place_like(dense, weights)

        return trees.map_matched(refit, apply_masks(params, masks), masks), masks

    def _check_reader(self, reader: Problem) -> None:
        """Raises a ValueError for a parameter that least squares cannot refit."""
        site, param, statistic, _ = reader
        check_solvable(statistic, param, site.name, self.damping)
        if not is_finite(param):
            raise ValueError(
                f"{site.name!r} has weights that are not finite, and cannot be refitted."
            )
        for use in self.readers.graph.uses:
            is_other = sorted(use.contracting) != sorted(statistic.contracting)
            if use.path == trees.path_names(site.key_path) and is_other:
                raise ValueError(
                    f"{site.name!r} reads channels along axes {statistic.contracting}, and a "
                    f"{use.primitive} at {use.source} reads it along {use.contracting}: weights "
                    "that are refitted for the one would change the other. Leave its channels out "
                    "with filter_fn, or use FLAPPruning."
                )

    def _choose_group(
        self,
        group: PlacedGroup,
        count: chex.Numeric,
        leaves: Mapping[KeyPath, jax.Array],
        statistics: Mapping[KeyPath, Statistic],
    ) -> jax.Array:
        """Returns the mask of the channels of a group, uint8[channels] or [layers, channels]."""
        readers = [_read_matrices(group, member, leaves, statistics) for member in group.scored]
        count = jnp.minimum(count, group.channels.size)  # fewer, after the model was shrunk
        mask = choose_channels(readers, count, self.swap, self.damping).astype(jnp.uint8)
        # A group without layers is one layer to the search.
        return mask if group.channels.layers else mask[0]


def _read_matrices(
    group: PlacedGroup,
    member: Member,
    leaves: Mapping[KeyPath, jax.Array],
    statistics: Mapping[KeyPath, Statistic],
) -> ReaderMatrices:
    """Returns a parameter as the matrices that read a group along one of its axes."""
    key_path, axis, positions = member
    if [x.key_path for x in group.scored].count(key_path) > 1:
        raise ValueError(
            f"{trees.path_string(key_path)!r} reads the channels of the group "
            f"{group.channels.name!r} along several axes, so that no channel has inputs of its "
            "own. Leave it out with filter_fn, or use FLAPPruning."
        )
    param, statistic, layers = leaves[key_path], statistics[key_path], group.channels.layers
    matrices, grams = statistic.to_matrices(param), statistic.require_real_grams()
    dtype = promote(matrices.dtype, grams.dtype)

    def by_layer(x: jax.Array) -> jax.Array:
        """Returns [layers, matrices, ...] of [*batch, ...], where axis 0 of `param` is layers."""
        x = jnp.moveaxis(x, statistic.batch.index(0), 0) if layers else x
        return x.reshape(layers or 1, -1, *x.shape[-2:]).astype(dtype)

    # The inputs of a matrix are numbered along all contracting axes, the last one fastest.
    all_inputs = np.arange(grams.shape[-1]).reshape([param.shape[x] for x in statistic.contracting])
    channel_inputs = np.moveaxis(all_inputs, statistic.contracting.index(axis), 0)
    input_indices = channel_inputs[positions].reshape(len(positions), -1)
    return ReaderMatrices(by_layer(matrices), by_layer(grams), jnp.asarray(input_indices))
