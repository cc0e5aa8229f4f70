"""Overrides of hooks: the class attributes that no longer hold, and overrides without effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from sparsity.core.statements import is_stated

_PACKAGE = __name__.partition(".")[0]
_UPDATE_HOOKS = "create_masks", "new_masks", "update_state"
KeepsCount: TypeAlias = Literal["exact", "at most", "any"]

# Class attributes, and the values that are assumed of a class that overrides one of the hooks and
# does not state the attribute. `regrows = True` holds for all overrides.
ASSUMED: Mapping[str, tuple[bool | KeepsCount | None, tuple[str, ...]]] = {
    "keeps_dense_weights": (True, ("post_gradient_update", "apply_masks")),
    "regrows": (None, ("calculate_scores", *_UPDATE_HOOKS)),
    "keeps_count": ("any", (*_UPDATE_HOOKS, "get_initial_masks", "init_state")),
}

# Hooks whose overrides may call a hook of `unused_hooks`, which a class may then override.
_CALLERS: Mapping[str, tuple[str, ...]] = {
    "calculate_scores": (
        "get_initial_masks", "new_masks", "update_state", "instant_sparsify", "get_drop_scores",
        "get_grow_scores", "create_masks",
    ),
    "create_masks": ("get_initial_masks", "new_masks", "update_state", "instant_sparsify"),
    "new_masks": ("update_state",),
    "apply_masks": ("pre_forward_update", "post_gradient_update"),
}  # fmt: skip


def read_attribute(updater: object, name: str) -> bool | KeepsCount | None:
    """Returns an attribute that `ASSUMED` lists, or the value that is assumed in its place."""
    return ASSUMED[name][0] if is_assumed(updater, name) else getattr(updater, name)


def is_assumed(updater: object, name: str) -> bool:
    """Returns whether an updater overrides hooks of which its attribute says nothing."""
    holds = name in vars(updater) or (name == "regrows" and getattr(updater, name))
    return not holds and not is_stated(type(updater), name, ASSUMED[name][1])


def check_overrides(cls: type, assigned: Iterable[str] = ()) -> None:
    """Raises a TypeError for an override that a base class never calls, and names another hook.

    Classes of the library that derive from the base class may override the hook.

    Args:
      cls: class of an updater.
      assigned: names of attributes of the updater, which override those of its class.
    """
    for index, base in enumerate(cls.__mro__):
        unused: Mapping[str, str] = vars(base).get("unused_hooks", {})
        ahead = [x for x in cls.__mro__[:index] if not (_is_ours(x) and issubclass(x, base))]
        overrides = {*assigned}.union(*map(vars, ahead))
        for hook in sorted(overrides & unused.keys()):
            if overrides.isdisjoint(_CALLERS.get(hook, ())):
                source = None if hook in assigned else next(x for x in ahead if hook in vars(x))
                raise TypeError(
                    f"{_describe_override(cls, hook, source)}, which {_name_base(cls, base)} never "
                    f"calls: override {unused[hook]}."
                )


def _describe_override(cls: type, hook: str, source: type | None) -> str:
    """Says that a class overrides a hook, by a method of `source`; `None`: by an attribute."""
    if source is None:
        return f"An object of {cls.__name__} overrides {hook}"
    by = "" if source is cls else f" by {_name_base(cls, source)}.{hook}"
    return f"{cls.__name__} overrides {hook}{by}"


def _name_base(cls: type, base: type) -> str:
    """Names a base, or the first class of the library by which a class derives from the base."""
    return next((x for x in cls.__mro__ if _is_ours(x) and issubclass(x, base)), base).__name__


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == _PACKAGE
