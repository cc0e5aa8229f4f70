"""Trees by path: naming leaves, meeting two trees leaf by leaf, finding a node in a nested state.

Parameters may be any pytree, and a mask tree, a gradient tree or an optimizer state need not have
the same treedef as the parameters: a subtree may be `None` or `optax.MaskedNode`, and flax's nnx
wraps leaves in variables at `init` but not at `update`. So leaves meet by *path*: a tuple of
`jax.tree_util` key entries (compared as entries, so that the key `'mu'` of a dictionary is not the
field `.mu` of Adam's state), without the trailing `.value` of an nnx variable.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, KeyEntry, SequenceKey

KeyPath = tuple[KeyEntry, ...]
Key = str | tuple[str, ...] | re.Pattern[str]  # how users name a leaf; see `matches`

_VALUE = GetAttrKey("value")


def leaves_by_path(tree: chex.ArrayTree) -> dict[KeyPath, Any]:
    """Returns `{path: leaf}` in tree order; `None` and other empty nodes have no leaf.

    Example:
      >>> [path_string(path) for path in leaves_by_path({"a": [1.0, None], "b": 2.0})]
      ['a/0', 'b']
    """
    return {_strip(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def path_names(path: KeyPath) -> tuple[str, ...]:
    """The path as users see it: one string for each key, index or attribute; `()` at the root."""
    return tuple(_entry_name(entry) for entry in _strip(path))


def path_string(path: KeyPath) -> str:
    """The path joined by '/', as it is written in messages and tables; 'params' at the root."""
    return "/".join(path_names(path)) or "params"


def map_with_names(fn: Callable[..., Any], tree: chex.ArrayTree) -> chex.ArrayTree:
    """Maps `fn(path_names, leaf)` over the leaves of `tree`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: fn(path_names(path), leaf), tree)


def map_matched(
    fn: Callable[..., Any],
    tree: chex.ArrayTree,
    *others: chex.ArrayTree,
    role: str = "params",
    others_role: str = "masks (or scores or sparsities) that go with them",
) -> chex.ArrayTree:
    """Maps `fn(path, leaf, *other_leaves)` over `tree`; leaves of `others` are found by path.

    Args:
      fn: its first argument is the path, its last ones are the leaves of `others` at the same path,
        or `None` where such a tree has none.
      tree: gives the structure of the result.
      *others: trees whose leaves all occur in `tree`, in whatever containers.
      role: what `tree` is, for the message.
      others_role: what `others` are.

    Raises:
      ValueError: a tree of `others` has leaves at paths where `tree` has none; the paths are named.
    """
    lookups = [leaves_by_path(other) for other in others]
    if any(lookups):
        known = leaves_by_path(tree)
        for lookup in lookups:
            missing = [path_string(path) for path in lookup if path not in known]
            if missing:
                raise ValueError(
                    f"The {role} have no leaf at {_listed(missing)}, which the {others_role} have. "
                    f"The {role} have: {_listed([path_string(path) for path in known])}. Both "
                    "must be made for the same model."
                )

    def visit(path: KeyPath, leaf: Any) -> Any:
        key = _strip(path)
        return fn(key, leaf, *(lookup.get(key) for lookup in lookups))

    return jax.tree_util.tree_map_with_path(visit, tree)


def best_key(keys: Iterable[Key], name: str) -> Key | None:
    """Returns the key that names `name`: one that equals it, else the first that matches it.

    Example:
      >>> best_key(["conv.*", "conv1/kernel"], "conv1/kernel")
      'conv1/kernel'
    """
    matching = [key for key in keys if matches(key, name)]
    exact = (key for key in matching if not isinstance(key, re.Pattern) and _text(key) == name)
    return next(exact, matching[0] if matching else None)


def matches(key: Key, name: str) -> bool:
    """Whether a key names a path that is joined by '/'.

    Args:
      key: a path as a tuple, the path joined by '/', a regular expression that matches the whole
        joined path, or a compiled pattern, which is searched in it.
      name: the joined path.
    """
    if isinstance(key, re.Pattern):
        return key.search(name) is not None
    return _text(key) == name or (isinstance(key, str) and _fullmatch(key, name))


def nearest(key: Any, names: Iterable[str], role: str) -> str:
    """Returns the end of a message on a key that names nothing: the nearest name, and all names.

    Example:
      >>> nearest("dens", ["conv", "dense"], "layers")
      "The nearest is 'dense'; the layers are ['conv', 'dense']."
    """
    names = list(names)
    near = difflib.get_close_matches(_text(key), names, n=1, cutoff=0.0)
    return (
        f"The nearest is {near[0]!r}; the {role} are {names}." if near else f"There are no {role}."
    )


def _text(key: Any) -> str:
    """The key as a joined path or a pattern's text."""
    if isinstance(key, tuple):
        return "/".join(map(str, key)) or "params"
    return str(getattr(key, "pattern", key))


def _fullmatch(key: str, name: str) -> bool:
    try:
        return re.fullmatch(key, name) is not None
    except re.error:  # a path that is no pattern, or a slip: then it matches nothing
        return False


def is_prunable(leaf: Any) -> bool:
    """Whether a leaf can have a mask: a floating-point or complex array."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def find_nodes(tree: Any, kind: Any) -> list[tuple[KeyPath, Any]]:
    """All nodes of the NamedTuple `kind` in a pytree with their paths, nested ones included."""
    found: list[tuple[KeyPath, Any]] = []
    for path, node in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, kind)
    ):
        if isinstance(node, kind):
            found.append((path, node))
            for field, child in zip(node._fields, node, strict=True):
                found += [
                    ((*path, GetAttrKey(field), *below), inside)
                    for below, inside in find_nodes(child, kind)
                ]
    return found


def map_owned(
    fn: Callable[..., Any], params: chex.ArrayTree, state: chex.ArrayTree, *others: chex.ArrayTree
) -> chex.ArrayTree:
    """Maps `fn(owner, leaf, *other_leaves)` over an optimizer state.

    The owner of a state leaf is the leaf of `params` whose path its own path ends in (the longest
    such), or `None`. It may have another shape: factored second moments (adafactor) and histories
    (lbfgs) have owners, too.

    Args:
      fn: a function of leaves.
      params: tree with the parameters' paths.
      state: an optimizer state.
      *others: trees of its structure.

    Example:
      >>> map_owned(lambda owner, leaf: owner, {"w": 1.0}, [{"count": 0, "mu": {"w": 2.0}}])
      [{'count': None, 'mu': {'w': 1.0}}]
    """
    none_too = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: leaf is None)
    by_path = {_strip(path): leaf for path, leaf in none_too}  # a dense leaf owns its state, too

    def owner(path: KeyPath) -> Any:
        suffixes = (path[start:] for start in range(len(path) + 1))
        return next((by_path[suffix] for suffix in suffixes if suffix in by_path), None)

    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: fn(owner(_strip(path)), *leaves), state, *others
    )


def replace_where(
    state: chex.ArrayTree, fresh: chex.ArrayTree, chosen: chex.ArrayTree
) -> chex.ArrayTree:
    """Takes entries of `fresh` into an optimizer state where the parameters' `chosen` is true.

    Leaves without an owner (see `map_owned`) or of another shape, and those that are neither
    floating nor complex, stay.

    Args:
      state: an optimizer state.
      fresh: a state of the same structure, as `init` returns it.
      chosen: bool arrays by parameter path; `None` keeps all state of that parameter.
    """

    def replace(where: Any, old: Any, new: Any) -> Any:
        if where is None or jnp.shape(old) != jnp.shape(where) or not is_prunable(old):
            return old
        return jnp.where(where, new, old)

    return map_owned(replace, chosen, state, fresh)


def _strip(path: KeyPath) -> KeyPath:
    return path[:-1] if path and path[-1] == _VALUE else path


def _entry_name(entry: KeyEntry) -> str:
    match entry:
        case DictKey() | FlattenedIndexKey():
            return str(entry.key)
        case GetAttrKey():
            return entry.name
        case SequenceKey():
            return str(entry.idx)
    return str(entry)


def _listed(names: list[str], most: int = 8) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return (shown or "nothing") + (f" and {len(names) - most} more" if len(names) > most else "")
