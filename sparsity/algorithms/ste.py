"""Straight-through methods: the forward pass is sparse, the weights and their gradients dense.

Source: Bengio et al. 2013, "Estimating or Propagating Gradients Through Stochastic Neurons for
Conditional Computation"; for pruning, Zhou et al. 2021, "Learning N:M Fine-grained Structured
Sparse Neural Networks From Scratch".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax

from sparsity import masks as masks_lib
from sparsity.algorithms.pruners import MagnitudePruning, RandomPruning, generate_random_scores
from sparsity.base_updater import BaseUpdater
from sparsity.core import trees
from sparsity.training.state import SparseState, get_sparse_state


@dataclasses.dataclass
class StraightThrough(BaseUpdater):
    """Masks the weights in `pre_forward_update`, which the training loop calls before the model.

    Attributes:
      store_masks: keep the masks in the state and refresh them at the scheduler's steps, instead of
        making fresh ones at every forward pass; other steps then only apply them.
    """

    store_masks: bool = False

    def pre_forward_update(self, params: chex.ArrayTree, opt_state: Any) -> chex.ArrayTree:
        """Returns masked parameters, with an identity gradient, inside or outside of `jax.grad`."""
        state = get_sparse_state(opt_state)
        masks = state.masks
        if not self.store_masks:
            fixed = jax.lax.stop_gradient(params)
            masks = super().update_state(state, fixed, None).masks
        return trees.map_matched(
            lambda _, param, mask: masks_lib.apply_mask_straight_through(param, mask), params, masks
        )

    def get_initial_masks(
        self, params: chex.ArrayTree, target_sparsities: chex.ArrayTree
    ) -> chex.ArrayTree:
        if self.store_masks:
            return super().get_initial_masks(params, target_sparsities)
        return jax.tree.map(lambda _: None, params)

    def update_state(
        self,
        sparse_state: SparseState,
        params: chex.ArrayTree,
        grads: chex.ArrayTree,
        **extra_args: Any,
    ) -> SparseState:
        if self.store_masks:
            return super().update_state(sparse_state, params, grads, **extra_args)
        return sparse_state

    def post_gradient_update(self, params: chex.ArrayTree, sparse_state: Any) -> chex.ArrayTree:
        """Returns `params`: the weights stay dense."""
        del sparse_state
        return params


@dataclasses.dataclass
class SteMagnitudePruning(StraightThrough, MagnitudePruning):
    """Uses the weights of the largest magnitude in the forward pass and trains all of them."""


@dataclasses.dataclass
class SteRandomPruning(StraightThrough, RandomPruning):
    """Uses other random weights in every forward pass and trains all of them."""

    def calculate_scores(
        self,
        params: chex.ArrayTree,
        sparse_state: SparseState | None = None,
        grads: chex.ArrayTree | None = None,
    ) -> chex.ArrayTree:
        del grads
        step = 0 if sparse_state is None else sparse_state.count
        return generate_random_scores(params, self.rng_seed, step)
