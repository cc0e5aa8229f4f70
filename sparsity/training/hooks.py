"""Calls of the hooks of an updater."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypedDict, TypeVar

import chex
import jax

from sparsity.core import trees
from sparsity.core.derivatives import hold_constant
from sparsity.core.hashing import Draw
from sparsity.core.trees import Grads, Masks, Params, PyTree, ScoreTree, Sparsities
from sparsity.masks import Sites, apply_masks

T = TypeVar("T")
Hook = TypeVar("Hook", bound=Callable[..., object])
ExtraArg: TypeAlias = Any  # an argument of the training loop; overrides may narrow the type
NO_EXTRA: Mapping[str, ExtraArg] = types.MappingProxyType({})


class HookArgs(TypedDict, total=False):
    """Arguments that the library passes to a hook whose signature names them.

    Attributes:
      sites: table of the parameters that can have a mask, with patterns and batch axes.
      draw: `generate_random_scores`, or a function that draws those of a slice.
      target_sparsities: tree of the sparsities at the end of a ramp.
    """

    sites: Sites
    draw: Draw
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


class SliceRule(NamedTuple):
    """Rule by which the mask of each slice moves alone: the smallest weights are dropped.

    Attributes:
      grow: hook that returns grow scores, entry by entry or by its argument `draw`.
      fraction: maps the step to the fraction of active entries to replace.
      move: returns the mask of slices after an update, from the mask, drop scores, grow scores, the
        fraction, the sparsity of the parameter, and `batch_axes` by name. `None` moves as
        `SparsityType.move` does.
    """

    grow: Callable[..., PyTree]
    fraction: Callable[[chex.Numeric], chex.Numeric]
    move: Callable[..., jax.Array] | None = None


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
