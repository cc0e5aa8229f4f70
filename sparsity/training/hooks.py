"""What a step asks of an updater, and how its hooks are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

import jax

from sparsity.core.trees import PyTree
from sparsity.masks import BatchAxes, Pattern, Scope, Sites, TopkFn, TreeScope
from sparsity.sparsity_schedules import Schedule
from sparsity.training.state import SparseState

T = TypeVar("T")
Hook = TypeVar("Hook", bound=Callable[..., object])
ExtraArg: TypeAlias = Any  # what a training loop passes on; an override may name its own type


class Updater(Protocol):
    """The fields and hooks of a `BaseUpdater` that a training step uses."""

    keeps_dense_weights: ClassVar[bool]
    regrows: ClassVar[bool | None]
    scheduler: Schedule
    skip_gradients: bool
    is_sparse_gradients: bool
    sparsity_type: Pattern | Callable[[tuple[str, ...], jax.Array], Pattern]
    scope: Scope | TreeScope
    rng_seed: int | jax.Array
    use_packed_masks: bool
    topk_fn: TopkFn | None
    is_sparse_updates: bool | None
    batch_axes: BatchAxes

    @property
    def sparsity_distribution_fn(self) -> Callable[..., PyTree] | None:
        """From params to a tree of target sparsities; `None` leaves all dense."""

    def sites(self, params: PyTree) -> Sites:
        """Returns the table of the prunable leaves."""

    def init_state(self, params: PyTree) -> SparseState:
        """Returns the first state, without the inner one."""

    def get_initial_masks(self, params: PyTree, target_sparsities: PyTree) -> PyTree:
        """Returns the masks that training starts with."""

    def init_algorithm_state(self, params: PyTree, masks: PyTree) -> PyTree:
        """Returns the first `algorithm_state`."""

    def accumulate(self, sparse_state: SparseState, params: PyTree, grads: PyTree) -> SparseState:
        """Returns the state with a new `algorithm_state`, in every step."""

    def update_state(
        self, sparse_state: SparseState, params: PyTree, grads: PyTree, **extra_args: ExtraArg
    ) -> SparseState:
        """Returns the state with new masks."""

    def modify_gradients(self, grads: PyTree, params: PyTree, sparse_state: SparseState) -> PyTree:
        """Returns the gradients for the inner optimizer."""


def call_hook(
    hook: Callable[..., T], *args: PyTree, extra: Mapping[str, ExtraArg], **kwargs: PyTree
) -> T:
    """Calls a hook with those of the `extra` arguments that its signature names (or takes all)."""
    parameters = inspect.signature(hook).parameters
    taken = {*list(parameters)[: len(args)], *kwargs}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    wanted = extra.keys() if takes_all else extra.keys() & parameters.keys()
    return hook(*args, **kwargs, **{key: extra[key] for key in wanted - taken})


def default_hook(method: Hook) -> Hook:
    """Marks a method of the base class as one that does nothing and is therefore free."""
    vars(method)["is_default_hook"] = True
    return method


def is_overridden(hook: Callable[..., object]) -> bool:
    """Whether a hook is another than the one that does nothing."""
    return not getattr(hook, "is_default_hook", False)
