"""Global pruners: all layers share one threshold, which determines the sparsity of each layer.

The classes are magnitude and saliency pruning with `scope=Global()`. As in jaxpruner, their fields
replace the distribution.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import chex

from sparsity.algorithms.pruners import MagnitudePruning, SaliencyPruning
from sparsity.core.trees import Masks, ScoreTree, Sparsities
from sparsity.masks import Global, Overrides, Scope, Sites
from sparsity.masks.distributions import Distribution, FilterFn, Uniform, uniform
from sparsity.training.base_updater import BaseUpdater


@dataclasses.dataclass(kw_only=True)
class GlobalPruning(BaseUpdater):
    """Ranks the scores of all selected leaves together; exactly the target is kept in total.

    Attributes:
      sparsity: fraction of the weights of all selected leaves to remove, in [0, 1].
      filter_fn: selects leaves, as in `sparsity.Uniform`.
      custom_sparsity_map: sparsities of leaves that are not ranked with the others, as in
        `sparsity.Uniform`.
      use_normalization: as in `Global`.
      normalization_eps: as in `Global`.
    """

    takes_distribution: ClassVar[bool] = False

    sparsity: float = 0.0
    filter_fn: FilterFn | None = None
    custom_sparsity_map: Overrides | None = None
    use_normalization: bool = True
    normalization_eps: float = 1e-8
    scope: Scope = dataclasses.field(default=Global(), init=False)

    def __post_init__(self) -> None:
        self.scope = Global(self.use_normalization, self.normalization_eps)
        super().__post_init__()

    def check_fields(self) -> None:
        super().check_fields()
        # A subclass may set a scope of its own after this class.
        sets_scope = type(self).__post_init__ is not GlobalPruning.__post_init__
        is_free = sets_scope and type(self.scope) is not Global
        if not is_free and self.scope != Global(self.use_normalization, self.normalization_eps):
            raise ValueError(
                f"{type(self).__name__} makes its scope from use_normalization and "
                f"normalization_eps, got scope = {self.scope!r} with use_normalization = "
                f"{self.use_normalization} and normalization_eps = {self.normalization_eps}. Use "
                "dataclasses.replace(updater, use_normalization=...)."
            )
        if self.sparsity_distribution_fn is not uniform:
            raise ValueError(
                f"{type(self).__name__} ranks all leaves together and takes no "
                "sparsity_distribution_fn. Give it sparsity, filter_fn and custom_sparsity_map."
            )
        self.get_distribution_fn()  # checks the fields

    def create_masks(
        self,
        scores: ScoreTree,
        sparsities: Sparsities = None,
        target_sparsities: Sparsities | None = None,
        *,
        sites: Sites | None = None,
        target_sparsity: chex.Numeric | None = None,
    ) -> Masks:
        """Takes `sparsities` also by the name `target_sparsity`, as in jaxpruner."""
        if sparsities is not None and target_sparsity is not None:
            raise TypeError("create_masks takes either sparsities or target_sparsity.")
        sparsities = target_sparsity if sparsities is None else sparsities
        return super().create_masks(scores, sparsities, target_sparsities, sites=sites)

    def get_distribution_fn(self) -> Distribution | None:
        return Uniform(self.sparsity, self.filter_fn, self.custom_sparsity_map)


@dataclasses.dataclass(kw_only=True)
class GlobalMagnitudePruning(GlobalPruning, MagnitudePruning):
    """Ranks |weight|, divided by the L2 norm of its layer, across all layers.

    The division lets layers of different scales compare. `use_normalization=False` ranks |weight|
    itself: the largest weights of the network stay, and a layer of small weights may vanish.

    Source: Lee et al. 2023, "JaxPruner", for the division.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"large": jnp.array([[100.0, 400.0]]), "small": jnp.array([[1.0, 4.0]])}
      >>> pruner = GlobalMagnitudePruning(sparsity=0.5)
      >>> {name: mask.tolist() for name, mask in pruner.instant_sparsify(params)[1].items()}
      {'large': [[0, 1]], 'small': [[0, 1]]}
      >>> pruner = GlobalMagnitudePruning(sparsity=0.5, use_normalization=False)
      >>> {name: mask.tolist() for name, mask in pruner.instant_sparsify(params)[1].items()}
      {'large': [[1, 1]], 'small': [[0, 0]]}
    """


@dataclasses.dataclass(kw_only=True)
class GlobalSaliencyPruning(GlobalPruning, SaliencyPruning):
    """Ranks |weight * gradient| across all layers, divided as in `GlobalMagnitudePruning`.

    Source: Molchanov et al. 2016, as for `SaliencyPruning`; Lee et al. 2023, "JaxPruner", for the
    division.

    Example:
      >>> import jax.numpy as jnp, sparsity
      >>> params = {"a": jnp.ones((1, 2)), "b": jnp.ones((1, 2))}
      >>> grads = {"a": jnp.array([[4.0, 3.0]]), "b": jnp.array([[2.0, 1.0]])}
      >>> pruner = GlobalSaliencyPruning(sparsity=0.5, use_normalization=False)
      >>> {name: mask.tolist() for name, mask in pruner.instant_sparsify(params, grads)[1].items()}
      {'a': [[1, 1]], 'b': [[0, 0]]}
    """
