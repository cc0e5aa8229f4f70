"""The base of all algorithms: options, hooks and entry points.

`BaseUpdater.wrap_optax` turns any optax transformation into one that keeps masks in its state. An
algorithm overrides a hook, usually `calculate_scores`; `step.py` calls the hooks and takes care of
packing, sparse updates, the state of regrown weights and the inner optimizer.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity import masks as masks_lib
from sparsity import sparsity_distributions
from sparsity.core import trees
from sparsity.sparsity_schedules import NoUpdateSchedule
from sparsity.sparsity_types import (
    NByM,
    SparsityType,
    Unstructured,
    check_bool,
    check_fraction,
    check_int,
)
from sparsity.training import step
from sparsity.training.state import (
    SparseState,
    apply_masks,
    fit_masks,
    get_sparse_state,
    place_masks,
)

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class BaseUpdater:
    """Wraps an optimizer with sparsity; subclasses say what a weight is worth.

    Attributes:
      scheduler: when masks are updated and how sparse they are then.
      skip_gradients: leave weights and optimizer state as they are in steps that update masks.
      is_sparse_gradients: apply the masks to the gradients that the inner optimizer sees.
      sparsity_type: a type, or a function of (path, param) that returns one.
      sparsity_distribution_fn: from params to a tree of target sparsities; `None` leaves all dense.
      rng_seed: an int or a jax random key, for the algorithms that draw.
      use_packed_masks: store one bit a weight instead of a byte.
      topk_fn: `topk_fn(scores, sparsity) -> mask` replaces the exact selection of the highest
        scores; it is called for each slice.
      is_sparse_updates: return updates that put pruned weights at exactly 0.0 by themselves, so
        that a loop without `post_gradient_update` stays sparse. It takes finite weights, and the
        wrapper as the last transformation: scaling or clipping goes inside. `None` means on, unless
        the class overrides `post_gradient_update` or `apply_masks`.
      batch_axes: number of leading axes that index separate matrices (scanned layers, experts), or
        a function of (path, param); each slice has its own exact mask.

    Example:
      >>> import functools, optax
      >>> @dataclasses.dataclass
      ... class MagnitudePruning(BaseUpdater):
      ...     def calculate_scores(self, params, sparse_state=None, grads=None):
      ...         return jax.tree.map(jnp.abs, params)
      >>> half = functools.partial(sparsity_distributions.uniform, sparsity=0.5)
      >>> pruner = MagnitudePruning(sparsity_distribution_fn=half)
      >>> pruner.instant_sparsify(jnp.array([[1.0, -3.0], [2.0, 0.5]]))[0]
      Array([[ 0., -3.],
             [ 2.,  0.]], dtype=float32)
      >>> tx = pruner.wrap_optax(optax.sgd(0.1))
    """

    scheduler: Any = NoUpdateSchedule()
    skip_gradients: bool = False
    is_sparse_gradients: bool = False
    sparsity_type: SparsityType | Callable[..., SparsityType] = Unstructured()
    sparsity_distribution_fn: Callable[[chex.ArrayTree], chex.ArrayTree] | None = (
        sparsity_distributions.uniform
    )
    rng_seed: int | jax.Array = 8
    use_packed_masks: bool = False
    topk_fn: masks_lib.TopkFn | None = None
    is_sparse_updates: bool | None = None
    batch_axes: sparsity_distributions.BatchAxes = 0

    # Whether weights may come back into the mask and need a fresh optimizer state then.
    regrows: ClassVar[bool] = False

    def __new__(cls, *args: Any, **kwargs: Any) -> BaseUpdater:
        if "is_packed" in kwargs:
            raise TypeError(
                f"{cls.__name__} has no argument is_packed; masks are packed to bits with "
                "use_packed_masks=True."
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        kind = self.sparsity_type
        if not (isinstance(kind, SparsityType) or (callable(kind) and not isinstance(kind, type))):
            raise ValueError(
                "sparsity_type must be Unstructured(), NByM(n, m), Block(shape), Channel(axis) or "
                f"a function of (path, param), got sparsity_type = {kind!r}."
            )
        for name in ("is_mask_update_iter", "get_sparsity_at_step"):
            if not callable(getattr(self.scheduler, name, None)):
                raise ValueError(
                    f"scheduler must have a method {name}, got scheduler = {self.scheduler!r}."
                )
        for name in ("sparsity_distribution_fn", "topk_fn"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise ValueError(f"{name} must be a function or None, got {getattr(self, name)!r}.")
        if not isinstance(self.rng_seed, jax.Array | np.ndarray):
            check_int("rng_seed", self.rng_seed)
        for name in ("skip_gradients", "is_sparse_gradients", "use_packed_masks"):
            check_bool(name, getattr(self, name))
        if self.is_sparse_updates is not None:
            check_bool("is_sparse_updates", self.is_sparse_updates)
        if not callable(self.batch_axes):
            check_int("batch_axes", self.batch_axes, 0)

    # Hooks that algorithms override. Those that `update` calls never see packed masks.

    def calculate_scores(
        self,
        params: chex.ArrayTree,
        sparse_state: SparseState | None = None,
        grads: chex.ArrayTree | None = None,
    ) -> chex.ArrayTree:
        """Returns what each weight is worth: a tree like `params`; the highest scores are kept.

        Args:
          params: tree of parameters, with the present masks applied where pruned weights stay zero.
          sparse_state: the present state, `None` in `instant_sparsify`.
          grads: tree of gradients, where there are any.
        """
        raise NotImplementedError(f"{type(self).__name__} must override calculate_scores.")

    def get_distribution_fn(self) -> Callable[[chex.ArrayTree], chex.ArrayTree] | None:
        """Returns the function from params to target sparsities, `None` if all stays dense."""
        return self.sparsity_distribution_fn

    def get_initial_masks(
        self, params: chex.ArrayTree, target_sparsities: chex.ArrayTree
    ) -> chex.ArrayTree:
        """Returns the masks that the optimizer starts with: by default, all ones.

        Args:
          params: tree of parameters.
          target_sparsities: tree of sparsities, `None` for leaves that stay dense.
        """
        return trees.map_matched(
            lambda _, param, target: (
                None if target is None else jnp.ones_like(param, dtype=jnp.uint8)
            ),
            params,
            target_sparsities,
        )

    def create_masks(
        self,
        scores: chex.ArrayTree,
        sparsities: chex.ArrayTree,
        target_sparsities: chex.ArrayTree | None = None,
    ) -> chex.ArrayTree:
        """Returns masks that keep the highest scores of every leaf.

        Args:
          scores: tree of scores.
          sparsities: tree of sparsities, `None` for leaves that stay dense.
          target_sparsities: where a ramp ends, for N:M types; `sparsities` by default.

        Raises:
          ValueError: a sparsity lies outside [0, 1] or a type does not fit; the leaf is named.
        """

        def create(path: trees.KeyPath, score: Any, sparsity: Any, target: Any) -> Any:
            if sparsity is None:
                return None
            name = trees.path_string(path)
            check_fraction(f"the sparsity of {name!r}", sparsity)
            kind, batch_axes = self.type_of(path, score)
            return masks_lib.create_mask(
                score,
                sparsity,
                kind,
                target=target,
                batch_axes=batch_axes,
                topk_fn=self.topk_fn,
            )

        return trees.map_matched(create, scores, sparsities, target_sparsities, role="scores")

    def update_state(
        self,
        sparse_state: SparseState,
        params: chex.ArrayTree,
        grads: chex.ArrayTree,
        **extra_args: Any,
    ) -> SparseState:
        """Returns the state with new masks; called in the steps that the scheduler chooses.

        Args:
          sparse_state: the present state.
          params: tree of parameters, as in `calculate_scores`.
          grads: tree of gradients.
          **extra_args: what the training loop passed to `update` beside these; `calculate_scores`
            gets those that it names.
        """
        sparsities = self.scheduler.get_sparsity_at_step(
            sparse_state.target_sparsities, sparse_state.count
        )
        scores = step.call_hook(
            self.calculate_scores, params, sparse_state=sparse_state, grads=grads, extra=extra_args
        )
        targets = {"target_sparsities": sparse_state.target_sparsities}
        masks = step.call_hook(self.create_masks, scores, sparsities, extra=targets)
        return sparse_state._replace(masks=masks)

    def apply_masks(
        self, params: chex.ArrayTree, masks: chex.ArrayTree, is_packed: bool | None = None
    ) -> chex.ArrayTree:
        """Returns `params` with pruned entries at exactly 0.0.

        Args:
          params: tree of parameters (or gradients, or scores).
          masks: tree of masks, packed or not; leaves without one are returned as they are.
          is_packed: kept for programs that pass it; the shape of a mask tells.

        Raises:
          ValueError: a mask has no leaf in `params`, or one of another shape.
        """
        del is_packed
        return apply_masks(params, masks, "params")

    def pre_forward_update(self, params: chex.ArrayTree, opt_state: Any) -> chex.ArrayTree:
        """Returns the parameters for the forward pass; by default as they are.

        Args:
          params: tree of parameters.
          opt_state: a SparseState, or an optimizer state that holds one.
        """
        del opt_state
        return params

    def post_gradient_update(self, params: chex.ArrayTree, sparse_state: Any) -> chex.ArrayTree:
        """Returns the parameters after a step, pruned weights at exactly 0.0.

        Args:
          params: tree of parameters.
          sparse_state: a SparseState, or an optimizer state that holds one.
        """
        return self.apply_masks(params, get_sparse_state(sparse_state).masks)

    # Entry points.

    def instant_sparsify(
        self, params: chex.ArrayTree, grads: chex.ArrayTree | None = None
    ) -> tuple[chex.ArrayTree, chex.ArrayTree]:
        """Prunes at once, without an optimizer.

        Args:
          params: tree of parameters, or a single array.
          grads: tree of gradients, for algorithms that score by them.

        Returns:
          (pruned params, masks); the masks are packed with `use_packed_masks`.
        """
        targets = self._target_sparsities(params)
        scores = self.calculate_scores(params, grads=grads)
        masks = self.create_masks(scores, targets)
        pruned = self.apply_masks(params, masks)
        return pruned, fit_masks(masks, params, self.use_packed_masks)

    def init_state(self, params: chex.ArrayTree) -> SparseState:
        """Returns the state that a wrapped optimizer starts with, without the inner state.

        Raises:
          ValueError: a sparsity lies outside [0, 1] or a type does not fit; the leaf is named.
        """
        targets = self._target_sparsities(params)
        if targets is not None:
            targets = jax.tree.map(lambda target: jnp.array(target, jnp.float32), targets)
        masks = fit_masks(self.get_initial_masks(params, targets), params, self.use_packed_masks)
        return SparseState(
            masks=place_masks(masks, params),
            target_sparsities=targets,
            count=jnp.zeros([], jnp.int32),
        )

    def wrap_optax(
        self, inner: optax.GradientTransformation
    ) -> optax.GradientTransformationExtraArgs:
        """Returns `inner` with sparsity; masks live in its state, a `SparseState`.

        Args:
          inner: any optax transformation, with its learning rate.

        Returns:
          A transformation whose `update` needs `params` and passes extra arguments on to `inner`
          and to the hooks that name them.
        """
        return step.wrap(
            self, inner, keeps_zeros=self._keeps_zeros(), lands_on_zeros=self._lands_on_zeros()
        )

    def _overrides_nothing(self) -> bool:
        return all(
            getattr(type(self), name) is getattr(BaseUpdater, name)
            for name in ("post_gradient_update", "apply_masks")
        )

    def _lands_on_zeros(self) -> bool:
        return (
            self._overrides_nothing() if self.is_sparse_updates is None else self.is_sparse_updates
        )

    def _keeps_zeros(self) -> bool:
        return self._overrides_nothing() or bool(self.is_sparse_updates)

    def _target_sparsities(self, params: chex.ArrayTree) -> chex.ArrayTree:
        """The distribution's sparsities, checked, without those of leaves that cannot be pruned."""
        distribution_fn = self.get_distribution_fn()
        if distribution_fn is None:
            return None

        def check(path: trees.KeyPath, param: Any, target: Any) -> Any:
            if target is None or not trees.is_prunable(param):
                return None
            name = trees.path_string(path)
            check_fraction(f"the sparsity of {name!r}", target)
            kind, _ = self.type_of(path, param)
            if isinstance(kind, NByM) and not isinstance(target, jax.core.Tracer):
                final = 1.0 - kind.n / kind.m
                if target > 0 and not np.isclose(float(target), final, atol=1e-6):
                    _log.warning(
                        "%s ends at sparsity %g, not at the target %g of %r.",
                        *(kind, final, float(target), name),
                    )
            return target

        return trees.map_matched(
            check,
            params,
            distribution_fn(params),
            others_role="sparsities that sparsity_distribution_fn returns",
        )

    def type_of(self, path: trees.KeyPath, param: Any) -> tuple[SparsityType, int]:
        """Sparsity type and batch axes of a parameter, checked against its shape."""
        names = trees.path_names(path)
        batch_axes = sparsity_distributions.slice_axes(self.batch_axes, names, param)
        kind = self.sparsity_type
        if not isinstance(kind, SparsityType):
            kind = kind(names, param)
        masks_lib.check_type(kind, param.shape, batch_axes, trees.path_string(path))
        return kind, batch_axes


@dataclasses.dataclass
class NoPruning(BaseUpdater):
    """Keeps all parameters dense: the reference to compare with."""

    sparsity_distribution_fn: Callable[[chex.ArrayTree], chex.ArrayTree] | None = None

    def get_initial_masks(
        self, params: chex.ArrayTree, target_sparsities: chex.ArrayTree
    ) -> chex.ArrayTree:
        del target_sparsities
        return jax.tree.map(lambda _: None, params)

    def update_state(self, sparse_state, params, grads):  # type: ignore[no-untyped-def]
        del params, grads
        return sparse_state

    def instant_sparsify(
        self, params: chex.ArrayTree, grads: chex.ArrayTree | None = None
    ) -> tuple[chex.ArrayTree, chex.ArrayTree]:
        del grads
        return params, self.get_initial_masks(params, None)
