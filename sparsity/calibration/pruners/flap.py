"""FLAP: removes channels of low variance, and adds their means to biases."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sparsity.calibration.pruners.base import Problems
from sparsity.calibration.pruners.channels import ChannelPruning, check_offsets
from sparsity.calibration.refits.means import Means, holds_outputs
from sparsity.calibration.statistics.errors import broadcast_num_rows
from sparsity.calibration.statistics.row_sums import StatisticsKind
from sparsity.calibration.statistics.statistic import Statistic, Statistics
from sparsity.core import sharding, trees
from sparsity.core.arrays import promote
from sparsity.core.checks import check_bool
from sparsity.core.trees import Grads, KeyPath, Masks, Params, PyTree, Sparsities
from sparsity.graph import Bias
from sparsity.masks import Sites, apply_masks
from sparsity.training.checks import check_gradients
from sparsity.training.hooks import ExtraArg
from sparsity.training.state import SparseState


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
            scores = sharding.shard_like(param, _score_fluctuations, weights, statistic)
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


def _score_fluctuations(weights: jax.Array, statistic: Statistic) -> jax.Array:
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
