"""Epoch strategies: pruning that follows a dictionary {epoch: method and densities}.

`pruning` and `pruning_apply` follow a strategy outside of the train step, `EpochStrategy` follows
it inside. Weights are scored by their magnitude under the current masks. A pruned weight returns
only if a later epoch keeps more weights, and starts at zero. A strategy is a dictionary:

    {10: {"method": "str_unified_local", "prune_rate_pattern": (2, 4)},
     20: {"method": "unstr_local", "prune_rate_pattern": {"Dense_0-kernel": 0.1}}}

A method is `unstr` or `str`, then

- `global`: all layers are ranked together, under one density in total.
- `unified_local`: every layer has the same density or pattern.
- `local`: a dictionary names layers and their densities or patterns; other layers stay unchanged. A
  dictionary under `unified_local` means the same.

A density in (0, 1] is the fraction to keep (`unstr`). A pattern is (n, m), 'n:m' or `NByM(n, m,
axis)` (`str`). A pattern keeps n of every m consecutive weights along an axis, by default the last
axis; a shorter last group also keeps n, or all its weights. As a pattern fixes the density of each
group, `global` and `unified_local` are the same for patterns.

Without names, all layers with more than one axis are pruned (kernels). A layer is named by its
path, joined by '-' or '/' or as a tuple. The name of a module stands for all its parameters that no
other key names.

Source: Kao 2022, "JAX-Pruning", whose README describes these strategies; no code is taken from it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp

from sparsity import masks as masks_lib
from sparsity.core import trees
from sparsity.core.checks import check_density, check_int
from sparsity.core.names import suggest
from sparsity.core.trees import Grads, Masks, Params, PyTree, ScoreTree, Tree
from sparsity.masks.distributions import Distribution
from sparsity.patterns import NByM, SparsityType, Unstructured, parse_nm
from sparsity.sparsity_schedules import BaseSchedule, NoUpdateSchedule, Schedule
from sparsity.training.base_updater import BaseUpdater
from sparsity.training.hooks import ExtraArg, StepInputs
from sparsity.training.state import SparseState

Strategy: TypeAlias = Mapping[int, Mapping[str, object]]

METHODS = tuple(
    f"{kind}_{scope}" for kind in ("unstr", "str") for scope in ("global", "unified_local", "local")
)


class Rule(NamedTuple):
    """Pattern and sparsity of a layer."""

    pattern: SparsityType
    sparsity: float


class StrategyEntry(NamedTuple):
    """Entry of a strategy: one rule for all layers, or rules by the keys that name layers."""

    epoch: int
    is_global: bool
    rules: Rule | dict[str | trees.Path, Rule]

    def find_rule(self, path: trees.Path, param: PyTree, batch_axes: int) -> Rule | None:
        """Returns the rule of a weight, or `None` if the weight stays unchanged."""
        if isinstance(self.rules, Rule):
            return self.rules if param.ndim - batch_axes > 1 else None
        prefixes = (path[:end] for end in range(len(path), 0, -1))
        keys = (key for prefix in prefixes for key in _list_keys(prefix))
        return next((self.rules[key] for key in keys if key in self.rules), None)

    def check_names(self, weights: Params) -> None:
        """Raises a ValueError unless each key names exactly one layer, and no two keys the same."""
        if isinstance(self.rules, Rule):
            return
        paths = trees.leaves_by_names(weights)
        prefixes = dict.fromkeys(p[:end] for p in paths for end in range(1, len(p) + 1))
        owners: dict[trees.Path, str | trees.Path] = {}
        for key in self.rules:
            matching = [prefix for prefix in prefixes if key in _list_keys(prefix)]
            place = f"{key!r} in the strategy of epoch {self.epoch}"
            if len(matching) != 1:
                problem = f"may mean any of {matching}" if matching else "names no layer"
                layers = ["-".join(path) for path in paths]
                raise ValueError(f"{place} {problem}. {suggest(key, layers, cutoff=0)}")
            if matching[0] in owners:
                raise ValueError(f"{place} names the same layer as {owners[matching[0]]!r}.")
            owners[matching[0]] = key


class Stage(NamedTuple):
    """Stage of a strategy for a tree of parameters: sites and sparsities of the pruned layers."""

    is_global: bool
    sites: dict[trees.KeyPath, masks_lib.Site]
    sparsities: dict[trees.KeyPath, chex.Numeric]


def _list_keys(path: trees.Path) -> tuple[str | trees.Path, ...]:
    """Returns the keys that name a layer."""
    return path, "/".join(path), "-".join(path)


def parse(strategy: object) -> dict[int, StrategyEntry]:
    """Returns the entries of a strategy by epoch, in order; checks all but the names of layers."""
    if not isinstance(strategy, Mapping):
        raise ValueError(
            f"A strategy is a dictionary {{epoch: {{'method': ...}}}}, got {strategy!r}."
        )
    for epoch in strategy:
        check_int("an epoch of a strategy", epoch, 0)
    return {int(epoch): _parse_entry(int(epoch), strategy[epoch]) for epoch in sorted(strategy)}


def _parse_entry(epoch: int, entry: object) -> StrategyEntry:
    place = f"in the strategy of epoch {epoch}"
    if not isinstance(entry, Mapping) or {*entry} != {"method", "prune_rate_pattern"}:
        raise ValueError(
            f"Give 'method' and 'prune_rate_pattern' and no others {place}: {entry!r}."
        )
    method, pattern = entry["method"], entry["prune_rate_pattern"]
    if method not in METHODS:
        raise ValueError(f"method = {method!r} {place} is not known. {suggest(method, METHODS)}")
    kind, _, scope = method.partition("_")

    def parse_rule(name: str, value: Any) -> Rule:
        name = f"{name} ({method!r} {place})"
        if kind == "unstr":
            check_density(name, value)
            return Rule(Unstructured(), 1.0 - float(value))
        nm = parse_nm(name, value)
        return Rule(nm, 1.0 - nm.n / nm.m)

    if scope != "unified_local" and isinstance(pattern, Mapping) != (scope == "local"):
        raise ValueError(
            f"{method!r} {place} needs {'a dictionary' if scope == 'local' else 'one value'}, got "
            f"{pattern!r}."
        )
    if not isinstance(pattern, Mapping):
        is_ranked = (kind, scope) == ("unstr", "global")
        return StrategyEntry(epoch, is_ranked, parse_rule("prune_rate_pattern", pattern))
    rules = {}
    for key, value in pattern.items():
        if not isinstance(key, str | tuple):
            raise ValueError(f"A layer is named by a string or a tuple, got {key!r} {place}.")
        name = tuple(map(str, key)) if isinstance(key, tuple) else key
        rules[name] = parse_rule(f"prune_rate_pattern[{key!r}]", value)
    return StrategyEntry(epoch, False, rules)


def resolve(
    entries: Mapping[int, StrategyEntry], params: Params, batch_axes: masks_lib.BatchAxes = 0
) -> dict[int, Stage]:
    """Returns the stages of a strategy for the parameters, by epoch; checks all names of layers.

    Args:
      entries: result of `parse`.
      params: tree of parameters.
      batch_axes: number of leading axes that index separate matrices, or a function.
    """
    stages, weights = {}, trees.prunable(params)
    for epoch, entry in entries.items():
        entry.check_names(weights)
        stages[epoch] = stage = Stage(entry.is_global, {}, {})
        for path, param in trees.leaves_by_path(weights).items():
            names = trees.path_names(path)
            axes = masks_lib.leading_axes(batch_axes, names, param)
            if rule := entry.find_rule(names, param, axes):
                if isinstance(rule.pattern, NByM) and not (
                    axes - param.ndim <= rule.pattern.axis < param.ndim - axes
                ):
                    name = f"{trees.path_string(path)!r} of shape {param.shape}"
                    raise ValueError(
                        f"{rule.pattern} of epoch {epoch}: {name} has no axis {rule.pattern.axis}."
                    )
                stage.sites[path] = masks_lib.Site(path, rule.pattern, axes)
                stage.sparsities[path] = rule.sparsity
    return stages


_BranchKey: TypeAlias = tuple[
    bool, tuple[tuple[trees.KeyPath, masks_lib.Site], ...]
]  # of a `Stage`

# jax_pruning ranks weights without normalization by layer.
_GLOBAL = masks_lib.Global(use_normalization=False)


def pruning(
    state: PyTree,
    epoch: int,
    mask_key: Masks | None = None,
    prune_strategy: Strategy | None = None,
) -> tuple[bool, Masks]:
    """Creates the masks of a strategy at an epoch.

    Args:
      state: a flax `TrainState`, any object with `params`, or a tree of parameters.
      epoch: the epoch that has just ended.
      mask_key: the current masks; `None` before the first masks.
      prune_strategy: `{epoch: {"method": ..., "prune_rate_pattern": ...}}`; see the module.

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
    stages = resolve(parse(prune_strategy), params)
    if not isinstance(epoch, bool):
        with contextlib.suppress(TypeError):  # of tracers, too, and of arrays that are no integers
            epoch = operator.index(epoch)
    check_int("epoch", epoch)
    if epoch not in stages:
        return False, mask_key
    masked = masks_lib.apply_masks(params, _read_mask_key(mask_key, params))
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
    params = masks_lib.apply_masks(params, _read_mask_key(mask_key, params))
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
      strategy: `{epoch: {"method": ..., "prune_rate_pattern": ...}}`; see the module.
      steps_per_epoch: updates of the optimizer in an epoch.

    Example:
      >>> strategy = {1: {"method": "unstr_global", "prune_rate_pattern": 0.9}}
      >>> updater = EpochStrategy(strategy, steps_per_epoch=100)
      >>> [step for step in range(1000) if updater.scheduler.is_mask_update_iter(step)]
      [100]
    """

    strategy: Strategy = dataclasses.field(kw_only=False)
    steps_per_epoch: int = dataclasses.field(kw_only=False)
    scheduler: Schedule = dataclasses.field(default=NoUpdateSchedule(), init=False)
    sparsity_type: SparsityType = dataclasses.field(default=Unstructured(), init=False)
    sparsity_distribution_fn: Distribution | None = dataclasses.field(default=None, init=False)
    scope: masks_lib.Layerwise = dataclasses.field(default=masks_lib.Layerwise(), init=False)
    topk_fn: masks_lib.TopkFn | None = dataclasses.field(default=None, init=False)
    unused_hooks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "create_masks": ("calculate_scores", "new_masks")
    }
    regrows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_int("steps_per_epoch", self.steps_per_epoch, 1)
        self._entries = parse(self.strategy)
        if any(entry.is_global for entry in self._entries.values()):
            _GLOBAL.check(Unstructured(), self.batch_axes, None)
        self.scheduler = AtSteps(self._list_update_steps())
        super().__post_init__()

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

    def sites(self, params: Params) -> masks_lib.Sites:
        """Returns the table of the layers, each with its last type."""

        def find_last_pattern(path: trees.Path, param: jax.Array) -> SparsityType:
            axes = masks_lib.leading_axes(self.batch_axes, path, param)
            for entry in reversed(self._entries.values()):
                if rule := entry.find_rule(path, param, axes):
                    return rule.pattern
            return Unstructured()

        # `resolve` has checked the axes; a shorter last group is fine there.
        return masks_lib.Sites(params, find_last_pattern, self.batch_axes, checked=False)

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
            return _apply_stage(Stage(is_global, dict(layers), by_path), scores, sparse_state.masks)

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
            masked = masks_lib.apply_masks(inputs.weights, masks)
            scores = inputs.call(self.calculate_scores, masked, grads=grads)
            masks = _apply_stage(stage, scores, masks)
        pruned = masks_lib.apply_masks(params, masks)
        return pruned, masks_lib.pack_masks(masks, params) if self.use_packed_masks else masks

    def _list_update_steps(self) -> tuple[int, ...]:
        return tuple(epoch * self.steps_per_epoch for epoch in self._entries)

    def _resolve_stages(self, params: Params) -> list[Stage]:
        return list(resolve(self._entries, params, self.batch_axes).values())


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


def _apply_stage(stage: Stage, scores: ScoreTree, masks: Masks) -> Masks:
    """Returns the masks after a stage: new masks for its layers, old masks for all others."""
    sparsities = trees.map_matched(
        lambda path, _: stage.sparsities[path] if path in stage.sites else None, scores
    )
    scope = _GLOBAL if stage.is_global else masks_lib.Layerwise()
    new_masks = masks_lib.adapt_scope(scope, stage.sites).select_tree(scores, sparsities)
    return trees.map_matched(
        lambda _, score, mask, old: old if mask is None else mask, scores, new_masks, masks
    )


def _read_mask_key(masks: Masks, params: Params) -> Masks:
    return masks_lib.read_masks(masks, params, may_be_packed=False, role="masks of mask_key")
