"""Pruners of channels, which score what the products that read them lose: FLAP and OSSCAR."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.pruners.base import Problem, Problems, StatisticsPruning
from sparsity.calibration.pruners.exchange import ReaderMatrices, choose_channels
from sparsity.calibration.refits.layers import LeastSquares, Means, holds_outputs
from sparsity.calibration.statistics.grams import broadcast_num_rows
from sparsity.calibration.statistics.statistic import Statistic, Statistics
from sparsity.calibration.statistics.sums import StatisticsKind
from sparsity.calibration.statistics.validation import check_solvable, is_finite
from sparsity.core import sharding, trees
from sparsity.core.arrays import promote
from sparsity.core.checks import check_bool, check_int, check_number, is_traced, warn
from sparsity.core.trees import Grads, KeyPath, Masks, Params, Path, PyTree, ScoreTree, Sparsities
from sparsity.graph import Bias, Coupled, Graph
from sparsity.graph.coupled import Member, PlacedGroup
from sparsity.masks import Sites, apply_masks
from sparsity.training.checks import check_gradients
from sparsity.training.hooks import ExtraArg
from sparsity.training.state import SparseState

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


@dataclasses.dataclass(kw_only=True)
class FLAPPruning(ChannelPruning):
    """Removes the channels whose readers lose least if they become constant.

    A channel's importance is its variance x the sum of squares of the weights that read it, over
    all products. `scope=Coupled(graph)` names the channels. The channels of a group compete with
    each other. With `Coupled(graph, across=True)` all channels compete, by importance standardized
    within their group or its layer; a group that keeps less than a twentieth is a warning. The mean
    of a removed channel is added to the biases of its readers, or to a BatchNorm in inference mode
    that follows: to its running mean, if that is among the params, or its shift. `sparsity.shrink`
    then cuts the channel out.

    This pruner changes biases as well as masks, so it prunes at once and not along a schedule:
    `instant_sparsify(params, statistics=sparsity.calibrate(fn, params, batches, "moments"))`.

    Attributes:
      compensate: add the means to biases. A reader without a bias and a BatchNorm is an error then.

    Source: An et al. 2024, "Fluctuation-based Adaptive Structured Pruning for Large Language
    Models", arXiv 2312.11983; the metric WIFV and, with `across`, the structure AL-AM of its code.
    A variance that rounding hides counts as 0: in float32, if the mean is more than about 700
    standard deviations.

    Example:
      >>> import sparsity
      >>> params = {"up": jnp.eye(2), "down": jnp.ones((2, 1)), "bias": jnp.zeros(1)}
      >>> def model(params, x):
      ...     return jax.nn.relu(x @ params["up"]) @ params["down"] + params["bias"]
      >>> x = jnp.array([[0.0, 5.0], [2.0, 5.0]])  # the second channel is large, but constant
      >>> pruner = FLAPPruning(
      ...     scope=sparsity.Coupled(sparsity.trace(model, params, x)),
      ...     sparsity_distribution_fn=sparsity.Uniform(0.5),
      ... )
      >>> seen = sparsity.calibrate(model, params, [x], "moments")
      >>> pruned, masks = pruner.instant_sparsify(params, statistics=seen)
      >>> model(pruned, x).T - model(params, x).T
      Array([[0., 0.]], dtype=float32)
    """

    compensate: bool = True

    statistics_kind: ClassVar[StatisticsKind] = "moments"
    corrects: ClassVar[str | None] = "biases"

    def check_fields(self) -> None:
        super().check_fields()
        check_bool("compensate", self.compensate)

    def calculate_scores(
        self,
        params: Params,
        sparse_state: SparseState | None = None,
        grads: PyTree | None = None,
        statistics: Statistics | None = None,
    ) -> PyTree:
        def score(key_path: KeyPath, param: jax.Array) -> jax.Array:
            statistic = (statistics or {}).get(trees.path_names(key_path))
            if statistic is None or statistic.sums is None:  # it reads no channels
                return sharding.zeros_like(param, np.dtype(np.float32))
            weights = statistic.scale_weights(param)
            scores = sharding.shard_like(param, score_fluctuations, weights, statistic)
            return sharding.place_like(param, scores)

        return trees.map_matched(score, params)

    def create_masks(
        self,
        scores: PyTree,
        sparsities: Sparsities,
        target_sparsities: Sparsities | None = None,
        *,
        sites: Sites | None = None,
    ) -> PyTree:
        readers = self.readers.bind(sites or self.sites(scores), target_sparsities)
        return readers.select_tree(scores, sparsities)

    def solve_tree(
        self,
        params: Params,
        targets: Sparsities,
        problems: Problems,
        grads: Grads | None = None,
        **extra_args: ExtraArg,
    ) -> tuple[Params, Masks]:
        """Returns (weights, masks) of a tree; the hooks of scores and masks get the arguments.

        Args:
          params: tree of parameters.
          targets: tree of sparsities, `None` for parameters that stay dense.
          problems: by path, of `calibrated_paths`.
          grads: tree of gradients, for overrides that score weights by gradients.
          **extra_args: other arguments of `instant_sparsify`.
        """
        check_offsets(self, problems)
        if grads is not None:
            check_gradients(grads, params, targets)
        biases = self._find_biases(params, problems) if self.compensate else {}
        graph, leaves = self.readers.graph, trees.leaves_by_path(params)
        matches = graph.parameters.match(params).items()
        read_value = graph.model.make_reader({x.path: leaves[key_path] for key_path, x in matches})
        statistics = {trees.path_names(key_path): x.statistic for key_path, x in problems.items()}
        extra = {**extra_args, "statistics": statistics}
        inputs = self.make_inputs(params, grads, extra)
        scores = inputs.call(self.calculate_scores, inputs.weights, grads=inputs.grads)
        masks = inputs.call(self.create_masks, scores, targets)
        pruned = trees.leaves_by_path(apply_masks(params, masks))

        def compensate(key_path: KeyPath, bias: jax.Array) -> jax.Array:
            for reader, place in biases.get(key_path, ()):
                _, dense, statistic, _ = problems[reader]
                bias = Means().shift(place, bias, dense, pruned[reader], statistic, read_value)
            return bias

        return trees.map_matched(compensate, params), masks

    def _find_biases(
        self, params: Params, problems: Problems
    ) -> dict[KeyPath, list[tuple[KeyPath, Bias]]]:
        """Returns {bias: the readers whose outputs the bias is added to}."""
        graph, arrays = self.readers.graph, trees.leaves_by_path(params)
        leaves = graph.parameters.match(params)
        keys = {param.path: key_path for key_path, param in leaves.items()}
        biases: dict[KeyPath, list[tuple[KeyPath, Bias]]] = {}
        places = {x: graph.biases.get(leaves[x].path) for x in problems}
        places_in_tree = {x: place for x, place in places.items() if place and place.path in keys}
        if missing := [leaves[x].name for x in problems if x not in places_in_tree]:
            raise ValueError(
                "The model adds no bias of their own to the outputs of "
                f"{trees.listed(missing, len(missing))}, which read channels that are removed, so "
                "that the means of these channels cannot be kept. Give each a bias of zeros, or "
                "compensate=False. A BatchNorm in inference mode serves if its running mean or its "
                "shift is among the params."
            )
        for reader, place in places_in_tree.items():
            bias = keys[place.path]
            if not holds_outputs(graph, leaves[reader].path, place):
                raise ValueError(
                    f"{leaves[reader].name!r} has complex outputs, whose means "
                    f"{trees.path_string(bias)!r}, {arrays[bias].dtype}, cannot hold. Give the "
                    "model a complex bias, or compensate=False."
                )
            biases.setdefault(bias, []).append((reader, place))
        return biases


def score_fluctuations(weights: jax.Array, statistic: Statistic) -> jax.Array:
    """Returns the shares of weights in the importance of their channels."""
    # WIFV_j = sum_i |W_ij|^2 x variance of X_j; the channel sums over its entries of all readers
    matrices, variances = jnp.abs(statistic.to_matrices(weights)), _compute_variances(statistic)
    squares = jnp.square(matrices.astype(promote(matrices.dtype, variances.dtype)))
    return statistic.from_matrices(squares * variances[..., None, :], weights.shape)


def _compute_variances(statistic: Statistic) -> jax.Array:
    """Returns unbiased variances of the inputs, [*batch, inputs]; 0 where rounding hides them."""
    squares = statistic.sums_of_squares()
    count = broadcast_num_rows(statistic, squares.ndim)
    means = jnp.asarray(statistic.sums) / count
    centred_squares = squares - jnp.square(jnp.abs(means)) * count
    # sum x^2 - n mean^2 cancels; a difference within some eps of sum x^2 is rounding.
    exceeds_rounding = centred_squares > 16 * jnp.finfo(squares.dtype).eps * squares
    return jnp.where(exceeds_rounding, centred_squares, 0) / jnp.maximum(count - 1, 1)


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
