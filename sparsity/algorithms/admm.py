"""ADMM: pulls weights towards the nearest sparse network, which replaces them in the end.

Sources: Boyd et al. 2011, "Distributed optimization and statistical learning via the alternating
direction method of multipliers", sections 3.1.1 and 9.1; Zhang et al. 2018, "A systematic DNN
weight pruning framework using alternating direction method of multipliers", section 3; for its use
at high sparsity ELSA, arXiv:2510.01650.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from sparsity.algorithms.pruners import MagnitudePruning
from sparsity.core import sharding, trees
from sparsity.core.arrays import promote
from sparsity.core.checks import check_kind, check_number, is_traced
from sparsity.core.trees import Grads, Masks, Params, PyTree, Sparsities
from sparsity.masks import Sites, adapt_scope, apply_mask
from sparsity.sparsity_schedules import Schedule, boundary_values, find_last_update
from sparsity.training.hooks import ExtraArg, StepInputs
from sparsity.training.state import SparseState


@dataclasses.dataclass(kw_only=True)
class ADMMPruning(MagnitudePruning):
    """Adds rho * (w - z + u) to the gradient until the schedule's end, then keeps the support of z.

    z is the projection P of the weights onto the sparsity, pattern and scope, and u the scaled
    dual. Both are in `algorithm_state`, at least float32. They start as z = P(w), u = 0. At every
    update z = P(w + u), then u = u + w - z. Training is dense until the end step, which prunes;
    without an end training stays dense. A change of rho does not rescale u.

    The class follows the idea of ELSA, not its code: any optimizer may take the steps. The class
    prunes while a network trains. The refit `sparsity.ADMM` solves the layers of a trained model
    by the same method, without training.

    Attributes:
      rho: penalty above 0, or a function of the step. `None` means a linear rise from 0 at step 0
        to 0.1 at the end step, which suits networks: first the loss decides which weights are
        large, then z decides. While rho is small compared with the curvature of the loss, z keeps
        changing.

    Source: Zhang et al. 2018, "A systematic DNN weight pruning framework", section 3; ELSA,
    arXiv:2510.01650, for high sparsity.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> weights = jnp.array([[1.0, -3.0], [2.0, 0.5]])
      >>> schedule = sparsity.PeriodicSchedule(10, update_end_step=100)
      >>> half = sparsity.Uniform(0.5)
      >>> pruner = ADMMPruning(rho=1.0, scheduler=schedule, sparsity_distribution_fn=half)
      >>> tx = pruner.wrap_optax(optax.sgd(0.5))
      >>> state = tx.init(weights)  # z = [[0, -3], [2, 0]]
      >>> pruner.modify_gradients(jnp.zeros((2, 2)), weights, state)
      Array([[1. , 0. ],
             [0. , 0.5]], dtype=float32)
    """

    rho: float | optax.Schedule | None = None

    regrows: ClassVar[bool] = True  # duals add to the scores of pruned weights
    schedule_type: ClassVar[str] = "periodic"
    unused_hooks: ClassVar[Mapping[str, tuple[str, ...]]] = {"new_masks": ("update_state",)}

    def check_fields(self) -> None:
        super().check_fields()
        if self.rho is not None and not callable(self.rho):
            check_number("rho", self.rho, 0)
            if self.rho == 0:
                raise ValueError("rho must be above 0, got rho = 0: no weight would be pulled.")

    def init_algorithm_state(
        self, params: Params, masks: Masks, *, sites: Sites | None = None
    ) -> PyTree:
        if callable(self.rho):
            _check_penalties(self.rho, self.scheduler)
        inputs = self.make_inputs(params, sites=sites)
        targets = self.compute_targets(params, inputs.sites)
        masked = adapt_scope(self.scope, inputs.sites).masked_paths(params, targets)
        weights = trees.map_matched(lambda path, w: _widen(w) if path in masked else None, params)
        z, _ = self._project(weights, targets, inputs)
        return {"z": z, "u": jax.tree.map(lambda w: sharding.zeros_like(w, w.dtype), weights)}

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
        # Z is the projection of W + U; then U <- U + W - Z.
        shifted = trees.map_matched(_add_dual, params, _read_memory(sparse_state)["u"])
        z, support = self._project(shifted, sparse_state.target_sparsities, inputs)
        u = jax.tree.map(jnp.subtract, shifted, z)
        end = find_last_update(self.scheduler)
        is_end = sparse_state.count == (-1 if end is None else end)
        masks = trees.map_matched(
            lambda _, old, mask: old if mask is None else jnp.where(is_end, mask, old),
            sparse_state.masks,
            support,
        )
        return sparse_state._replace(masks=masks, algorithm_state={"z": z, "u": u})

    def modify_gradients(self, grads: Grads, params: Params, sparse_state: SparseState) -> Grads:
        rho = self._compute_penalty(sparse_state.count)

        def pull(
            _: trees.KeyPath,
            grad: jax.Array,
            param: jax.Array,
            z: jax.Array | None,
            u: jax.Array | None,
        ) -> jax.Array:
            if z is None or u is None:
                return grad
            # The gradient of rho / 2 ||W - Z + U||^2
            penalty_gradient = rho.astype(z.dtype) * (param.astype(z.dtype) - z + u)
            return grad + penalty_gradient.astype(grad.dtype)

        memory = _read_memory(sparse_state)
        return trees.map_matched(pull, grads, params, memory["z"], memory["u"])

    def _compute_penalty(self, step: jax.Array) -> jax.Array:
        """Returns rho until the end step, then 0."""
        end = find_last_update(self.scheduler)
        rho: ArrayLike | optax.Schedule | None = self.rho
        if rho is None:
            rho = 0.1 * step.astype(jnp.float32) / end if end else 0.1
        elif callable(rho):
            with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
                rho = rho(step)
        rho = jnp.asarray(rho, jnp.float32)
        return rho if end is None else jnp.where(step < end, rho, 0)

    def _project(
        self, weights: Params, targets: Sparsities, inputs: StepInputs
    ) -> tuple[PyTree, PyTree]:
        """Returns the nearest sparse weights and their support."""
        scores = inputs.call(self.calculate_scores, weights)
        support = inputs.create_masks(self.create_masks, scores, targets, targets)
        return trees.map_matched(_mask_weights, weights, support), support


def _read_memory(state: SparseState) -> dict[str, PyTree]:
    """Returns z and u; raises a ValueError for the state of another algorithm."""
    memory: dict[str, PyTree] = state.algorithm_state
    check_kind("algorithm_state", memory, dict, "the dict of ADMMPruning.init_algorithm_state")
    return memory


def _check_penalties(fn: optax.Schedule, schedule: Schedule) -> None:
    for step, rho in boundary_values(fn, schedule).items():
        if not is_traced(rho):
            check_number(f"rho({step})", np.asarray(jax.device_get(rho))[()], 0)


def _widen(param: jax.Array) -> jax.Array:
    return param.astype(promote(param.dtype, jnp.float32))


def _mask_weights(_: trees.KeyPath, weights: jax.Array, mask: jax.Array | None) -> jax.Array | None:
    return None if mask is None else _apply_jitted(weights, mask)


_apply_jitted = jax.jit(apply_mask)  # an eager call would send its zero to the device


def _add_dual(_: trees.KeyPath, param: jax.Array, u: jax.Array | None) -> jax.Array | None:
    return None if u is None else param.astype(u.dtype) + u
