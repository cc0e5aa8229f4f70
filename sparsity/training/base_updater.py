"""Base of all algorithms: entry points; fields and hooks are in `hooks`.

`BaseUpdater.wrap_optax` turns any optax transformation into one that keeps masks in its state. An
algorithm overrides a hook, usually `calculate_scores`. `sparsity.training` calls the hooks in each
step and handles packing, sparse updates, the state of regrown weights and the optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self

import optax

from sparsity import masks as masks_lib
from sparsity.core.checks import check_values, warn
from sparsity.core.hashing import DEFAULT_SEED
from sparsity.core.names import Registry
from sparsity.core.trees import Grads, Masks, Params, Tree
from sparsity.training.checks import (
    check_common_fields,
    check_gradients,
    check_masked,
    check_names,
    check_optimizer,
)
from sparsity.training.hooks import (
    ComparedByFields,
    ExtraArg,
    UpdaterHooks,
    check_overrides,
    is_overridden,
    keeps_dense_weights,
)
from sparsity.training.inner import InnerOptimizer, KeptOptimizer, check_static_counts
from sparsity.training.state import check_no_state
from sparsity.training.step import Step


class WrappedOptimizer(optax.GradientTransformationExtraArgs):
    """Transformation that `wrap_optax` returns, with the parts that it is made of.

    Attributes:
      updater: the updater; `None` in a copy that another function made, as `_replace` does.
      inner: the optimizer that was wrapped.
      masks: the initial masks of the user, if any.

    Example:
      >>> import sparsity
      >>> tx = sparsity.StaticRandomSparse().wrap_optax(optax.sgd(0.1))
      >>> init, update = tx
      >>> type(tx.updater).__name__
      'StaticRandomSparse'
    """

    updater: BaseUpdater | None = None
    inner: optax.GradientTransformation | None = None
    masks: Masks | None = None

    @classmethod
    def make(
        cls,
        init: optax.TransformInitFn,
        update: optax.TransformUpdateExtraArgsFn,
        updater: BaseUpdater,
        inner: optax.GradientTransformation,
        masks: Masks | None,
    ) -> Self:
        """Returns the transformation of a step, with its parts."""
        tx = cls(init, update)
        tx.updater, tx.inner, tx.masks = updater, inner, masks
        return tx


@dataclasses.dataclass(kw_only=True)
class BaseUpdater(ComparedByFields, UpdaterHooks):
    """Wraps an optimizer with sparsity; subclasses define the scores of weights.

    This class holds the entry points; `UpdaterHooks` declares and explains the fields and hooks.

    Updaters compare and hash by class and fields, so that they serve as static arguments of
    compiled functions. `dataclasses.replace` makes a changed updater, for which functions compile
    again; assigning a field of an updater that was hashed is an error.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from sparsity import Uniform
      >>> @dataclasses.dataclass
      ... class MagnitudePruning(BaseUpdater):
      ...     def calculate_scores(self, params, sparse_state=None, grads=None):
      ...         return jax.tree.map(jnp.abs, params)
      >>> pruner = MagnitudePruning(sparsity_distribution_fn=Uniform(0.5))
      >>> pruner.instant_sparsify(jnp.array([[1.0, -3.0], [2.0, 0.5]]))[0]
      Array([[ 0., -3.],
             [ 2.,  0.]], dtype=float32)
      >>> tx = pruner.wrap_optax(optax.sgd(0.1))
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        updater = super().__new__(cls)
        # Before the generated __init__, whose TypeError would suggest no name.
        check_names(cls, kwargs)
        return updater

    def __post_init__(self) -> None:
        if self.rng_seed is None:
            self.rng_seed = DEFAULT_SEED
        self.check_fields()

    @classmethod
    def read_config(cls, options: Mapping[str, object]) -> dict[str, object]:
        """Converts keys of a configuration to fields; a class with `config_keys` overrides this.

        Args:
          options: keys of the class, and `scheduler`.
        """
        return dict(options)

    def check_fields(self) -> None:
        """Raises a ValueError that names an invalid field and its value.

        The constructor, `wrap_optax` and `instant_sparsify` call this method, so that assigned
        fields are checked, too. A class with fields of its own extends it.
        """
        check_overrides(type(self), vars(self))
        check_common_fields(self)

    # Entry points.

    def instant_sparsify(
        self, params: Tree, grads: Grads | None = None, **extra_args: ExtraArg
    ) -> tuple[Tree, Masks]:
        """Prunes at once, without an optimizer.

        Args:
          params: tree of parameters, or a single array.
          grads: tree of gradients, for algorithms that score weights by gradients.
          **extra_args: `calculate_scores` and `create_masks` get the arguments that their
            signatures name.

        Returns:
          (pruned params, masks); the masks are packed with `use_packed_masks`.

        Raises:
          ValueError: the algorithm lacks gradients, a parameter to prune has none of its shape, or
            parameters are shapes without values.
          RuntimeError: the algorithm trains sparse from the start (`prunes_at_once`).
        """
        if not self.prunes_at_once:
            raise RuntimeError(
                f"{type(self).__name__} trains sparse from the start and has no instant_sparsify; "
                "wrap an optimizer with wrap_optax, or prune with MagnitudePruning or "
                "RandomPruning."
            )
        self.check_fields()
        remedy = "jax.eval_shape(updater.instant_sparsify, params) computes with shapes."
        check_values("params", params, remedy, may_be_traced=True)
        inputs = self.make_inputs(params, grads, extra_args)
        targets = self.compute_targets(params, inputs.sites)
        if grads is not None:
            check_gradients(grads, params, targets)
        scores = inputs.call(self.calculate_scores, inputs.weights, grads=inputs.grads)
        masks = inputs.call(self.create_masks, scores, targets)
        if is_overridden(self, "create_masks"):
            check_masked(self, "create_masks", masks, inputs.weights, targets)
        masks = masks_lib.read_masks(masks, params, self.use_packed_masks)
        pruned = masks_lib.apply_masks(params, masks)
        return pruned, masks_lib.pack_masks(masks, params) if self.use_packed_masks else masks

    def wrap_optax(
        self, inner: optax.GradientTransformation, masks: Masks | None = None
    ) -> optax.GradientTransformationExtraArgs:
        """Wraps an optimizer so that pruned weights stay exactly 0.

        The wrapper must be the outermost transformation: scaling or clipping its updates would move
        pruned weights away from 0. The state of the wrapper, a `SparseState`, holds the masks.

        Args:
          inner: any optax transformation, with its learning rate.
          masks: initial masks, for example from `instant_sparsify` or an earlier run: an array or
            `None` for each parameter, where all entries but 0 are kept. `static_sparse` keeps these
            masks. By default the algorithm creates the masks.

        Returns:
          A transformation whose `update` needs `params`, and passes extra arguments to `inner` and
          to the hooks that name them: a `WrappedOptimizer`, which shows its parts.

        Raises:
          ValueError: from `init` if a sparsity lies outside [0, 1], a pattern or a mask does not
            fit, or regrown weights could have no fresh state. From `update` if `params` are missing
            or belong to another model. The message names the parameter.

        Example:
          >>> import jax.numpy as jnp
          >>> from sparsity.algorithms import MagnitudePruning
          >>> from sparsity import Uniform
          >>> from sparsity.sparsity_schedules import OneShotSchedule
          >>> params = jnp.array([[1.0, -3.0], [2.0, 0.5]])
          >>> pruner = MagnitudePruning(
          ...     sparsity_distribution_fn=Uniform(0.5), scheduler=OneShotSchedule(0)
          ... )
          >>> tx = pruner.wrap_optax(optax.sgd(0.5))
          >>> updates, state = tx.update(jnp.ones((2, 2)), tx.init(params), params)
          >>> optax.apply_updates(params, updates)
          Array([[ 0. , -3.5],
                 [ 1.5,  0. ]], dtype=float32)
        """
        self.check_fields()
        is_stated = {None} != {self.is_sparse_updates, self.keeps_dense_weights}
        if not is_stated and keeps_dense_weights(self):
            warn(
                f"{type(self).__name__} overrides post_gradient_update or apply_masks, so that "
                "update does not set pruned weights to 0. State in the class whether they keep "
                "their values: keeps_dense_weights = True, or False."
            )
        check_optimizer("inner", inner)
        check_no_state(masks)
        if self.use_compact_state:
            check_static_counts(self, has_masks=masks is not None)
        kind = KeptOptimizer if self.use_compact_state else InnerOptimizer
        step = Step(kind(optax.with_extra_args_support(inner), self, masks))
        return WrappedOptimizer.make(step.init, step.update, self, inner, masks)

    def init(
        self, tx: optax.GradientTransformation, params: Params
    ) -> tuple[Params, optax.OptState]:
        """Returns the parameters and the optimizer state with which training starts.

        `tx.init(params)` chooses masks but cannot change parameters: the first forward pass would
        be dense. This method applies the first masks by `post_gradient_update`.

        Args:
          tx: an optimizer that this updater wrapped, which may be part of a chain.
          params: tree of parameters.

        Example:
          >>> import jax.numpy as jnp
          >>> from sparsity import StaticRandomSparse, Uniform
          >>> updater = StaticRandomSparse(sparsity_distribution_fn=Uniform(0.75))
          >>> tx = updater.wrap_optax(optax.sgd(0.5))
          >>> params, opt_state = updater.init(tx, {"w": jnp.ones((4, 8))})
          >>> int(jnp.sum(params["w"]))
          8
        """
        opt_state = tx.init(params)
        return self.post_gradient_update(params, opt_state), opt_state


ALGORITHM_REGISTRY: Registry[type[BaseUpdater]] = Registry("algorithm")
