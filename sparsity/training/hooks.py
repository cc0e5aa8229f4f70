"""How the hooks of an updater are called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

from sparsity.core.trees import PyTree

T = TypeVar("T")
Hook = TypeVar("Hook", bound=Callable[..., object])
ExtraArg: TypeAlias = Any  # what a training loop passes on; an override may name its own type


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
