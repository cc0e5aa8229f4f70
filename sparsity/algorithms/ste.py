"""Straight-through methods: the forward pass is sparse, the weights and their gradients dense.

Source: Bengio et al. 2013, "Estimating or Propagating Gradients Through Stochastic Neurons for
Conditional Computation"; for pruning, Zhou et al. 2021, "Learning N:M Fine-grained Structured
Sparse Neural Networks From Scratch".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity.algorithms.pruners import MagnitudePruning, RandomPruning
from sparsity.core import trees
from sparsity.core.checks import check_bool
from sparsity.core.hashing import generate_random_scores
from sparsity.core.trees import Grads, Masks, Params, ScoreTree, Tree
from sparsity.masks import Sites, apply_mask_straight_through, check_masks, unpack_masks
from sparsity.sparsity_schedules import find_first_update
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.hooks import StepInputs, is_overridden
from sparsity.training.state import SparseState, get_sparse_state


@dataclasses.dataclass(kw_only=True)
class StraightThrough(BaseUpdater):
    """Masks the weights in `pre_forward_update`, which the training loop calls before the model.

    The forward pass is dense before the first step in which the scheduler updates masks. Without a
    schedule it is sparse from step 0 on, or dense with `store_masks`. Without `store_masks`,
    `calculate_scores` and `create_masks` run in `pre_forward_update`: they get no gradients and no
    arguments of `update`.

    Attributes:
      store_masks: keep the masks in the state, and refresh them only at the steps of the scheduler
        instead of at every forward pass. As masks are refreshed after the forward pass of a step,
        the next forward pass is the first sparse one.
    """

    store_masks: bool = False

    keeps_dense_weights: ClassVar[bool | None] = True
    regrows: ClassVar[bool] = True  # weights return with the values that they kept
    unused_hooks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "apply_masks": ("pre_forward_update", "post_gradient_update")
    }

    def check_fields(self) -> None:
        super().check_fields()
        check_bool("store_masks", self.store_masks)
        unused = [
            hook
            for hook in ("get_initial_masks", "new_masks")
            if not self.store_masks and is_overridden(self, hook, StraightThrough)
        ]
        if unused:
            raise ValueError(
                f"{type(self).__name__} overrides {unused[0]}, which makes masks for the state. "
                "Without store_masks the forward pass makes them: set store_masks=True, or "
                "override calculate_scores or create_masks."
            )
        if self.is_sparse_updates and not self.store_masks:
            raise ValueError(
                f"is_sparse_updates=True needs masks in the state, and {type(self).__name__} "
                "without store_masks makes them in the forward pass alone. Set store_masks=True."
            )

    def pre_forward_update(self, params: Tree, opt_state: optax.OptState) -> Tree:
        """Returns masked parameters, with an identity gradient, inside or outside of `jax.grad`."""
        state = get_sparse_state(opt_state)
        masks = self.make_forward_masks(params, state, self.use_packed_masks)

        def apply(_: trees.KeyPath, param: chex.Array, mask: chex.Array | None) -> chex.Array:
            return param if mask is None else apply_mask_straight_through(param, mask)

        return trees.map_matched(apply, params, masks)

    def make_forward_masks(self, params: Params, state: SparseState, is_packed: bool) -> Masks:
        """Returns the masks of a forward pass; hooks get states with masks that are not packed."""
        masks = state.masks
        if self.store_masks:
            check_masks(params, masks, are_packed=is_packed)
            return unpack_masks(masks, params) if is_packed else masks
        weights = jax.lax.stop_gradient(trees.prunable(params))
        masks = super().new_masks(state, self.make_inputs(weights, sites=self.sites(params)))
        return jax.tree.map(lambda mask: self._delay_mask(mask, state.count), masks)

    def _delay_mask(self, mask: jax.Array, step: chex.Numeric) -> jax.Array:
        """Returns the mask from the first update on, ones before."""
        start = find_first_update(self.scheduler)
        return jnp.where(step < start, jnp.ones_like(mask), mask) if start else mask

    def init_state(self, params: Params, *, sites: Sites | None = None) -> SparseState:
        state = super().init_state(params, sites=sites)
        if self.store_masks:
            return state
        return state._replace(masks=jax.tree.map(lambda _: None, params))

    def wrap_optax(
        self, inner: optax.GradientTransformation, masks: Masks | None = None
    ) -> optax.GradientTransformationExtraArgs:
        """Wraps an optimizer as `BaseUpdater.wrap_optax` does, but keeps pruned weights.

        Raises:
          ValueError: the call passes initial masks, which need `store_masks`.
        """
        if masks is not None and not self.store_masks:
            raise ValueError(
                f"{type(self).__name__} makes new masks in every forward pass and would not use "
                "those of wrap_optax(tx, masks=masks): set store_masks=True."
            )
        return super().wrap_optax(inner, masks)

    def new_masks(self, sparse_state: SparseState, inputs: StepInputs) -> Masks:
        if self.store_masks:
            return super().new_masks(sparse_state, inputs)
        return sparse_state.masks

    def post_gradient_update(self, params: Tree, sparse_state: optax.OptState) -> Tree:
        """Returns `params`: the weights stay dense."""
        return params


@dataclasses.dataclass(kw_only=True)
class SteMagnitudePruning(StraightThrough, MagnitudePruning):
    """Uses the weights of the largest magnitude in the forward pass and trains all weights.

    Source: Bengio et al. 2013, "Estimating or propagating gradients through stochastic neurons";
    Zhou et al. 2021, for pruning.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> weights = jnp.array([[1.0, -3.0], [2.0, 0.5]])
      >>> pruner = SteMagnitudePruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> state = pruner.wrap_optax(optax.sgd(0.1)).init(weights)
      >>> pruner.pre_forward_update(weights, state)
      Array([[ 0., -3.],
             [ 2.,  0.]], dtype=float32)
    """


@dataclasses.dataclass(kw_only=True)
class SteRandomPruning(StraightThrough, RandomPruning):
    """Uses different random weights in every forward pass and trains all weights.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> weights = jnp.ones((4, 5))
      >>> pruner = SteRandomPruning(sparsity_distribution_fn=sparsity.Uniform(0.5))
      >>> state = pruner.wrap_optax(optax.sgd(0.1)).init(weights)
      >>> int((pruner.pre_forward_update(weights, state) != 0).sum())
      10
    """

    def calculate_scores(
        self, params: Params, sparse_state: SparseState | None = None, grads: Grads | None = None
    ) -> ScoreTree:
        step = 0 if sparse_state is None else sparse_state.count
        return generate_random_scores(params, self.rng_seed, step)
