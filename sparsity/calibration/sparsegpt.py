"""SparseGPT: prunes the weights of a layer and corrects those that stay."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp

from sparsity import masks as masks_lib
from sparsity.base_updater import BaseUpdater
from sparsity.calibration.pruners import check_groups, check_prunes_at_once
from sparsity.calibration.rows import Kind
from sparsity.calibration.statistics import (
    Statistic,
    Statistics,
    check_real,
    is_finite,
    statistic_of,
    warn_of_few_rows,
)
from sparsity.calibration.sweep import sweep
from sparsity.core import sharding, trees
from sparsity.core.checks import check_int, check_number
from sparsity.core.trees import KeyPath, PyTree
from sparsity.masks import Layerwise, Site
from sparsity.patterns import NByM, Unstructured
from sparsity.patterns.base import absolute_axis
from sparsity.training.hooks import ExtraArg


@dataclasses.dataclass(kw_only=True)
class SparseGPTPruning(BaseUpdater):
    """Prunes block by block of the inputs, each time correcting the weights that come after.

    It changes weights as well as masks, so it prunes at once and not along a schedule:
    `instant_sparsify(params, statistics=statistics)`. Training goes on from its masks:
    `pruner.wrap_optax(tx, masks=masks)`.

    Within a block of inputs the weights of all outputs compete; through each block num_kept of the
    entries so far stay. An N:M group is chosen when its first input is reached, so that blocks do
    not matter. Weights of inputs that were always 0 go first. Grouped convolutions and batch axes
    are separate matrices. The inputs come in the order of the leaf, the axis of N:M groups last.

    Attributes:
      block_size: inputs whose weights are chosen at once.
      damping: added to the diagonal of the Gram matrix, in units of its mean over the inputs that
        were not always 0.

    Source: Frantar & Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in
    One-Shot". Its code keeps a weight more or less by blocks, and takes ties otherwise.

    Example:
      >>> from sparsity.sparsity_distributions import Uniform
      >>> x = jnp.array([[1.0, 1.0], [1.0, 0.0]])
      >>> seen = Statistic(gram=x.T @ x, count=2, contracting=(0,), output=(1,))
      >>> pruner = SparseGPTPruning(sparsity_distribution_fn=Uniform(0.5), damping=0.0)
      >>> pruner.instant_sparsify(jnp.array([[1.0], [4.0]]), statistics={(): seen})[0]
      Array([[0.],
             [5.]], dtype=float32)
    """

    block_size: int = 128
    damping: float = 0.01

    statistics_kind: ClassVar[Kind] = "gram"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("block_size", self.block_size, 1)
        check_number("damping", self.damping, 0)
        check_prunes_at_once(self, "weights")
        own_select = getattr(type(self.scope), "select", None) is not Layerwise.select
        if own_select or self.topk_fn is not None:
            raise ValueError(
                "SparseGPTPruning selects within blocks of a layer and needs scope = Layerwise() "
                f"and topk_fn = None, got scope = {self.scope!r}, topk_fn = {self.topk_fn!r}."
            )

    def instant_sparsify(
        self,
        params: PyTree,
        grads: PyTree | None = None,
        *,
        statistics: Statistics | None = None,
        **extra_args: ExtraArg,
    ) -> tuple[PyTree, PyTree]:
        """Prunes and corrects at once.

        Args:
          params: tree of parameters, or a single array.
          grads: not used.
          statistics: `{path: Statistic}` with a Gram matrix for each leaf that has a sparsity.
          **extra_args: not used.

        Returns:
          (pruned and corrected params, masks); the masks are packed with `use_packed_masks`.

        Raises:
          ValueError: a statistic is missing or does not fit, or a type is neither `Unstructured`
            nor `NByM` along an axis that is contracted; the leaf is named.
        """
        table = self.sites(params)
        targets = self._target_sparsities(params, table)
        solved: dict[KeyPath, tuple[jax.Array, jax.Array]] = {}

        def prune(path: KeyPath, param: Any, target: Any) -> None:
            if target is not None:
                own = statistic_of(statistics, table[path], param.shape, "gram", "SparseGPTPruning")
                solved[path] = self.prune_leaf(table[path], param, own, target)

        trees.map_matched(prune, params, targets)
        for path, (leaf, _) in solved.items():
            if not is_finite(leaf):
                raise ValueError(
                    f"SparseGPTPruning found no finite weights for {trees.path_string(path)!r}: "
                    f"its Gram matrix is singular with damping = {self.damping}. Raise it, or "
                    "calibrate with more rows than inputs."
                )
        pruned = trees.map_matched(lambda path, leaf: solved.get(path, (leaf,))[0], params)
        masks = trees.map_matched(lambda path, _: solved.get(path, (None, None))[1], params)
        return pruned, masks_lib.pack_masks(masks, params) if self.use_packed_masks else masks

    def prune_leaf(
        self, site: Site, param: jax.Array, statistic: Statistic, sparsity: chex.Numeric
    ) -> tuple[jax.Array, jax.Array]:
        """Returns a leaf pruned and corrected, and its mask.

        Args:
          site: the leaf; its pattern is `Unstructured` or `NByM`.
          param: its weights.
          statistic: with a Gram matrix, as `statistic_of` returns it.
          sparsity: scalar in [0, 1]; above 0 an N:M leaf keeps n of m.

        Raises:
          ValueError: the pattern is another one, or does not lie along the inputs.
        """
        check_real(site.name, param)
        if not param.size:
            return param, jnp.ones(param.shape, jnp.uint8)
        inputs, pattern = statistic.inputs(param.shape), site.pattern
        size, n = min(self.block_size, inputs), None
        if isinstance(pattern, NByM):
            check_groups(site, statistic, param.shape)
            axis = absolute_axis(pattern.axis, site.batch_axes, param.ndim)
            statistic = statistic.innermost(axis, param.shape)
            size, n = pattern.m, pattern.n
        elif not isinstance(pattern, Unstructured):
            raise ValueError(
                "SparseGPTPruning removes single weights, of sparsity_type = Unstructured() or "
                f"NByM(n, m, axis), got {pattern} for {site.name!r}. Use WandaPruning and a refit."
            )
        remedy = f"What the data do not say, damping = {self.damping} decides."
        warn_of_few_rows(statistic, inputs, site.name, remedy)
        prune = functools.partial(_prune, size, n)
        pruned, mask = sharding.shard_like(
            (param, param), prune, param, statistic, sparsity, self.damping
        )
        return sharding.place_like(param, pruned), sharding.place_like(param, mask)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prune(
    size: int,
    n: int | None,
    param: jax.Array,
    statistic: Statistic,
    sparsity: chex.Numeric,
    damping: chex.Numeric,
) -> tuple[jax.Array, jax.Array]:
    def of_matrix(weights: jax.Array, gram: jax.Array) -> tuple[jax.Array, jax.Array]:
        swept = sweep(weights.T, gram, size, n, sparsity, damping)
        return swept.weights.T, swept.mask.T

    pruned, mask = statistic.solve(of_matrix, param)
    return pruned.astype(param.dtype), mask.astype(jnp.uint8)
