"""Overrides of hooks: the class attributes that they change, and those without effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PACKAGE = __name__.partition(".")[0]
_UPDATE_HOOKS = "create_masks", "new_masks", "update_state"

# Class attributes, and the value of a class that overrides one of the hooks without stating the
# attribute. `regrows = True` stays.
INFERRED: Mapping[str, tuple[bool | None, tuple[str, ...]]] = {
    "keeps_dense_weights": (True, ("post_gradient_update", "apply_masks")),
    "regrows": (None, ("calculate_scores", *_UPDATE_HOOKS)),
    "keeps_count": (False, (*_UPDATE_HOOKS, "get_initial_masks", "init_state")),
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


def infer_attributes(cls: type, root: type, inherited: frozenset[str]) -> frozenset[str]:
    """Sets the attributes of `INFERRED` for hooks that a class or a mixin of it overrides.

    Args:
      cls: a new class of updaters.
      root: the class that declares the hooks.
      inherited: the result for the parents of the class.

    Returns:
      Names of the attributes that neither the class nor its parents state.
    """
    parents = [base for base in cls.__bases__ if issubclass(base, root)]
    new = [base for base in cls.__mro__ if not any(issubclass(x, base) for x in parents)]
    stated = {name for base in new for name in vars(base)}

    def is_new(hook: str) -> bool:
        return all(getattr(cls, hook) is not getattr(parent, hook) for parent in parents)

    inferred = inherited - stated
    for name, (value, hooks) in INFERRED.items():
        stays = name in stated or (name == "regrows" and getattr(cls, name))
        if not stays and any(map(is_new, hooks)):
            setattr(cls, name, value)
            inferred |= {name}
    return inferred


def check_overrides(cls: type, assigned: Iterable[str] = ()) -> None:
    """Raises a TypeError for an override that a base class never calls, and names another hook.

    An override of a class of the library, which is a mixin, may remain unused.

    Args:
      cls: class of an updater.
      assigned: names of attributes of the updater, which override those of its class.
    """
    overrides = {*assigned}
    for base in cls.__mro__:
        unused: Mapping[str, str] = vars(base).get("unused_hooks", {})
        for hook in sorted(overrides & unused.keys()):
            if overrides.isdisjoint(_CALLERS.get(hook, ())):
                raise TypeError(
                    f"{cls.__name__} overrides {hook}, which {base.__name__} never calls: override "
                    f"{unused[hook]}."
                )
        if base.__module__.partition(".")[0] != _PACKAGE:
            overrides |= vars(base).keys()
