"""FLAP: removes whole channels by how much they vary, and adds what they were on average."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsity import masks as masks_lib
from sparsity.base_updater import BaseUpdater
from sparsity.calibration.counts import Count
from sparsity.calibration.pruners import check_prunes_at_once
from sparsity.calibration.readers import Readers
from sparsity.calibration.statistics import Statistic, Statistics, statistic_of
from sparsity.core import sharding, trees
from sparsity.core.checks import check_bool
from sparsity.core.trees import KeyPath, PyTree
from sparsity.training.hooks import ExtraArg
from sparsity.training.state import SparseState


@dataclasses.dataclass(kw_only=True)
class FLAPPruning(BaseUpdater):
    """Removes the channels whose readers lose least if they become constant.

    A channel's importance is its variance x the sum of squares of the weights that read it, over
    all products that do. `scope=Coupled(graph)` says which channels there are; groups compete by
    themselves, or per multiply-add with its `across`. What a channel was on average is added to the
    biases of its readers. `sparsity.shrink` then cuts it out.

    It changes biases as well as masks, so it prunes at once and not along a schedule:
    `instant_sparsify(params, statistics=sparsity.calibrate(fn, params, batches, "moments"))`.

    Attributes:
      compensate: add the means to biases. A reader without a bias is an error then.

    Source: An et al. 2024, "Fluctuation-based Adaptive Structured Pruning for Large Language
    Models", equations 5 and 6. Its standardized scores are not needed: groups do not share a
    threshold. A variance that rounding hides counts as 0: in float32, where the mean is more than
    about 700 standard deviations.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool("compensate", self.compensate)
        Readers.of(self)
        check_prunes_at_once(self, "biases")

    def calculate_scores(
        self,
        params: PyTree,
        sparse_state: SparseState | None = None,
        grads: PyTree | None = None,
        statistics: Statistics | None = None,
    ) -> PyTree:
        def score(path: KeyPath, param: jax.Array) -> jax.Array:
            own = (statistics or {}).get(trees.path_names(path))
            if own is None or own.sums is None:  # of no reader, or instant_sparsify has refused it
                return sharding.zeros_like(param, np.dtype(np.float32))

            def of(param: jax.Array, own: Statistic) -> jax.Array:
                squares = jnp.square(jnp.abs(own.matrices(param)))
                return own.leaf(squares * _variances(own)[..., None, :], param.shape)

            return sharding.place_like(param, sharding.shard_like(param, of, param, own))

        return trees.map_matched(score, params)

    def create_masks(
        self, scores: PyTree, sparsities: PyTree, target_sparsities: PyTree | None = None
    ) -> PyTree:
        return Readers.of(self).select_tree(scores, sparsities)

    def instant_sparsify(
        self,
        params: PyTree,
        grads: PyTree | None = None,
        *,
        statistics: Statistics | None = None,
        **extra_args: ExtraArg,
    ) -> tuple[PyTree, PyTree]:
        """Prunes and compensates at once.

        Args:
          params: tree of parameters.
          grads: not used.
          statistics: `{path: Statistic}` with squares and sums of the leaves that read channels.
          **extra_args: not used.

        Returns:
          (pruned and compensated params, masks); the masks are packed with `use_packed_masks`.

        Raises:
          ValueError: a statistic is missing or has no sums, or a leaf that loses inputs has no
            bias; the leaf is named.
        """
        table = self.sites(params)
        with masks_lib.in_use(self, table):
            readers = Readers.of(self).scored(params, self._target_sparsities(params))
        leaves = trees.leaves_by_path(params)
        seen = {
            path: statistic_of(
                statistics, table[path], leaves[path].shape, "moments", "FLAPPruning"
            )
            for path in readers
        }
        biases = self._biases(params, readers) if self.compensate else {}
        for path, added in biases.items():
            _check_holds(path, leaves, added, seen)
        given = {trees.path_names(path): own for path, own in seen.items()}
        pruned, masks = super().instant_sparsify(params, grads, statistics=given, **extra_args)
        if not biases:
            return pruned, masks
        after = trees.leaves_by_path(pruned)

        def compensate(path: KeyPath, leaf: Any) -> Any:
            for reader in biases.get(path, ()):
                given = leaf, leaves[reader], after[reader], seen[reader]
                leaf = sharding.place_like(leaf, sharding.shard_like(leaf, _compensated, *given))
            return leaf

        whole = masks_lib.read_masks(masks, params, self.use_packed_masks)
        return masks_lib.apply_masks(trees.map_matched(compensate, pruned), whole), masks

    def _biases(self, params: PyTree, readers: Iterable[KeyPath]) -> dict[KeyPath, list[KeyPath]]:
        """{bias: the readers to whose outputs it is added}."""
        graph = Readers.of(self).graph
        known = graph.match_parameters(params)
        places = {leaf.path: path for path, leaf in known.items()}
        found: dict[KeyPath, list[KeyPath]] = {}
        for reader in readers:
            own = known[reader]
            if (bias := places.get(graph.biases.get(own.path, ()))) is None:
                raise ValueError(
                    f"{own.name!r} reads channels that are removed, and the model adds no bias of "
                    "its own to its outputs, so that what they were on average cannot be kept. "
                    "Give it a bias of zeros, or compensate=False."
                )
            found.setdefault(bias, []).append(reader)
        return found


def _check_holds(
    bias: KeyPath,
    leaves: Mapping[KeyPath, jax.Array],
    readers: Iterable[KeyPath],
    statistics: Mapping[KeyPath, Statistic],
) -> None:
    """Raises a ValueError if a real bias would lose the imaginary parts of what is added."""
    for path in readers:
        is_complex = jnp.iscomplexobj(leaves[path]) or jnp.iscomplexobj(statistics[path].sums)
        if is_complex and not jnp.iscomplexobj(leaves[bias]):
            raise ValueError(
                f"{trees.path_string(path)!r} has complex outputs, whose means "
                f"{trees.path_string(bias)!r}, {leaves[bias].dtype}, cannot hold. Give the model a "
                "complex bias, or compensate=False."
            )


def _compensated(
    bias: jax.Array, dense: jax.Array, pruned: jax.Array, statistic: Statistic
) -> jax.Array:
    """The bias plus what the weights that are gone gave on average."""
    lost = statistic.matrices(dense - pruned)
    added = jnp.sum(lost * _means(statistic)[..., None, :], axis=-1)
    return (bias + added.reshape(bias.shape)).astype(bias.dtype)


def _means(statistic: Statistic) -> jax.Array:
    """Means of the inputs, [*batch, inputs]."""
    return jnp.asarray(statistic.sums) / _counts(statistic)


def _variances(statistic: Statistic) -> jax.Array:
    """Their unbiased variances, 0 where they cannot be told from rounding."""
    count, squares = _counts(statistic), statistic.sums_of_squares()
    spread = squares - jnp.square(jnp.abs(_means(statistic))) * count
    is_seen = spread > 16 * jnp.finfo(squares.dtype).eps * squares
    return jnp.where(is_seen, spread, 0) / jnp.maximum(count - 1, 1)


def _counts(statistic: Statistic) -> jax.Array:
    """Numbers of rows, at least 1, that broadcast to [*batch, inputs]."""
    rows = statistic.count
    count = rows.as_float() if isinstance(rows, Count) else jnp.asarray(rows, jnp.float32)
    missing = statistic.sums_of_squares().ndim - count.ndim
    return jnp.maximum(count.reshape(*count.shape, *[1] * missing), 1)
