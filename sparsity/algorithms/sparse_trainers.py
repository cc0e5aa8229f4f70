"""Sparse training: the network is sparse from the first step to the last.

Sources: SET, Mocanu et al. 2018, "Scalable training of artificial neural networks with adaptive
sparse connectivity inspired by network science"; RigL, Evci et al. 2020, "Rigging the Lottery:
Making All Tickets Winners", algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from sparsity.core.checks import check_fraction, check_function
from sparsity.core.hashing import generate_random_scores
from sparsity.core.trees import Grads, Masks, Params, PyTree, ScoreTree, Sparsities
from sparsity.masks import Global, Scope, Sites, adapt_scope
from sparsity.sparsity_schedules import boundary_values, find_last_update
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.hooks import KeepsCount, StepInputs
from sparsity.training.state import SparseState


@dataclasses.dataclass(frozen=True)
class DropFraction:
    """Fraction that is constant, or falls along a cosine to zero.

    Attributes:
      fraction: value at step 0, in [0, 1].
      steps: first step with the value 0; `None` for a constant fraction.
    """

    fraction: float
    steps: int | None = None

    def __post_init__(self) -> None:
        check_fraction("drop_fraction", self.fraction)

    def __call__(self, step: ArrayLike) -> ArrayLike:
        """Returns the fraction at a step."""
        if self.steps is None:
            return self.fraction
        return optax.cosine_decay_schedule(self.fraction, self.steps)(step)


_MASK_HOOKS = "new_masks", "get_initial_masks", "update_state"


@dataclasses.dataclass(kw_only=True)
class SparseTraining(BaseUpdater):
    """Starts from random masks and keeps gradients of pruned weights out of the optimizer."""

    is_sparse_gradients: bool = True

    prunes_at_once: ClassVar[bool] = False

    def get_initial_masks(
        self, params: Params, target_sparsities: Sparsities, *, sites: Sites | None = None
    ) -> Masks:
        scores = generate_random_scores(params, self.rng_seed)
        inputs, targets = self.make_inputs(params, sites=sites), target_sparsities
        return inputs.create_masks(self.create_masks, scores, targets, targets)


@dataclasses.dataclass(kw_only=True)
class StaticRandomSparse(SparseTraining):
    """Trains within one mask: a random mask, or the mask of `wrap_optax(tx, masks=masks)`.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> weights, mask = jnp.array([[1.0, 0.0, 3.0]]), jnp.array([[1, 0, 1]])
      >>> tx = StaticRandomSparse().wrap_optax(optax.sgd(0.5), masks=mask)
      >>> updates, _ = tx.update(jnp.ones((1, 3)), tx.init(weights), weights)
      >>> optax.apply_updates(weights, updates)
      Array([[0.5, 0. , 2.5]], dtype=float32)
    """

    regrows: ClassVar[bool] = False
    keeps_count: ClassVar[KeepsCount] = "exact"
    unused_hooks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "calculate_scores": ("get_initial_masks", "new_masks", "update_state")
    }

    def new_masks(self, sparse_state: SparseState, inputs: StepInputs) -> Masks:
        return sparse_state.masks


@dataclasses.dataclass(kw_only=True)
class DropAndGrow(SparseTraining):
    """Moves the mask: drops active weights of the lowest magnitude and grows as many others.

    The number of active entries (blocks, channels) of every leaf never changes; with a global
    scope, the number of all leaves together. Regrown weights start at zero with a fresh optimizer
    state. Of a `PolynomialSchedule` only the steps count: no ramp changes the number.

    Attributes:
      drop_fraction_fn: function from the step to the fraction of active weights to replace, in
        [0, 1].
    """

    skip_gradients: bool = True
    drop_fraction_fn: optax.Schedule = DropFraction(0.3)

    regrows: ClassVar[bool] = True
    keeps_count: ClassVar[KeepsCount] = "exact"
    unused_hooks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "calculate_scores": ("get_drop_scores", "get_grow_scores", *_MASK_HOOKS),
        "create_masks": _MASK_HOOKS,
    }
    config_keys: ClassVar[Mapping[str, str]] = {"drop_fraction": "drop_fraction_fn"}
    schedule_type: ClassVar[str] = "periodic"

    def check_fields(self) -> None:
        super().check_fields()
        check_function("drop_fraction_fn", self.drop_fraction_fn, "the step")

    def get_drop_scores(self, sparse_state: SparseState, params: Params, grads: Grads) -> ScoreTree:
        """Returns drop scores; the active weights with the lowest scores are dropped."""
        return jax.tree.map(jnp.abs, params)

    def get_grow_scores(self, sparse_state: SparseState, params: Params, grads: Grads) -> ScoreTree:
        """Returns grow scores; of all weights not kept, those with the highest scores grow."""
        raise NotImplementedError(f"{type(self).__name__} must override get_grow_scores.")

    def init_state(self, params: Params, *, sites: Sites | None = None) -> SparseState:
        for step, fraction in boundary_values(self.drop_fraction_fn, self.scheduler).items():
            check_fraction(f"drop_fraction_fn({step})", fraction)
        return super().init_state(params, sites=sites)

    def new_masks(self, sparse_state: SparseState, inputs: StepInputs) -> Masks:
        scores_and_fraction = self.score_move(sparse_state, inputs)
        scope = adapt_scope(self.scope, inputs.sites)
        return scope.move_tree(sparse_state.masks, *scores_and_fraction)

    def score_move(
        self, sparse_state: SparseState, inputs: StepInputs
    ) -> tuple[ScoreTree, ScoreTree, chex.Numeric]:
        """Returns the scores by which masks move, and the fraction of weights to replace.

        Args:
          sparse_state: the current state.
          inputs: inputs of the step.

        Returns:
          Drop scores, by which active weights are kept; grow scores, by which others grow, both
          trees of arrays; and the fraction of the active weights, in [0, 1].
        """

        args = sparse_state, inputs.masked_weights, inputs.grads
        hooks = self.get_drop_scores, self.get_grow_scores
        drop, grow = (inputs.call(x, *args) for x in hooks)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
            fraction: PyTree = self.drop_fraction_fn(sparse_state.count)
        check_fraction("drop_fraction", fraction)
        return drop, grow, fraction

    @classmethod
    def read_config(cls, options: Mapping[str, object]) -> dict[str, object]:
        """Converts `drop_fraction` to a function that falls along a cosine until the end step."""
        fields: PyTree = dict(options)
        if fields.keys() >= {"drop_fraction", "drop_fraction_fn"}:
            raise ValueError("Give one of drop_fraction and drop_fraction_fn, got both.")
        fraction = fields.pop("drop_fraction", 0.3)
        end = find_last_update(fields["scheduler"]) or None  # a cosine takes a step at least
        converted: dict[str, object] = {"drop_fraction_fn": DropFraction(fraction, end), **fields}
        return converted


@dataclasses.dataclass(kw_only=True)
class SET(DropAndGrow):
    """Drops the active weights of the lowest magnitude and grows as many random ones.

    The initial masks are random. The number of active weights of a parameter never changes. Regrown
    weights start at zero with a fresh optimizer state. A step that moves the mask trains nothing,
    unless `skip_gradients=False`. Use a `PeriodicSchedule`.

    Attributes:
      drop_fraction_fn: function from the step to the fraction of active weights that an update
        replaces; 0.3 by default.

    Source: Mocanu et al. 2018, "Scalable training of artificial neural networks with adaptive
    sparse connectivity inspired by network science".

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> weights = jnp.arange(1.0, 21.0).reshape(4, 5)
      >>> half = sparsity.Uniform(0.5)
      >>> pruner = SET(scheduler=sparsity.PeriodicSchedule(100), sparsity_distribution_fn=half)
      >>> tx = pruner.wrap_optax(optax.sgd(0.1))
      >>> before = tx.init(weights)
      >>> _, after = tx.update(weights, before, weights)  # step 0 moves the mask
      >>> kept = int((before.masks & after.masks).sum())
      >>> kept, int(after.masks.sum())  # of 10 active weights 3 are dropped, and 3 may grow again
      (7, 10)
    """

    def get_grow_scores(self, sparse_state: SparseState, params: Params, grads: Grads) -> ScoreTree:
        # Step 0 of the random stream drew the initial masks.
        return generate_random_scores(params, self.rng_seed, sparse_state.count + 1)


@dataclasses.dataclass(kw_only=True)
class RigL(DropAndGrow):
    """Drops the active weights of the lowest magnitude and grows those with the largest gradient.

    Fields and behaviour are those of `SET`, except for the weights that grow.

    Source: Evci et al. 2020, "Rigging the Lottery: Making All Tickets Winners", algorithm 1.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> weights, mask = jnp.array([[1.0, 2.0, 0.0, 0.0]]), jnp.array([[1, 1, 0, 0]])
      >>> pruner = RigL(
      ...     scheduler=sparsity.PeriodicSchedule(100),
      ...     drop_fraction_fn=optax.constant_schedule(0.5),
      ...     sparsity_distribution_fn=sparsity.Uniform(0.5),
      ... )
      >>> tx = pruner.wrap_optax(optax.sgd(0.1), masks=mask)
      >>> grads = jnp.array([[0.0, 0.0, 1.0, -5.0]])
      >>> _, state = tx.update(grads, tx.init(weights), weights)  # step 0 moves the mask
      >>> state.masks
      Array([[0, 1, 0, 1]], dtype=uint8)
    """

    def get_grow_scores(self, sparse_state: SparseState, params: Params, grads: Grads) -> ScoreTree:
        if grads is None:
            raise ValueError(
                f"{type(self).__name__} grows weights by their gradients, got grads = None: pass "
                "them."
            )
        return jax.tree.map(jnp.abs, grads)


@dataclasses.dataclass(kw_only=True)
class GlobalRigL(RigL):
    """Moves the masks as RigL does, but lets layers trade weights within a constant total.

    Example:
      >>> import jax.numpy as jnp, optax, sparsity
      >>> params = {"a": jnp.ones((4, 5)), "b": jnp.ones((2, 5))}
      >>> schedule, half = sparsity.PeriodicSchedule(100), sparsity.Uniform(0.5)
      >>> pruner = GlobalRigL(scheduler=schedule, sparsity_distribution_fn=half)
      >>> masks = pruner.wrap_optax(optax.sgd(0.1)).init(params).masks
      >>> int(masks["a"].sum() + masks["b"].sum())
      15
    """

    scope: Scope = Global()
