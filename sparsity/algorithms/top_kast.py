"""Top-KAST: sparse forward and backward passes over sets of the largest weights.

Source: Jayakumar et al. 2020, "Top-KAST: Top-K always sparse training", sections 2.1 and 2.3.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity.algorithms.pruners import MagnitudePruning
from sparsity.algorithms.ste import StraightThrough
from sparsity.core import trees
from sparsity.core.checks import check_fraction, check_number, is_traced
from sparsity.core.sharding import on_device, shard_like
from sparsity.core.trees import Grads, Masks, Params, PyTree, ScoreTree, Sparsities
from sparsity.masks import Sites, apply_mask, mask_updates
from sparsity.training.base_updater import WrappedOptimizer
from sparsity.training.hooks import ExtraArg, StepInputs
from sparsity.training.state import SparseState


@dataclasses.dataclass(kw_only=True)
class TopKast(StraightThrough, MagnitudePruning):
    """Uses the set A of the largest weights in the forward pass and trains a larger set B.

    The masks hold A, which `pre_forward_update` applies. The `algorithm_state` holds B, which adds
    the next largest weights. Both sets are chosen at initialization and again at each update of the
    schedule. Weights of B get the gradient of the masked network, passed straight through, plus a
    decay: regularization * w within A, and 1 / (1 - sparsity) times as much in B outside of A,
    where weights must grow to stay. Weights outside of B keep their values under any optimizer:
    neither momentum nor weight decay moves them, and their moments see gradients of zero.

    Attributes:
      backward_sparsity: fraction of the weights outside of B, at most the target; a parameter
        with a lower target has B = A. `None` makes B twice as large as A.
      regularization: strength of the decay, at least 0; 1e-4 in the source.

    Source: Jayakumar et al. 2020, "Top-KAST", sections 2.1 and 2.3.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> weights = jnp.array([[1.0, -3.0], [2.0, 0.5]])
      >>> pruner = TopKast(
      ...     sparsity_distribution_fn=sparsity.Uniform(0.75),
      ...     backward_sparsity=0.5,
      ...     scheduler=sparsity.PeriodicSchedule(100),
      ... )
      >>> state = pruner.wrap_optax(optax.sgd(0.1)).init(weights)
      >>> pruner.pre_forward_update(weights, state)  # A
      Array([[ 0., -3.],
             [ 0.,  0.]], dtype=float32)
      >>> state.algorithm_state  # B
      Array([[0, 1],
             [1, 0]], dtype=uint8)
    """

    store_masks: bool = dataclasses.field(default=True, init=False)
    backward_sparsity: float | None = None
    regularization: float = 1e-4

    schedule_type: ClassVar[str] = "periodic"
    unused_hooks: ClassVar[Mapping[str, tuple[str, ...]]] = {"new_masks": ("update_state",)}

    def check_fields(self) -> None:
        super().check_fields()
        if self.is_sparse_updates:
            raise ValueError(
                "is_sparse_updates=True would put the weights between the two masks of "
                f"{type(self).__name__} at 0, which explores them. Leave is_sparse_updates out."
            )
        check_number("regularization", self.regularization, 0)
        if self.backward_sparsity is not None:
            check_fraction("backward_sparsity", self.backward_sparsity)

    def get_initial_masks(
        self, params: Params, target_sparsities: Sparsities, *, sites: Sites | None = None
    ) -> Masks:
        inputs = self.make_inputs(params, sites=sites)
        return self._select_forward(params, target_sparsities, inputs)[1]

    def init_algorithm_state(
        self, params: Params, masks: Masks, *, sites: Sites | None = None
    ) -> PyTree:
        inputs = self.make_inputs(params, sites=sites)
        targets = self.compute_targets(params, inputs.sites)
        _check_backward(self.backward_sparsity, targets)
        scores = inputs.call(self.calculate_scores, params)
        backward = self._select_backward(scores, masks, targets, inputs)
        # A user may pass a mask for a leaf without a target.
        return trees.map_matched(
            lambda _, param, mask, chosen: mask if chosen is None else chosen,
            params,
            masks,
            backward,
        )

    def update_state(
        self,
        sparse_state: SparseState,
        params: Params,
        grads: Grads,
        *,
        sites: Sites | None = None,
        **extra_args: ExtraArg,
    ) -> SparseState:
        inputs = self.make_inputs(params, grads, extra_args, sites)
        targets = sparse_state.target_sparsities
        scores, masks = self._select_forward(params, targets, inputs)
        backward = self._select_backward(scores, masks, targets, inputs)
        return sparse_state._replace(masks=masks, algorithm_state=backward)

    def modify_gradients(self, grads: Grads, params: Params, sparse_state: SparseState) -> Grads:
        compute_gradient = functools.partial(_regularize_gradient, self.regularization)

        def explore_parameter(
            _: trees.KeyPath, grad: jax.Array, param: jax.Array, mask: PyTree, *leaves: PyTree
        ) -> jax.Array:
            if mask is None:
                return grad
            return shard_like(grad, compute_gradient, grad, param, mask, *leaves)

        masks, backward = sparse_state.masks, sparse_state.algorithm_state
        targets = sparse_state.target_sparsities
        return trees.map_matched(explore_parameter, grads, params, masks, backward, targets)

    def wrap_optax(
        self, inner: optax.GradientTransformation, masks: Masks | None = None
    ) -> optax.GradientTransformationExtraArgs:
        """Wraps an optimizer so that weights outside of B get updates of 0."""
        tx = super().wrap_optax(inner, masks)

        def update(
            updates: PyTree, state: PyTree, params: Params | None = None, **extra_args: ExtraArg
        ) -> tuple[PyTree, PyTree]:
            new_state: PyTree
            updates, new_state = tx.update(updates, state, params, **extra_args)
            return mask_updates(updates, new_state.algorithm_state), new_state

        return WrappedOptimizer.make(tx.init, update, self, inner, masks)

    def _select_forward(
        self, params: Params, targets: Sparsities, inputs: StepInputs
    ) -> tuple[ScoreTree, Masks]:
        """Returns the scores of the weights, and the masks of A."""
        scores = inputs.call(self.calculate_scores, params)
        return scores, inputs.create_masks(self.create_masks, scores, targets, targets)

    def _select_backward(
        self, scores: ScoreTree, masks: Masks, targets: Sparsities, inputs: StepInputs
    ) -> PyTree:
        """Returns the masks of B: of A, and of the largest weights outside of A."""
        targets = jax.tree.map(on_device, targets)
        compute_sparsity = functools.partial(_compute_backward_sparsity, self.backward_sparsity)
        sparsities = jax.tree.map(compute_sparsity, targets)

        def raise_scores(_: trees.KeyPath, score: jax.Array, mask: PyTree) -> jax.Array:
            return score if mask is None else shard_like(score, _raise_scores, score, mask)

        raised = trees.map_matched(raise_scores, scores, masks)
        return inputs.create_masks(self.create_masks, raised, sparsities, targets)


# Both are compiled, as eager calls would send their constants to the device.
@jax.jit
def _raise_scores(score: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns scores that rank the weights of A above all others."""
    return jnp.where(mask > 0, jnp.inf, score)


@functools.partial(jax.jit, static_argnums=0)
def _compute_backward_sparsity(sparsity: float | None, target: jax.Array) -> jax.Array:
    return jnp.maximum(2 * target - 1, 0) if sparsity is None else jnp.minimum(sparsity, target)


def _regularize_gradient(
    decay: float,
    grad: jax.Array,
    param: jax.Array,
    mask: jax.Array,
    backward: jax.Array,
    sparsity: chex.Numeric | None,
) -> jax.Array:
    """Returns the gradient of B with its decay, and zeros elsewhere."""
    # A leaf may have a mask without a sparsity: a bias of pruned channels, or a mask of the user.
    kept_share = jnp.mean(mask, dtype=jnp.float32) if sparsity is None else 1 - sparsity
    density = jnp.maximum(kept_share, 1 / max(param.size, 1))  # one weight always stays
    # Weights of A decay at the rate itself, others of B at 1 / D of it, D the density of A.
    decay_rate = decay * jnp.where(mask > 0, 1, 1 / density)
    return apply_mask(grad + (decay_rate.astype(param.dtype) * param).astype(grad.dtype), backward)


def _check_backward(sparsity: float | None, targets: Sparsities) -> None:
    forward = [np.float32(t) for t in jax.tree.leaves(targets) if not is_traced(t)]
    if sparsity is not None and forward and np.float32(sparsity) > max(forward):
        raise ValueError(
            "backward_sparsity must not exceed that of the forward pass, which is "
            f"{max(forward):g}, got backward_sparsity = {sparsity}. Lower it, or leave it out."
        )
