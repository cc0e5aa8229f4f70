"""Epoch strategies: pruning that follows a dictionary {epoch: method and densities}.

`pruning` and `pruning_apply` follow a strategy outside of the train step, `EpochStrategy` follows
it inside; `strategies` defines strategies. Weights are scored by their magnitude under the current
masks. A pruned weight returns only if a later epoch keeps more weights, and starts at zero.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import ClassVar, TypeAlias

import chex
import jax
import jax.numpy as jnp

from sparsity.core import trees
from sparsity.core.checks import check_int
from sparsity.core.trees import Grads, Masks, Params, PyTree, ScoreTree, Tree
from sparsity.epochs import strategies
from sparsity.masks import (
    Global,
    Layerwise,
    Site,
    Sites,
    TopkFn,
    adapt_scope,
    apply_masks,
    leading_axes,
    pack_masks,
    read_masks,
)
from sparsity.masks.distributions import Distribution
from sparsity.patterns import SparsityType, Unstructured
from sparsity.sparsity_schedules import BaseSchedule, NoUpdateSchedule, Schedule
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.hooks import ExtraArg, StepInputs
from sparsity.training.state import SparseState

_BranchKey: TypeAlias = tuple[bool, tuple[tuple[trees.KeyPath, Site], ...]]  # of a `Stage`

# jax_pruning ranks weights without normalization by layer.
_GLOBAL = Global(use_normalization=False)


def pruning(
    state: PyTree,
    epoch: int,
    mask_key: Masks | None = None,
    prune_strategy: strategies.Strategy | None = None,
) -> tuple[bool, Masks]:
    """Creates the masks of a strategy at an epoch.

    Args:
      state: a flax `TrainState`, any object with `params`, or a tree of parameters.
      epoch: the epoch that has just ended.
      mask_key: the current masks; `None` before the first masks.
      prune_strategy: `{epoch: {"method": ..., "prune_rate_pattern": ...}}`; see `strategies`.

    Returns:
      (mask_updated, mask_key): whether the strategy names this epoch, and the current masks: a tree
      like the parameters of uint8 masks (1 = keep), `None` for dense layers.

    Raises:
      ValueError: the strategy is invalid or does not fit the parameters, at this epoch or another;
        `epoch` is no integer; a mask does not fit, as in `pruning_apply`.

    Example:
      >>> params = {"kernel": jnp.array([[4.0, -3.0, 2.0, 1.0]]), "bias": jnp.ones(4)}
      >>> strategy = {10: {"method": "str_unified_local", "prune_rate_pattern": (2, 4)}}
      >>> pruning(params, 10, None, strategy)
      (True, {'bias': None, 'kernel': Array([[1, 1, 0, 0]], dtype=uint8)})
    """
    params = getattr(state, "params", state)
    stages = strategies.resolve(strategies.parse(prune_strategy), params)
    if not isinstance(epoch, bool):
        with contextlib.suppress(TypeError):  # of tracers, too, and of arrays that are no integers
            epoch = operator.index(epoch)
    check_int("epoch", epoch)
    if epoch not in stages:
        return False, mask_key
    masked = apply_masks(params, _read_mask_key(mask_key, params))
    scores = jax.tree.map(jnp.abs, trees.prunable(masked))
    return True, _apply_stage(stages[epoch], scores, mask_key)


def pruning_apply(state: Tree, mask_key: Masks) -> tuple[Tree, Masks]:
    """Puts pruned weights at exactly 0.0.

    Args:
      state: as in `pruning`; not changed.
      mask_key: masks of `pruning`; `None` prunes nothing.

    Returns:
      (state with pruned parameters, mask_key).

    Raises:
      ValueError: a mask has no parameter, or a parameter of another shape, or a parameter has
        neither a mask nor `None`.

    Example:
      >>> pruning_apply(jnp.array([3.0, 4.0]), jnp.array([0, 1], jnp.uint8))[0]
      Array([0., 4.], dtype=float32)
    """
    params = getattr(state, "params", state)
    params = apply_masks(params, _read_mask_key(mask_key, params))
    if not hasattr(state, "params"):
        return params, mask_key
    for name in ("replace", "_replace"):  # TrainState, NamedTuple
        if hasattr(state, name):
            return getattr(state, name)(params=params), mask_key
    if dataclasses.is_dataclass(state):
        return dataclasses.replace(state, params=params), mask_key  # type: ignore[type-var]  # an instance
    state = copy.copy(state)
    state.params = params
    return state, mask_key


@dataclasses.dataclass(kw_only=True)
class EpochStrategy(BaseUpdater):
    """Follows a strategy within the train step: the masks live in the optimizer state.

    After `epoch * steps_per_epoch` updates the masks become those that `pruning` returns for the
    current parameters; the same update applies the masks. A weight that another pattern brings back
    starts at 0 with the optimizer state of `init`. All layers that the strategy names, at
    any epoch, have a mask from the start. Summaries show the last target and type of each layer.
    The strategy determines scheduler, sparsity type, distribution and scope, which are no
    arguments. With `batch_axes` each slice has a separate mask, and kernels are layers with more
    than one axis beyond the batch axes.

    Attributes:
      strategy: `{epoch: {"method": ..., "prune_rate_pattern": ...}}`; see `strategies`.
      steps_per_epoch: updates of the optimizer in an epoch.

    Example:
      >>> strategy = {1: {"method": "unstr_global", "prune_rate_pattern": 0.9}}
      >>> updater = EpochStrategy(strategy, steps_per_epoch=100)
      >>> [step for step in range(1000) if updater.scheduler.is_mask_update_iter(step)]
      [100]
    """

    strategy: strategies.Strategy = dataclasses.field(kw_only=False)
    steps_per_epoch: int = dataclasses.field(kw_only=False)
    scheduler: Schedule = dataclasses.field(default=NoUpdateSchedule(), init=False)
    sparsity_type: SparsityType = dataclasses.field(default=Unstructured(), init=False)
    sparsity_distribution_fn: Distribution | None = dataclasses.field(default=None, init=False)
    scope: Layerwise = dataclasses.field(default=Layerwise(), init=False)
    topk_fn: TopkFn | None = dataclasses.field(default=None, init=False)
    unused_hooks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "create_masks": ("calculate_scores", "new_masks")
    }
    regrows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_int("steps_per_epoch", self.steps_per_epoch, 1)
        self._entries = strategies.parse(self.strategy)
        steps = self._list_update_steps()
        if any(step >= 2**31 for step in steps):
            raise ValueError(f"Steps are counted below 2**31, got epochs at steps {steps}.")
        if any(entry.is_global for entry in self._entries.values()):
            _GLOBAL.check(Unstructured(), self.batch_axes, None)
        self.scheduler = AtSteps(steps)
        super().__post_init__()

    def check_fields(self) -> None:
        super().check_fields()
        fields = {x.name: x.default for x in dataclasses.fields(EpochStrategy) if not x.init}
        fields["scheduler"] = AtSteps(self._list_update_steps())
        is_changed = any(getattr(self, name) != value for name, value in fields.items())
        if is_changed or self._entries != strategies.parse(self.strategy):
            raise ValueError(
                f"{type(self).__name__} determines {', '.join(fields)} from its strategy when it "
                "is made. Do not assign fields: dataclasses.replace(updater, strategy=...)."
            )

    def calculate_scores(
        self, params: Params, sparse_state: SparseState | None = None, grads: Grads | None = None
    ) -> ScoreTree:
        return jax.tree.map(jnp.abs, params)

    def get_distribution_fn(self) -> Distribution | None:
        """Returns the function from params to the last sparsity of every layer."""

        def find_last_sparsities(params: Params) -> PyTree:
            sparsities: dict[trees.KeyPath, chex.Numeric] = {}
            for stage in self._resolve_stages(params):
                sparsities |= stage.sparsities
            return trees.map_matched(lambda path, _: sparsities.get(path), params)

        return find_last_sparsities

    def sites(self, params: Params) -> Sites:
        """Returns the table of the layers, each with its last type."""

        def find_last_pattern(path: trees.Path, param: jax.Array) -> SparsityType:
            axes = leading_axes(self.batch_axes, path, param)
            for entry in reversed(self._entries.values()):
                if rule := entry.find_rule(path, param, axes):
                    return rule.pattern
            return Unstructured()

        # `strategies` has checked the axes; a shorter last group is fine there.
        return Sites(params, find_last_pattern, self.batch_axes, checked=False)

    def new_masks(self, sparse_state: SparseState, inputs: StepInputs) -> Masks:
        weights, grads = inputs.masked_weights, inputs.grads
        scores = inputs.call(self.calculate_scores, weights, sparse_state=sparse_state, grads=grads)
        masked = trees.leaves_by_path(sparse_state.masks)
        stages = [
            stage._replace(sites={x: site for x, site in stage.sites.items() if x in masked})
            for stage in self._resolve_stages(weights)
        ]
        paths = list(dict.fromkeys(path for stage in stages for path in stage.sites))
        table = [[stage.sparsities.get(path, 0.0) for path in paths] for stage in stages]
        # Epochs that differ only in their sparsities share one branch, compiled once.
        keys: list[_BranchKey] = [(stage.is_global, tuple(stage.sites.items())) for stage in stages]
        branches = list(dict.fromkeys(keys))

        def create(key: _BranchKey, sparsities: jax.Array) -> PyTree:
            is_global, layers = key
            by_path = dict(zip(paths, sparsities, strict=True))
            return _apply_stage(
                strategies.Stage(is_global, dict(layers), by_path), scores, sparse_state.masks
            )

        stage = jnp.searchsorted(jnp.array(self._list_update_steps()), sparse_state.count)
        return jax.lax.switch(
            jnp.array([branches.index(key) for key in keys])[stage],
            [functools.partial(create, key) for key in branches],
            jnp.array(table, jnp.float32)[stage],
        )

    def instant_sparsify(
        self, params: Tree, grads: Grads | None = None, **extra_args: ExtraArg
    ) -> tuple[Tree, Masks]:
        """Applies all stages of the strategy in order, without training.

        Args:
          params: tree of parameters.
          grads: not used.

        Returns:
          (pruned params, masks).
        """
        inputs, masks = self.make_inputs(params, grads, extra_args), None
        for stage in self._resolve_stages(params):
            masked = apply_masks(inputs.weights, masks)
            scores = inputs.call(self.calculate_scores, masked, grads=grads)
            masks = _apply_stage(stage, scores, masks)
        pruned = apply_masks(params, masks)
        return pruned, pack_masks(masks, params) if self.use_packed_masks else masks

    def _list_update_steps(self) -> tuple[int, ...]:
        return tuple(epoch * self.steps_per_epoch for epoch in self._entries)

    def _resolve_stages(self, params: Params) -> list[strategies.Stage]:
        return list(strategies.resolve(self._entries, params, self.batch_axes).values())


@dataclasses.dataclass(frozen=True)
class AtSteps(BaseSchedule):
    """Schedule that updates masks at a list of steps.

    Attributes:
      steps: steps of the updates, in order.
    """

    steps: tuple[int, ...]

    def is_mask_update_iter(self, step: chex.Numeric | None) -> chex.Numeric:
        if step is None:
            return False
        return functools.reduce(
            operator.or_, (step == update_step for update_step in self.steps), False
        )

    def update_range(self) -> tuple[int, int | None] | None:
        return (self.steps[0], self.steps[-1]) if self.steps else None


def _apply_stage(stage: strategies.Stage, scores: ScoreTree, masks: Masks) -> Masks:
    """Returns the masks after a stage: new masks for its layers, old masks for all others."""
    sparsities = trees.map_matched(
        lambda path, _: stage.sparsities[path] if path in stage.sites else None, scores
    )
    scope = _GLOBAL if stage.is_global else Layerwise()
    new_masks = adapt_scope(scope, stage.sites).select_tree(scores, sparsities)
    return trees.map_matched(
        lambda _, score, mask, old: old if mask is None else mask, scores, new_masks, masks
    )


def _read_mask_key(masks: Masks, params: Params) -> Masks:
    return read_masks(masks, params, may_be_packed=False, role="masks of mask_key")
