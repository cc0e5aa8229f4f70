"""Hooks of an updater: its fields, class attributes and hooks, and how a step calls them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsity import masks as masks_lib
from sparsity.core import trees
from sparsity.core.arrays import hold_constant
from sparsity.core.checks import DataclassBase, check_values
from sparsity.core.hashing import DEFAULT_SEED, Seed
from sparsity.core.sharding import on_device, ones_like
from sparsity.core.trees import Grads, Masks, Params, PyTree, ScoreTree, Sparsities, Tree
from sparsity.masks import (
    BatchAxes,
    Layerwise,
    MaskBudget,
    PatternChoice,
    Scope,
    Site,
    Sites,
    TopkFn,
    TreeScope,
    apply_masks,
    read_overrides,
)
from sparsity.masks.distributions import Distribution, uniform
from sparsity.patterns import Unstructured
from sparsity.sparsity_schedules import NoUpdateSchedule, Schedule
from sparsity.training.state import SparseState, get_sparse_state, to_stored_form

T = TypeVar("T")
Hook = TypeVar("Hook", bound=Callable[..., object])
ExtraArg: TypeAlias = Any  # an argument of the training loop; overrides may narrow the type
NO_EXTRA: Mapping[str, ExtraArg] = types.MappingProxyType({})

_PACKAGE = __name__.partition(".")[0]
KeepsCount: TypeAlias = Literal["exact", "at most", "any"]


def check_overrides(cls: type, assigned: Iterable[str] = ()) -> None:
    """Raises a TypeError for an override that a base class never calls, and names another hook.

    A class that also overrides one of the other hooks may call the unused one there. Classes of the
    library that derive from the base class may override the hook. Attributes that were assigned to
    an object override those of its class.
    """
    for index, base in enumerate(cls.__mro__):
        unused: Mapping[str, tuple[str, ...]] = vars(base).get("unused_hooks", {})
        ahead = [
            x
            for x in cls.__mro__[:index]
            if not (x.__module__.partition(".")[0] == _PACKAGE and issubclass(x, base))
        ]
        overrides = {*assigned}.union(*map(vars, ahead))
        for hook in overrides & unused.keys():
            if overrides.isdisjoint(unused[hook]):
                raise TypeError(
                    f"{cls.__name__} overrides {hook}, which {base.__name__} never calls: override "
                    f"{' or '.join(unused[hook])}."
                )


@dataclasses.dataclass
class ComparedByFields(DataclassBase):
    """Dataclass whose instances compare by class and fields, and hash by class.

    An instance that was hashed refuses assignments to its fields.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Otherwise @dataclass writes an __eq__ and, with it, a __hash__ of None.
        for name in {"__eq__", "__hash__"} - vars(cls).keys():
            setattr(cls, name, getattr(ComparedByFields, name))

    def __eq__(self, other: object) -> bool:
        """Returns whether another updater of the class has equal fields.

        A traced seed equals itself only, and so does a function that holds arrays.
        """
        return type(other) is type(self) and all(
            _are_equal(getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
        )

    def __hash__(self) -> int:
        """Returns the hash of the class."""
        object.__setattr__(self, "_is_hashed", True)
        return hash(type(self))

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("_is_hashed") and name in {x.name for x in dataclasses.fields(self)}:
            raise dataclasses.FrozenInstanceError(
                f"{name} of this {type(self).__name__} cannot be assigned: compiled functions that "
                f"took it would keep the old value. Use dataclasses.replace(updater, {name}=...)."
            )
        super().__setattr__(name, value)


def _are_equal(lhs: object, rhs: object) -> bool:
    try:
        return lhs is rhs or bool(_read_value(lhs) == _read_value(rhs))
    except (ValueError, jax.errors.JAXTypeError):  # arrays within, or traced ones
        return False


def _read_value(field: object) -> object:
    """Returns what tells a field from others by `==`: partial functions and arrays as tuples."""
    if isinstance(field, functools.partial):
        return field.func, field.args, field.keywords
    if isinstance(field, jax.Array | np.ndarray):
        is_key = jnp.issubdtype(field.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(field) if is_key else field
        return str(field.dtype), np.asarray(data).tolist()
    return field


class HookArgs(TypedDict, total=False):
    """Arguments that the library passes to a hook whose signature names them.

    Attributes:
      sites: table of the parameters that can have a mask, with patterns and batch axes.
      target_sparsities: tree of the sparsities at the end of a ramp.
    """

    sites: Sites
    target_sparsities: Sparsities | None


class StepInputs(NamedTuple):
    """Inputs of the hooks in `init`, `update`, `instant_sparsify` or a forward pass.

    `params` and `all_grads` are complete trees. Weights are the parameters that can have a mask, in
    a tree with `None` in place of all other leaves, as hooks get it.

    Attributes:
      params: tree of parameters as they are stored.
      all_grads: tree of gradients from the training loop; `None` where there are none.
      sites: table of `UpdaterHooks.sites`, resolved from the parameters.
      extra: other arguments of the training loop; none at `init`.
      masks: tree of the masks under which hooks see the weights; `None` for no masks.
    """

    params: Params
    all_grads: Grads | None
    sites: Sites
    extra: Mapping[str, ExtraArg] = NO_EXTRA
    masks: Masks | None = None

    @property
    def weights(self) -> PyTree:
        """The weights as they are stored."""
        return trees.prunable(self.params)

    @property
    def grads(self) -> PyTree | None:
        """Gradients of the weights."""
        return None if self.all_grads is None else trees.prunable(self.all_grads, self.params)

    @property
    def masked_weights(self) -> PyTree:
        """The weights with `masks` applied."""
        return apply_masks(self.weights, self.masks)

    def hold_constant(self) -> StepInputs:
        """Returns the inputs without derivatives."""
        arrays = self.params, self.all_grads, dict(self.extra), self.masks
        params, grads, extra, masks = hold_constant(arrays)
        return StepInputs(params, grads, self.sites, extra, masks)

    def call(
        self, hook: Callable[..., T], *args: PyTree, named: HookArgs | None = None, **kwargs: PyTree
    ) -> T:
        """Calls a hook by `call_hook`, with the arguments of the training loop and the sites."""
        with_sites: HookArgs = {"sites": self.sites, **(named or {})}
        return call_hook(hook, *args, extra=self.extra, named=with_sites, **kwargs)

    def create_masks(
        self,
        hook: Callable[..., Masks],
        scores: ScoreTree,
        sparsities: Sparsities,
        targets: Sparsities,
    ) -> Masks:
        """Calls a hook `create_masks`, which may name the sparsities at the end of the ramp."""
        return self.call(hook, scores, sparsities, named={"target_sparsities": targets})


def elementwise(hook: Hook) -> Hook:
    """Documents that a hook's score of a weight depends on that weight and its gradient alone.

    The decorator returns the hook as it is.

    Example:
      >>> import dataclasses, sparsity
      >>> @dataclasses.dataclass
      ... class Squares(sparsity.BaseUpdater):
      ...     @sparsity.elementwise
      ...     def calculate_scores(self, params, sparse_state=None, grads=None):
      ...         return jax.tree.map(jnp.square, params)
    """
    if not inspect.isfunction(hook):
        raise ValueError(f"elementwise marks a method of a class, got hook = {hook!r}.")
    return hook


def call_hook(
    hook: Callable[..., T],
    *args: PyTree,
    extra: Mapping[str, ExtraArg],
    named: HookArgs | None = None,
    **kwargs: PyTree,
) -> T:
    """Calls a hook with `args`, `kwargs` and the optional arguments that its signature takes.

    Optional arguments come from `named` and `extra`; `args` and `kwargs` win over both.

    Args:
      hook: the hook.
      *args: arguments that every such hook takes.
      extra: arguments of the training loop, for a hook that names them or takes all keywords.
      named: arguments of the library, for a hook that names them.
      **kwargs: arguments that every such hook takes by name.

    Raises:
      TypeError: the signature of the hook does not take these arguments, names an argument that
        the training loop has not passed, or one that both the library and the loop pass.
    """
    signature, name = inspect.signature(hook), getattr(hook, "__qualname__", hook)
    parameters = signature.parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    from_loop = {key: x for key, x in extra.items() if takes_all or key in parameters}
    from_library = {key: x for key, x in (named or {}).items() if key in parameters}
    if clashes := sorted(from_loop.keys() & from_library.keys()):
        raise TypeError(
            f"{name} names {clashes[0]!r}, which the library passes, and so does "
            f"tx.update(..., {clashes[0]}=...). Name the argument of the loop otherwise."
        )
    positional = [key for key, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
    kwargs = from_loop | from_library | kwargs
    kwargs = {key: x for key, x in kwargs.items() if key not in positional[: len(args)]}
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{name}{signature} does not fit its call: {error}. "
            "help(sparsity.BaseUpdater) shows the arguments of hooks; tx.update(..., name=value) "
            "passes more."
        ) from None
    return hook(*args, **kwargs)


@dataclasses.dataclass(kw_only=True)
class UpdaterHooks(DataclassBase):
    """Fields, class attributes and hooks of `BaseUpdater`, which adds the entry points.

    Attributes:
      scheduler: schedule of the mask updates and their sparsities.
      skip_gradients: leave weights and optimizer state as they are in steps that update masks.
      is_sparse_gradients: apply the masks to the gradients that the inner optimizer sees.
      sparsity_type: pattern of the weights that are kept or removed together: an instance such as
        `NByM(2, 4)`, or `fn(path, param)` that returns one, or `None` for a parameter that stays
        dense whatever the distribution selects.
      sparsity_distribution_fn: function from params to a tree of target sparsities; `None`, and
        the default without a sparsity, leave all parameters dense.
      scope: decides what competes: `Layerwise()` (the weights of each parameter), `Global()`
        (those of all parameters) or `Coupled(graph)` (whole channels).
      rng_seed: an int or a jax random key, for algorithms that draw; `None` means the default.
      use_packed_masks: store one bit a weight instead of a byte.
      topk_fn: `topk_fn(scores, sparsity) -> mask` replaces the exact selection of the highest
        scores, and is called for each slice; `SET` and `RigL` select their first masks by it.
      is_sparse_updates: return updates that put pruned weights at exactly 0.0, so that a loop
        without `post_gradient_update` stays sparse. Weights must be finite. The wrapper must be the
        last transformation: scaling or clipping goes inside. `None` means on, unless the class
        `keeps_dense_weights`.
      batch_axes: number of leading axes that index separate matrices (scanned layers, experts), or
        a function of (path, param); each slice has an exact mask.
      use_compact_state: keep the optimizer's state of kept weights only, in arrays [*batch, k].
        The number of kept weights must not change: `static_sparse`, `set`, `rigl`, `srigl`, or
        final masks given to `wrap_optax` and no schedule, with `is_sparse_gradients=True`.
      regrows: class attribute. True: pruned weights may return to the mask, and `wrap_optax`
        refuses optimizers that cannot restart them, such as `optax.flatten`. False: pruned weights
        never return to masks that a user gave, or under such an optimizer. A weight that returns
        restarts if pruned weights are 0: with the value 0 and the optimizer state of `init`.
      keeps_dense_weights: class attribute: whether pruned weights keep their values between steps.
        `None`: they do if the class overrides `post_gradient_update` or `apply_masks`, of which
        `wrap_optax` then warns.
      keeps_count: class attribute. "exact": each slice keeps the number that the target sparsity
        gives. "at most": at most that number. "any": any number.
      prunes_at_once: class attribute: whether `instant_sparsify` prunes a trained model; False for
        classes that train sparse from the start, whose `instant_sparsify` raises a RuntimeError.
      searches_columns: class attribute: whether updates select along other axes than the last ones.
        A step then fixes the layouts of arrays on GPUs, and has no export for them.
      unused_hooks: class attribute: maps each hook that the class never calls to the hooks to
        override instead. A subclass that overrides an unused hook, itself or by another base,
        raises a TypeError, unless it also overrides one of the others, which may call the hook.
      takes_distribution: class attribute: whether configurations set `sparsity_distribution_fn`;
        False for classes that take no distribution, such as global pruners.
      schedule_type: class attribute: the schedule of configurations that name no schedule, made
        from start, end and frequency.
      config_keys: class attribute: maps keys of configurations beyond the fields to the fields that
        `read_config` makes of them.
    """

    scheduler: Schedule = NoUpdateSchedule()
    skip_gradients: bool = False
    is_sparse_gradients: bool = False
    sparsity_type: PatternChoice = Unstructured()
    sparsity_distribution_fn: Distribution | None = uniform
    scope: Scope | TreeScope = Layerwise()
    rng_seed: Seed = DEFAULT_SEED
    use_packed_masks: bool = False
    topk_fn: TopkFn | None = None
    is_sparse_updates: bool | None = None
    batch_axes: BatchAxes = 0
    use_compact_state: bool = False

    regrows: ClassVar[bool] = True
    keeps_dense_weights: ClassVar[bool | None] = None
    keeps_count: ClassVar[KeepsCount] = "any"
    prunes_at_once: ClassVar[bool] = True
    takes_distribution: ClassVar[bool] = True
    schedule_type: ClassVar[str] = "polynomial"
    config_keys: ClassVar[Mapping[str, str]] = {}
    unused_hooks: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    searches_columns: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Raises a TypeError for overrides of `unused_hooks`."""
        super().__init_subclass__()
        check_overrides(cls)

    def get_distribution_fn(self) -> Distribution | None:
        """Returns the function from params to target sparsities, or `None` for dense parameters."""
        return self.sparsity_distribution_fn

    def sites(self, params: Params) -> Sites:
        """Returns the table of the prunable leaves: each with its pattern and batch axes."""
        distribution_fn = self.get_distribution_fn()
        overrides = read_overrides(distribution_fn)
        budget = distribution_fn if isinstance(distribution_fn, MaskBudget) else None
        return Sites(
            params,
            self.sparsity_type,
            self.batch_axes,
            overrides,
            budget=budget,
            has_user_filter=masks_lib.has_user_filter(distribution_fn),
        )

    def make_inputs(
        self,
        params: Params,
        grads: Grads | None = None,
        extra: Mapping[str, ExtraArg] = NO_EXTRA,
        sites: Sites | None = None,
    ) -> StepInputs:
        """Returns the inputs of hooks; `sites` is `self.sites(params)` by default."""
        return StepInputs(params, grads, sites or self.sites(params), extra)

    def compute_targets(self, params: Params, sites: Sites) -> Sparsities:
        """Returns the target sparsities as the distribution returns them, `None` where dense."""
        return masks_lib.compute_targets(
            self.get_distribution_fn(), params, sites, self.scope, self.batch_axes
        )

    def init_state(self, params: Params, *, sites: Sites | None = None) -> SparseState:
        """Returns the initial state of a wrapped optimizer, without the inner state.

        Args:
          params: tree of parameters.
          sites: `self.sites(params)`, which is the default.

        Raises:
          ValueError: a sparsity lies outside [0, 1] or a pattern does not fit. The message names
            the leaf.
        """
        inputs = self.make_inputs(params, sites=sites)
        targets = jax.tree.map(on_device, self.compute_targets(params, inputs.sites))
        masked = trees.map_matched(lambda _, x, t: None if t is None else x, params, targets)
        remedy = "jax.eval_shape(tx.init, params) computes with shapes."
        check_values("params", masked, remedy, may_be_traced=True)
        masks = inputs.call(self.get_initial_masks, inputs.weights, targets)
        state = SparseState(masks, target_sparsities=targets)
        return to_stored_form(state, params, self.use_packed_masks)

    # Hooks that algorithms override. Hooks of the step see no packed masks, and no leaves that can
    # have no mask: random keys, integers and functions are None in the trees of arguments. The two
    # hooks of the loop, pre_forward_update and post_gradient_update, get its trees. A hook of the
    # step may name arguments of `HookArgs`.

    def calculate_scores(
        self, params: Params, sparse_state: SparseState | None = None, grads: Grads | None = None
    ) -> ScoreTree:
        """Returns the scores of all weights, a tree like `params`; the highest scores are kept.

        Args:
          params: tree of parameters, with the current masks applied where pruned weights stay zero.
          sparse_state: the current state, `None` in `instant_sparsify`.
          grads: tree of gradients, if any.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no scores: a subclass returns them from calculate_scores."
        )

    def get_initial_masks(self, params: Params, target_sparsities: Sparsities) -> Masks:
        """Returns the initial masks of the optimizer: by default, all ones.

        Args:
          params: tree of parameters.
          target_sparsities: tree of sparsities, `None` for leaves that stay dense.
        """
        scope = masks_lib.adapt_scope(self.scope, self.sites(params))
        masked = scope.masked_paths(params, target_sparsities)
        return trees.map_matched(lambda path, x: ones_like(x) if path in masked else None, params)

    def create_masks(
        self,
        scores: ScoreTree,
        sparsities: Sparsities,
        target_sparsities: Sparsities | None = None,
        *,
        sites: Sites | None = None,
    ) -> Masks:
        """Returns masks that keep the highest scores of each leaf or of all, as the scope says.

        Args:
          scores: tree of scores.
          sparsities: tree of sparsities, `None` for leaves that stay dense; or one sparsity for all
            leaves that the distribution selects, except those of `custom_sparsity_map`.
          target_sparsities: sparsities at the end of a ramp, for N:M; `sparsities` by default.
          sites: `self.sites(params)`. By default sites are resolved from the scores: a function of
            (path, param) gets scores in place of parameters.

        Raises:
          ValueError: a sparsity lies outside [0, 1] or a pattern does not fit. The message names
            the leaf.
        """
        weights = jax.tree.map(_as_weights, scores)
        sites = sites or self.sites(weights)
        is_number = () in trees.leaves_by_path(sparsities)
        if is_number and () not in trees.leaves_by_path(scores):
            sparsities = self._repeat_sparsity(sparsities, weights, sites)
        scope = masks_lib.adapt_scope(self.scope, sites, target_sparsities, self.topk_fn)
        return scope.select_tree(scores, sparsities)

    def _repeat_sparsity(self, sparsity: chex.Numeric, weights: PyTree, sites: Sites) -> Sparsities:
        """Returns a tree of one sparsity for all leaves that have a target; overrides stay."""
        targets = self.compute_targets(weights, sites)
        if not jax.tree.leaves(targets):
            raise ValueError(
                "Set sparsity_distribution_fn or give a tree: one number is the sparsity of all "
                f"leaves that it selects, which are none, got sparsities = {sparsity!r}."
            )
        return trees.map_matched(
            lambda path, target: target if sites[path].has_override else sparsity, targets
        )

    def new_masks(self, sparse_state: SparseState, inputs: StepInputs) -> Masks:
        """Returns the masks of a mask update; a step calls it unless `update_state` is overridden.

        Args:
          sparse_state: the current state.
          inputs: inputs of the step.
        """
        targets = sparse_state.target_sparsities
        sparsities = self.scheduler.get_sparsity_at_step(targets, sparse_state.count)
        scores = inputs.call(
            self.calculate_scores,
            inputs.masked_weights,
            sparse_state=sparse_state,
            grads=inputs.grads,
        )
        return inputs.create_masks(self.create_masks, scores, sparsities, targets)

    def count_after_move(
        self, site: Site, shape: tuple[int, ...], kept: int, target: chex.Numeric | None
    ) -> int | None:
        """Returns the number of entries that a slice keeps after a mask update.

        Args:
          site: pattern and batch axes of the parameter.
          shape: shape of the parameter.
          kept: number of entries that each slice keeps before.
          target: target sparsity of the parameter.

        Returns:
          `None` if the number depends on scores, as by default unless `keeps_count` is "exact".
        """
        has_count = site.pattern.count_kept(shape, 0.5, site.batch_axes) is not None
        return kept if self.keeps_count == "exact" and has_count else None

    def update_state(
        self,
        sparse_state: SparseState,
        params: Params,
        grads: Grads,
        *,
        sites: Sites | None = None,
        **extra_args: ExtraArg,
    ) -> SparseState:
        """Returns the state with new masks.

        A step in which the masks update calls `new_masks` itself unless this hook is overridden.

        Args:
          sparse_state: the current state.
          params: tree of parameters, as in `calculate_scores`.
          grads: tree of gradients.
          sites: `self.sites(params)`, which is the default.
          **extra_args: other arguments of `update`; `calculate_scores` and `create_masks` get the
            arguments that their signatures name.
        """
        inputs = self.make_inputs(params, grads, extra_args, sites)
        return sparse_state._replace(masks=inputs.call(self.new_masks, sparse_state, inputs))

    def init_algorithm_state(self, params: Params, masks: Masks) -> PyTree:
        """Returns the first `algorithm_state`: a tree of arrays, by default `None`.

        Args:
          params: tree of parameters.
          masks: tree of the initial masks.
        """

    def accumulate(self, sparse_state: SparseState, params: Params, grads: Grads) -> SparseState:
        """Returns the state with a new `algorithm_state`; called first in every step.

        The hook costs nothing unless overridden. Other fields of the result are ignored.

        Args:
          sparse_state: the current state.
          params: tree of parameters, as in `calculate_scores`.
          grads: tree of gradients.
        """
        return sparse_state

    def modify_gradients(self, grads: Grads, params: Params, sparse_state: SparseState) -> Grads:
        """Returns the gradients for the inner optimizer; called in every step under the new masks.

        The hook costs nothing unless overridden. With `is_sparse_gradients` the result is masked.

        Args:
          grads: tree of gradients.
          params: tree of parameters, as in `calculate_scores`.
          sparse_state: the state with the masks of this step.
        """
        return grads

    def apply_masks(self, params: Tree, masks: Masks, is_packed: bool | None = None) -> Tree:
        """Returns `params` with pruned entries at exactly 0.0.

        Args:
          params: tree of parameters (or gradients, or scores).
          masks: tree of masks, `None` for leaves that are returned as they are.
          is_packed: whether masks may be packed; by default `use_packed_masks`.

        Raises:
          ValueError: a mask has no leaf in `params`, or a leaf of another shape.
        """
        may_be_packed = self.use_packed_masks if is_packed is None else is_packed
        read = masks_lib.read_masks(masks, params, may_be_packed)
        return masks_lib.apply_masks(params, read)

    def pre_forward_update(self, params: Tree, opt_state: optax.OptState) -> Tree:
        """Returns the parameters for the forward pass; by default `params`.

        Args:
          params: tree of parameters.
          opt_state: a SparseState, or an optimizer state that holds one.
        """
        return params

    def post_gradient_update(self, params: Tree, sparse_state: optax.OptState) -> Tree:
        """Returns the parameters after a step, pruned weights at exactly 0.0.

        Args:
          params: tree of parameters.
          sparse_state: a SparseState, or an optimizer state that holds one.
        """
        state = get_sparse_state(sparse_state)
        masks_lib.check_masks(params, state.masks, are_packed=self.use_packed_masks)
        return self.apply_masks(params, state.masks)


def is_overridden(
    updater: UpdaterHooks, name: str, base: type[UpdaterHooks] = UpdaterHooks
) -> bool:
    """Returns whether an updater overrides a hook of a base class."""
    hook = getattr(updater, name)
    return getattr(hook, "__func__", hook) is not getattr(base, name)


def keeps_dense_weights(updater: UpdaterHooks) -> bool:
    """Returns what a class states, or whether it overrides a hook that sets weights to 0."""
    if updater.keeps_dense_weights is not None:
        return updater.keeps_dense_weights
    return any(is_overridden(updater, x) for x in ("post_gradient_update", "apply_masks"))


def _as_weights(scores: chex.Array) -> chex.Array | jax.ShapeDtypeStruct:
    """Returns scores in the place of weights; float32 stands for weights with integer scores."""
    if trees.is_prunable(scores):
        return scores
    return jax.ShapeDtypeStruct(jnp.shape(scores), jnp.float32)
