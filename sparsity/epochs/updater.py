"""Epoch strategies: pruning that follows a dictionary {epoch: what to prune, and how far}.

`pruning` and `pruning_apply` follow a strategy from outside of the train step, `EpochStrategy` from
within it; `strategies` says what a strategy may be. Weights are scored by their magnitude under
the masks that hold: what was pruned comes back only if a later epoch keeps more, and then at zero.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from sparsity import masks as masks_lib
from sparsity.algorithms import GlobalMagnitudePruning, MagnitudePruning
from sparsity.core import trees
from sparsity.epochs import strategies
from sparsity.sparsity_distributions import BatchAxes, slice_axes
from sparsity.sparsity_schedules import NoUpdateSchedule
from sparsity.sparsity_types import SparsityType, Unstructured, check_int
from sparsity.training import step
from sparsity.training.state import SparseState, apply_masks, fit_masks


def pruning(
    state: Any,
    epoch: int,
    mask_key: chex.ArrayTree = None,
    prune_strategy: strategies.Strategy | None = None,
) -> tuple[bool, chex.ArrayTree]:
    """Makes the masks that a strategy asks for at an epoch.

    Args:
      state: a flax `TrainState`, any object with `params`, or a tree of parameters.
      epoch: the epoch that has just ended.
      mask_key: the masks that hold so far; `None` before the first.
      prune_strategy: `{epoch: {"method": ..., "prune_rate_pattern": ...}}`; see `strategies`.

    Returns:
      (mask_updated, mask_key): whether the strategy names this epoch, and the masks that hold now:
      a tree like the parameters of uint8 masks (1 = keep), `None` for layers that are dense.

    Raises:
      ValueError: the strategy, at this epoch or another, does not fit itself or the parameters.

    Example:
      >>> params = {"kernel": jnp.array([[4.0, -3.0, 2.0, 1.0]]), "bias": jnp.ones(4)}
      >>> strategy = {10: {"method": "str_unified_local", "prune_rate_pattern": (2, 4)}}
      >>> pruning(params, 10, None, strategy)
      (True, {'bias': None, 'kernel': Array([[1, 1, 0, 0]], dtype=uint8)})
    """
    params = getattr(state, "params", state)
    stages = strategies.read(prune_strategy, params)
    if isinstance(epoch, bool) or not hasattr(epoch, "__index__"):
        raise ValueError(f"epoch must be an integer, got epoch = {epoch!r}.")
    if operator.index(epoch) not in stages:
        return False, mask_key
    scores = jax.tree.map(jnp.abs, apply_masks(params, mask_key, "params"))
    return True, _masks(*stages[operator.index(epoch)], scores, mask_key)


def pruning_apply(state: Any, mask_key: chex.ArrayTree) -> tuple[Any, chex.ArrayTree]:
    """Puts pruned weights at exactly 0.0.

    Args:
      state: as in `pruning`; it is not changed.
      mask_key: masks as `pruning` returns them; `None` prunes nothing.

    Returns:
      (state with pruned parameters, mask_key).

    Raises:
      ValueError: a mask has no parameter, or one of another shape.

    Example:
      >>> pruning_apply(jnp.array([3.0, 4.0]), jnp.array([0, 1], jnp.uint8))[0]
      Array([0., 4.], dtype=float32)
    """
    params = apply_masks(getattr(state, "params", state), mask_key, "params")
    if not hasattr(state, "params"):
        return params, mask_key
    for name in ("replace", "_replace"):  # TrainState, NamedTuple
        if hasattr(state, name):
            return getattr(state, name)(params=params), mask_key
    if dataclasses.is_dataclass(state):
        return dataclasses.replace(state, params=params), mask_key  # type: ignore[type-var]
    state = copy.copy(state)
    state.params = params
    return state, mask_key


@dataclasses.dataclass(init=False)
class EpochStrategy(MagnitudePruning):
    """Follows a strategy within the train step: the masks live in the optimizer state.

    After `epoch * steps_per_epoch` updates the masks become those that `pruning` returns for the
    parameters of that time; they are applied in that very update. All layers that the strategy
    names, at whatever epoch, have a mask from the start. Targets and types that summaries show are
    the last ones of each layer.

    Attributes:
      strategy: `{epoch: {"method": ..., "prune_rate_pattern": ...}}`; see `strategies`.
      steps_per_epoch: updates of the optimizer in an epoch.

    Other keyword arguments are those of `BaseUpdater`, without what the strategy says itself:
    scheduler, sparsity type and distribution, and `topk_fn`. With `batch_axes` each slice has its
    own mask, and the layers are those with more than one axis beyond these.

    Example:
      >>> strategy = {1: {"method": "unstr_global", "prune_rate_pattern": 0.9}}
      >>> updater = EpochStrategy(strategy, steps_per_epoch=100)
      >>> [step for step in range(1000) if updater.scheduler.is_mask_update_iter(step)]
      [100]
    """

    strategy: strategies.Strategy = dataclasses.field(kw_only=True)
    steps_per_epoch: int = dataclasses.field(kw_only=True)

    def __init__(self, strategy: strategies.Strategy, steps_per_epoch: int, **options: Any) -> None:
        self.strategy, self.steps_per_epoch = strategy, steps_per_epoch
        check_int("steps_per_epoch", steps_per_epoch, 1)
        steps = tuple(epoch * steps_per_epoch for epoch in strategies.parse(strategy))
        if any(at >= 2**31 for at in steps):
            raise ValueError(f"Steps are counted below 2**31, got epochs at steps {steps}.")
        own = {"scheduler", "sparsity_type", "sparsity_distribution_fn", "topk_fn"} & {*options}
        if own:
            raise ValueError(f"EpochStrategy takes no {sorted(own)}: the strategy says it.")
        super().__init__(scheduler=_AtSteps(steps), **options)

    def get_distribution_fn(self) -> Callable[[chex.ArrayTree], chex.ArrayTree]:
        """Returns the function from params to the last sparsity of every layer."""

        def distribute(params: chex.ArrayTree) -> chex.ArrayTree:
            last: dict[trees.KeyPath, float] = {}
            for stage in strategies.read(self.strategy, params, self.batch_axes).values():
                last |= stage.sparsities
            return trees.map_matched(lambda path, _: last.get(path), params)

        return distribute

    def update_state(
        self,
        sparse_state: SparseState,
        params: chex.ArrayTree,
        grads: chex.ArrayTree,
        **extra_args: Any,
    ) -> SparseState:
        scores = step.call_hook(
            self.calculate_scores, params, sparse_state=sparse_state, grads=grads, extra=extra_args
        )
        stages = list(strategies.read(self.strategy, params, self.batch_axes).values())
        paths = list(dict.fromkeys(path for stage in stages for path in stage.kinds))
        table = [[stage.sparsities.get(path, 0.0) for path in paths] for stage in stages]
        # Epochs that differ in their sparsities only are one branch, compiled once.
        keys = [(stage.is_global, tuple(stage.kinds.items())) for stage in stages]
        branches = list(dict.fromkeys(keys))

        def create(key: Any, sparsities: jax.Array) -> chex.ArrayTree:
            is_global, kinds = key
            known = dict(zip(paths, sparsities, strict=True))
            return _masks(
                is_global, dict(kinds), known, scores, sparse_state.masks, self.batch_axes
            )

        now = jnp.searchsorted(jnp.array(self.scheduler.steps), sparse_state.count)
        masks = jax.lax.switch(
            jnp.array([branches.index(key) for key in keys])[now],
            [functools.partial(create, key) for key in branches],
            jnp.array(table, jnp.float32)[now],
        )
        return sparse_state._replace(masks=masks)

    def instant_sparsify(
        self, params: chex.ArrayTree, grads: chex.ArrayTree | None = None
    ) -> tuple[chex.ArrayTree, chex.ArrayTree]:
        """Prunes as all epochs do, one after the other."""
        masks = None
        for stage in strategies.read(self.strategy, params, self.batch_axes).values():
            scores = self.calculate_scores(self.apply_masks(params, masks), grads=grads)
            masks = _masks(*stage, scores, masks, self.batch_axes)
        return self.apply_masks(params, masks), fit_masks(masks, params, self.use_packed_masks)

    def type_of(self, path: trees.KeyPath, param: Any) -> tuple[SparsityType, int]:
        names = trees.path_names(path)
        batch_axes = slice_axes(self.batch_axes, names, param)
        for entry in reversed(strategies.parse(self.strategy).values()):
            if rule := entry.rule_of(names, param, batch_axes):
                return rule.kind, batch_axes
        return Unstructured(), batch_axes


@dataclasses.dataclass(frozen=True)
class _AtSteps(NoUpdateSchedule):
    """Masks are updated at each of the steps."""

    steps: tuple[int, ...]

    def is_mask_update_iter(self, step: chex.Numeric | None) -> chex.Numeric:
        if step is None:
            return False
        return functools.reduce(operator.or_, (step == at for at in self.steps), False)


def _masks(
    is_global: bool,
    kinds: dict[trees.KeyPath, SparsityType],
    sparsities: Mapping[trees.KeyPath, chex.Numeric],
    scores: chex.ArrayTree,
    masks: chex.ArrayTree,
    batch_axes: BatchAxes = 0,
) -> chex.ArrayTree:
    """The masks that hold after a stage: new ones of the layers that have a kind."""

    def create(path: trees.KeyPath, score: Any, mask: Any) -> Any:
        if path not in kinds:
            return mask
        axes = slice_axes(batch_axes, trees.path_names(path), score)
        return masks_lib.create_mask(score, sparsities[path], kinds[path], batch_axes=axes)

    if not is_global:
        return trees.map_matched(create, scores, masks)
    ranked = {path: sparsities[path] for path in kinds}
    ranked = trees.map_matched(lambda path, _: ranked.get(path), scores)
    new = GlobalMagnitudePruning(batch_axes=batch_axes).create_masks(scores, ranked)
    return trees.map_matched(
        lambda _, score, mask, old: old if mask is None else mask, scores, new, masks
    )
