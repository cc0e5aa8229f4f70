"""No pruning: the dense reference, in the same program."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from sparsity.core.trees import Grads, Masks, Params, PyTree, Sparsities, Tree
from sparsity.masks.distributions import Distribution
from sparsity.training.base_updater import BaseUpdater, WrappedOptimizer
from sparsity.training.checks import check_optimizer, check_sparse_state
from sparsity.training.hooks import ExtraArg, StepInputs
from sparsity.training.state import SparseState, check_wrapped_once
from sparsity.training.step import is_placeholder


@dataclasses.dataclass(kw_only=True)
class NoPruning(BaseUpdater):
    """Keeps all parameters dense, as a baseline; calls none of the hooks that prune.

    Example:
      >>> import jax.numpy as jnp
      >>> NoPruning().instant_sparsify(jnp.array([1.0, 2.0]))
      (Array([1., 2.], dtype=float32), None)
    """

    regrows: ClassVar[bool] = False
    takes_distribution: ClassVar[bool] = False

    sparsity_distribution_fn: Distribution | None = None

    def get_initial_masks(self, params: Params, target_sparsities: Sparsities) -> Masks:
        return jax.tree.map(lambda _: None, params)

    def new_masks(self, sparse_state: SparseState, inputs: StepInputs) -> Masks:
        return sparse_state.masks

    def instant_sparsify(
        self, params: Tree, grads: Grads | None = None, **extra_args: ExtraArg
    ) -> tuple[Tree, Masks]:
        self.check_fields()
        return params, self.get_initial_masks(params, None)

    def wrap_optax(
        self, inner: optax.GradientTransformation, masks: Masks | None = None
    ) -> optax.GradientTransformationExtraArgs:
        """Returns `inner` with a SparseState around its state; `params` are optional."""
        self.check_fields()
        if masks is not None:
            raise ValueError(
                f"{type(self).__name__} keeps all parameters dense and takes no masks."
            )
        check_optimizer("inner", inner)
        optimizer = optax.with_extra_args_support(inner)

        def init(params: Params) -> SparseState:
            if is_placeholder(params):
                count = jnp.zeros([], jnp.int32)
                return SparseState(masks=0, inner_state=optimizer.init(params), count=count)
            inner_state = optimizer.init(params)
            check_wrapped_once(inner_state)
            return self.init_state(params)._replace(inner_state=inner_state)

        def update(
            updates: PyTree, state: PyTree, params: Params | None = None, **extra_args: ExtraArg
        ) -> tuple[PyTree, SparseState]:
            check_sparse_state(state)
            updates, inner_state = optimizer.update(
                updates, state.inner_state, params, **extra_args
            )
            count = optax.safe_increment(state.count)
            return updates, state._replace(inner_state=inner_state, count=count)

        return WrappedOptimizer.make(init, update, self, inner, None)
