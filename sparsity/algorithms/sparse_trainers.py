"""Sparse training: the network is sparse from the first step to the last.

Sources: SET, Mocanu et al. 2018, "Scalable training of artificial neural networks with adaptive
sparse connectivity inspired by network science"; RigL, Evci et al. 2020, "Rigging the Lottery:
Making All Tickets Winners", algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import optax

from sparsity import masks as masks_lib
from sparsity.algorithms.pruners import generate_random_scores
from sparsity.base_updater import BaseUpdater
from sparsity.core import trees
from sparsity.sparsity_types import check_fraction
from sparsity.training.state import SparseState


@dataclasses.dataclass
class SparseTraining(BaseUpdater):
    """Starts from random masks and keeps gradients of pruned weights out of the optimizer."""

    is_sparse_gradients: bool = True

    def get_initial_masks(
        self, params: chex.ArrayTree, target_sparsities: chex.ArrayTree
    ) -> chex.ArrayTree:
        scores = generate_random_scores(params, self.rng_seed)
        return self.create_masks(scores, target_sparsities)

    def instant_sparsify(
        self, params: chex.ArrayTree, grads: chex.ArrayTree | None = None
    ) -> tuple[chex.ArrayTree, chex.ArrayTree]:
        raise RuntimeError(
            f"{type(self).__name__} trains sparse from the start and has no instant_sparsify; wrap "
            "an optimizer with wrap_optax, or prune with MagnitudePruning or RandomPruning."
        )


@dataclasses.dataclass
class StaticRandomSparse(SparseTraining):
    """Trains within one random mask."""

    def update_state(self, sparse_state, params, grads):  # type: ignore[no-untyped-def]
        del params, grads
        return sparse_state


@dataclasses.dataclass
class DropAndGrow(SparseTraining):
    """Moves the mask: drops active weights of the lowest magnitude and grows as many others.

    The number of active entries (blocks, channels) of every leaf never changes. Regrown weights
    start at zero with a fresh optimizer state.

    Attributes:
      drop_fraction_fn: from the step to the fraction of active weights to replace, in [0, 1].
    """

    skip_gradients: bool = True
    drop_fraction_fn: Callable[[chex.Numeric], chex.Numeric] = optax.constant_schedule(0.3)

    regrows: ClassVar[bool] = True

    def get_drop_scores(
        self, sparse_state: SparseState, params: chex.ArrayTree, grads: chex.ArrayTree
    ) -> chex.ArrayTree:
        """Returns scores by which active weights are kept."""
        del sparse_state, grads
        return jax.tree.map(jnp.abs, params)

    def get_grow_scores(
        self, sparse_state: SparseState, params: chex.ArrayTree, grads: chex.ArrayTree
    ) -> chex.ArrayTree:
        """Returns scores by which weights that were not kept grow."""
        raise NotImplementedError(f"{type(self).__name__} must override get_grow_scores.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.drop_fraction_fn):
            raise ValueError(
                "drop_fraction_fn must be a function of the step, for example "
                f"optax.constant_schedule(0.3), got drop_fraction_fn = {self.drop_fraction_fn!r}."
            )

    def init_state(self, params: chex.ArrayTree) -> SparseState:
        ends = (getattr(self.scheduler, f"update_{end}_step", 0) or 0 for end in ("start", "end"))
        for at in {0, *ends}:
            with jax.ensure_compile_time_eval():
                check_fraction(f"drop_fraction_fn({at})", self.drop_fraction_fn(at))
        return super().init_state(params)

    def update_state(
        self,
        sparse_state: SparseState,
        params: chex.ArrayTree,
        grads: chex.ArrayTree,
        **extra_args: Any,
    ) -> SparseState:
        del extra_args
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules mix integers and floats
            fraction = self.drop_fraction_fn(sparse_state.count)

        def move(path: trees.KeyPath, drop: Any, grow: Any, mask: Any) -> Any:
            if mask is None:
                return None
            kind, batch_axes = self.type_of(path, mask)
            return masks_lib.drop_and_grow(mask, drop, grow, fraction, kind, batch_axes=batch_axes)

        masks = trees.map_matched(
            move,
            self.get_drop_scores(sparse_state, params, grads),
            self.get_grow_scores(sparse_state, params, grads),
            sparse_state.masks,
            role="drop scores",
        )
        return sparse_state._replace(masks=masks)


@dataclasses.dataclass
class SET(DropAndGrow):
    """Grows random weights."""

    def get_grow_scores(
        self, sparse_state: SparseState, params: chex.ArrayTree, grads: chex.ArrayTree
    ) -> chex.ArrayTree:
        del grads
        # Step 0 of the random stream drew the initial masks.
        return generate_random_scores(params, self.rng_seed, sparse_state.count + 1)


@dataclasses.dataclass
class RigL(DropAndGrow):
    """Grows the weights with the largest gradient."""

    def get_grow_scores(
        self, sparse_state: SparseState, params: chex.ArrayTree, grads: chex.ArrayTree
    ) -> chex.ArrayTree:
        del sparse_state, params
        if grads is None:
            raise ValueError("RigL grows weights by their gradients, got grads = None: pass them.")
        return jax.tree.map(jnp.abs, grads)
